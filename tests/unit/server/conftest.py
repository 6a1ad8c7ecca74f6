"""A server's status as the gateway sees it, without a server."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def document() -> dict[str, Any]:
    """A healthy server's status document, the parts that readers of it use."""
    latency = {"p50": 0.0001, "p90": 0.002, "p99": 0.3}
    return {
        "server": {
            "id": "abcd1234", "state": "serving", "address": "ipc:///x/engine", "http": "127.0.0.1:8000",
            "grpc": "127.0.0.1:8001",
            "build": "0.1.0", "protocol": 1, "started": 1.0, "uptime": 90.0,
        },
        "engines": [
            {"index": 0, "device": "cpu", "state": "serving", "hung": False, "pid": 42,
             "incarnation": "00000000000000ff",
             "heartbeat_age": 0.1, "restarts": 0, "expected_wait": 0.0, "device_bytes": 0},
        ],
        "models": [
            {
                "name": "photo", "index": 0, "state": "ready", "reason": "", "engines": {"0": "ready"},
                "inputs": {"image": {"dtype": "uint8", "shape": [384, 384, 3]}},
                "outputs": {"score": {"dtype": "float32", "shape": []}},
                "max_batch": 64, "arena": {"segment": "jurybox-0-abcd1234-arena-1", "rows": 303},
                "lanes": {"in_use": 2, "rows": 18}, "sessions": 0, "session_state": {},
                "requests": 1000, "rows": 4000, "batches": 100, "failed": 0,
                "expired": 3, "refused": 0, "updates": 1, "waiting": 0, "mean_batch": 40.0,
                "weights": {"digest": "cafe", "version": 5, "newest": 6, "lag": 1, "age": 2.5, "max_lag": 4,
                            "publications": 4, "published_per_second": 2.5, "saved": 3},
                "latency": {"queue": latency, "forward": latency, "request": latency, "adopt": latency},
                "histograms": {},
            },
        ],
        "lanes": {"in_use": 2, "retiring": 0, "rows": 18, "most": 2048},
        "memory": {"shared_bytes": 134217728, "device_bytes": 0, "segments": {}},
    }  # fmt: skip
