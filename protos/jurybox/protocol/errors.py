"""The table of errors: codes of the protocol, exceptions, HTTP and gRPC statuses.

Every error that a caller can get is a row of `TABLE`: transports send the code and a message, the client raises the
exception, the gateway returns the status.

Pass text of a model, a file or a client through `plain` or `said` before it goes into a message, a log or a document:
it may have lone surrogates, which cannot be encoded, be megabytes long, or raise when it is formatted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

SLEEPS = "sleeping"  # how the reason of an unavailable model that sleeps begins, in a repository's index
MOST_TEXT = 4000  # characters of a text from elsewhere that travel


class Code(IntEnum):
    """What happened to a request. The numbers are part of the protocol: never reuse one."""

    OK = 0
    TIMEOUT = 1
    BUSY = 2
    MODEL_NOT_FOUND = 3
    SPEC_MISMATCH = 4
    SERVER_GONE = 5
    PROTOCOL_MISMATCH = 6
    REFUSED = 7
    NOT_READY = 8
    DRAINING = 9
    MODEL_FAILED = 10
    MALFORMED = 11
    UNAUTHENTICATED = 12
    TOO_LARGE = 13
    STALE_LEASE = 14
    UNSUPPORTED = 15
    VERSION_NOT_HELD = 16
    ROW_FAILED = 17
    SESSION_LOST = 18
    SLEEPING = 19


class Error(Exception):
    """Base class of all errors of Jurybox; `code` is its row of the table."""

    code: Code = Code.REFUSED

    def __init__(self, message: str, code: Code | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class Timeout(Error, TimeoutError):
    """No answer within the caller's time-out. The rows stay the ticket's until the engine answers."""

    code = Code.TIMEOUT


class Busy(Error):
    """No free row: the lane, or the whole arena, is in flight. Wait for replies or ask for more rows."""

    code = Code.BUSY


class ModelNotFound(Error, LookupError):
    """The server has no model of that name; the message lists its models."""

    code = Code.MODEL_NOT_FOUND


class SpecMismatch(Error, ValueError):
    """Names, dtypes or shapes differ from the model's; the message says what was expected and what came."""

    code = Code.SPEC_MISMATCH


class ServerGone(Error, ConnectionError):
    """The server is gone. The next call connects to its successor, if there is one."""

    code = Code.SERVER_GONE


class ProtocolMismatch(Error):
    """The two ends have different protocol versions, or the bytes are not a message of the protocol."""

    code = Code.PROTOCOL_MISMATCH


class Refused(Error):
    """The server refused the request: it is draining, the request is not allowed, or a limit is exceeded."""

    code = Code.REFUSED


class StaleLease(Refused):
    """The lane is not leased to the sender any more. The client leases another one and sends the request again."""

    code = Code.STALE_LEASE


class VersionNotHeld(Refused):
    """The server does not have the requested weights version; the message names those it has."""

    code = Code.VERSION_NOT_HELD


class ModelFailed(Error):
    """The model raised, or its outputs do not fit its spec; the engine keeps running."""

    code = Code.MODEL_FAILED


class RowFailed(Error):
    """Some rows of a request failed; the others were computed.

    Attributes:
        errors: reasons by the index of the row in the request.
        index, reason: of the first row that failed.
        outputs: of all rows; the content of failed rows is undefined.
        version: of the weights.
    """

    code = Code.ROW_FAILED

    def __init__(
        self,
        message: str,
        code: Code | None = None,
        errors: Mapping[int, str] | None = None,
        outputs: Any = None,
        version: int = 0,
    ) -> None:
        super().__init__(message, code)
        self.errors = dict(errors or {})
        self.index = min(self.errors, default=-1)
        self.reason = self.errors.get(self.index, message)
        self.outputs = outputs
        self.version = version


class SessionLost(Error):
    """The state of sessions is lost: their engine ended, or a request was lost. Restart their episodes with `reset`.

    Attributes:
        sessions: numbers of the lost sessions; the whole request was refused.
    """

    code = Code.SESSION_LOST

    def __init__(self, message: str, code: Code | None = None, sessions: Sequence[int] = ()) -> None:
        super().__init__(message, code)
        self.sessions = list(sessions)


class SharedMemoryError(Error, OSError):
    """Shared memory could not be made or attached; the message names size, place and remedy."""

    code = Code.REFUSED


