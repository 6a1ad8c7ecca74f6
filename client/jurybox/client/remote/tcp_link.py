"""A connection to a tcp:// server: control calls and lanes through its relay."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import NoReturn

import zmq

from jurybox.client.control import Control
from jurybox.client.lane import Lane
from jurybox.client.link import ControlLink, Transfer, spec_of
from jurybox.client.remote.connection import Connection, new_identity, open_socket
from jurybox.client.remote.curve import Keys
from jurybox.client.remote.inline_door import InlineDoor
from jurybox.client.remote.rows_here import RowsHere, out_of_reach
from jurybox.protocol.control_pb2 import ReleaseRequest
from jurybox.protocol.descriptors import require
from jurybox.protocol.errors import Error, ServerGone
from jurybox.protocol.spec import ModelSpec

_FILES_OF_A_LINK = 16  # libzmq's threads and sockets; some at once only
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
        self._lock = threading.Lock()
        require(_FILES_OF_A_LINK, "connecting to a server")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = new_identity()  # one for all its sockets: leases are the client's that bears it
        try:
            super().__init__(
                Control(self._context, address, lambda: open_socket(self._context, address, keys, identity)),
                os.getpid(),
            )
            self._greet(timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def closed(self) -> bool:
        return self._context.closed

    def close(self) -> None:
        """As Link.close."""
        self._control.close()
        self._context.destroy(linger=0)

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
            spec = spec_of(lease.model)
            memory = RowsHere(spec, lease.rows)
            connection = Connection(self._context, self._address, self._keys)

        def give_back() -> None:
            # Unanswered, the server still notices when the connection ends.
            with contextlib.suppress(Error):
                self._call(1.0, release=ReleaseRequest(lane=lease.lane, lease=lease.lease))

        door = InlineDoor(connection, memory, lease.lease)
        lane = Lane(name, connection, memory, door, lease.lease, 0, lease.rows, give_back, far=True)
        return lane, spec, lease.model.max_batch

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
