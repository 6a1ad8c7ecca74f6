"""The weights updater of a group: a thread writes the spare stack, the loop switches stacks between two batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from jurybox.protocol.errors import Error, Timeout, said
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.server.engine.device import use_device
from jurybox.server.engine.modules import weights_of
from jurybox.server.engine.weights_updater import in_loop, seldom
from jurybox.server.groups.group import Grouped, Member, Stacks

_SLICE = 0.25  # seconds between two checks whether to stop
_JOINING = 5.0  # seconds to wait for a member's first weights


class GroupWeightsUpdater:
    """Keeps the members of a group at the newest versions of their channels; members can be added and removed.

    Args:
        later: runs an action between two batches of the engine's loop.
        report: called with (event, fields) for what should be logged.
    """

    def __init__(
        self,
        grouped: Grouped,
        later: Callable[[Callable[[], None]], None],
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self._report = seldom(report)
        self._grouped = grouped
        self._later = later
        self._readers: dict[int, _ChannelReader] = {}  # by model
        self._turn = threading.Lock()  # held while stacks are written or replaced; never by the loop
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"group {grouped.spec.name}", daemon=True)

    def set_members(self, members: Sequence[Member], install: Callable[[], None]) -> None:
        """Create new stacks of these members, which keep their weights; then call `install` in the loop.

        Raises:
            Timeout: the publisher of a new member did not let its weights be read.
        """
        with self._turn:
            stacks = Stacks(members[0].module, len(members))
            there = {id(member): place for place, member in enumerate(self._grouped.members)}
            readers: dict[int, _ChannelReader] = {}
            for place, member in enumerate(members):
                reader = self._readers.get(member.model)
                if member.channel is None:
                    reader = None
                elif reader is None or reader.channel is not member.channel:
                    reader = _ChannelReader(member.channel, self._news, self._stopped)
                if reader is not None:
                    readers[member.model] = reader
                self._begin(stacks, place, member, there.get(id(member)), reader)
            for reader in self._readers.values():
                if reader not in readers.values():
                    reader.stop()
            self._readers = readers

            def rebind() -> None:
                self._grouped.rebind(members, stacks)
                install()

            in_loop(self._later, rebind, self._stopped)
            for reader in readers.values():
                reader.start()
            if not self._thread.ident:
                self._thread.start()

    def stop(self) -> None:
        """Stop the threads."""
        self._stopped.set()
        self._news.set()

    def join(self) -> None:
        """Wait for the end of the threads."""
        for reader in self._readers.values():
            reader.join()
        if self._thread.is_alive():
            self._thread.join(4 * _SLICE)

    def _begin(
        self, stacks: Stacks, place: int, member: Member, was: int | None, reader: _ChannelReader | None
    ) -> None:
        """Fill both stacks: with a member's current, published or initial weights."""
        for stack in (stacks.active, stacks.spare):
            if was is not None:
                old = self._grouped.stacks.active
                stack.fill(place, old.row(was), old.versions[was])
            else:
                stack.fill(place, weights_of(member.module), 0)
                if reader is not None and reader.reader.newer_than(0):
                    age = reader.into(stack.fill, place, _JOINING)
                    if stack is stacks.active:
                        member.counters.adopted(stack.versions[place], age)

    def _follow(self) -> None:
        use_device(self._grouped.device)  # a thread has a current device of its own
        while not self._stopped.is_set():
            if not self._news.wait(_SLICE):
                continue
            self._news.clear()
            try:
                with self._turn, torch.inference_mode(False), torch.no_grad():
                    self._adopt()
            except Exception as error:  # noqa: BLE001  the thread continues: the next publication may be valid
                self._report("weights not adopted", model=self._grouped.spec.name, error=said(error))
                self._news.set()  # try again: this publication may be the last
                self._stopped.wait(_SLICE)

    def _adopt(self) -> None:
        """Fill the spare stack with the newest versions, and switch if any is newer than in the active one."""
        stacks, members = self._grouped.stacks, self._grouped.members
        active, spare, ages = stacks.active, stacks.spare, {}
        for place, member in enumerate(members):
            reader = self._readers.get(member.model)
            if reader is None:
                continue
            try:
                if reader.reader.newer_than(spare.versions[place]):
                    ages[place] = reader.into(spare.fill, place, _SLICE)
            except Exception as error:  # noqa: BLE001  the other members' publications are adopted
                # The spare row is older than the active one, or partly written.
                spare.fill(place, active.row(place), active.versions[place])
                if isinstance(error, Timeout):
                    self._news.set()  # a snapshot is being published: try again later
                elif not reader.channel.closed:  # otherwise its model was unloaded, and is about to leave the group
                    self._report("weights not adopted", model=member.served.spec.name, error=said(error))
        if spare.tensors and next(iter(spare.tensors.values())).is_cuda:
            torch.cuda.current_stream().synchronize()
        changed = [place for place, version in enumerate(spare.versions) if version != active.versions[place]]
        if not changed or self._stopped.is_set():
            return
        began = time.monotonic()

        def switch() -> None:
            stacks.switch()
            waited = time.monotonic() - began
            for place in changed:
                members[place].counters.adopted(spare.versions[place], ages.get(place, 0.0) + waited)

        in_loop(self._later, switch, self._stopped)


class _ChannelReader:
    """One member's channel, and a thread that waits for publications on it."""

    def __init__(self, channel: WeightsChannel, news: threading.Event, all_stopped: threading.Event) -> None:
        self.channel = channel
        self.reader = WeightsReader(channel)
        self._news = news
        self._all_stopped = all_stopped
        self._stopped = False
        self._flat: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._thread = threading.Thread(target=self._listen, name="weights", daemon=True)

    def start(self) -> None:
        """Start the thread, if it is not running."""
        if not self._thread.ident:
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(4 * _SLICE)

    def into(self, fill: Callable[[int, dict[str, torch.Tensor], int], None], place: int, timeout: float) -> float:
        """Copy the newest publication into a row of a stack; return its age in seconds. Raises Timeout."""
        flat = np.empty(self.reader.layout.nbytes, np.uint8) if self._flat is None else self._flat
        self._flat = flat
        version, _ = self.reader.read_bytes(flat, timeout=timeout)
        fill(place, self.reader.layout.tensors(torch.from_numpy(flat)), version)
        return self.reader.age_seconds

    def _listen(self) -> None:
        seen = 0
        while not self._stopped and not self._all_stopped.is_set():
            try:
                newer = self.reader.wait_newer_than(seen, _SLICE)
            except Error:  # the channel is closed: its model was unloaded, left the group, or the server is gone
                return
            if newer:
                seen = self.reader.newest
                self._news.set()
