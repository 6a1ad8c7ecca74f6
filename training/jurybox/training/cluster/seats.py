"""What an env worker of a cluster holds for Stable-Baselines3: environments that answer SubprocVecEnv's commands.

Each has a thread of its own, so that one that waits for its juror lets the others render. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jurybox.training.recipes.worker_process import answered

Request = tuple[str, Any]  # command and its data, as SubprocVecEnv sends them


class Seats:
    """What one worker holds: environments that answer requests."""

    def __init__(self, makers: Sequence[Callable[[], Any]]) -> None:
        self._environments = [make() for make in makers]
        self._threads = ThreadPoolExecutor(len(makers), thread_name_prefix="environment")

    def answer(self, requests: dict[int, Request]) -> dict[int, Any]:
        """Answers by environment; a `WorkerFailed` where one raised."""
        under_way = {
            seat: self._threads.submit(answered, self._environments[seat], *request)
            for seat, request in requests.items()
        }
        return {seat: each.result() for seat, each in under_way.items()}

    def close(self) -> None:
        self._threads.shutdown()
        for environment in self._environments:
            environment.close()
