"""The ZeroMQ transport: tickets are sent as records to the engines' ROUTER sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.transports.engine_link import EngineCaller, EngineLink
from jurybox.client.transports.transport import RowPlace, Transport, Watching
from jurybox.client.transports.zmq_socket import ZmqSocket, whole_ms

if TYPE_CHECKING:
    import asyncio


class ZmqTransport(Transport):
    """One DEALER per engine, opened when the engine is first chosen, and again after a restart.

    Args:
        addresses: the engines' addresses, in the scoreboard's order.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], lane: int, lease: int
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._lane = lane
        self._lease = lease
        self._engines: dict[tuple[int, int], EngineLink] = {}  # by engine and incarnation
        self._watching: Watching | None = None

    def send(self, ticket: InFlight) -> None:
        t = ticket
        engine = self._attached(t.engine, t.incarnation)
        engine.send(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        if (watching := self._watching) is not None and watching.on and isinstance(engine.link, ZmqSocket):
            # Sending clears libzmq's signal, which may have announced an answer.
            watching.tell()

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        return self._attached(ticket.engine, ticket.incarnation).exchange(ticket, timeout)

    def caller(self, place: RowPlace) -> EngineCaller:
        return EngineCaller(self._attached(place.number, place.incarnation), place)

    def receive(self, timeout: float) -> Sequence[Answer]:
        engines = list(self._engines.values())
        if len(engines) == 1:
            return engines[0].answers(timeout)
        answers = [answer for engine in engines for answer in engine.answers(0)]
        if not answers and timeout > 0:
            polled: list[Any] = []
            poll: Callable[[], Any] = partial(zmq.zmq_poll, polled, whole_ms(timeout))
            for link in [engine.link for engine in engines]:
                if isinstance(link, ZmqSocket):
                    if not link.broken:
                        polled.append((link.socket, zmq.POLLIN))
                        poll = partial(link.within, poll)
                elif link is not None and link.descriptor >= 0:
                    polled.append((link.descriptor, zmq.POLLIN))
            poll()
            answers = [answer for engine in engines for answer in engine.answers(0)]
        return answers

    def settled(self, answer: Answer) -> None:
        for engine in list(self._engines.values()):
            if engine.incarnation == answer.incarnation or not answer.sequence:
                engine.settled(answer.sequence)

    def holds(self, ticket: InFlight) -> bool:
        engine = self._engines.get((ticket.engine, ticket.incarnation))
        return engine is not None and self._whole(engine).has(ticket)

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        earlier = self._watching
        if earlier is None or earlier.loop is not loop:
            self._watching = watching = Watching(loop, arrived)
            for engine in list(self._engines.values()):
                if earlier is not None:
                    self._unwatch(engine, earlier)
                self._watch(engine, watching)

    def close(self) -> None:
        for key in list(self._engines):
            self._drop(key)

    def forked(self) -> None:
        """See Transport.forked. pyzmq closes nothing in a child, and the event loop's poll set is the parent's."""
        self._engines, self._watching = {}, None

    def _attached(self, number: int, incarnation: int) -> EngineLink:
        if (known := self._engines.get((number, incarnation))) is None:
            return self._open(number, incarnation)
        return self._whole(known)

    def _whole(self, engine: EngineLink) -> EngineLink:
        """Reconnect the engine if its connection has broken, and return it."""
        if engine.broken:
            if self._watching is not None:
                self._unwatch(engine, self._watching)
            engine.dial()
        return self._watched(engine)

    def _watched(self, engine: EngineLink) -> EngineLink:
        """See that the event loop watches the engine's socket, and return the engine."""
        if self._watching is not None and engine.watched != engine.descriptor:
            self._watch(engine, self._watching)
        return engine

    def _open(self, number: int, incarnation: int) -> EngineLink:
        for key in list(self._engines):
            if key[0] == number and key[1] != incarnation:
                self._drop(key)
        engine = EngineLink(self._context, self._addresses[number], self._lane, self._lease, incarnation)
        if (known := self._engines.setdefault((number, incarnation), engine)) is not engine:
            engine.close()  # a nested call has connected meanwhile
        return self._watched(known)

    def _drop(self, key: tuple[int, int]) -> None:
        known = self._engines.pop(key, None)
        if known is not None:
            if self._watching is not None:
                self._unwatch(known, self._watching)
            known.close()

    def _watch(self, engine: EngineLink, watching: Watching) -> None:
        """Watch an engine's socket, instead of the one that it has replaced."""
        self._unwatch(engine, watching)
        if (link := engine.link) is not None and (descriptor := link.descriptor) >= 0:
            engine.watched = descriptor
            watching.read(descriptor)
            link.watched(on=True)

    def _unwatch(self, engine: EngineLink, watching: Watching) -> None:
        if engine.watched >= 0:
            watching.unread(engine.watched)
        engine.watched = -1
