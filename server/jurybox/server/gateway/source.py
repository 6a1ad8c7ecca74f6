"""Where the gateway has its knowledge from: the server's status document, asked for as any client does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from jurybox.client import Error, ServerGone, Timeout, connect

Document = dict[str, Any]

_MARGIN = 0.5  # seconds: the client gives up first, and knows better why


class StatusSource(Protocol):
    """What the application needs to know a server by."""

    async def status(self, *, fresh: bool = False) -> Document:
        """The status document of jurybox.server.status, made after this call where it is to be `fresh`.

        Raises Error, such as ServerGone, when there is none.
        """
        ...


class Connection(Protocol):
    """What of jurybox.client.Server is used here."""

    def status(self) -> Document: ...

    def close(self) -> None: ...


class ClientSource:
    """Asks a server through the client, in one thread of its own, however many ask here.

    An answer, or the lack of one, is kept for a moment, so that many probes cost the server as much as one.

    Args:
        address: the server's.
        timeout: seconds the server has for an answer.
        keep: seconds an answer is good for.
        open_connection: makes a connection to that address.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 1.0,
        keep: float = 0.1,
        open_connection: Callable[[str, float], Connection] | None = None,
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._keep = keep
        self._open = open_connection or _connect
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="status")
        self._connection: Connection | None = None  # belongs to the thread
        self._question: asyncio.Future[Document] | None = None
        self._answered = 0.0

    async def status(self, *, fresh: bool = False) -> Document:
        """As StatusSource.status."""
        question = self._question
        if fresh or question is None or (question.done() and time.monotonic() - self._answered >= self._keep):
            question = asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
            question.add_done_callback(self._note)
            self._question = question
        try:
            # Shielded: who gives up must not cancel the question of the others.
            return await asyncio.wait_for(asyncio.shield(question), self._timeout + _MARGIN)
        except TimeoutError as error:
            if isinstance(error, Error):
                raise
            raise Timeout(f"the server at {self._address} did not answer within {self._timeout} s") from error

    async def close(self) -> None:
        """Let go of the connection."""
        self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)

    def _note(self, question: asyncio.Future[Document]) -> None:
        self._answered = time.monotonic()
        if not question.cancelled():
            question.exception()  # seen, whether or not anybody still waits for it

    def _ask(self) -> Document:
        """In the thread: ask; where nobody answers, the next question goes over a new connection."""
        try:
            if self._connection is None:
                self._connection = self._open(self._address, self._timeout)
            return self._connection.status()
        except ServerGone:
            self._drop()
            raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _connect(address: str, timeout: float) -> Connection:
    return connect(address, timeout=timeout)
