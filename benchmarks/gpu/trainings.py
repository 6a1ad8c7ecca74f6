"""Short trainings with and without the device: whether they run there, and how many steps a second they make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from benchmarks.gpu.measure import Found, Setup

# Flags of a training; of a rehearsal; of its learner on the device. The photo editor's policy is small and stays on the
# CPU: there it is the juror, in the private server, that is on the device.
_TRAININGS: dict[str, tuple[list[str], list[str], str]] = {
    "photo": (
        ["--steps", "2048", "--seconds", "20", "--damages", "2", "--workers", "8"],
        ["--steps", "64", "--seconds", "20", "--damages", "2", "--workers", "2", "--rollout", "64"],
        "",
    ),
    "hockey": (
        ["--steps", "12000", "--seconds", "20", "--workers", "4", "--envs", "32", "--learning-starts", "1000"],
        ["--steps", "400", "--workers", "1", "--envs", "2", "--learning-starts", "100"],
        "device",
    ),
    "gym": (
        ["--algorithm", "sac", "--env", "Pendulum-v1", "--steps", "6000", "--envs", "4", "--workers", "2"],
        ["--algorithm", "dqn", "--env", "CartPole-v1", "--steps", "200", "--learning-starts", "100"],
        "device",
    ),
}
_BOUND = 75.0  # seconds of one run


def _run(at: Setup, found: Found, name: str) -> None:
    full, quick, setting = _TRAININGS[name]
    places = ["cpu", at.device] if at.gpu else ["cpu"]
    for place in places:
        label = "gpu" if place.startswith("cuda") else "cpu"
        folder = at.folder / f"{name}-{label}"
        command = [sys.executable, "-m", "jurybox.server.cli", "train", name, "--out", str(folder)]
        command += quick if at.quick else full
        if setting and label == "gpu":
            command += ["--set", f'{setting}="{place}"']
        nobody = at.folder / f"runtime-{name}"  # without a server, so that photo starts its own
        nobody.mkdir(mode=0o700, exist_ok=True)
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(nobody)}
        if label == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(_BOUND)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it writes its results
            code = _end(process)
        summary: dict[str, Any] = {}
        file = folder / "summary.json"
        if file.exists():
            summary = json.loads(file.read_text())
        if code or not summary.get("seconds") or not summary.get("env_steps"):
            raise RuntimeError(f"train {name} on {place} ended with {code}; its summary: {summary or 'none'}")
        found.figures[f"{label}_steps_per_s"] = summary["env_steps"] / summary["seconds"]
        found.figures[f"{label}_learner_steps_per_s"] = (summary.get("learner_steps") or 0) / summary["seconds"]
        found.figures[f"{label}_seconds"] = summary["seconds"]
    if at.gpu:
        found.figures["gpu_over_cpu"] = found.figures["gpu_steps_per_s"] / found.figures["cpu_steps_per_s"]
    found.notes.append("steps a second of the whole training, start included; so short a run says little of learning")


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(15.0)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(10.0)


def photo(at: Setup, found: Found) -> None:
    """The photo editor: PPO on the CPU, the juror in a private server."""
    _run(at, found, "photo")


def hockey(at: Setup, found: Found) -> None:
    """Hockey: TD3's learner on the device, collectors on the CPU."""
    _run(at, found, "hockey")


def gym(at: Setup, found: Found) -> None:
    """Pendulum with SAC: the learner on the device."""
    _run(at, found, "gym")
