"""`jurybox demo policy`: a small policy on a server, asked by Python and curl, and shown on the live page.

It is PPO's for CartPole-v1: `jurybox train gym --env CartPole-v1 --algorithm ppo --steps 60000 --serial
--seed 3`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jurybox.training import interrupts
from jurybox.training.runtime.local_server import LocalServer

if TYPE_CHECKING:
    from jurybox.client import Model
    from jurybox.server.models import ServedModel

WEIGHTS = Path(__file__).with_name("policy_demo.safetensors")
_ENV = "CartPole-v1"
_PLAYS = 2.0  # seconds
_LONGEST = 20.0  # seconds that curl may take


def cartpole() -> ServedModel:
    """The factory of the policy: observation float32 (4,) to action int64, the better of left (0) and right (1)."""
    import torch
    from safetensors.torch import load_file

    from jurybox.protocol import TensorSpec
    from jurybox.server.models import ServedModel

    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
            self.logits = torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.logits(observation)
            return logits.argmax(-1)

    policy = Policy()
    policy.logits.load_state_dict(load_file(WEIGHTS))
    return ServedModel(policy, {"observation": TensorSpec("float32", (4,))}, {"action": TensorSpec("int64")})


def show(server: LocalServer, say: Callable[[str], None], *, seed: int = 0, seconds: float = _PLAYS) -> None:
    """Ask a server, on which `cartpole` is served, in both ways, and print what it answers.

    Args:
        say: prints a line.
        seed: of the first episode.
        seconds: to play episodes for.

    Raises:
        RuntimeError: the two answers differ.
    """
    import gymnasium

    with server.connect() as client, client.model("cartpole") as policy, gymnasium.make(_ENV) as env:
        say("Python   policy(observation)")
        returns, waits = _played(policy, env, seed, seconds)
        p50, p99 = np.percentile(waits, (50, 99)) * 1e6
        best = env.spec.max_episode_steps if env.spec is not None else 0
        say(f"         {len(returns)} episodes of {_ENV}: a return of {np.mean(returns):.0f} of {best} on average")
        rate = len(waits) / sum(waits)
        say(f"         {len(waits):,} actions, {rate:,.0f}/s; half of them within {p50:.0f} us, 99 % within {p99:.0f}")
        observation = env.reset(seed=seed)[0]
        action = int(policy(observation))
    say("")
    url, body = f"http://{server.http}/v2/models/cartpole/infer", _request(observation)
    say(f"curl     curl -s {url} -d {shlex.quote(body)}")
    answer = _posted(url, body)
    say(f"         {answer}")
    told = json.loads(answer)["outputs"][0]["data"][0]
    if told != action:
        raise RuntimeError(f"Python got the action {action}, curl {told}")
    say(f"         the action is {told} ({('left', 'right')[told]}), as over Python")
    say("")
    say(f"live     http://{server.http}/  requests, batches and delays as they happen; /metrics for Prometheus")


def _played(policy: Model, env: object, seed: int, seconds: float) -> tuple[list[float], list[float]]:
    """Play whole episodes for some seconds; return their returns, and the seconds of each answer."""
    returns: list[float] = []
    waits: list[float] = []
    until = time.monotonic() + seconds
    while not returns or time.monotonic() < until:
        interrupts.check()
        observation, total, over = env.reset(seed=seed + len(returns))[0], 0.0, False  # type: ignore[attr-defined]
        while not over:
            began = time.perf_counter()
            action = int(policy(observation))
            waits.append(time.perf_counter() - began)
            observation, reward, terminated, truncated, _ = env.step(action)  # type: ignore[attr-defined]
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    return returns, waits


def _request(observation: np.ndarray[Any, Any]) -> str:
    row = {
        "name": "observation",
        "shape": [1, 4],
        "datatype": "FP32",
        "data": [round(value, 4) for value in observation.tolist()],
    }
    return json.dumps({"inputs": [row]})


def _posted(url: str, body: str) -> str:
    """Post with curl; with Python where there is none."""
    if (curl := shutil.which("curl")) is not None:
        command = [curl, "-s", "--noproxy", "*", url, "-d", body]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LONGEST).stdout
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body.encode()), timeout=_LONGEST) as answer:
        text: str = answer.read().decode()
    return text
