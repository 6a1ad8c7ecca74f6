"""Requests of known forms that native code answers, without Python code for each of them.

A form (forms.py) that is requested often is described to `native.InferForms`. From then on `native.GrpcConnection`
copies the rows of such a request to a lane, and this module sends a ticket for all that have arrived, and has their
answers written, with a few calls. Requests that fail, are due, or whose engine has ended are returned to the method
that answers all others, so errors are handled in one place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from numpy.typing import NDArray

from jurybox import native
from jurybox.client import Model
from jurybox.client.in_flight import LOOK_AFTER
from jurybox.client.transports.shm import ShmTransport
from jurybox.client.transports.transport import NotSent
from jurybox.protocol.errors import Code, Error
from jurybox.protocol.row_frames import PlainFrames
from jurybox.server.frontend.lanes import ModelRows, SharedLane
from jurybox.server.frontend.returns import BRIEF, QuickHalf
from jurybox.server.gateway.inference.forms import Form
from jurybox.server.security.access import ClientConnection
from jurybox.server.security.pace import HEAVY, Breaks, WorkPace

_ROWS = 32  # of a ticket at most: the lane has as many for each engine's, and for the one that is written
_WORTH = 16  # requests of a form after which native code answers them
_MOST_FORMS = 256  # of one model
_UNHURRIED = 1.0  # seconds: native code accepts no request whose time-out is so short that it must not wait for others
_PAUSE = 1.0  # seconds without native answers after a failed ticket
_AGAIN = 10.0  # seconds between two attempts to lease a lane
_ALL = (1 << 63) - 1  # a deadline after all others


class Peer(Protocol):
    """A connection whose requests native code answers."""

    @property
    def alone(self) -> ClientConnection | None:
        """The connection, if it has no other request in progress; None: it has."""
        ...

    def flush(self) -> None:
        """Send the bytes of answers."""
        ...

    def take_back(self, call: int, timeout: int, message: bytes) -> None:
        """Answer a request as usual; `timeout` is the time until its deadline in ns."""
        ...


class FastPath:
    """The rows and tickets of the forms of one model. Use it in one event loop only.

    Args:
        held: the lane for which the forms were parsed.
        model: its lane belongs to this object, until `close`.
        forms: the forms of all models.
        record_outcome: called with the model's name and True after an answer.
        pace: shared with other lanes.

    Attributes:
        lost: whether the server has revoked the lane.
    """

    def __init__(
        self,
        held: SharedLane,
        model: Model,
        forms: native.InferForms,
        record_outcome: Callable[[str, bool], None],
        pace: WorkPace,
    ) -> None:
        self.held = held
        self.model = model
        self.lost = False
        self._table = forms
        self._record_outcome = record_outcome
        self._loop = asyncio.get_running_loop()
        self._lane = lane = model.requests.lane
        self._forms: dict[bytes, Form] = {}
        self._version = -1  # of the heads in the table
        self._engines: dict[int, tuple[native.ShmRingsClient, NDArray[Any], int]] = {}  # with record and incarnation
        self._detached = True
        self._called = False
        self._breaks = Breaks(pace, self._on_answer)
        self._row_bytes = sum(spec.row_bytes for spec in held.spec.outputs.values())
        self._looking: asyncio.TimerHandle | None = None
        self._paused = 0.0
        self._returning = QuickHalf()
        self._gathered: asyncio.TimerHandle | None = None  # sends the ticket that waits for more requests
        self._run = run = lane.take(lane.rows)
        assert run is not None
        self.first, self.rows = run.first, run.rows
        inputs, outputs = PlainFrames(lane.columns, "inputs"), PlainFrames(lane.columns, "outputs")
        self._native = native.FastLane(
            self.first, self.rows, lane.engines, inputs.memory(), outputs.memory(), self._arrived
        )
        lane.watch(self._loop, self._on_answer)

    def add(self, key: bytes, form: Form) -> None:
        """Let native code answer requests of a form."""
        if key in self._forms or len(self._forms) >= _MOST_FORMS:
            return
        spec = form.held.spec
        inputs, outputs = list(spec.inputs), list(spec.outputs)
        self._table.add(
            key, self._native, form.n, [inputs.index(name) for name in form.inputs],
            [outputs.index(name) for name in form.outputs],
        )  # fmt: skip
        if self._version >= 0:
            self._table.set_heads(key, self._version, form.heads(self._version))
        self._forms[key] = form

    def mend(self) -> None:
        """Connect to the engines that serve now, unless a ticket has failed just now."""
        if time.monotonic() < self._paused:
            return
        assert isinstance(self._lane.transport, ShmTransport)
        able = self._lane.able()
        for engine, incarnation in able:
            if engine in self._engines and self._engines[engine][2] == incarnation:
                continue
            try:
                client = self._lane.transport.attach(engine, incarnation)
            except (Error, NotSent):  # no descriptors are left, for example, or no threads
                return
            if client is not None:
                self._engines[engine] = client, self._lane.record(engine), incarnation
                self._attach(engine for engine, _ in able)
        if able and self._engines and self._detached:
            self._attach(engine for engine, _ in able)

    def _attach(self, order: Iterable[int]) -> None:
        """Use all engines attached so far: one that does not serve may still write to the rows of its ticket."""
        self._give_back(0)  # requests of an incarnation that has ended, if `_look` has not returned them yet
        first = [engine for engine in order if engine in self._engines]
        engines = [self._engines[engine] for engine in dict.fromkeys([*first, *self._engines])]
        self._native.attach(engines, self._lane.advance())
        self._detached = False

    def close(self) -> None:
        """Return all requests, and answer none from now on. The caller closes the model."""
        for key in self._forms:
            self._table.remove(key)
        self._forms.clear()
        for timer in (self._looking, self._gathered):
            if timer is not None:
                timer.cancel()
        self._give_back(_ALL)
        self._native.close()

    def _arrived(self, peer: Peer) -> None:
        """Send a ticket soon: requests that arrive in the same iteration of the loop share it."""
        self._breaks.heard()
        keep = self._returning.arrived(peer.alone, _UNHURRIED, self._native.waiting)
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_AFTER, self._look)
        if self._returning.alone and not self._called:
            self._send()
        elif not (keep and self._gathered is not None):
            self._send_soon()

    def _send_soon(self) -> None:
        if not self._called and self._native.may_send and not self._breaks.resting:
            self._called = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._called = False
        if self._gathered is not None:
            self._gathered.cancel()
            self._gathered = None
        if not (waiting := self._native.waiting) or not self._native.may_send or self._breaks.resting:
            return
        if waiting < self.rows and (wait := self._returning.wait(waiting)) > 0:
            self._gathered = self._loop.call_later(wait, self._send)
            return
        brief = BRIEF if self._returning.may_block(waiting) else 0.0
        answered = self._native.send(brief)
        if answered is None:
            self._give_back(_ALL)
        elif answered:
            self._on_answer()
        elif brief:
            self._returning.blocked_in_vain()

    def _on_answer(self) -> None:
        while (found := self._native.receive()) is not None:
            self._answer(*found)
        if self._native.waiting:
            self._send_soon()

    def _answer(self, code: int, version: int, rows: int, seconds: float) -> None:
        """Answer the requests of a ticket."""
        came = time.monotonic()
        self._returning.took(rows, seconds)
        if code:
            self.lost = self.lost or code == Code.STALE_LEASE
            self._paused, self._detached = time.monotonic() + _PAUSE, True
            self._native.detach()
            self._give_back(0)
            return
        if version != self._version:
            self._version = version
            for key, form in self._forms.items():
                self._table.set_heads(key, version, form.heads(version))
        peers: list[Peer] = self._native.answer()
        for peer in peers:
            self._returning.answered(peer.alone)
            try:
                peer.flush()
            except Exception as error:  # noqa: BLE001  one connection's error must not cost the others their answers
                self._loop.call_exception_handler({"message": "an answer could not be sent", "exception": error})
        if peers:
            self._record_outcome(self.model.name, True)
        if rows * self._row_bytes >= HEAVY:
            self._breaks.after(came - seconds, came)
        self._give_back(0)  # those of a form without heads of this version

    def _look(self) -> None:
        """Return requests that are due, or whose engine has ended."""
        self._looking = None
        self._on_answer()
        self.mend()
        self._give_back(time.monotonic_ns())
        if self._native.pending:
            self._looking = self._loop.call_later(LOOK_AFTER, self._look)

    def _give_back(self, until: int) -> None:
        for peer, call, timeout, message in self._native.take_back(until):
            # Later: the caller may be in the middle of another request.
            self._loop.call_soon(peer.take_back, call, timeout, message)


class FastPaths:
    """The direct lanes of all models.

    Args:
        path: of the method whose requests native code may answer.
        lanes: leases them.
        record_outcome: see `FastPath`.

    Attributes:
        forms: for native.GrpcConnection.
    """

    def __init__(self, path: str, lanes: ModelRows, record_outcome: Callable[[str, bool], None]) -> None:
        self.forms = native.InferForms(path.encode())
        self._lanes = lanes
        self._record_outcome = record_outcome
        self._open: dict[str, FastPath] = {}
        self._after: dict[str, float] = {}  # no attempt to lease a lane before then, s of the monotonic clock

    def consider(self, key: bytes, form: Form) -> None:
        """Consider a form, of which a request was answered by Python, for native code."""
        if form.used < _WORTH or form.pinned or form.n == 0:
            return
        name, held = form.held.spec.name, form.held
        lane = self._open.get(name)
        if lane is not None and lane.held is held and not lane.lost:
            lane.add(key, form)
            lane.mend()
            return
        if lane is not None:  # its model was loaded again, perhaps with another spec
            self._close(self._open.pop(name))
        now = time.monotonic()
        if now >= self._after.get(name, 0.0) and held.sessions is None:
            self._after[name] = now + _AGAIN
            rows = min(_ROWS, held.model.max_batch)  # an engine refuses a ticket of more than a batch
            self._lanes.lease_another(name, rows, lambda model: self._leased(held, model))

    def _leased(self, held: SharedLane, model: Model) -> None:
        name, lane = held.spec.name, model.requests.lane
        plain = PlainFrames(lane.columns, "inputs") and PlainFrames(lane.columns, "outputs")
        if held.retired or name in self._open or not plain or not isinstance(lane.transport, ShmTransport):
            self._lanes.release(model)
        else:
            self._open[name] = FastPath(held, model, self.forms, self._record_outcome, self._lanes.pace)

    def _close(self, lane: FastPath) -> None:
        lane.close()
        self._lanes.release(lane.model)
