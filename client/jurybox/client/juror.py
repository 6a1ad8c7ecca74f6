"""A juror's scores for a trainer: the rows of concurrent calls are sent together, to all engines of its model.

A missing score is never a number, but the reason why it is missing. `jurybox.client.rewards` has a function for each
trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jurybox.client.juror_calls import CallAnswer, CallPart, WaitingCalls
from jurybox.client.juror_rows import CallRows, Inputs
from jurybox.client.row_allocator import whole
from jurybox.client.server import Server, connect
from jurybox.protocol.errors import (
    Busy,
    Code,
    Error,
    ModelFailed,
    ModelNotFound,
    Refused,
    RowFailed,
    ServerGone,
    SpecMismatch,
    Timeout,
    said,
)
from jurybox.protocol.locks import NESTED, seconds
from jurybox.protocol.scoreboard import FIRST, LAST, NORMAL
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec
from jurybox.protocol.threads import start_thread

if TYPE_CHECKING:
    from jurybox.client.model import Model

Scored = float | str  # a score, or the reason why there is none
Members = Mapping[str, "float | Mapping[str, Any]"]  # a panel's members: each one's weight, or its settings as a dict
_GRACE = 2.0  # seconds a call waits beyond its time-out for the server's own error
_MOST_AT_ONCE = 16  # requests in flight, each on a lane of its own: other clients need lanes, too
# Temporary errors: the next request may succeed.
_PASSING = (Timeout, Busy, ServerGone)


class _Sender(threading.local):
    """The juror whose calls the current thread sends, and the model whose lane it uses; None: none.

    A destructor that the garbage collector runs in it must not wait for this thread.
    """

    of: weakref.ref[Juror] | None = None
    model: Model | None = None

    @property
    def juror(self) -> Juror | None:
        return None if self.of is None else self.of()


_sender = _Sender()


class Passing(str):
    """The reason for a missing score if it may be temporary; a new request may succeed."""

    __slots__ = ()


class Scores(list[Scored]):
    """A score or a reason for each row.

    Attributes:
        version: version of the weights; the oldest if several were used.
        parts: for a panel, each member's n scores or reasons, by name.
    """

    def __init__(self, scored: Iterable[Scored] = (), versions: Iterable[int] = ()) -> None:
        super().__init__(scored)
        self.version = min(versions, default=0)
        self.parts: dict[str, list[Scored]] = {}


class Juror:
    """A model of a server whose output is a score, or a panel. Connects on first use, separately in each process.

    Its rows are released when it is closed or garbage-collected.

    Args:
        model: name of the model, or of a panel in the server's configuration; or a panel's members by name, each with
            its weight, or with a dict of `weight` and optionally `model`, `output` and `address`.
        inputs: the source of each of the model's inputs: the name of a column, or a function of all columns that
            returns a list with a value for each row. Default: the column of the same name, or the trainer's equivalent.
        output: name of the output that is the score; required if the model has several.
        address: address of the server. Defaults to JURYBOX_ADDRESS, then to the default address.
        timeout: seconds to wait for a score before it counts as missing.
        priority: of its requests, 1 (first), 2 (normal) or 3 (last); see `Server.model`.
    """

    def __init__(
        self,
        model: str | Members,
        *,
        inputs: Inputs | None = None,
        output: str | None = None,
        address: str | None = None,
        timeout: float = 60.0,
        priority: int = NORMAL,
    ) -> None:
        self.name = model if isinstance(model, str) else "+".join(model)
        self._panel = None if isinstance(model, str) else dict(model)
        self._partial = False  # whether `inputs` may name inputs of other models (the panel's other members)
        self._inputs = dict(inputs or {})
        self._output = output
        self._address = address
        self._timeout = seconds(timeout)
        self._priority = whole(priority, "priority", FIRST, LAST)
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a destructor may call within a call
        self._answering = threading.Lock()  # held by the thread that uses the first of the models
        self._waiting = WaitingCalls()
        self._started = False  # whether the first thread has started
        self._models: list[Model] = []  # one for each engine, with a lane of its own
        self._server: Server | None = None
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_ScoreCall]] = (
            weakref.WeakKeyDictionary()
        )
        self._members: dict[str, tuple[float, Juror]] = {} if self._panel is None else self._jurors(self._panel)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "_panel", "_partial", "_inputs", "_output", "_address", "_timeout", "_priority")
        return {key: getattr(self, key) for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def spec(self) -> ModelSpec | None:
        """The spec of its model once it has connected; None before, and for a panel."""
        models = self._models
        return models[0].spec if models else None

    def scores(self, columns: Mapping[str, Any], n: int) -> Scores:
        """Return the score of each of n rows, or the reason why it is missing.

        Args:
            columns: lists of n values each, by name; unused ones are ignored.

        Raises:
            SpecMismatch: a column is missing, or no row fits the model.
            ServerGone, ModelNotFound, Refused: the server cannot be reached, or has no such model.
            Refused: a panel is asked by a destructor that runs in a thread of one of its members.
        """
        if (sender := _sender.juror) is not None and (sender is self or self._needs(sender)):
            return self._scores_within(columns, n)
        asked = _ScoreCall(columns, n, time.monotonic() + self._timeout)
        self._hand_over([asked])
        try:
            return asked.answer.result(self._timeout + _GRACE)
        except TimeoutError:
            return asked.late(self._timeout)

    async def scores_async(self, columns: Mapping[str, Any], n: int) -> Scores:
        """Like `scores`, as a coroutine; calls in the same iteration of the event loop are sent together."""
        asked = _ScoreCall(columns, n, time.monotonic() + self._timeout)
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(loop, [])
        turn.append(asked)
        if len(turn) == 1:
            loop.call_soon(self._end_turn, loop)
        return await self._scored(asked)

    def _scores_within(self, columns: Mapping[str, Any], n: int) -> Scores:
        """Compute scores in the thread that would otherwise be waited for, because it sends this juror's calls."""
        model = _sender.model or next(iter(self._models), None)
        if _sender.juror is not self or model is None:
            raise Refused(
                f"scores of {self.name!r} are under way, and this thread sends them: {NESTED}. Ask for scores in a "
                "thread of your own"
            )
        call = CallRows(columns, n, time.monotonic() + self._timeout)
        call.fit(model.spec, self._inputs, partial=self._partial)
        return Scores(*self._computed(model, call.rows, call.until))

    def _needs(self, juror: Juror) -> bool:
        """Return whether a juror is one of this panel's members."""
        return any(member is juror or member._needs(juror) for _, member in list(self._members.values()))

    async def _scored(self, asked: _ScoreCall) -> Scores:
        try:
            return await asked.answer.awaited(self._timeout + _GRACE)
        except TimeoutError:
            return asked.late(self._timeout)

    def close(self) -> None:
        """Release its rows. A later call connects again."""
        with self._lock:
            self._models, server, self._server = [], self._server, None
            members = list(self._members.values())
        if server is not None:
            server.close()
        for _, member in members:
            member.close()

    # ---- internals

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turns.pop(loop, [])
        self._hand_over(turn)

    def _hand_over(self, calls: Sequence[_ScoreCall]) -> None:
        if self._pid != os.getpid():
            self._start()  # a forked child has no thread
        self._waiting.put(calls)
        with self._lock:
            if self._started:
                return
            closing = weakref.finalize(self, self._waiting.close)
            try:
                self._start_thread(None)
            except Busy as error:
                closing.detach()
                why = error
            else:
                self._started = True  # last: an interrupt must not leave a juror without a thread
                return
        for call in calls:
            call.fail(why)

    def _start_thread(self, model: Model | None) -> None:
        """Start a thread that sends calls on a model's lane; None: on that of the first one. Raises Busy."""
        given = weakref.ref(self), self._waiting, model
        thread = threading.Thread(target=_work, args=given, name=f"rewards {self.name}", daemon=True)
        start_thread(thread, f"to send calls of {self.name!r}")

    def _jurors(self, panel: Members) -> dict[str, tuple[float, Juror]]:
        """Create a juror for each member. Raises ValueError if a member's settings are invalid."""
        if not panel:
            raise ValueError("a panel without members: expected a weight for each by name")
        members: dict[str, tuple[float, Juror]] = {}
        for name, described in panel.items():
            given: dict[str, Any] = dict(described) if isinstance(described, Mapping) else {"weight": described}
            weight = float(given.pop("weight"))
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {name!r} is {weight}, expected a finite number")
            juror = Juror(
                given.pop("model", name),
                inputs=self._inputs,
                output=given.pop("output", None),
                address=given.pop("address", self._address),
                timeout=self._timeout,
                priority=self._priority,
            )
            if given:
                known = "weight, model, output, address"
                raise ValueError(f"member {name!r}: {list(given)} is not known, expected {known}")
            juror._partial = True
            members[name] = (weight, juror)
        return members

    def _answer(self, parts: Sequence[CallPart], model: Model | None) -> None:
        """Send parts of calls as one request, with the first model if none is given."""
        if not parts:
            return
        if model is None:
            models = self._models or ([] if self._members else self._connected())
            if not models:
                for part in parts:
                    _Vote(part.asked, self._members)
                return
            model = models[0]
        fitting: list[CallPart] = []
        for part in parts:
            try:
                part.asked.fit_once(model.spec, self._inputs, partial=self._partial)
            except Exception as error:  # noqa: BLE001  an error of this caller or its function; the others go on
                part.asked.fail(error)
            else:
                fitting.append(part)
        rows = [row for part in fitting for row in part.asked.rows[part.first : part.end]]
        found, versions = self._computed(model, rows, max((part.asked.until for part in fitting), default=0.0))
        at = 0
        for part in fitting:
            part.asked.found(part.first, found[at : at + part.n], versions)
            at += part.n

    def _computed(
        self, model: Model, rows: Sequence[dict[str, Any] | str], until: float
    ) -> tuple[list[Scored], list[int]]:
        """Return the scores of rows, and the versions; those that do not fit already contain their reasons."""
        fitting = [row for row in rows if isinstance(row, dict)]
        versions: list[int] = []
        answers = iter(self._ask(model, fitting, until, versions) if fitting else [])
        return [next(answers) if isinstance(row, dict) else row for row in rows], versions

    def _ask(self, model: Model, rows: list[dict[str, Any]], until: float, versions: list[int]) -> list[Scored]:
        failed: Mapping[int, str] = {}
        try:
            if len(rows) == 1:  # the fast path, which copies the row only once
                (row,) = rows
                reply = model.row_reply(row if len(row) > 1 else next(iter(row.values())), until - time.monotonic())
            else:
                inputs: dict[str, Any] = {
                    name: [row[name] for row in rows] if spec.variable else np.stack([row[name] for row in rows])
                    for name, spec in model.spec.inputs.items()
                }
                reply = model.infer_reply(inputs, timeout=max(0.0, until - time.monotonic()))
            outputs, version = reply.outputs, reply.version
        except RowFailed as error:
            outputs, failed, version = error.outputs, error.errors, error.version
        except (ModelFailed, Refused) as error:
            if isinstance(error, Refused) and error.code != Code.TOO_LARGE:
                raise
            if len(rows) == 1 or until < time.monotonic():
                return [said(error, 300)] * len(rows)
            half = len(rows) // 2  # bisect: only rows that make the model fail, or are too large, must get the error
            return self._ask(model, rows[:half], until, versions) + self._ask(model, rows[half:], until, versions)
        except _PASSING as error:
            return [Passing(said(error, 300))] * len(rows)
        versions.append(version)
        values = outputs[self._output] if isinstance(outputs, dict) else outputs
        if type(values) is np.ndarray and values.size == 1 == len(rows):
            scores = [float(values.item())]
        else:
            scores = np.asarray(values, np.float64).reshape(len(rows)).tolist()
        return [
            failed[i] if i in failed else score if math.isfinite(score) else f"the score is {score}"
            for i, score in enumerate(scores)
        ]

    def _connected(self) -> list[Model]:
        """Connect and return a model for each engine, as far as lanes are free.

        If the name is a panel's, set its members and return none.
        """
        server = connect(self._address, timeout=self._timeout, priority=self._priority)
        try:
            try:
                models = [server.model(self.name)]
            except ModelNotFound:
                panel = server.status().get("panels", {}).get(self.name)
                if panel is None or self._partial:
                    raise
                self._members = self._jurors(panel)
                server.close()
                return []
            self._output = score_output(self.name, self._output, models[0].spec.outputs)
            with contextlib.suppress(Error):  # without free rows, for example, fewer requests are in flight
                for _ in range(1, min(server.engines(self.name), _MOST_AT_ONCE)):
                    models.append(server.model(self.name, wait=False))
        except BaseException:
            server.close()
            raise
        self._models, self._server = models, server
        for model in models[1:]:
            try:
                self._start_thread(model)
            except Busy:  # no more threads: fewer requests are in flight
                models.remove(model)
                model.close()
        return models


