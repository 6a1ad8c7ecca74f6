"""The server's status document, as the doors of a process get it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from jurybox.client import Error, Server, ServerGone, Timeout, connect

Document = dict[str, Any]

_MARGIN = 0.5  # seconds by which we wait longer than the client, whose time-out has the better error message


class StatusSource(Protocol):
    """A source of the server's status."""

    async def status(self, *, fresh: bool = False) -> Document:
        """Return the status document (see jurybox.server.status).

        Args:
            fresh: return a document that was made after this call, not a cached one.

        Raises:
            Error: there is none, for example because the server is gone (ServerGone).
        """
        ...


class ClientSource(StatusSource):
    """The status as the client gets it, in a single thread.

    An answer or an error is cached for a moment, so that many probes cost the server no more than one.

    Args:
        address: address of the server.
        timeout: seconds to wait for an answer of the server.
        keep: seconds for which an answer is cached.
    """

    def __init__(self, address: str, *, timeout: float = 1.0, keep: float = 0.1) -> None:
        self._address = address
        self._timeout = timeout
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="status")
        self._connection: Server | None = None  # belongs to the thread
        self._question: asyncio.Future[Document] | None = None
        self._answered = 0.0

    async def status(self, *, fresh: bool = False) -> Document:
        question = self._question
        if fresh or question is None or (question.done() and time.monotonic() - self._answered >= self._keep):
            question = asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
            question.add_done_callback(self._note)
            self._question = question
        try:
            # Shielded: a caller that gives up must not cancel the request that it shares with others.
            return await asyncio.wait_for(asyncio.shield(question), self._timeout + _MARGIN)
        except TimeoutError as error:
            if isinstance(error, Error):
                raise
            raise Timeout(f"the server at {self._address} did not answer within {self._timeout} s") from error

    async def close(self) -> None:
        """Close the connection."""
        self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)

    def _note(self, question: asyncio.Future[Document]) -> None:
        self._answered = time.monotonic()
        if not question.cancelled():
            question.exception()  # mark it as retrieved: every caller may have given up

    def _ask(self) -> Document:
        """Get the status, in the thread; after a failure the next call opens a new connection."""
        try:
            if self._connection is None:
                self._connection = connect(self._address, timeout=self._timeout)
            return self._connection.status()
        except ServerGone:
            self._drop()
            raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
