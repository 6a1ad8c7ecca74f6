"""What a server's board showed at one moment."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.board import Board, EngineState
from jurybox.protocol.errors import ServerGone
from jurybox.protocol.segment import segment_name

Document = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The board at one moment, beside the status document that names what is on it.

    Attributes:
        taken: ns of CLOCK_MONOTONIC.
        at: seconds since 1970.
        document: of jurybox.server.status; it may be a second older than the arrays.
        engines: (engines,) of board.ENGINE.
        counters: (engines, models) of board.COUNTERS, models in the document's order.
        lanes: (lanes,) of board.LANE, those in use.
    """

    taken: int
    at: float
    document: Document
    engines: NDArray[Any]
    counters: NDArray[Any]
    lanes: NDArray[Any]

    @property
    def server_id(self) -> str:
        """Of the server; a new one at every start."""
        return str(self.document["server"]["id"])

    @property
    def models(self) -> list[dict[str, Any]]:
        """The document's models."""
        models: list[dict[str, Any]] = self.document["models"]
        return models

    def leased(self, at: int) -> NDArray[Any]:
        """The lanes in use of model `at` of the document."""
        lanes: NDArray[Any] = self.lanes[self.lanes["model"] == self.models[at]["index"]]
        return lanes

    def weights(self, at: int) -> tuple[int, int]:
        """Of model `at`: the version in use by the serving engine that is furthest behind, and the newest published."""
        counters = self.counters[:, at]
        serving = self.engines["state"] == EngineState.SERVING
        version = int((counters["version"][serving] if serving.any() else counters["version"]).min())
        return version, max(int(counters["newest"].max()), int(self.models[at]["weights"]["newest"]), version)

    def weights_age(self, at: int) -> float | None:
        """Seconds since model `at` adopted its weights; None: they are those it was loaded with."""
        adopted = self.counters["adopted"][:, at]
        adopted = adopted[adopted > 0]
        return max(0.0, (self.taken - int(adopted.min())) / 1e9) if len(adopted) else None


class BoardReader:
    """Reads a server's board, mapped for reading alone: the server does nothing for it, and nothing can go wrong there.

    The document names the board among the server's segments: its owner may be another user than this process, which
    root may look at. A new server's is mapped as soon as a document names it.
    """

    def __init__(self) -> None:
        self._server_id = ""
        self._board: Board | None = None

    def read(self, document: Document) -> Snapshot:
        """A snapshot of the server that gave the document.

        Raises:
            ServerGone: that server is dead.
            SharedMemoryError: its board cannot be mapped: this process sees another /dev/shm.
        """
        board = self._of(document)
        if not board.server_lives():
            self.close()
            raise ServerGone(f"the server {document['server']['id']} is gone")
        columns = [model["index"] for model in document["models"]]
        return Snapshot(
            taken=time.monotonic_ns(),
            at=time.time(),
            document=document,
            engines=board.engines.copy(),
            counters=board.counters[:, columns],  # indexing with a list copies
            lanes=board.lanes[np.flatnonzero(board.lanes["lease"])],
        )

    def close(self) -> None:
        """Let go of the board."""
        if self._board is not None:
            self._board.close()
        self._server_id, self._board = "", None

    def _of(self, document: Document) -> Board:
        server_id = document["server"]["id"]
        if self._board is None or self._server_id != server_id:
            self.close()
            ours = segment_name(server_id, "board")
            named = (name for name in document["memory"]["segments"] if name.endswith(f"-{server_id}-board-0"))
            self._board = Board.attach(next(named, ours), writable=False)
            self._server_id = server_id
        return self._board
