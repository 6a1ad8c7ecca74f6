"""The cost of a publication over gRPC on one host, without a network.

A server, the weights service in its own process, and this process as the learner; beside it a local publication.
Figures are medians in milliseconds.

    python -m benchmarks.weights.remote --megabytes 1 10 100 --out benchmarks/weights/results
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import torch
from benchmarks.weights.publication import main
from tests.integration.test_remote_weights import gateway
from tests.serving import serving

from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

TENSORS = 16


class Heavy(torch.nn.Module):
    """So many MiB of weights, hardly any of them used."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.randn(megabytes * 2**18 // TENSORS) for _ in range(TENSORS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts[0][0]


def weights(megabytes: int) -> ServedModel:
    spec = {"x": TensorSpec("float32", (1,))}
    return ServedModel(Heavy(megabytes), spec, {"y": TensorSpec("float32", (1,))})


def taken(rounds: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times[1:]) * 1e3, 2)


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    factory = {"factory": "benchmarks.weights.remote:weights", "args": {"megabytes": megabytes}}
    state = {name: tensor.detach() for name, tensor in weights(megabytes).module.state_dict().items()}
    ms: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), {"m": {**factory, "publish": "double_buffer"}}) as server,
        server.connect() as client,
        gateway(server.address) as (_, channel),
    ):
        with client.publisher("m") as local:
            ms["local"] = taken(rounds, lambda: local.publish(state))
        kinds: dict[str, dict[str, bool]] = {"exact": {}, "bfloat16": {"bfloat16": True}}
        for kind, options in {**kinds, "nothing changed": {"changed_only": True}}.items():
            ms[kind] = publish(channel, options, state, rounds)
        with RemoteWeightsReader(channel, "m") as reader:
            ms["read"] = taken(rounds, reader.read)
    return {"megabytes": megabytes, "rounds": rounds, "ms": ms}


def publish(channel: grpc.Channel, options: dict[str, bool], state: dict[str, Any], rounds: int) -> float:
    while True:
        try:
            publisher = RemotePublisher(channel, "m", **options)
            break
        except Exception:  # noqa: BLE001  the place of the one before is about to be free
            time.sleep(0.1)
    with publisher:
        return taken(rounds, lambda: publisher.publish(state))


if __name__ == "__main__":
    main("remote", __doc__, measure, rounds=11)
