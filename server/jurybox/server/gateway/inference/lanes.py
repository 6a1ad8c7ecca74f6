"""The gateway as a client of the engines: one lane of each model, on which everybody's requests are in flight together.

Requests of many callers share a lane, so they wait side by side in the engine and leave in one batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from jurybox.client import Busy, Error, Model, Server, ServerGone, Timeout, connect
from jurybox.protocol.errors import Code, ModelFailed, Refused
from jurybox.protocol.spec import ModelSpec
from jurybox.server.gateway.inference.together import Arrays, Together

T = TypeVar("T")

PATIENCE = 60.0  # seconds a request has that brings no time-out of its own
_CONNECT = 2.0  # seconds the server has for an answer on the control door
_BATCHES = 2  # in flight on a lane: one computed, one waiting


class Held:
    """A lane of a model, leased for as long as its spec stands."""

    def __init__(self, model: Model, rows: int) -> None:
        self.model = model
        self.spec: ModelSpec = model.spec
        self.piece = min(model.max_batch, rows)  # rows of the largest ticket
        self.together = Together(model, self.piece)
        self.in_use = 0
        self.retired = False


class Lanes:
    """Leases lanes as models are asked for, and asks on them. For one event loop.

    Args:
        address: the server's.
        rows: of every lane; 0: room for two of the model's largest batches, or what the arena has left.
        open_connection: makes a connection to that address.
    """

    def __init__(
        self, address: str, *, rows: int = 0, open_connection: Callable[[str, float], Server] | None = None
    ) -> None:
        self._address = address
        self._rows = rows
        self._open = open_connection or (lambda address, timeout: connect(address, timeout=timeout))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lanes")  # what waits, waits there
        self._connecting = threading.Lock()
        self._server: Server | None = None
        self._held: dict[str, Held] = {}
        self._holding: dict[str, asyncio.Future[Held]] = {}

    async def hold(self, name: str) -> Held:
        """The lane of a model, leased now where it is not yet.

        Raises:
            ModelNotFound, ModelFailed; Refused (code NOT_READY): it is loading; Busy: its arena is taken.
        """
        held = self._held.get(name)
        if held is not None:
            return held
        holding = self._holding.get(name)
        if holding is None:
            holding = asyncio.get_running_loop().run_in_executor(self._thread, self._lease, name)
            self._holding[name] = holding
            holding.add_done_callback(lambda done: self._leased(name, done))
        return await asyncio.shield(holding)  # who gives up must not cancel it for the others

    async def ask(self, held: Held, inputs: Arrays, n: int, seconds: float, version: int) -> tuple[Arrays, int]:
        """Compute n rows; more than a batch go in pieces, several in flight.

        Args:
            inputs: (n, *row shape) of every input of the spec.
            version: of the weights; 0: the newest.

        Returns:
            (n, *row shape) of every output, and the weights' version: the oldest of its pieces'.

        Raises:
            Refused (code STALE_LEASE): the server took the lane back; hold anew and ask once more.
            Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        held.in_use += 1
        try:
            if n <= held.piece:
                return await held.together.ask(inputs, n, seconds, version)
            return await self._in_pieces(held, inputs, n, time.monotonic() + seconds, version)
        except Error as error:
            if error.code in (Code.STALE_LEASE, Code.SERVER_GONE):
                self._retire(held)
            raise
        finally:
            held.in_use -= 1
            if held.retired and not held.in_use:
                self._thread.submit(held.model.close)

    async def call(self, action: Callable[[Server], T]) -> T:
        """Do something that waits, such as loading a model, with the connection, in a thread."""
        return await asyncio.to_thread(lambda: action(self._connected()))

    def close(self) -> None:
        """Give every lane back."""
        self._held.clear()
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=False)

    # ---- inside

    async def _in_pieces(self, held: Held, inputs: Arrays, n: int, until: float, version: int) -> tuple[Arrays, int]:
        outputs = {name: np.empty((n, *spec.shape), spec.numpy_dtype) for name, spec in held.spec.outputs.items()}
        starts = iter(range(0, n, held.piece))
        versions = []

        async def ask_some() -> None:
            for at in starts:
                end = min(at + held.piece, n)
                piece = {name: array[at:end] for name, array in inputs.items()}
                answer, used = await held.together.ask(piece, end - at, until - time.monotonic(), version)
                versions.append(used)
                for name, array in answer.items():
                    outputs[name][at:end] = array

        workers = [asyncio.ensure_future(ask_some()) for _ in range(_BATCHES)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return outputs, min(versions)

    def _retire(self, held: Held) -> None:
        if self._held.get(held.spec.name) is held:
            del self._held[held.spec.name]
        held.retired = True

    def _leased(self, name: str, done: asyncio.Future[Held]) -> None:
        self._holding.pop(name, None)
        if not done.cancelled() and done.exception() is None:
            self._held[name] = done.result()

    def _lease(self, name: str) -> Held:
        """In the thread: lease the rows there are, rather many than few."""
        try:
            server = self._connected()
            message = server.describe(name)
            if message.state == "quarantined":
                raise ModelFailed(message.reason)
            if message.state == "failed":
                raise ModelFailed(f"model {name!r} could not be loaded: {message.reason}")
            if message.state != "ready":
                raise Refused(f"model {name!r} is {message.state}: ask again when it is ready", Code.NOT_READY)
            rows = self._rows or min(_BATCHES * message.max_batch, max(1, message.arena_rows // 2))
            while True:
                try:
                    return Held(server.model(name, rows=rows, timeout=0.0), rows)
                except Busy:
                    if rows == 1:
                        raise
                    rows = max(1, rows // 4)
        except Timeout as error:
            raise Refused(str(error), Code.NOT_READY) from error
        except ServerGone:
            self._disconnect()
            raise

    def _connected(self) -> Server:
        with self._connecting:
            if self._server is None:
                self._server = self._open(self._address, _CONNECT)
            return self._server

    def _disconnect(self) -> None:
        with self._connecting:
            server, self._server = self._server, None
        if server is not None:
            server.close()
