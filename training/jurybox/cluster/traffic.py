"""Moves counters, rows and weights between the machines of a run with Ray, on one asyncio thread.

The orchestrator's machine controls the transfers without the data: it gets a reference from the host that has rows or a
publication, and passes it to the host that needs them. Ray moves the bytes between nodes, once for each node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jurybox.cluster.connection import failure_of
from jurybox.cluster.host import Host, HostReport, LocalNames, RoleCounters, TimelineCopy
from jurybox.training.runtime.plan import Plan

_PERIOD = 0.01  # least seconds between two polls of a host
_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class HostView:
    """The orchestrator's view of a host.

    Attributes:
        node: Ray's id of the machine.
        host: set for this machine's own host. actor: set for a host on another machine.
        scoreboard: name of its scoreboard.
        roles: that run on it.
        known: by channel, the newest version in its copy.
        files: (folder, name) of those in the run's folders there; reported: how many of them it has reported.
        busy: names of channels and replays with a transfer to or from it.
        lost: whether it was lost.
    """

    node: str
    scoreboard: str
    host: Host | None = None
    actor: Any = None
    roles: set[int] = field(default_factory=set)
    known: dict[str, int] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    files: set[tuple[str, str]] = field(default_factory=set)
    reported: int = 0
    missed: int = 0
    lost: bool = False

    def fetch(self, method: str, *arguments: Any) -> Any:
        """Begin a call; returns a reference to the result, or the result itself from this machine's host."""
        if self.host is not None:
            return getattr(self.host, method)(*arguments)
        return getattr(self.actor, method).remote(*arguments)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the host; arguments may be references."""
        if self.host is None:
            return await getattr(self.actor, method).remote(*arguments)
        have = [await each if isinstance(each, ray.ObjectRef) else each for each in arguments]
        return getattr(self.host, method)(*have)


class Traffic:
    """All transfers of a run. Methods belong to the thread of its event loop.

    Args:
        host: of this machine.
        lost: called with the roles of a host that is gone.
        notify: receives status lines for the user.
    """

    def __init__(
        self,
        plan: Plan,
        host: Host,
        node: str,
        lost: Callable[[set[int]], None],
        notify: Callable[[str], None],
    ) -> None:
        self._plan, self._lost, self._notify = plan, lost, notify
        self._scoreboard = host.shared.scoreboard
        self.own = HostView(node, host.scoreboard(), host=host)
        self.members: dict[str, HostView] = {node: self.own}
        self._starting: dict[str, asyncio.Task[HostView]] = {}
        self._homes: dict[str, HostView] = {}  # by replay, where it is sampled
        self._sources: dict[str, HostView] = {}  # by channel, where it is published on
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spawn(self._poll_local())

    async def member(self, node: str) -> HostView:
        """Get the host of a machine; create it if there is none."""
        found = self.members.get(node)
        if found is not None:
            return found
        if node not in self._starting:
            self._starting[node] = asyncio.ensure_future(self._make(node))
        try:
            return await asyncio.shield(self._starting[node])
        finally:
            self._starting.pop(node, None)

    async def _make(self, node: str) -> HostView:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        name = f"{self.own.scoreboard}-{node}"
        options: dict[str, Any] = {"num_cpus": 0, "name": name, "scheduling_strategy": strategy, "get_if_exists": True}
        actor: Any = ray.remote(Host).options(**options).remote(self._plan)
        member = HostView(node, await actor.scoreboard.remote(), actor=actor)
        for channel in self._plan.channels:
            # Send what was published so far, so that roles that start there need not wait for the next publication.
            if self._newest_local(channel.name):
                newest = self.own.fetch("publication", channel.name)
                member.known[channel.name] = await member.call("adopt", channel.name, newest)
        self.members[node] = member
        self._spawn(self._poll(member))
        return member

    async def context(self, number: int, member: HostView) -> LocalNames:
        """Prepare the start of a role on a machine; returns the names that it uses there.

        Raises:
            ValueError: the role samples a replay that a role on another machine also samples.
        """
        spec = self._plan.roles[number]
        for name in spec.samples:
            home = self._homes.get(name)
            others = [other for other in (home.roles if home else ()) if name in self._plan.roles[other].samples]
            if home is not None and home is not member and not home.lost and set(others) - {number}:
                other = self._plan.roles[others[0]].name
                raise ValueError(
                    f"{spec.name} was placed on another machine than {other}, and both sample {name!r}: give them "
                    "resources (RoleSpec.resources) that one machine alone has"
                )
        await member.call("make_home", spec.samples)
        for name in spec.samples:
            self._homes[name] = member
        if spec.publishes is not None:
            self._sources[spec.publishes] = member
        if member is not self.own:
            await member.call("context", RoleCounters.of(self._scoreboard, [number], orders=True))
        member.roles.add(number)
        names: LocalNames = await member.call("local_names")
        return names

    async def leave(self, number: int, member: HostView) -> None:
        """Read the last counters and the timeline of a role's process that has ended."""
        if member is not self.own and not member.lost:
            report: HostReport = await member.call("report", {number}, ())
            report.counters.write(self._scoreboard, {number}, orders=False, life=True)
            copy: TimelineCopy = await member.call("timeline", number)
            copy.write(self._scoreboard, number)
        member.roles.discard(number)

    def handle_loss(self, member: HostView) -> None:
        """Handle the loss of a machine, or of its host."""
        if member.lost or member is self.own:
            return
        member.lost = True
        self.members.pop(member.node, None)
        self._homes = {name: home for name, home in self._homes.items() if home is not member}
        self._sources = {name: source for name, source in self._sources.items() if source is not member}
        self._lost(set(member.roles))

    async def _poll(self, member: HostView) -> None:
        all_roles = range(len(self._plan.roles))
        try:
            while not member.lost:
                began = time.monotonic()
                others = RoleCounters.of(self._scoreboard, all_roles, orders=True)
                if self._behind(member):
                    others = others.unfinished()
                report: HostReport = await member.call(
                    "exchange", others, set(member.roles), list(self._homes), member.reported
                )
                self._record(member, report)
                counters = report.counters.unfinished() if self._behind(self.own) else report.counters
                counters.write(self._scoreboard, member.roles, orders=False, life=True)
                if report.missed > member.missed:
                    self._notify(
                        f"{report.missed - member.missed} rows of a machine were overwritten before they left it"
                    )
                    member.missed = report.missed
                self._transfer(member, report)
                await asyncio.sleep(max(0.0, _PERIOD - (time.monotonic() - began)))
        except RayError as error:
            if (why := failure_of(error)) is not None:
                self._notify(f"the host of node {member.node[:8]} failed, which its roles need: {why}")
            self.handle_loss(member)

    async def _poll_local(self) -> None:
        assert self.own.host is not None
        while True:
            if len(self.members) > 1:
                away = [name for name, home in self._homes.items() if home is not self.own]
                report: HostReport = self.own.host.report((), away, self.own.reported)
                self._record(self.own, report)
                self._transfer(self.own, report)
            await asyncio.sleep(_PERIOD)

    def _transfer(self, member: HostView, report: HostReport) -> None:
        for name, count in report.rows.items():
            if count:
                self._run_once(member, name, self._move_rows(member, name))
        if self.own.files != member.files:
            self._run_once(member, "files", self._sync_files(member))
        for channel in self._plan.channels:
            if self._sources.get(channel.name) is member:
                self._fan_out(channel.name, member, member.known[channel.name])

    def _record(self, member: HostView, report: HostReport) -> None:
        for channel, newest in zip(self._plan.channels, report.newest, strict=True):
            member.known[channel.name] = max(newest, member.known.get(channel.name, 0))
        member.reported += len(report.files)
        member.files.update(report.files)

    def _behind(self, member: HostView) -> bool:
        """Whether a publication is in transit to this host. Read it after the counters."""
        self.own.known |= {channel.name: self._newest_local(channel.name) for channel in self._plan.channels}
        return any(member.known.get(name, 0) < source.known.get(name, 0) for name, source in self._sources.items())

    async def _move_rows(self, member: HostView, name: str) -> bool:
        """Move one batch to where it is sampled; return whether there was one."""
        home = self._homes.get(name)
        if home is None or home is member is self.own:
            return False
        batch = member.fetch("rows", name)
        return bool(await home.call("put", name, member.node, batch))

    async def _sync_files(self, member: HostView) -> None:
        """Copy files between two machines."""
        for source, target in ((member, self.own), (self.own, member)):
            for folder, name in sorted(source.files - target.files):
                await target.call("keep_file", folder, name, source.fetch("file", folder, name))
                target.files.add((folder, name))

    def _fan_out(self, channel: str, source: HostView, newest: int) -> None:
        behind = [
            each
            for each in self.members.values()
            if each is not source and each.known.get(channel, 0) < newest and channel not in each.busy
        ]
        if not behind:
            return
        publication = source.fetch("publication", channel)
        if not isinstance(publication, ray.ObjectRef):
            publication = ray.put(publication)
        for each in behind:
            self._run_once(each, channel, self._adopt(each, channel, publication))

    async def _adopt(self, member: HostView, channel: str, publication: Any) -> None:
        member.known[channel] = await member.call("adopt", channel, publication)

    def _newest_local(self, channel: str) -> int:
        return self.own.host.newest(channel) if self.own.host else 0

    async def settle(self) -> None:
        """While all roles are paused: move rows to where they are sampled, and the newest weights to this machine."""
        for member in list(self.members.values()):
            for name in list(self._homes):
                while name in member.busy:  # noqa: ASYNC110 (some milliseconds, once a checkpoint)
                    await asyncio.sleep(0.001)
                while await self._move_rows(member, name):
                    pass
        for member in list(self.members.values()):
            if member is not self.own:
                await self._sync_files(member)
        for channel, source in self._sources.items():
            if source is not self.own:
                await self._adopt(self.own, channel, source.fetch("publication", channel))

    async def replay_file(self, name: str) -> bytes | None:
        """The file of a replay that is sampled on another machine; None if it is on this one."""
        home = self._homes.get(name, self.own)
        return None if home is self.own else await home.call("replay_file", name)

    async def close(self) -> None:
        """Stop, and let all hosts free their shared memory."""
        for task in self._tasks:
            task.cancel()
        others = [member for member in self.members.values() if member is not self.own]
        await asyncio.gather(*(self._close(member) for member in others))

    async def _close(self, member: HostView) -> None:
        try:
            await asyncio.wait_for(member.call("close"), _CLOSE_SECONDS)
            ray.kill(member.actor)
        except (RayError, TimeoutError):
            self._notify(
                f"the host of node {member.node[:8]} did not end in order; the next run there frees its memory"
            )

    def _run_once(self, member: HostView, what: str, work: Awaitable[Any]) -> None:
        """Run `work` unless the same work is running for this member."""
        if what in member.busy:
            work.close()  # type: ignore[attr-defined]
            return
        member.busy.add(what)

        async def run() -> None:
            try:
                await work
            except RayTaskError as error:
                self._notify(f"between the machines, {what}: {error.cause!r}")
            except RayError:
                pass  # a machine is gone; its next poll handles that
            finally:
                member.busy.discard(what)

        self._spawn(run())

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._handle_done)

    def _handle_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notify(f"between the machines: {type(error).__name__}: {error}")
