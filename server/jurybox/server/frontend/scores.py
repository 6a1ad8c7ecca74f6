"""Scores of rows: one number of a model or a panel for each, or the reason why it is missing, never a made-up one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from jurybox.client.juror import Passing, Scores, score_output, weighted
from jurybox.client.juror_rows import CallRows, Inputs
from jurybox.protocol.errors import Busy, Code, Error, ModelFailed, Refused, ServerGone, SpecMismatch, Timeout, said
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.requests import ReadRows, RowsRequest
from jurybox.server.frontend.threads import ThreadPool
from jurybox.server.security.access import OF_CONNECTION, ClientConnection

_PASSING = (Timeout, Busy, ServerGone)  # the next request may succeed
_MUCH = 2 << 20  # bytes of a call's rows that are made in a thread: a switch of threads takes 0.1 ms
_MANY = 256  # rows


class RowScorer:
    """Scores rows as `jurybox.client.Juror` does, on the frontend's lanes.

    Args:
        pool: threads in which large calls are converted to rows.
        model: name of the model, or of a panel.
        inputs: the source of each of the model's inputs; see `jurybox.client.juror.Juror`.
        output: name of the output that is the score; required if the model has several.
        timeout: seconds to wait for a score before it counts as missing.
        priority: of all requests.

    Attributes:
        spec: the model's, once it is known; None before, and for a panel.
    """

    def __init__(
        self,
        frontend: Frontend,
        pool: ThreadPool,
        *,
        model: str,
        inputs: Inputs | None = None,
        output: str | None = None,
        timeout: float = 60.0,
        priority: int = NORMAL,
    ) -> None:
        self._frontend, self._pool = frontend, pool
        self._model, self._inputs, self._output = model, dict(inputs or {}), output
        self._timeout, self._priority = timeout, priority
        self.spec: ModelSpec | None = None

    async def lease(self) -> None:
        """Lease the rows now, before other lanes take them. After an error the next request tries again."""
        panel = self._frontend.panels.get(self._model)
        models = [self._model] if panel is None else [member["model"] for member in panel.values()]
        until = time.monotonic() + self._timeout
        for model in models:
            with suppress(Error):
                spec = await self._frontend.spec(model, until, self._priority, patient=True)
                self.spec = spec if panel is None else None

    async def scores(self, columns: Mapping[str, Any], n: int) -> Scores:
        """Return the score of each of n rows, or the reason why it is missing.

        Args:
            columns: lists of n values each, by name; unused ones are ignored.

        Raises:
            SpecMismatch: a column is missing, or no row fits the model.
            ServerGone, ModelNotFound, ModelFailed, Refused, Timeout, Busy: there is no such model, or it is not served.
        """
        until = time.monotonic() + self._timeout
        if (members := self._frontend.panels.get(self._model)) is None:
            call = _ScoredRows(columns, n, until, self._model, self._output)
            call.client = OF_CONNECTION.get()
            scores = await self._scored(call)
            self.spec = call.spec
            return scores
        calls = [
            _ScoredRows(columns, n, until, one["model"], one.get("output"), partial=True) for one in members.values()
        ]
        found = await asyncio.gather(*map(self._scored_or_passing, calls), return_exceptions=True)
        parts: dict[str, Scores] = {}
        for name, one in zip(members, found, strict=True):
            if isinstance(one, BaseException):
                raise one
            parts[name] = one
        return weighted({name: float(member["weight"]) for name, member in members.items()}, parts, n)

    async def _scored_or_passing(self, call: _ScoredRows) -> Scores:
        """Return a member's scores; one that is unavailable has none for any row."""
        try:
            return await self._scored(call)
        except _PASSING as error:
            return Scores([Passing(said(error, 300))] * call.n)

    async def _scored(self, call: _ScoredRows) -> Scores:
        call.spec = spec = await self._frontend.spec(call.model, call.until, self._priority, patient=True)
        call.output = score_output(call.model, call.output, spec.outputs)
        make = partial(call.made, spec, self._inputs)
        inputs, n = await self._pool.run(make) if call.large else make()
        versions: list[int] = []
        answers = iter(await self._ask(call, spec, inputs, n, versions) if n else [])
        return Scores([next(answers) if isinstance(row, dict) else row for row in call.rows], versions)

    async def _ask(
        self, call: _ScoredRows, spec: ModelSpec, inputs: Mapping[str, Any], n: int, versions: list[int]
    ) -> list[float | str]:
        def read(found: ModelSpec, _: bool) -> ReadRows:
            if found is not spec and found != spec:
                raise SpecMismatch(f"model {call.model!r} has changed since these rows were read: ask again")
            return ReadRows(inputs, n, 8 * n)

        try:
            reply = await self._frontend.compute(
                RowsRequest(call.model, read, call.until, priority=self._priority, client=call.client, patient=True)
            )
        except (ModelFailed, Refused) as error:
            if isinstance(error, Refused) and error.code != Code.TOO_LARGE:
                raise
            if n == 1 or call.until < time.monotonic():
                return [said(error, 300)] * n
            half = n // 2  # bisect: only rows that make the model fail, or are too large, must get the error
            parts = [
                ({name: rows[at:end] for name, rows in inputs.items()}, end - at) for at, end in ((0, half), (half, n))
            ]
            return [score for part in parts for score in await self._ask(call, spec, *part, versions)]
        except _PASSING as error:
            return [Passing(said(error, 300))] * n
        versions.append(reply.version)
        assert call.output is not None
        values, failed = np.asarray(reply.outputs[call.output], np.float64).reshape(n).tolist(), reply.failed
        return [
            failed[i] if i in failed else score if isfinite(score) else f"the score is {score}"
            for i, score in enumerate(values)
        ]


class _ScoredRows(CallRows):
    """The rows of one call for the scores of a model."""

    def __init__(
        self, columns: Mapping[str, Any], n: int, until: float, model: str, output: str | None, *, partial: bool = False
    ) -> None:
        super().__init__(columns, n, until)
        self.model, self.output, self.partial = model, output or None, partial
        self.spec: ModelSpec | None = None
        self.client: ClientConnection | None = None
        self.large = n > _MANY or _size(columns.values()) > _MUCH

    def made(self, spec: ModelSpec, inputs: Inputs) -> tuple[dict[str, Any], int]:
        """Convert the columns, and return the rows that fit for every input, and their number; see `CallRows.fit`."""
        self.fit(spec, inputs, partial=self.partial)
        rows = [row for row in self.rows if isinstance(row, dict)]
        if not rows:
            return {}, 0
        return {
            name: [row[name] for row in rows] if item.variable else np.stack([row[name] for row in rows])
            for name, item in spec.inputs.items()
        }, len(rows)


def _size(columns: Iterable[Sequence[Any]]) -> int:
    """Return the bytes of the arrays and texts of some columns."""
    size = 0
    for values in columns:
        for value in values:
            size += len(value) if isinstance(value, (str, bytes)) else getattr(value, "nbytes", 0)
    return size
