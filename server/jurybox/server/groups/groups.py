"""The groups of an engine, and the check at load time whether a module can be a member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox.protocol.errors import Error, Refused, plain
from jurybox.protocol.spec import TensorSpec
from jurybox.server.engine.batches import ModelCounters, Slot
from jurybox.server.engine.core import Engine
from jurybox.server.engine.exported import flat
from jurybox.server.engine.modules import comparable, given_tensor, takes_names, views_of_weights, weights_of
from jurybox.server.engine.queues import Queue
from jurybox.server.groups.group import Grouped, Member, Stack, stacked_forward
from jurybox.server.groups.weights_updater import GroupWeightsUpdater

_ROWS = 3
_TORCHS = vars(torch.nn.Module()).keys() - {"training"}  # attributes that PyTorch keeps in each module: weights, hooks
# Sums in another order differ by rounding; results that depend on other rows differ by much more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


class CannotGroup(Error):
    """The module cannot be computed together with others; the message says why."""


def check_groupable(
    name: str,
    group: str,
    module: torch.nn.Module,
    inputs: Mapping[str, TensorSpec],
    compute: torch.dtype | None = None,
    example: Callable[[int], Mapping[str, Any]] | None = None,
) -> None:
    """Compute two stacked copies of a module and compare them with the module itself.

    Args:
        module: on the device where it will be served.
        compute: the dtype that floating-point inputs are cast to; None leaves them.
        example: as in ServedModel.

    Raises:
        CannotGroup: that is not possible, or gives something else.
    """
    where = f"model {name!r} cannot be in group {group!r}"
    for path, part in module.named_modules():
        if part.training and isinstance(part, torch.nn.modules.batchnorm._NormBase):
            raise CannotGroup(
                f"{where}: {path or 'it'} is a {type(part).__name__} in training mode, whose answers depend on the "
                "other rows of a batch; let it follow .eval()"
            )
    if views := views_of_weights(module):
        raise CannotGroup(
            f"{where}: {views[0]!r} is a view of a weight, which a group's weights do not reach; use the weight itself"
        )
    if callable(getattr(module, "weights_changed", None)):
        raise CannotGroup(f"{where}: its method weights_changed would not be called: a group computes with a stack")
    stack = Stack(module, 2)
    state = weights_of(module)
    for member in (0, 1):
        stack.fill(member, state, 0)
    before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
    kept = _attributes(module)
    given = example(2 * _ROWS) if example else {}
    asked = {key: _questions(spec, 2, given.get(key)) for key, spec in inputs.items()}
    device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
    asked = {key: value.to(device, compute if value.is_floating_point() else None) for key, value in asked.items()}
    try:
        together = flat(stacked_forward(module, list(inputs))(stack.tensors, asked))
    except Exception as error:
        raise CannotGroup(
            f"{where}: it cannot be computed for several sets of weights at once: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}; expected tensor operations alone, without "
            ".item(), branches on values, or random numbers; leave 'group' away to serve it by itself"
        ) from error
    if changed := [key for key, tensor in stack.tensors.items() if not _same(tensor, before[key])]:
        raise CannotGroup(f"{where}: its forward writes into {changed[0]!r}; weights of a group must stay as published")
    if attributes := sorted(key for key, tensor in _attributes(module).items() if kept.get(key) != tensor):
        raise CannotGroup(
            f"{where}: its forward keeps a tensor in the attribute {attributes[0]!r}; it must keep nothing"
        )
    by_name = takes_names(module, list(inputs))
    for member in (0, 1):
        row = {key: value[member, :1] for key, value in asked.items()}
        alone = flat(module(**row) if by_name else module(*row.values()))
        for one, several in zip(alone, together, strict=True):
            limit = _TOLERANCE.get(several.dtype, _HALF_TOLERANCE)
            if several.is_floating_point() and not torch.allclose(
                one, several[member, :1], rtol=limit, atol=limit, equal_nan=True
            ):
                raise CannotGroup(
                    f"{where}: among others a row is answered otherwise than by itself (by up to "
                    f"{(one - several[member, :1]).abs().max().item():.3g}); rows of a group must not depend on others"
                )


def require_alike(name: str, group: str, first: torch.nn.Module, module: torch.nn.Module) -> None:
    """Refuse a module of another architecture than the group's first.

    Raises:
        CannotGroup: names the first difference.
    """
    where = f"model {name!r} cannot be in group {group!r}"
    ours, theirs = dict(module.named_modules()), dict(first.named_modules())
    if str(module) != str(first) or [*map(type, ours.values())] != [*map(type, theirs.values())]:
        raise CannotGroup(f"{where}: it is built otherwise than the group's first model:\n{module}\nand not\n{first}")
    tensors, expected = weights_of(module), weights_of(first)
    for key in {**expected, **tensors}:
        had, came = (f"{at[key].dtype}{list(at[key].shape)}" if key in at else "nothing" for at in (expected, tensors))
        if had != came:
            raise CannotGroup(f"{where}: its {key!r} is {came}, the group's first model has {had}")
    # Weights may differ, and references of a model to its own modules do: their attributes are compared below.
    alike = {(id(part), id(theirs[path])): (part, theirs[path]) for path, part in ours.items()}
    for path, part in ours.items():
        mine, others = _attributes_of(part), _attributes_of(theirs[path])
        for key in {**others, **mine}:
            if key not in mine or key not in others or not _alike(mine[key], others[key], alike):
                came, had = (plain(repr(at.get(key, "nothing")), 200) for at in (mine, others))
                raise CannotGroup(
                    f"{where}: its {'.'.join(filter(None, (path, key)))} is {came}, the group's first model has "
                    f"{had}: only weights may differ"
                )


def _attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module computes with besides its parameters, persistent buffers and modules."""
    kept = {key: value for key, value in vars(module).items() if key not in _TORCHS}
    for key in ("_forward_pre_hooks", "_forward_hooks"):  # the others change no output
        how = [getattr(module, key + more, ()) for more in ("_with_kwargs", "_always_called")]
        kept[key] = [(hook, *(number in each for each in how)) for number, hook in getattr(module, key).items()]
    buffers, not_saved = (getattr(module, key) for key in ("_buffers", "_non_persistent_buffers_set"))
    return kept | {key: buffers[key] for key in sorted(not_saved)}


