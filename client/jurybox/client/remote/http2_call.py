"""A call that a line of HTTP/2 carries, and what becomes of it when it fails or its line breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

import grpc

from jurybox.client.remote.infer_calls import Failed, Outcome

if TYPE_CHECKING:
    from jurybox.client.remote.http2_line import Line

MOST_BYTES = 1 << 30  # of a message
_ATTEMPTS = 5  # of a call whose gateway is unavailable: one that was killed is restarted within seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds between them
_STATUS = {status.value[0]: status for status in grpc.StatusCode}
# The status of a call that ended without one, by HTTP's and by HTTP/2's code, as gRPC's specification has them
# (github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md, PROTOCOL-HTTP2.md).
_OF_HTTP = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys(("429", "502", "503", "504"), grpc.StatusCode.UNAVAILABLE),
}
_OF_RESET = {
    7: grpc.StatusCode.UNAVAILABLE,
    8: grpc.StatusCode.CANCELLED,
    11: grpc.StatusCode.RESOURCE_EXHAUSTED,
    12: grpc.StatusCode.PERMISSION_DENIED,
}
_RESET, _UNSEEN, _TOO_LARGE, _UNREADABLE = 1, 2, 3, 4  # how a call has ended; see native.GrpcClient.receive
Ended: TypeAlias = "tuple[int, int, list[tuple[bytes, bytes]]]"


class LineCall:
    """A ModelInfer call, from its request to its outcome. It moves to another line if its own breaks.

    Attributes:
        outcome: None while it is under way.
        done: called with the outcome.
        line: the line that carries it; None: it is to begin, not before `again_at` (monotonic clock).
    """

    __slots__ = (
        "_attempts",
        "_freely",
        "_said",
        "again_at",
        "deadline",
        "done",
        "line",
        "number",
        "outcome",
        "request",
    )

    def __init__(self, request: bytes, timeout: float) -> None:
        self.request = request
        self.deadline = time.monotonic() + timeout
        self.again_at = 0.0
        self.line: Line | None = None
        self.number = 0
        self.outcome: Outcome | None = None
        self.done: Callable[[Outcome], None] | None = None
        self._attempts = self._freely = 0
        self._said: Failed | None = None  # why the gateway was unavailable, in its own words

    @property
    def left(self) -> float:
        """Seconds until its deadline."""
        return self.deadline - time.monotonic()

    def finish(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        if (done := self.done) is not None:
            done(outcome)  # first: an interrupt in between makes the call again, which may be told twice
        if self.outcome is None:  # else a nested call has finished it meanwhile
            self.outcome = outcome
        self.done = None  # which refers to this call: without it nothing is left to the garbage collector

    def late(self) -> None:
        self.finish(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def lost(self, why: Failed, *, free: bool) -> None:
        """Let it begin again, unless it has done so too often.

        Args:
            free: the gateway was not unavailable: begin at once, a few times.
        """
        self.line = None
        if free and self._freely < _ATTEMPTS:
            self._freely += 1
            return
        self._attempts += 1
        if self._attempts >= _ATTEMPTS:
            self.finish(self._said or why)
        else:
            pause = min(_FIRST_PAUSE * 2 ** (self._attempts - 1), _LONGEST_PAUSE)
            self.again_at = time.monotonic() + pause

    def ended(self, how: bytes | Ended) -> None:
        """Take in a result of native.GrpcClient."""
        if isinstance(how, bytes):
            self.finish(how)
            return
        failed = failure_of(how)
        if failed.code() is grpc.StatusCode.UNAVAILABLE:
            if how[0] != _UNSEEN:
                self._said = failed
            self.lost(failed, free=how[0] == _UNSEEN)
        else:
            self.finish(failed)


def failure_of(ended: Ended) -> Failed:
    """Return the error of a call that did not succeed."""
    how, detail, given = ended
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in given}
    trailing = [(name, value) for name, value in fields.items() if not name.startswith((":", "grpc-"))]
    if how == _TOO_LARGE:
        return Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the response has {detail} bytes, more than {MOST_BYTES}")
    if how == _UNREADABLE:
        return Failed(grpc.StatusCode.UNIMPLEMENTED, "the response is compressed, incomplete or not a single one")
    if "grpc-status" in fields:
        number = fields["grpc-status"]
        status = _STATUS.get(int(number) if number.isdecimal() else -1, grpc.StatusCode.UNKNOWN)
        if status is grpc.StatusCode.OK:
            return Failed(grpc.StatusCode.UNIMPLEMENTED, "the call succeeded without a response")
        return Failed(status, unquote(fields.get("grpc-message", "")), trailing)
    if how in (_RESET, _UNSEEN):
        status = _OF_RESET.get(detail, grpc.StatusCode.INTERNAL)
        return Failed(status, f"the gateway reset the call (HTTP/2 error {detail})", trailing)
    status = _OF_HTTP.get(fields.get(":status", ""), grpc.StatusCode.UNKNOWN)
    return Failed(status, f"HTTP status {fields.get(':status', 'missing')}, not gRPC", trailing)
