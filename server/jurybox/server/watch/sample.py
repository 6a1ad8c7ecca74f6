"""Snapshots of a server's scoreboard, and the document that is derived from two of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.address import default_address
from jurybox.protocol.errors import ServerGone
from jurybox.protocol.scoreboard import (
    BATCH_BUCKETS,
    COUNTERS,
    MAX_LANES,
    TIME_BUCKETS,
    EngineState,
    Scoreboard,
    state_of,
)
from jurybox.protocol.segment import segment_name
from jurybox.server.status import percentile

if TYPE_CHECKING:
    from jurybox import native
    from jurybox.server.gateway.robots.counters import PortCounters

Document = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A copy of the scoreboard, with the status document that names its models.

    Attributes:
        taken: when it was taken, ns of CLOCK_MONOTONIC.
        at: the same time, seconds since 1970.
        document: the status document of jurybox.server.status; it may be a second older than the arrays.
        engines: (engines,) of scoreboard.ENGINE.
        counters: (engines, models) of scoreboard.COUNTERS, models in the document's order.
        lanes: the lanes in use, (lanes,) of scoreboard.LANE.
        ports: the gateway's counters of each port for robots, by name; they are not on the scoreboard.
        timeouts: the gateway's number of requests that were not answered in time, by model; likewise.
        budget: what the gateway holds for its clients; None: there is no gateway.
    """

    taken: int
    at: float
    document: Document
    engines: NDArray[Any]
    counters: NDArray[Any]
    lanes: NDArray[Any]
    ports: Mapping[str, PortCounters] = field(default_factory=dict)
    timeouts: Mapping[str, int] = field(default_factory=dict)
    budget: native.Budget | None = None

    @property
    def server_id(self) -> str:
        """The server's id, which is new at every start."""
        return str(self.document["server"]["id"])

    @property
    def models(self) -> list[dict[str, Any]]:
        """The document's models."""
        models: list[dict[str, Any]] = self.document["models"]
        return models

    def ready(self, at: int) -> bool:
        """Return whether an engine that does not hang can answer for model `at`."""
        hung = {str(engine["index"]) for engine in self.document["engines"] if engine["hung"]}
        model = self.models[at]
        return bool(model["state"] == "ready" and (not model["engines"] or model["engines"].keys() - hung))

    def leased(self, at: int) -> NDArray[Any]:
        """Return the lanes in use of the document's model number `at`."""
        lanes: NDArray[Any] = self.lanes[self.lanes["model"] == self.models[at]["index"]]
        return lanes

    def weights(self, at: int) -> tuple[int, int]:
        """Return two versions of model `at`: the oldest that a serving engine uses, and the newest published."""
        counters = self.counters[:, at]
        serving = self.engines["state"] == EngineState.SERVING
        version = int((counters["version"][serving] if serving.any() else counters["version"]).min())
        return version, max(int(counters["newest"].max()), int(self.models[at]["weights"]["newest"]), version)

    def sessions(self, at: int) -> float | None:
        """Return the number of sessions of model `at` whose state an engine keeps; None for a model without state."""
        if not self.models[at].get("session_state"):
            return None
        return float(self.counters["sessions"][self.engines["state"] == EngineState.SERVING, at].sum())

    def weights_age(self, at: int) -> float | None:
        """Return the seconds since model `at` adopted published weights; None before the first."""
        adopted = self.counters["adopted"][:, at]
        adopted = adopted[adopted > 0]
        return max(0.0, (self.taken - int(adopted.min())) / 1e9) if len(adopted) else None


