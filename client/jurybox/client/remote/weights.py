"""Weights over gRPC: the publisher and the reader for learners and actors on another host than the server."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import grpc
import numpy as np

from jurybox.client.remote.grpc_stream import RemoteStream
from jurybox.protocol import forks
from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.locks import TimedLock, seconds
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.channel import decode_extra, encode_extra
from jurybox.protocol.weights.layout import TensorPlace, dtype_name
from jurybox.protocol.weights.publisher import array_of, in_layout, layout_mismatch, part_mismatch, tensors_of
from jurybox.protocol.weights.reader import State, Weights
from jurybox.protocol.weights.transfer import PUBLISH, READ, Assembly, Flat, chunks, narrow, transfer_layout

Metadata = tuple[tuple[str, str], ...]
_T = TypeVar("_T")
_BACK = 5.0  # seconds within which a killed gateway is restarted
_AGAIN = 0.1  # seconds between two attempts


class _RemoteEnd(forks.Closing):
    """An end of a weights channel, reached by a stream to the gateway. In a forked child it raises Refused.

    Args:
        channel: channel to the gateway; the caller closes it.
        model: the model's name.
        metadata: sent with the stream, such as a token.
        timeout: limit of each wait, in seconds.
    """

    def __init__(self, channel: grpc.Channel, model: str, metadata: Metadata, timeout: float) -> None:
        self._channel = channel
        self._model = model
        self._metadata = metadata
        self._timeout = seconds(timeout)
        self._turn = TimedLock(f"a transfer of the weights of {model!r}")
        self._closed = False
        self._forked = False

    def _after_fork_in_child(self) -> None:
        self._forked = True
        self._turn.anew()


class RemotePublisher(_RemoteEnd):
    """A `Publisher` over gRPC. While its stream is open it is the model's only publisher.

    If the stream breaks (network, gateway or server), the publication in progress raises; it may or may not have been
    completed. The next `publish` opens a new stream. It waits some seconds for a gateway that is being restarted or has
    not yet detected the end of the previous stream. Once the publisher is closed or garbage-collected, another one can
    be opened.

    Args:
        bfloat16: send float32 as bfloat16: half the bytes, 8 bits of significand instead of 24. Otherwise exact.
        changed_only: omit chunks (1 MiB) that have not changed since the last publication. Exact; keeps a copy of the
            last publication in this process.

    Attributes:
        version: the version of the last publication.
        sent_bytes: bytes of weights sent since construction.

    Raises:
        ModelNotFound: the server has no such model.
        Refused: the model does not accept publications, or has another active publisher.
        ServerGone: the gateway cannot be reached.
    """

    version: int

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
        self._whole = True  # whether the newest version is the one to which a part is meant to be added
        forks.register(self)

    def publish(
        self,
        source: Any,
        extra: Mapping[str, Any] | None = None,
        *,
        check_finite: bool = False,
        version: int | None = None,
        partial: bool = False,
    ) -> int:
        """Publish like `Publisher.publish`; return when every reader on the server's host can read the version.

        Raises:
            ServerGone: the stream broke.
            Timeout: the gateway did not answer in time.
            Refused: a part was published although the stream had broken, and the server does not have this publisher's
                last version.
            Error: as `Publisher.publish`.
        """
        tensors, packed = tensors_of(source), encode_extra(extra)
        if version is not None and not 0 < version < 2**63:
            raise Refused(f"version {version} was to be published: expected 1 to 2**63 - 1")
        try:
            with self._turn.once(self._timeout):
                return self._publish(tensors, packed, check_finite, version, partial)
        finally:
            if self._closed:
                self.close()

    def _publish(
        self, tensors: Mapping[str, Any], packed: bytes, check_finite: bool, version: int | None, partial: bool
    ) -> int:
        if self._forked:
            raise Refused(f"this publisher of {self._model!r} was made before a fork: make one in this process")
        if self._closed:
            raise Refused(f"this publisher of {self._model!r} was closed; make another one")
        if not self._stream.alive:
            before = self.version
            self._stream, opened = self._open_again()
            self._adopt(opened)
            self._whole &= self.version == before
        if len(packed) > self._extra_bytes:
            raise SpecMismatch(
                f"extra takes {len(packed)} bytes, the weights channel of {self._model!r} has room for "
                f"{self._extra_bytes}; publish less with the weights"
            )
        layout = self.layout
        tensors = in_layout(tensors, layout, partial=partial)
        if partial:
            if not tensors or not tensors.keys() <= layout.places.keys():
                raise part_mismatch(layout, self._model, tensors)
            if not self._whole:
                raise Refused(
                    f"a part of the weights of {self._model!r} was to be published after the stream had broken, and "
                    f"the server has version {self.version}, which may have other tensors: publish all of them first"
                )
            layout = layout.only(tensors)
        travelling = transfer_layout(layout, bfloat16=self._bfloat16)
        flat = self._flatten(tensors, layout, travelling)
        base = None
        if not partial:  # a part is sent whole, and changes nothing of what later changes refer to
            base, self._base = self._base if self._changed_only else None, None
        begin = pb.BeginPublication(
            layout_hash=bytes.fromhex(travelling.hash),
            bfloat16=self._bfloat16,
            changed_only=base is not None,
            version=version or 0,
            check_finite=check_finite,
            extra=packed,
            only=list(layout.places) if partial else [],
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
                self._stream.close()  # it is unknown how much of the publication the gateway has received
            raise
        self.sent_bytes += sent
        if not partial:
            self._whole = True
            self._base = flat if self._changed_only else None
        return self.version

    def close(self) -> None:
        """Close the publisher, so that another one can be opened for the model.

        A publication that is under way in this thread does it at its end.

        Raises:
            Timeout: another thread's publication did not end; it closes the publisher when it does.
        """
        self._closed = True
        if self._turn.mine:
            return
        with self._turn.within(self._timeout):
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
        stream = RemoteStream(self._channel, PUBLISH, pb.PublishReply, self._metadata, self._timeout)
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
        self._base = None

    def _flatten(self, tensors: Mapping[str, Any], layout: WeightsLayout, travelling: WeightsLayout) -> Flat:
        """Return the tensors as sent, copied to new memory. Raises SpecMismatch, naming the difference."""
        if tensors.keys() != layout.places.keys():
            raise layout_mismatch(layout, self._model, tensors)
        flat = np.zeros(travelling.nbytes, np.uint8)
        for name, view in travelling.views(flat, bits=True).items():
            array = _host_array(tensors[name], layout.places[name])
            if array is None:
                raise layout_mismatch(layout, self._model, tensors)
            view[...] = narrow(array) if view.dtype != array.dtype else array
        return flat


class RemoteWeightsReader(_RemoteEnd):
    """A `WeightsReader` over gRPC. Every call is a round trip, so call it between episodes rather than every step.

    If the stream has broken, the next call opens a new one, and waits some seconds for a gateway that is being
    restarted. Thread-safe: calls run one after another.

    Attributes:
        layout: the layout of the weights; it may change if the server was restarted with another model of that name.
        max_lag: `max_lag` of the model's settings.
        age_seconds: the age of the last publication when the gateway read it.

    Raises:
        ModelNotFound: the server has no such model.
        Refused: the model does not accept publications.
        Busy: the gateway has reached its maximum number of streams.
        ServerGone: the gateway cannot be reached.
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
        """The newest version; 0 if nothing has been published yet. Raises like `read`."""
        return self._asked(self._look, None)

    def newer_than(self, seen: int) -> bool:
        """Return whether there is a version newer than `seen` (0: any). Raises like `read`."""
        return self.newest > seen

    def read(self, *, timeout: float | None = None) -> Weights:
        """Read the newest weights into new arrays; see `WeightsReader.read`.

        Args:
            timeout: seconds for the whole call, which then also waits for a first publication. None: each message has
                the reader's timeout, and Timeout is raised immediately if nothing has been published.

        Raises:
            Timeout: nothing has been published yet, or the gateway did not answer in time.
            ServerGone: the gateway cannot be reached.
            Refused: this reader was closed or was created before a fork.
        """
        until = None if timeout is None else time.monotonic() + seconds(timeout)
        while True:
            try:
                return self._asked(self._read, until)
            except Timeout:
                if until is None or time.monotonic() + _AGAIN >= until:
                    raise
            time.sleep(_AGAIN)

    def close(self) -> None:
        """End the stream. A thread that is waiting for an answer gets an error."""
        self._closed = True
        if (stream := self._stream) is not None:
            stream.close()

    # ---- internals

    def _asked(self, ask: Callable[[RemoteStream, float | None], _T], until: float | None, patient: bool = True) -> _T:
        """Call `ask` with the stream, opening one if necessary; return its result.

        Args:
            ask: called with the stream and the deadline.
            until: deadline on the monotonic clock; None: the reader's timeout for each message.
            patient: if the gateway cannot be reached, try again for some seconds.
        """
        back = time.monotonic() + min(_BACK, self._timeout)
        if until is not None:
            back = min(back, until)
        while True:
            try:
                with self._turn.once(self._timeout if until is None else until - time.monotonic()):
                    return self._exchanged(ask, until)
            except ServerGone:  # reading changes nothing in the gateway, so it may be repeated
                if not patient or self._closed or time.monotonic() + _AGAIN >= back:
                    raise
            time.sleep(_AGAIN)

    def _exchanged(self, ask: Callable[[RemoteStream, float | None], _T], until: float | None) -> _T:
        self._require_open()
        stream = self._stream
        if stream is None or not stream.alive:
            stream = RemoteStream(self._channel, READ, pb.ReadReply, self._metadata, self._timeout)
            self._stream = stream
            if self._closed:  # by another thread in the meantime
                stream.close()
        try:
            return ask(stream, until)
        except BaseException:
            if not stream.refused:
                # Part of the answer may still arrive and would be mistaken for the next one.
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
        if reply.head.layout:  # sent only with a stream's first reply
            self.layout = WeightsLayout.from_json(reply.head.layout)
            self.max_lag = int(reply.head.max_lag)
        return reply.head

    def _require_open(self) -> None:
        if self._forked:
            raise Refused(f"this reader of {self._model!r} was made before a fork: connect in this process")
        if self._closed:
            raise Refused(f"this reader of {self._model!r} was closed: take another one")


def _host_array(tensor: Any, place: TensorPlace) -> np.ndarray[Any, Any] | None:
    """Return a tensor's bits in host memory in the stored dtype; None if its shape or dtype does not match."""
    if not hasattr(tensor, "data_ptr"):
        given = array_of(tensor, place)
        return None if given is None else given.view(place.stored)
    if tuple(tensor.shape) != place.shape or dtype_name(tensor) not in (place.dtype, place.stored.name):
        return None
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    array = np.empty(place.shape, place.stored)
    ctypes.memmove(array.ctypes.data, whole.data_ptr(), place.nbytes)
    return array
