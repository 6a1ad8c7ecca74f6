"""How long other libraries take to save and load, as JSON.

usage: python saving.py NAME ROWS FOLDER
The rows are observation, action, reward, next observation and done of 49,156 bytes, like a chess sample mostly zero.
Saving ends with an fsync; loading begins with an empty cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import BATCH, SHAPES

SHAPE = SHAPES["large"]


def sparse() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {k: (rng.random((BATCH, *s), np.float32) < 0.02).astype(np.float32) for k, s in SHAPE.items()}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def timed(save: Callable[[], Any], load: Callable[[], Any], folder: Path) -> None:
    begin = time.perf_counter()
    save()
    for path in files(folder):
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    saved = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in files(folder))
    begin = time.perf_counter()
    load()
    print(json.dumps({"save": saved, "load": time.perf_counter() - begin, "bytes": size}), flush=True)


def numpy_ring(n: int, folder: Path) -> None:
    ring = {k: np.concatenate([v] * (n // BATCH + 1))[:n] for k, v in sparse().items()}
    timed(
        lambda: [np.save(folder / f"{k}.npy", v) for k, v in ring.items()],
        lambda: {k: np.load(folder / f"{k}.npy") for k in ring},
        folder,
    )


def sb3(n: int, folder: Path) -> None:
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

    box = gym.spaces.Box(-1, 1, SHAPE["o"], np.float32), gym.spaces.Box(-1, 1, SHAPE["a"], np.float32)
    buffer = ReplayBuffer(n, *box, device="cpu", handle_timeout_termination=False)
    rows = sparse()
    for first in range(0, n, BATCH):
        count = min(BATCH, n - first)
        buffer.observations[first : first + count, 0] = rows["o"][:count]
        buffer.next_observations[first : first + count, 0] = rows["n"][:count]
    path = folder / "buffer.pkl"
    timed(lambda: save_to_pkl(path, buffer), lambda: load_from_pkl(path), folder)


def cpprb(n: int, folder: Path) -> None:
    from cpprb import ReplayBuffer

    spec = {k: {"shape": s or 1, "dtype": np.float32} for k, s in SHAPE.items()}
    buffer, rows = ReplayBuffer(n, spec), sparse()
    for _ in range(n // BATCH + 1):
        buffer.add(**rows)
    path = str(folder / "buffer.npz")

    def load() -> None:
        ReplayBuffer(n, spec).load_transitions(path)

    timed(lambda: buffer.save_transitions(path), load, folder)


def torchrl(n: int, folder: Path) -> None:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    many = TensorDict({k: torch.from_numpy(v) for k, v in sparse().items()}, [BATCH])
    fill = torch.cat([many] * 8)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(n), batch_size=BATCH)
    for _ in range(n // len(fill) + 1):
        buffer.extend(fill)

    def load() -> None:
        TensorDictReplayBuffer(storage=LazyTensorStorage(n), batch_size=BATCH).loads(folder / "buffer")

    timed(lambda: buffer.dumps(folder / "buffer"), load, folder)


def reverb(n: int, folder: Path) -> None:
    import reverb
    import tensorflow as tf

    signature = {k: tf.TensorSpec(s, tf.float32) for k, s in SHAPE.items()}

    def server() -> Any:
        table = reverb.Table(
            "rows",
            reverb.selectors.Uniform(),
            reverb.selectors.Fifo(),
            n,
            reverb.rate_limiters.MinSize(1),
            signature=signature,
        )
        weights_saver = reverb.checkpointers.DefaultCheckpointer(path=str(folder))
        return reverb.Server([table], port=None, checkpointer=weights_saver)

    running = server()
    client = reverb.Client(f"127.0.0.1:{running.port}")
    rows = sparse()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for i in range(n):
            writer.append({k: v[i % BATCH] for k, v in rows.items()})
            writer.create_item("rows", 1.0, {k: v[-1] for k, v in writer.history.items()})
            if i % 64 == 63:
                writer.flush()
    timed(client.checkpoint, server, folder)


PEERS = {
    "NumPy ring": (numpy_ring, ""),
    "SB3": (sb3, ""),
    "cpprb": (cpprb, "cpprb"),
    "TorchRL": (torchrl, "torchrl"),
    "Reverb": (reverb, "reverb"),
}

if __name__ == "__main__":
    PEERS[sys.argv[1]][0](int(sys.argv[2]), Path(sys.argv[3]))
