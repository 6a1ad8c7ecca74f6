"""The check before a training: an environment is played at random, by the adapter that the training has."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jurybox.processes.surroundings import kept
from jurybox.training.environments.adapter import Adapter, made_adapter
from jurybox.training.environments.making import EnvironmentPlace, EnvironmentUnusable
from jurybox.training.run_folder import audited
from jurybox.training.runtime.plan import load
from jurybox.training.spaces import MASK, ActionSpec, ContractBroken


def play_at_random(
    adapter: str,
    arguments: Mapping[str, Any],
    place: EnvironmentPlace,
    actions: Mapping[str, ActionSpec],
    steps: int,
    seed: int,
) -> None:
    """Play some steps in one environment, and set back what it changes in this process.

    Args:
        adapter, arguments: "package.module:callable" that makes an `Adapter`, and its arguments.
        actions: by agent, what it chooses.
        seed: of the episodes and of the actions.

    Raises:
        EnvironmentUnusable: it cannot be made, or breaks its interface, or raises something; the message says what came
            and what was expected.
    """
    try:
        with kept():
            made: Adapter = made_adapter(load(adapter), arguments, place.worker_index, [place.vector_index])
            try:
                _play(made, actions, steps, seed)
            finally:
                made.close()
    except EnvironmentUnusable:
        raise
    except ContractBroken as error:
        raise EnvironmentUnusable(str(error)) from error
    except (Exception, SystemExit) as error:
        raise EnvironmentUnusable(f"it raised {type(error).__name__}: {error} ({place_of(error)})") from error


def _play(adapter: Adapter, actions: Mapping[str, ActionSpec], steps: int, seed: int) -> None:
    rng, done = np.random.default_rng(seed), 0
    adapter.begin(0, int(rng.integers(2**31)))
    while done < steps:
        waiting = adapter.waiting()
        mask = waiting.observation.get(MASK)
        moved = adapter.step(actions[waiting.agent].sample(rng, 1, mask))
        for result in moved.results:
            audited(result.infos[0])
        done += moved.steps
        if moved.over and done < steps:
            adapter.begin(0, int(rng.integers(2**31)))


def place_of(error: BaseException) -> str:
    """Return the last line of code that an exception passed."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no line of Python"
