"""A fleet: two learning rates with two seeds each learn CartPole at once, their policies on one server; who is better?

The server computes the policies of all four as one stacked forward where that pays (docs/weights.md), and each learner
publishes to its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RATES = ("0.0003", "0.001")


def main(steps: int, address: str | None) -> None:
    with tempfile.TemporaryDirectory() as out:
        train = [sys.executable, "-m", "jurybox.training.cli", "train", "gym", "--env", "CartPole-v1", "--out", out]
        several = ["--seeds", "0,1", "--vary", f"learning_rate=[{', '.join(RATES)}]", "--at-once", "4", "--serial"]
        small = ["--steps", str(steps), "--n-steps", "256", "--hidden", "32", "--evaluate-every", "0"]
        served = ["--policy", "served", *(["--server", address] if address else [])]
        subprocess.run([*train, *several, *small, *served], check=True)
        found = json.loads((Path(out) / "comparison.json").read_text())
    slow, fast = (found["interquartile_means"][f"learning_rate={rate}"]["mean"] for rate in RATES)
    print(f"interquartile mean return: with {RATES[0]} {slow:.1f}, with {RATES[1]} {fast:.1f}")
    for name, better in found["improvement"]["probabilities"].items():
        low, high = better["low"], better["high"]
        print(f"{name} is better with probability {better['mean']:.2f}, 95 % interval {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--server", help="address of one that runs; without it a private one is started")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.server)
