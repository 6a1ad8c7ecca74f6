"""Checkpoints of a Stable-Baselines3 training: everything that going on needs, whole or not there at all.

One folder a checkpoint, ``checkpoints/step-000012000``: ``model.zip`` (policy, optimiser, settings and counters, as
SB3 saves them) and ``state.json`` (random states of this process and of every environment, and what the run counts
itself). It is written under another name and renamed, so a crash leaves the checkpoints before it.

What is not kept is the episode that every environment is in: a resumed run begins new ones.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.training.run_folder import CheckpointError, NoCheckpoint

_PREFIX = "step-"
KEPT = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was found.

    Attributes:
        env_steps: done when it was written.
        model: path of SB3's file.
        state: what `save` was given as `counted`, and the random states.
    """

    env_steps: int
    model: Path
    state: Mapping[str, Any]

    @property
    def counted(self) -> dict[str, Any]:
        return dict(self.state["counted"])


def save(folder: Path, model: BaseAlgorithm, counted: Mapping[str, Any]) -> Path:
    """Write a checkpoint of a model whose last update is complete; older ones than the newest three are removed.

    Args:
        folder: ``checkpoints/`` of the run.
        counted: further numbers, as JSON holds them.
    """
    assert model.env is not None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_PREFIX}{model.num_timesteps:09d}"
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        model.save(scratch / "model.zip")
        state = {"env_steps": model.num_timesteps, "counted": dict(counted), "random": _random_states(model.env)}
        (scratch / "state.json").write_text(json.dumps(state), encoding="utf-8")
        for path in (*scratch.iterdir(), scratch):
            _sync(path)
        scratch.chmod(0o755)
        if target.exists():  # of this very step: the one before it is there, should this be interrupted
            _remove(target)
        scratch.rename(target)
        _sync(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    for old in _found(folder)[:-KEPT]:
        _remove(old)
    return target


def sweep(folder: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for path in folder.glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{_PREFIX}*"):
        if not (path / "state.json").exists():
            shutil.rmtree(path, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()  # first: what is half removed must not be taken for one
    shutil.rmtree(checkpoint)


def latest(folder: Path) -> Checkpoint:
    """The newest checkpoint.

    Raises:
        NoCheckpoint: there is none. CheckpointError: it is damaged.
    """
    found = _found(folder)
    if not found:
        raise NoCheckpoint(f"no checkpoint in {folder}: start without --resume")
    try:
        state = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(int(state["env_steps"]), found[-1] / "model.zip", state)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{found[-1]} cannot be read ({error}): remove it to go on from the one before"
        ) from error


def restore_random_states(checkpoint: Checkpoint, environments: VecEnv, fresh_seed: int) -> None:
    """Put this process's and the environments' random generators where they were.

    Where there are more environments than before, the additional ones are seeded from `fresh_seed` and their number.
    """
    states = checkpoint.state["random"]
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    for index in range(environments.num_envs):
        generator = np.random.default_rng((fresh_seed, index))
        if index < len(states["environments"]):
            generator.bit_generator.state = states["environments"][index]
        environments.set_attr("np_random", generator, indices=[index])


def _random_states(environments: VecEnv) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "environments": [generator.bit_generator.state for generator in environments.get_attr("np_random")],
    }


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if (path / "state.json").is_file())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
