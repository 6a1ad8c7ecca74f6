"""The status document, created from the scoreboard: for `jurybox status`, the gateway and reports.

Durations and ages are in seconds, sizes in bytes. Histograms are the scoreboard's counts summed over engines: bucket 0
counts zeros, bucket i counts values in [2^(i-1), 2^i), rows or nanoseconds as the name says.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from jurybox.protocol.scoreboard import MAX_LANES, EngineState, Scoreboard, state_of
from jurybox.protocol.spec import parameters_of
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version

if TYPE_CHECKING:
    from jurybox.protocol.control_pb2 import TensorSpecMessage
    from jurybox.server.supervisor.leases import GrantedLease
    from jurybox.server.supervisor.models import HeldModel

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
HISTOGRAMS = ("batch_rows", "queue_ns", "forward_ns", "request_ns", "adopt_ns")
HUNG_SHARE = 1 / 3  # of engine_timeout: a serving engine that is silent for longer counts as hung, and is killed at 1
_SUMS = (
    "requests",
    "rows",
    "batches",
    "failed",
    "expired",
    "refused",
    "not_held",
    "cache_hits",
    "cache_misses",
    "updates",
    "waiting",
)


def status_json(
    scoreboard: Scoreboard, models: Sequence[HeldModel], lanes: Sequence[GrantedLease], **server: Any
) -> str:
    """Return the status document as JSON; `server` as in `status_document`."""
    return json.dumps(status_document(scoreboard, models, lanes, **server))


def status_document(
    scoreboard: Scoreboard,
    models: Sequence[HeldModel],
    lanes: Sequence[GrantedLease],
    *,
    segments: Mapping[str, int],
    server_id: str,
    address: str,
    panels: Mapping[str, Any] | None = None,
    relay: Mapping[str, Any] | None = None,
    draining: bool = False,
    engine_timeout: float = 30.0,
    events: Sequence[dict[str, Any]] = (),
    devices: Sequence[str] = (),
    pythons: Sequence[str] = (),
    now: float | None = None,
    monotonic_ns: int | None = None,
    **listening: Any,
) -> dict[str, Any]:
    """Return the status of a server as JSON values.

    Args:
        models: the models that it holds.
        lanes: the lanes that are leased or retiring.
        segments: the size of each of the server's segments in bytes, by name.
        panels: the members of each panel, by name.
        relay: what the relay holds for its clients; None: there is none.
        engine_timeout: seconds; a serving engine whose heartbeat is older than a third of it counts as hung.
        events: the events of jurybox.server.supervisor.run.
        devices: the device of each engine.
        pythons: the Python interpreter of each engine; empty: the server's.
        now: seconds since 1970; None: the current time.
        monotonic_ns: ns of CLOCK_MONOTONIC; None: the current time.
        listening: the addresses of http, grpc and tcp, and by name those of robots and dialects with their own ports;
            grpc_http2: the HTTP/2 implementation for gRPC, with its version.
    """
    now = time.time() if now is None else now
    monotonic_ns = time.monotonic_ns() if monotonic_ns is None else monotonic_ns
    started = scoreboard.started
    engines = _engines(scoreboard.engines.copy(), devices, pythons, engine_timeout, monotonic_ns)
    # One copy and one sum for all models: this is asked for again and again, of the process that everybody asks.
    counters = scoreboard.counters[:, [held.index for held in models]]
    sums = {name: counters[name].sum(axis=0).tolist() for name in (*_SUMS, *HISTOGRAMS)}
    return {
        "server": {
            "id": server_id,
            "state": "draining" if draining else _state(engines),
            "address": address,
            "http": "",
            "grpc": "",
            "grpc_http2": "",
            "tcp": "",
            "robots": {},
            "dialects": {},
            **listening,
            "build": build_version(),
            "protocol": PROTOCOL_VERSION,
            "started": started,
            "uptime": max(0.0, now - started),
        },
        "engines": engines,
        "panels": dict(panels or {}),
        "models": [
            _model(held, counters[:, at], {name: each[at] for name, each in sums.items()}, lanes, monotonic_ns)
            for at, held in enumerate(models)
        ],
        "relay": dict(relay or {}),
        "lanes": {
            "in_use": sum(lane.retiring is None for lane in lanes),
            "retiring": sum(lane.retiring is not None for lane in lanes),
            "rows": sum(lane.rows for lane in lanes),
            "most": MAX_LANES,
        },
        "memory": {
            "shared_bytes": sum(segments.values()),
            "device_bytes": sum(engine["device_bytes"] for engine in engines),
            "segments": dict(sorted(segments.items())),
        },
        "events": list(events),
    }


def percentile(counts: Sequence[int], quantile: float) -> float | None:
    """Return a percentile of a histogram, in its unit; None if it is empty.

    Values within a bucket are assumed to be uniform on the logarithmic scale, so the result is off by less than the
    bucket's factor of two.
    """
    upto = list(accumulate(counts))
    if not upto[-1]:
        return None
    rank = quantile * upto[-1]
    bucket = min(bisect_left(upto, rank), len(upto) - 1)
    if bucket == 0:
        return 0.0
    return float(2.0 ** (bucket - 1 + min((rank - upto[bucket - 1]) / max(1, counts[bucket]), 1.0)))


def _engines(
    records: NDArray[Any], devices: Sequence[str], pythons: Sequence[str], timeout: float, monotonic_ns: int
) -> list[dict[str, Any]]:
    engines = []
    for index, record in enumerate(records):
        beat = int(record["heartbeat"])
        age = max(0.0, (monotonic_ns - beat) / 1e9) if beat else None
        state = state_of(record["state"])
        engines.append(
            {
                "index": index,
                "device": devices[index] if index < len(devices) else "",
                "state": state.name.lower(),
                "hung": state is EngineState.SERVING and age is not None and age > timeout * HUNG_SHARE,
                "pid": int(record["pid"]),
                "incarnation": f"{int(record['incarnation']):016x}",  # as text: JavaScript's numbers have only 53 bits
                "heartbeat_age": age,
                "restarts": int(record["restarts"]),
                "expected_wait": int(record["expected_wait"]) / 1e9,
                "device_bytes": int(record["device_bytes"]),
            }
            | ({"python": pythons[index]} if index < len(pythons) and pythons[index] else {})
        )
    return engines


def _state(engines: Sequence[dict[str, Any]]) -> str:
    """Return the server's state: serving if an engine is, down if one was and none is starting, else starting."""
    if any(engine["state"] == "serving" and not engine["hung"] for engine in engines):
        return "serving"
    absent = all(engine["state"] in ("absent", "stopped") or engine["hung"] for engine in engines)
    return "down" if absent and any(engine["restarts"] or engine["hung"] for engine in engines) else "starting"


