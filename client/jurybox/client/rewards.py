"""Rewards for trainers that call a Python function: TRL, verl, OpenRLHF, slime, Gymnasium and Stable-Baselines3.

A trainer's package is imported only when its hook is used. A missing reward is never a number: each hook returns the
value that its trainer skips, and raises if the trainer has no such value.

Concurrent calls, from tasks of an event loop or from threads, are sent to the server as one request.

A model argument may also be the name of a panel in the server's configuration, or a mapping of names to weights. The
members of a panel are called concurrently, and a row for which any member has no score has no score.

Example:
    from jurybox.client.rewards import trl_reward

    helpful = trl_reward("helpfulness", inputs={"text": "completions", "prompt": "prompts"})
    GRPOTrainer(model, reward_funcs=[helpful], ...)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.client.server import Server, connect
from jurybox.protocol.errors import (
    Busy,
    Code,
    ModelFailed,
    ModelNotFound,
    Refused,
    RowFailed,
    ServerGone,
    SpecMismatch,
    Timeout,
    said,
)
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

if TYPE_CHECKING:
    import gymnasium

    from jurybox.client.model import Model

__all__ = ["Juror", "gymnasium_reward", "openrlhf_reward", "sb3_reward", "slime_reward", "trl_reward", "verl_score"]

Scored = float | str  # a score, or the reason why there is none
Inputs = Mapping[str, "str | Callable[[Mapping[str, Any]], Sequence[Any]]"]
Members = Mapping[str, "float | Mapping[str, Any]"]  # a panel's members: each one's weight, or its settings as a dict
Missing = Literal["raise", "nan"]
_LOG = logging.getLogger("jurybox.rewards")
PICTURE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of Pillow, with 8 bits a channel
_GRACE = 2.0  # seconds a call waits beyond its time-out for the server's own error
_TOGETHER = 4096  # rows at which no further calls join a request
_MOST = float(np.finfo(np.float32).max)
# Temporary errors: the next request may succeed.
_PASSING = (Timeout, Busy, ServerGone)
# The columns in which trainers provide the value of a model's input.
_ALSO = {
    "text": ("completions", "queries", "solution_str", "response", "observation"),
    "response": ("completions", "solution_str"),
    "completion": ("completions", "solution_str", "response"),
    "image": ("images", "solution_image", "frame", "observation"),
    "query": ("queries",),
    "prompt": ("prompts",),
    "label": ("labels", "ground_truth"),
}


class Passing(str):
    """The reason for a missing score if it may be temporary; a new request may succeed."""

    __slots__ = ()


class Scores(list[Scored]):
    """A score or a reason for each row.

    Attributes:
        version: version of the weights; the oldest if several were used.
        parts: for a panel, each member's n scores or reasons, by name.
    """

    def __init__(self, scored: Iterable[Scored] = ()) -> None:
        super().__init__(scored)
        self.version = 0
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
    """

    def __init__(
        self,
        model: str | Members,
        *,
        inputs: Inputs | None = None,
        output: str | None = None,
        address: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.name = model if isinstance(model, str) else "+".join(model)
        self._panel = None if isinstance(model, str) else dict(model)
        self._partial = False  # whether `inputs` may name inputs of other models (the panel's other members)
        self._inputs = dict(inputs or {})
        self._output = output
        self._address = address
        self._timeout = timeout
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._answering = threading.Lock()  # held by the thread that is sending a request
        self._queue: queue.SimpleQueue[list[_Asked] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._model: Model | None = None
        self._server: Server | None = None
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Asked]] = weakref.WeakKeyDictionary()
        self._members: dict[str, tuple[float, Juror]] = {} if self._panel is None else self._jurors(self._panel)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "_panel", "_partial", "_inputs", "_output", "_address", "_timeout")
        return {key: getattr(self, key) for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def scores(self, columns: Mapping[str, Any], n: int) -> Scores:
        """Return the score of each of n rows, or the reason why it is missing.

        Args:
            columns: lists of n values each, by name; unused ones are ignored.

        Raises:
            SpecMismatch: a column is missing, or no row fits the model.
            ServerGone, ModelNotFound, Refused: the server cannot be reached, or has no such model.
        """
        asked = _Asked(dict(columns), n, time.monotonic() + self._timeout)
        self._hand_over([asked])
        try:
            return asked.answer.result(self._timeout + _GRACE)
        except (TimeoutError, FutureTimeout):
            return asked.late(self._timeout)

    async def scores_async(self, columns: Mapping[str, Any], n: int) -> Scores:
        """Like `scores`, as a coroutine; calls in the same iteration of the event loop are sent together."""
        asked = _Asked(dict(columns), n, time.monotonic() + self._timeout)
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(loop, [])
        turn.append(asked)
        if len(turn) == 1:
            loop.call_soon(self._end_turn, loop)
        return await self._scored(asked)

    def ask(self, columns: Mapping[str, Any], n: int) -> Callable[[], Awaitable[Scores]]:
        """Send a request now, from any thread; call and await the result to get what `scores_async` returns."""
        asked = _Asked(dict(columns), n, time.monotonic() + self._timeout)
        self._hand_over([asked])
        return partial(self._scored, asked)

    def scores_here(self, columns: Mapping[str, Any], n: int) -> Scores | None:
        """Like `scores`, but send the request in the calling thread, which saves a single request two thread switches.

        This is possible only while no other request is in flight. Calls that arrive meanwhile wait, and are then sent
        together.

        Returns:
            The scores; or None, without sending a request, if other calls are in flight or waiting, if the juror is a
            panel, or if it is not connected yet.

        Raises:
            As in `scores`.
        """
        if not self._answering.acquire(blocking=False):
            return None
        try:
            if self._model is None or self._pid != os.getpid() or not self._queue.empty():
                return None
            call = _Call(dict(columns), n, time.monotonic() + self._timeout)
            call.fit(self._model.spec, self._inputs, partial=self._partial)
            (scores,) = self._fitting_answered(self._model, [call])
            return scores
        finally:
            self._answering.release()

    async def _scored(self, asked: _Asked) -> Scores:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked.answer), self._timeout + _GRACE)
        except (TimeoutError, asyncio.TimeoutError):
            return asked.late(self._timeout)

    def close(self) -> None:
        """Release its rows. A later call connects again."""
        with self._lock:
            self._model, server, self._server = None, self._server, None
            members = list(self._members.values())
        if server is not None:
            server.close()
        for _, member in members:
            member.close()

    # ---- internals

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turns.pop(loop, [])
        self._hand_over(turn)

    def _hand_over(self, turn: list[_Asked]) -> None:
        if self._pid != os.getpid():
            self._start()  # a forked child has no thread
        with self._lock:
            self._queue.put(turn)  # One put: otherwise the thread could wake up after the first call and send it alone.
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(weakref.ref(self), self._queue), name=f"rewards {self.name}", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._queue.put, None)

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
            )
            if given:
                known = "weight, model, output, address"
                raise ValueError(f"member {name!r}: {list(given)} is not known, expected {known}")
            juror._partial = True
            members[name] = (weight, juror)
        return members

    def _answer(self, taken: list[_Asked]) -> None:
        if not taken:
            return
        model = self._model
        if model is None and not self._members:
            model = self._connected()
        if model is None:
            for asked in taken:
                _Vote(asked, self._members)
            return
        fitting: list[_Asked] = []
        for asked in taken:
            try:
                asked.fit(model.spec, self._inputs, partial=self._partial)
            except Exception as error:  # noqa: BLE001  an error of this caller or its function; the others go on
                asked.answer.set_exception(error)
            else:
                fitting.append(asked)
        for asked, scores in zip(fitting, self._fitting_answered(model, fitting), strict=True):
            asked.answer.set_result(scores)

    def _fitting_answered(self, model: Model, calls: Sequence[_Call]) -> list[Scores]:
        """Send calls as one request and return their scores. Rows that do not fit already contain their reasons."""
        rows = [row for call in calls for row in call.rows if isinstance(row, dict)]
        until = max((call.until for call in calls), default=0.0)
        versions: list[int] = []
        answers = iter(self._ask(model, rows, until, versions) if rows else [])
        found = [Scores(next(answers) if isinstance(row, dict) else row for row in call.rows) for call in calls]
        for scores in found:
            scores.version = min(versions, default=0)
        return found

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

    def _connected(self) -> Model | None:
        """Connect and return the model; if the name is a panel's, set its members and return None."""
        server = connect(self._address, timeout=self._timeout)
        try:
            try:
                model = server.model(self.name)
            except ModelNotFound:
                panel = server.status().get("panels", {}).get(self.name)
                if panel is None or self._partial:
                    raise
                self._members = self._jurors(panel)
                server.close()
                return None
            self._output = score_output(self.name, self._output, model.spec.outputs)
        except BaseException:
            server.close()
            raise
        self._model, self._server = model, server
        return model


