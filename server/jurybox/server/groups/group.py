"""Stacked weights of several modules of one architecture, and one forward over all of them.

`torch.func.functional_call` under `torch.vmap` (pytorch.org, "Model ensembling") turns the modules' matrix products
into batched ones. On the CPU, matrices are stored transposed, as layers multiply by them, and passed as views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import ModelFailed, VersionNotHeld
from jurybox.protocol.scoreboard import MAX_MODELS
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.weights import WeightsChannel
from jurybox.server.engine.batches import ModelCounters
from jurybox.server.engine.modules import (
    array_over,
    bare,
    host_values,
    require_kept,
    takes_names,
    tensor_over,
    weights_of,
)
from jurybox.server.engine.served import BatchOutcome, Served, WeightsSource

_MATRIX = 2


class Stack:
    """The weights of n modules: `tensors` by name, (n, *shape), and the version of each module.

    Args:
        module: any of them; determines names, shapes, dtypes and device.
        members: n.
    """

    def __init__(self, module: torch.nn.Module, members: int) -> None:
        self.versions = [0] * members
        self.tensors = {name: _allocated(members, tensor.detach()) for name, tensor in weights_of(module).items()}

    def row(self, member: int) -> dict[str, torch.Tensor]:
        """Return views of one module's weights."""
        return {name: tensor[member] for name, tensor in self.tensors.items()}

    def fill(self, member: int, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy one module's weights into the stack, cast to the stack's dtypes."""
        for name, tensor in self.tensors.items():
            tensor[member].copy_(state[name].detach(), non_blocking=True)
        self.versions[member] = version


def _allocated(members: int, tensor: torch.Tensor) -> torch.Tensor:
    shape = (members, *tensor.shape)
    if tensor.is_cpu and tensor.dim() == _MATRIX and tensor.is_floating_point():
        # A layer multiplies by the transpose: stored like this, the batched product reads the matrices row by row.
        return torch.empty((members, *reversed(tensor.shape)), dtype=tensor.dtype).mT
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


def stacked_forward(
    module: torch.nn.Module, inputs: Sequence[str]
) -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], Any]:
    """Return a function that calls a module with a stack's weights; the module's own weights are not used.

    Args:
        inputs: names of the inputs in their order, by which a forward without these names takes them.

    The function takes the weights by name, (n, *shape), and the inputs by name, (n, rows, *shape). It returns the
    module's outputs, each of shape (n, rows, *shape).
    """

    module, by_name = bare(module), takes_names(module, inputs)

    def one(weights: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> Any:
        args, kwargs = ((), given) if by_name else (tuple(given[name] for name in inputs), {})
        return torch.func.functional_call(module, weights, args, kwargs, tie_weights=False)

    return torch.vmap(one, randomness="error")


# Models of one architecture that are computed by one stacked forward.
#
# Every member has its own arena, lanes, weights channel and version; members share the queue and the forward. To the
# engine a group is a model with one queue (see `GroupSlot` for the differences).


_HOLE = 1  # adjacent members without a request that are computed, too, to avoid another forward
_FEWEST_ON_CPU = 8  # members from which one stacked forward of a small policy pays: benchmarks/weights/grouped.py
_UNEVEN = 4  # times the mean rows: a member with more is computed separately, so that others are not padded to it


@dataclass(slots=True)
class Member:
    """One model of a group.

    Attributes:
        inputs, outputs: its arena's arrays, (rows, *row shape) by name.
        channel: the channel of its published weights; None: the weights never change.
        arena: the number of its arena.
    """

    model: int
    served: Served
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]]
    channel: WeightsChannel | None
    counters: ModelCounters
    arena: int = 0

    @property
    def module(self) -> torch.nn.Module:
        return self.served.module


class MemberPart(NamedTuple):
    """The tickets of one member in a batch, and their numbers in it."""

    place: int
    tickets: NDArray[Any]
    rows: int
    numbers: NDArray[np.intp]


class Stacks:
    """Two stacks of the same modules: one is used for forwards, the other is written."""

    def __init__(self, module: torch.nn.Module, members: int) -> None:
        self.active, self.spare = Stack(module, members), Stack(module, members)

    def switch(self) -> None:
        """Use the other stack; call it between two batches."""
        self.active, self.spare = self.spare, self.active


class Grouped:
    """The `Served` of a group, for tickets of all members.

    Args:
        name: of the group.
        spec: any member's: they differ in name alone.
        device: of all members.
        compute: as `Served`.

    Attributes:
        hole, fewest: as `plan` takes them.
        forward_timeout: the shortest of the members', since they share their forwards; 0: none has one.
    """

    def __init__(self, name: str, spec: ModelSpec, device: torch.device, compute: torch.dtype | None) -> None:
        self.spec = ModelSpec(name, spec.inputs, spec.outputs)
        self.version = 0  # every member has its own
        self.forward_timeout = 0.0
        self.members: Sequence[Member] = ()
        self.device = device
        self._compute = compute
        self._finite = [key for key, tensor in spec.outputs.items() if tensor.finite]
        on_cpu = device.type == "cpu"
        self.hole, self.fewest = (_HOLE, _FEWEST_ON_CPU) if on_cpu else (MAX_MODELS, 2)
        self._place = np.zeros(MAX_MODELS, np.int64)
        self._staging: dict[str, NDArray[Any]] = {}
        self._split: tuple[NDArray[Any], list[MemberPart]] | None = None

    def rebind(self, members: Sequence[Member], stacks: Stacks) -> None:
        """Set the members, in the order of the stacks; call it between two batches."""
        self.members, self.stacks = list(members), stacks
        self._forward = stacked_forward(members[0].module, list(self.spec.inputs))
        limits = [member.served.forward_timeout for member in members if member.served.forward_timeout]
        self.forward_timeout = min(limits, default=0.0)
        for place, member in enumerate(members):
            self._place[member.model] = place
            member.served.weights_updater = MemberWeights(self, place)
        self._split = None

    @property
    def max_batch(self) -> int:
        return sum(member.served.max_batch for member in self.members)

    def split(self, tickets: NDArray[Any]) -> list[MemberPart]:
        """Split the tickets by member, in the stacks' order; the last result is cached."""
        if self._split is not None and self._split[0] is tickets:
            return self._split[1]
        if not len(tickets):  # all of a batch's tickets failed
            return []
        places = self._place[tickets["model"]]
        order = np.argsort(places, kind="stable")
        tickets_by_place, places = tickets[order], places[order]
        starts = np.flatnonzero(np.r_[True, places[1:] != places[:-1]])
        rows = np.add.reduceat(tickets_by_place["rows"], starts).tolist()
        ends = [*starts[1:].tolist(), len(tickets)]
        parts = [
            MemberPart(place, tickets_by_place[start:end], n, order[start:end])
            for place, start, end, n in zip(places[starts].tolist(), starts.tolist(), ends, rows, strict=True)
        ]
        self._split = (tickets, parts)
        return parts

    def versions(self, tickets: NDArray[Any]) -> NDArray[np.int64]:
        """Return the weights version of each ticket's answer."""
        held: NDArray[np.int64] = np.array(self.stacks.active.versions, np.int64)[self._place[tickets["model"]]]
        return held

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> BatchOutcome | None:
        """Answer a batch; see `Served.run`. A member's error fails all of it; the engine then runs the parts singly."""
        parts = self.split(tickets)
        versions = self.stacks.active.versions
        if version and len(parts) > 1 and any(versions[part.place] != version for part in parts):
            raise VersionNotHeld(f"weights version {version} is not held by every model of the batch")
        outcome = BatchOutcome()
        while parts:
            first, parts = self._within_max_batch(parts)
            for run in plan([(part.place, part.rows) for part in first], self.hole, self.fewest):
                chosen = first[run]
                if len(chosen) == 1:
                    (part,) = chosen
                    refused = self.members[part.place].served.run(part.tickets, part.rows, version)
                    _add_refused(outcome, part, refused)
                else:
                    self._run_together(chosen, outcome)
        return outcome if outcome.refused else None

    def _within_max_batch(self, parts: list[MemberPart]) -> tuple[list[MemberPart], list[MemberPart]]:
        """Limit the parts to their members' max_batch; return them and the rest for another forward."""
        first, later = [], []
        for part in parts:
            if part.rows <= self.members[part.place].served.max_batch:
                first.append(part)
                continue
            upto = np.cumsum(part.tickets["rows"])
            n = int(np.searchsorted(upto, self.members[part.place].served.max_batch, side="right"))
            rows = int(upto[n - 1])
            first.append(MemberPart(part.place, part.tickets[:n], rows, part.numbers[:n]))
            later.append(MemberPart(part.place, part.tickets[n:], part.rows - rows, part.numbers[n:]))
        return first, later

    def _run_together(self, parts: Sequence[MemberPart], outcome: BatchOutcome) -> None:
        """Run one forward over the members from the first part to the last, with rows padded to the largest part."""
        begin, end = parts[0].place, parts[-1].place + 1
        padded = max(part.rows for part in parts)
        staged = {}
        for key in self.spec.inputs:
            staging = self._room(key, (end - begin), padded)
            for part in parts:
                native.gather(self.members[part.place].inputs[key], part.tickets, staging[part.place - begin])
            staged[key] = tensor_over(staging).to(self.device, non_blocking=True)
        if self._compute is not None:
            staged = {
                key: value.to(self._compute) if value.is_floating_point() else value for key, value in staged.items()
            }
        weights = {name: tensor[begin:end] for name, tensor in self.stacks.active.tensors.items()}
        outputs = self._forward(weights, staged)
        results = self._checked(outputs, end - begin, padded)
        for key, values in results.items():
            for part in parts:
                native.scatter(self.members[part.place].outputs[key], part.tickets, values[part.place - begin])
        if self._finite:
            for part in parts:
                own = {key: tensor_over(results[key][part.place - begin]) for key in self._finite}
                refused = self.members[part.place].served.refused(part.tickets, own, part.rows, {})
                _add_refused(outcome, part, refused)

    def _room(self, key: str, members: int, rows: int) -> NDArray[Any]:
        """Return a reused, uninitialised buffer for one input of a batch, (members, rows, *shape)."""
        spec = self.spec.inputs[key]
        needed = members * rows
        kept = self._staging.get(key)
        if kept is None or len(kept) < needed:
            kept = self._staging[key] = np.zeros((needed, *spec.shape), spec.numpy_dtype)
        return kept[:needed].reshape(members, rows, *spec.shape)

    def _checked(self, results: Any, members: int, rows: int) -> dict[str, NDArray[Any]]:
        """Return the outputs by name in host memory, (members, rows, *shape). Members were checked at load time."""
        if not isinstance(results, Mapping):
            results = (results,) if isinstance(results, torch.Tensor) else results
            results = dict(zip(self.spec.outputs, results, strict=False))
        values = {}
        for key, spec in self.spec.outputs.items():
            tensor = results.get(key)
            if tensor is None or tensor.shape != (members, rows, *spec.shape):
                came = "nothing" if tensor is None else list(tensor.shape)
                raise ModelFailed(
                    f"output {key!r} of group {self.spec.name!r}: {came} came, the spec promises "
                    f"{[members, rows, *spec.shape]} for {members} models and {rows} rows"
                )
            dtype: torch.dtype = getattr(torch, spec.dtype)
            require_kept(f"output {key!r}", tensor.dtype, dtype)
            values[key] = array_over(host_values(tensor, dtype))
        return values

    def free_memory(self) -> None:
        """See `Served.free_memory`."""
        self.members[0].served.free_memory()


def _add_refused(outcome: BatchOutcome, part: MemberPart, refused: BatchOutcome | None) -> None:
    """Add the tickets of a part that have failed rows to the batch's outcome."""
    if refused is not None:
        outcome.refused |= {int(part.numbers[number]): reason for number, reason in refused.refused.items()}


class MemberWeights(WeightsSource):
    """The weights of a member that is computed alone, with its row of the active stack. The group has the updater."""

    def __init__(self, grouped: Grouped, place: int) -> None:
        self._grouped = grouped
        self._place = place
        self._targets = weights_of(grouped.members[place].module)
        self._seen: Stack | None = None

    @property
    def version(self) -> int:
        return self._grouped.stacks.active.versions[self._place]

    def use(self, version: int) -> None:
        """See `WeightsUpdater.use`; a group holds only the newest version."""
        if version not in (0, self.version):
            raise VersionNotHeld(
                f"weights version {version} is not held, {self.version} is: models of a group keep no earlier ones; "
                "serve the model outside of the group to pin versions"
            )
        stack = self._grouped.stacks.active
        if stack is not self._seen:
            for name, tensor in stack.row(self._place).items():
                self._targets[name].data = tensor
            self._seen = stack


def plan(parts: Sequence[tuple[int, int]], hole: int, fewest: int) -> list[slice]:
    """Group the parts to compute together: runs of neighbours in the stacks, as slices of `parts`.

    Args:
        parts: (place, rows) of each, by place.
        hole: so many places between two parts are computed for nothing rather than begin another forward.
        fewest: a shorter run is computed one by one.
    """
    mean = sum(rows for _, rows in parts) / len(parts)
    runs: list[slice] = []
    begin = 0
    for i in range(1, len(parts) + 1):
        if i < len(parts):
            (before, rows_before), (place, rows) = parts[i - 1], parts[i]
            if place - before - 1 <= hole and max(rows, rows_before) <= _UNEVEN * mean:
                continue
        runs += [slice(begin, i)] if i - begin >= fewest else [slice(one, one + 1) for one in range(begin, i)]
        begin = i
    return runs
