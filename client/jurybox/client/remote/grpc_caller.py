"""Whole calls of one row over gRPC: from the caller's array to a message, and from the answer to new arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.remote.grpc_messages import PlainMessages
from jurybox.client.remote.infer_calls import InferCalls
from jurybox.client.transports.transport import NOT_FIT, NOT_SENT, Caller, RowPlace
from jurybox.protocol.errors import Code, Error


class GrpcCaller(Caller):
    """A caller that copies neither the input nor the outputs to the lane's rows, unless the answer is an unusual one.

    Args:
        calls: makes the calls, each in the caller's thread.
        messages: the model's messages.
        place: the row.
        read: reads a failed call, or an answer of unknown form, and writes its outputs to the row.
    """

    deadline: int = 0
    version: int = 0

    def __init__(
        self,
        calls: InferCalls,
        messages: PlainMessages,
        place: RowPlace,
        read: Callable[[InFlight, Any], Answer],
    ) -> None:
        self._calls = calls
        self._messages = messages
        self._place = place
        self._read = read
        self._message = ""
        outputs: Any = place.outputs
        self._alone = type(outputs) is not dict
        named = {"": outputs} if self._alone else outputs
        self._outputs = [(name, array.dtype, array.shape) for name, array in named.items()]

    def __call__(self, row: object, sequence: int, seconds: float) -> Any:
        if row is None:
            return NOT_SENT
        if not self._place.takes(row):
            return NOT_FIT
        if seconds <= 0:  # as in GrpcTransport.exchange
            self._message = passed(self._messages.model)
            return int(Code.TIMEOUT)
        self.deadline = time.monotonic_ns() + int(seconds * 1e9)
        try:
            answer: Any = self._calls.ask(self._messages.request_of(row), max(0.001, seconds))
        except (Error, grpc.RpcError) as error:
            return self._read_by_itself(sequence, error)
        form = self._messages.form_of(1, answer)
        if form is None:
            return self._read_by_itself(sequence, answer)
        self.version = form.version
        outputs = {}
        for (name, dtype, shape), data in zip(self._outputs, form.data, strict=True):
            outputs[name] = np.frombuffer(answer[data], dtype).reshape(shape).copy()
        return outputs[""] if self._alone else outputs

    def message(self) -> str:
        return self._message

    def _read_by_itself(self, sequence: int, call: Any) -> Any:
        """Return the outputs or the code of a call as the transport reads it."""
        answer = self._read(InFlight(sequence, self._place.first, 1, self.deadline, 0), call)
        self.version, self._message = answer.version, answer.message
        return self._place.copied() if answer.code == Code.OK else int(answer.code)


def passed(model: str) -> str:
    """Return the message for a request whose time-out had passed before it was sent."""
    return f"the time-out of a request to model {model!r} had passed before it was sent"
