"""The peer: a policy server as openpi's own, one observation to a forward, in the event loop of its websockets.

``python -m benchmarks.robots.upstream WIDTH LAYERS STEPS`` prints its port. As upstream's
src/openpi/serving/websocket_policy_server.py, but for the reader of messages, which is ours in both.
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np
import torch
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.robots.policies import made
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb


async def main(width: int, layers: int, steps: int) -> None:
    torch.set_num_threads(1)  # as many as the engine has on two cores
    policy = made(width, layers, steps)

    async def handle(connection: ServerConnection) -> None:
        await connection.send(packb({}))
        async for message in connection:
            observation = unpackb(message)
            began = time.monotonic()
            with torch.inference_mode():
                top, wrist, state = (
                    torch.from_numpy(np.array(observation["images"][name] if name else observation["state"]))[None]
                    for name in ("top", "wrist", "")
                )
                actions = policy(top, wrist, state.float())[0].numpy()
            infer = {"infer_ms": 1e3 * (time.monotonic() - began)}
            await connection.send(packb({"actions": actions, "policy_timing": infer, "server_timing": infer}))

    async with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:4])))
