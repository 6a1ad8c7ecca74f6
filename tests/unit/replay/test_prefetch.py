from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from jurybox.protocol.errors import Timeout
from jurybox.training.replay import NotEnoughRows, RateLimiter


def filled(make, **options):
    replay = make(**options)
    replay.extend(x=np.repeat(np.arange(100, dtype=np.float32)[:, None], 3, 1), n=np.arange(100))
    return replay


def test_batches_come_ready_and_are_used_again(make) -> None:
    replay = filled(make)
    with replay.prefetch(8, depth=2) as batches:
        seen = {id(next(batches)) for _ in range(20)}
        batch = next(batches)
        held = batch["n"].copy()
        assert (batch["x"] == held[:, None]).all()
    assert len(seen) == 3
    assert replay.counters.sampled <= 8 * (21 + 3)


def test_a_batch_stays_the_callers_until_the_next(make) -> None:
    with filled(make).prefetch(8, depth=3) as batches:
        for _ in range(50):
            batch = next(batches)
            first = batch["n"].copy()
            for _ in range(100):
                pass
            assert (batch["n"] == first).all()


def test_on_a_device_tensors_are_the_callers_for_good(make) -> None:
    with filled(make, prioritized=True).prefetch(8, device="cpu", beta=0.5) as batches:
        kept = [next(batches) for _ in range(30)]
    for tensors in kept:
        assert isinstance(tensors["x"], torch.Tensor)
        assert (tensors["x"] == tensors["n"][:, None]).all()
        assert tensors["weights"].shape == (8,)


def test_errors_of_the_thread_are_raised_by_the_next_batch(make) -> None:
    with make().prefetch(8) as batches, pytest.raises(NotEnoughRows):
        next(batches)


@pytest.mark.parametrize("rows", [5, 65])  # fewer than a sample waits for; enough for some, then it waits for more
def test_close_ends_the_iteration_in_every_thread_also_while_a_sample_waits(make, rows) -> None:
    replay = make(limiter=RateLimiter(1.0, least_rows=50, error=20))
    replay.extend(x=np.zeros((rows, 3), np.float32), n=np.arange(rows))
    replay.parts[0].ring.timeout = 600.0
    batches = replay.prefetch(4)
    ended: list[str] = []

    def ask(name: str) -> None:
        for _ in batches:
            pass
        ended.append(name)

    waiting = threading.Thread(target=ask, args=("waited",), daemon=True)
    waiting.start()
    batches.close()
    waiting.join(20)
    later = threading.Thread(target=ask, args=("asked later",), daemon=True)
    later.start()
    later.join(20)
    assert ended == ["waited", "asked later"]


def test_a_sample_that_waits_too_long_is_a_time_out_of_the_next_batch(make) -> None:
    replay = make(limiter=RateLimiter(1.0, least_rows=50, error=20))
    with replay.prefetch(4, timeout=0.25) as batches, pytest.raises(Timeout, match="let no 4 rows be sampled"):
        next(batches)


def test_a_sample_that_waited_in_parts_draws_what_one_that_did_not_wait_draws(make) -> None:
    found = []
    for at_once in (True, False):
        replay = make(limiter=RateLimiter(1.0, least_rows=50, error=20))
        replay.seed(3)
        if not at_once:
            for _ in range(5):
                with pytest.raises(Timeout):
                    replay.sample(4, timeout=0.01)
        replay.extend(x=np.zeros((60, 3), np.float32), n=np.arange(60))
        found.append(replay.sample(16)["n"].tolist())
    assert found[0] == found[1]
