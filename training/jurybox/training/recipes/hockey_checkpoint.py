"""Checkpoints of a hockey training: everything that going on exactly needs, whole or not there at all.

``checkpoints/last`` is a folder with ``state.pt`` (learner with optimisers, targets, counters and random state; the
pool's weights), ``state.json`` (counters, league, recent results) and ``replay.jbr``. ``checkpoints/best`` has the same
without the replay, which is large: it names where the replay of ``last`` is, and going on from it is not exact.
A folder is written under another name and takes the old one's place when all of it is on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jurybox.training.recipes.checkpoints import CheckpointError
from jurybox.training.replay import Replay

_REPLAY = "replay.jbr"


@dataclass(frozen=True, slots=True)
class HockeyCheckpoint:
    """One that was read.

    Attributes:
        counted: what `save` was given, from state.json.
        tensors: what `save` was given, from state.pt.
        replay: path of the replay's file; None where it is gone.
    """

    counted: dict[str, Any]
    tensors: dict[str, Any]
    replay: Path | None


def save(
    folder: Path, which: str, *, counted: Mapping[str, Any], tensors: Mapping[str, Any], replay: Replay | None
) -> Path:
    """Write checkpoint `which` ("last" or "best") in the place of the one of that name.

    Args:
        folder: ``checkpoints/`` of the run.
        counted: as JSON holds it.
        tensors: what torch.load(weights_only=True) reads again.
        replay: None leaves it out, and refers to that of "last".
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / which
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        if replay is not None:
            replay.save(scratch / _REPLAY)
        torch.save(dict(tensors), scratch / "state.pt")
        reference = _REPLAY if replay is not None else f"../last/{_REPLAY}"
        (scratch / "state.json").write_text(json.dumps({**counted, "replay": reference}), encoding="utf-8")
        for path in (*scratch.iterdir(), scratch):
            _sync(path)
        scratch.chmod(0o755)
        old = folder / f".old-{which}"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        scratch.rename(target)
        _sync(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return target


def read(folder: Path, which: str = "last") -> HockeyCheckpoint:
    """Read checkpoint `which` of the run whose ``checkpoints/`` is `folder`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    # A crash between the two renames of `save` leaves only the old one, under the name that it had for a moment.
    place = next((path for path in (folder / which, folder / f".old-{which}") if (path / "state.json").is_file()), None)
    if place is None:
        raise CheckpointError(f"no checkpoint {which!r} in {folder}: start without --resume")
    try:
        counted = json.loads((place / "state.json").read_text(encoding="utf-8"))
        tensors = torch.load(place / "state.pt", weights_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{place} cannot be read ({error}): remove it, and start anew or from 'best'") from error
    replay = place / counted["replay"]
    return HockeyCheckpoint(counted, tensors, replay if replay.exists() else None)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
