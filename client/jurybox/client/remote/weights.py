"""Weights over gRPC: the publisher and the reader of learners and actors on another machine than the server."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import numpy as np

from jurybox.client.remote.grpc_channel import RemoteStream
from jurybox.protocol import forks
from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.channel import decode_extra, encode_extra
from jurybox.protocol.weights.layout import TensorPlace, dtype_name
from jurybox.protocol.weights.publisher import layout_mismatch, tensors_of
from jurybox.protocol.weights.reader import State, Weights
from jurybox.protocol.weights.transfer import PUBLISH, READ, Assembly, Flat, chunks, narrow, transfer_layout

Metadata = tuple[tuple[str, str], ...]
_T = TypeVar("_T")
_BACK = 5.0  # seconds: a gateway that was killed is back by then
_AGAIN = 0.1  # seconds between two questions for what is not there yet


class _Remote(forks.Closing):
    """An end of a weights channel behind a stream to the gateway. A forked child has no part in it: it refuses.

    Args:
        channel: to the gateway. It stays the caller's to close.
        model: whose weights.
        metadata: sent with the stream, such as a token.
        timeout: seconds of every wait.
    """

    def __init__(self, channel: grpc.Channel, model: str, metadata: Metadata, timeout: float) -> None:
        self._channel = channel
        self._model = model
        self._metadata = metadata
        self._timeout = timeout
        self._turn = threading.Lock()
        self._closed = False
        self._forked = False

    def _after_fork_in_child(self) -> None:
        self._forked, self._turn = True, threading.Lock()


class RemotePublisher(_Remote):
    """`Publisher`, over gRPC. It holds the model's place of publisher while its stream lasts.

    Where the stream broke (the network, the gateway, the server), the publication in progress raises and did not happen
    or is not known to have; the next `publish` opens a new one, and waits some seconds for a gateway that is being
    restarted, or that has not noticed yet that this publisher's former stream is over. The place goes when the
    publisher is closed or dropped.

    Args:
        bfloat16: send float32 as bfloat16: half the bytes, eight bits of mantissa instead of 24. Exact without it.
        changed_only: leave out chunks (1 MiB) that are as in the last publication; exact, and keeps a copy of it here.

    Attributes:
        version: of the last publication.
        sent_bytes: of weights, since it was made.

    Raises:
        ModelNotFound; Refused: the model takes no publications, or has a living publisher; ServerGone.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        model: str,
        *,
        bfloat16: bool = False,
        changed_only: bool = False,
        metadata: Metadata = (),
        timeout: float = 30.0,
    ) -> None:
        super().__init__(channel, model, metadata, timeout)
        self._bfloat16 = bfloat16
        self._changed_only = changed_only
        self.sent_bytes = 0
        self._base: Flat | None = None
        self._stream, opened = self._open()
        self._adopt(opened)
        forks.register(self)

    def publish(
        self,
        source: Any,
        extra: Mapping[str, Any] | None = None,
        *,
        check_finite: bool = False,
        version: int | None = None,
    ) -> int:
        """As `Publisher.publish`; returns when every reader on the server's host can have it.

        Raises:
            As `Publisher.publish`; ServerGone, Timeout: the stream broke, or the gateway is too slow.
        """
        tensors, packed = tensors_of(source), encode_extra(extra)
        if version is not None and not 0 < version < 2**63:
            raise Refused(f"version {version} was to be published: expected 1 to 2**63 - 1")
        with self._turn:
            if self._forked:
                raise Refused(f"this publisher of {self._model!r} was made before a fork: make one in this process")
            if self._closed:
                raise Refused(f"this publisher of {self._model!r} was closed; make another one")
            if not self._stream.alive:
                self._stream, opened = self._open_again()
                self._adopt(opened)
            if len(packed) > self._extra_bytes:
                raise SpecMismatch(
                    f"extra takes {len(packed)} bytes, the weights channel of {self._model!r} has room for "
                    f"{self._extra_bytes}; publish less with the weights"
                )
            flat = self._flatten(tensors)
            base = self._base if self._changed_only else None
            self._base = None
            begin = pb.BeginPublication(
                layout_hash=bytes.fromhex(self._travelling.hash),
                bfloat16=self._bfloat16,
                changed_only=base is not None,
                version=version or 0,
                check_finite=check_finite,
                extra=packed,
            )
            try:
                self._stream.send(pb.PublishRequest(begin=begin))
                sent = 0
                for chunk in chunks(flat, base):
                    self._stream.send(pb.PublishRequest(chunk=chunk))
                    sent += len(chunk.data)
                self._stream.send(pb.PublishRequest(end=pb.EndPublication(bytes=sent)))
                self.version = int(self._stream.receive().published)
            except BaseException as error:
                if not isinstance(error, Error) or error.code not in (Code.REFUSED, Code.SPEC_MISMATCH):
                    self._stream.close()  # what the other end has of this publication is not known
                raise
            self.sent_bytes += sent
            self._base = flat if self._changed_only else None
            return self.version

    def close(self) -> None:
        """Give up the place: another publisher may take over."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._stream.close()

    def _open_again(self) -> tuple[RemoteStream, pb.Opened]:
        until = time.monotonic() + min(_BACK, self._timeout)
        while True:
            try:
                return self._open()
            except (ServerGone, Refused) as error:
                if time.monotonic() > until or error.code not in (Code.SERVER_GONE, Code.REFUSED):
                    raise
            time.sleep(_AGAIN)

    def _open(self) -> tuple[RemoteStream, pb.Opened]:
        stream = RemoteStream(self._channel, PUBLISH, pb.PublishReply.FromString, self._metadata, self._timeout)
        try:
            stream.send(pb.PublishRequest(open=pb.OpenPublisher(model=self._model)))
            return stream, stream.receive().opened
        except BaseException:
            stream.close()
            raise

    def _adopt(self, opened: pb.Opened) -> None:
        self.layout = WeightsLayout.from_json(opened.layout)
        self.version = int(opened.newest)
        self._extra_bytes: int = int(opened.extra_bytes)
        self._travelling: WeightsLayout = transfer_layout(self.layout, bfloat16=self._bfloat16)
        self._base = None

    def _flatten(self, tensors: Mapping[str, Any]) -> Flat:
        """What travels, in new memory. Raises SpecMismatch, naming the difference."""
        places = self.layout.places
        if tensors.keys() != places.keys():
            raise layout_mismatch(self.layout, self._model, tensors)
        flat = np.zeros(self._travelling.nbytes, np.uint8)
        for name, view in self._travelling.views(flat).items():
            array = _host_array(tensors[name], places[name])
            if array is None:
                raise layout_mismatch(self.layout, self._model, tensors)
            view[...] = narrow(array) if view.dtype != array.dtype else array
        return flat


class RemoteWeightsReader(_Remote):
    """`WeightsReader`, over gRPC: every question is a round trip, so ask between episodes rather than every step.

    Where the stream broke, the next question opens a new one, and waits some seconds for a gateway that is being
    restarted. Threads may share a reader; they take turns.

    Attributes:
        layout: of the weights; another one where the server came back with another model of that name.
        max_lag: as the model's settings say.
        age_seconds: how old the last publication read was when it was read there.

    Raises:
        ModelNotFound; Refused: the model takes no publications; Busy: the gateway has as many streams as it takes;
            ServerGone.
    """

    layout: WeightsLayout
    max_lag: int

    def __init__(self, channel: grpc.Channel, model: str, *, metadata: Metadata = (), timeout: float = 30.0) -> None:
        super().__init__(channel, model, metadata, timeout)
        self._stream: RemoteStream | None = None
        self.age_seconds = 0.0
        try:
            self._asked(self._look, None, patient=False)
        except BaseException:
            self.close()
            raise
        forks.register(self)

    @property
    def newest(self) -> int:
        """The newest version; 0 when nothing has been published yet. Raises as `read`."""
        return self._asked(self._look, None)

    def newer_than(self, seen: int) -> bool:
        """Whether there is a version newer than `seen` (0: any). Raises as `read`."""
        return self.newest > seen

    def read(self, *, timeout: float | None = None) -> Weights:
        """As `WeightsReader.read`, into new arrays.

        Args:
            timeout: seconds in all, also for a first publication to come. Without it every message has the reader's own
                timeout, and what was never published is told at once.

        Raises:
            Timeout: nothing has been published yet, or the gateway is too slow.
            ServerGone: it is not there; Refused: this reader was closed, or made before a fork.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self._asked(self._read, until)
            except Timeout:
                if until is None or time.monotonic() + _AGAIN >= until:
                    raise
            time.sleep(_AGAIN)

    def close(self) -> None:
        """End the stream; a thread that waits for an answer is told."""
        self._closed = True
        if (stream := self._stream) is not None:
            stream.close()

    # ---- inside

    def _asked(self, ask: Callable[[RemoteStream, float | None], _T], until: float | None, patient: bool = True) -> _T:
        """The answer over the stream, a new one where there is none.

        Args:
            patient: wait for a gateway that is away.
        """
        back = time.monotonic() + min(_BACK, self._timeout)
        if until is not None:
            back = min(back, until)
        while True:
            try:
                with self._turn_until(until):
                    return self._exchanged(ask, until)
            except ServerGone:  # nothing here changes anything there: it may be asked twice
                if not patient or self._closed or time.monotonic() + _AGAIN >= back:
                    raise
            time.sleep(_AGAIN)

    def _exchanged(self, ask: Callable[[RemoteStream, float | None], _T], until: float | None) -> _T:
        self._require_open()
        stream = self._stream
        if stream is None or not stream.alive:
            stream = RemoteStream(self._channel, READ, pb.ReadReply.FromString, self._metadata, self._timeout)
            self._stream = stream
            if self._closed:  # by another thread, in this very moment
                stream.close()
        try:
            return ask(stream, until)
        except BaseException:
            if not stream.refused:
                # Of what was asked something may still be on its way, and would be taken for the next answer.
                self._stream = None
                stream.close()
            self._require_open()
            raise

    def _look(self, stream: RemoteStream, until: float | None) -> int:
        return int(self._head(stream, until, look=True).newest)

    def _read(self, stream: RemoteStream, until: float | None) -> Weights:
        head = self._head(stream, until)
        if not head.version:
            raise ProtocolMismatch(f"the gateway answered without weights of {self._model!r}")
        flat = np.zeros(self.layout.nbytes, np.uint8)
        assembly = Assembly(flat, gaps=False)
        while assembly.received < self.layout.nbytes:
            assembly.put(stream.receive(until).chunk)
        self.age_seconds = float(head.age)
        state: State = self.layout.views(flat)
        return Weights(state, int(head.version), decode_extra(head.extra))

    def _head(self, stream: RemoteStream, until: float | None, *, look: bool = False) -> Any:
        stream.send(pb.ReadRequest(model=self._model, look=look), until)
        reply = stream.receive(until)
        if reply.WhichOneof("part") != "head":
            raise ProtocolMismatch(f"the gateway answered with {reply.WhichOneof('part')!r}, expected 'head'")
        if reply.head.layout:  # with the first of a stream
            self.layout = WeightsLayout.from_json(reply.head.layout)
            self.max_lag = int(reply.head.max_lag)
        return reply.head

    @contextmanager
    def _turn_until(self, until: float | None) -> Iterator[None]:
        turn = self._turn
        if not turn.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic())):
            raise Timeout(f"another thread reads the weights of {self._model!r}, and took all the time there was")
        try:
            yield
        finally:
            turn.release()

    def _require_open(self) -> None:
        if self._forked:
            raise Refused(f"this reader of {self._model!r} was made before a fork: connect in this process")
        if self._closed:
            raise Refused(f"this reader of {self._model!r} was closed: take another one")


def _host_array(tensor: Any, place: TensorPlace) -> np.ndarray[Any, Any] | None:
    """A tensor's values in host memory in the stored dtype; None where it does not fit its place."""
    if not hasattr(tensor, "data_ptr"):
        array = np.asarray(tensor)
        fits = array.shape == place.shape and array.dtype.name in (place.dtype, place.stored.name)
        return array if fits else None
    if tuple(tensor.shape) != place.shape or dtype_name(tensor) not in (place.dtype, place.stored.name):
        return None
    whole = tensor.detach().cpu().contiguous()
    array = np.empty(place.shape, place.stored)
    ctypes.memmove(array.ctypes.data, whole.data_ptr(), place.nbytes)
    return array
