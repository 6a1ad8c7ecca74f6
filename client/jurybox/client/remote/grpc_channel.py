"""gRPC channels to a server: TLS, the token, and the conversion of failed calls to exceptions."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jurybox.client.link import closed_connection
from jurybox.client.remote.infer_calls import Metadata
from jurybox.protocol import control_pb2, forks, open_inference_pb2
from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import TABLE, Code, Error, Refused, error_for

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
            found = self._found[path] = unary(self.channel, path)
        return found


def unary(channel: grpc.Channel, path: str) -> Any:
    """Return a method that takes and returns bytes."""
    try:  # as generated code does: a path that is known to the channel takes 5 us less in each call
        return channel.unary_unary(path, _registered_method=True)
    except TypeError:  # gRPC is older
        return channel.unary_unary(path)


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
    return grpc.secure_channel(where, grpc.ssl_channel_credentials(authority_of(tls_ca)), options)


def authority_of(tls_ca: str | bytes | None) -> bytes | None:
    """Return the certificate of `tls_ca`, a path or its contents, or of JURYBOX_TLS_CA; None: gRPC's own are used.

    Raises:
        Refused: the file cannot be read.
    """
    if isinstance(tls_ca, bytes):
        return tls_ca
    authority = tls_ca or os.environ.get("JURYBOX_TLS_CA")
    try:
        return Path(authority).read_bytes() if authority else None
    except OSError as error:
        named = "tls_ca" if tls_ca else "JURYBOX_TLS_CA"
        raise Refused(f"{named}={authority!r} cannot be read: {error.strerror}; expected a PEM file") from error


def _host(address: str) -> str:
    return host_and_port(address)[0]


def host_and_port(address: str) -> tuple[str, str]:
    """Return the host, without the brackets of IPv6, and the port of SCHEME://HOST:PORT."""
    host, _, port = address.partition("://")[2].rpartition(":")
    return host.strip("[]"), port


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
