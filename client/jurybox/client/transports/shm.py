"""The shm transport: tickets and answers through shared memory, on the server's host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jurybox import native
from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight
from jurybox.client.transports.transport import NotSent, RowPlace, Transport, Watching
from jurybox.protocol.errors import Busy, SharedMemoryError
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import sibling
from jurybox.protocol.shm_rings import ShmRings
from jurybox.protocol.threads import start_thread

if TYPE_CHECKING:
    import asyncio

_TURN = 0.002  # seconds to wait for one engine while others may answer as well
_WATCH = 0.5  # seconds between a watching thread's checks whether it should stop


class ShmTransport(Transport):
    """A lane's side of the engines' rings. Each is attached when its engine is first chosen, and again after a restart.

    Args:
        spin_us: maximum time to spin for an answer before sleeping, in microseconds; three times as long while no other
            client uses this engine. Below this limit the spinning time adapts to how long answers take.
    """

    def __init__(self, scoreboard: Scoreboard, lane: int, lease: int, spin_us: int) -> None:
        self._engines = scoreboard.engines
        self._scoreboard_name = scoreboard.segment.name
        self._lane = lane
        self._lease = lease
        self._spin_ns = spin_us * 1000
        self._rings: dict[tuple[int, int], _AttachedRings] = {}  # by engine and incarnation
        self._watching: _Watcher | None = None
        self._words: Words | None = None
        self._quiet = False

    def send(self, ticket: InFlight) -> None:
        """See Transport.send. Raises NotSent if the ring is full, until answers have freed a slot."""
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
            raise NotSent("the lane's ring is full")

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
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
        if (rings := self._attached(place.number, place.incarnation)) is None:
            return None
        shape, kind = place.form()
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
            shape,
            kind,
            1 if place.input is None else place.input.itemsize,
        )

    def receive(self, timeout: float) -> Sequence[Answer]:
        busy = list(self._rings.values())
        if len(busy) > 1:
            busy = [rings for rings in busy if rings.client.in_flight]
        if len(busy) > 1:
            answers = [answer for rings in busy for answer in rings.receive(0.0)]
            if not answers and timeout > 0:
                answers = busy[0].receive(min(timeout, _TURN))
        elif busy:
            answers = busy[0].receive(timeout)
        else:
            return ()
        return answers

    def settled(self, answer: Answer) -> None:
        for rings in list(self._rings.values()):
            if rings.incarnation == answer.incarnation:
                rings.client.settled(answer.sequence)

    def holds(self, ticket: InFlight) -> bool:
        rings = self._rings.get((ticket.engine, ticket.incarnation))
        return rings is not None and rings.client.holds(ticket.sequence)

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """See Transport.watch. Threads sleep on the rings on behalf of the loop."""
        if self._watching is not None:
            self._watching.stop()
        self._watching = watching = _Watcher(loop, arrived)
        for rings in list(self._rings.values()):
            watching.add(rings)

    def tell(self, words: Words) -> None:
        """Notify the owner of many lanes through `words` when answers arrive after `arm`; an alternative to `watch`."""
        self._words = words
        for rings in list(self._rings.values()):
            words.add(rings.memory, self._lane)

    def attach(self, engine: int, incarnation: int) -> native.ShmRingsClient | None:
        """Attach to the rings of an engine's incarnation; None if it is being replaced. Raises as `send`."""
        rings = self._attached(engine, incarnation)
        return None if rings is None else rings.client

    def quiet(self) -> None:
        """Suspend notifications until `arm`, while the owner waits for answers itself."""
        if not self._quiet and self._words is not None:
            self._quiet = True
            for rings in list(self._rings.values()):
                self._words.pause(rings.memory, self._lane)

    def arm(self) -> bool:
        """Request a notification of the next answer; return whether answers have already arrived. See `tell`."""
        if self._quiet and self._words is not None:
            self._quiet = False
            for rings in list(self._rings.values()):
                self._words.add(rings.memory, self._lane)
        return any(rings.client.arm() for rings in list(self._rings.values()) if rings.client.in_flight)

    def spin(self) -> bool:
        """Spin briefly for answers; return whether any arrived. Does not spin while other clients use the engine."""
        return any(rings.client.spin() for rings in list(self._rings.values()) if rings.client.in_flight)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.stop()
        self.forked()

    def forked(self) -> None:
        """See Transport.forked. The watching threads exist only in the parent."""
        self._watching = None
        rings, self._rings = self._rings, {}
        for attached in rings.values():
            self._detach(attached)

    def _attached(self, engine: int, incarnation: int) -> _AttachedRings | None:
        if (rings := self._rings.get((engine, incarnation))) is not None:
            return rings
        try:
            return self._open(engine, incarnation)
        except SharedMemoryError:
            return None  # the engine is being replaced; the lane sees that on the scoreboard and resends

    def _open(self, engine: int, incarnation: int) -> _AttachedRings:
        memory = ShmRings.attach(sibling(self._scoreboard_name, "rings", int(self._engines["rings"][engine])))
        client = native.ShmRingsClient(
            memory.segment.array(np.uint8, (native.RINGS_BYTES,)), self._lane, self._lease, memory.pipe, self._spin_ns
        )
        rings = _AttachedRings(memory, client, incarnation)
        if (known := self._rings.setdefault((engine, incarnation), rings)) is not rings:
            memory.close()  # a nested call has attached them meanwhile: a ring has one writer and one reader
            return known
        serving = int(self._engines["incarnation"][engine])
        for key in list(self._rings):
            outlived = key[0] == engine and key[1] not in (incarnation, serving)
            if outlived and (earlier := self._rings.pop(key, None)) is not None:
                self._detach(earlier)
        try:
            if self._watching is not None:
                self._watching.add(rings)
            if self._words is not None:
                self._words.add(memory, self._lane)
        except Busy as error:  # there is no thread that waits for its answers
            if not client.in_flight and self._rings.get((engine, incarnation)) is rings:
                del self._rings[engine, incarnation]
                self._detach(rings)
            raise NotSent(str(error)) from None
        return rings

    def _detach(self, rings: _AttachedRings) -> None:
        rings.replaced = True
        if self._words is not None:
            self._words.remove(rings.memory, self._lane)
        rings.memory.close()


