"""Client and engine in one process, without sockets: for tests, debugging, and as the upper bound in benchmarks.

A request runs turns of the engine in the caller's thread.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.lane import Lane
from jurybox.client.model import Model
from jurybox.client.transports.transport import Transport
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.errors import ModelNotFound, Refused
from jurybox.protocol.forks import Closing
from jurybox.protocol.locks import NESTED
from jurybox.protocol.scoreboard import NORMAL, EngineState, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.wire import PACK_TICKET, TICKET
from jurybox.server.engine.core import Engine
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.engine.served import Served
from jurybox.server.models import ServedModel
from jurybox.server.supervisor.leases import Leases

if TYPE_CHECKING:
    import asyncio

__all__ = ["InprocServer"]

_INCARNATION = 1


class InprocTransport(Transport):
    """Both sides of a transport: the client's calls queue tickets that the engine collects."""

    number = 0
    slow = False

    def __init__(self, lane: int, lease: int, turn: Callable[[], bool]) -> None:
        self.lane = lane
        self._lease = lease
        self._turn = turn
        self._tickets: deque[bytes] = deque()
        self._answers: list[Answer] = []
        self._unanswered: set[int] = set()

    def collect(self, out: NDArray[Any]) -> int:
        """Collect tickets; see the engine's `Transport.collect`."""
        n = min(len(self._tickets), len(out))
        for i in range(n):
            out[i] = np.frombuffer(self._tickets.popleft(), TICKET)[0]
        return n

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        """Store answers; see the engine's `Transport.reply`."""
        self._answers.extend(Answer(n, code, message, version, _INCARNATION) for n in tickets["sequence"].tolist())

    def send(self, ticket: InFlight) -> None:
        t = ticket
        self._unanswered.add(t.sequence)
        self._tickets.append(
            PACK_TICKET.pack(
                t.sequence, self._lease, t.deadline, t.submitted, self.lane, t.first, t.rows, 0, t.version, 0
            )
        )

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        self.send(ticket)
        for answer in self.receive(timeout):
            if answer.sequence == ticket.sequence:
                self.settled(answer)
                return answer
        return None

    def receive(self, timeout: float) -> Sequence[Answer]:
        """Run the engine until there is an answer, or for `timeout` seconds; return the answers."""
        until = time.monotonic() + timeout
        while not self._answers and (self._turn() or time.monotonic() < until):
            pass
        return list(self._answers)

    def settled(self, answer: Answer) -> None:
        with contextlib.suppress(ValueError):  # it is settled already
            self._answers.remove(answer)
        self._unanswered.discard(answer.sequence)

    def holds(self, ticket: InFlight) -> bool:
        return ticket.sequence in self._unanswered

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Do nothing: answers arrive in the caller's thread."""

    def close(self) -> None:
        """Do nothing: no resources are open."""

    def forked(self) -> None:
        """Do nothing: the child has its own copy of the engine's core."""


class InprocServer(Closing):
    """A server that runs in the caller's thread.

    Args:
        models: the models by name.
        max_batch: the maximum number of rows in a batch of each model.
        rows: the number of rows of each arena.
    """

    def __init__(self, models: Mapping[str, ServedModel], *, max_batch: int = 64, rows: int = 256) -> None:
        server_id = f"inproc{secrets.token_hex(4)}"
        self._owned = Scoreboard.create(segment_name(server_id, "scoreboard"), 1, time.time())
        self._scoreboard = Scoreboard.attach(self._owned.segment.name)
        self._arenas: dict[str, Arena] = {}
        self._turning = 0  # the thread that runs a turn
        self._index = {name: index for index, name in enumerate(models)}
        self._leases = Leases(self._owned, lambda lane: False, time.monotonic)
        self.engine = Engine(
            self._scoreboard, 0, [], pause=None, interruptible=True
        )  # pause=None: all clients are in the caller's thread, so no request can arrive while it waits
        for name, model in models.items():
            spec = model.spec(name)
            arena = Arena.create(segment_name(server_id, "arena", self._index[name]), ArenaLayout(spec, rows))
            served: Served = (
                OpenServed(name, model, arena.columns, max_batch, lanes=self._scoreboard.lanes)
                if spec.open
                else Served(name, model, arena.inputs, arena.outputs, max_batch, columns=arena.columns)
            )
            self.engine.install(self._index[name], served)
            self._arenas[name] = arena
        record = self._scoreboard.engines[0:1]
        record["incarnation"], record["state"] = _INCARNATION, EngineState.SERVING

    def model(self, name: str, *, rows: int = 16, priority: int = NORMAL) -> Model:
        """Return a model; see the client's `Server.model`."""
        if name not in self._index:
            raise ModelNotFound(f"no model {name!r} here; there are: {', '.join(self._index)}")
        return Model(name, lambda n, _: self._lease(name, n, priority), rows, default_timeout=60.0)

    def close(self) -> None:
        """Free the memory."""
        for arena in self._arenas.values():
            arena.close()
        self._scoreboard.close()
        self._owned.close()

    def _turn(self) -> bool:
        if self._turning == (thread := threading.get_ident()):
            raise Refused(f"the engine of this process computes in this thread: {NESTED}")
        self._turning = thread
        try:
            with torch.inference_mode():
                return self.engine.turn()
        finally:
            self._turning = 0

    def _lease(self, name: str, rows: int, priority: int) -> tuple[Lane, ModelSpec, int]:
        arena = self._arenas[name]
        grant = self._leases.grant(self._index[name], rows, arena.rows, priority=priority)
        transport = InprocTransport(grant.lane, grant.lease, self._turn)
        self.engine.add_transport(transport)

        def give_back() -> None:
            self.engine.remove_transport(transport)
            self._leases.release(grant.lane, grant.lease, ())

        view = Arena.attach(arena.segment.name, arena.layout)
        slot = self.engine.slots[self._index[name]]
        return (
            Lane(name, self._scoreboard, view, transport, grant.lease, grant.first, rows, give_back),
            slot.served.spec,
            slot.queue.max_batch,
        )
