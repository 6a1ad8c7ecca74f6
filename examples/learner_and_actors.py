"""A learner in one process publishes to actors in others: evolution strategies (Salimans et al., 2017) on CartPole.

Weights go through a channel in shared memory, results come back through a replay: no server, no torch in actors.
"""

import argparse
import multiprocessing
import os
import time

import gymnasium as gym
import numpy as np

from jurybox.client import Publisher, WeightsReader
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.training.replay import Field, Replay
from jurybox.training.replay.cursor import Cursor

HIDDEN, SIGMA, RATE, PAIRS = 16, 0.3, 0.3, 24
FIELDS = {"seed": Field((), "int64"), "version": Field((), "int32"), "up": Field(), "down": Field()}


def episode(env: gym.Env, theta: np.ndarray) -> float:
    into, out = theta[: HIDDEN * 4].reshape(HIDDEN, 4), theta[HIDDEN * 4 :].reshape(2, HIDDEN)
    (observation, _), total, over = env.reset(), 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(int((out @ np.tanh(into @ observation)).argmax()))
        total, over = total + float(reward), terminated or truncated
    return total


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=HIDDEN * 6)  # it depends only on the seed


def act(number: int, channel: str, replay: str) -> None:
    env, random = gym.make("CartPole-v1"), np.random.default_rng(number)
    with WeightsChannel.attach(channel) as opened, Replay.attach(replay) as rows:
        reader = WeightsReader(opened)
        while True:
            weights = reader.read(timeout=60)  # the newest, whole
            if weights.extra["over"]:
                return
            seed = int(random.integers(2**31))
            up, down = (episode(env, weights.state["theta"] + sign * SIGMA * noise(seed)) for sign in (1, -1))
            rows.add(seed=seed, version=weights.version, up=up, down=down)


def main(generations: int, actors: int) -> None:
    theta, lags, returns, name = np.zeros(HIDDEN * 6, np.float32), [], [], f"es-{os.getpid()}"
    made = WeightsChannel.create(segment_name(name, "weights"), WeightsLayout.of({"theta": theta}))
    with made as channel, Replay.create(name, 4096, FIELDS) as replay, Publisher(channel) as publisher:
        cursor, spawn = Cursor(replay), multiprocessing.get_context("spawn").Process
        running = [spawn(target=act, args=(number, channel.name, name), daemon=True) for number in range(actors)]
        [actor.start() for actor in running]
        for _ in range(generations):
            publisher.publish({"theta": theta}, extra={"over": False})
            came = []
            while len(came) < PAIRS:
                assert all(actor.is_alive() for actor in running), "an actor has ended"
                time.sleep(0.002)
                came += zip(*cursor.take().values(), strict=True)
            seeds, versions, up, down = map(np.array, zip(*came, strict=True))
            lags.append(publisher.version - versions.mean())
            returns.append((up + down).mean() / 2)
            gains = (up - down) / max(np.std([up, down]), 1.0)
            theta += RATE * (gains @ np.stack([noise(seed) for seed in seeds]) / len(seeds)).astype(np.float32)
        publisher.publish({"theta": theta}, extra={"over": True})
        [actor.join(60) for actor in running]
    print(f"{actors} actors, {replay.added} rows; weights were {np.mean(lags):.1f} versions old on average")
    print(f"mean return: first generation {returns[0]:.1f}, last {returns[-1]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=40)
    parser.add_argument("--actors", type=int, default=2)
    main(**vars(parser.parse_args()))
