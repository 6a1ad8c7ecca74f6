"""The relay's message handling: it forwards control calls, leases lanes, sends tickets and returns answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from google.protobuf.message import DecodeError

from jurybox.client.local_link import LocalLink
from jurybox.client.transports.shm import Words
from jurybox.protocol.control_pb2 import (
    ControlReply,
    ControlRequest,
    Done,
    ErrorMessage,
    KeepRequest,
    Lease,
    ReleaseRequest,
    ServerMessage,
)
from jurybox.protocol.errors import Code, Error, plain, said
from jurybox.protocol.wire import (
    BEREFT,
    PACK_TICKET,
    PREFIX,
    TICKET_FRAME,
    prefix_error,
    require_control_size,
    require_name,
)
from jurybox.server.logs import LogLimiter
from jurybox.server.relay.relayed_tickets import InlineTicket, RelayedTickets, head
from jurybox.server.relay.zmq_listener import ZmqListener
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.doors import refusal
from jurybox.server.security.limits import sessions_share

_MOST_LANES = 1024  # half of all lanes: the rest is for local clients
_MOST_CALLS = 4096  # forwarded and not answered yet
_MOST_CALLS_EACH = 64  # of them for one client (which makes one call at a time), so that no client can use them all
_CALL_TIMEOUT = 30.0  # seconds after which a call's answer is no longer expected
_LEASE, _ROWS = slice(10, 18), slice(42, 46)  # in a ticket's frame
_STAY = 0.005  # seconds of receiving and answering before other callbacks of the loop get a turn
_PAUSE_MS = 1  # to wait for the next message here before returning to the loop
_ALONE = 16  # turns after which a client counts as alone: other clients are not read while its answer is awaited
_TURN = 64  # messages handled before others get a turn
_SOON = 0.01  # seconds until an answer is retried that did not fit into its client's limit
_LOOK = 0.005  # seconds between two looks whether everything is answered
_MISSED = 2  # consecutive checks without a connection after which a client counts as gone

Answer = Callable[[ControlReply], ControlReply]


class Relay:
    """The relay. Use it in the event loop's thread only.

    Args:
        front: the socket to the clients.
        back: a DEALER to the supervisor's control socket.
        link: the relay's own connection to the server.
        report: called with (event, **fields) to log an event.
        share: the part of a model's sessions that one connection may hold.
    """

    def __init__(
        self,
        front: ZmqListener | ZmtpListener,
        back: zmq.Socket[bytes],
        link: LocalLink,
        report: Callable[..., None],
        share: float = 1.0,
    ) -> None:
        self._share = share
        self._front = front
        self._back = back
        self._link = link
        self._limited = LogLimiter(report)
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, RelayedTickets] = {}  # by the lease number given to the client, which is unguessable
        self._missing: dict[bytes, int] = {}
        self._calls: dict[bytes, tuple[float, bytes, bytes, Answer]] = {}
        self._calls_of: Counter[bytes] = Counter()
        self._kept: dict[bytes, set[str]] = {}  # models that a client has asked to keep
        self._number = 0
        self._pumping = self._closed = self._draining = False
        self._pay_scheduled = False
        self._waiting: dict[RelayedTickets, None] = {}  # lanes with tickets in flight
        self._lone: RelayedTickets | None = None  # the only one of those, if there is one
        self._turns = 0  # for which it was the only one
        self._words = Words()
        self._back_descriptor = int(back.getsockopt(zmq.FD))
        if isinstance(front, ZmtpListener):
            front.refused = self._on_refused
        self._loop.add_reader(front.fileno(), self._serve)
        self._loop.add_reader(self._back_descriptor, self.pump)
        self._loop.add_reader(self._words.descriptor, self._on_word)
        self._poller = select.poll()
        self._descriptors = (front.fileno(), self._back_descriptor, self._words.descriptor)
        for descriptor in self._descriptors:
            self._poller.register(descriptor, select.POLLIN)

    def pump(self) -> None:
        """Handle all waiting messages of both sides: a ZeroMQ descriptor signals only changes."""
        self._pumping = False
        if self._closed:
            return
        if self._from_server():
            self._again()
        self._serve()

    def _serve(self) -> None:
        """Receive clients' messages and send engines' answers, as long as there are any.

        If only one client has a request in flight, this method spins for its answer for some microseconds, as a single
        local client does. For other answers, an engine signals an event once this process has announced that it is
        about to sleep. While requests arrive in quick succession, it sleeps here as well, because an iteration of the
        event loop takes longer than the system call.
        """
        until, waiting, lone = time.monotonic() + _STAY, self._waiting, None
        while not self._closed and not self._pumping:
            more = self._from_clients()
            if waiting:
                lone = next(iter(waiting)) if len(waiting) == 1 else None
                self._turns = self._turns + 1 if lone is self._lone else 0
                self._lone = lone
            for held in list(waiting):
                self._answered(held)
            if lone is not None and not more:
                if waiting and lone.spin():
                    self._answered(lone)
                if (
                    self._turns >= _ALONE
                    and not waiting
                    and not self._front.has_news()
                    and (left := until - time.monotonic()) > 0
                ):
                    self._serve_alone(lone, left)
                    if waiting or self._front.has_news():
                        continue
            if more or self._front.has_news() or any(held.arm() for held in waiting):
                if time.monotonic() > until:
                    self._again()
                continue
            if time.monotonic() > until or not (came := self._poller.poll(_PAUSE_MS)):
                return
            for descriptor, _ in came:
                if descriptor == self._words.descriptor:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(descriptor)
                elif descriptor == self._back_descriptor:
                    self._again()  # its messages first

    def _serve_alone(self, lone: RelayedTickets, seconds: float) -> None:
        """Serve a client that is alone, without returning here for each of its requests."""
        if lone.stay(self._descriptors, _PAUSE_MS / 1e3, seconds) and isinstance(self._front, ZmtpListener):
            self._front.look_again(lone.sender)
        if lone.waits:
            self._waiting[lone] = None

    def _on_word(self) -> None:
        """Handle the event which signals that answers of an engine may have arrived."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._words.descriptor)  # reset it first: answers that arrive later signal it again
        self._serve()

    def look_after(self) -> None:
        """Send again the tickets of an engine that ended. Raises ServerGone if the server is gone."""
        for held in self._lanes.values():
            if held.waits:
                held.look_after()
                self._answered(held)  # look_after received the present answers, for which no signal follows
        self._again()

    def reclaim(self) -> None:
        """Release the lanes of clients that are gone, and forget unanswered calls."""
        owners = {held.owner for held in self._lanes.values()} | self._kept.keys()
        self._missing = {owner: self._missing.get(owner, 0) + 1 for owner in owners if not self._front.is_there(owner)}
        gone = {number: held for number, held in self._lanes.items() if self._missing.get(held.owner, 0) >= _MISSED}
        if gone:
            clients, rows = len({held.owner for held in gone.values()}), sum(held.lane.rows for held in gone.values())
            self._limited("remote clients gone, rows released", clients=clients, rows=rows)
        for number in gone:
            self._drop(number)
        for owner in [owner for owner, missed in self._missing.items() if missed >= _MISSED]:
            for name in self._kept.pop(owner, ()):
                self._keep_no_longer(name)
        long_ago = time.monotonic() - _CALL_TIMEOUT
        self._calls = {number: call for number, call in self._calls.items() if call[0] > long_ago}
        self._calls_of = Counter(sender for _, sender, _, _ in self._calls.values())
        self._front.forget_sent()
        self._limited.flush()
        self._again()

    def drain(self, drained: Callable[[], None]) -> None:
        """Refuse new tickets and leases from now on, and call `drained` when all answers have been sent."""
        self.pump()  # what has arrived is accepted
        self._draining = True
        for held in self._lanes.values():
            held.take_no_more()
        self._look_whether_drained(drained)

    def _look_whether_drained(self, drained: Callable[[], None]) -> None:
        if self._closed:
            return
        if any(held.waits for held in self._lanes.values()) or self._front.unsent:
            self._loop.call_later(_LOOK, self._look_whether_drained, drained)
        else:
            drained()

    def end(self) -> None:
        """Handle no more messages. The lanes are left to the end of the process."""
        self._closed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)

    def _again(self) -> None:
        """Schedule another call of `pump`: sending consumes the socket's signal."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self.pump)

    def _from_server(self) -> bool:
        """Handle a limited number of the supervisor's answers; return whether there may be more."""
        for _ in range(_TURN):
            try:
                frames = self._back.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            self._on_reply(frames)
        return True

    def _from_clients(self) -> bool:
        """Handle a limited number of clients' messages; return whether there may be more."""
        for _ in range(_TURN):
            frames = self._front.receive(self._expected)
            if frames is None:
                return False
            try:
                self._from_client(frames)
            except Exception as error:  # noqa: BLE001  one message must not stop the others; its client is told
                with contextlib.suppress(Exception):
                    self._refuse(frames, self._not_handled(error))
        return True

    def _not_handled(self, error: Exception) -> Error:
        """Return the error for a message that raised what is none, such as for want of memory."""
        why = f"the relay could not handle a message: {said(error, 200)}"
        self._warn(why)
        return Error(f"{why}; ask again later", Code.BUSY)

    def _refuse(self, frames: list[Any], error: Error) -> None:
        """Answer a client's message with an error."""
        first, *number = (*map(bytes, frames[1:3]), b"")
        if first == PREFIX:
            self._reply(frames[0], number[0], _failed(error))
        else:
            self._on_refused(frames[0], first, error)

    def _expected(self, first: bytes) -> int:
        """Return the size of the frames that follow a ticket; 0 if it is unknown."""
        if len(first) != TICKET_FRAME or (held := self._lanes.get(int.from_bytes(first[_LEASE], "little"))) is None:
            return 0
        return held.input_bytes(int.from_bytes(first[_ROWS], "little"))

    def _from_client(self, frames: list[Any]) -> None:
        sender = frames[0]
        first = bytes(frames[1]) if len(frames) > 1 else b""
        if len(first) == TICKET_FRAME and first.startswith(PREFIX):
            self._on_ticket(sender, first, frames[2:])
        elif first == PREFIX:
            self._on_call(sender, [bytes(frame) for frame in frames[2:]])
        else:
            why = prefix_error(first) or (
                f"{len(first)} bytes came first: expected a ticket of {TICKET_FRAME} bytes, then its tensors"
            )
            self._warn(why)
            code = Code.PROTOCOL_MISMATCH if prefix_error(first) else Code.MALFORMED
            self._send([sender, head(InlineTicket(sender, 0, 0, 0, 0, 0, 0), code, why)])

    def _warn(self, why: str) -> None:
        """Log a bad message; a stranger can send any number of them."""
        self._limited("bad message", why=why)

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message; return False if the client is gone."""
        self._again()
        return self._front.send(frames)

    def _on_ticket(self, sender: bytes, record: bytes, frames: Sequence[zmq.Frame]) -> None:
        sequence, lease, left, _, _, first, rows, _, version, incarnation = PACK_TICKET.unpack_from(record, len(PREFIX))
        ticket = InlineTicket(sender, sequence, left, first, rows, version, incarnation)
        if (held := self._lanes.get(lease)) is None:
            why = "this lease is not held: the connection was lost for a while, or the server restarted; take a new one"
            self._send([sender, head(ticket, Code.STALE_LEASE, why)])
            return
        try:
            if self._draining:
                raise refusal()
            held.submit(ticket, frames)
        except Error as error:
            self._send([sender, head(ticket, error.code, str(error))])
            return
        self._waiting[held] = None
        front = self._front
        if isinstance(front, ZmtpListener) and (link := front.link(sender)) is not None and held.connect(sender, link):
            front.give_first(sender, lambda: self._take_in(held))

    def _on_refused(self, sender: bytes, first: bytes, error: Error) -> None:
        """Answer a message for which there was no room: that of a ticket by its number."""
        ticket = InlineTicket(sender, 0, 0, 0, 0, 0, 0)
        if len(first) == TICKET_FRAME and first.startswith(PREFIX):
            sequence, _, left, _, _, row, rows, _, version, incarnation = PACK_TICKET.unpack_from(first, len(PREFIX))
            ticket = InlineTicket(sender, sequence, left, row, rows, version, incarnation)
        self._send([sender, head(ticket, error.code, str(error))])

    def _take_in(self, held: RelayedTickets) -> None:
        if held.take_in():
            self._waiting[held] = None

    def _answered(self, held: RelayedTickets) -> None:
        if not held.answer():
            for frames in held.answers(self._front.has_room):
                self._front.send(frames)
        if not held.waits:
            self._waiting.pop(held, None)
        elif held.owes and not self._pay_scheduled:
            self._pay_scheduled = True
            self._loop.call_later(_SOON, self._send_rest)

    def _send_rest(self) -> None:
        """Send answers that did not fit into the limits of slow clients."""
        self._pay_scheduled = False
        if not self._closed:
            for held in list(self._lanes.values()):
                if held.waits:
                    self._answered(held)

    def _on_call(self, sender: bytes, frames: list[bytes]) -> None:
        number = frames[0] if frames else b""
        try:
            if len(frames) != 2 or len(number) != 8:
                came = len(frames) + 1
                raise Error(f"a control message is 3 frames (prefix, 8 bytes, body), {came} came", Code.MALFORMED)
            require_control_size(frames[1])
            try:
                request = ControlRequest.FromString(frames[1])
            except DecodeError as error:
                raise Error(f"not a control request: {error}", Code.MALFORMED) from error
            self._carry_out(sender, number, request)
        except Error as error:
            self._reply(sender, number, _failed(error))

    def _carry_out(self, sender: bytes, number: bytes, request: ControlRequest) -> None:
        kind = request.WhichOneof("request")
        if kind is not None:
            require_name(getattr(getattr(request, kind), "model", ""))
        if self._draining and kind in ("lease", "load"):
            raise refusal()
        match kind:
            case "release":
                self._release(sender, request.release)
                self._reply(sender, number, ControlReply(done=Done()))
            case "lease":
                self._lease(sender, number, request)
            case "hello":
                self._pass_on(sender, number, request, _without_addresses)
            case "load":
                request.load.remote = True
                if request.load.keep:
                    self._kept.setdefault(sender, set()).add(request.load.model)
                self._pass_on(sender, number, request, lambda reply: reply)
            case "keep":
                self._kept.setdefault(sender, set()).add(request.keep.model)
                self._pass_on(sender, number, request, lambda reply: reply)
            case "status" | "model" | "unload" | "sleep" | "wake":
                self._pass_on(sender, number, request, lambda reply: reply)
            case _:
                raise Error(f"unknown control request {kind!r}: a newer client?", Code.MALFORMED)

    def _pass_on(self, sender: bytes, number: bytes, request: ControlRequest, answer: Answer) -> None:
        body = request.SerializeToString()
        require_control_size(body)  # again: for a larger one, the supervisor would close the connection with all calls
        self._number += 1
        ours = self._number.to_bytes(8, "little")
        try:
            if len(self._calls) >= _MOST_CALLS or self._calls_of[sender] >= _MOST_CALLS_EACH:
                raise zmq.Again
            self._again()  # sending consumes the socket's signal, perhaps that of an answer, also in vain
            self._back.send_multipart((PREFIX, ours, body), zmq.NOBLOCK)
        except zmq.Again:
            raise Error("too many calls wait for the server's answer: try again later", Code.BUSY) from None
        self._calls[ours] = (time.monotonic(), sender, number, answer)
        self._calls_of[sender] += 1

    def _keep_no_longer(self, name: str) -> None:
        """Shorten the time for which a model is kept; no one waits for the answer."""
        body = ControlRequest(keep=KeepRequest(model=name, keep=BEREFT)).SerializeToString()
        with contextlib.suppress(zmq.Again):
            self._back.send_multipart((PREFIX, bytes(8), body), zmq.NOBLOCK)
        self._again()

    def _on_reply(self, frames: list[zmq.Frame]) -> None:
        call = self._calls.pop(frames[1].bytes, None) if len(frames) == 3 else None
        if call is None:
            return  # it came after _CALL_TIMEOUT
        _, sender, number, answer = call
        self._calls_of[sender] -= 1
        try:
            reply = answer(ControlReply.FromString(frames[2].bytes))
        except Error as error:
            reply = _failed(error)
        except Exception as error:  # noqa: BLE001  one answer must not stop the others; its client is told
            reply = _failed(self._not_handled(error))
        if not self._reply(sender, number, reply) and reply.HasField("lease"):
            self._drop(reply.lease.lease)  # the client is reconnecting and will never learn of the lease

    def _reply(self, sender: bytes, number: bytes, reply: ControlReply) -> bool:
        return self._send([sender, PREFIX, number, reply.SerializeToString()])

    def _lease(self, sender: bytes, number: bytes, request: ControlRequest) -> None:
        """Lease a lane; a call that is repeated because its answer was lost with a connection gets the same lane."""
        for held in self._lanes.values():
            if (held.owner, held.call) == (sender, number) and held.granted.model.name == request.lease.model:
                self._reply(sender, number, ControlReply(lease=held.granted))
                return
        if any(call[1:3] == (sender, number) for call in self._calls.values()):
            return  # it will be answered when the server answers
        if len(self._lanes) >= _MOST_LANES:
            raise Error(f"{_MOST_LANES} lanes are leased to remote clients, which is the maximum", Code.BUSY)
        self._pass_on(sender, number, request, lambda reply: self._leased(sender, number, reply))

    def _leased(self, sender: bytes, call: bytes, reply: ControlReply) -> ControlReply:
        """Hold the leased lane for the client, and return the reply to the client."""
        if not reply.HasField("lease"):
            return reply
        lease = reply.lease
        lane = self._link.enter(lease)
        if lane is None:
            raise Error(f"lane {lease.lane} is locked by another client: ask again", Code.BUSY)
        try:
            self._require_share(sender, lease)
            number = secrets.randbits(63) | 1
            granted = Lease(model=lease.model, lease=number, rows=lease.rows, priority=lease.priority)
            granted.model.arena = ""
            held = RelayedTickets(lane, sender, call, granted, lease.first_row, lease.rows)
            held.watch(self._loop, self._words, self._serve)
        except BaseException:
            lane.close()
            raise
        self._lanes[number] = held
        return ControlReply(lease=granted)

    def _require_share(self, sender: bytes, lease: Lease) -> None:
        """Raise an Error if a client would hold more of a model's sessions than its share."""
        name, most = lease.model.name, sessions_share(self._share, lease.model.arena_rows)
        lanes = [held for held in self._lanes.values() if held.owner == sender]
        mine = [held.granted.rows for held in lanes if held.granted.model.name == name]
        if lease.model.session_state and sum(mine) + lease.rows > most:
            raise Error(
                f"this connection has leased {sum(mine)} rows of model {name!r}, which keeps state, and asks for "
                f"{lease.rows} more, expected at most {most} of {lease.model.arena_rows}: ask for fewer, or raise "
                f"'rows' of the model or 'sessions_share' of the server ({self._share:g}) in its configuration",
                Code.BUSY,
            )

    def _release(self, sender: bytes, request: ReleaseRequest) -> None:
        if (held := self._lanes.get(request.lease)) is not None and held.owner == sender:
            self._drop(request.lease)

    def _drop(self, number: int) -> None:
        held = self._lanes.pop(number)
        self._waiting.pop(held, None)
        self._lone = None
        held.close()


def _failed(error: Error) -> ControlReply:
    return ControlReply(error=ErrorMessage(code=error.code, message=plain(error)))


def _without_addresses(reply: ControlReply) -> ControlReply:
    """Return the server's hello without addresses that only its own host can reach."""
    if reply.HasField("server"):
        server = reply.server
        return ControlReply(server=ServerMessage(server_id=server.server_id, build=server.build, models=server.models))
    return reply
