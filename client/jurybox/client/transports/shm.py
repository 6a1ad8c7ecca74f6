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
from jurybox.client.transports.transport import RowPlace, Transport, Watching
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import sibling
from jurybox.protocol.shm_rings import ShmRings
from jurybox.protocol.spec import VARIABLE

if TYPE_CHECKING:
    import asyncio

_TURN = 0.002  # seconds to wait for one engine while others may answer as well
_WATCH = 0.5  # seconds between two looks of a watching thread whether it is still wanted


class ShmTransport(Transport):
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
        self._words: Words | None = None
        self._quiet = False

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
        rings = self._rings.get(ticket.engine)
        if rings is None or rings.incarnation != ticket.incarnation:
            return False
        return rings.client.holds(ticket.sequence) or ticket in self._unsent

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Transport.watch: threads sleep on the rings in the loop's stead."""
        if self._watching is not None:
            self._watching.stop()
        self._watching = watching = _Watcher(loop, arrived)
        for rings in self._rings.values():
            watching.add(rings)

    def tell(self, words: Words) -> None:
        """Have the owner of many lanes told when answers come, once `arm` was called: instead of `watch`."""
        self._words = words
        for rings in self._rings.values():
            words.add(rings.memory, self._lane)

    def client(self, engine: int, incarnation: int) -> native.ShmRingsClient | None:
        """The lane's side of an engine's rings in that life of it; None where they are not attached."""
        rings = self._rings.get(engine)
        return rings.client if rings is not None and rings.incarnation == incarnation else None

    def quiet(self) -> None:
        """Have nothing told until `arm`, while the owner waits for answers itself."""
        if not self._quiet and self._words is not None:
            self._quiet = True
            for rings in self._rings.values():
                self._words.pause(rings.memory, self._lane)

    def arm(self) -> bool:
        """Have the next answer told to `tell`'s; whether answers are there already."""
        if self._quiet and self._words is not None:
            self._quiet = False
            for rings in self._rings.values():
                self._words.add(rings.memory, self._lane)
        return any(rings.client.arm() for rings in self._rings.values() if rings.client.in_flight)

    def spin(self) -> bool:
        """Whether answers came within microseconds; not waited for where others ask the engine, too."""
        return any(rings.client.spin() for rings in self._rings.values() if rings.client.in_flight)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.stop()
        self.forked()

    def forked(self) -> None:
        """As Transport.forked. The watching threads are the parent's."""
        self._watching = None
        rings, self._rings = self._rings, {}
        for attached in rings.values():
            attached.replaced = True
            if self._words is not None:
                self._words.remove(attached.memory, self._lane)
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
            earlier.replaced = True
            if self._words is not None:
                self._words.remove(earlier.memory, self._lane)
            earlier.memory.close()
            self._unsent = [ticket for ticket in self._unsent if ticket.engine != engine]
        memory = ShmRings.attach(sibling(self._scoreboard_name, "rings", int(self._engines["rings"][engine])))
        client = native.ShmRingsClient(
            memory.segment.array(np.uint8, (native.RINGS_BYTES,)), self._lane, self._lease, memory.pipe, self._spin_ns
        )
        rings = _Attached(memory, client, incarnation)
        if self._watching is not None:
            self._watching.add(rings)
        self._rings[engine] = rings
        if self._words is not None:
            self._words.add(memory, self._lane)
        return rings


class Words:
    """Threads that sleep on the rings for a process with many lanes: one for 32 lanes of an engine.

    Attributes:
        descriptor: an eventfd, readable when answers may have come on a lane that was armed.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._words: dict[tuple[str, int], native.ShmRingsWord] = {}

    def __del__(self) -> None:  # the last of the threads has gone: none writes to another file of this number
        with contextlib.suppress(AttributeError):  # there was no descriptor to be had
            os.close(self.descriptor)

    def add(self, rings: ShmRings, lane: int) -> None:
        """Tell of a lane of these rings, too."""
        key = (rings.segment.name, lane // native.RINGS_SLEEPERS)
        if (word := self._words.get(key)) is None:
            word = native.ShmRingsWord(rings.segment.array(np.uint8, (native.RINGS_BYTES,)), lane)
            self._words[key] = word
            threading.Thread(target=self._watch, args=(key, word), name="jurybox-answers", daemon=True).start()
        word.add(lane)

    def pause(self, rings: ShmRings, lane: int) -> None:
        """Not of a lane until it is added again."""
        if (word := self._words.get((rings.segment.name, lane // native.RINGS_SLEEPERS))) is not None:
            word.pause(lane)

    def remove(self, rings: ShmRings, lane: int) -> None:
        """No longer. The thread of a word without lanes ends."""
        key = (rings.segment.name, lane // native.RINGS_SLEEPERS)
        if (word := self._words.get(key)) is not None and not word.remove(lane):
            del self._words[key]

    def close(self) -> None:
        """Tell no more."""
        self._words.clear()

    def _watch(self, key: tuple[str, int], word: native.ShmRingsWord) -> None:
        while self._words.get(key) is word:
            word.watch(self.descriptor, _WATCH)


class _Attached:
    """One engine's rings in one life of the engine."""

    def __init__(self, memory: ShmRings, client: native.ShmRingsClient, incarnation: int) -> None:
        self.memory = memory
        self.client = client
        self.incarnation = incarnation
        self.replaced = False

    def receive(self, timeout: float) -> list[Answer]:
        return [Answer(*answer, self.incarnation) for answer in self.client.receive(timeout)]


class _Told:
    """An eventfd. Closed with the last that refers to it: no thread writes to another file of its number."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # there was no descriptor to be had
            os.close(self.descriptor)


class _Watcher:
    """Threads that sleep on the rings, one for each engine's, and tell an event loop when answers have come.

    They sleep and tell without Python's lock, which the loop would have to wait for. Made in the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        self._told = told = _Told()

        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(told.descriptor)  # before the look: what comes after it is told again
            arrived()

        self._watching = Watching(loop, readable)
        self._watching.read(told.descriptor)
        self._stopped = False

    def add(self, rings: _Attached) -> None:
        """Watch these as well, until they are replaced."""
        threading.Thread(target=self._run, args=(rings,), name="jurybox-answers", daemon=True).start()

    def stop(self) -> None:
        """Tell the loop no more, from any thread."""
        self._stopped = True
        with contextlib.suppress(RuntimeError):  # the loop was closed just now
            self._watching.unread(self._told.descriptor)

    def _run(self, rings: _Attached) -> None:
        while not self._stopped and not rings.replaced and self._watching.on:
            rings.client.watch(self._told.descriptor, _WATCH)
