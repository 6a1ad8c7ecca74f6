"""ModelInfer calls over HTTP/2 connections that the calling threads read and write: no other thread is woken."""

from __future__ import annotations

import contextlib
import os
import select
import ssl
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import grpc

from jurybox.client.in_flight import Claim
from jurybox.client.link import closed_connection
from jurybox.client.remote.grpc_channel import CORE, authority_of, host_and_port, through_proxy
from jurybox.client.remote.http2_call import LineCall
from jurybox.client.remote.http2_line import Line, LineTarget, are_possible
from jurybox.client.remote.infer_calls import CLOSED, INFER, Failed, Metadata, Outcome
from jurybox.client.transports.transport import Watching
from jurybox.protocol import forks
from jurybox.protocol.descriptors import remedy
from jurybox.protocol.errors import TooManyFiles

_PATIENCE = 1.0  # seconds that a start may wait for the connection, and for room for the request
_SWEEP, _FEW = 0.1, 8  # seconds between two looks at all calls, unless they are few
T = TypeVar("T")


def can_dial(address: str, authority: str | bytes | None) -> bool:
    """Return whether calls can be made so: libnghttp2 is there, and no proxy between.

    Without an authority of the server's certificate, grpcio verifies it, with the authorities that it brings along. It
    also makes the calls if JURYBOX_GRPC_HTTP2 says so, as a server's setting does.
    """
    if os.environ.get("JURYBOX_GRPC_HTTP2") == "grpcio" or not are_possible():
        return False
    if through_proxy(address) or not host_and_port(address)[1].isdecimal():
        return False
    return address.startswith("grpc://") or authority_of(authority) is not None


