"""Other replay libraries, each driven as its documentation has it."""

# ruff: noqa: B023  (the calls are made before their loop turns)

from __future__ import annotations

from typing import Any

import numpy as np
from measure import BATCH, Rows, rate


def sb3(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    box = gym.spaces.Box(-1, 1, shape["o"], np.float32), gym.spaces.Box(-1, 1, shape["a"], np.float32)
    out = {}
    for n in (1, BATCH):
        buffer = ReplayBuffer(capacity, *box, device="cpu", n_envs=n, handle_timeout_termination=False)
        for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones):
            array[:] = 1
        infos: list[dict[str, Any]] = [{}] * n
        if n == 1:
            single = [{k: v[None] for k, v in row.items()} for row in rows.single]

            def add(i: int, buffer: Any = buffer, infos: Any = infos) -> None:
                row = single[i % BATCH]
                buffer.add(row["o"], row["n"], row["a"], row["r"], row["d"], infos)

            out["add 1"] = rate(add, 1, seconds)
            buffer.full = True
            out["sample 256, fresh"] = rate(lambda i, buffer=buffer: buffer.sample(BATCH), BATCH, seconds)
        else:
            m = rows.many
            out["add 256"] = rate(
                lambda i, b=buffer: b.add(m["o"], m["n"], m["a"], m["r"], m["d"], infos), BATCH, seconds
            )
    return out


def cpprb(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    spec = {k: {"shape": s or 1, "dtype": np.float32} for k, s in shape.items()}
    plain = ReplayBuffer(capacity, spec)
    for _ in range(capacity // BATCH + 1):
        plain.add(**rows.many)
    out = {
        "add 1": rate(lambda i: plain.add(**rows.single[i % BATCH]), 1, seconds),
        "add 256": rate(lambda i: plain.add(**rows.many), BATCH, seconds),
        "sample 256, fresh": rate(lambda i: plain.sample(BATCH), BATCH, seconds),
    }
    ranked = PrioritizedReplayBuffer(capacity, spec)
    for _ in range(capacity // BATCH + 1):
        ranked.add(**rows.many)
    errors = np.random.default_rng(2).random(BATCH, np.float32)

    def both(_: int) -> None:
        batch = ranked.sample(BATCH)
        ranked.update_priorities(batch["indexes"], errors)

    out["prioritized, fresh"] = rate(both, BATCH, seconds)
    return out


def torchrl(shape: Any, capacity: int, rows: Rows, seconds: float, kind: str = "tensors") -> dict[str, float]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )

    storage = LazyMemmapStorage(capacity) if kind == "memmap" else LazyTensorStorage(capacity)
    many = TensorDict({k: torch.from_numpy(v) for k, v in rows.many.items()}, [BATCH])
    if kind == "prioritized":
        buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH)
    else:
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    single = [many[i] for i in range(BATCH)]
    # All pages touched, in large pieces: small ones would take minutes.
    pieces = max(1, min(capacity, 65_536 if capacity > 100_000 else 2048) // BATCH)
    fill = torch.cat([many] * pieces)
    for _ in range(capacity // len(fill) + 1):
        buffer.extend(fill)
    if kind == "prioritized":
        errors = torch.rand(BATCH)

        def both(_: int) -> None:
            batch = buffer.sample()
            batch.set("td_error", errors)
            buffer.update_tensordict_priority(batch)

        return {"prioritized, fresh": rate(both, BATCH, seconds)}
    return {
        "add 1": rate(lambda i: buffer.add(single[i % BATCH]), 1, seconds),
        "add 256": rate(lambda i: buffer.extend(many), BATCH, seconds),
        "sample 256, fresh": rate(lambda i: buffer.sample(), BATCH, seconds),
    }


def reverb(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    """A server in this process, as its documentation has it; rows are items of one step, flushed every 64."""
    import reverb
    import tensorflow as tf

    capacity = min(capacity, 50_000)  # a million single rows would take minutes
    signature = {k: tf.TensorSpec(s, tf.float32) for k, s in shape.items()}

    def table(name: str, sampler: Any) -> Any:
        return reverb.Table(
            name, sampler, reverb.selectors.Fifo(), capacity, reverb.rate_limiters.MinSize(1), signature=signature
        )

    server = reverb.Server(
        [table("uniform", reverb.selectors.Uniform()), table("prioritized", reverb.selectors.Prioritized(0.6))],
        port=None,
    )
    address = f"127.0.0.1:{server.port}"
    client = reverb.Client(address)
    out = {}

    def adding(name: str) -> Any:
        writer = client.trajectory_writer(num_keep_alive_refs=1)

        def add(i: int) -> None:
            writer.append(rows.single[i % BATCH])
            writer.create_item(name, 1.0, {k: v[-1] for k, v in writer.history.items()})
            if i % 64 == 63:
                writer.flush()

        return writer, add

    for name in ("uniform", "prioritized"):
        writer, add = adding(name)
        for i in range(8192):
            add(i)
        writer.flush()
        if name == "uniform":
            out["add 1"] = rate(add, 1, seconds)
            writer.flush()
        writer.close()
        data = reverb.TrajectoryDataset.from_table_signature(
            address, name, max_in_flight_samples_per_worker=2 * BATCH, num_workers_per_iterator=2
        )
        batches = iter(data.batch(BATCH).prefetch(2))
        errors = np.random.default_rng(2).random(BATCH)

        def both(_: int, name: str = name, batches: Any = batches, errors: Any = errors) -> None:
            keys = next(batches).info.key.numpy()
            if name == "prioritized":
                client.mutate_priorities(name, dict(zip(keys.tolist(), errors.tolist(), strict=True)))

        out["prioritized, fresh" if name == "prioritized" else "sample 256, fresh"] = rate(both, BATCH, seconds)
    return out
