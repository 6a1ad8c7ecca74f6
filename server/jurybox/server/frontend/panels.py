"""Panels: models whose scores together are one, the sum of theirs by weight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.juror import score_output
from jurybox.protocol.errors import Code, Error, Refused, RowFailed, SpecMismatch
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.lanes import MOMENT, SOON
from jurybox.server.frontend.requests import ReadRows, RowsReply, RowsRequest

if TYPE_CHECKING:
    from jurybox.server.frontend.frontend import Frontend

Panels = Mapping[str, Mapping[str, Any]]
TOTAL = "score"  # the output of a panel


async def voted(frontend: Frontend, request: RowsRequest, members: Mapping[str, Any]) -> RowsReply:
    """Run all members of a panel concurrently; a row without a score from one of them has no total.

    Raises:
        Refused, SpecMismatch. Any error of a member's request.
    """
    if request.steps is not None or request.version is not None:
        raise Refused(f"{request.model!r} is a panel: it has neither sequences nor a version", Code.UNSUPPORTED)
    until = min(request.until - SOON, time.monotonic() + MOMENT)
    specs = [(await frontend.lanes.hold_soon(member["model"], until)).spec for member in members.values()]
    takes = {name for spec in specs for name in spec.inputs}
    if unknown := [name for name in request.names if name not in takes]:
        raise SpecMismatch(f"input {unknown[0]!r} is not the panel's; it takes {', '.join(sorted(takes))}")
    outputs = [
        score_output(member["model"], member["output"], spec.outputs)
        for member, spec in zip(members.values(), specs, strict=True)
    ]

    def read(spec: ModelSpec, _: bool) -> ReadRows:
        return request.read(spec, True)

    requests = [replace(request, model=member["model"], read=read, client=None) for member in members.values()]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_kept(frontend.compute(one))) for one in requests]
    answers = [task.result() for task in tasks]
    for answer in answers:
        if isinstance(answer, Error):
            raise answer
    found = [answer for answer in answers if isinstance(answer, RowsReply)]
    return total(members, [(answer.outputs[name], answer) for answer, name in zip(found, outputs, strict=True)])


def total(members: Mapping[str, Any], scored: Sequence[tuple[Any, RowsReply]]) -> RowsReply:
    """Return the answer of a panel: the totals and each member's scores, with NaN where there is none.

    Args:
        members: each with its `weight`, by name.
        scored: the scores of each, and its answer.

    Raises:
        SpecMismatch: they are of different numbers of rows.
    """
    arrays: dict[str, NDArray[Any]] = {}
    failed: dict[int, str] = {}
    for name, (rows, answer) in zip(members, scored, strict=True):
        # A copy: failed rows are overwritten, since they hold no score (0 if the output has an integer dtype).
        scores = arrays[name] = np.array(rows, np.float32).reshape(-1)
        wrong = dict(answer.failed)
        for row in np.flatnonzero(~np.isfinite(scores)).tolist():
            wrong.setdefault(row, f"the score is {scores[row]}")
        for row, why in wrong.items():
            scores[row] = np.nan
            failed[row] = f"{failed[row]}; {name}: {why}" if row in failed else f"{name}: {why}"
    if len({len(scores) for scores in arrays.values()}) > 1:
        raise SpecMismatch("the members' inputs have different numbers of rows: expected as many of each")
    weighted = [np.float64(member["weight"]) * arrays[name] for name, member in members.items()]
    with np.errstate(over="ignore"):  # checked below
        totals = arrays[TOTAL] = np.sum(weighted, axis=0).astype(np.float32)
    for row in np.flatnonzero(~np.isfinite(totals)).tolist():
        failed.setdefault(row, f"the total is {totals[row]}")
        totals[row] = np.nan
    version = min((answer.version for _, answer in scored), default=0)
    error = None
    if failed:
        why = f"{len(failed)} of {len(totals)} rows have no total; the first: {failed[min(failed)]}"
        errors = dict(sorted(failed.items()))
        error = RowFailed(why, errors=errors, outputs=arrays, version=version)
    return RowsReply(arrays, version, None, error)


async def _kept(answer: Coroutine[Any, Any, RowsReply]) -> RowsReply | Error:
    """Return the answer or its error, so that an error does not cancel the other members' requests."""
    try:
        return await answer
    except Error as error:
        return error
