"""A contender: a server to start, and its client.

A contender lives in a host process (host.py) run by the interpreter of its environment; its clients are children of
that host. So this module and everything that contenders import at their top needs numpy alone.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import Case, Sample

REQUEST_TIMEOUT = 20.0  # seconds; a client without an answer fails, and its contender with it


class Ask(ABC):
    """A client: constructed in its own process, called once a request."""

    def prepare(self, samples: Sequence[Sample], clients: int) -> tuple[list[Sample], int]:
        """Return the samples of the next windows, and how many requests one call answers.

        Only contenders for the bare model override it: their one process stands for `clients`.
        """
        return list(samples), 1

    @abstractmethod
    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """Ask for one sample: (*row shape) in cases of one row a request, else (rows, *row shape).

        Returns:
            Every output in the case's order, of any shape that flattens to the expected values.
        """

    def close(self) -> None:  # noqa: B027  optional
        """Let go of sockets and memory."""


class Contender(ABC):
    """One way to serve. Constructed in the host.

    Args:
        case: model and requests.
        clients: the most clients.
        folder: a private one for config, logs and sockets; short enough for socket paths.
    """

    title: ClassVar[str]  # for the tables
    peer: ClassVar[str] = ""  # the environment it needs, of peers.install.PEERS; ours without
    packages: ClassVar[tuple[str, ...]] = ()  # whose versions are reported
    cases: ClassVar[tuple[str, ...]] = ("vector", "vector64", "image")
    most_clients: ClassVar[int] = 1024
    why_most: ClassVar[str] = ""  # why no more than most_clients
    restarts: ClassVar[bool] = False  # started anew for every number of clients
    one_process: ClassVar[bool] = False  # one process stands for all clients

    def __init__(self, case: Case, clients: int, folder: Path) -> None:
        self.case = case
        self.clients = clients
        self.folder = folder

    def start(self) -> None:  # noqa: B027  some have no server
        """Start the server and return when it answers."""

    def endpoint(self, index: int) -> Any:
        """The server's address for client `index`; picklable for a spawned process."""
        return None

    @classmethod
    @abstractmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        """Called in the client's process."""

    def stop(self) -> None:  # noqa: B027
        """Stop the server. Its remaining processes are killed afterwards."""


# In the order of the tables. Name -> module of contenders/ and class.
CONTENDERS = {
    "limit": ("limit", "Limit"),
    "limit-best": ("limit", "LimitBest"),
    "own-copy": ("own_copy", "OwnCopy"),
    "own-copy-exported": ("own_copy", "OwnCopyExported"),
    "plain-zmq": ("plain_zmq", "PlainZmq"),
    "plain-zmq-tcp": ("plain_zmq", "PlainZmqTcp"),
    "jurybox-native": ("jurybox_transports", "Native"),
    "jurybox-native-exported": ("jurybox_transports", "NativeExported"),
    "jurybox-zmq": ("jurybox_transports", "Zmq"),
    "jurybox-native-rows": ("jurybox_transports", "NativeRows"),
    "jurybox-zmq-rows": ("jurybox_transports", "ZmqRows"),
    "jurybox-tcp": ("jurybox_transports", "Tcp"),
    "jurybox-http": ("jurybox_gateway", "GatewayHttp"),
    "jurybox-grpc": ("jurybox_gateway", "GatewayGrpc"),
    "jurybox-grpc-client": ("jurybox_transports", "Grpc"),
    "jurybox-grpc-shm": ("jurybox_gateway", "GatewayShm"),
    "queue-pool": ("queue_pool", "QueuePool"),
    "mosec": ("mosec", "Mosec"),
    "triton-shm": ("triton", "TritonShm"),
    "triton-grpc": ("triton", "TritonGrpc"),
    "torchrl": ("torchrl", "TorchRl"),
    "litserve": ("litserve", "LitServe"),
    "ray": ("ray_serve", "RayServe"),
}
# In crossover.py alone.
_ELSEWHERE = {"jurybox-sizes": ("jurybox_transports", "NativeSizes")}
YARDSTICK = "plain-zmq"


def contender(name: str) -> type[Contender]:
    """The class of a contender."""
    module, attribute = CONTENDERS[name] if name in CONTENDERS else _ELSEWHERE[name]
    found: type[Contender] = getattr(importlib.import_module(f"benchmarks.serving.contenders.{module}"), attribute)
    return found


def batch_of(case: Case, inputs: NDArray[Any]) -> NDArray[Any]:
    """A sample with its leading axis of rows."""
    return inputs[None] if case.single else inputs


def unpacked(case: Case, data: bytes | memoryview) -> list[NDArray[np.float32]]:
    """The outputs in a body of packed floats."""
    return case.split(np.frombuffer(data, np.float32).reshape(-1, case.output_width))
