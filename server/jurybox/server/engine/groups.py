"""The groups of an engine: models join one when they are loaded and leave it when they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from jurybox.protocol.errors import Refused
from jurybox.server.engine.core import Engine
from jurybox.server.engine.group import Grouped, Member
from jurybox.server.engine.group_check import check_groupable, require_alike
from jurybox.server.engine.group_follower import GroupFollower
from jurybox.server.engine.group_slot import GroupSlot
from jurybox.server.engine.inbox import Queue


class Groups:
    """Belongs to the workshop's thread.

    Args:
        later: runs an action in the loop's thread between two turns.
        report: called with (event, fields) for what should be logged.
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
        """Make a model one of a group, which begins with its first; `installed` is called in the loop's thread.

        Raises:
            CannotGroup: it cannot be computed with others, or is not like them.
            Refused: the group computes in another dtype.
        """
        name = member.served.spec.name
        slot = self._slots.get(group)
        others = [other for other in slot.grouped.members if other.model != member.model] if slot else []
        if others:
            require_alike(name, group, others[0].module, member.module)
            theirs = others[0].served.spec
            if (theirs.inputs, theirs.outputs) != (member.served.spec.inputs, member.served.spec.outputs):
                raise Refused(f"model {name!r} cannot be in group {group!r}: its spec differs from {theirs.name!r}'s")
        check_groupable(name, group, member.module, member.served.spec.inputs, compute, example)
        if slot is None:
            grouped = Grouped(group, member.served.spec, self._device, compute)
            grouped.follower = GroupFollower(grouped, self._later, self._report)
            slot = self._slots[group] = GroupSlot(grouped, Queue(1))
        self._set_members(slot, [*others, member], member.model, installed)

    def leave(self, model: int) -> None:
        """A model was unloaded, or is served by itself from now on. Harmless where it was in no group."""
        for group, slot in list(self._slots.items()):
            members = list(slot.grouped.members)
            rest = [member for member in members if member.model != model]
            if len(rest) == len(members):
                continue
            if rest:
                self._set_members(slot, rest, None, lambda: None)
            else:
                del self._slots[group]
                assert slot.grouped.follower is not None
                slot.grouped.follower.stop()

    def _set_members(
        self, slot: GroupSlot, members: list[Member], new: int | None, installed: Callable[[], None]
    ) -> None:
        def install() -> None:
            for member in members:
                # One that was unloaded meanwhile is on its way out of the group.
                if member.model == new or self._engine.slots.get(member.model) is slot:
                    self._engine.put(member.model, slot, member.served.max_batch, member.arena)
            slot.queue.max_batch = slot.grouped.max_batch
            installed()

        assert slot.grouped.follower is not None
        slot.grouped.follower.set_members(members, install)
