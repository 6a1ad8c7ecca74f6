"""Weights over gRPC: the publisher and the reader of learners and actors on another machine than the server."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np

from jurybox.client.publisher import layout_mismatch, tensors_of
from jurybox.client.remote_stream import RemoteStream
from jurybox.client.weights_reader import State, Weights
from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch
from jurybox.protocol.remote_weights_pb2 import (
    BeginPublication,
    EndPublication,
    Opened,
    OpenPublisher,
    PublishReply,
    PublishRequest,
    ReadReply,
    ReadRequest,
)
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.extra import decode, encode
from jurybox.protocol.weights.layout import TensorPlace, dtype_name
from jurybox.protocol.weights.transfer import PUBLISH, READ, Assembly, Flat, chunks, narrow, transfer_layout

Metadata = tuple[tuple[str, str], ...]


class RemotePublisher:
    """`Publisher`, over gRPC. It holds the model's place of publisher while its stream lasts.

    Where the stream broke (the network, the gateway, the server), the publication in progress raises and did not happen
    or is not known to have; the next `publish` opens a new one.

    Args:
        channel: to the gateway. It stays the caller's to close.
        model: whose weights.
        bfloat16: send float32 as bfloat16: half the bytes, eight bits of mantissa instead of 24. Exact without it.
        changed_only: leave out chunks (1 MiB) that are as in the last publication; exact, and keeps a copy of it here.
        metadata: sent with the stream, such as a token.
        timeout: seconds of every wait.

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
        self._channel = channel
        self._model = model
        self._bfloat16 = bfloat16
        self._changed_only = changed_only
        self._metadata = metadata
        self._timeout = timeout
        self._turn = threading.Lock()
        self._closed = False
        self.sent_bytes = 0
        self._base: Flat | None = None
        self._stream, opened = self._open()
        self._adopt(opened)

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
        tensors, packed = tensors_of(source), encode(extra)
        with self._turn:
            if self._closed:
                raise Refused(f"this publisher of {self._model!r} was closed; make another one")
            if not self._stream.alive:
                self._stream, opened = self._open()
                self._adopt(opened)
            if len(packed) > self._extra_bytes:
                raise SpecMismatch(
                    f"extra takes {len(packed)} bytes, the weights channel of {self._model!r} has room for "
                    f"{self._extra_bytes}; publish less with the weights"
                )
            flat = self._flatten(tensors)
            base = self._base if self._changed_only else None
            self._base = None
            begin = BeginPublication(
                layout_hash=bytes.fromhex(self._travelling.hash),
                bfloat16=self._bfloat16,
                changed_only=base is not None,
                version=version or 0,
                check_finite=check_finite,
                extra=packed,
            )
            try:
                self._stream.send(PublishRequest(begin=begin))
                sent = 0
                for chunk in chunks(flat, base):
                    self._stream.send(PublishRequest(chunk=chunk))
                    sent += len(chunk.data)
                self._stream.send(PublishRequest(end=EndPublication(bytes=sent)))
                self.version = int(self._stream.receive().published)
            except Error as error:
                if error.code not in (Code.REFUSED, Code.SPEC_MISMATCH):
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

    def _open(self) -> tuple[RemoteStream, Opened]:
        stream = RemoteStream(self._channel, PUBLISH, PublishReply.FromString, self._metadata, self._timeout)
        try:
            stream.send(PublishRequest(open=OpenPublisher(model=self._model)))
            return stream, stream.receive().opened
        except BaseException:
            stream.close()
            raise

    def _adopt(self, opened: Opened) -> None:
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

    def __enter__(self) -> RemotePublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteWeightsReader:
    """`WeightsReader`, over gRPC: every question is a round trip, so ask between episodes rather than every step.

    Args:
        channel: to the gateway. It stays the caller's to close.
        model: whose weights.
        metadata, timeout: as `RemotePublisher`.

    Attributes:
        layout: of the weights.
        max_lag: as the model's settings say.
        age_seconds: how old the last publication read was when it was read there.

    Raises:
        ModelNotFound; Refused: the model takes no publications; ServerGone.
    """

    def __init__(self, channel: grpc.Channel, model: str, *, metadata: Metadata = (), timeout: float = 30.0) -> None:
        self._stream = RemoteStream(channel, READ, ReadReply.FromString, metadata, timeout)
        self._model = model
        self._turn = threading.Lock()
        self.age_seconds = 0.0
        try:
            head = self._ask(look=True)
        except BaseException:
            self._stream.close()
            raise
        self.layout = WeightsLayout.from_json(head.layout)
        self.max_lag = int(head.max_lag)

    @property
    def newest(self) -> int:
        """The newest version; 0 when nothing has been published yet."""
        with self._turn:
            return int(self._ask(look=True).newest)

    def newer_than(self, seen: int) -> bool:
        """Whether there is a version newer than `seen` (0: any)."""
        return self.newest > seen

    def read(self) -> Weights:
        """As `WeightsReader.read`, into new arrays. Raises Timeout where nothing has been published yet."""
        with self._turn:
            head = self._ask()
            flat = np.zeros(self.layout.nbytes, np.uint8)
            assembly = Assembly(flat, gaps=False)
            while assembly.received < self.layout.nbytes:
                assembly.put(self._stream.receive().chunk)
        self.age_seconds = float(head.age)
        state: State = self.layout.views(flat)
        return Weights(state, int(head.version), decode(head.extra))

    def close(self) -> None:
        """End the stream."""
        self._stream.close()

    def _ask(self, *, look: bool = False) -> Any:
        self._stream.send(ReadRequest(model=self._model, look=look))
        return self._stream.receive().head

    def __enter__(self) -> RemoteWeightsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
