"""ModelInfer calls by grpcio, where they cannot be made over lines of our own (http2_calls.py)."""

from __future__ import annotations

import _thread
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import grpc

from jurybox.client.link import closed_connection
from jurybox.client.remote.grpc_channel import CORE, Channels, unary
from jurybox.client.remote.infer_calls import CLOSED, INFER, Outcome
from jurybox.client.transports.transport import Watching
from jurybox.protocol.errors import Refused
from jurybox.protocol.locks import IN_SERVICE, is_serving, mark_serving

_parents: list[Any] = []  # kept alive in a forked child: if collected, gRPC would try to end the parent's calls


class GrpcioCalls:
    """See InferCalls.

    Those that are awaited later are started by a thread, which the first of them starts, and answered in one of gRPC's.
    gRPC acquires locks in Python code. A KeyboardInterrupt, which occurs only in the main thread, could leave such a
    lock held for ever, and every later call would hang. The thread ends when this object is closed or collected.

    Args:
        channels: makes the calls.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._queue: SimpleQueue[tuple[bytes, float, Callable[[Outcome], None]] | None] | None = None
        self._ends: list[weakref.finalize[..., GrpcioCalls]] = []

    def ask(self, request: bytes, timeout: float) -> bytes:
        return self._channels.ask(INFER, request, timeout)

    def started(self) -> GrpcioStarted:
        return GrpcioStarted(self)

    def start(self, request: bytes, timeout: float, done: Callable[[Outcome], None]) -> None:
        """See StartedCalls.start. `done` is called in a thread of gRPC."""
        CORE.check()
        if (queue := self._queue) is None:
            channel, queue = self._channels.open(), SimpleQueue()
            self._ends.append(weakref.finalize(self, queue.put, None))
            # It comes from _thread: this may be a destructor that was called inside of threading.
            _thread.start_new_thread(_start_calls, (channel, self._channels.metadata, queue))
            self._queue = queue
        if self._channels.closed:  # perhaps meanwhile
            self.close()
            raise closed_connection()
        queue.put((request, timeout, done))

    def close(self) -> None:
        """End the thread, and with it the calls that are under way."""
        for end in self._ends:  # more than one if a nested call started a thread at the same time
            end()


class GrpcioStarted:
    """See StartedCalls.

    Args:
        calls: starts them.
    """

    def __init__(self, calls: GrpcioCalls) -> None:
        self._calls = calls
        self._news = threading.Lock()  # released when a call has ended; not an Event, whose internal lock could be
        self._news.acquire()  # left held by a KeyboardInterrupt
        self._watching: Watching | None = None

    def start(self, request: bytes, timeout: float, done: Callable[[Outcome], None]) -> None:
        def ended(outcome: Outcome) -> None:
            done(outcome)
            with contextlib.suppress(RuntimeError):  # already released
                self._news.release()
            if (watching := self._watching) is not None and watching.on:
                with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                    watching.tell()

        self._calls.start(request, timeout, ended)

    def wait(self, timeout: float) -> None:
        if timeout > 0 and is_serving():
            raise Refused(f"no answer can be awaited here: {IN_SERVICE}")
        self._news.acquire(timeout=timeout)

    def watch(self, watching: Watching) -> None:
        self._watching = watching

    def close(self) -> None:
        """See StartedCalls.close. Calls are not cancelled; they run until they are answered or the channel is closed.

        It must not acquire any of gRPC's locks.
        """
        self._watching = None

    def forked(self) -> None:
        """See StartedCalls.forked. The gRPC calls belong to the parent."""
        self._watching = None
        _parents.append(self._calls)


def _start_calls(channel: grpc.Channel, metadata: Any, queue: SimpleQueue[Any]) -> None:
    mark_serving()
    method = unary(channel, INFER)
    while (call := queue.get()) is not None:
        request, timeout, done = call
        try:
            method.future(request, timeout=timeout, metadata=metadata).add_done_callback(_telling(done))
        except Exception:  # noqa: BLE001  gRPC cannot make the call
            done(CLOSED)
        del call, request, done  # they refer to what ends this thread when it is collected
    channel.close()


def _telling(done: Callable[[Outcome], None]) -> Callable[[Any], None]:
    """Return what tells the outcome of an ended call of gRPC."""

    def ended(call: Any) -> None:
        done(CLOSED if call.cancelled() else call.exception() or call.result())

    return ended
