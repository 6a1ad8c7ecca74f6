"""The model behind Ray Serve; started by contenders/ray_serve.py with the case and the port in the environment."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serving.cases import CASES
from benchmarks.serving.models import build, packed

CASE = os.environ["BENCH_CASE"]
BATCH = max(1, CASES[CASE].max_batch // CASES[CASE].rows)


@serve.deployment(num_replicas=1, max_ongoing_requests=1024, ray_actor_options={"num_cpus": 1})
class Served:
    """Raw bytes in, raw bytes out, in batches of what waits."""

    def __init__(self, case: str) -> None:
        import numpy as np
        import torch

        self._case = CASES[case]
        self._module = build(self._case.model)
        self._staging = np.zeros((BATCH * self._case.rows, *self._case.shape), self._case.dtype)
        self._batch = torch.from_numpy(self._staging)
        self._frombuffer = np.frombuffer

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.0)  # type: ignore[untyped-decorator]
    async def infer(self, items: list[bytes]) -> list[bytes]:
        rows = self._case.rows
        for i, item in enumerate(items):
            self._staging[i * rows : (i + 1) * rows] = self._frombuffer(item, self._case.dtype).reshape(
                rows, *self._case.shape
            )
        outputs = packed(self._module, self._batch[: len(items) * rows]).numpy()
        return [outputs[i * rows : (i + 1) * rows].tobytes() for i in range(len(items))]

    async def __call__(self, request: Request) -> Any:
        body = await request.body()
        if not body:
            return Response(b"ready")
        return Response(await self.infer(body), media_type="application/octet-stream")


if __name__ == "__main__":
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        _temp_dir=os.environ["BENCH_FOLDER"] + "/ray",
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["BENCH_PORT"]), "access_log": False})
    serve.run(Served.bind(CASE), route_prefix="/")  # type: ignore[attr-defined]
    stopped.wait()
    serve.shutdown()
    ray.shutdown()
