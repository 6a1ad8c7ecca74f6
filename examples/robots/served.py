"""Train a small action chunking transformer, serve it to robots by websocket, and drive a hundred episodes.

``python examples/robots/served.py``: some minutes on two cores. The episodes are driven twice, with the policy in this
process and through the server's port, by eight robots at once. The seeds are the same and the model is `deterministic`,
so every episode must end alike.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from act_policy import MAX_BATCH, train
from episodes import by_websocket, in_process

from jurybox.client import connect

CONFIG = """
[server]
address = "ipc://{folder}/engine"
http = ""
grpc = ""
devices = ["cpu"]
threads = 1
[models.swing_up]
factory = "act_policy:act"
args = {{ weights = "{folder}/policy.pt" }}
max_batch = {max_batch}
deterministic = true
[robots.swing_up]
model = "swing_up"
listen = "127.0.0.1:0"
"""


@contextlib.contextmanager
def served(policy, folder):
    """A server with the policy; gives the host and port for robots."""
    torch.save(policy.state_dict(), folder / "policy.pt")
    (folder / "server.toml").write_text(CONFIG.format(folder=folder, max_batch=MAX_BATCH))
    command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(folder / "server.toml")]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}  # the folder of the factory
    server = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    try:
        with connect(f"ipc://{folder}/engine", timeout=100) as client:
            client.model("swing_up", rows=1, timeout=100).close()
            while (where := client.status()["server"]["robots"]["swing_up"]).endswith(":0"):
                time.sleep(0.05)  # the port is not open yet
            yield where
    finally:
        server.terminate()
        server.wait(30)


def main(demonstrations, steps, episodes):
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    began = time.perf_counter()
    policy = train(demonstrations, steps)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    torch.set_num_threads(1)  # as the engine: with another number the last bits may differ
    seeds = range(10_000, 10_000 + episodes)  # none of the demonstrations'
    here = [in_process(policy, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder, served(policy, Path(folder)) as where:
        there = by_websocket(where, seeds, robots=8)
    for name, results in (("in process", here), ("by websocket", there)):
        print(f"{name}: {sum(success for _, success in results)} of {episodes} episodes succeed")
    print(
        f"{sum(one == other for one, other in zip(here, there, strict=True))} of {episodes} are equal to the last bit"
    )
    return here, there


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demonstrations", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--episodes", type=int, default=100)
    main(**vars(parser.parse_args()))
