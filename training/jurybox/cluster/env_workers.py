"""Env workers as Ray actors: each holds some of a training's environments, and is called once for all of them.

They are spread over the machines; those on the learner's machine are called over a socket (`local_calls`). Ray restarts
one that dies, with new environments: its caller gets `LOST`, and handles the episodes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from jurybox.cluster.local_calls import NEW, RAISED, VALUE, Answer, CallConnection, CallServer
from jurybox.cluster.vector_env import LOST
from jurybox.protocol.errors import Timeout
from jurybox.protocol.forks import Closing
from jurybox.protocol.locks import seconds
from jurybox.training import interrupts
from jurybox.training.vector.worker import WorkerFailed, worker_error

_DEATHS = 3  # deaths of a worker without a finished call in between, before the run fails
_INTERRUPT_SECONDS = 0.5  # seconds between two checks for an interrupt
_RETRY_SECONDS = 0.2
_START_SECONDS = 120.0  # to place a worker and to create its object
_STOP = 2.0  # seconds that workers get to close their environments


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources of one worker, as Ray counts them."""

    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call in flight: its worker, the worker's incarnation, and the deadline."""

    worker: int
    life: int
    until: float
    answer: Any  # Ray's reference, or the number of a call over the connection


class WorkerActor:
    """One worker: `begin` creates its object, `do` calls a method."""

    def __init__(self, path: list[str], environment: dict[str, str], make: bytes) -> None:
        sys.path += [each for each in path if each not in sys.path and Path(each).exists()]
        os.environ.update(environment)
        self._make = make
        self._held: Any = None
        self._call_server: CallServer | None = None

    def begin(self) -> Answer:
        """Create the object; returns the node, and the name of the socket there."""
        held, self._held = self._held, None
        try:
            if held is not None:
                held.close()
            self._held = cloudpickle.loads(self._make)()  # from the process that started this one
        except Exception as error:  # noqa: BLE001 (the learner raises it)
            return RAISED, str(worker_error(error))
        if (cv2 := sys.modules.get("cv2")) is not None:
            cv2.setNumThreads(0)
        self._call_server = self._call_server or CallServer(self.do)
        return VALUE, (ray.get_runtime_context().get_node_id(), self._call_server.name)

    def do(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Call a method of the object; a restarted process has none yet."""
        if self._held is None:
            return NEW, None
        try:
            return VALUE, getattr(self._held, method)(*arguments)
        except Exception as error:  # noqa: BLE001 (the learner raises it)
            return RAISED, str(worker_error(error))

    def end(self) -> None:
        """Close the object."""
        held, self._held = self._held, None
        if held is not None:
            held.close()


class EnvWorkers(Closing):
    """All workers of a training. Close them, or use them in a ``with``.

    Args:
        makers: for each worker, a function that creates its object, which has methods and `close`. Called in the
            worker (cloudpickle).
        environment: environment variables that workers get.
        timeout: seconds to wait for an answer; then the worker counts as dead.

    Attributes:
        restarts: workers replaced so far.

    Raises:
        WorkerFailed: a worker's object could not be created.
        Timeout: Ray had no resources for a worker, or its object was not created in time.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], Any]],
        needs: Needs | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._needs = needs or Needs()
        self._timeout = seconds(timeout)
        self._configs = [(list(sys.path), dict(environment or {}), cloudpickle.dumps(make)) for make in makers]
        self._lives = [0] * len(makers)
        self._deaths = [0] * len(makers)
        self._connections: dict[int, CallConnection] = {}  # to workers of this machine
        self._node = ray.get_runtime_context().get_node_id()
        self.restarts = 0
        self._actors = [self._new(worker) for worker in range(len(makers))]
        try:
            begun = [actor.begin.remote() for actor in self._actors]
            for worker, answer in enumerate(begun):
                self._await_start(worker, answer, time.monotonic() + _START_SECONDS)
        except BaseException:
            self.close()
            raise

    def life(self, worker: int) -> int:
        """Return how often the worker was replaced."""
        return self._lives[worker]

    def ask(self, worker: int, method: str, *arguments: Any) -> PendingCall:
        """Begin a call; several may be in flight; they run in order."""
        connection = self._connections.get(worker)
        answer = connection.ask(method, arguments) if connection else self._actors[worker].do.remote(method, arguments)
        return PendingCall(worker, self._lives[worker], time.monotonic() + self._timeout, answer)

    def answer(self, call: PendingCall) -> Any:
        """Wait for the result; `LOST` if the worker was replaced since.

        Raises:
            WorkerFailed: the method raised, or the worker died several times without finishing a call.
        """
        worker = call.worker
        if call.life != self._lives[worker]:
            return LOST
        connection = self._connections.get(worker)
        try:
            kind, value = _wait(call.answer, call.until, connection)
        except GetTimeoutError:
            ray.kill(self._actors[worker], no_restart=False)  # Ray restarts it
            kind = NEW
        except (RayActorError, EOFError, OSError):
            kind = NEW
        if kind == NEW:
            self._replace(worker)
            return LOST
        self._deaths[worker] = 0
        if kind == RAISED:
            raise WorkerFailed(f"env worker {worker}: {value}")
        return value

    def close(self) -> None:
        """End the workers; they get two seconds to close."""
        with interrupts.held():
            actors, self._actors = self._actors, []
            if actors:
                ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_STOP)
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            for actor in actors:
                ray.kill(actor)

    def _replace(self, worker: int) -> None:
        """Wait until Ray has restarted it, and let it create its object."""
        if (connection := self._connections.pop(worker, None)) is not None:
            connection.close()
        self._lives[worker] += 1
        self._deaths[worker] += 1
        self.restarts += 1
        if self._deaths[worker] > _DEATHS:
            raise WorkerFailed(
                f"env worker {worker} ended, {_DEATHS} times in a row before it had done anything: given up"
            )
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                return self._await_start(worker, self._actors[worker].begin.remote(), until)
            except ActorDiedError:
                self._actors[worker] = self._new(worker)
            except RayActorError:  # Ray is restarting it
                if time.monotonic() > until:
                    raise
            if time.monotonic() > until:
                raise Timeout(
                    f"env worker {worker} died again and again for {_START_SECONDS:g} s before it could begin: "
                    "the log of its node says why"
                )
            interrupts.check()
            time.sleep(_RETRY_SECONDS)

    def _await_start(self, worker: int, answer: Any, until: float) -> None:
        try:
            kind, value = _wait(answer, until)
        except GetTimeoutError as error:
            needed = {"CPU": self._needs.cpus, **self._needs.resources}
            resources: Any = ray.cluster_resources  # Ray has no types for it
            raise Timeout(
                f"env worker {worker} of {len(self._configs)} has not begun within {_START_SECONDS:g} s: "
                f"no machine has {needed} free for it (in all there are {resources()}), or its "
                "environments take long. Use fewer workers, or add machines"
            ) from error
        if kind == RAISED:
            raise WorkerFailed(f"env worker {worker}: {value}")
        node, name = value
        if node == self._node:
            with suppress(OSError):
                self._connections[worker] = CallConnection(name)

    def _new(self, worker: int) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self._needs.cpus,
            "resources": dict(self._needs.resources),
            "max_restarts": -1,
            "scheduling_strategy": "SPREAD",
        }
        return ray.remote(WorkerActor).options(**options).remote(*self._configs[worker])


def _wait(answer: Any, until: float, connection: CallConnection | None = None) -> Answer:
    while True:
        slice_end = min(until, time.monotonic() + _INTERRUPT_SECONDS)
        try:
            left = max(0.0, slice_end - time.monotonic())
            found: Answer | None = connection.answer(answer, slice_end) if connection else ray.get(answer, timeout=left)
        except GetTimeoutError:
            found = None
        if found is not None:
            return found
        interrupts.check()
        if time.monotonic() >= until:
            raise GetTimeoutError("no answer in time")
