"""The networks of a search, where its launcher wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from jurybox.training.recipes.env_spread import Spread
from jurybox.training.search import environments
from jurybox.training.search.environments import Parts
from jurybox.training.search.settings import WorkflowTraining


@contextmanager
def networks(settings: WorkflowTraining, spread: Spread | None) -> Iterator[tuple[Parts, Parts, Callable[[], int]]]:
    """Those of training and of evaluation, for the length of the block, and what counts replaced env workers.

    Args:
        spread: the cluster that holds them; None: this machine.
    """
    with ExitStack() as held:
        if spread is None:
            made = []
            for stream in range(environments.STREAMS):
                parts = environments.make(settings, stream)
                made.append(parts)
                for part in parts:
                    held.callback(part.close)
            yield made[0], made[1], lambda: 0
            return
        from jurybox.training.cluster.vector_env import Groups, SpreadVectorEnv

        halves = environments.halves(settings)
        # Our simulator is so fast that one worker keeps up with the learner.
        wanted = settings.workers or (1 if settings.env == "cage" else spread.cores)
        count = min(wanted, *map(len, halves))
        rows = [environments.share_out(half, count) for half in halves]
        # Of every part of both streams each worker has some rows.
        makers = [
            [environments.maker(settings, half[worker]) for _ in range(environments.STREAMS) for half in rows]
            for worker in range(count)
        ]
        workers = held.enter_context(spread.workers([partial(Groups, each) for each in makers]))
        streams: list[Parts] = []
        for stream in range(environments.STREAMS):
            parts = tuple(
                SpreadVectorEnv(workers, stream * len(halves) + index, [*map(len, rows[index])])
                for index in range(len(halves))
            )
            for part, half in zip(parts, halves, strict=True):
                environments.reset(part, settings, stream, half)
            streams.append(parts)
        yield streams[0], streams[1], lambda: workers.restarts