class ScoreboardReader:
    """Reads a server's scoreboard through a read-only mapping, without a request to the server.

    The scoreboard's name is that in the document's list of segments, since the server's user may be another than this
    process's, if this one is root. The scoreboard of a new server is mapped as soon as a document names it.
    """

    def __init__(self) -> None:
        self._server_id = ""
        self._scoreboard: Scoreboard | None = None

    def read(
        self,
        document: Document,
        ports: Mapping[str, PortCounters] | None = None,
        timeouts: Mapping[str, int] | None = None,
        budget: native.Budget | None = None,
    ) -> Snapshot:
        """Take a snapshot.

        Args:
            document: the server's status document.
            ports: the gateway's counters of its ports for robots.
            timeouts: the gateway's number of requests that were not answered in time, by model.
            budget: what the gateway holds for its clients.

        Raises:
            ServerGone: that server is dead.
            SharedMemoryError: its scoreboard cannot be mapped, for example because this process has another /dev/shm.
        """
        scoreboard = self._of(document)
        if not scoreboard.server_lives():
            self.close()
            raise ServerGone(f"the server {document['server']['id']} is gone")
        columns = [model["index"] for model in document["models"]]
        return Snapshot(
            taken=time.monotonic_ns(),
            at=time.time(),
            document=document,
            engines=scoreboard.engines.copy(),
            counters=scoreboard.counters[:, columns],  # indexing with a list copies
            lanes=scoreboard.lanes[np.flatnonzero(scoreboard.lanes["lease"])],
            ports=ports or {},
            timeouts=timeouts or {},
            budget=budget,
        )

    def close(self) -> None:
        """Close the scoreboard."""
        if self._scoreboard is not None:
            self._scoreboard.close()
        self._server_id, self._scoreboard = "", None

    def _of(self, document: Document) -> Scoreboard:
        server_id = document["server"]["id"]
        if self._scoreboard is None or self._server_id != server_id:
            self.close()
            ours = segment_name(server_id, "scoreboard")
            named = (name for name in document["memory"]["segments"] if name.endswith(f"-{server_id}-scoreboard-0"))
            self._scoreboard = Scoreboard.attach(next(named, ours), writable=False)
            self._server_id = server_id
        return self._scoreboard


# The document of the live page and `jurybox top`: rates, percentiles and distributions between two snapshots.


_STAGES = {"request": "request_ns", "queue": "queue_ns", "forward": "forward_ns"}
_COUNTS = [name for name in COUNTERS.names or () if name not in ("version", "newest", "adopted", "waiting", "sessions")]
FAILURES = ("failed", "expired", "refused", "not_held")
_KEPT_OF_THE_DEAD = (*FAILURES, "version", "newest", "adopted")
_AT_WORK = ("serving", "draining")


def growth(earlier: Snapshot | None, later: Snapshot) -> NDArray[Any]:
    """Return the growth of the counters between two snapshots: (engines, models) of scoreboard.COUNTERS.

    Engines and models are those of the later snapshot. Fields that are not counters (versions, rows waiting) have the
    later values. The counters of a model that is not in the earlier snapshot, or has been loaded again since, began at
    zero; so did all counters if the earlier snapshot is None or another server's.
    """
    grown = later.counters.copy()
    if earlier is None or earlier.server_id != later.server_id:
        return grown
    columns = {(model["name"], model["index"]): at for at, model in enumerate(earlier.models)}
    pairs = [
        (at, before)
        for at, model in enumerate(later.models)
        if (before := columns.get((model["name"], model["index"]))) is not None
    ]
    if pairs:
        now, then = ([pair[i] for pair in pairs] for i in (0, 1))
        for name in _COUNTS:
            old, new = earlier.counters[name][:, then], later.counters[name][:, now]
            grown[name][:, now] = np.where(new >= old, new - old, new)
    return grown


def sample(earlier: Snapshot | None, later: Snapshot, events: Sequence[Document] = ()) -> Document:
    """Return the document for the live page and `jurybox top`, as JSON values; durations in seconds.

    Args:
        earlier: the snapshot at which rates, percentiles and distributions begin. None: they are zero or None.
        later: the snapshot at which they end.
        events: the events to include, the newest last; `text` of each is its sentence.
    """
    seconds = (later.taken - earlier.taken) / 1e9 if earlier else 0.0
    grown = growth(earlier or later, later)
    # Drop what a dead engine did before its death; otherwise its last rates would still be shown.
    for at in range(len(later.engines)):
        if _state(later, at) not in _AT_WORK:
            for name in grown.dtype.names or ():
                if name not in _KEPT_OF_THE_DEAD:
                    grown[name][at] = 0
    server, memory, held = later.document["server"], later.document["memory"], later.document["lanes"]
    return {
        "at": round(later.at, 3),
        "seconds": round(seconds, 3),
        "server": {
            **{key: server[key] for key in ("id", "state", "build", "address")},
            "uptime": round(max(0.0, later.at - server["started"]), 1),
        },
        **_counted(grown, seconds),
        "waiting": int(grown["waiting"].sum()),
        "lanes": {
            "in_use": len(later.lanes),
            "rows": int(later.lanes["rows"].sum()),
            "retiring": held["retiring"],
            "most": MAX_LANES,
        },
        "memory": {"shared_bytes": memory["shared_bytes"], "device_bytes": int(later.engines["device_bytes"].sum())},
        "models": [_model(later, at, grown[:, at], seconds) for at in range(len(later.models))],
        "engines": [_engine(later, at, grown[at], seconds) for at in range(len(later.engines))],
        "events": list(events),
        "first_request": first_request(later),
    }