def score_output(model: str, name: str | None, outputs: Mapping[str, TensorSpec]) -> str:
    """Return the name of the output that is a model's score: `name`, or its only output. Raises SpecMismatch."""
    name = name or (next(iter(outputs)) if len(outputs) == 1 else "")
    if name not in outputs or outputs[name].dtype == BYTES or outputs[name].shape not in ((), (1,)):
        there = ", ".join(f"{key} {spec}" for key, spec in outputs.items())
        raise SpecMismatch(f"model {model!r} gives {there}: name the one number that is the score, output=...")
    return name


def _work(of: weakref.ref[Juror], waiting: WaitingCalls, model: Model | None) -> None:
    """Run a thread of a juror: send calls until it has ended, or no longer has the model."""
    _sender.of, _sender.model = of, model
    while waiting.wait():
        if not _serve(of(), waiting, model):
            return


def _serve(juror: Juror | None, waiting: WaitingCalls, model: Model | None) -> bool:
    """Send what waits as one request; return False if the juror no longer has this model."""
    parts: list[CallPart] = []
    try:
        with contextlib.nullcontext() if juror is None or model is not None else juror._answering:
            parts = waiting.take()
            if juror is None:
                raise ServerGone("this juror was closed")
            if model is not None and model not in juror._models:
                waiting.put_back(parts)  # the juror was closed, and connects again
                return False
            juror._answer(parts, model)
    except BaseException as error:  # noqa: BLE001  every waiting caller must get an answer
        for part in parts:
            part.asked.fail(error)
    return True


