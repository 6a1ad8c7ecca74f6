"""Running batches: one at a time on the CPU, two on their way on a device of its own; whatever goes wrong with one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import Code, Error
from jurybox.server.engine.device_served import Batch, DeviceServed
from jurybox.server.engine.slot import Slot

_SMOOTHING = 0.1
_ON_THEIR_WAY = 2  # on a device: one computes, the next is copied in


class _Flight(NamedTuple):
    """A batch that a device computes by itself."""

    slot: Slot
    tickets: NDArray[Any]
    rows: int
    asked: int  # weights version, 0: the newest
    used: int
    began: int
    batch: Batch


class Batches:
    """Runs batches, answers and counts them.

    Args:
        answer: replies to tickets, with a code, a weights version and a message.
        crowd: told who was answered.
        clock: nanoseconds.
        report: called with (event, fields) for what should be logged.

    Attributes:
        mean_ns: what a batch takes, smoothed.
    """

    def __init__(
        self,
        answer: Callable[[NDArray[Any], int, int, str], None],
        crowd: native.Crowd,
        clock: Callable[[], int],
        report: Callable[..., None],
    ) -> None:
        self.mean_ns = 0.0
        self._answer = answer
        self._crowd = crowd
        self._clock = clock
        self._report = report
        self._flights: deque[_Flight] = deque()  # the oldest first
        self._landed = 0

    @property
    def under_way(self) -> int:
        """Batches begun and not answered."""
        return len(self._flights)

    def run(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int) -> None:
        """Answer a batch; on a device of its own, begin it, and answer the oldest where enough are under way."""
        if isinstance(slot.served, DeviceServed):
            self._begin(slot, slot.served, tickets.copy(), rows, version)
        else:
            self._compute(slot, tickets, rows, version)

    def land(self, *, wait: bool = False) -> bool:
        """Answer the oldest batch under way, if it is done or is to be waited for; False where there is none."""
        if not self._flights:
            return False
        flight = self._flights[0]
        if not wait and not flight.batch.done():
            return True
        self._flights.popleft()
        try:
            flight.batch.finish()
        except Exception as error:  # noqa: BLE001  a model may raise anything; its callers are told, others go on
            self._recover(flight.slot, flight.tickets, flight.rows, flight.asked, error)
        else:
            # It counts from when the device was free for it.
            self._computed(flight.slot, flight.tickets, flight.rows, flight.used, max(flight.began, self._landed))
        self._landed = self._clock()
        return True

    def land_all(self) -> None:
        """Answer all that are under way. Afterwards nothing writes to any rows."""
        while self.land(wait=True):
            pass

    def _compute(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int) -> None:
        began = self._clock()
        try:
            slot.served.run(tickets, rows, version)
        except Exception as error:  # noqa: BLE001
            self._recover(slot, tickets, rows, version, error)
            return
        self._computed(slot, tickets, rows, version, began)

    def _begin(self, slot: Slot, served: DeviceServed, tickets: NDArray[Any], rows: int, version: int) -> None:
        began = self._clock()
        try:
            batch = served.begin(tickets, rows, version)
        except Exception as error:  # noqa: BLE001
            self.land_all()
            self._recover(slot, tickets, rows, version, error)
            return
        self._flights.append(_Flight(slot, tickets, rows, version, version or served.version, began, batch))
        if len(self._flights) == _ON_THEIR_WAY:
            self.land(wait=True)

    def _computed(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, began: int) -> None:
        for answered, used in slot.answers(tickets, version):
            self._answer(answered, Code.OK, used, "")
        ended = self._clock()
        self._crowd.answered(tickets, ended)
        slot.meters.batch(tickets, rows, began, ended)
        self.mean_ns += _SMOOTHING * (ended - began - self.mean_ns)
        slot.cost.observe(rows, ended - began)

    def _recover(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, error: Exception) -> None:
        """A batch was not computed. One that was too large for the memory is halved, and so is every later one."""
        if isinstance(error, torch.OutOfMemoryError) and len(tickets) > 1:
            slot.queue.max_batch = max(rows // 2, int(tickets["rows"].max()))
            name = slot.served.spec.name
            self._report("out of memory, batches halved", model=name, max_batch=slot.queue.max_batch)
            slot.served.free_memory()
            half = len(tickets) // 2
            parts: Sequence[NDArray[Any]] = (tickets[:half].copy(), tickets[half:].copy())
        elif len(parts := slot.parts(tickets)) == 1:
            self._fail(slot, tickets, error)
            return
        for part in parts:
            self._compute(slot, part, int(part["rows"].sum()), version)

    def _fail(self, slot: Slot, tickets: NDArray[Any], error: Exception) -> None:
        name = slot.name(tickets)
        message = str(error) if isinstance(error, Error) else f"model {name!r} raised {type(error).__name__}: {error}"
        slot.meters.failed(tickets)
        self._report("model failed", model=name, error=message, tickets=len(tickets))
        code = error.code if isinstance(error, Error) else Code.MODEL_FAILED
        self._answer(tickets, code, slot.served.version, message)
