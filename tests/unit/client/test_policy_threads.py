"""The thread of a policy of action chunks, and how long `begin` sleeps."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.chunks import AsyncChunkPolicy


def test_a_process_that_ends_waits_for_no_policy() -> None:
    before = set(threading.enumerate())
    with AsyncChunkPolicy(lambda request, timeout: np.zeros((1, 2))):
        (thread,) = set(threading.enumerate()) - before
        assert thread.daemon


class CountedPolicy(AsyncChunkPolicy):
    """Counts how often it looks for an answer."""

    looks = 0

    def _take(self) -> None:
        self.looks += 1
        if self.looks == 3:
            again.set()
        super()._take()


again = threading.Event()


def test_begin_sleeps_until_the_answer_is_there_instead_of_looking_for_it_again_and_again() -> None:
    def ask(request: dict[str, Any], timeout: float) -> NDArray[np.float64]:
        again.wait(0.1)
        return np.zeros((1, 2))

    again.clear()
    with CountedPolicy(ask) as policy:
        policy.begin({}, timeout=60)
        assert policy.looks == 2