class _Vote:
    """One call of a panel. It calls the members concurrently and returns the scores when the last one has answered.

    A member that is unavailable (its server or its engine) has no score for any row; other errors are raised.
    """

    def __init__(self, asked: _ScoreCall, members: Mapping[str, tuple[float, Juror]]) -> None:
        self._asked = asked
        self._weights = {name: weight for name, (weight, _) in members.items()}
        self._given: dict[str, Scores | BaseException] = {}
        self._lock = threading.Lock()
        votes = {name: _ScoreCall(asked.columns, asked.n, asked.until) for name in members}
        for name, vote in votes.items():
            vote.answer.when_done(partial(self._came, name))
            members[name][1]._hand_over([vote])
        asked.waits_for = list(votes.values())

    def _came(self, name: str, answer: CallAnswer[Scores]) -> None:
        try:
            given: Scores | BaseException = answer.result(0)
        except _PASSING as error:
            given = Scores([Passing(said(error, 300))] * self._asked.n)
        except BaseException as error:  # noqa: BLE001  `_answer` passes it on to the caller
            given = error
        with self._lock:
            self._given[name] = given
            last = len(self._given) == len(self._weights)
        if last:
            self._answer()

    def _answer(self) -> None:
        answer = self._asked.answer
        if answer.done():
            return
        parts: dict[str, Scores] = {}
        for name in self._weights:
            given = self._given[name]
            if isinstance(given, BaseException):
                answer.set_exception(given)
                return
            parts[name] = given
        answer.set_result(weighted(self._weights, parts, self._asked.n))


