from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import Mode, WeightsChannel, WeightsLayout


@pytest.fixture
def name() -> str:
    return segment_name(f"test{uuid.uuid4().hex[:8]}", "weights")


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return {
        "layer.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "layer.bias": np.linspace(-1, 1, 3, dtype=np.float64),
        "steps": np.array(7, np.int64),
        "mask": np.array([True, False, True]),
        "nothing": np.zeros((0, 5), np.float16),
    }


@pytest.fixture
def make(name: str, arrays: dict[str, np.ndarray]) -> Iterator[Callable[..., WeightsChannel]]:
    made: list[WeightsChannel] = []

    def make_channel(source: dict | None = None, mode: Mode = "double_buffer", **more: int) -> WeightsChannel:
        channel = WeightsChannel.create(f"{name}{len(made)}", WeightsLayout.of(source or arrays), mode, **more)
        made.append(channel)
        return channel

    yield make_channel
    for channel in made:
        channel.close()
        assert not Path("/dev/shm", channel.name).exists()
