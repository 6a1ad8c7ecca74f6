"""The shm transport: tickets and answers through shared memory, on the server's host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from jurybox import native
from jurybox.client.transports.transport import LOOK_AFTER, Answer, InFlight, RowPlace
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import sibling
from jurybox.protocol.shm_rings import ShmRings
from jurybox.protocol.spec import VARIABLE

if TYPE_CHECKING:
    import asyncio

_TURN = 0.002  # seconds to wait for one engine while others may answer as well
_WATCH = 0.5  # seconds between two looks of the watching thread whether it is still wanted


class ShmTransport:
    """A lane's side of the engines' rings, each attached when its engine is first chosen, anew when it has restarted.

    Args:
        spin_us: how long to spin for an answer before sleeping, three times as long while nobody else asks this
            engine; what is useful below that it finds out itself.
    """

    def __init__(self, scoreboard: Scoreboard, lane: int, lease: int, spin_us: int) -> None:
        self._engines = scoreboard.engines
        self._scoreboard_name = scoreboard.segment.name
        self._lane = lane
        self._lease = lease
        self._spin_ns = spin_us * 1000
        self._rings: dict[int, _Attached] = {}
        self._unsent: list[InFlight] = []
        self._watching: _Watcher | None = None

    def send(self, ticket: InFlight) -> None:
        """As Transport.send. What a full ring does not take is sent when answers have made room."""
        rings = self._attached(ticket.engine, ticket.incarnation)
        if rings is None:
            return
        if not rings.client.submit(
            ticket.sequence,
            ticket.first,
            ticket.rows,
            ticket.submitted,
            ticket.deadline,
            ticket.version,
            ticket.incarnation,
        ):
            self._unsent.append(ticket)
        if self._watching is not None:
            self._watching.look()

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """As Transport.exchange."""
        rings = self._attached(ticket.engine, ticket.incarnation)
        if rings is None:
            return None
        answer = rings.client.exchange(
            ticket.sequence,
            ticket.first,
            ticket.rows,
            ticket.submitted,
            ticket.deadline,
            ticket.version,
            ticket.incarnation,
            timeout,
        )
        return None if answer is None else Answer(ticket.sequence, *answer, ticket.incarnation)

    def caller(self, place: RowPlace) -> native.ShmRingsCaller | None:
        """As Transport.caller."""
        if (rings := self._attached(place.number, place.incarnation)) is None:
            return None
        spec = place.spec
        return native.ShmRingsCaller(
            rings.client,
            place.input,
            place.outputs,
            place.engine,
            place.first,
            place.rows,
            place.incarnation,
            LOOK_AFTER,
            place.extents,
            () if spec is None or place.extents is None else spec.shape or (VARIABLE,),  # a byte string has one length
            1 if spec is None else spec.numpy_dtype.itemsize,
        )

    def receive(self, timeout: float) -> Sequence[Answer]:
        """As Transport.receive."""
        if len(self._rings) == 1:
            (only,) = self._rings.values()
            busy = [only]
        else:
            busy = [rings for rings in self._rings.values() if rings.client.in_flight]
        if len(busy) > 1:
            answers = [answer for rings in busy for answer in rings.receive(0.0)]
            if not answers and timeout > 0:
                answers = busy[0].receive(min(timeout, _TURN))
        elif busy:
            answers = busy[0].receive(timeout)
        else:
            return ()
        if answers and self._unsent:
            waiting, self._unsent = self._unsent, []
            for ticket in waiting:  # one that an exception keeps from being sent is missed, and sent, by the lane
                self.send(ticket)
        return answers

    def holds(self, ticket: InFlight) -> bool:
        """As Transport.holds."""
        rings = self._rings.get(ticket.engine)
        if rings is None or rings.incarnation != ticket.incarnation:
            return False
        return rings.client.holds(ticket.sequence) or ticket in self._unsent

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Transport.watch: a thread sleeps on the rings in the loop's stead."""
        if self._watching is not None:
            self._watching.stop()
        self._watching = _Watcher(self._rings, loop, arrived)

    def close(self) -> None:
        """As Transport.close."""
        if self._watching is not None:
            self._watching.stop()
        self.forked()

    def forked(self) -> None:
        """As Transport.forked. The watching thread is the parent's."""
        self._watching = None
        rings, self._rings = self._rings, {}
        for attached in rings.values():
            attached.memory.close()

    def _attached(self, engine: int, incarnation: int) -> _Attached | None:
        rings = self._rings.get(engine)
        if rings is not None and rings.incarnation == incarnation:
            return rings
        try:
            return self._open(engine, incarnation)
        except SharedMemoryError:
            return None  # the engine is being replaced just now; the lane sees that on the scoreboard and sends again

    def _open(self, engine: int, incarnation: int) -> _Attached:
        if (earlier := self._rings.pop(engine, None)) is not None:
            earlier.memory.close()
            self._unsent = [ticket for ticket in self._unsent if ticket.engine != engine]
        memory = ShmRings.attach(sibling(self._scoreboard_name, "rings", int(self._engines["rings"][engine])))
        client = native.ShmRingsClient(
            memory.segment.array(np.uint8, (native.RINGS_BYTES,)), self._lane, self._lease, memory.pipe, self._spin_ns
        )
        rings = self._rings[engine] = _Attached(memory, client, incarnation)
        return rings


class _Attached:
    """One engine's rings in one life of the engine."""

    def __init__(self, memory: ShmRings, client: native.ShmRingsClient, incarnation: int) -> None:
        self.memory = memory
        self.client = client
        self.incarnation = incarnation

    def receive(self, timeout: float) -> list[Answer]:
        return [Answer(*answer, self.incarnation) for answer in self.client.receive(timeout)]


class _Watcher:
    """Sleeps on the rings in a thread and tells an event loop when answers have come."""

    def __init__(
        self, rings: dict[int, _Attached], loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]
    ) -> None:
        self._rings = rings
        self._loop = loop
        self._arrived = arrived
        self._stopped = False
        # Queues and not events: a KeyboardInterrupt in the midst of an event's method leaves its lock taken for ever.
        self._news: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._run, name="jurybox-answers", daemon=True).start()

    def look(self) -> None:
        """A ticket was sent: there is something to wait for."""
        if self._news.empty():
            self._news.put(None)

    def stop(self) -> None:
        self._stopped = True
        self._news.put(None)

    def _run(self) -> None:
        while not self._stopped:
            with contextlib.suppress(Empty):
                self._news.get(timeout=_WATCH)
            while busy := [rings for rings in list(self._rings.values()) if rings.client.in_flight]:
                came = [rings.client.wait(_TURN if len(busy) > 1 else _WATCH) for rings in busy]
                if self._stopped or self._loop.is_closed():
                    return
                if any(came):
                    taken: SimpleQueue[None] = SimpleQueue()
                    with contextlib.suppress(RuntimeError):  # the loop was closed just now
                        self._loop.call_soon_threadsafe(self._take, taken)
                    with contextlib.suppress(Empty):
                        taken.get(timeout=_WATCH)

    def _take(self, taken: SimpleQueue[None]) -> None:
        self._arrived()
        taken.put(None)