def weighted(weights: Mapping[str, float], parts: Mapping[str, Scores], n: int) -> Scores:
    """Return the scores of a panel, given those of its members for each of n rows: their sums by weight."""
    scores = Scores((_total(weights, parts, i) for i in range(n)), [part.version for part in parts.values()])
    scores.parts = {name: list(part) for name, part in parts.items()}
    return scores


def _total(weights: Mapping[str, float], parts: Mapping[str, Scores], i: int) -> Scored:
    total = 0.0
    missing: list[tuple[str, str]] = []
    for name, part in parts.items():
        score = part[i]
        if isinstance(score, str):
            missing.append((name, score))
        else:
            total += weights[name] * score
    if missing:
        why = "; ".join(f"{name}: {reason}" for name, reason in missing)
        passing = all(isinstance(reason, Passing) for _, reason in missing)
        return Passing(why) if passing else why
    return total if math.isfinite(total) else f"the total is {total}"


class _ScoreCall(CallRows):
    """A call that waits for its scores."""

    def __init__(self, columns: Mapping[str, Any], n: int, until: float) -> None:
        super().__init__(columns, n, until)
        self.waits_for: list[_ScoreCall] = []  # a panel's members
        self.answer: CallAnswer[Scores] = CallAnswer()
        self._lock = threading.Lock()  # several threads may send parts of it
        self._wanted: bool | None = None  # None: no part of it was sent
        self._scores: list[Scored] = [""] * n
        self._left = n
        self._versions: list[int] = []

    def begin(self) -> bool:
        """Return whether its rows must be sent: unless it was cancelled before, or has failed."""
        if self._wanted is None:
            self._wanted = self.answer.begin()
        return self._wanted and not self.answer.done()

    def fit_once(self, spec: ModelSpec, inputs: Inputs, *, partial: bool = False) -> None:
        """Call `fit`, unless another thread has."""
        with self._lock:
            if len(self.rows) < self.n or not self.n:
                self.fit(spec, inputs, partial=partial)

    def found(self, first: int, scores: list[Scored], versions: Iterable[int]) -> None:
        """Set the scores of some rows, beginning with `first`."""
        with self._lock:
            self._scores[first : first + len(scores)] = scores
            self._versions += versions
            self._left -= len(scores)
            if not self._left and not self.answer.done():
                self.answer.set_result(Scores(self._scores, self._versions))

    def fail(self, error: BaseException) -> None:
        """Raise an error to the caller, unless the call is answered, or a panel's members will answer it."""
        with self._lock:
            if not self.answer.done() and not self.waits_for:
                self.answer.set_exception(error)

    def late(self, timeout: float) -> Scores:
        """Return the scores if they arrived just before the time-out, else reasons. Raise if the call failed."""
        if not self.answer.cancel() and self.answer.done():
            return self.answer.result(0)
        for vote in self.waits_for:
            vote.answer.cancel()
        return Scores([Passing(f"no score came within {timeout} s: others' requests took too long")] * self.n)