class TooManyFiles(Error, OSError):
    """This process has reached its limit of open files; the message names the limit and a remedy."""

    code = Code.REFUSED


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: gRPC status by its canonical number, so that grpc need not be imported here."""

    exception: type[Error]
    http: int
    grpc: int


_INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _NOT_FOUND, _PERMISSION_DENIED = 3, 4, 5, 7
_RESOURCE_EXHAUSTED, _FAILED_PRECONDITION, _UNIMPLEMENTED, _INTERNAL = 8, 9, 12, 13
_UNAVAILABLE, _UNAUTHENTICATED = 14, 16

TABLE: dict[Code, Row] = {
    Code.TIMEOUT: Row(Timeout, 504, _DEADLINE_EXCEEDED),
    Code.BUSY: Row(Busy, 429, _RESOURCE_EXHAUSTED),
    Code.MODEL_NOT_FOUND: Row(ModelNotFound, 404, _NOT_FOUND),
    Code.SPEC_MISMATCH: Row(SpecMismatch, 422, _INVALID_ARGUMENT),
    Code.SERVER_GONE: Row(ServerGone, 503, _UNAVAILABLE),
    Code.PROTOCOL_MISMATCH: Row(ProtocolMismatch, 400, _FAILED_PRECONDITION),
    Code.REFUSED: Row(Refused, 403, _PERMISSION_DENIED),
    Code.NOT_READY: Row(Refused, 503, _UNAVAILABLE),
    Code.DRAINING: Row(Refused, 503, _UNAVAILABLE),
    Code.MODEL_FAILED: Row(ModelFailed, 500, _INTERNAL),
    Code.MALFORMED: Row(ProtocolMismatch, 400, _INVALID_ARGUMENT),
    Code.UNAUTHENTICATED: Row(Refused, 401, _UNAUTHENTICATED),
    Code.TOO_LARGE: Row(Refused, 413, _RESOURCE_EXHAUSTED),
    Code.STALE_LEASE: Row(StaleLease, 403, _FAILED_PRECONDITION),
    Code.UNSUPPORTED: Row(Refused, 501, _UNIMPLEMENTED),
    Code.VERSION_NOT_HELD: Row(VersionNotHeld, 409, _FAILED_PRECONDITION),
    Code.ROW_FAILED: Row(RowFailed, 422, _INVALID_ARGUMENT),
    Code.SESSION_LOST: Row(SessionLost, 409, _FAILED_PRECONDITION),
    Code.SLEEPING: Row(Refused, 503, _UNAVAILABLE),
}


def error_for(code: int, message: str) -> Error:
    """The exception that `code` stands for; an unknown code (from a newer peer) becomes `Error` itself."""
    try:
        known = Code(code)
        return TABLE[known].exception(message, known)
    except (ValueError, KeyError):
        return Error(f"{message} (code {code}, unknown to this version)")


def asleep(model: str) -> Refused:
    """The error of a request to a model that sleeps."""
    return Refused(
        f"model {model!r} sleeps, its weights are in host memory: server.wake({model!r}), or 'jurybox wake {model}', "
        "brings it back",
        Code.SLEEPING,
    )


def plain(value: object, most: int = MOST_TEXT) -> str:
    """`value` as text that can be encoded: no lone surrogates, at most `most` characters. Never raises.

    >>> plain("half \\ud800 a pair")
    'half ? a pair'
    """
    try:
        text = value if type(value) is str else f"{value!s}"
        if len(text) > most:
            text = f"{text[: max(0, most - 4)]} ..."
        return text.encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001  a model's exception may raise anything when it is asked for its text
        return f"(a {type(value).__name__} whose text cannot be made)".encode("utf-8", "replace").decode()


def said(error: BaseException, most: int = MOST_TEXT) -> str:
    """An exception as `plain` text: its message; of other libraries' exceptions preceded by the type."""
    if isinstance(error, Error):
        return plain(error, most)
    return plain(f"{type(error).__name__}: {plain(error, most)}", most)


def did_you_mean(given: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the most similar known names, or else all; empty if there are none.

    >>> did_you_mean("learning_rat", ["learning_rate", "gamma"])
    "; did you mean 'learning_rate'?"
    """
    import difflib

    lowered = {word.lower(): word for word in known}
    if near := difflib.get_close_matches(given.lower(), list(lowered), n=3, cutoff=0.6):
        return "; did you mean " + " or ".join(repr(lowered[word]) for word in near) + "?"
    return f"; there are: {', '.join(sorted(known))}" if known else ""


def missing_name(module: ModuleType, name: str) -> str:
    """The end of a message about a name that a module lacks: the file it was found in, and what it defines instead."""
    there = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    file = getattr(module, "__file__", None)
    return f"module {module.__name__!r}{f' ({file})' if file else ''} has no {name!r}{did_you_mean(name, there)}"


def cut(text: str, most: int) -> bytes:
    """`text` in UTF-8, at most `most` bytes, whole characters only.

    >>> cut("a\u00e9", 2)
    b'a'
    """
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore").encode()
