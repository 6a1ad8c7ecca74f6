"""Keeps an engine of a run: places it, feeds it there, tells every machine where it is; and again when it has moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from jurybox.training.cluster import endpoints
from jurybox.training.cluster.endpoints import Endpoint
from jurybox.training.cluster.engine_spec import EngineSpec
from jurybox.training.cluster.engines import make
from jurybox.training.cluster.host import Instead
from jurybox.training.cluster.traffic import Member, Traffic

_LOOK = 0.5  # seconds between two looks at an engine
_AGAIN = 0.2
_BACK_OFF = 2.0  # after one that could not be started
_STOP = 15.0


class EngineKeeper:
    """For one engine and one run. Methods belong to the thread of the traffic's loop.

    Args:
        book: folder of endpoints on this machine; one of the run's, so that it is on every machine.
        log: gets the log of its servers.
        told: takes lines for whoever watches.
    """

    def __init__(self, spec: EngineSpec, traffic: Traffic, book: Path, log: Path, told: Callable[[str], None]) -> None:
        self._spec, self._traffic, self._book, self._log, self._told = spec, traffic, book, log, told
        self._actor: Any = None
        self._shown = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        endpoints.clear(book, spec.name)
        self._task = asyncio.ensure_future(self._keep())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Stop the engine."""
        self._task.cancel()
        if self._actor is not None:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.stop.remote(), _STOP)
            ray.kill(self._actor)
        endpoints.clear(self._book, self._spec.name)

    async def _keep(self) -> None:
        life = ""
        while True:
            try:
                self._actor = make(self._spec)
                node = await self._actor.where.remote()
                member = await self._traffic.member(node)
                endpoint: Endpoint = await self._actor.endpoint.remote()
                instead: Instead = await member.ask("instead")
                await self._actor.feed.remote(member.scoreboard, instead.folders)
                if endpoint.life != life:
                    life = endpoint.life
                    self._shown += 1
                    endpoints.show(self._book, self._shown, endpoint)
                    self._told(f"engine {endpoint.name} serves on node {node[:8]}, for others at {endpoint.grpc}")
                await self._watch(endpoint, member)
            except RayTaskError as error:
                self._told(f"engine {self._spec.name}: {error.cause}")
                await asyncio.sleep(_BACK_OFF)
            except RayError:
                await asyncio.sleep(_AGAIN)  # Ray makes it anew, elsewhere if need be

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._told(f"engine {self._spec.name} is kept no longer: {type(error).__name__}: {error}")

    async def _watch(self, endpoint: Endpoint, member: Member) -> None:
        """Until it serves no longer as it did."""
        while not member.gone:
            life, log, failed = await self._actor.look.remote()
            with self._log.open("ab") as file:
                file.write(log)
            if failed:
                self._told(f"engine {endpoint.name} is fed no longer ({failed}); begun again")
            if failed or life != endpoint.life:
                return
            await asyncio.sleep(_LOOK)
