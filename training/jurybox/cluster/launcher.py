"""A launcher that has Ray place a plan's roles: on one machine, or on all of a cluster's."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from jurybox.cluster.actors import ProcessOutput, RolePlace
from jurybox.cluster.connection import connect, disconnect, failure_of
from jurybox.cluster.endpoints import REGISTRY, EngineSpec
from jurybox.cluster.engines import EnginePlacement
from jurybox.cluster.host import Host
from jurybox.cluster.traffic import HostView, Traffic
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.runtime.launching import RoleProcess, configuration
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.shared_resources import SharedResources

_LISTEN_SECONDS = 0.5
_RETRY_SECONDS = 0.2
_CLOSE_SECONDS = 30.0
_CLEANUP_SECONDS = 5.0  # for places to remove their files; a place on a lost node does not answer
_KILLED = -9
_T = TypeVar("_T")


class RayProcess:
    """A role's process in the cluster. Its messages are kept until the orchestrator reads them."""

    def __init__(self, launcher: RayLauncher, number: int, log: Path, evaluated: Path) -> None:
        self.number, self.log, self.evaluated = number, log, evaluated
        self.pid = 0
        self.lost = False
        self.status: int | None = None
        self.inbox: deque[dict[str, Any]] = deque()
        self.work: asyncio.Task[None] | None = None
        self._launcher = launcher

    @property
    def has_messages(self) -> bool:
        return bool(self.inbox) or self.status is not None

    def send(self, kind: str, **fields: Any) -> None:
        if self.status is not None:
            raise BrokenPipeError("the role's process has ended")
        self._launcher.send(self.number, kind, fields)

    def messages(self) -> Iterator[dict[str, Any]]:
        while self.inbox:
            message = self.inbox.popleft()
            if message["kind"] == "saved":
                state = message.pop("state")
                try:
                    Path(message["file"]).write_bytes(state)
                except OSError as error:  # a full disk
                    message = {**message, "kind": "unsaved", "error": str(error)}
            elif "kept" in message:
                message = self._store_evaluated(message)
            yield message
        if self.status is not None:
            raise EOFError("the role's process has ended")

    def _store_evaluated(self, message: dict[str, Any]) -> dict[str, Any]:
        """Store weights that were evaluated on another machine in a folder on this one."""
        files: dict[str, bytes] = message.pop("kept")
        try:
            folder = Checkpoints(self.evaluated).begin()
            for name, content in files.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            return {**message, "unkept": f"they could not be written here: {error}"}
        return {**message, "kept": str(folder)}

    def kill(self) -> None:
        self._launcher.kill(self)

    def end(self, timeout: float) -> int:
        return self._launcher.end_of(self, timeout)


