from __future__ import annotations

import threading

import numpy as np
import pytest

from jurybox.protocol.errors import Timeout
from jurybox.training.replay import RateLimiter, Replay


def test_neither_side_runs_away(make) -> None:
    replay = make(1000, limiter=RateLimiter(samples_per_insert=4, least_rows=10, error=20), timeout=0.02)
    row = {"x": np.zeros(3, np.float32), "n": 0}
    with pytest.raises(Timeout, match="rate limiter"):
        replay.sample(1)
    added = 0
    with pytest.raises(Timeout, match="rate limiter waits"):
        for _ in range(100):
            added += replay.add(**row)
    assert added == 15  # (15 * 4) - 0 = 4 * 10 + 20
    sampled = 0
    with pytest.raises(Timeout):
        for _ in range(100):
            replay.sample(1)
            sampled += 1
    assert sampled == 40  # 60 - 40 = 4 * 10 - 20


def test_each_side_waits_for_the_other(make) -> None:
    replay = make(1000, limiter=RateLimiter(samples_per_insert=2, least_rows=1, error=8), timeout=20)
    other = Replay.attach(replay.name, timeout=20)

    def write() -> None:
        for i in range(490):
            other.add(x=np.zeros(3, np.float32), n=i)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    batch = replay.batch(2)
    for _ in range(490):
        replay.sample(2, batch)
        assert abs(replay.added * 2 - replay.counters.sampled - 2) <= 12
    writer.join(20)
    assert not writer.is_alive()
    other.close()


def test_a_long_extend_goes_in_as_samples_come(make) -> None:
    replay = make(1000, limiter=RateLimiter(samples_per_insert=1, least_rows=1, error=10), timeout=0.05)
    with pytest.raises(Timeout, match="11 of 100 rows"):
        replay.extend(x=np.zeros((100, 3), np.float32), n=np.arange(100))
    assert len(replay) == 11


def test_a_limiter_that_blocks_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="neither side"):
        RateLimiter(samples_per_insert=8, error=4)
