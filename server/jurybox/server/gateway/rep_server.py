"""A server for ZeroMQ's REQ sockets on the event loop.

A REQ socket without an answer is stuck for ever, so whatever comes is answered: also what is too large, has no room or
no sense.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Generic, NamedTuple, TypeVar

from jurybox import native
from jurybox.protocol.errors import Busy, Code, Error, ModelFailed, error_for, said
from jurybox.server.gateway.http_connection import TURN
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.doors import Doors, refusal
from jurybox.server.security.limits import ANSWERS, Charge, Limited
from jurybox.server.security.pace import Turns

_MOST_WAITING = 16  # requests of one connection; a REQ socket has one
_TICK = 0.5  # seconds between two looks for connections that are silent
_LOOK = 0.005  # seconds until the first look whether an answer has left; each next one is twice as late, up to _TICK
_TURN = 64  # messages before others come first

_log = logging.getLogger("jurybox.gateway.robots")

T = TypeVar("T")


class _RepRequest(NamedTuple):
    body: Any  # bytes, or None: it had another number of frames
    charge: Charge


class RepPeer(Generic[T]):
    """A connection, and the task that answers its requests in order. See `limits.Limited`.

    Attributes:
        state: what the server's owner keeps for it.
        held: what is closed when it has ended.
    """

    def __init__(self, server: RepServer[T], client: bytes, account: native.Account) -> None:
        self.client, self.account = client, account
        self.requests: asyncio.Queue[_RepRequest] = asyncio.Queue()
        self.busy = False
        self.held = AsyncExitStack()
        self.state = server.begin(self)
        self.task = asyncio.create_task(server.serve(self))
        self._server = server

    def end_silent(self, now: float) -> None:
        """Do nothing: the server itself ends what is silent."""

    def abort(self) -> None:
        """Close the connection at once."""
        self._server.end(self.client)


class RepServer(Generic[T]):
    """A server. It listens from its construction on, and serves after `start`.

    Args:
        listener: a listening socket.
        most: largest message, bytes.
        budget: that of the process.
        door: one of the doors of `limits`.
        doors: after they have closed, requests are refused.
        turns: of the other doors, whose heavy work leaves time to this one.
        begin: return the state of a new connection.
        answer: return the answer to a request; None in place of its bytes: it had not one frame.
        refused: return the answer that reports an error.
    """

    def __init__(
        self,
        listener: socket.socket,
        most: int,
        budget: native.Budget,
        door: int,
        doors: Doors,
        turns: Turns,
        begin: Callable[[RepPeer[T]], T],
        answer: Callable[[RepPeer[T], bytes | None], Awaitable[bytes]],
        refused: Callable[[Error], bytes],
    ) -> None:
        self._most, self._budget, self._doors, self._turns = most, budget, doors, turns
        self.begin, self._answer, self._refused = begin, answer, refused
        self._front = ZmtpListener(listener, most, budget, door)
        self._front.refused = self._no_room
        self._front.gone = self._gone
        self._peers: dict[bytes, RepPeer[T]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.TimerHandle | None = None
        self._behind = False  # whether it reads on later, when others had their turn

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self._front.unsent or any(peer.busy or not peer.requests.empty() for peer in self._peers.values())

    def connections(self) -> list[Limited]:
        """Return the connections, for `limits.Watch`."""
        return list(self._peers.values())

    def start(self) -> None:
        """Start serving."""
        self._listen()
        self._tick()

    async def stop(self) -> None:
        """Close all connections."""
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking, self._behind = None, False
            asyncio.get_running_loop().remove_reader(self._front.fileno())
        for client in list(self._peers):
            self._gone(client)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._front.close()

    async def serve(self, peer: RepPeer[T]) -> None:
        """Answer a connection's requests until it ends."""
        async with peer.held:
            while True:
                peer.busy = False
                request = await peer.requests.get()
                peer.busy, began = True, time.monotonic()
                answers = Charge(self._budget, peer.account, ANSWERS)
                try:
                    answer = await self._answered(peer, request.body, answers)
                    self._front.send((peer.client, b"", answer))
                    await self._left(peer)
                finally:
                    request.charge.give()
                    answers.give()
                if not peer.requests.empty():  # a REQ socket waits for its answer
                    await self._turns.wait(peer, min(time.monotonic() - began, TURN))

    def end(self, client: bytes) -> None:
        """Close a connection at once."""
        self._front.end(client)

    def go_on(self) -> None:
        """See `pace.HasTurns`: read on."""
        if self._behind:
            self._behind = False
            self._listen()
            self._look()

    async def _answered(self, peer: RepPeer[T], body: bytes | None, answers: Charge) -> bytes:
        try:
            if self._doors.closed:
                raise refusal()
            answer = await self._answer(peer, body)
            answers.take(len(answer))
            return answer
        except Error as error:
            return self._refused(error)
        except Exception as error:  # noqa: BLE001  a connection whose task has ended would never be answered again
            _log.error("a request failed: %s", said(error), exc_info=error)
            why = f"the gateway failed at this request ({said(error, 200)}); its log says more"
            return self._refused(ModelFailed(why))

    async def _left(self, peer: RepPeer[T]) -> None:
        """Wait until an answer has left this process, or its connection has ended."""
        pause = _LOOK
        while (link := self._front.link(peer.client)) is not None and link.pending:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _TICK)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._front.fileno(), self._look)

    def _tick(self) -> None:
        self._front.forget_sent()
        self._look()
        self._ticking = asyncio.get_running_loop().call_later(_TICK, self._tick)

    def _look(self) -> None:
        if self._behind:
            return
        began = time.monotonic()
        for _ in range(_TURN):
            if (frames := self._front.receive(len)) is None:
                break
            self._take(frames)
        if not self._front.has_news():
            return
        loop, seconds = asyncio.get_running_loop(), time.monotonic() - began
        if self._turns.rest(self, seconds) > 0:
            self._behind = True
            loop.remove_reader(self._front.fileno())
            self._turns.later(self, seconds)
        else:
            loop.call_soon(self._look)

    def _take(self, frames: list[Any]) -> None:
        """Queue a message for its connection's task: the client, an empty frame and the body."""
        client, *_, body = frames
        account = self._front.account(client)
        if account is None:
            return  # it has gone
        peer = self._peers.get(client)
        if peer is None:
            peer = self._peers[client] = RepPeer(self, client, account)
        if peer.requests.empty():
            self._turns.heard(peer)
        elif peer.requests.qsize() >= _MOST_WAITING and (link := self._front.link(client)) is not None and link.pending:
            self.end(client)  # it reads no answers, and refusals would pile up, too
            return
        charge = Charge(self._budget, account)
        try:
            if peer.requests.qsize() >= _MOST_WAITING:
                raise Busy(f"{_MOST_WAITING} requests of this connection wait: wait for their answers")
            if len(body) > self._most:
                raise error_for(Code.TOO_LARGE, f"a message may have at most {self._most} bytes, came {len(body)}")
            charge.take(2 * len(body))  # and its arrays
        except Error as error:
            self._front.send((client, b"", self._refused(error)))
            return
        peer.requests.put_nowait(_RepRequest(body if len(frames) == 3 else None, charge))

    def _no_room(self, client: bytes, _first: bytes, error: Error) -> None:
        self._front.send((client, b"", self._refused(error)))

    def _gone(self, client: bytes) -> None:
        if (peer := self._peers.pop(client, None)) is not None:
            self._ending.add(peer.task)
            peer.task.add_done_callback(self._ending.discard)
            peer.task.cancel()
            while not peer.requests.empty():  # the connection refers to itself, and is freed late
                peer.requests.get_nowait().charge.give()
