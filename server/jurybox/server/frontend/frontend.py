"""The frontend of a process: it computes rows for all doors, on lanes that their requests share.

A door parses, authenticates and answers. What comes between, from rows that a door has read to the rows that an engine
has computed, is here once: lanes, deadlines, sequences, panels, tries on another lane, and what is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jurybox.client import Busy, Server, Timeout
from jurybox.protocol.errors import Code, Error, ModelNotFound, Refused, RowFailed, SessionLost, SpecMismatch
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.lanes import DEFAULT_TIMEOUT, MOMENT, SOON, ModelRows, SharedLane
from jurybox.server.frontend.panels import Panels, voted
from jurybox.server.frontend.readiness import SelfTest
from jurybox.server.frontend.requests import RowsReply, RowsRequest
from jurybox.server.frontend.reserved import ReservedRows
from jurybox.server.frontend.sequences import IDLE, SESSIONS_SHARE, NoSession, Sequences, SequenceTurn
from jurybox.server.frontend.source import StatusSource
from jurybox.server.security.limits import room_for_answer

T = TypeVar("T")

_TRIES = 3  # lanes on which a request is tried if they are revoked one after another
_AGAIN = 0.05  # seconds between two looks at a model that is loading
_GONE = (Code.STALE_LEASE, Code.SERVER_GONE)


class Frontend:
    """Computes rows of models and panels. Use it in one event loop only.

    Args:
        address: the server's address.
        idle: seconds without a request after which a sequence ends.
        sessions_share: the part of a model's sessions that one connection may hold.
        panels: the members of each panel by name, as in the status document.

    Attributes:
        record_outcome: called with a model's name and whether a request to it was answered.
        reasons: return why the server should get no requests now.
    """

    def __init__(
        self,
        address: str,
        source: StatusSource,
        *,
        idle: float = IDLE,
        sessions_share: float = SESSIONS_SHARE,
        panels: Panels | None = None,
    ) -> None:
        self.panels = panels or {}
        self.lanes = ModelRows(address)
        self.sequences = Sequences(idle, share=sessions_share)
        self.readiness = SelfTest(source, self.lanes)
        self.record_outcome = self.readiness.record
        self.reasons = self.readiness.reasons

    async def compute(self, request: RowsRequest) -> RowsReply:
        """Compute the rows of a request.

        Raises:
            ModelNotFound, Refused, SpecMismatch, SessionLost, Timeout, Busy, ModelFailed, ServerGone.
        """
        if (members := self.panels.get(request.model)) is not None:
            return await voted(self, request, members)
        if request.steps is None:
            return await self._computed(request, None)
        with SequenceTurn(self.sequences, request.model, request.steps) as turn:  # before anything is waited for
            try:
                return await self._computed(request, turn)
            except SessionLost as error:
                if not turn.reports_loss:
                    raise
                return RowsReply({}, 0, lost=error.sessions)

    async def spec(self, model: str, until: float, priority: int = NORMAL, *, patient: bool = False) -> ModelSpec:
        """Return a model's spec; wait for free rows for a moment, but not beyond `until` (s of the monotonic clock).

        Args:
            priority: of the requests that need it.
            patient: wait until `until` for rows, and for a model that is loading.

        Raises:
            ModelNotFound, ModelFailed, Refused, Timeout, Busy, ServerGone.
        """
        return (await self._held(model, until, priority, patient=patient)).spec

    def reserved(
        self,
        model: str,
        places: int,
        timeout: float,
        waited: Callable[[Sequence[float]], None] = lambda waits: None,
        priority: int = NORMAL,
    ) -> ReservedRows:
        """Return rows that one door keeps for its clients; see `ReservedRows`."""
        return ReservedRows(self.lanes, model, places, timeout, waited, priority)

    async def call(self, action: Callable[[Server], T]) -> T:
        """Run a blocking function of the connection, such as loading a model, in a thread, and return its result."""
        return await self.lanes.call(action)

    def doubt(self) -> None:
        """Handle an exception where answers are received: any request may be affected."""
        self.lanes.doubt()

    def give_up(self, error: Error) -> None:
        """Fail all requests that wait or are in flight."""
        self.lanes.give_up(error)

    def close(self) -> None:
        """Release all lanes."""
        self.lanes.close()

    async def _held(
        self, model: str, until: float, priority: int, exchanged: float | None = None, *, patient: bool = False
    ) -> SharedLane:
        """Return the lane of a model; see `spec`."""
        if (held := self.lanes.held(model, priority)) is not None:
            return held
        if exchanged is None:
            exchanged = min(until - SOON, time.monotonic() + MOMENT)
        while True:
            try:
                return await self.lanes.hold_soon(model, exchanged, priority)
            except (Refused, Busy) as error:
                if not patient or (isinstance(error, Refused) and error.code != Code.NOT_READY):
                    raise
                if time.monotonic() > until:
                    raise error if isinstance(error, Busy) else Timeout(str(error)) from None
                await asyncio.sleep(_AGAIN)

    async def _computed(self, request: RowsRequest, turn: SequenceTurn | None) -> RowsReply:
        until, version = request.until, request.version or 0
        exchanged = min(until - SOON, time.monotonic() + MOMENT)
        tries = _TRIES
        failure: RowFailed | None = None
        while True:
            held = await self._held(request.model, until, request.priority, exchanged, patient=request.patient)
            _require_sequence(held, turn)
            inputs, n, size = request.read(held.spec, False)
            with room_for_answer(size):
                try:
                    if turn is None:
                        left = until - time.monotonic()
                        outputs, used = await self.lanes.ask(held, inputs, n, left, version, request.client)
                    else:
                        outputs, used = await turn.infer(self.lanes, held, inputs, n, until, version, request.state)
                    break
                except RowFailed as error:
                    self.record_outcome(request.model, True)
                    if not error.errors:
                        raise
                    outputs, used, failure = _by_name(held.spec, error.outputs), error.version, error
                    break
                except NoSession:
                    # A lane with few rows, leased while others held the rest, is soon exchanged for a larger one.
                    if not held.makeshift or time.monotonic() > exchanged:
                        self.record_outcome(request.model, False)
                        raise
                    await asyncio.sleep(SOON)
                except Error as error:
                    tries -= 1
                    if turn is not None and error.code in _GONE:
                        self.lanes.retire(held)
                        if error.code == Code.STALE_LEASE and not turn.begins:
                            raise turn.lost() from None
                    if error.code == Code.STALE_LEASE and tries:
                        continue  # the next lane may have another spec, so all checks run again
                    self.record_outcome(request.model, False)
                    raise
        require_version(request.model, request.version, used)
        self.record_outcome(request.model, True)
        return RowsReply(outputs, used, held.spec, failure)


def deadline(*seconds: float | None) -> float:
    """Return when nobody waits for an answer any more, s of the monotonic clock.

    Args:
        seconds: the time-outs of a request; None: not given.
    """
    return time.monotonic() + min(DEFAULT_TIMEOUT, *(value for value in seconds if value is not None), DEFAULT_TIMEOUT)


def require_version(model: str, version: int | None, used: int) -> None:
    """Raise ModelNotFound if a request names a version that did not answer it: 0, when newer weights are in use."""
    if version is not None and used != version:
        raise ModelNotFound(
            f"version {version} of {model!r} is not held, {used} is the newest: name one that is, or none"
        )


def _by_name(spec: ModelSpec, outputs: Any) -> Mapping[str, Any]:
    """Return the outputs of an error by name: of a model with one output, it has just the array."""
    named: Mapping[str, Any] = outputs if len(spec.outputs) > 1 else {next(iter(spec.outputs)): outputs}
    return named


def _require_sequence(held: SharedLane, turn: SequenceTurn | None) -> None:
    """Check that a request belongs to a sequence exactly if the model is stateful.

    Raises:
        SpecMismatch: a stateful model without a sequence. Refused (code UNSUPPORTED): a stateless one with a sequence.
    """
    if held.spec.state and turn is None:
        raise SpecMismatch(
            f"model {held.spec.name!r} keeps state ({', '.join(held.spec.state)}): expected the parameter sequence_id, "
            "and sequence_start with the first request of a sequence"
        )
    if turn is not None and not held.spec.state:
        raise Refused(
            f"sequence_id: model {held.spec.name!r} keeps no state between requests, expected none", Code.UNSUPPORTED
        )