class RayLauncher:
    """Roles as Ray actors. Use it in a ``with``, around `run`.

    Args:
        address: of the cluster ("auto": the one that runs on this machine); None: Ray on this machine alone, for as
            long as the block lasts.
    """

    _plan: Plan
    _shared: SharedResources
    _traffic: Traffic
    _thread: threading.Thread

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._changed = threading.Condition()
        self._places: dict[int, Any] = {}
        self._running: dict[int, RayProcess] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notices: deque[str] = deque()
        self._engines: list[tuple[EngineSpec, Path]] = []
        self._placements: list[EnginePlacement] = []

    def __enter__(self) -> RayLauncher:
        connect(self._address)
        return self

    def __exit__(self, *_: object) -> None:
        disconnect()

    def serve(self, spec: EngineSpec, log: Path) -> None:
        """Start an engine with the next run. The run's plan has the folder `REGISTRY`, where roles find it by name.

        Args:
            log: file on this machine for the log of its server.
        """
        self._engines.append((spec, log))

    def begin(self, plan: Plan, shared: SharedResources) -> None:
        self._plan, self._shared = plan, shared
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jurybox-cluster", daemon=True)
        self._thread.start()
        node = ray.get_runtime_context().get_node_id()

        async def begin() -> Traffic:
            traffic = Traffic(plan, Host(plan, shared), node, self._lost, self._notices.append)
            self._placements = [
                EnginePlacement(spec, traffic, Path(plan.folders[REGISTRY]), log, self._notices.append)
                for spec, log in self._engines
            ]
            return traffic

        self._traffic = self._call(begin(), 10.0)
        self._places = {number: self._place(number) for number in range(len(plan.roles))}

    def start(self, number: int, life: int, state: Path | None, log: Path, evaluated: Path) -> RoleProcess:
        process = RayProcess(self, number, log, evaluated)
        self._running[number] = process
        log.parent.mkdir(parents=True, exist_ok=True)
        saved = state.read_bytes() if state else None

        async def begin() -> None:
            process.work = asyncio.ensure_future(self._run_process(process, life, saved))

        self._call(begin(), 10.0)
        return process

    def wait(self, processes: Sequence[RoleProcess], timeout: float) -> Collection[RoleProcess]:
        own = [process for process in processes if isinstance(process, RayProcess)]
        with self._changed:
            self._changed.wait_for(lambda: any(process.has_messages for process in own), timeout)
        while self._notices and own:
            own[0].inbox.append({"kind": "notice", "text": self._notices.popleft()})
        return [process for process in own if process.has_messages]

    def settle(self, timeout: float) -> bool:
        try:
            self._call(self._traffic.settle(), timeout)
        except (TimeoutError, RayError):
            return False
        return True

    def save_replay(self, name: str, path: Path) -> None:
        try:
            content = self._call(self._traffic.replay_file(name), 600.0)
        except RayError as error:  # costs the checkpoint, as a full disk does; the roles' places notice it, too
            why = failure_of(error) or str(error)
            raise OSError(f"the machine that samples replay {name!r} did not send it: {why}") from error
        if content is None:
            self._shared.replay(name).save(path)
        else:
            path.write_bytes(content)

    def end(self) -> None:
        if self._loop is None:
            return
        try:
            if self._places:  # else it did not begin
                with suppress(TimeoutError, RayError):  # a place that does not answer ends with its actor
                    self._call(self._close(), _CLOSE_SECONDS)
                closed = [place.close.remote() for place in self._places.values()]
                ray.wait(closed, num_returns=len(closed), timeout=_CLEANUP_SECONDS)
            for place in self._places.values():
                ray.kill(place)
        finally:
            loop, self._loop, self._places = self._loop, None, {}
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(5.0)
            loop.close()

    def send(self, number: int, kind: str, fields: dict[str, Any]) -> None:
        """Send a role's process a message."""
        self._places[number].send.remote(kind, fields)

    def kill(self, process: RayProcess) -> None:
        """Kill a process on its machine; if it has no place yet, give it up."""
        if process.pid:
            self._places[process.number].kill.remote()
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._give_up, process)

    def end_of(self, process: RayProcess, timeout: float) -> int:
        """Wait for the end of a process, then kill it; if that fails, give it up."""
        for seconds in (timeout, 2.0):
            with self._changed:
                if self._changed.wait_for(lambda: process.status is not None, seconds):
                    break
            self.kill(process)
        else:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._give_up, process)
            # The place does not answer: Ray restarts it where possible.
            ray.kill(self._places[process.number], no_restart=False)
        if self._running.get(process.number) is process:
            del self._running[process.number]
        return _KILLED if process.status is None else process.status

    async def _run_process(self, process: RayProcess, life: int, state: bytes | None) -> None:
        """Run one process, from its placement to its end."""
        number, status, member = process.number, _KILLED, None
        try:
            node = await self._node_of(number)
            member = await self._traffic.member(node)
            names = await self._traffic.context(number, member)
            configured = configuration(self._plan, number, life, member.scoreboard, None, process.evaluated)
            configured |= {"replays": names.replays, "folders": names.folders}
            place = self._places[number]
            process.pid = await place.start.remote(configured, state)
            status = await self._listen(process, place)
            await self._traffic.leave(number, member)
        except RayError as error:
            if (why := failure_of(error)) is not None:
                status = self._fail(process, why, str(error))
            else:
                process.lost = True
                if member is not None:
                    member.roles.discard(number)
                    await self._check_member(member)
        except ValueError as error:
            status = self._fail(process, str(error))
        finally:
            if member is not None:
                member.roles.discard(number)
            self._ended(process, status)

    def _fail(self, process: RayProcess, why: str, log: str = "") -> int:
        """Report why a process cannot run, and kill it if it does; returns its status."""
        self._deliver(process, ProcessOutput(({"kind": "failed", "error": why},), f"{log or why}\n".encode(), None))
        if process.pid:
            self._places[process.number].kill.remote()
        return 1

    async def _listen(self, process: RayProcess, place: Any) -> int:
        while True:
            output: ProcessOutput = await place.listen.remote(_LISTEN_SECONDS)
            self._deliver(process, output)
            if output.status is not None:
                return output.status

    async def _node_of(self, number: int) -> str:
        """Return the node on which Ray has placed a role; wait for its resources."""
        while True:
            try:
                node: str = await self._places[number].where.remote()
                return node
            except ActorDiedError as error:
                self._places[number] = self._place(number)
                if failure_of(error) is not None:
                    raise
            except RayActorError:  # Ray is restarting it
                await asyncio.sleep(_RETRY_SECONDS)

    async def _check_member(self, member: HostView) -> None:
        """Handle the loss of a place, alone or with its machine."""
        if member is not self._traffic.own:
            try:
                await asyncio.wait_for(member.call("local_names"), 1.0)
            except (RayError, TimeoutError):
                self._traffic.handle_loss(member)

    def _deliver(self, process: RayProcess, output: ProcessOutput) -> None:
        if output.log:
            with process.log.open("ab") as log:
                log.write(output.log)
        if output.messages:
            with self._changed:
                process.inbox.extend(output.messages)
                self._changed.notify_all()

    def _ended(self, process: RayProcess, status: int) -> None:
        with self._changed:
            process.status = status
            self._changed.notify_all()

    def _lost(self, roles: set[int]) -> None:
        """Handle the loss of the host of these roles, which cannot run without it."""
        for number in roles:
            if number in self._running:
                self._places[number].kill.remote()

    def _give_up(self, process: RayProcess) -> None:
        if process.work is not None and not process.work.done():
            process.work.cancel()

    def _place(self, number: int) -> Any:
        spec = self._plan.roles[number]
        return (
            ray.remote(RolePlace)
            .options(
                num_cpus=spec.cpus,
                num_gpus=spec.gpus,
                resources=dict(spec.resources),
                max_restarts=-1,
                max_concurrency=4,
                name=f"{self._shared.scoreboard.segment.name}-{spec.name}-{os.urandom(2).hex()}",
            )
            .remote(self._plan, number)
        )

    async def _close(self) -> None:
        await asyncio.gather(*(placement.close() for placement in self._placements))
        self._placements, self._engines = [], []
        await self._traffic.close()

    def _call(self, work: Coroutine[Any, Any, _T], timeout: float) -> _T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