def _alike(one: Any, other: Any, alike: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Return whether two values have the same effect. Unknown types are compared by ==, or by their attributes.

    Args:
        alike: pairs that have, by their ids; it keeps the values, so that no other gets their ids.
    """
    if one is other or (id(one), id(other)) in alike:
        return True
    if type(one) is not type(other):
        return False
    alike[id(one), id(other)] = one, other  # until found otherwise, for values that refer to themselves
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key], alike) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_alike(a, b, alike) for a, b in zip(one, other, strict=True))
    if isinstance(one, CellType):
        return _alike(one.cell_contents, other.cell_contents, alike)
    if isinstance(one, FunctionType):
        parts = ("__code__", "__closure__", "__defaults__", "__kwdefaults__")
        return all(_alike(getattr(one, at), getattr(other, at), alike) for at in parts)
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__ and _alike(one.__self__, other.__self__, alike)
    if isinstance(one, partial):
        return all(_alike(getattr(one, at), getattr(other, at), alike) for at in ("func", "args", "keywords"))
    equality: Any = type(one).__eq__
    by_parts = equality is object.__eq__ or is_dataclass(one) or isinstance(one, SimpleNamespace)
    try:
        if not by_parts:
            return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124  not a number
        if hasattr(one, "__dict__"):
            return _alike(vars(one), vars(other), alike)
        return all(_alike(a, b, alike) for a, b in zip(one.__reduce_ex__(2), other.__reduce_ex__(2), strict=True))
    except Exception:  # noqa: BLE001  such as a lock, which has no comparable state
        return False


def _questions(spec: TensorSpec, members: int, example: Any) -> torch.Tensor:
    """Return test inputs, (members, _ROWS, *shape): the example's, noise, or zeros for integers."""
    shape = (members, _ROWS, *spec.shape)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if example is not None:
        return given_tensor(example).reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = comparable(one), comparable(other)
    return bool(((one == other) | one.isnan()).all())


def _attributes(module: torch.nn.Module) -> dict[str, int]:
    """Return the identities of tensors that are plain attributes, by name."""
    return {
        ".".join(filter(None, (path, key))): id(value)
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


class GroupSlot(Slot):
    """The slot that all members of a group share."""

    def __init__(self, grouped: Grouped, queue: Queue, updater: GroupWeightsUpdater) -> None:
        self.grouped, self._updater = grouped, updater
        super().__init__(grouped, queue, GroupCounters(grouped, queue))

    @property
    def updater(self) -> GroupWeightsUpdater:
        return self._updater

    def answers(self, tickets: NDArray[Any], version: int) -> Iterator[tuple[NDArray[Any], int]]:
        """Split the tickets by weights version, which is one per member."""
        used = self.grouped.versions(tickets)
        if len(used) and (used == used[0]).all():
            yield tickets, int(used[0])
            return
        for one in np.unique(used):
            yield tickets[used == one], int(one)

    def parts(self, tickets: NDArray[Any]) -> list[NDArray[Any]]:
        """Split the tickets by member, so that one that fails does not fail the others."""
        return [part.tickets for part in self.grouped.split(tickets)]

    def name(self, tickets: NDArray[Any]) -> str:
        """Return the name of the member of these tickets."""
        names = [self.grouped.members[part.place].served.spec.name for part in self.grouped.split(tickets)]
        return names[0] if len(names) == 1 else self.grouped.spec.name

    def release(self) -> None:
        """Remove a member."""


class GroupCounters(ModelCounters):
    """Counts for each member separately."""

    def __init__(self, grouped: Grouped, queue: Queue) -> None:
        self._grouped = grouped
        self._queue = queue
        self.left = 1  # unknown at first

    def batch(self, tickets: NDArray[Any], rows: int, began: int, ended: int) -> None:
        for part in self._grouped.split(tickets):
            self._grouped.members[part.place].counters.batch(part.tickets, part.rows, began, ended)

    def add(self, name: str, tickets: NDArray[Any]) -> None:
        for part in self._grouped.split(tickets):
            self._grouped.members[part.place].counters.add(name, part.tickets)

    def waiting(self, rows: int) -> None:
        """Publish each member's number of rows that did not fit into the batch; see `ModelCounters.waiting`."""
        if not rows and not self.left:
            return
        self.left = rows
        waiting = self._queue.waiting
        for member in self._grouped.members:
            member.counters.waiting(int(waiting["rows"][waiting["model"] == member.model].sum()) if rows else 0)


class Groups:
    """All groups of an engine, used only by the model loader's thread.

    Args:
        later: runs an action in the loop's thread between two turns.
        report: called with (event, fields) for log events.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        later: Callable[[Callable[[], None]], None],
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self._report = report
        self._engine = engine
        self._device = device
        self._later = later
        self._slots: dict[str, GroupSlot] = {}

    def join(
        self,
        group: str,
        member: Member,
        compute: torch.dtype | None,
        installed: Callable[[], None],
        example: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        """Add a model to a group, which its first member creates; `installed` is called in the loop's thread.

        Raises:
            CannotGroup: it cannot be computed with others, or is not like them.
            Refused: its spec differs from that of the group's other models.
            Timeout: the publisher of its weights did not let them be read.
        """
        name = member.served.spec.name
        earlier = slot = self._slots.get(group)
        others = [other for other in slot.grouped.members if other.model != member.model] if slot else []
        if others:
            require_alike(name, group, others[0].module, member.module)
            theirs = others[0].served.spec
            if (theirs.inputs, theirs.outputs) != (member.served.spec.inputs, member.served.spec.outputs):
                raise Refused(f"model {name!r} cannot be in group {group!r}: its spec differs from {theirs.name!r}'s")
        check_groupable(name, group, member.module, member.served.spec.inputs, compute, example)
        if slot is None or not others:  # the only member loaded anew may have another spec or dtype
            grouped = Grouped(group, member.served.spec, self._device, compute)
            updater = GroupWeightsUpdater(grouped, self._later, self._report)
            slot = GroupSlot(grouped, Queue(1), updater)
        self._set_members(slot, [*others, member], member.model, installed)
        self._slots[group] = slot
        if earlier is not None and earlier is not slot:
            earlier.updater.stop()

    def leave(self, model: int) -> None:
        """Remove a model that was unloaded, or is served alone. Ignored if it is in no group."""
        for group, slot in list(self._slots.items()):
            members = list(slot.grouped.members)
            rest = [member for member in members if member.model != model]
            if len(rest) == len(members):
                continue
            if rest:
                self._set_members(slot, rest, None, lambda: None)
            else:
                del self._slots[group]
                slot.updater.stop()

    def _set_members(
        self, slot: GroupSlot, members: list[Member], new: int | None, installed: Callable[[], None]
    ) -> None:
        def install() -> None:
            for member in members:
                # A member that was unloaded meanwhile is about to be removed from the group.
                if member.model == new or self._engine.slots.get(member.model) is slot:
                    self._engine.put(member.model, slot, member.served.max_batch, member.arena)
            slot.queue.max_batch = slot.grouped.max_batch
            installed()

        slot.updater.set_members(members, install)
