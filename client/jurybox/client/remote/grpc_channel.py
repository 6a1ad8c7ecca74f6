"""gRPC channels to a server: TLS, the token, and the conversion of failed calls to exceptions."""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jurybox.client.link import closed_connection
from jurybox.protocol import control_pb2, forks, open_inference_pb2
from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import TABLE, Busy, Code, Error, Refused, ServerGone, Timeout, error_for
from jurybox.protocol.locks import IN_SERVICE, is_serving, mark_serving
from jurybox.protocol.remote_weights_pb2 import WeightsRefusal

try:
    from grpc import _observability
except ImportError:  # gRPC is older than it
    _observability = None

CODE = "jurybox-code"  # trailing metadata: the errors.Code, because several of them share a gRPC status
_MOST_BYTES = 1 << 30
# A gateway that was killed is restarted within seconds, and all these requests may safely be repeated.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "inference.GRPCInferenceService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2.0,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS = [
    ("grpc.max_receive_message_length", _MOST_BYTES),
    ("grpc.max_send_message_length", _MOST_BYTES),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_RETRIES)),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# gRPC reads the first of each that is set, and only these spellings.
_PROXY = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = ("no_grpc_proxy", "no_proxy")
# The code of a gRPC status if the server sent no code of its own.
_MEANING = {
    grpc.StatusCode.UNAVAILABLE: Code.SERVER_GONE,
    grpc.StatusCode.INVALID_ARGUMENT: Code.MALFORMED,
    grpc.StatusCode.UNIMPLEMENTED: Code.PROTOCOL_MISMATCH,
    grpc.StatusCode.CANCELLED: Code.SERVER_GONE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,  # gRPC itself refused a message; BUSY always has its code
}
_BY_STATUS = {row.grpc: code for code, row in reversed(TABLE.items())}


class _Plugin:
    """Gives gRPC's plugin of observability, as `grpc._observability.get_plugin` does, but holds no lock meanwhile.

    Its lock is one for the whole process, held when a call starts and ends. A signal handler or a destructor that runs
    just then would keep every other thread from calling, also the one whose answer it waits for.
    """

    def __enter__(self) -> Any:
        return getattr(_observability, "_OBSERVABILITY_PLUGIN", None)

    def __exit__(self, *_: object) -> None:
        pass


if hasattr(_observability, "get_plugin"):
    _observability.get_plugin = _Plugin


class _Core:
    """The state of gRPC's core in this process. Its threads do not survive a fork: calls in a child would hang."""

    def __init__(self) -> None:
        self.forked = False
        self._channels: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._used = False
        self._parents: list[grpc.Channel] = []
        forks.register(self)

    def using(self, channel: grpc.Channel) -> grpc.Channel:
        """Record a new channel and return it."""
        self._used = True
        self._channels.add(channel)
        return channel

    def check(self) -> None:
        """Raise Refused if this process was forked from one that has used gRPC."""
        if self.forked:
            raise Refused(
                "gRPC cannot be used in a process forked from one that has used it: start this process with spawn or "
                "forkserver, connect for the first time in the child, or use the server's ipc:// or tcp:// address"
            )

    def _after_fork_in_child(self) -> None:
        self.forked = self._used
        self._parents = list(self._channels)  # kept alive: closing them would need threads that this process lacks


CORE = _Core()
Metadata = tuple[tuple[str, str], ...]
INFER = "/inference.GRPCInferenceService/ModelInfer"
_interrupted: list[grpc.Channel] = []  # closed; see Channels.call


class _Method:
    """A method of the Open Inference Protocol, or `Get` of the status."""

    def __init__(self, name: str) -> None:
        file, service = (control_pb2, "ServerStatus") if name == "Get" else (open_inference_pb2, "GRPCInferenceService")
        described = file.DESCRIPTOR.services_by_name[service]
        self.path = f"/{described.full_name}/{name}"
        self.response = GetMessageClass(described.methods_by_name[name].output_type)


_method = cache(_Method)