def score_output(model: str, name: str | None, outputs: Mapping[str, TensorSpec]) -> str:
    """Return the name of the output that is a model's score: `name`, or its only output. Raises SpecMismatch."""
    name = name or (next(iter(outputs)) if len(outputs) == 1 else "")
    if name not in outputs or outputs[name].dtype == BYTES or outputs[name].shape not in ((), (1,)):
        there = ", ".join(f"{key} {spec}" for key, spec in outputs.items())
        raise SpecMismatch(f"model {model!r} gives {there}: name the one number that is the score, output=...")
    return name


def _work(of: weakref.ref[Juror], waiting: queue.SimpleQueue[list[_Asked] | None]) -> None:
    """Run the juror's thread: send all waiting calls as one request until None arrives."""
    while (first := waiting.get()) is not None:
        _serve(of, first, waiting)
        del first


def _serve(of: weakref.ref[Juror], first: list[_Asked], waiting: queue.SimpleQueue[list[_Asked] | None]) -> None:
    taken: list[_Asked] = []
    try:
        juror = of()
        with contextlib.nullcontext() if juror is None else juror._answering:
            taken = _taken(first, waiting)
            if juror is not None:
                juror._answer(taken)
        del juror
        failure: BaseException = ServerGone("this juror was closed")
    except BaseException as error:  # noqa: BLE001  every waiting caller must get an answer
        failure = error
    for asked in taken:
        if not asked.answer.done() and not asked.waits_for:
            asked.answer.set_exception(failure)


