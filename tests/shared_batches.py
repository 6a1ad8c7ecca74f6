"""Requests that wait at the same time share a batch, whatever door they came through."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.serving import RunningServer, wait_until


def answers_of_shared_batches(server: RunningServer, model: str, asks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Ask all of them, one row each, while the only engine rests, and return their answers once batches were shared.

    Nobody outside can see that the last of the requests has arrived. So the engine rests longer at each try.
    """
    engine = server.pids()["engine-0"]
    with server.connect() as client, ThreadPoolExecutor(len(asks)) as pool:

        def computed() -> tuple[int, int]:
            (found,) = (one for one in client.status()["models"] if one["name"] == model)
            return found["batches"], found["rows"]

        batches, rows = computed()
        for rest in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4):
            os.kill(engine, signal.SIGSTOP)
            try:
                coming = [pool.submit(ask) for ask in asks]
                time.sleep(rest)
            finally:
                os.kill(engine, signal.SIGCONT)
            answers = [one.result(60) for one in coming]
            rows += len(asks)
            wait_until(lambda all=rows: computed()[1] == all, 30, f"{rows} rows")
            if computed()[0] - batches <= len(asks) // 2:
                return answers
            batches = computed()[0]
    raise AssertionError(f"{len(asks)} requests at the same time never shared a batch")
