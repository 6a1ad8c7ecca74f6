"""Transports without a socket."""

from __future__ import annotations

import asyncio


class Wire(asyncio.Transport):
    """A transport that notes what it is asked for.

    Attributes:
        sent: what was written.
        unsent: the bytes in its buffer, as a test sets them.
        reads: whether it reads.
        closed, aborted, ended: whether `close`, `abort` and `write_eof` were called.
    """

    def __init__(self, *, peer: object = None, can_end: bool = False) -> None:
        super().__init__({"peername": peer})
        self.sent, self.unsent = b"", 0
        self.closed = self.aborted = self.ended = False
        self.reads = True
        self._can_end = can_end

    def write(self, data):
        self.sent += data

    def get_write_buffer_size(self):
        return self.unsent

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def is_closing(self):
        return self.closed or self.aborted

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True

    def can_write_eof(self):
        return self._can_end

    def write_eof(self):
        self.ended = True

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True
