"""Batches made ready on a GPU, and a replay that lives in its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from jurybox.training.replay import Episodes, Field, Replay, Windows

pytestmark = pytest.mark.gpu

FIELDS = {
    "x": Field((3,)), "planes": Field((12, 8, 8), stored="bits"), "n": Field((), "int64"), "reward": Field(),
    "terminated": Field((), "bool"),
}  # fmt: skip


@pytest.fixture
def replay() -> Iterator[Replay]:
    options = {"episodes": Episodes(), "prioritized": True, "seed": 1}
    with Replay.create(f"gpu-{os.getpid()}", 4096, FIELDS, **options) as made:
        numbers = np.arange(4096)
        planes = (numbers[:, None, None, None] >> np.arange(12)[:, None, None] & 1) * np.ones((12, 8, 8))
        made.extend(
            x=np.repeat(numbers[:, None], 3, 1),
            planes=planes,
            n=numbers,
            reward=numbers % 7,
            terminated=numbers % 50 == 49,
        )
        yield made


def check(tensors: dict[str, torch.Tensor]) -> None:
    assert all(tensor.is_cuda for tensor in tensors.values())
    assert (tensors["x"] == tensors["n"][:, None]).all().item()
    bits = (tensors["planes"][:, :, 0, 0].long() << torch.arange(12, device="cuda")).sum(1)
    assert torch.equal(bits, tensors["n"])


def test_prefetched_batches_are_already_there(replay: Replay) -> None:
    with replay.prefetch(256, device="cuda") as batches:
        for _ in range(100):
            check(next(batches))


def test_a_dropped_batch_is_not_overwritten_before_the_stream_that_reads_it_is_through(replay: Replay) -> None:
    stream, wrong = torch.cuda.Stream(), torch.zeros((), dtype=torch.int64, device="cuda")
    with replay.prefetch(256, device="cuda") as batches, torch.cuda.stream(stream):
        for _ in range(30):
            tensors = next(batches)
            drawn = tensors["n"].clone()
            stream.synchronize()
            torch.cuda._sleep(20_000_000)  # some ten milliseconds, in which the thread copies the next batches
            wrong += (tensors["n"] != drawn).sum()
            del tensors
        stream.synchronize()
    assert wrong.item() == 0


def test_a_pinned_batch_is_page_locked(replay: Replay) -> None:
    batch = replay.sample(8, replay.batch(8, pinned=True))
    assert all(tensor.is_pinned() for tensor in batch.torch().values())


def test_a_resident_replay_samples_the_same_rows_as_the_host(replay: Replay) -> None:
    resident = replay.resident("cuda", seed=2)
    assert resident.refresh() == 4096
    for _ in range(20):
        check(resident.sample(256))
    windows = Windows(n_step=3, gamma=0.9, next=("x",))
    host = replay.sample(512, windows=windows)
    there = resident.rows.columns(torch.from_numpy(host.indices).cuda(), windows, resident.taken)
    for name in host:
        np.testing.assert_allclose(there[name].cpu().numpy(), host[name], rtol=1e-6)
    resident.update_priorities(torch.arange(4096), torch.where(torch.arange(4096) == 7, 1e4, 1e-4))
    assert (resident.sample(256)["n"] == 7).float().mean().item() > 0.9


def test_rows_come_to_the_gpu_while_they_are_drawn(replay: Replay) -> None:
    resident = replay.resident("cuda", capacity=10_000)
    for round_ in range(20):
        numbers = np.arange(500) + round_ * 500
        replay.extend(
            x=np.repeat(numbers[:, None], 3, 1),
            planes=np.zeros((500, 12, 8, 8)),
            n=numbers,
            reward=numbers,
            terminated=numbers < 0,
        )
        resident.refresh()
        rows = resident.sample(256)
        assert (rows["x"] == rows["n"][:, None]).all().item()
    assert (resident.taken, resident.missed) == (4096 + 19 * 500, 500)