def _taken(first: list[_Asked], waiting: queue.SimpleQueue[list[_Asked] | None]) -> list[_Asked]:
    """Return the calls of the next request: `first` and those queued after it, without cancelled ones."""
    taken, rows = list(first), sum(asked.n for asked in first)
    while rows < _TOGETHER:
        try:
            if (more := waiting.get_nowait()) is None:
                waiting.put(None)
                break
        except queue.Empty:
            break
        taken += more
        rows += sum(asked.n for asked in more)
    return [asked for asked in taken if asked.answer.set_running_or_notify_cancel()]


class _Vote:
    """One call of a panel. It calls the members concurrently and returns the scores when the last one has answered.

    A member that is unavailable (its server or its engine) has no score for any row; other errors are raised.
    """

    def __init__(self, asked: _Asked, members: Mapping[str, tuple[float, Juror]]) -> None:
        self._asked = asked
        self._weights = {name: weight for name, (weight, _) in members.items()}
        self._given: dict[str, Scores | BaseException] = {}
        self._lock = threading.Lock()
        votes = {name: _Asked(asked.columns, asked.n, asked.until) for name in members}
        for name, vote in votes.items():
            vote.answer.add_done_callback(partial(self._came, name))
            members[name][1]._hand_over([vote])
        asked.waits_for = list(votes.values())

    def _came(self, name: str, answer: Future[Scores]) -> None:
        try:
            given: Scores | BaseException = answer.result()
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
        scores = Scores(self._total(parts, i) for i in range(self._asked.n))
        scores.version = min((part.version for part in parts.values()), default=0)
        scores.parts = {name: list(part) for name, part in parts.items()}
        answer.set_result(scores)

    def _total(self, parts: Mapping[str, Scores], i: int) -> Scored:
        total = 0.0
        missing: list[tuple[str, str]] = []
        for name, part in parts.items():
            score = part[i]
            if isinstance(score, str):
                missing.append((name, score))
            else:
                total += self._weights[name] * score
        if missing:
            why = "; ".join(f"{name}: {reason}" for name, reason in missing)
            passing = all(isinstance(reason, Passing) for _, reason in missing)
            return Passing(why) if passing else why
        return total if math.isfinite(total) else f"the total is {total}"


