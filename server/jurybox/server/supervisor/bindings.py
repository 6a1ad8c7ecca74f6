"""Rows that clients have bound to device memory: which engines have opened it, and the orders for a new engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jurybox.protocol.control_pb2 import BindingMessage, BindRequest, RegionPlace
from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, Refused, plain
from jurybox.protocol.spec import TensorSpec
from jurybox.server.supervisor.leases import GrantedLease
from jurybox.server.supervisor.models import HeldModel


@dataclass(slots=True)
class _Bound:
    model: int
    order: dict[str, Any]
    waiting: set[int] = field(default_factory=set)  # engines that have not answered
    reason: str = ""
    ending: bool = False


class Bindings:
    """All bindings, by lease and first row. A starting engine gets those of its models.

    Args:
        send: sends an order to an engine, as send(engine, kind, **fields).
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._bound: dict[tuple[int, int], _Bound] = {}

    def handle(
        self, request: BindRequest, lane: GrantedLease, held: HeldModel, living: Collection[int]
    ) -> BindingMessage:
        """Bind or unbind rows; a repeated request returns the progress.

        The reply is settled once every engine has bound or unbound the rows, or has reported why it could not.
        """
        key = (lane.lease, request.first)
        bound = self._bound.get(key)
        if request.end:
            if bound is not None and not bound.ending:
                bound.ending, bound.reason, bound.waiting = True, "", set(living)
                for index in bound.waiting:
                    self._send(index, "unbind", lease=lane.lease, first=request.first)
                self._drop_ended()
            return BindingMessage(settled=key not in self._bound)
        if bound is None:
            bound = self._bound[key] = _Bound(held.index, self._order(request, lane, held), set(living))
            for index in bound.waiting:
                self._send(index, "bind", **bound.order)
        elif bound.ending:
            raise Refused(f"row {request.first} is being unbound: try again", Code.BUSY)
        return BindingMessage(settled=not bound.waiting, reason=bound.reason)

    def answered(self, engine: int, lease: int, first: int, *, ends: bool, reason: str) -> None:
        """Record that an engine has bound rows (`ends`: unbound), or, with a `reason`, that it could not.

        A client that did not wait for its binding has already ended it; the late answer to the binding is ignored.
        """
        bound = self._bound.get((lease, first))
        if bound is not None and bound.ending == ends:
            bound.waiting.discard(engine)
            if reason and not ends:
                bound.reason = reason
            self._drop_ended()

    def engine_died(self, engine: int) -> None:
        """Record that an engine died, so that no binding waits for it."""
        for bound in self._bound.values():
            bound.waiting.discard(engine)
        self._drop_ended()

    def forget(self, lease: int) -> None:
        """Drop the bindings of a lease that has ended. Engines release them when they retire its lane."""
        for key in [key for key in self._bound if key[0] == lease]:
            del self._bound[key]

    def of(self, models: Sequence[int]) -> list[dict[str, Any]]:
        """Return the orders for an engine that starts with these models."""
        return [bound.order for bound in self._bound.values() if bound.model in models and not bound.ending]

    def _drop_ended(self) -> None:
        for key in [key for key, bound in self._bound.items() if bound.ending and not bound.waiting]:
            del self._bound[key]

    def _order(self, request: BindRequest, lane: GrantedLease, held: HeldModel) -> dict[str, Any]:
        assert held.spec is not None
        if held.spec.open or held.settings.group or held.settings.deterministic:
            raise Refused(
                f"model {held.name!r} takes no device memory: expected one with rows of fixed shape, without state, "
                "group or deterministic"
            )
        last = request.first + request.rows
        if not request.rows or request.first < lane.first or last > lane.first + lane.rows:
            raise Refused(
                f"cannot bind rows {request.first} to {last}, expected some of {lane.first} to "
                f"{lane.first + lane.rows}, the lane's"
            )
        for (lease, first), bound in self._bound.items():
            if lease == lane.lease and first < last and request.first < first + int(bound.order["rows"]):
                raise Refused(f"row {max(first, request.first)} is already bound: unbind it first")
        if request.event and len(request.event) != HANDLE:
            raise Refused(f"an event's handle has {HANDLE} bytes, {len(request.event)} came")
        return {
            "lease": lane.lease,
            "first": request.first,
            "rows": request.rows,
            "inputs": _places("input", request.inputs, held.spec.inputs),
            "outputs": _places("output", request.outputs, held.spec.outputs),
            "event": bytes(request.event).hex(),
        }


def _places(kind: str, places: Collection[RegionPlace], specs: Mapping[str, TensorSpec]) -> list[list[Any]]:
    """Return each tensor's place: name, dtype, shape of a row, handle (hexadecimal), offset.

    Raises:
        Refused: the places do not match the specs.
    """
    given = {place.tensor: place for place in places}
    unwanted = kind == "output" and given and given.keys() <= specs.keys()
    if (given.keys() != specs.keys() and not unwanted) or len(given) != len(places):
        named = ", ".join(repr(plain(place.tensor, 100)) for place in places) or "none"
        raise Refused(f"{kind}s {named} were bound, expected each of {', '.join(map(repr, specs))} once")
    if wrong := [name for name, place in given.items() if len(place.handle) != HANDLE]:
        raise Refused(f"{kind} {wrong[0]!r}: a handle has {HANDLE} bytes, {len(given[wrong[0]].handle)} came")
    return [
        [name, spec.dtype, list(spec.shape), bytes(given[name].handle).hex(), given[name].offset]
        for name, spec in specs.items()
        if name in given
    ]
