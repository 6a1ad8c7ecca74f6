"""Episodes of CybORG itself, played again: with its luck, our simulator shows, pays and knows the same at every step.

Recorded with ``python -m benchmarks.cage.original --episodes 5 --seed 3 --record``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jurybox.studies.workflow.cage.network import Networks, RedName

EPISODES = Path(__file__).parent / "data" / "original_episodes.npz"


class Luck:
    """Returns recorded values in place of random numbers."""

    def __init__(self, first: np.ndarray) -> None:
        self.next = first

    def random(self, shape: Any) -> np.ndarray:
        return self.next.reshape(shape)


@pytest.mark.parametrize("red", ["B_line", "Meander"])
def test_every_step_of_the_originals_episodes_is_the_same_here(red: RedName) -> None:
    with np.load(EPISODES) as recorded:
        mine = recorded["red"] == red
        entry, actions, luck = (recorded[name][mine] for name in ("entry", "actions", "luck"))
        observations = np.unpackbits(recorded["observations"][mine], axis=-1)[:, :, :52]
        rewards, truth = recorded["rewards"][mine], recorded["truth"][mine]
    assert len(actions) >= 20
    networks = Networks(len(actions), red, quirk=True)
    networks.random = Luck(entry)  # type: ignore[assignment]
    networks.reset(np.ones(len(actions), bool))
    for step in range(actions.shape[1]):
        networks.random.next = luck[:, step].T.astype(float)  # type: ignore[attr-defined]
        paid = networks.step(actions[:, step].astype(int))
        where = f"after step {step}, episodes"
        differ = (networks.belief.reshape(len(actions), -1) != observations[:, step]).any(1)
        assert not differ.any(), f"observations {where} {np.flatnonzero(differ)}"
        assert (np.round(paid * 10) == rewards[:, step]).all(), f"rewards {where}"
        assert (networks.true_state() == truth[:, step]).all(), f"truth {where}"
