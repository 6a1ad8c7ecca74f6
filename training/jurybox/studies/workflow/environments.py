"""The networks of a search: our own simulator, or the real CybORG; in this process, its workers or a cluster.

They are split into parts, each a VectorEnv over some of the rows: one part, or two halves, of which one steps while
the policy acts for the other. A network of our simulator depends on the run's seed and its row, not on parts or
workers; CybORG draws from the global generators of its process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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


@contextmanager
def networks(
    settings: WorkflowTraining, ray: Mapping[str, Any] | None = None, *, serial: bool = False, resumed_at: int = 0
) -> Iterator[tuple[Parts, Parts, Callable[[], int]]]:
    """Create the networks to defend, for training and for evaluation. Use it in a ``with`` statement.

    It yields both, and a function that returns the number of env workers that were replaced.

    Args:
        ray: of the cluster that the networks run on, to which this process is connected: its "cores", and the "needs"
            of each worker (see `launchers.Spread`); None: this machine.
        serial: run all of them in this process.
        resumed_at: env steps of the checkpoint that the run resumes from.
    """
    with ExitStack() as held:
        if ray is None:
            made = []
            for stream in range(STREAMS):
                parts = make(settings, stream, serial=serial, resumed_at=resumed_at)
                made.append(parts)
                for part in parts:
                    held.callback(part.close)
            processes = [part for parts in made for part in parts if isinstance(part, ProcessVectorEnv)]
            yield made[0], made[1], lambda: sum(each.restarts for each in processes)
            return
        from jurybox.cluster.env_workers import EnvWorkers, Needs
        from jurybox.cluster.vector_env import SpreadVectorEnv, WorkerGroups

        split = halves(settings)
        # Our simulator is fast enough for one worker to keep up with the learner.
        wanted = settings.workers or (1 if settings.env == "cage" else ray["cores"])
        count = min(wanted, *map(len, split))
        rows = [share_out(half, count) for half in split]
        # Each worker has some rows of every part of both streams.
        makers = [[maker(settings, half[worker]) for _ in range(STREAMS) for half in rows] for worker in range(count)]
        needs = None if ray["needs"] is None else Needs(**ray["needs"])
        workers = held.enter_context(EnvWorkers([partial(WorkerGroups, each) for each in makers], needs))
        streams: list[Parts] = []
        for stream in range(STREAMS):
            parts = tuple(
                SpreadVectorEnv(workers, stream * len(split) + index, [*map(len, rows[index])])
                for index in range(len(split))
            )
            for part, half in zip(parts, split, strict=True):
                reset(part, settings, stream, half, resumed_at)
            streams.append(parts)
        yield streams[0], streams[1], lambda: workers.restarts


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