class _Call:
    """The rows of one call. After `fit`, each of `rows` is a dict of inputs, or the reason why the row does not fit."""

    def __init__(self, columns: dict[str, Any], n: int, until: float) -> None:
        self.columns = columns
        self.n = n
        self.until = until
        self.rows: list[dict[str, Any] | str] = []

    def fit(self, spec: ModelSpec, inputs: Inputs, *, partial: bool = False) -> None:
        if (unknown := inputs.keys() - spec.inputs.keys()) and not partial:
            raise SpecMismatch(f"model {spec.name!r} has no input {', '.join(unknown)}: it takes {list(spec.inputs)}")
        given = {name: self._column(spec.name, name, inputs.get(name)) for name in spec.inputs}
        for i in range(self.n):
            try:
                self.rows.append({name: _fitted(name, spec.inputs[name], column[i]) for name, column in given.items()})
            except (SpecMismatch, TypeError, ValueError) as error:
                self.rows.append(said(error, 300))
        wrong = [row for row in self.rows if type(row) is str]
        if self.n > 1 and len(wrong) == self.n:
            raise SpecMismatch(f"not one of {self.n} rows fits model {spec.name!r}; the first: {wrong[0]}")

    def _column(self, model: str, name: str, source: Any) -> Sequence[Any]:
        if callable(source):
            column = source(self.columns)
        else:
            names = (source,) if source else (name, *_ALSO.get(name, ()))
            found = next((key for key in names if self.columns.get(key) is not None), None)
            if found is None:
                raise SpecMismatch(
                    f"input {name!r} of model {model!r}: expected a column {' or '.join(map(repr, names))}, there are "
                    f"{sorted(self.columns)}; say which with inputs={{{name!r}: ...}}"
                )
            column = self.columns[found]
        if len(column) != self.n:
            raise SpecMismatch(f"input {name!r} of model {model!r}: expected {self.n} values, came {len(column)}")
        return column  # type: ignore[no-any-return]


class _Asked(_Call):
    """A call that waits for its scores."""

    def __init__(self, columns: dict[str, Any], n: int, until: float) -> None:
        super().__init__(columns, n, until)
        self.waits_for: list[_Asked] = []  # a panel's members
        self.answer: Future[Scores] = Future()

    def late(self, timeout: float) -> Scores:
        """Return the scores if they arrived just before the time-out, else reasons. Raise if the call failed."""
        if not self.answer.cancel() and self.answer.done():
            return self.answer.result()
        for vote in self.waits_for:
            vote.answer.cancel()
        return Scores([Passing(f"no score came within {timeout} s: others' requests took too long")] * self.n)


def _fitted(name: str, spec: TensorSpec, value: Any) -> Any:
    """Convert a value to a row of an input. Raises SpecMismatch."""
    if spec.dtype == BYTES:
        row = value if isinstance(value, bytes) else utf8(repr(name), _text(value))
        if len(row) > spec.capacity:
            raise SpecMismatch(f"{name} has {len(row)} bytes, the model takes at most {spec.capacity}")
        return row
    if (
        type(value) is np.ndarray
        and value.dtype == spec.numpy_dtype
        and value.shape == spec.shape
        and value.flags.c_contiguous
    ):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 1 and hasattr(value[0], "getbands"):
        value = value[0]  # TRL's columns contain a list with the prompt's image
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # a Pillow image
        if value.mode not in PICTURE_MODES:  # others would be clipped to 8 bits
            raise SpecMismatch(f"{name} is a picture of mode {value.mode!r}, expected 8 bits a channel")
        value = value.convert("RGB")
    elif hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()  # NumPy has no bfloat16
    array = np.asarray(value)
    if spec.shape[-1:] == (3,) and array.ndim == 3 and array.shape[0] == 3 != array.shape[2]:
        array = array.transpose(1, 2, 0)  # from torch's channels-first order
    if array.dtype != spec.numpy_dtype:
        if not np.can_cast(array.dtype, spec.numpy_dtype, "same_kind"):
            raise SpecMismatch(f"{name} is {array.dtype}, the model takes {spec.dtype}")
        array = _narrowed(name, array, spec.numpy_dtype)
    if spec.extents_of(array.shape) is None:
        raise SpecMismatch(f"{name} is of shape {array.shape}, the model takes {spec}")
    return np.ascontiguousarray(array) if array.ndim else array