class _Calls:
    """A channel and its methods, used by one call at a time. They take and return bytes.

    gRPC takes every Exception in a serializer for the serializer's, also that of a signal handler.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self._found: dict[str, Any] = {}

    def of(self, path: str) -> Any:
        if (found := self._found.get(path)) is None:
            found = self._found[path] = _unary(self.channel, path)
        return found


def _unary(channel: grpc.Channel, path: str, parse: Callable[[bytes], Any] | None = None) -> Any:
    """Return a method that takes bytes; `parse` is called with its responses."""
    try:  # as generated code does: a path that is known to the channel takes 5 us less in each call
        return channel.unary_unary(path, None, parse, _registered_method=True)
    except TypeError:  # gRPC is older
        return channel.unary_unary(path, None, parse)


class Channels:
    """The calls of a connection, made in the caller's thread: gRPC needs no thread of ours for them.

    Each call takes a channel for itself, and calls that are made at the same time, or in a signal handler or destructor
    during another one, take another. So none waits for a lock that an interrupted call has left taken, or that is held
    further down in its own thread. gRPC's core shares one connection among channels to the same address.

    Args:
        address: grpc://host:port or grpcs://host:port.
        metadata: sent with every call, such as a token.
        tls_ca: see `open_channel`.
    """

    def __init__(self, address: str, metadata: Metadata, tls_ca: str | bytes | None = None) -> None:
        self.address = address
        self.metadata = metadata
        self._tls_ca = tls_ca
        self._closed = False
        self._lasting: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._free = [_Calls(self.open())]  # one step of the interpreter takes one out or puts one back

    def lasting(self) -> grpc.Channel:
        """Open a channel for streams. It is closed with this object, or when it is dropped. Raises like `open`."""
        channel = self.open()
        self._lasting.add(channel)
        if self._closed:  # meanwhile
            channel.close()
            raise closed_connection()
        return channel

    @property
    def closed(self) -> bool:
        return self._closed

    def open(self) -> grpc.Channel:
        """Open another channel; the caller closes it.

        Raises:
            Refused: `close` was called, or this process was forked from one that has used gRPC.
        """
        if self._closed:
            raise closed_connection()
        return open_channel(self.address, self._tls_ca)

    def call(self, name: str, request: Message, timeout: float, *, wait_for_ready: bool = False) -> Any:
        """Call a method of the Open Inference Protocol, or `Get` of the status; return its response.

        Raises:
            grpc.RpcError: it failed.
            Refused: as `open`.
        """
        method = _method(name)
        answer = self.ask(method.path, request.SerializeToString(), timeout, wait_for_ready=wait_for_ready)
        return method.response.FromString(answer)

    def ask(self, path: str, message: bytes, timeout: float, *, wait_for_ready: bool = False) -> bytes:
        """Call a method by its path; return its serialized response. Raises as `call`."""
        CORE.check()
        try:
            calls = self._free.pop()
        except IndexError:
            calls = _Calls(self.open())
        try:
            answer: bytes = calls.of(path)(
                message, timeout=timeout, metadata=self.metadata, wait_for_ready=wait_for_ready or None
            )
        except grpc.RpcError:
            self._give(calls)
            raise
        except BaseException:
            # This thread may have left its locks taken: it closes the channel itself, and nobody else ever does.
            _interrupted.append(calls.channel)
            calls.channel.close()
            raise
        self._give(calls)
        return answer

    def close(self) -> None:
        """Close the channels. Those of calls that are under way are closed when these end."""
        self._closed = True
        if CORE.forked:
            return
        while self._free:
            with contextlib.suppress(IndexError):  # another thread took it
                self._free.pop().channel.close()
        for channel in list(self._lasting):
            channel.close()

    def _give(self, calls: _Calls) -> None:
        self._free.append(calls)
        if self._closed:  # meanwhile
            self.close()


class TicketCalls:
    """Starts calls whose answers are awaited elsewhere, in a thread that the first of them starts.

    gRPC acquires locks in Python code. A KeyboardInterrupt, which occurs only in the main thread, could leave such a
    lock held for ever, and every later call would hang. The thread ends when this object is closed or collected.

    Args:
        channels: opens the thread's own channel.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._queue: SimpleQueue[tuple[bytes, float, Callable[[Any], None]] | None] | None = None
        self._ends: list[weakref.finalize[..., TicketCalls]] = []

    def start(self, request: bytes, timeout: float, done: Callable[[Any], None]) -> None:
        """Start a ModelInfer. `done` is called with it in a thread of gRPC, or with None if it could not be started.

        Raises:
            Refused: as `Channels.open`.
        """
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


def _start_calls(channel: grpc.Channel, metadata: Metadata, queue: SimpleQueue[Any]) -> None:
    mark_serving()
    method = _unary(channel, INFER, _in_service(bytes))
    while (call := queue.get()) is not None:
        request, timeout, done = call
        try:
            method.future(request, timeout=timeout, metadata=metadata).add_done_callback(done)
        except Exception:  # noqa: BLE001  gRPC cannot make the call
            done(None)
        del call, request, done  # they refer to what ends this thread when it is collected
    channel.close()


