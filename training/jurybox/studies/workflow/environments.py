"""The networks of a search: our own simulator, or the real CybORG; in this process, its workers or a cluster.

They are split into parts, each a VectorEnv over some of the rows: one part, or two halves, of which one steps while
the policy acts for the other. A network of our simulator depends on the run's seed and its row, not on parts or
workers; CybORG draws from the global generators of its process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from jurybox.studies.workflow.cage import CageRows, CyborgEnv
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training.vector import ProcessVectorEnv

Part = VectorEnv[Any, Any, Any]
Parts = tuple[Part, ...]
Maker = Callable[[], Part]

TRUTH = {"true_state": (np.int8, (13,))}
STREAMS = 2  # training, evaluation


def make(settings: WorkflowTraining, stream: int, *, serial: bool = False, resumed_at: int = 0) -> Parts:
    """Make `envs` networks on this machine, seeded from the run's seed and `stream`, a number for each use.

    Args:
        resumed_at: see `reset`.
    """
    made: list[Part] = []
    try:
        for rows in halves(settings):
            made.append(_local_part(settings, rows, serial))
            reset(made[-1], settings, stream, rows, resumed_at)
    except BaseException:
        for part in made:
            part.close()
        raise
    return tuple(made)


def halves(settings: WorkflowTraining) -> tuple[range, ...]:
    """Return the rows of the parts: all, or two halves."""
    return share_out(range(settings.envs), 2 if settings.halves else 1)


def share_out(rows: range, among: int) -> tuple[range, ...]:
    """Split `rows` into `among` contiguous ranges of nearly equal length."""
    bounds = [rows.start + round(index * len(rows) / among) for index in range(among + 1)]
    return tuple(range(first, end) for first, end in itertools.pairwise(bounds))


def maker(settings: WorkflowTraining, rows: range) -> Maker:
    """Return a picklable function that makes these rows as one object, which steps them in turn."""
    if settings.env == "cage":
        return partial(
            CageRows,
            len(rows),
            settings.red,
            first=rows.start,
            of=settings.envs,
            masks=settings.use_masks,
            episode_length=settings.episode_length,
            quirk=settings.quirk,
            autoreset_mode="Disabled",
        )
    return partial(SyncVectorEnv, [_cyborg(settings)] * len(rows))


def reset(part: Part, settings: WorkflowTraining, stream: int, rows: range, resumed_at: int = 0) -> None:
    """Reset a part for the first time, with its seed.

    Args:
        resumed_at: env steps of the checkpoint that the run resumes from. CybORG's random state is not in it, so a
            resumed run gets another seed, or it would play the same episodes again.
    """
    numbers = (settings.seed, 77, stream, resumed_at) if resumed_at else (settings.seed, 77, stream)
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    part.reset(seed=seed + rows.start)  # as Gymnasium derives the seeds of all rows from one


def random_state(settings: WorkflowTraining, parts: Parts) -> dict[str, Any] | None:
    """Return the random state of our simulator, equal in all parts; None for CybORG, whose state cannot be saved."""
    if settings.env != "cage":
        return None
    state: dict[str, Any] = _call(parts[0], "random_state")
    return state


def restore_random_state(settings: WorkflowTraining, parts: Sequence[Part], state: dict[str, Any] | None) -> None:
    if state is not None and settings.env == "cage":
        for part in parts:
            _call(part, "restore_random_state", state)


def _call(part: Part, name: str, *arguments: Any) -> Any:
    if isinstance(part, CageRows):
        return getattr(part, name)(*arguments)
    everywhere: Callable[..., tuple[Any, ...]] = getattr(part, "call")  # noqa: B009 (Gymnasium's base class has none)
    return everywhere(name, *arguments)[0]


def _local_part(settings: WorkflowTraining, rows: range, serial: bool) -> Part:
    if serial or settings.env == "cage":
        return maker(settings, rows)()
    workers = settings.workers or len(os.sched_getaffinity(0))
    own = max(1, workers * len(rows) // settings.envs)
    return ProcessVectorEnv([_cyborg(settings)] * len(rows), workers=own, info_fields=TRUTH)


def _cyborg(settings: WorkflowTraining) -> Callable[[], CyborgEnv]:
    return partial(CyborgEnv, settings.red, episode_length=settings.episode_length)
