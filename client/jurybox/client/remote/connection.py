"""A lane's connection to a relay: when it is replaced, and when its server counts as gone."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from jurybox.client.link import OneEngine
from jurybox.client.remote.keys import Keys
from jurybox.client.transports.direct import dial
from jurybox.client.transports.zmq_socket import BEAT_MS, MOST_BYTES, SILENCE_MS, ZmqSocket
from jurybox.protocol.descriptors import require
from jurybox.protocol.scoreboard import EngineState

if TYPE_CHECKING:
    from jurybox.native import Zmtp

_TIMEOUT = 10.0  # seconds without a connection after which the server counts as gone
_FILES_OF_OWN = 3  # file descriptors of a direct socket and the event loop that watches it
_REDIAL = 0.05  # seconds between two attempts to connect
_HANDSHAKE = 5.0  # seconds that a handshake may take
IDLE = 5.0  # seconds without received bytes after which a connection is checked before it is used
_RETURN = 1.0  # seconds to wait for a new connection that replaces one closed while idle


class Connection(OneEngine):
    """A lane's connection to the server's relay: a link, and the next one whenever it breaks.

    The engine's incarnation is incremented with each break, so that the lane sends its tickets again. A link without an
    I/O thread is read only during calls. So the relay closes it after ten idle seconds, and the next call reconnects.

    Args:
        dial: opens a link; its argument counts the attempts since a link last stood.

    Attributes:
        link: None if the last attempt to connect failed immediately.
        renewed: called when `link` has been replaced; the previous one may already be closed.
    """

    def __init__(self, dial: Callable[[int], Zmtp | ZmqSocket | None]) -> None:
        super().__init__()
        self._open = dial
        self.renewed: Callable[[], None] = lambda: None
        self.link: Zmtp | ZmqSocket | None = None
        self._attempt, self._closed = 0, False
        self._pinged_at: float | None = None
        self._broken_at: float | None = time.monotonic()  # not connected yet
        self._dial()

    @classmethod
    def direct(cls, address: str) -> Connection:
        """Connect over a socket that the caller's thread reads (transports/direct.py). It does not support CURVE."""
        require(_FILES_OF_OWN, f"a connection to {address}")
        return cls(lambda attempt: dial(address, b"", MOST_BYTES, attempt))

    @classmethod
    def over_libzmq(cls, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None) -> Connection:
        """Connect over libzmq, with CURVE if there are keys."""
        return cls(lambda _: ZmqSocket(context, address, keys))

    def _dial(self) -> None:
        self._dialled_at = time.monotonic()
        link = None if self._closed else self._open(self._attempt)
        before, self.link = self.link, link  # not earlier: a nested call may have replaced it too
        self._attempt += 1
        self._pinged_at = None
        self.renewed()
        if before is not None:
            before.close()
        if self._closed:  # by a nested call, maybe while the link was opened
            self.close()

    def mend(self) -> None:
        """Replace a link within whose message a call was interrupted or this one is nested: its server is not gone."""
        if isinstance(link := self.link, ZmqSocket) and link.torn:
            link.close()
            self.engines["incarnation"] += 1
            self.engines["state"] = EngineState.SERVING
            self._broken_at, self._attempt = time.monotonic(), 0
            self._dial()

    def server_lives(self) -> bool:
        """Return whether the server is connected, or was last connected less than _TIMEOUT seconds ago.

        A new connection counts from its creation. A broken connection is replaced. See Scoreboard.server_lives.
        """
        now, link = time.monotonic(), self.link
        if link is not None and not link.broken:
            link.look()
            if not link.broken and link.ready:
                if self._is_silent(link, now):
                    link.close()
                else:
                    self._broken_at = None
                    self.engines["state"] = EngineState.SERVING
                    return True
        if link is not None and link.broken and link.arrived:
            return True  # what came before its end is read first
        if link is None or link.broken:
            # If nobody has looked since it was made, it counts as standing until now: the relay closes idle ones.
            if self._broken_at is None or (link is not None and link.was_ready):
                self._broken_at = now
                self.engines["incarnation"] += 1
                self.engines["state"] = EngineState.ABSENT
                self._attempt = 0
                self._dial()
            elif now - self._dialled_at >= _REDIAL:
                if self.engines["state"] == EngineState.SERVING:  # the first attempt failed: its tickets are lost
                    self.engines["incarnation"] += 1
                self._dial()
        elif now - self._dialled_at >= _HANDSHAKE:
            link.close()  # the handshake timed out; the next check connects again
        return self._broken_at is None or time.monotonic() - self._broken_at < _TIMEOUT

    def stands(self) -> bool:
        """Return whether messages can be exchanged; replace a connection that was closed while idle."""
        link = self.link
        if link is None:
            return False
        if link.ready and link.silence < IDLE:
            return True
        if link.look() or not self.server_lives() or (link := self.link) is None:
            return link is not None and link.ready
        until = time.monotonic() + _RETURN
        while not link.ready and not link.broken and time.monotonic() < until:
            select.select([link.descriptor], [], [], 0.05)
            link.look()
        self.server_lives()
        return link.ready

    def _is_silent(self, link: Zmtp | ZmqSocket, now: float) -> bool:
        """Return whether the peer has not answered a ping in time; send a ping if one is due."""
        if not link.unanswered or link.silence < BEAT_MS / 1e3:
            self._pinged_at = None
        elif self._pinged_at is None:
            self._pinged_at = now
            link.ping()
        elif now - self._pinged_at > SILENCE_MS / 1e3:
            return True
        return False

    def close(self) -> None:
        """Close the socket, and open none again; what was not sent yet is dropped."""
        self._closed = True
        if self.link is not None:
            self.link.close()
