"""The networks of a search: our own simulator, or the real CybORG; in this process, its workers or a cluster.

They are split: there is one split, or two halves, of which one steps while the policy acts for the other. A split has
one part, a VectorEnv over its rows, or on a cluster one for each worker's. A network of our simulator depends on the
run's seed and its row, not on parts or workers; CybORG draws from the global generators of its process.
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
from jurybox.studies.workflow.networks import started
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training.vector import ProcessVectorEnv

Part = VectorEnv[Any, Any, Any]
Splits = tuple[tuple[Part, ...], ...]
Maker = Callable[[], Part]

TRUTH = {"true_state": (np.int8, (13,))}
STREAMS = 2  # training, evaluation


@contextmanager
def networks(
    settings: WorkflowTraining, ray: Mapping[str, Any] | None = None, *, serial: bool = False, resumed_at: int = 0
) -> Iterator[tuple[Splits, Splits, Callable[[], int]]]:
    """Create the networks to defend, for training and for evaluation. Use it in a ``with`` statement.

    It yields both, and a function that returns the number of env workers that were replaced.

    Args:
        ray: of the cluster that the networks run on, to which this process is connected: its "cores", and the "needs"
            of each worker (see `launchers.Spread`); None: this machine.
        serial: run all of them in this process.
        resumed_at: env steps of the checkpoint that the run resumes from.
    """
    with ExitStack() as held:
        streams: list[Splits] = []
        if ray is None:
            for stream in range(STREAMS):
                streams.append(make(settings, stream, serial=serial, resumed_at=resumed_at))
                for (part,) in streams[-1]:
                    held.callback(part.close)
            processes = [part for splits in streams for (part,) in splits if isinstance(part, ProcessVectorEnv)]
            yield streams[0], streams[1], lambda: sum(each.restarts for each in processes)
            return
        from jurybox.cluster.env_workers import EnvWorkers, Needs
        from jurybox.cluster.vector_env import WorkerGroups, WorkerRows

        split = halves(settings)
        # Our simulator is fast enough for one worker to keep up with the learner.
        wanted = settings.workers or (1 if settings.env == "cage" else ray["cores"])
        count = min(wanted, *map(len, split))
        rows = [share_out(half, count) for half in split]
        # Each worker has some rows of every split of both streams.
        makers = [[maker(settings, half[worker]) for _ in range(STREAMS) for half in rows] for worker in range(count)]
        needs = None if ray["needs"] is None else Needs(**ray["needs"])
        workers = held.enter_context(EnvWorkers([partial(WorkerGroups, each) for each in makers], needs))
        for stream in range(STREAMS):
            made: list[tuple[Part, ...]] = []
            for group, half in enumerate(rows, stream * len(split)):
                made.append(tuple(WorkerRows(workers, worker, group, len(own)) for worker, own in enumerate(half)))
                reset(made[-1], settings, stream, half, resumed_at)
            streams.append(tuple(made))
        yield streams[0], streams[1], lambda: workers.restarts


def make(settings: WorkflowTraining, stream: int, *, serial: bool = False, resumed_at: int = 0) -> Splits:
    """Make `envs` networks on this machine, seeded from the run's seed and `stream`, a number for each use.

    Args:
        resumed_at: see `reset`.
    """
    made: list[Part] = []
    try:
        for rows in halves(settings):
            made.append(_local_part(settings, rows, serial))
            reset(made[-1:], settings, stream, [rows], resumed_at)
    except BaseException:
        for part in made:
            part.close()
        raise
    return tuple((part,) for part in made)


def halves(settings: WorkflowTraining) -> tuple[range, ...]:
    """Return the rows of the splits: all, or two halves."""
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


def reset(
    parts: Sequence[Part], settings: WorkflowTraining, stream: int, rows: Sequence[range], resumed_at: int = 0
) -> None:
    """Reset parts for the first time, with their seeds.

    Args:
        rows: of each part.
        resumed_at: env steps of the checkpoint that the run resumes from. CybORG's random state is not in it, so a
            resumed run gets another seed, or it would play the same episodes again.
    """
    numbers = (settings.seed, 77, stream, resumed_at) if resumed_at else (settings.seed, 77, stream)
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    # As Gymnasium derives the seeds of all rows from one.
    resets = [started(part, "reset", seed=seed + own.start) for part, own in zip(parts, rows, strict=True)]
    for result in resets:
        result()


def random_state(settings: WorkflowTraining, splits: Splits) -> dict[str, Any] | None:
    """Return the random state of our simulator, equal in all parts; None for CybORG, whose state cannot be saved."""
    if settings.env != "cage":
        return None
    state: dict[str, Any] = _call(splits[0][0], "random_state")
    return state


def restore_random_state(settings: WorkflowTraining, splits: Splits, state: dict[str, Any] | None) -> None:
    if state is not None and settings.env == "cage":
        for part in itertools.chain(*splits):
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
