"""Mirrored batches of the game."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.algorithms.batches import batch

from jurybox.studies.hockey.game import MIRROR_ACTION, MIRROR_OBSERVATION
from jurybox.studies.hockey.mirror import mirrored


@pytest.mark.parametrize(("observations", "actions"), [(18, 4), (16, 3)])
def test_every_second_row_of_a_batch_is_mirrored(observations: int, actions: int) -> None:
    rows = batch(0, 7, observations, actions)
    before = {name: each.clone() for name, each in rows.items()}
    found = mirrored(rows)
    assert found.keys() == before.keys()
    for name, factors in (
        ("observation", MIRROR_OBSERVATION), ("next_observation", MIRROR_OBSERVATION), ("action", MIRROR_ACTION)
    ):  # fmt: skip
        assert torch.equal(found[name][1::2], before[name][1::2])
        expected = before[name][::2].numpy() * factors[: before[name].shape[1]]
        np.testing.assert_array_equal(found[name][::2].numpy(), expected)
    assert torch.equal(found["reward"], before["reward"]) and torch.equal(found["discount"], before["discount"])
