"""ModelInfer calls of a connection over gRPC, as bytes: made in the caller's thread, or started and awaited later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import grpc

from jurybox.client.transports.transport import Watching

INFER = "/inference.GRPCInferenceService/ModelInfer"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Outcome: TypeAlias = "bytes | grpc.RpcError"


class Failed(grpc.RpcError):  # type: ignore[misc]  # gRPC has no types
    """A call that failed, as gRPC describes one.

    Args:
        status: gRPC's status.
        details: the reason.
        trailing: metadata that came with it.
    """

    def __init__(self, status: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(f"{status.name}: {details}")
        self._status, self._details, self._trailing = status, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, str]]:
        return self._trailing


CLOSED = Failed(grpc.StatusCode.CANCELLED, "the connection was closed")  # the outcome of calls that it has ended


class StartedCalls(Protocol):
    """The calls of one lane that are awaited later. Not thread-safe: the model's lock serializes it.

    A call may be nested in another one of the same thread, or interrupt it for ever, at any point.
    """

    def start(self, request: bytes, timeout: float, done: Callable[[Outcome], None]) -> None:
        """Start a ModelInfer. `done` is called when it has ended, in any thread, and perhaps again with the same.

        Raises:
            Refused: the connection was closed, or cannot be used in a forked child.
            TooManyFiles: a connection is needed and cannot be opened.
        """

    def wait(self, timeout: float) -> None:
        """Return once a call has ended since the last wait, and at the latest after `timeout` seconds."""

    def watch(self, watching: Watching) -> None:
        """Tell an event loop when calls may have ended, or when `wait` has something to do. Call it in its thread."""

    def close(self) -> None:
        """Release all resources. The garbage collector may call this at any point."""

    def forked(self) -> None:
        """Leave the calls to the parent, in a forked child."""


class InferCalls(Protocol):
    """Makes ModelInfer calls, in any thread. Each may safely be repeated, and is where the gateway is unavailable."""

    def ask(self, request: bytes, timeout: float) -> bytes:
        """Make a call in this thread and return its serialized response.

        Raises:
            grpc.RpcError: it failed.
            Refused, TooManyFiles: as `StartedCalls.start`.
        """

    def started(self) -> StartedCalls:
        """Return an object for the calls of a lane."""

    def close(self) -> None:
        """Close what no call uses; the others are closed when these end."""