class Words:
    """Threads that sleep on the rings for a process with many lanes: one thread for 32 lanes of an engine.

    Attributes:
        descriptor: an eventfd that is readable when answers may have arrived on an armed lane.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._words: dict[tuple[str, int], native.ShmRingsWord] = {}

    def __del__(self) -> None:  # all threads have ended, so none can write to another file with the same number
        with contextlib.suppress(AttributeError):  # creating the descriptor failed
            os.close(self.descriptor)

    def add(self, rings: ShmRings, lane: int) -> None:
        """Start to watch a lane of these rings. Raises Busy if a thread cannot be started: `remove` it then."""
        key = (rings.segment.name, lane // native.RINGS_SLEEPERS)
        if (word := self._words.get(key)) is None:
            word = native.ShmRingsWord(rings.segment.array(np.uint8, (native.RINGS_BYTES,)), lane)
            self._words[key] = word
            _start_waiting(self._watch, key, word)
        word.add(lane)

    def pause(self, rings: ShmRings, lane: int) -> None:
        """Suspend watching a lane until it is added again."""
        if (word := self._words.get((rings.segment.name, lane // native.RINGS_SLEEPERS))) is not None:
            word.pause(lane)

    def remove(self, rings: ShmRings, lane: int) -> None:
        """Stop watching a lane. The thread of a word without lanes ends."""
        key = (rings.segment.name, lane // native.RINGS_SLEEPERS)
        if (word := self._words.get(key)) is not None and not word.remove(lane):
            del self._words[key]

    def close(self) -> None:
        """Stop all threads."""
        self._words.clear()

    def _watch(self, key: tuple[str, int], word: native.ShmRingsWord) -> None:
        while self._words.get(key) is word:
            word.watch(self.descriptor, _WATCH)


class _AttachedRings:
    """The rings of one incarnation of an engine."""

    def __init__(self, memory: ShmRings, client: native.ShmRingsClient, incarnation: int) -> None:
        self.memory = memory
        self.client = client
        self.incarnation = incarnation
        self.replaced = False

    def receive(self, timeout: float) -> list[Answer]:
        return [Answer(*answer, self.incarnation) for answer in self.client.receive(timeout)]


class _AnswerEvent:
    """An eventfd, closed with the last reference to it, so that no thread writes to another file with its number."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # creating the descriptor failed
            os.close(self.descriptor)


class _Watcher:
    """Threads that sleep on the rings, one per engine, and notify an event loop when answers have arrived.

    They sleep and notify without the GIL, which the loop would otherwise have to wait for. Create it in the loop's
    thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self._event = event = _AnswerEvent()

        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(event.descriptor)  # before checking, so that later answers notify again
            arrived()

        self._watching = Watching(loop, readable)
        self._watching.read(event.descriptor)
        self._stopped = False

    def add(self, rings: _AttachedRings) -> None:
        """Start to watch these rings, until they are replaced. Raises Busy if a thread cannot be started."""
        _start_waiting(self._run, rings)

    def stop(self) -> None:
        """Stop notifying the loop. May be called from any thread."""
        self._stopped = True
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self._watching.unread(self._event.descriptor)

    def _run(self, rings: _AttachedRings) -> None:
        while not self._stopped and not rings.replaced and self._watching.on:
            rings.client.watch(self._event.descriptor, _WATCH)


def _start_waiting(run: Callable[..., None], *arguments: object) -> None:
    """Start a thread that sleeps on rings. Raises Busy."""
    thread = threading.Thread(target=run, args=arguments, name="jurybox-answers", daemon=True)
    start_thread(thread, "that waits for its answer could be started")
