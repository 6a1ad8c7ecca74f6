"""A supervisor whose loop a test runs by hand, with children that are no processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jurybox.processes import ControlPipe
from jurybox.protocol.spec import TensorSpec, plain_specs
from jurybox.server.logs import LEVELS, Log
from jurybox.server.settings.config import Configuration
from jurybox.server.supervisor.children import Child
from jurybox.server.supervisor.control import Events
from jurybox.server.supervisor.models import HeldModel
from jurybox.server.supervisor.supervisor import Supervisor

MODEL = {"factory": "tests.models:affine", "rows": 32}
VECTOR = plain_specs({"x": TensorSpec("float32", (4,))})
WARM_UP = {"seconds": 0.5, "shapes": [], "graphs": 0}


class Process:
    """What `spawn` returns for a child: it ends when it is told to, and the test holds its end of the control pipe."""

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        self.pipe, self._end = ControlPipe(ours.detach()), ControlPipe(theirs.detach())
        self._end._socket.settimeout(30.0)
        self.module, self.pid = module, 0
        self.status: int | None = None
        self.stops = True  # when it is asked to
        self._heard: list[dict[str, Any]] = []

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.ends(-signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None and self.stops and "stop" in [order["kind"] for order in self._read()]:
            self.ends(0)
        if self.status is None:
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return self.status

    def ends(self, status: int) -> None:
        if self.status is None:
            self._read()
            self.status = status
            self._end.close()

    def tells(self, kind: str, **fields: Any) -> None:
        self._end.send(kind, **fields)

    def heard(self) -> list[dict[str, Any]]:
        """Its orders since the last call, the first of which configures it."""
        orders, self._heard = self._read(), []
        return orders

    def kinds(self) -> list[str]:
        return [order["kind"] for order in self.heard()]

    def _read(self) -> list[dict[str, Any]]:
        while self.status is None and (order := self._end.receive(0)) is not None:
            self._heard.append(order)
        return self._heard


class Server:
    """A supervisor whose loop the test runs by hand, with engines and services that are no processes."""

    def __init__(self, folder: Path, models: dict[str, dict[str, object]], **server: object) -> None:
        self.spawned: list[Process] = []
        self.lines: list[dict[str, Any]] = []
        self.folder, self.closed_already = folder, False
        given = {"address": f"ipc://{folder}/engine", "http": "", "grpc": "", "standby": False, **server}
        configuration = Configuration.model_validate({"server": given, "models": models})
        self._signals, self.kernel = socket.socketpair()
        self._signals.setblocking(False)
        self.stream = (folder / "log").open("w")
        log = Log("supervisor", LEVELS["debug"], str, self.stream, lambda line: self.lines.append({**line}))
        self.supervisor = Supervisor(configuration, self._signals, log, Events())
        self.supervisor._memory_kills = SimpleNamespace(known=True, look=lambda: "")  # type: ignore[assignment]

    def spawn(self, module: str) -> tuple[Process, ControlPipe]:
        self.spawned.append(Process(module))
        return self.spawned[-1], self.spawned[-1].pipe

    @property
    def children(self) -> list[Child]:
        return self.supervisor._children()

    @property
    def models(self) -> dict[str, HeldModel]:
        return {held.name: held for held in self.supervisor._models}

    def process(self, role: str = "engine-0") -> Process:
        """The newest process of a child."""
        process: Any = self.child(role)._process
        assert isinstance(process, Process)
        return process

    def child(self, role: str = "engine-0") -> Child:
        (child,) = [child for child in self.children if child.role == role]
        return child

    def exit(self) -> int | None:
        return self.supervisor._exit

    def closed(self) -> bool:
        """Whether its engines have been told to drain."""
        return self.supervisor._control.closed

    def start(self) -> None:
        for child in self.children:
            self.supervisor._start(child)

    def turn(self) -> None:
        """Hear what children, clients and the kernel have sent."""
        self.supervisor._listen(0.0)

    def tick(self) -> float:
        now = time.monotonic()
        self.supervisor._tick(now)
        return now

    def tells(self, kind: str, role: str = "engine-0", **fields: Any) -> None:
        self.process(role).tells(kind, **fields)
        self.turn()

    def loads(self, name: str = "m", role: str = "engine-0", spec: object = VECTOR, **more: Any) -> None:
        """An engine has loaded a model, which it does not serve yet."""
        held, load = self.models[name], self.models[name].loads[int(role[-1])]
        fields = {"inputs": spec, "outputs": spec, "state": [], "digest": "d", "weights": [], **more}
        self.tells("loaded", role, model=held.index, load=load, **fields)

    def readies(self, name: str = "m", role: str = "engine-0") -> None:
        held, load = self.models[name], self.models[name].loads[int(role[-1])]
        self.tells("ready", role, model=held.index, load=load, arena=held.arena_number, warm_up=WARM_UP)

    def serves(self) -> None:
        """All children serve all models, and the server says so."""
        self.start()
        for child in self.children:
            if not child.role.startswith("engine"):
                self.tells("ready", child.role)
                continue
            self.tells("serving", child.role)
            for name in self.models:
                self.loads(name, child.role)
                self.readies(name, child.role)
        self.supervisor._announce(None, late=False)
        assert self.supervisor._announced
        self.forget()

    def forget(self) -> None:
        """What was sent and logged until now."""
        self.lines.clear()
        for process in self.spawned:
            process.heard()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    def dies(self, status: int, role: str = "engine-0", *, served: float = 0.0) -> dict[str, Any]:
        """End a child that has served for so many seconds; return the line that says so."""
        child = self.child(role)
        child.started_at -= served
        child.served_at -= served
        self.process(role).ends(status)
        self.lines.clear()
        self.turn()
        (line,) = self.logged("child died")
        return line

    def restarts(self, role: str = "engine-0") -> None:
        """A child that died is started when that is due, and serves."""
        if not self.child(role).alive:
            self.supervisor._start(self.child(role))
        self.tells("serving" if role.startswith("engine") else "ready", role)


def drains(world: Server) -> None:
    world.kernel.send(b"\x0f")
    world.turn()