def first_request(later: Snapshot) -> list[str]:
    """Return the lines that say how to send a server its first request; none once it had one, or without a model."""
    ready = next((model["name"] for model in later.models if model["state"] == "ready"), None)
    if ready is None or any(later.counters[name].any() for name in ("requests", *FAILURES)):
        return []
    server = later.document["server"]
    address = "" if server["address"] == default_address() else repr(server["address"])
    lines = [
        "No request yet. From Python, on this host (print shows the inputs):",
        f"    from jurybox.client import connect; model = connect({address}).model({ready!r}); print(model)",
        "    model(row)    # one row; a dict where there are several inputs",
    ]
    if server["http"]:
        lines.append(
            f"Over HTTP:    curl http://{server['http']}/v2/models/{ready}    then .../infer, see docs/start.md"
        )
    return lines


def _counted(grown: NDArray[Any], seconds: float) -> Document:
    """Return rates per second, percentiles and batch sizes of counters of any shape."""
    batches, rows = int(grown["batches"].sum()), int(grown["rows"].sum())
    return {
        "rates": {name: _rate(grown[name], seconds) for name in ("requests", "rows", "batches")},
        "failures": {name: int(grown[name].sum()) for name in FAILURES},
        "latency": {
            stage: {key: _quantile(grown[field], quantile) for key, quantile in (("p50", 0.5), ("p99", 0.99))}
            for stage, field in _STAGES.items()
        },
        "batch": {
            "mean": round(rows / batches, 2) if batches else None,
            "counts": grown["batch_rows"].reshape(-1, BATCH_BUCKETS).sum(axis=0).tolist(),
        },
    }


def _model(later: Snapshot, at: int, grown: NDArray[Any], seconds: float) -> Document:
    held, lanes = later.models[at], later.leased(at)
    version, newest = later.weights(at)
    return {
        "name": held["name"],
        "state": held["state"],
        "reason": held["reason"],
        "max_batch": held["max_batch"],
        "arena_rows": held["arena"]["rows"],
        **_counted(grown, seconds),
        "errors": {name: int(later.counters[name][:, at].sum()) for name in FAILURES},
        "waiting": int(grown["waiting"].sum()),
        "lanes": {"in_use": len(lanes), "rows": int(lanes["rows"].sum())},
        "weights": {
            "version": version,
            "newest": newest,
            "lag": newest - version,
            "age": later.weights_age(at),
            "digest": held["weights"]["digest"],
        },
    }


def _engine(later: Snapshot, at: int, grown: NDArray[Any], seconds: float) -> Document:
    record, state = later.engines[at], _state(later, at)
    beat = int(record["heartbeat"])
    return {
        "index": at,
        "state": state,
        "pid": int(record["pid"]),
        "restarts": int(record["restarts"]),
        "heartbeat_age": max(0.0, (later.taken - beat) / 1e9) if beat else None,
        "expected_wait": int(record["expected_wait"]) / 1e9 if state in _AT_WORK else None,
        "device_bytes": int(record["device_bytes"]),
        "busy": min(1.0, _rate(grown["forward_total_ns"], seconds) / 1e9),  # fraction of the time spent computing
        "rates": {name: _rate(grown[name], seconds) for name in ("requests", "rows", "batches")},
    }


def _state(later: Snapshot, at: int) -> str:
    """Return the state of an engine, as in the status document."""
    hung = later.document["engines"][at]["hung"]
    return "hung" if hung else state_of(later.engines["state"][at]).name.lower()


def _rate(counts: NDArray[Any], seconds: float) -> float:
    return round(float(counts.sum()) / seconds, 3) if seconds > 0 else 0.0


def _quantile(counts: NDArray[Any], quantile: float) -> float | None:
    nanoseconds = percentile(counts.reshape(-1, TIME_BUCKETS).sum(axis=0).tolist(), quantile)
    return None if nanoseconds is None else float(f"{nanoseconds / 1e9:.3g}")  # more digits would not be accurate
