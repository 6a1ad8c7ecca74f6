"""A connection to a tcp:// server: control calls, and lanes whose tickets and rows are sent through its relay."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from jurybox.client.control import Control, Wires, say_that_it_waits
from jurybox.client.lane import Lane
from jurybox.client.link import ControlLink, RowsHere, spec_of, traced, wants_traces
from jurybox.client.remote.connection import Connection
from jurybox.client.remote.keys import Keys
from jurybox.client.remote.tcp import TcpTransport
from jurybox.client.transports.direct import can_dial
from jurybox.client.transports.transport import Transport
from jurybox.client.transports.zmq_socket import open_socket
from jurybox.protocol.address import out_of_reach
from jurybox.protocol.control_pb2 import ControlReply, Lease, ReleaseRequest
from jurybox.protocol.errors import Error, ServerGone, Timeout
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec

_ATTEMPT = 3.0  # seconds that each connection attempt gets until the server first answers


class TcpLink(ControlLink):
    """A link to a relay, which holds the lanes on behalf of this client while the client stays connected.

    Args:
        address: tcp://host:port.
        keys: CURVE keys; None: no encryption.
        timeout: seconds to wait for a server that is still starting.
    """

    def __init__(self, address: str, keys: Keys | None, timeout: float) -> None:
        self._address = address
        self._keys = keys
        self._traces = wants_traces()
        self._left: deque[ReleaseRequest] = deque()  # leases to release: their lanes were dropped without `close`
        super().__init__(self._control_anew())
        self._greet_first(timeout)

    def lease(
        self, name: str, rows: int, timeout: float, *, wait: bool = True, priority: int = NORMAL
    ) -> tuple[Lane, ModelSpec, int]:
        lease = self._grant(name, rows, time.monotonic() + timeout, timeout, wait=wait, priority=priority)
        request = ReleaseRequest(lane=lease.lane, lease=lease.lease)
        left = self._left
        try:
            spec = spec_of(lease.model)
            memory = RowsHere(spec, lease.rows)
            if self._keys is None and can_dial(self._address):
                connection = Connection.direct(self._address)
            else:
                context: Any = self._context
                try:
                    connection = Connection.over_libzmq(context, self._address, self._keys)
                except zmq.ZMQError:
                    if self._closed:  # by a handler within this call: the context waits for what was opened since
                        for socket in list(context.held.values()):
                            socket.close(0)
                    self._require_open()
                    raise
            transport: Transport = TcpTransport(connection, memory, lease.lease)
            if self._traces:
                transport = traced(transport, name, lane=lease.lane)
            lane = Lane(
                name,
                connection,
                memory,
                transport,
                lease.lease,
                0,
                lease.rows,
                lambda: self._give_back(request),
                leave=lambda: left.append(request),
                far=True,
            )
        except BaseException:
            left.append(request)
            raise
        return lane, spec, lease.model.max_batch

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._left = deque()
        self._open_control = self._control_anew()

    def _control_anew(self) -> Callable[[Wires], Control]:
        """Return a function that opens the control channel.

        All its sockets have the same identity, because the relay grants leases to an identity. A forked child gets
        another one.
        """
        address, keys, left = self._address, self._keys, self._left
        identity = b"R" + secrets.token_bytes(15)  # random: no other client can guess it and impersonate this one

        def unwanted(lease: Lease) -> None:
            left.append(ReleaseRequest(lane=lease.lane, lease=lease.lease))

        return lambda wires: Control(
            wires.context, address, lambda: open_socket(wires.context, address, keys, identity), far=unwanted
        )

    def _give_back(self, request: ReleaseRequest) -> None:
        self._left.append(request)
        if not self._closed:
            with contextlib.suppress(Error):
                self._release_left(1.0)

    def _release_left(self, timeout: float) -> None:
        """Release the leases that lanes have left, unless this thread is within a call: the next one does it."""
        control = self._control(timeout)
        while self._left and not control.under_way:
            try:
                request = self._left.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                control.call(timeout, release=request)
            except Timeout:  # other threads have the channel
                self._left.append(request)
                return
            except Error:
                pass  # the server releases the lease when the connection closes

    def _call(self, timeout: float, **request: Any) -> ControlReply:
        until = time.monotonic() + timeout
        if self._left:
            self._release_left(min(1.0, timeout / 2))
        return super()._call(max(0.0, until - time.monotonic()), **request)

    def _greet(self, timeout: float) -> None:
        until, told = time.monotonic() + timeout, False
        while True:
            try:
                self._call(min(_ATTEMPT, max(0.1, until - time.monotonic())), hello=self.hello())
                return
            except ServerGone:
                if time.monotonic() < until:
                    told = told or say_that_it_waits(self._address, timeout)
                    continue  # with a new connection: libzmq does not retry one whose handshake the server refused
                asked = "with these keys" if self._keys else "without keys: if the server has some, give its public one"
                raise ServerGone(
                    f"no answer from {self._address} within {timeout:.1f} s: is a server running there that listens "
                    f"with server.tcp? It was asked {asked} (server_key, client_key){out_of_reach(self._address)}"
                ) from None
