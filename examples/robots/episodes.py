"""Episodes of the swing-up, driven by a policy in this process, or by robots through a server's websocket."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from act_policy import EXECUTED, MAX_BATCH
from swing_up import STEPS, SwingUp
from websockets.sync.client import connect

from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb  # openpi-client's msgpack_numpy does as well


def drive(ask, seed):
    """One episode: the return, and whether it ends upright. `ask` gives a chunk for an observation."""
    env, total = SwingUp(), 0.0
    observation, _ = env.reset(seed=seed)
    for _ in range(0, STEPS, EXECUTED):
        for action in ask(observation)[:EXECUTED]:
            observation, reward, *_ = env.step(action)
            total += float(reward)
    return total, env.success


def in_process(policy, seed):
    """One episode with answers made here, in batches of the size that a `deterministic` model is compared with."""

    @torch.inference_mode()
    def ask(observation):
        rows = {name: np.zeros((MAX_BATCH, *value.shape), value.dtype) for name, value in observation.items()}
        for name, value in observation.items():
            rows[name][0] = value
        return policy(**{name: torch.from_numpy(value) for name, value in rows.items()})[0].numpy()

    return drive(ask, seed)


def by_websocket(where, seeds, robots):
    """The episodes of these seeds, driven by so many robots at once, as clients of openpi's protocol."""

    def robot(mine):
        with connect(f"ws://{where}", compression=None, proxy=None) as connection:
            unpackb(connection.recv(60))  # the server's metadata

            def ask(observation):
                connection.send(packb(observation))
                answer = connection.recv(60)
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                return unpackb(answer)["actions"]

            return [drive(ask, seed) for seed in mine]

    with ThreadPoolExecutor(robots) as pool:
        parts = list(pool.map(robot, [seeds[at::robots] for at in range(robots)]))
    return [parts[at % robots][at // robots] for at in range(len(seeds))]
