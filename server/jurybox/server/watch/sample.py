"""Snapshots of a server's scoreboard, and the document that is derived from two of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import ServerGone
from jurybox.protocol.scoreboard import BATCH_BUCKETS, COUNTERS, MAX_LANES, TIME_BUCKETS, EngineState, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.server.status import percentile

if TYPE_CHECKING:
    from jurybox.server.gateway.robots.counters import PortCounters

Document = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A copy of the scoreboard, with the status document that names its models.

    Attributes:
        taken: ns of CLOCK_MONOTONIC.
        at: seconds since 1970.
        document: of jurybox.server.status; it may be a second older than the arrays.
        engines: (engines,) of scoreboard.ENGINE.
        counters: (engines, models) of scoreboard.COUNTERS, models in the document's order.
        lanes: (lanes,) of scoreboard.LANE, those in use.
        ports: of each port for robots, by name, what the gateway counted there; it is not on the scoreboard.
    """

    taken: int
    at: float
    document: Document
    engines: NDArray[Any]
    counters: NDArray[Any]
    lanes: NDArray[Any]
    ports: Mapping[str, PortCounters] = field(default_factory=dict)

    @property
    def server_id(self) -> str:
        """The server's id, new at every start."""
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

    def sessions(self, at: int) -> float | None:
        """Sessions of model `at` whose state an engine keeps; None of a model without state."""
        if not self.models[at].get("session_state"):
            return None
        return float(self.counters["sessions"][self.engines["state"] == EngineState.SERVING, at].sum())

    def weights_age(self, at: int) -> float | None:
        """Seconds since model `at` adopted its weights; None: they are those it was loaded with."""
        adopted = self.counters["adopted"][:, at]
        adopted = adopted[adopted > 0]
        return max(0.0, (self.taken - int(adopted.min())) / 1e9) if len(adopted) else None


class ScoreboardReader:
    """Reads a server's scoreboard through a read-only mapping, without a request to the server.

    The document names the scoreboard among the server's segments: its owner may be another user than this process,
    which root may look at. A new server's is mapped as soon as a document names it.
    """

    def __init__(self) -> None:
        self._server_id = ""
        self._scoreboard: Scoreboard | None = None

    def read(self, document: Document, ports: Mapping[str, PortCounters] | None = None) -> Snapshot:
        """Take a snapshot; `ports` are the gateway's own part of it.

        Raises:
            ServerGone: that server is dead.
            SharedMemoryError: its scoreboard cannot be mapped: this process sees another /dev/shm.
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


# From two snapshots to what happened between them: rates, percentiles, distributions.
#
# The live page and `jurybox top` both show the document made here.


_STAGES = {"request": "request_ns", "queue": "queue_ns", "forward": "forward_ns"}
_COUNTS = [name for name in COUNTERS.names or () if name not in ("version", "newest", "adopted", "waiting", "sessions")]
FAILURES = ("failed", "expired", "refused", "not_held")
_KEPT_OF_THE_DEAD = (*FAILURES, "version", "newest", "adopted")
_AT_WORK = ("serving", "draining")


def growth(earlier: Snapshot | None, later: Snapshot) -> NDArray[Any]:
    """The growth of the counters between two snapshots: (engines, models) of scoreboard.COUNTERS, as in the later one.

    What is no count (versions, rows waiting) is the later one's. A model that the earlier snapshot did not hold, or
    that was loaded anew since, has begun at zero; so has everything where the earlier one is another server's, or none.
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
    """The document for the live page and `jurybox top`, as JSON values; durations in seconds.

    Args:
        earlier: where the rates, percentiles and distributions begin; without it they are of nothing.
        events: what is to be told beside, the newest last; `text` is each one's sentence.
    """
    seconds = (later.taken - earlier.taken) / 1e9 if earlier else 0.0
    grown = growth(earlier or later, later)
    # What an engine did before it died is no news of now: without this, a dead server would show its last rates.
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
    }


def _counted(grown: NDArray[Any], seconds: float) -> Document:
    """Rates a second, percentiles and the batches' sizes of some of the counters, whatever their shape."""
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
        "busy": min(1.0, _rate(grown["forward_total_ns"], seconds) / 1e9),  # share of the time spent computing
        "rates": {name: _rate(grown[name], seconds) for name in ("requests", "rows", "batches")},
    }


def _state(later: Snapshot, at: int) -> str:
    """The state of an engine, as in the status document."""
    hung = later.document["engines"][at]["hung"]
    return "hung" if hung else EngineState(int(later.engines["state"][at])).name.lower()


def _rate(counts: NDArray[Any], seconds: float) -> float:
    return round(float(counts.sum()) / seconds, 3) if seconds > 0 else 0.0


def _quantile(counts: NDArray[Any], quantile: float) -> float | None:
    nanoseconds = percentile(counts.reshape(-1, TIME_BUCKETS).sum(axis=0), quantile)
    return None if nanoseconds is None else float(f"{nanoseconds / 1e9:.3g}")  # no figure is better than that
