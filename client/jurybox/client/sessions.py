"""Sessions: state that a model keeps on the server, for each environment or conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.lane import row_failed
from jurybox.client.row_allocator import version_of
from jurybox.client.row_codec import NO_SHAPE, SESSIONS, Checked, shaped
from jurybox.client.session_book import Mask, Numbers, SessionBook, require_rows, resets
from jurybox.client.session_state import StateRequests
from jurybox.client.ticket import Reply, Ticket, send_rows
from jurybox.protocol.arena import LOAD, SESSION, STORE
from jurybox.protocol.errors import (
    Error,
    Refused,
    RowFailed,
    ServerGone,
    SessionLost,
    SpecMismatch,
    StaleLease,
    Timeout,
)
from jurybox.protocol.forks import Closing
from jurybox.protocol.locks import NESTED, Taken
from jurybox.protocol.row_arrays import array_of

if TYPE_CHECKING:
    from jurybox.client.call_rows import CallRow
    from jurybox.client.requests import Requests


class Sessions(Closing):
    """n sessions of a stateful model, created by `Model.sessions`. A session begins with the model's initial state.

    Each request advances its sessions by one step. If a request ends without an answer (a time-out, Ctrl-C), its
    sessions are lost, and later requests raise SessionLost until they are reset. An answer is thus never computed from
    a state that the caller does not expect. Thread-safe like `Model`.

    Attributes:
        version: weights version of the last answer.
    """

    def __init__(self, requests: Requests, n: int, *, pin_version: bool = False) -> None:
        self._requests = requests
        self._n = n
        self._book = SessionBook(requests.name, n)
        self._state = StateRequests(requests, self._book)
        self._pinned = np.zeros(n, np.uint64) if pin_version else None
        self.version = 0
        self._all = self._book.all
        self._records = np.zeros(n, SESSION)
        self._records["slot"] = self._all
        self._dtype: np.dtype[Any] | None = None  # dtype and shape of inputs that need no conversion
        self._shape: tuple[int, ...] = NO_SHAPE

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"<Sessions of {self._requests.name!r}, {self._n} sessions>"

    def infer(
        self,
        inputs: Any,
        session: Numbers | None = None,
        reset: Mask | None = None,
        *,
        timeout: float | None = None,
        version: int | None = None,
        output: str | None = None,
    ) -> Any:
        """Compute one row of each session, and advance the state of each by one step.

        Args:
            inputs: as in `Model.infer`, one row per session.
            session: the session number of each row; no number may repeat. Default: row i belongs to session i.
            reset: boolean mask of the rows that start from the initial state. Default: only sessions without a step.
            timeout: as in `Model.infer`.
            version, output: as in `Model.infer`.

        Returns:
            As in `Model.infer`.

        Raises:
            SessionLost: the sessions in `error.sessions` lost their state; nothing was computed. Reset them.
            RowFailed: as in `Model.infer`; the state of failed rows is unchanged.
            SpecMismatch: dtype or shape differs from the spec; the message names both.
            Timeout: no answer in time.
            Busy: no row became free in time.
            ModelFailed: the model raised, or is quarantined after several crashes.
            Refused: the request is not allowed.
            ServerGone: the server ended, and was not restarted in time.
        """
        if output is not None:
            self._requests.require_output(output)
        advances = self._book.advances
        try:  # around all that is done with the answer: see `interrupted`
            return self._chosen(self._answered(inputs, session, reset, timeout, version)[0], output)
        except (Error, ValueError, TypeError):
            raise
        except BaseException:
            self._book.interrupted(session, advances)
            raise

    def infer_reply(
        self,
        inputs: Any,
        session: Numbers | None = None,
        reset: Mask | None = None,
        *,
        timeout: float | None = None,
        version: int | None = None,
    ) -> Reply:
        """Like `infer`, but return a `Reply` with the weights version, the oldest one used."""
        advances = self._book.advances
        try:
            return self._reply(*self._answered(inputs, session, reset, timeout, version))
        except (Error, ValueError, TypeError):
            raise
        except BaseException:
            self._book.interrupted(session, advances)
            raise

    def _answered(
        self, inputs: Any, session: Numbers | None, reset: Mask | None, timeout: float | None, version: int | None
    ) -> tuple[Any, int]:
        """Return the outputs and the version."""
        requests, version = self._requests, version_of(version)
        self._refuse_nested()
        if session is None and not version and self._pinned is None:
            try:
                with requests.turns.now:
                    if (rows := self._rows()) is not None:
                        try:
                            return self._asked_in_order(rows, inputs, reset, requests.turns.seconds(timeout))
                        finally:
                            requests.put_back(rows)
            except (Taken, StaleLease):
                pass
        deadline = requests.turns.deadline(timeout)
        ask = partial(self._infer, inputs, session, reset, deadline, version)
        try:
            return requests.turns.run(ask, deadline)
        except StaleLease:
            pass
        return requests.turns.run(ask, deadline)  # all rows begin a session, so no state was lost with the old lane

    def _refuse_nested(self) -> None:
        """Raise Refused in a signal handler or a destructor within a call: the step of its sessions is not decided."""
        if self._requests.turns.mine:
            raise Refused(
                f"a call of these sessions of {self._requests.name!r} is under way in this thread: {NESTED}. A session "
                "makes one step at a time: call them after it"
            )

    def _rows(self) -> CallRow | None:
        """Take the rows of all sessions, reused between requests; None if the request must go through `_infer`."""
        requests = self._requests
        rows = requests.taken_kept(self._n) if self._n <= requests.max_batch else None
        if rows is not None and rows.steps is None:
            records = rows.lane.columns.sessions
            if records is None:
                requests.put_back(rows)
                return None
            mine = records[rows.first : rows.first + self._n]
            mine["slot"], mine["flags"] = self._all, 0
            only = next(iter(rows.lane.codec.spec.inputs.values()))
            plain = len(rows.lane.codec.spec.inputs) == 1 and not only.variable
            self._dtype, self._shape = (only.numpy_dtype, (self._n, *only.shape)) if plain else (None, NO_SHAPE)
            rows.steps = mine["step"]
        return rows

    def _asked_in_order(self, rows: CallRow, inputs: Any, reset: Mask | None, left: float) -> tuple[Any, int]:
        """Compute row i for session i. Sessions are lost only if the request is interrupted."""
        book = self._book
        # Before the step begins: inputs that are refused lose no session.
        if not (type(inputs) is np.ndarray and inputs.dtype == self._dtype and inputs.shape == self._shape):
            given, n = self._requests.lane.codec.checked(inputs)
            require_rows(n, self._n)
            rows.put(given)
            inputs = None
        assert rows.steps is not None
        rows.steps[:] = book.begin_all(reset)
        rows.answer = None
        try:
            outputs = rows.ask(inputs, left)
        except BaseException:
            book.fail_all()
            raise
        book.end_all()
        self.version = used = rows.version
        return outputs, used

    def _infer(
        self, inputs: Any, session: Numbers | None, reset: Mask | None, deadline: int, version: int
    ) -> tuple[Any, int]:
        requests = self._requests
        given, ids, steps = self._prepared(inputs, session, reset)
        answers = _Answers(requests.name, self._book, ids)
        for part, wanted in self._by_version(ids, steps, version):
            whole = len(part) == len(ids)
            part_ids, part_steps = (ids, steps) if whole else (ids[part], steps[part])
            with answers.expecting(part), self._book.stepping(part_ids, part_steps):
                answers.came = requests.answered(_of(given, part), len(part), deadline, wanted)
        return self._joined(answers)

    async def infer_async(
        self,
        inputs: Any,
        session: Numbers | None = None,
        reset: Mask | None = None,
        *,
        timeout: float | None = None,
        version: int | None = None,
        output: str | None = None,
    ) -> Any:
        """Like `infer`, as a coroutine."""
        if output is not None:
            self._requests.require_output(output)
        advances = self._book.advances
        try:
            return self._chosen((await self._answered_async(inputs, session, reset, timeout, version))[0], output)
        except (Error, ValueError, TypeError):
            raise
        except BaseException as error:
            self._interrupted(error, session, advances)
            raise

    async def infer_reply_async(
        self,
        inputs: Any,
        session: Numbers | None = None,
        reset: Mask | None = None,
        *,
        timeout: float | None = None,
        version: int | None = None,
    ) -> Reply:
        """Like `infer_reply`, as a coroutine."""
        advances = self._book.advances
        try:
            return self._reply(*await self._answered_async(inputs, session, reset, timeout, version))
        except (Error, ValueError, TypeError):
            raise
        except BaseException as error:
            self._interrupted(error, session, advances)
            raise

    def _interrupted(self, error: BaseException, session: Numbers | None, advances: int) -> None:
        import asyncio  # the loop's

        if not isinstance(error, asyncio.CancelledError):  # which comes where a step waits, and is settled there
            self._book.interrupted(session, advances)

    async def _answered_async(
        self, inputs: Any, session: Numbers | None, reset: Mask | None, timeout: float | None, version: int | None
    ) -> tuple[Any, int]:
        requests, version = self._requests, version_of(version)
        ask = partial(self._infer_async, inputs, session, reset, requests.turns.deadline(timeout), version)
        try:
            return await ask()
        except StaleLease:
            pass
        return await ask()

    async def _infer_async(
        self, inputs: Any, session: Numbers | None, reset: Mask | None, deadline: int, version: int
    ) -> tuple[Any, int]:
        requests = self._requests
        given, ids, steps = await requests.turns.alone(lambda: self._prepared(inputs, session, reset), deadline)
        answers = _Answers(requests.name, self._book, ids)
        for part, wanted in self._by_version(ids, steps, version):
            with answers.expecting(part), self._book.stepping(ids[part], steps[part]):
                answers.came = await requests.answered_async(_of(given, part), len(part), deadline, wanted)
        return self._joined(answers)

    def submit(
        self,
        inputs: Any,
        session: Numbers | None = None,
        reset: Mask | None = None,
        *,
        timeout: float | None = None,
        version: int | None = None,
    ) -> Ticket:
        """Send one row of each session, as `Model.submit` does. Requests of one session are computed in order.

        n sessions have n rows, so the requests in flight, and answers that are not yet collected, have n rows together:
        send the next request of one half of the sessions while the other half is computed. If one fails, the later
        ones of its sessions, and all requests after them, raise SessionLost.

        Raises:
            Refused: the sessions have `pin_version`, and no `version` was given; or as in `Model.submit`.
            Busy, SessionLost, SpecMismatch, ServerGone: as in `infer`.
        """
        self._refuse_nested()
        version = version_of(version)
        deadline = self._requests.turns.deadline(timeout)
        send, advances = partial(self._submitted, inputs, session, reset, deadline, version), self._book.advances
        try:
            return self._requests.turns.run(send, deadline)
        except (Error, ValueError, TypeError):
            raise
        except BaseException:
            self._book.interrupted(session, advances)
            raise

    def _submitted(
        self, inputs: Any, session: Numbers | None, reset: Mask | None, deadline: int, version: int
    ) -> Ticket:
        requests = self._requests
        given, ids, steps = self._prepared(inputs, session, reset)
        n = len(ids)
        if n > requests.max_batch:
            raise SpecMismatch(f"a ticket holds 1 to {requests.max_batch} rows, got {n}; infer() splits them")
        if self._pinned is not None and not version:
            raise Refused(
                "submit() cannot pin sessions: the version of their first step is known only with its answer. Call "
                "infer(), give submit() a version, or open the sessions without pin_version"
            )
        lane = requests.usable()
        ticket = _StepTicket(requests.turns, lane, requests.found(lane, n))
        ticket.sessions = self
        send_rows(ticket, given, 0, deadline, version)
        self._book.stepped(ids, steps)
        if self._pinned is not None:
            self._pinned[ids] = version
        return ticket

    def get_state(self, session: Numbers | None = None, *, timeout: float | None = None) -> dict[str, NDArray[Any]]:
        """Return copies of the state, (n, *shape) by name; the initial state for sessions without a step yet.

        For replayed sequences that begin with the stored state of their first step (Kapturowski et al. 2019, "R2D2").

        Raises:
            SessionLost: a session's state was lost with its engine.
            Timeout: no answer in time.
            ServerGone: the server ended, and was not restarted in time.
            Refused: the transport or the server does not support reading states.
        """
        self._refuse_nested()
        return self._state.exchanged(self._book.ids(session), STORE, {}, timeout)

    def set_state(
        self, state: Mapping[str, NDArray[Any]], session: Numbers | None = None, *, timeout: float | None = None
    ) -> None:
        """Set the state of sessions, including lost ones.

        Args:
            state: (n, *shape) for every name in the model's state.

        Raises:
            SpecMismatch: a name, dtype or shape differs from the model's.
            Timeout: no answer in time.
            ServerGone: the server ended, and was not restarted in time.
            Refused: the transport or the server does not support writing states.
        """
        ids, specs = self._book.ids(session), self._requests.spec.state
        if state.keys() != specs.keys():
            raise SpecMismatch(f"state of {self._requests.name!r} is {sorted(specs)}, {sorted(state)} came")
        given = {name: array_of(f"state {name!r}", specs[name].dtype, value) for name, value in state.items()}
        for name, spec in specs.items():
            if given[name].shape != (len(ids), *spec.shape) or given[name].dtype != spec.numpy_dtype:
                raise SpecMismatch(
                    f"state {name!r}: expected {spec.dtype} of shape {(len(ids), *spec.shape)}, came "
                    f"{given[name].dtype} of shape {given[name].shape}"
                )
        self._refuse_nested()
        self._state.exchanged(ids, LOAD, given, timeout)

    async def exchange_state_async(
        self, ids: Numbers, reset: Mask, state: Mapping[str, NDArray[Any]] | None, timeout: float
    ) -> dict[str, NDArray[Any]]:
        """Call `get_state`, or `set_state` if a state is given, as a coroutine; for the gateway.

        Args:
            reset: mask of the sessions that are reset to the initial state before the state is read.
        """
        return await self._state.exchanged_async(self._book.ids(ids), np.asarray(reset, np.bool_), state, timeout)

    def close(self) -> None:
        """End the sessions and release their rows."""
        turns = self._requests.turns
        turns.run(self._requests.close, turns.deadline(None))

    # ---- private

    def _reply(self, outputs: Any, version: int) -> Reply:
        return Reply(outputs, version, self._requests.lane.codec.only)

    @staticmethod
    def _chosen(outputs: Any, output: str | None) -> Any:
        return outputs[output] if output is not None and isinstance(outputs, dict) else outputs

    def _prepared(
        self, inputs: Any, session: Numbers | None, reset: Mask | None
    ) -> tuple[Checked, NDArray[np.intp], NDArray[np.uint32]]:
        """Return the checked inputs with their session records, the session numbers, and the step of each."""
        given, n = self._requests.lane.codec.checked(inputs)
        ids = self._book.ids(session)
        require_rows(n, len(ids))
        self._book.settle_broken_off()
        steps = self._book.next.copy() if ids is self._all else self._book.next[ids]
        if reset is None:
            self._book.require(ids)
        else:
            begin = resets(reset, n)
            self._book.require(ids[~begin])
            steps[begin] = 0
        records = self._records.copy() if ids is self._all else self._records[ids]
        records["step"] = steps
        return given | {SESSIONS: records}, ids, steps

    def _by_version(
        self, ids: NDArray[np.intp], steps: NDArray[np.uint32], version: int
    ) -> list[tuple[NDArray[np.intp], int]]:
        """Group the rows by weights version: return the row indices of each group and its version.

        The oldest version comes first, the newest (0) last: a version that is no longer held is refused before any
        session has advanced.
        """
        everything = self._all[: len(ids)]
        if self._pinned is None or version:
            return [(everything, version)]
        wanted = np.where(steps == 0, 0, self._pinned[ids])
        versions = sorted(np.unique(wanted).tolist(), key=lambda each: (each == 0, each))
        parts = []
        for each in versions:
            rows = everything[wanted == each]
            # Batches of sessions that begin may differ in their version, and each session is pinned to its own.
            most = len(rows) if each else self._requests.max_batch
            parts += [(rows[at : at + most], each) for at in range(0, len(rows), most)]
        return parts

    def _joined(self, answers: _Answers) -> tuple[Any, int]:
        """Pin the sessions; return the outputs of all rows and the oldest version. Raises RowFailed if rows failed."""
        ids, replies = answers.ids, answers.replies
        if self._pinned is not None:
            for part, reply in replies:
                self._pinned[ids[[row for row in part if row not in answers.errors]]] = reply.version
        self.version = used = min(reply.version for _, reply in replies)
        if len(replies) == 1:
            outputs = replies[0][1].outputs
        else:
            whole = self._requests.lane.codec.room(len(ids))
            for part, reply in replies:
                for name, rows in whole.items():
                    came = reply.outputs[name] if len(whole) > 1 else reply.outputs
                    for at, row in zip(part, came, strict=True):
                        rows[at] = row
            outputs = shaped(whole)
        if answers.errors:
            raise row_failed(self._requests.name, answers.errors, len(ids), outputs, used)
        return outputs, used


class _Answers:
    """The answers to a request of some sessions, one for each weights version.

    If one fails after others came, the sessions of the others have advanced, but the caller does not get their
    outputs: they are lost, so that a repeated request cannot apply their inputs twice.
    """

    def __init__(self, model: str, book: SessionBook, ids: NDArray[np.intp]) -> None:
        self.ids = ids
        self.replies: list[tuple[NDArray[np.intp], Reply]] = []  # each with the indices of its rows
        self.errors: dict[int, str] = {}  # why rows failed
        self.came: Reply | None = None
        self._model = model
        self._book = book

    @contextmanager
    def expecting(self, part: NDArray[np.intp]) -> Iterator[None]:
        """Wait for the answer of some rows; the caller sets `came`. Rows may fail: `errors` then holds the reasons."""
        try:
            yield
        except RowFailed as error:
            self.came = Reply(error.outputs, error.version)
            self.errors.update({int(part[row]): reason for row, reason in error.errors.items()})
        except BaseException as error:
            self._lose_advanced(error)
            raise
        assert self.came is not None
        self.replies.append((part, self.came))

    def _lose_advanced(self, error: BaseException) -> None:
        if not self.replies:
            return
        rows = [row for part, _ in self.replies for row in part if row not in self.errors]
        self._book.lose(advanced := self.ids[rows])
        if isinstance(error, Error) and not isinstance(error, (Timeout, ServerGone)):
            gone = sorted({*advanced.tolist(), *(error.sessions if isinstance(error, SessionLost) else ())})
            raise SessionLost(
                f"sessions {gone} of {self._model!r} have lost their state: a later part of their request failed "
                f"({error}). Reset them",
                sessions=gone,
            ) from error


class _StepTicket(Ticket):
    """A ticket whose reply sets the sessions' version."""

    __slots__ = ("sessions",)

    sessions: Sessions

    def _collected(self) -> Reply:
        reply = super()._collected()
        self.sessions.version = reply.version
        return reply


def _of(given: Checked, part: NDArray[np.intp]) -> Checked:
    """Return some rows of checked inputs."""
    if len(part) == len(given[SESSIONS]):
        return given
    return {name: [rows[i] for i in part] if type(rows) is list else rows[part] for name, rows in given.items()}
