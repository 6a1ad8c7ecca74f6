"""The native door: tickets and answers through shared memory, on the server's host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.client.doors.door import LOOK_AFTER, Answer, InFlight
from jurybox.protocol.bell import Bell
from jurybox.protocol.board import Board
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import sibling

if TYPE_CHECKING:
    import asyncio

_TURN = 0.002  # seconds to wait for one engine while others may answer as well
_WATCH = 0.5  # seconds between two looks of the watching thread whether it is still wanted


class NativeDoor:
    """A lane's side of the engines' bells, each attached when its engine is first chosen, anew when it has restarted.

    Args:
        spin_us: how long to spin for an answer before sleeping, three times as long while nobody else asks this
            engine; what is useful below that it finds out itself.
    """

    def __init__(self, board: Board, lane: int, lease: int, spin_us: int) -> None:
        self._engines = board.engines
        self._board_name = board.segment.name
        self._lane = lane
        self._lease = lease
        self._spin_ns = spin_us * 1000
        self._bells: dict[int, _Attached] = {}
        self._unsent: list[InFlight] = []
        self._watching: _Watcher | None = None

    def send(self, ticket: InFlight) -> None:
        """As Door.send. What a full ring does not take is sent when answers have made room."""
        bell = self._bell(ticket.engine, ticket.epoch)
        if bell is None:
            return
        if not bell.client.submit(
            ticket.sequence, ticket.first, ticket.rows, ticket.submitted, ticket.deadline, ticket.version, ticket.epoch
        ):
            self._unsent.append(ticket)
        if self._watching is not None:
            self._watching.look()

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """As Door.exchange."""
        bell = self._bell(ticket.engine, ticket.epoch)
        if bell is None:
            return None
        answer = bell.client.exchange(
            ticket.sequence,
            ticket.first,
            ticket.rows,
            ticket.submitted,
            ticket.deadline,
            ticket.version,
            ticket.epoch,
            timeout,
        )
        return None if answer is None else Answer(ticket.sequence, *answer, ticket.epoch)

    def caller(
        self, first: int, place: NDArray[Any], outputs: Any, engine: NDArray[Any], epoch: int
    ) -> native.BellCaller | None:
        """As Door.caller."""
        if len(self._engines) > 1 or (bell := self._bell(0, epoch)) is None:
            return None
        return native.BellCaller(bell.client, place, outputs, engine, first, epoch, LOOK_AFTER)

    def receive(self, timeout: float) -> Sequence[Answer]:
        """As Door.receive."""
        if len(self._bells) == 1:
            (only,) = self._bells.values()
            busy = [only]
        else:
            busy = [bell for bell in self._bells.values() if bell.client.in_flight]
        if len(busy) > 1:
            answers = [answer for bell in busy for answer in bell.receive(0.0)]
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
        """As Door.holds."""
        bell = self._bells.get(ticket.engine)
        if bell is None or bell.epoch != ticket.epoch:
            return False
        return bell.client.holds(ticket.sequence) or ticket in self._unsent

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Door.watch: a thread sleeps on the bells in the loop's stead."""
        if self._watching is not None:
            self._watching.stop()
        self._watching = _Watcher(self._bells, loop, arrived)

    def close(self) -> None:
        """As Door.close."""
        if self._watching is not None:
            self._watching.stop()
        self.forked()

    def forked(self) -> None:
        """As Door.forked. The watching thread is the parent's."""
        self._watching = None
        bells, self._bells = self._bells, {}
        for bell in bells.values():
            bell.memory.close()

    def _bell(self, engine: int, epoch: int) -> _Attached | None:
        bell = self._bells.get(engine)
        if bell is not None and bell.epoch == epoch:
            return bell
        try:
            return self._open(engine, epoch)
        except SharedMemoryError:
            return None  # the engine is being replaced just now; the lane sees that on the board and sends again

    def _open(self, engine: int, epoch: int) -> _Attached:
        if (earlier := self._bells.pop(engine, None)) is not None:
            earlier.memory.close()
            self._unsent = [ticket for ticket in self._unsent if ticket.engine != engine]
        memory = Bell.attach(sibling(self._board_name, "bell", int(self._engines["bell"][engine])))
        client = native.BellClient(
            memory.segment.array(np.uint8, (native.BELL_BYTES,)), self._lane, self._lease, memory.pipe, self._spin_ns
        )
        bell = self._bells[engine] = _Attached(memory, client, epoch)
        return bell


class _Attached:
    """One engine's bell in one life of the engine."""

    def __init__(self, memory: Bell, client: native.BellClient, epoch: int) -> None:
        self.memory = memory
        self.client = client
        self.epoch = epoch

    def receive(self, timeout: float) -> list[Answer]:
        return [Answer(*answer, self.epoch) for answer in self.client.receive(timeout)]


class _Watcher:
    """Sleeps on the bells in a thread and tells an event loop when answers have come."""

    def __init__(
        self, bells: dict[int, _Attached], loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]
    ) -> None:
        self._bells = bells
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
            while busy := [bell for bell in list(self._bells.values()) if bell.client.in_flight]:
                came = [bell.client.wait(_TURN if len(busy) > 1 else _WATCH) for bell in busy]
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
