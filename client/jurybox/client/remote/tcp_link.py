"""A connection to a tcp:// server: control calls and lanes through its relay."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from jurybox.client.control import Control, Wires
from jurybox.client.lane import Lane
from jurybox.client.link import ControlLink, Transfer, spec_of
from jurybox.client.remote.connection import Connection, Keys, new_identity, open_socket
from jurybox.client.remote.inline_transport import InlineTransport
from jurybox.client.remote.rows_here import RowsHere, out_of_reach
from jurybox.protocol.control_pb2 import ControlReply, Lease, ReleaseRequest
from jurybox.protocol.errors import Error, ServerGone
from jurybox.protocol.spec import ModelSpec

_ATTEMPT = 3.0  # seconds for one connection of those tried until the first answer


class TcpLink(ControlLink):
    """Lanes are the relay's, held for this client as long as its connection stands.

    Args:
        address: tcp://host:port.
        keys: CURVE keys; None: in the open.
        timeout: seconds to wait for a server that is still starting.
    """

    def __init__(self, address: str, keys: Keys | None, timeout: float) -> None:
        self._address = address
        self._keys = keys
        self._left: deque[ReleaseRequest] = deque()  # leases of lanes that were lost without a word
        super().__init__(self._control_anew())
        try:
            self._greet(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """As Link.close."""
        if self._wires is not None:
            self._control.close()
        self._unwire()
        self._closed = True

    def publisher(self, name: str, transfer: Transfer, timeout: float) -> NoReturn:
        """As Link.publisher: there is none over tcp://."""
        raise out_of_reach(name)

    def weights(self, name: str, timeout: float) -> NoReturn:
        """As Link.weights: there is none over tcp://."""
        raise out_of_reach(name)

    def lease(self, name: str, rows: int, timeout: float) -> tuple[Lane, ModelSpec, int]:
        """As Link.lease."""
        deadline = time.monotonic() + timeout
        with self._lock:
            lease = self._grant(name, rows, deadline, timeout)
            request = ReleaseRequest(lane=lease.lane, lease=lease.lease)
            left = self._left
            try:
                spec = spec_of(lease.model)
                memory = RowsHere(spec, lease.rows)
                assert self._wires is not None
                connection = Connection(self._wires.context, self._address, self._keys)
                transport = InlineTransport(connection, memory, lease.lease)
                lane = Lane(
                    name,
                    connection,
                    memory,
                    transport,
                    lease.lease,
                    0,
                    lease.rows,
                    lambda: self._release(request),
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
        """One identity for all its sockets, since leases are the client's that bears it; another in a forked child."""
        address, keys, identity, left = self._address, self._keys, new_identity(), self._left

        def unwanted(lease: Lease) -> None:
            left.append(ReleaseRequest(lane=lease.lane, lease=lease.lease))

        return lambda wires: Control(
            wires.context, address, lambda: open_socket(wires.context, address, keys, identity), far=unwanted
        )

    def _release(self, request: ReleaseRequest) -> None:
        # Unanswered, the server still notices when the connection ends.
        with contextlib.suppress(Error):
            if not self._closed:
                self._control.call(1.0, release=request)

    def _call(self, timeout: float, **request: Any) -> ControlReply:
        while self._left:
            self._release(self._left[0])
            self._left.popleft()
        return super()._call(timeout, **request)

    def _greet(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while True:
            try:
                self._call(min(_ATTEMPT, max(0.1, until - time.monotonic())), hello=self.hello())
                return
            except ServerGone:
                if time.monotonic() < until:
                    continue  # over a new connection: one whose handshake failed while the server started is no use
                asked = "with these keys" if self._keys else "without keys: if the server has some, give its public one"
                raise ServerGone(
                    f"no answer from {self._address} within {timeout:.1f} s: is a server running there that listens "
                    f"with server.tcp? It was asked {asked} (server_key, client_key)"
                ) from None
