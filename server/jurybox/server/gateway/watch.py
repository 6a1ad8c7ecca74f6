"""The gateway's eye on the server: snapshots of the board, and a stream of them while somebody looks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator

from jurybox.client import ServerGone, Timeout
from jurybox.protocol.errors import Code, Refused, said
from jurybox.server.gateway.source import StatusSource
from jurybox.server.watch.history import History
from jurybox.server.watch.snapshot import BoardReader, Document, Snapshot

_NAMES_FOR = 1.0  # seconds a status document is good for: it tells the names, the board tells the numbers
_SILENT_FOR = 30.0  # seconds a supervisor may owe the next one; then it is no longer busy, but hangs
INTERVAL = 0.4  # seconds between two documents of the stream
_MOST_WATCHERS = 64


class Watch:
    """Gives snapshots of the server; asks it for its status once a second at most, the rest it reads from the board."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source
        self._reader = BoardReader()
        self._document: Document | None = None
        self._asked = 0.0

    async def snapshot(self) -> Snapshot:
        """The board now.

        Raises:
            ServerGone, Timeout: no server answers, and none lives that has lately.
        """
        if self._document is None or time.monotonic() - self._asked >= _NAMES_FOR:
            try:
                self._document = await self._source.status()
                self._asked = time.monotonic()
            except (ServerGone, Timeout):
                # The client calls gone who died and who had no core for a second alike. The board knows better: its
                # owner's lock says whether it lives, and then it tells the truth, under the names it had.
                if self._document is None or time.monotonic() - self._asked >= _SILENT_FOR:
                    raise
        try:
            return self._reader.read(self._document)
        except ServerGone:
            self._document = None
            raise

    def close(self) -> None:
        """Let go of the board."""
        self._reader.close()


class Broadcast:
    """One sampling task for all who watch; it runs while there is one, and remembers nothing when there is none.

    Who reads slowly misses documents, and holds nobody up.
    """

    def __init__(self, watch: Watch, interval: float = INTERVAL) -> None:
        self._watch = watch
        self._interval = interval
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest = ""
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return self._watchers

    def require_room(self) -> None:
        """Raises Refused when as many watch as may."""
        if self._watchers >= _MOST_WATCHERS:
            raise Refused(f"{_MOST_WATCHERS} live pages are open, which is all there may be: close one", Code.BUSY)

    async def stream(self) -> AsyncGenerator[str]:
        """Server-sent events (WHATWG HTML, 9.2): `sample` with a document, `gone` with the reason there is none."""
        self._watchers += 1
        try:
            if self._task is None:
                self._latest = ""
                self._task = asyncio.create_task(self._run())
            if self._latest:
                yield self._latest
            while not self._closed:
                await self._changed.wait()
                yield self._latest
        finally:
            self._watchers -= 1
            if self._watchers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """End every stream: an open page must not hold the gateway's end back."""
        self._closed = True
        self._changed.set()

    async def _run(self) -> None:
        history = History()
        while not self._closed:
            began = time.monotonic()
            try:
                document = history.add(await self._watch.snapshot())
                self._tell("sample", json.dumps(document, separators=(",", ":")))
            except Exception as error:  # noqa: BLE001  who watches is told, and the next look may go well
                self._tell("gone", json.dumps({"reason": said(error)}))
            await asyncio.sleep(max(0.05, self._interval - (time.monotonic() - began)))

    def _tell(self, event: str, data: str) -> None:
        self._latest = f"event: {event}\ndata: {data}\n\n"
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
