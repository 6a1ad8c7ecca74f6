"""Engines in a cluster: a `jurybox` server as a named Ray actor, which is placed again when its machine dies.

``start("judge", {"photo": {"factory": "..."}})`` from the driver, then from any Ray task or actor
``connect("judge")``. Processes without Ray find it in a registry (`endpoints`) that a launcher keeps on their
machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from jurybox.client import Server
from jurybox.cluster import endpoints
from jurybox.cluster.actors import LogTail
from jurybox.cluster.connection import NAMESPACE, failure_of
from jurybox.cluster.endpoints import Endpoint, EngineSpec, Feeds, Models, check_name, locks, this_machine
from jurybox.cluster.feeder import Feeder
from jurybox.cluster.host import LocalNames
from jurybox.cluster.traffic import HostView, Traffic
from jurybox.protocol.errors import ServerGone
from jurybox.protocol.locks import seconds
from jurybox.training.runtime.local_server import LocalServer

START = 180.0  # seconds: for Ray to place it, and for the server to import torch there
_RETRY_SECONDS = 0.2
_STOP = 30.0
_CALLERS = 32  # calls that can wait for its start at the same time
_LOG_TAIL = 64 << 10
_started: dict[str, Any] = {}  # keeps the handles: Ray ends an actor without one


class EngineNotStarted(RuntimeError):
    """Ray had no room for it, or its server did not start; the message has the end of its log."""


class EngineActor:
    """Owns a server on its node, a child that ends with it. Ray restarts it elsewhere when its node dies.

    Methods are called from several threads. One permanent thread starts the server, because the server ends with it.
    """

    def __init__(self, spec: EngineSpec, path: Sequence[str]) -> None:
        self._spec = spec
        known = [*sys.path, *(each for each in path if each not in sys.path and Path(each).exists())]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, known))  # the models' code is the driver's
        self._parent = ThreadPoolExecutor(1, thread_name_prefix="engine-parent")
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="jurybox-engine-")
        self._log = LogTail(Path(self._folder.name) / "server.log", _LOG_TAIL)
        self._server: LocalServer | None = None
        self._endpoint: Endpoint | None = None
        self._feeder: Feeder | None = None

    def where(self) -> str:
        """The node of this actor."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def endpoint(self) -> Endpoint:
        """Return the endpoint; start the server if it is not running.

        Raises:
            ServerNotStarted: it did not come up.
        """
        with self._lock:
            if self._endpoint is None or self._server is None or not self._server.alive:
                self._end()
                self._endpoint = self._parent.submit(self._start).result()
            return self._endpoint

    def feed(self, scoreboard: str, folders: Mapping[str, str]) -> None:
        """Serve the run whose scoreboard on this machine is `scoreboard`, with its folders on this machine."""
        endpoint = self.endpoint()
        with self._lock:
            if self._feeder is not None:
                self._feeder.close()
            self._feeder = Feeder(endpoint.ipc, scoreboard, self._spec.feeds, folders)

    def poll(self) -> tuple[str, bytes, str]:
        """Return the endpoint's incarnation ("" without a server), new log lines, and the feeder's final error."""
        lives = self._endpoint is not None and self._server is not None and self._server.alive
        failed = self._feeder.failed if self._feeder is not None else ""
        return self._endpoint.life if lives and self._endpoint else "", self._log.new(), failed

    def stop(self) -> None:
        """Stop the server; the last call."""
        with self._lock:
            self._parent.submit(self._end).result()
        self._folder.cleanup()

    def _start(self) -> Endpoint:
        host = ray.util.get_node_ip_address()
        server: dict[str, Any] = {"devices": "auto" if self._spec.gpus else ["cpu"], **self._spec.server}
        token, authority, scheme = None, "", "grpc"
        if not ipaddress.ip_address(host).is_loopback:
            (token, authority, settings), scheme = locks(Path(self._folder.name), host), "grpcs"
            server |= settings
        server = {"grpc": f"[{host}]:0" if ":" in host else f"{host}:0", **server}
        made = LocalServer(self._spec.models, self._log.path, http=False, threads=self._spec.threads, server=server)
        self._server = made
        self._log.rewind()
        made.start()
        made.wait()
        with made.connect() as client:
            listens = client.status()["server"]["grpc"]
        life = f"{time.time_ns()}-{secrets.token_hex(2)}"
        return Endpoint(self._spec.name, life, this_machine(), made.address, f"{scheme}://{listens}", token, authority)

    def _end(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        if self._server is not None:
            self._server.stop()
        self._feeder = self._server = self._endpoint = None


def make(spec: EngineSpec) -> Any:
    """Create the actor of an engine without waiting; it ends with its last handle, and with this process."""
    options: dict[str, Any] = {
        "name": _actor_name(spec.name),
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": spec.cpus,
        "num_gpus": spec.gpus,
        "resources": dict(spec.resources),
        "max_restarts": -1,
        "max_concurrency": _CALLERS,
    }
    return ray.remote(EngineActor).options(**options).remote(spec, [path or str(Path.cwd()) for path in sys.path])


def start(
    name: str,
    models: Models,
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    threads: int = 1,
    server: Mapping[str, Any] | None = None,
    timeout: float = START,
) -> Endpoint:
    """Start an engine in the cluster, and wait until it serves; an existing one of that name is used.

    Args:
        models: as under [models.NAME] of a server's configuration; factories must be importable on its node.
        num_cpus, num_gpus, resources: what Ray reserves for it.
        threads: number of threads for torch. server: further settings of its [server].

    Raises:
        EngineNotStarted: no node has these resources, or the server did not come up in time.
    """
    spec = EngineSpec(name, models, Feeds(), num_cpus, num_gpus, resources or {}, threads, server or {})
    _started[name] = make(spec)
    return endpoint(name, timeout)


def stop(name: str) -> None:
    """Stop an engine and free its resources, if it exists."""
    _started.pop(name, None)
    try:
        actor = ray.get_actor(_actor_name(name), NAMESPACE)
    except ValueError:
        return
    with suppress(RayError):  # a server that does not answer ends with its actor
        ray.get(actor.stop.remote(), timeout=_STOP)
    ray.kill(actor)


def endpoint(name: str, timeout: float = START) -> Endpoint:
    """The current endpoint of an engine; waits for one that is starting or moving.

    Raises:
        EngineNotStarted: it could not be started; ServerGone: it was not found within `timeout` seconds.
    """
    until, why = time.monotonic() + seconds(timeout), ""
    while (left := until - time.monotonic()) > 0:
        try:
            actor = ray.get_actor(_actor_name(name), NAMESPACE)
            found: Endpoint = ray.get(actor.endpoint.remote(), timeout=left)
            return found
        except RayTaskError as error:
            raise EngineNotStarted(f"engine {name!r} could not be started: {error.cause}") from error
        except ValueError:
            why = "there is none of that name: engines.start(name, ...) makes one"
        except ActorDiedError as error:
            why = f"it has ended: {error}"
        except GetTimeoutError:
            why = "it waits for a node with what it needs, or its server is still starting: see 'ray status'"
        except RayActorError as error:  # Ray is restarting it
            why = f"it is being moved: {error}"
        time.sleep(_RETRY_SECONDS)
    raise ServerGone(f"engine {name!r} was not found within {timeout:.0f} s: {why or 'Ray did not answer'}")


def connect(name: str, timeout: float = START, alive: Callable[[], None] = lambda: None) -> Server:
    """Connect to an engine; waits for one that is starting or moving. As `endpoints.reach`."""

    until = time.monotonic() + seconds(timeout)

    def find() -> Endpoint | None:
        try:
            return endpoint(name, max(_RETRY_SECONDS, until - time.monotonic()))
        except ServerGone:
            return None

    return endpoints.reach(name, find, timeout, alive)


def _actor_name(name: str) -> str:
    return f"jurybox-engine-{check_name(name)}"


_POLL_SECONDS = 0.5  # seconds between two checks of an engine

_BACK_OFF = 2.0  # seconds to wait after a failed start
_ENGINE_STOP = 15.0


class EnginePlacement:
    """Places and watches one engine of a run. Methods belong to the thread of the traffic's loop.

    Args:
        registry: folder of endpoints on this machine; a folder of the run, so every machine has it.
        log: receives the log of its servers.
        notify: receives status lines for the user.
    """

    def __init__(
        self, spec: EngineSpec, traffic: Traffic, registry: Path, log: Path, notify: Callable[[str], None]
    ) -> None:
        self._spec, self._traffic, self._registry, self._log, self._notify = spec, traffic, registry, log, notify
        self._actor: Any = None
        self._shown = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        endpoints.clear(registry, spec.name)
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop the engine."""
        self._task.cancel()
        if self._actor is not None:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.stop.remote(), _ENGINE_STOP)
            ray.kill(self._actor)
        endpoints.clear(self._registry, self._spec.name)

    async def _run(self) -> None:
        life = ""
        while True:
            try:
                self._actor = make(self._spec)
                node = await self._actor.where.remote()
                member = await self._traffic.member(node)
                endpoint: Endpoint = await self._actor.endpoint.remote()
                names: LocalNames = await member.call("local_names")
                await self._actor.feed.remote(member.scoreboard, names.folders)
                if endpoint.life != life:
                    life = endpoint.life
                    self._shown += 1
                    endpoints.show(self._registry, self._shown, endpoint)
                    self._notify(f"engine {endpoint.name} serves on node {node[:8]}, for others at {endpoint.grpc}")
                await self._watch(endpoint, member)
            except RayError as error:
                if (why := failure_of(error)) is not None:
                    self._notify(f"engine {self._spec.name}: {why}")
                    await asyncio.sleep(_BACK_OFF)
                else:
                    await asyncio.sleep(_RETRY_SECONDS)  # Ray restarts it, on another node if necessary

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notify(f"engine {self._spec.name} is kept no longer: {type(error).__name__}: {error}")

    async def _watch(self, endpoint: Endpoint, member: HostView) -> None:
        """Watch until the endpoint changes."""
        while not member.lost:
            life, log, failed = await self._actor.poll.remote()
            with self._log.open("ab") as file:
                file.write(log)
            if failed:
                self._notify(f"engine {endpoint.name} is fed no longer ({failed}); begun again")
            if failed or life != endpoint.life:
                return
            await asyncio.sleep(_POLL_SECONDS)
