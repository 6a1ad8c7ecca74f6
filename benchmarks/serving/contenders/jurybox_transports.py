"""Jurybox, through each of its transports, with the client code that a user would write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import CROSSOVER, Case, Sample
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, Contender
from benchmarks.serving.contenders.http_ask import free_port
from jurybox.client import Rows, connect

_START = 120.0
_HELD = 4  # rows that a zero-copy client writes beforehand and sends in turn


class TransportAsk(Ask):
    """`model(row)` if a request is one row, else `model.infer(rows)`."""

    def __init__(self, case: Case, address: str, transport: str, model: str = "served") -> None:
        self._server = connect(address, transport=transport, timeout=REQUEST_TIMEOUT)
        self._model = self._server.model(model)
        self._infer = self._model if case.single else self._model.infer

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        outputs = self._infer(inputs)
        return list(outputs.values()) if isinstance(outputs, dict) else [outputs]

    def close(self) -> None:
        self._server.close()


class RowsAsk(Ask):
    """`rows.infer()` on rows of the arena in which the inputs lie already, as an environment writes them there."""

    def __init__(self, address: str, transport: str) -> None:
        self._server = connect(address, transport=transport, timeout=REQUEST_TIMEOUT)
        self._model = self._server.model("served")
        self._held: dict[int, Rows] = {}

    def prepare(self, samples: Sequence[Sample], clients: int) -> tuple[list[Sample], int]:
        chosen = list(samples[:_HELD])
        for sample in chosen:
            if id(sample.inputs) not in self._held:
                held = self._held[id(sample.inputs)] = self._model.rows(1)
                next(iter(held.inputs.values()))[0] = sample.inputs
        return chosen, 1

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        held = self._held[id(inputs)]
        outputs = list(held.outputs.values())
        for output in outputs:
            output.fill(np.nan)  # these rows are sent repeatedly: an old answer must not count as the new one
        held.infer()
        return outputs

    def close(self) -> None:
        self._server.close()


class Native(Contender):
    title = "Jurybox, shm transport"
    packages: ClassVar[tuple[str, ...]] = ("jurybox", "pyzmq")
    transport: ClassVar[str] = "shm"
    lane_requests: ClassVar[int] = 1
    export: ClassVar[bool] = False

    def start(self) -> None:
        case = self.case
        self._address = f"ipc://{self.folder}/engine"
        lane = self.lane_requests * case.rows
        server: dict[str, Any] = {
            "address": self._address, "http": "", "grpc": "", "devices": ["cpu"], "threads": 1, **self.settings(),
        }  # fmt: skip
        config = self.folder / "server.toml"
        lines = ["[server]", *_lines(server)]
        for name, served in self.models().items():
            model: dict[str, Any] = {
                "factory": "benchmarks.serving.factories:model", "max_batch": served.max_batch, "lane_rows": lane,
                "rows": max(self.clients * lane + lane, 2 * served.max_batch), "export": self.export,
            }  # fmt: skip
            lines += [f"[models.{name}]", *_lines(model), f'args = {{case = "{served.name}"}}']
        config.write_text("\n".join(lines))
        self._process = subprocess.Popen([sys.executable, "-m", "jurybox.server.cli", "serve", str(config)])
        with connect(self._address, transport=self.transport, timeout=_START) as server_:
            for name, served in self.models().items():
                rows = np.zeros((served.rows, *served.shape), served.dtype)
                server_.model(name, timeout=_START).infer(rows)

    def settings(self) -> dict[str, Any]:
        """More of [server]."""
        return {}

    def models(self) -> dict[str, Case]:
        """The served models, by name."""
        return {"served": self.case}

    def endpoint(self, index: int) -> str:
        return self._address

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return TransportAsk(case, endpoint, cls.transport)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20.0)


class NativeExported(Native):
    """The module's operations without its Python code; the image model loops over its rows and cannot be exported."""

    title = "Jurybox, shm transport, export = true"
    cases = ("vector", "vector64")
    export = True


class Zmq(Native):
    title = "Jurybox, ZeroMQ transport"
    transport = "zmq"


class NativeSizes(Native):
    """All sizes of a policy at one server, for crossover.py."""

    def models(self) -> dict[str, Case]:
        return CROSSOVER

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return TransportAsk(case, endpoint, cls.transport, case.name)


class Tcp(Native):
    """Through the relay, as from another host, over the loopback interface and without keys."""

    title = "Jurybox, tcp://"
    door: ClassVar[str] = "tcp"

    def settings(self) -> dict[str, Any]:
        self._port = free_port()
        return {self.door: f"127.0.0.1:{self._port}"}

    def endpoint(self, index: int) -> str:
        return f"{self.door}://127.0.0.1:{self._port}"

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return TransportAsk(case, endpoint, "auto")


class Grpc(Tcp):
    """Through the gateway, by this project's own client."""

    title = "Jurybox, gRPC, our grpc:// client"
    door = "grpc"
    most_clients = 64
    why_most = "not run: see the other client of gRPC"


class NativeRows(Native):
    title = "Jurybox, shm transport, rows written in place"
    cases = ("image",)
    lane_requests = _HELD

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return RowsAsk(endpoint, cls.transport)


class ZmqRows(NativeRows):
    title = "Jurybox, ZeroMQ transport, rows written in place"
    transport = "zmq"


def _lines(settings: dict[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and lists are TOML's too.
    return [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
