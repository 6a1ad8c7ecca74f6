"""The peer: openpi's policy server, one observation to a forward, in the event loop of its websockets.

``python -m benchmarks.robots.upstream WIDTH LAYERS STEPS [OPENPI]`` prints its port. With OPENPI, a checkout of
github.com/Physical-Intelligence/openpi, it is their own src/openpi/serving/websocket_policy_server.py with their own
openpi_client, unchanged. Without it a server is built as theirs, but for the reader of messages, which is ours in both.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.robots.policies import made
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb


class InProcess:
    """A policy for openpi's server (openpi_client's BasePolicy)."""

    def __init__(self, width: int, layers: int, steps: int) -> None:
        torch.set_num_threads(1)  # as many as the engine has on two cores
        self._policy = made(width, layers, steps)

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        with torch.inference_mode():
            top, wrist, state = (
                torch.from_numpy(np.array(observation["images"][name] if name else observation["state"]))[None]
                for name in ("top", "wrist", "")
            )
            actions = self._policy(top, wrist, state.float())[0].numpy()
        return {"actions": actions, "policy_timing": {"infer_ms": 1e3 * (time.monotonic() - began)}}


async def built(policy: InProcess) -> None:
    """Serve as openpi's server does."""

    async def handle(connection: ServerConnection) -> None:
        await connection.send(packb({}))
        async for message in connection:
            answer = policy.infer(unpackb(message))
            await connection.send(packb({**answer, "server_timing": answer["policy_timing"]}))

    async with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


async def theirs(policy: InProcess, openpi: Path) -> None:
    """Serve with openpi's own server."""
    sys.path.insert(0, str(openpi / "packages/openpi-client/src"))
    file = openpi / "src/openpi/serving/websocket_policy_server.py"
    spec = importlib.util.spec_from_file_location("websocket_policy_server", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = asyncio.create_task(module.WebsocketPolicyServer(policy, "127.0.0.1", port, {}).run())
    while not server.done():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        print(port, flush=True)
        break
    await server


if __name__ == "__main__":
    policy = InProcess(*map(int, sys.argv[1:4]))
    asyncio.run(theirs(policy, Path(sys.argv[4])) if len(sys.argv) > 4 else built(policy))
