from __future__ import annotations

import os
import signal
import subprocess
import sys
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


ENDS = """
import builtins, threading, time
from jurybox.training.replay import Field, RateLimiter, Replay

name, fields = {name!r}, {{"x": Field(())}}

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # other threads run, while the interpreter ends

def add(replay):
    while True:
        replay.add(x=1.0)

kind = {kind!r}
if kind == "writer":
    replay = Replay.create(name, 4, fields, full="block", timeout=60.0)
    threading.Thread(target=add, args=(replay,), daemon=True).start()
    while replay.counters.added < 4:
        time.sleep(0.01)
else:
    replay = Replay.create(name, 100, fields, limiter=RateLimiter(1.0, 10, 5.0), timeout=60.0)
    if kind == "prefetch":
        for _ in range(12):
            replay.add(x=1.0)
        batches = replay.prefetch(4)
        next(batches)
    else:
        threading.Thread(target=replay.sample, args=(4,), daemon=True).start()
time.sleep(0.2)  # so that it waits
replay.unlink()
builtins.late = Late()
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", ["writer", "sampler", "prefetch"])
def test_a_program_that_ends_while_a_thread_waits_is_not_aborted(kind: str) -> None:
    program = ENDS.format(name=f"test-{os.getpid()}-ends-{kind}", kind=kind)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_signal_handler_ends_a_wait_by_its_exception(make) -> None:
    replay = make(4, full="block", timeout=60.0)
    replay.extend(x=np.zeros((4, 3)), n=np.arange(4))

    def handle(*_: object) -> None:
        raise InterruptedError("by a handler")

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        with pytest.raises(InterruptedError, match="by a handler"):
            timer.start()
            replay.add(x=np.zeros(3), n=4)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_limiter_that_blocks_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="neither side"):
        RateLimiter(samples_per_insert=8, error=4)


def test_the_bounds_of_a_limiter_lie_around_its_first_rows() -> None:
    assert RateLimiter(2.0, least_rows=10, error=5.0).bounds == (15.0, 25.0)
    assert RateLimiter(0.5, least_rows=1, error=1.0).bounds == (-0.5, 1.5)
    assert RateLimiter(8.0, error=8.0).error == 8.0, "just enough for one insert"
    for wrong in (
        {"samples_per_insert": 0.0},
        {"samples_per_insert": -1.0},
        {"samples_per_insert": 1.0, "least_rows": 0},
    ):
        with pytest.raises(ValueError, match="samples_per_insert > 0 and least_rows >= 1"):
            RateLimiter(**wrong)
    for ratio, error in ((0.5, 0.9), (8.0, 7.9)):
        with pytest.raises(ValueError, match="neither side"):
            RateLimiter(ratio, error=error)


@pytest.mark.parametrize(("least", "error"), [(1, 1.0), (5, 3.0)])
def test_a_limiter_stops_both_sides_exactly_at_its_bounds(make, least, error) -> None:
    replay = make(1000, limiter=RateLimiter(1.0, least_rows=least, error=error))
    replay.parts[0].ring.timeout = 0.05
    low, high = replay.layout.limiter.bounds
    row = {"x": np.zeros(3, np.float32), "n": 0}
    with pytest.raises(Timeout):
        for _ in range(1000):
            replay.add(**row)
    assert replay.added == high, "one more would be beyond"
    sampled = 0
    with pytest.raises(Timeout):
        for _ in range(1000):
            replay.sample(1)
            sampled += 1
    assert high - sampled == max(low, 0) or high - sampled == low