def _narrowed(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert to another dtype. Raises SpecMismatch if an integer would wrap, or a finite number become infinite."""
    with np.errstate(over="ignore"):
        narrowed = array.astype(dtype)
    wrong = narrowed != array if dtype.kind in "iu" else np.isfinite(narrowed) != np.isfinite(array)
    if wrong.any():
        raise SpecMismatch(
            f"{name} is {array.dtype} and has the value {array[wrong][0]}, which the model's {dtype.name} cannot hold: "
            "scale or clip it before it is scored"
        )
    return narrowed


def _text(value: Any) -> str:
    """Return the text of a str, a chat message or a list of them; a message's parts without text are skipped."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        content = value.get("content", value.get("text"))
        return "" if content is None else _text(content)
    if isinstance(value, Sequence):
        return "\n".join(part for part in map(_text, value) if part)
    raise TypeError(f"expected text or chat messages, came {type(value).__name__}")


def _numbers(name: str, scored: list[Scored], missing: Missing = "raise") -> list[float]:
    """Return the scores. If some are missing, raise RowFailed, or return NaN for them with missing="nan"."""
    reasons = [score for score in scored if isinstance(score, str)]
    if reasons and missing == "raise":
        raise RowFailed(f"{len(reasons)} of {len(scored)} rewards of {name!r} are missing; the first: {reasons[0]}")
    _tell(name, reasons, len(scored))
    return [math.nan if isinstance(score, str) else score for score in scored]


def _tell(name: str, reasons: list[str], n: int) -> None:
    if reasons:
        _LOG.warning("%d of %d rewards of %r are missing; the first: %s", len(reasons), n, name, reasons[0])


# ----
# One hook for each trainer. `juror` holds the arguments of Juror.


def trl_reward(model: str | Members, *, name: str = "", asynchronous: bool = False, **juror: Any) -> Callable[..., Any]:
    """Return a function for TRL's ``reward_funcs``. A missing reward is None, which TRL ignores.

    The columns are `prompts`, `completions` and those of the dataset.

    Args:
        model: see Juror.
        name: the function's name in TRL's logs; default: the model's name.
        asynchronous: return an ``async def`` function: TRL runs all such functions concurrently.
        juror: arguments of Juror.

    Returns:
        ``f(prompts, completions, **columns) -> list[float | None]``.
    """
    asks = Juror(model, **juror)

    def given(scored: list[Scored]) -> list[float | None]:
        _tell(asks.name, [score for score in scored if isinstance(score, str)], len(scored))
        return [None if isinstance(score, str) else score for score in scored]

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return given(asks.scores({"completions": completions, **columns}, len(completions)))

    async def reward_async(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return given(await asks.scores_async({"completions": completions, **columns}, len(completions)))

    function: Callable[..., Any] = reward_async if asynchronous else reward
    function.__name__ = name or asks.name.replace("/", "_")
    return function


def verl_score(
    model: str | Members, *, asynchronous: bool = True, missing: Missing = "raise", **juror: Any
) -> Callable[..., Any]:
    """Return a ``compute_score`` for verl and verl-omni. A worker's concurrent calls are sent as one request.

    The columns are verl's keywords (solution_str or solution_image, ground_truth, data_source) and the entries of
    extra_info.

    Args:
        model: see Juror.
        asynchronous: False for reward managers that call plain functions.
        missing: verl does not support missing scores. "raise" stops the run; "nan" returns NaN, which the caller must
            handle.
        juror: arguments of Juror.

    Example:
        compute_score = verl_score("helpfulness")  # in the file given by reward.custom_reward_function.path
    """
    asks = Juror(model, **juror)

    def columns(given: dict[str, Any]) -> dict[str, Any]:
        merged = {**(given.get("extra_info") or {}), **given}
        return {key: [value] for key, value in merged.items() if value is not None}

    async def compute_score(**given: Any) -> float:
        return _numbers(asks.name, await asks.scores_async(columns(given), 1), missing)[0]

    def compute_score_now(**given: Any) -> float:
        return _numbers(asks.name, asks.scores(columns(given), 1), missing)[0]

    return compute_score if asynchronous else compute_score_now


def openrlhf_reward(model: str | Members, **juror: Any) -> Callable[..., dict[str, Any]]:
    """Return a ``reward_func`` for the file given by OpenRLHF's ``--reward.remote_url``.

    Concurrent calls of its threads are sent as one request. A missing reward raises; OpenRLHF logs the error and keeps
    the sample with reward None. `scores` equals `rewards`.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are queries (prompt and answer), prompts and labels.
    """
    asks = Juror(model, **juror)

    def reward_func(queries: list[str], prompts: list[str], labels: list[Any], **_: Any) -> dict[str, Any]:
        given = {"queries": queries, "prompts": prompts, "labels": labels}
        rewards = _numbers(asks.name, asks.scores(given, len(queries)))
        return {"rewards": rewards, "scores": list(rewards), "extra_logs": {}}

    return reward_func


def slime_reward(model: str | Members, **juror: Any) -> Callable[..., Any]:
    """Return a function for slime's ``--custom-rm-path``, for one sample or a list. A missing reward raises.

    Args:
        model: see Juror.
        juror: arguments of Juror; the columns are prompt, response, label and the entries of a sample's metadata.
    """
    asks = Juror(model, **juror)

    async def custom_rm(_arguments: Any, sample: Any, **_: Any) -> Any:
        samples = sample if isinstance(sample, list) else [sample]
        rows = [
            {
                **(getattr(one, "metadata", None) or {}),
                **{key: getattr(one, key) for key in ("prompt", "response", "label")},
            }
            for one in samples
        ]
        names = set.intersection(*(set(row) for row in rows)) if rows else set()
        given = {key: [row[key] for row in rows] for key in names}
        rewards = _numbers(asks.name, await asks.scores_async(given, len(samples)) if samples else [])
        return rewards if isinstance(sample, list) else rewards[0]

    return custom_rm


def gymnasium_reward(
    env: gymnasium.Env[Any, Any], model: str | Members, *, missing: Missing = "raise", **juror: Any
) -> gymnasium.Env[Any, Any]:
    """Wrap an environment so that its reward is the juror's score; its own reward is info["environment_reward"].

    Args:
        env: the environment.
        model: see Juror.
        missing: "raise"; or "nan" to return NaN with the reason in info["reward_missing"], so that the caller can skip
            such steps.
        juror: arguments of Juror. The columns are observation (and the keys of a dict observation), action, and, if the
            render mode is "rgb_array", frame, the result of `render`.

    Example:
        env = gymnasium_reward(env, "photo", inputs={"image": "observation"})
    """
    import gymnasium

    asks = Juror(model, **juror)

    class JurorReward(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            observation, own, terminated, truncated, info = self.env.step(action)
            columns = _columns_of([observation], {"action": [action]})
            if self.env.render_mode == "rgb_array":
                columns["frame"] = [self.env.render()]
            scored = asks.scores(columns, 1)
            info = {**info, "environment_reward": own}
            if isinstance(scored[0], str):
                info["reward_missing"] = scored[0]
            return observation, _numbers(asks.name, scored, missing)[0], terminated, truncated, info

    return JurorReward(env)


def sb3_reward(venv: Any, model: str | Members, *, missing: Missing = "raise", **juror: Any) -> Any:
    """Like `gymnasium_reward`, for a VecEnv of Stable-Baselines3. All environments are scored in one request.

    At the end of an episode its terminal observation is scored, not the first observation of the next episode.

    Args:
        venv: the vectorized environment.
        model: see Juror.
        missing: see `gymnasium_reward`.
        juror: arguments of Juror. The columns are observation and the keys of a dict observation.

    Example:
        model = PPO("CnnPolicy", sb3_reward(venv, "photo", inputs={"image": "observation"}))
    """
    from stable_baselines3.common.vec_env import VecEnvWrapper

    asks = Juror(model, **juror)

    class JurorRewards(VecEnvWrapper):
        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            observations, own, dones, infos = self.venv.step_wait()
            n = len(own)
            rows = [
                infos[i]["terminal_observation"]
                if dones[i] and "terminal_observation" in infos[i]
                else {key: value[i] for key, value in observations.items()}
                if isinstance(observations, dict)
                else observations[i]
                for i in range(n)
            ]
            scored = [
                score
                if isinstance(score, str) or abs(score) <= _MOST
                else f"the score is {score}, more than the float32 of a VecEnv's rewards holds"
                for score in asks.scores(_columns_of(rows, {}), n)
            ]
            for info, reward, score in zip(infos, own, scored, strict=True):
                info["environment_reward"] = float(reward)
                if isinstance(score, str):
                    info["reward_missing"] = score
            return observations, np.array(_numbers(asks.name, scored, missing), np.float32), dones, infos

    return JurorRewards(venv)


def _columns_of(observations: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    columns = {"observation": observations, **more}
    if isinstance(observations[0], dict):
        columns |= {key: [row[key] for row in observations] for key in observations[0]}
    return columns