def _in_service(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a function that parses a message in a thread of gRPC, which this marks as one that carries answers."""

    def parsed(data: bytes) -> Any:
        mark_serving()
        return parse(data)

    return parsed


def open_channel(address: str, tls_ca: str | bytes | None = None) -> grpc.Channel:
    """Open a channel to grpc://host:port, or with TLS to grpcs://host:port.

    Args:
        tls_ca: the certificate of the authority: the path of a PEM file, or its contents as bytes. Default:
            JURYBOX_TLS_CA.

    Raises:
        Refused: the file cannot be read, or this process was forked from one that has used gRPC.
    """
    CORE.check()
    return CORE.using(_open(address, tls_ca))


def _open(address: str, tls_ca: str | bytes | None) -> grpc.Channel:
    scheme, _, where = address.partition("://")
    # gRPC would send even calls to 127.0.0.1 to the proxy of http_proxy, which cannot reach this host's loopback.
    options = [*_OPTIONS, ("grpc.enable_http_proxy", 0)] if is_loopback(_host(address)) else _OPTIONS
    if scheme == "grpc":
        return grpc.insecure_channel(where, options)
    if isinstance(tls_ca, bytes):
        return grpc.secure_channel(where, grpc.ssl_channel_credentials(tls_ca), options)
    authority = tls_ca or os.environ.get("JURYBOX_TLS_CA")
    try:
        roots = Path(authority).read_bytes() if authority else None
    except OSError as error:
        named = "tls_ca" if tls_ca else "JURYBOX_TLS_CA"
        raise Refused(f"{named}={authority!r} cannot be read: {error.strerror}; expected a PEM file") from error
    return grpc.secure_channel(where, grpc.ssl_channel_credentials(roots), options)


def _host(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0].strip("[]")


def through_proxy(address: str) -> str:
    """Return the part of an error that names the proxy through which gRPC connects to an address; empty for none."""
    host = _host(address)
    name = next((name for name in _PROXY if os.environ.get(name)), None)
    if name is None or is_loopback(host):
        return ""
    excluded = next((found for name in _NO_PROXY if (found := os.environ.get(name))), "")
    if any(host.endswith(entry.strip()) for entry in excluded.split(",") if entry.strip()):
        return ""
    proxy = os.environ[name].rpartition("@")[2].rpartition("//")[2]  # without the password
    return f"; {name} sends this connection to the proxy {proxy}: if it is not meant for it, set no_proxy={host}"


def token_metadata(address: str, token: str | None) -> Metadata:
    """Return the metadata that authenticate every call.

    Args:
        token: the caller's token. Default: JURYBOX_TOKEN, which is used only over TLS or to this host, so that it is
            never sent over a network unencrypted.
    """
    if token is None and (address.startswith("grpcs://") or is_loopback(_host(address))):
        token = os.environ.get("JURYBOX_TOKEN")
    return (("authorization", f"Bearer {token}"),) if token else ()


def failure(error: Any) -> tuple[int, str]:
    """Return the code and message of a failed call."""
    code_name = dict(error.trailing_metadata() or ()).get(CODE, "")
    status = error.code()
    code = (
        int(code_name)
        if code_name.isdigit()
        else _MEANING.get(status, _BY_STATUS.get(status.value[0], Code.SERVER_GONE))
    )
    message = error.details() or status.name
    if code == Code.TOO_LARGE and not code_name:
        message += ": send fewer rows at once, or increase the server's max_message_mib"
    return code, message


def raised(error: Any, address: str) -> Error:
    """Return the exception for a failed call."""
    code, message = failure(error)
    if code == Code.SERVER_GONE:
        message += through_proxy(address)
    return error_for(code, f"{address}: {message}" if code in (Code.SERVER_GONE, Code.UNAUTHENTICATED) else message)


# ----
# A gRPC stream of requests and ordered replies, with a timeout on every wait.


_AHEAD = 4  # requests that may wait to be sent
_SLICE = 0.1
_REFUSED = {
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.TOO_LARGE,
}
# Streams that a forked child inherited. They are kept alive: gRPC would end them with threads that the child lacks.
_left_to_parent: list[Any] = []


class RemoteStream:
    """A call of a bidirectional streaming method. It ends when the stream is closed or garbage-collected.

    In a forked child `close` does nothing, and the other methods raise Refused.

    Args:
        channel: channel to the gateway.
        method: "/package.Service/Method".
        message: the class of the replies.
        metadata: sent with the call, such as a token.
        timeout: default limit of each wait, in seconds.

    Attributes:
        refused: whether the last reply was a refusal. Both ends are then still in step, and the stream stays usable.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        message: Any,
        metadata: tuple[tuple[str, str], ...],
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self.refused = False
        self._forked = False
        # The threads refer to the exchange, not to this object, so that it can be garbage-collected, which ends them.
        self._exchange = exchange = _Exchange()
        call = channel.stream_stream(
            method, lambda request: request.SerializeToString(), _in_service(message.FromString)
        )
        self._end = weakref.finalize(self, exchange.end)  # first: a handler may raise anywhere from here on
        exchange.begin(partial(call, metadata=metadata))
        forks.register(self)

    def send(self, request: Message, until: float | None = None) -> None:
        """Send a request; wait while _AHEAD requests are already queued.

        Args:
            until: deadline on the monotonic clock; default: the stream's timeout from now.

        Raises:
            Timeout: the queue stayed full until the deadline.
            Error: the stream has ended; see `receive`.
        """
        self._require_own()
        self.refused = False
        began = time.monotonic()
        until = began + self._timeout if until is None else until
        while not self._exchange.ended:
            try:
                self._exchange.requests.put(request, timeout=max(0.0, min(_SLICE, until - time.monotonic())))
                return
            except queue.Full:
                if time.monotonic() >= until:
                    raise Timeout(f"the gateway accepted no request for {time.monotonic() - began:.1f} s") from None
        while True:  # the stream has ended: raise a refusal that was received last, or the error that ended it
            self.receive(until)

    def receive(self, until: float | None = None) -> Any:
        """Return the next reply. Raises the error of a refusal or of the stream's end, or Timeout.

        Args:
            until: see `send`.
        """
        self._require_own()
        began = time.monotonic()
        wait = self._timeout if until is None else max(0.0, until - began)
        try:
            reply = self._exchange.replies.get(timeout=wait)
        except queue.Empty:
            raise Timeout(f"the gateway did not answer for {wait:.1f} s") from None
        if isinstance(reply, Exception):
            self._exchange.replies.put(reply)  # so that later calls raise it too
            raise reply
        if reply.WhichOneof("part") == "refusal":
            refusal: WeightsRefusal = reply.refusal
            self.refused = True
            raise error_for(refusal.code, refusal.message)
        return reply

    @property
    def alive(self) -> bool:
        return not self._exchange.ended

    def close(self) -> None:
        """End the stream. Closing it again has no effect."""
        if self._forked:
            return
        self._end()
        if not is_serving() and self._exchange.over.acquire(timeout=self._timeout):  # else it may be this thread
            self._exchange.over.release()  # others may wait, too

    def _require_own(self) -> None:
        if self._forked:
            raise Refused("this stream was opened before a fork: connect in the process that uses it")
        if is_serving():
            raise Refused(f"no weights can be sent or received here: {IN_SERVICE}")

    def _after_fork_in_child(self) -> None:
        self._forked = True
        self._end.detach()
        _left_to_parent.append(self._exchange)


class _Exchange:
    """Both directions of a stream, and the thread that receives the replies."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Message] = queue.Queue(_AHEAD)
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = False  # not an Event: the thread that garbage-collects the stream could hold the Event's lock
        self.over = threading.Lock()  # released when the thread ends
        self.over.acquire()
        self._call: Any = None

    def begin(self, call: Callable[[Iterator[Message]], Any]) -> None:
        """Start the call, in the thread: a handler that raised in it could leave one of gRPC's locks held for ever."""
        # From _thread: a handler that raises within threading.Thread.start would break the thread.
        _thread.start_new_thread(self._listen, (call,))

    def end(self) -> None:
        self.ended = True
        if (call := self._call) is not None:
            call.cancel()

    def _outgoing(self) -> Iterator[Message]:
        mark_serving()
        while not self.ended:
            try:
                yield self.requests.get(timeout=_SLICE)
            except queue.Empty:
                continue

    def _listen(self, begin: Callable[[Iterator[Message]], Any]) -> None:
        mark_serving()
        try:
            self._receive(begin)
        finally:
            self.ended = True
            self.over.release()

    def _receive(self, begin: Callable[[Iterator[Message]], Any]) -> None:
        try:
            self._call = begin(self._outgoing())
        except ValueError as error:  # gRPC raises this for a closed channel
            self.replies.put(Refused(f"this connection was closed: connect again ({error})", Code.NOT_READY))
            return
        if self.ended:  # meanwhile
            self._call.cancel()
        try:
            for reply in self._call:
                self.replies.put(reply)
            self.replies.put(ServerGone("the gateway ended the stream: open it again"))
        except grpc.RpcError as error:
            self.replies.put(_error(error))
        except Exception as error:  # noqa: BLE001  (the bytes are not a reply: the waiting caller must get an error)
            self.replies.put(Error(f"the gateway's reply cannot be decoded: {error}", Code.MALFORMED))
            self._call.cancel()


def _error(error: Any) -> Error:
    code, details = error.code(), error.details()
    if dict(error.trailing_metadata() or ()).get(CODE) == str(int(Code.BUSY)):
        return Busy(f"the gateway refused: {details}")
    if code in _REFUSED:
        return Refused(f"the gateway refused: {details}", _REFUSED[code])
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ServerGone(f"the stream to the gateway broke: {details}")
    return Error(f"the gateway failed: {code.name}: {details}")