class Http2Calls:
    """See InferCalls. Each call takes a connection for itself; those that are not used are kept.

    Args:
        address: grpc://host:port or grpcs://host:port.
        metadata: sent with every call, such as a token.
        authority: for grpcs://, the certificate of the server's authority: the path of a PEM file, or its contents.
    """

    def __init__(self, address: str, metadata: Metadata, authority: str | bytes | None = None) -> None:
        host, port = host_and_port(address)
        context = _context(authority) if address.startswith("grpcs://") else None
        head = [
            (":method", "POST"),
            (":scheme", "https" if context else "http"),
            (":path", INFER),
            (":authority", address.partition("://")[2]),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        self._target = LineTarget(host, port, head, context)
        self._free: list[Line] = []  # one step of the interpreter takes one out or puts one back
        self._made: weakref.WeakSet[Line] = weakref.WeakSet()
        self._attempt = 0  # of the next line: another one after a connection that did not come about
        self.closed = False
        forks.register(self)

    def ask(self, request: bytes, timeout: float) -> bytes:
        CORE.check()
        call = LineCall(request, timeout)
        line: Line | None = None
        try:
            while call.outcome is None:
                if (left := call.left) <= 0:
                    call.late()
                elif line is not None and call.line is line:
                    line.wait(left)
                    if line.broken:
                        self.lose(line)
                elif (pause := call.again_at - time.monotonic()) > 0:
                    time.sleep(min(pause, left))
                else:
                    if line is None or not line.open:
                        line = self.take(looks=line is not None)
                    line.begin(call)
        except BaseException:  # the line may be within a message
            if line is not None:
                line.close()
            raise
        if line is not None:
            line.cancel(call)  # if it is late
            self.give(line)
        if isinstance(call.outcome, bytes):
            return call.outcome
        raise call.outcome

    def started(self) -> Http2Started:
        return Http2Started(self)

    def close(self) -> None:
        self.closed = True
        while self._free:
            with contextlib.suppress(IndexError):  # another thread took it
                self._free.pop().close()

    def take(self, *, looks: bool) -> Line:
        """Return a line that nobody else uses.

        Args:
            looks: whether to look first that the gateway has not closed it: if it closed one, it closed others, too.

        Raises:
            Refused, TooManyFiles: as `InferCalls.ask`.
        """
        if self.closed:
            raise closed_connection()
        with contextlib.suppress(IndexError):  # there is none
            while True:
                line = self._free.pop()
                while looks and line.turn():
                    pass  # before its end there may be a question whether we are still there
                if not looks or line.idle:
                    return line
                line.close()
        line = Line(self._target, self._attempt)
        self._made.add(line)
        return line

    def give(self, line: Line) -> None:
        """Keep a line for the next call, or close it if it cannot be used."""
        self._learn(line)
        if not line.idle:
            line.close()
            return
        self._free.append(line)
        if self.closed:  # meanwhile
            self.close()

    def lose(self, line: Line) -> None:
        """Close a broken line, and let its calls begin again: at once if the host has addresses that were not tried."""
        self._learn(line)
        line.close()
        line.lose(free=not line.was_ready and (line.attempt + 1) % line.addresses != 0)

    def _learn(self, line: Line) -> None:
        """Choose the address of the next line: the same if this one came about, else the next."""
        self._attempt = line.attempt if line.was_ready else line.attempt + 1

    def _after_fork_in_child(self) -> None:
        """Close the descriptors, which keep the parent's connections open; nothing is sent."""
        self._free = []
        for line in list(self._made):
            line.close()


class Http2Started:
    """See StartedCalls. A line carries several calls.

    A nested call leaves a line alone that is used further down in its thread. If it must wait for calls there, it makes
    them again on another line. Those of a line in which a call was interrupted are made again, too.

    Args:
        calls: gives the lines.
    """

    def __init__(self, calls: Http2Calls) -> None:
        self._calls = calls
        self._lines: list[Line] = []
        self._under_way: dict[LineCall, None] = {}  # in an order, as a set has none
        self._ended = 0  # calls
        self._swept = 0.0
        self._epoll: select.epoll | None = None  # an event loop can watch it, whichever lines there are
        self._polled: dict[int, tuple[Line, int]] = {}  # by descriptor, with the events
        self._watching: Watching | None = None

    def start(self, request: bytes, timeout: float, done: Callable[[Outcome], None]) -> None:
        CORE.check()
        if self._calls.closed:
            raise closed_connection()
        call = LineCall(request, timeout)

        def told(outcome: Outcome) -> None:
            done(outcome)
            self._ended += 1
            self._under_way.pop(call, None)

        call.done = told
        ended, watching = self._ended, self._watching
        self._begin(call, _PATIENCE if watching is None or not watching.on else 0.0)
        if call.outcome is None:  # not earlier: if this is interrupted, the lane starts it again
            self._under_way[call] = None
        if call.outcome is not None:  # a nested call may have ended it between the two
            self._under_way.pop(call, None)
        if self._ended != ended and watching is not None and watching.on:
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                watching.tell()

    def wait(self, timeout: float) -> None:
        until, ended = time.monotonic() + timeout, self._ended
        while True:
            self._tend(waits=timeout > 0)
            left = until - time.monotonic() if self._ended == ended else 0.0
            for descriptor, _ in self._polls.poll(max(0.0, min(left, _SWEEP))):
                if (polled := self._polled.get(descriptor)) is not None and not polled[0].used:
                    self._use(polled[0], polled[0].turn)
            if self._ended != ended or time.monotonic() >= until:
                return

    def watch(self, watching: Watching) -> None:
        if (earlier := self._watching) is not None:
            earlier.unread(self._polls.fileno())
        watching.read(self._polls.fileno())
        self._watching = watching

    def close(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None and self._epoll is not None:
            watching.unread(self._epoll.fileno())
        lines, self._lines, self._under_way = self._lines, [], {}
        for line in lines:
            self._forget(line)
            self._calls.give(line)
        if self._epoll is not None:
            self._epoll.close()

    def forked(self) -> None:
        self._watching, self._lines, self._under_way, self._polled = None, [], {}, {}
        if self._epoll is not None:
            self._epoll.close()

    # ---- private

    @property
    def _polls(self) -> select.epoll:
        if self._epoll is None:
            try:
                self._epoll = select.epoll()
            except OSError as error:
                raise TooManyFiles(f"no epoll descriptor: {remedy()}") from error
        return self._epoll

    def _use(self, line: Line, action: Callable[[], T]) -> T:
        """Do something with a line; poll it afterwards, or let its calls begin again if it broke."""
        claim = Claim()
        line.user = weakref.ref(claim)
        try:
            result = action()
        except BaseException:  # it may be within a message
            line.tear()
            raise
        line.user = None
        self._settle(line)
        return result

    def _settle(self, line: Line) -> None:
        """Poll a line for what it wants, or drop it if it is broken."""
        if line.broken:
            self._forget(line)
            self._calls.lose(line)
            with contextlib.suppress(ValueError):  # a nested call has done so
                self._lines.remove(line)
            return
        descriptor, wants = line.descriptor, line.wants
        if self._polled.get(descriptor) == (line, wants):
            return
        try:
            if not self._registers(descriptor, wants):
                self._polls.modify(descriptor, wants)
        except (OSError, ValueError):
            if not line.broken:  # else a nested call has closed it
                raise
        else:
            self._polled[descriptor] = line, wants

    def _registers(self, descriptor: int, wants: int) -> bool:
        """Poll a descriptor; return False if it is polled already."""
        try:
            self._polls.register(descriptor, wants)
        except FileExistsError:
            return False
        return True

    def _begin(self, call: LineCall, patience: float) -> None:
        """Begin a call; wait for room at most so many seconds."""
        until = time.monotonic() + min(patience, call.left)
        while call.line is None and call.outcome is None and call.again_at <= time.monotonic():
            line = next((line for line in self._lines if line.open and not line.used), None)
            if line is None:
                line = self._calls.take(looks=True)
                self._lines.append(line)
            self._use(line, partial(_send, line, call, until))

    def _forget(self, line: Line) -> None:
        """Stop polling a line that is about to be closed or used elsewhere."""
        descriptor = line.descriptor
        if self._polled.get(descriptor, (None,))[0] is line:
            with contextlib.suppress(OSError, ValueError):  # a nested call has done so
                self._polls.unregister(descriptor)
            # Last: if a nested call has closed this line, and polls another one here, `_tend` polls that again.
            self._polled.pop(descriptor, None)

    def _tend(self, *, waits: bool) -> None:
        """Let calls begin again that no line carries, and end those whose time is over.

        Args:
            waits: whether this call waits for them. Those that it is nested in go on only afterwards.
        """
        for line in list(self._lines):
            if line.torn:
                line.tear()
            if not line.used:
                self._settle(line)  # also because a call was interrupted before it did so
                if line.late:
                    self._use(line, line.turn)
            elif waits:
                line.leave()
                self._forget(line)  # what comes there would wake this wait all the time; `_use` polls it again
        calls = list(self._under_way)
        if self._calls.closed:
            for call in calls:
                call.finish(CLOSED)
            return
        now = time.monotonic()
        if len(calls) > _FEW and now < self._swept + _SWEEP:
            return
        self._swept = now
        for call in calls:
            if now >= call.deadline:
                self._catch_up(call)
                if call.outcome is None and (carrier := call.line) is not None:
                    carrier.cancel(call)
                call.late()
            elif call.line is None and call.again_at <= now:
                try:
                    self._begin(call, 0.0)
                except TooManyFiles as error:
                    call.lost(Failed(grpc.StatusCode.UNAVAILABLE, str(error)), free=False)

    def _catch_up(self, call: LineCall) -> None:
        """Read what has come for a call whose time is over: perhaps its answer did in time, and nobody has waited."""
        while call.outcome is None and (line := call.line) is not None and not line.used:
            if not self._use(line, line.turn):
                return


def _send(line: Line, call: LineCall, until: float) -> None:
    stuck = bool(line.calls) and line.sending  # although the start of an earlier call has waited
    line.begin(call)
    while not stuck and line.sending and (left := until - time.monotonic()) > 0:
        line.wait(left)


def _context(authority: str | bytes | None) -> ssl.SSLContext:
    """Return the settings of TLS, as gRPC's: the server's name is verified, and any certificate may be an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Beside the certificates there may be any text, such as the authorities' names.
    context.load_verify_locations(cadata=(authority_of(authority) or b"").decode("ascii", "ignore"))
    context.set_alpn_protocols(["h2"])
    return context
