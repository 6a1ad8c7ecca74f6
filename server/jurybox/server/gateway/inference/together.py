"""Requests that come while others are computed leave together, as one ticket.

A ticket costs the gateway, the engine and the kernel the same however many rows it has. So rows of different requests
share tickets, two in flight at most: one computes, one waits, and what comes meanwhile makes up the next. A lone
request waits for nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client import Model, Timeout
from jurybox.protocol.errors import Code, Error

Arrays = Mapping[str, NDArray[Any]]

_IN_FLIGHT = 1


@dataclass(slots=True)
class _Asked:
    """Rows of one request; `until` is in seconds of the monotonic clock."""

    inputs: Arrays
    n: int
    version: int
    until: float
    answer: asyncio.Future[tuple[Arrays, int]]


class Together:
    """The requests on one lane. For one event loop.

    Args:
        model: whose lane it is.
        most: rows of a ticket.
    """

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        self._most = most
        self._outputs = list(model.spec.outputs)
        self._waiting: deque[_Asked] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._called = False

    async def ask(self, inputs: Arrays, n: int, seconds: float, version: int) -> tuple[Arrays, int]:
        """Compute n rows, at most `most`; gives outputs by name, views of their ticket's, and the weights' version.

        Raises:
            Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Arrays, int]] = loop.create_future()
        self._waiting.append(_Asked(inputs, n, version, time.monotonic() + seconds, answer))
        if not self._called and len(self._in_flight) < _IN_FLIGHT:
            # Not at once: requests that came in the same turn of the loop come along.
            self._called = True
            loop.call_soon(self._send)
        if self._in_flight:
            self._model.look()  # the thread that watches for answers would have to wait for a pause
        late = loop.call_later(seconds, self._expire, answer, seconds)
        try:
            return await answer
        finally:
            late.cancel()

    def _expire(self, answer: asyncio.Future[tuple[Arrays, int]], seconds: float) -> None:
        if not answer.done():
            answer.set_exception(Timeout(f"model {self._model.name!r} did not answer within {seconds:.3f} s"))

    def _send(self) -> None:
        self._called = False
        while self._waiting and len(self._in_flight) < _IN_FLIGHT:
            taken = self._take()
            if taken:
                task = asyncio.ensure_future(self._answer(taken))
                self._in_flight.add(task)
                task.add_done_callback(self._sent)

    def _take(self) -> list[_Asked]:
        """The next ticket's requests: those that wait longest, of one weights version."""
        taken: list[_Asked] = []
        rows = 0
        while self._waiting:
            asked = self._waiting[0]
            if taken and (rows + asked.n > self._most or asked.version != taken[0].version):
                break
            self._waiting.popleft()
            if not asked.answer.done():  # its caller has given up
                taken.append(asked)
                rows += asked.n
        return taken

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if self._waiting:
            self._send()

    async def _answer(self, taken: list[_Asked]) -> None:
        if len(taken) == 1:
            return await self._compute(taken)
        try:
            await self._compute(taken)
        except Error as error:
            if error.code != Code.MODEL_FAILED:
                self._fail(taken, error)
                return None
            for asked in taken:  # one of them breaks the model; the others must not be told so
                await self._answer([asked])
        return None

    async def _compute(self, taken: list[_Asked]) -> None:
        """Ask for these rows as one ticket, and hand out the answers. An error is one request's own."""
        first = taken[0]
        if len(taken) == 1:
            inputs: Arrays = first.inputs
        else:
            inputs = {name: np.concatenate([asked.inputs[name] for asked in taken]) for name in first.inputs}
        seconds = max(asked.until for asked in taken) - time.monotonic()
        try:
            reply = await self._model.infer_async(inputs, timeout=seconds, version=first.version)
        except Error as error:
            if len(taken) > 1:
                raise
            self._fail(taken, error)
            return
        outputs = reply.outputs if len(self._outputs) > 1 else {self._outputs[0]: reply.outputs}
        at = 0
        for asked in taken:
            end = at + asked.n
            if not asked.answer.done():
                part = {name: array[at:end] for name, array in outputs.items()}
                asked.answer.set_result((part, reply.version))
            at = end

    def _fail(self, taken: list[_Asked], error: Error) -> None:
        for asked in taken:
            if not asked.answer.done():
                asked.answer.set_exception(error)
