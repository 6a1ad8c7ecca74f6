"""What goes out on a connection, within the windows the peer grants (RFC 9113 section 5.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from jurybox.server.gateway.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    LARGEST_WINDOW,
    SMALLEST_MAX_FRAME,
    Broken,
    frame,
)


class _Waiting:
    """What a stream has left to send: data, then perhaps a frame that ends it."""

    __slots__ = ("data", "ends", "sent", "then")

    def __init__(self, data: memoryview, *, ends: bool, then: bytes, sent: Callable[[int], None] | None) -> None:
        self.data = data
        self.ends = ends
        self.then = then
        self.sent = sent


class Outflow:
    """Sends data as windows allow and keeps the rest, in order within each stream.

    Args:
        write: takes bytes for the peer.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._window = DEFAULT_WINDOW
        self._initial = DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self._waiting: dict[int, deque[_Waiting]] = {}
        self.max_frame = SMALLEST_MAX_FRAME
        self.paused = False  # the socket takes nothing more for now

    def open(self, stream: int) -> None:
        """A stream begins."""
        self._windows[stream] = self._initial

    def close(self, stream: int) -> None:
        """A stream is over: what waits for it is dropped."""
        self._windows.pop(stream, None)
        self._waiting.pop(stream, None)

    def whole(self, stream: int, before: bytes, data: bytes, after: bytes) -> None:
        """Headers, all data and trailers of a stream: at once where the windows allow, the common case."""
        size = len(data)
        if size <= self._window and size <= self._windows[stream] and size <= self.max_frame and not self.paused:
            self._window -= size
            self._write(b"".join((before, frame(DATA, 0, stream, data), after)))
            self.close(stream)
            return
        self._write(before)
        self.data(stream, data, ends=False)
        self.then(stream, after)

    def data(self, stream: int, data: bytes, *, ends: bool, sent: Callable[[int], None] | None = None) -> None:
        """Send data; `sent` is told of every piece that went out, in bytes."""
        self._queue(stream, _Waiting(memoryview(data), ends=ends, then=b"", sent=sent))

    def then(self, stream: int, frames: bytes) -> None:
        """Send frames after the data that still waits."""
        if self._waiting.get(stream):
            self._queue(stream, _Waiting(memoryview(b""), ends=False, then=frames, sent=None))
        else:
            self._write(frames)

    def grant(self, stream: int, size: int) -> None:
        """The peer takes so many bytes more; stream 0 is the connection. Raises Broken."""
        if stream == 0:
            self._window = _checked(self._window + size)
            self.flush()
        elif stream in self._windows:
            self._windows[stream] = _checked(self._windows[stream] + size)
            self._flush(stream)

    def initial(self, size: int) -> None:
        """The peer changes the window that streams begin with, and by as much those that are open. Raises Broken."""
        change = _checked(size) - self._initial
        self._initial = size
        for stream in self._windows:
            self._windows[stream] = _checked(self._windows[stream] + change)
        self.flush()

    def flush(self) -> None:
        """Send what can be sent."""
        for stream in list(self._waiting):
            self._flush(stream)

    def _queue(self, stream: int, waiting: _Waiting) -> None:
        if stream in self._windows:  # else it was reset meanwhile
            self._waiting.setdefault(stream, deque()).append(waiting)
            self._flush(stream)

    def _flush(self, stream: int) -> None:
        queue = self._waiting.get(stream)
        while queue and not self.paused:
            head = queue[0]
            size = len(head.data)
            piece = min(size, self.max_frame, self._window, self._windows[stream])
            if piece <= 0 < size:
                return
            last = piece == size
            if size or head.ends:
                self._window -= piece
                self._windows[stream] -= piece
                self._write(frame(DATA, END_STREAM if last and head.ends else 0, stream, bytes(head.data[:piece])))
                if head.sent is not None:
                    head.sent(piece)
            head.data = head.data[piece:]
            if last:
                queue.popleft()
                if head.then:
                    self._write(head.then)
        if not queue:
            self._waiting.pop(stream, None)


def _checked(window: int) -> int:
    if window > LARGEST_WINDOW:
        raise Broken(FLOW_CONTROL_ERROR, "a window beyond 2^31 - 1")
    return window
