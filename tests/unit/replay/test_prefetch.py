from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

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


def test_after_close_the_next_batch_ends_the_iteration_in_every_thread(make) -> None:
    replay = make(limiter=RateLimiter(1.0, least_rows=50, error=10))  # which has too few rows: a request waits
    replay.extend(x=np.zeros((5, 3), np.float32), n=np.arange(5))
    replay.parts[0].ring.timeout = 60.0
    batches = replay.prefetch(4)
    ended: list[str] = []

    def ask(name: str) -> None:
        for _ in batches:
            pass
        ended.append(name)

    waiting = threading.Thread(target=ask, args=("waited",), daemon=True)
    waiting.start()
    replay.extend(x=np.zeros((60, 3), np.float32), n=np.arange(60))  # the sampler's own wait ends, or close would wait
    batches.close()
    waiting.join(20)
    later = threading.Thread(target=ask, args=("asked later",), daemon=True)
    later.start()
    later.join(20)
    assert ended == ["waited", "asked later"]