def _model(
    held: HeldModel,
    counters: NDArray[Any],
    sums: dict[str, Any],
    lanes: Sequence[GrantedLease],
    monotonic_ns: int,
) -> dict[str, Any]:
    """Return the status of one model, of its counters (engines,) and their sums and histograms over engines."""
    message = held.message()
    histograms = {name: sums.pop(name) for name in HISTOGRAMS}
    mine = [lane for lane in lanes if lane.model == held.index]
    return {
        "name": held.name,
        "index": held.index,
        "state": message.state,
        "reason": message.reason,
        "configured": held.configured,
        "audit": held.settings.audit,
        "engines": {str(index): state for index, state in sorted(held.engines.items())},
        "inputs": _specs(message.inputs),
        "outputs": _specs(message.outputs),
        "session_state": _specs(message.session_state),
        "parameters": {
            name: {"input": one.input, "default": one.default} for name, one in parameters_of(message).items()
        },
        "max_batch": message.max_batch,
        "warm_up": dict(held.warm_up),
        "arena": {"segment": message.arena, "rows": message.arena_rows},
        "lanes": {"in_use": len(mine), "rows": sum(lane.rows for lane in mine)},
        "sessions": _sessions(held, counters),
        **sums,
        "mean_batch": sums["rows"] / sums["batches"] if sums["batches"] else None,
        "weights": {"digest": message.digest, **_weights(held, counters, monotonic_ns)},
        "latency": {
            name.removesuffix("_ns"): {
                key: None if (value := percentile(counts, quantile)) is None else value / 1e9
                for key, quantile in QUANTILES.items()
            }
            for name, counts in histograms.items()
            if name.endswith("_ns")
        },
        "histograms": histograms,
    }


def _sessions(held: HeldModel, counters: NDArray[Any]) -> int:
    """Return the number of sessions whose state a running engine keeps."""
    serving = [index for index, state in held.engines.items() if state in ("ready", "reloading")]
    return int(counters["sessions"][serving].sum())


def _weights(held: HeldModel, counters: NDArray[Any], monotonic_ns: int) -> dict[str, Any]:
    """Return version, lag and age of the weights in use: those of the serving engine that is furthest behind."""
    serving = [index for index, state in held.engines.items() if state in ("ready", "reloading")]
    used = counters[serving] if serving else counters
    # Engines know the version that they adopted; only the channel knows the versions published since.
    published = held.channel.newest if held.channel is not None else 0
    version, newest = int(used["version"].min()), max(int(used["newest"].max()), published)
    adopted = used["adopted"][used["adopted"] > 0]
    return {
        "version": version,
        "newest": max(newest, version),
        "lag": max(0, newest - version),
        "age": max(0.0, (monotonic_ns - int(adopted.min())) / 1e9) if len(adopted) else None,
        "max_lag": held.settings.max_lag or None,
        "publications": held.channel.publications if held.channel is not None else 0,
        "published_per_second": held.published.per_second,
        "saved": held.saved or None,
    }


def _specs(messages: Sequence[TensorSpecMessage]) -> dict[str, dict[str, Any]]:
    return {
        message.name: {"dtype": message.dtype, "shape": list(message.shape)}
        | ({"capacity": message.capacity} if message.capacity else {})
        | ({"finite": True} if message.finite else {})
        for message in messages
    }
