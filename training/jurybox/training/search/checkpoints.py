"""Checkpoints of a search, whole or not there at all: ``checkpoints/update-000120.pt``, the newest three.

A file holds what `WorkflowTrainer.state` returns and the random states of the environments, so with our own simulator a
resumed run does what it would have done. It is read without pickle's power to run code (torch's weights_only).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from jurybox.training.recipes.checkpoints import CheckpointError, NoCheckpoint

KEPT = 3


def save(folder: Path, update: int, state: Mapping[str, Any], random: Mapping[str, Any]) -> Path:
    """Write a checkpoint; older ones than the newest three are removed.

    Args:
        folder: ``checkpoints/`` of the run.
        random: as JSON holds it; integers may be of any size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"update-{update:06d}.pt"
    scratch = target.with_suffix(".writing")
    try:
        with scratch.open("wb") as file:
            torch.save({"state": dict(state), "random": json.dumps(random)}, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    for old in _found(folder)[:-KEPT]:
        old.unlink()
    return target


def latest(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and random states of the newest checkpoint.

    Raises:
        NoCheckpoint: there is none. CheckpointError: it cannot be read.
    """
    found = _found(folder)
    if not found:
        raise NoCheckpoint(f"no checkpoint in {folder}: start without --resume")
    try:
        content = torch.load(found[-1], weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{found[-1]} cannot be read ({error}): remove it to go on from the one before"
        ) from error
    return content["state"], json.loads(content["random"])


def _found(folder: Path) -> list[Path]:
    return sorted(folder.glob("update-*.pt"))
