"""settings.json of a run: what it was told, so that it is never gone on with as another run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jurybox.training.recipes.checkpoints import CheckpointError
from jurybox.training.run_folder import write_atomically

_NAME = "settings.json"


# What a run leaves, but for what people may have put there themselves.
_LEFT = (
    "metrics.csv",
    "summary.json",
    "evaluation.csv",
    "workflows.csv",
    "report.html",
    "timeline.json",
    "tensorboard",
    "checkpoints",
    "pool",
)


def begin_anew(folder: Path, settings: Mapping[str, Any], may_change: Collection[str] | None) -> str:
    """Make room for a run that is to be resumed and was ended before its first checkpoint: it begins anew.

    What it had recorded until then is moved to a folder beside.

    Args:
        may_change: as `check_same`; None: everything may.

    Returns:
        What was done, in a sentence.

    Raises:
        CheckpointError: no run was begun there, or one with other settings.
    """
    left = [folder / name for name in _LEFT if (folder / name).exists()]
    if not left and not (folder / _NAME).exists():
        raise CheckpointError(f"no checkpoint in {folder}, and no run was begun there: start without --resume")
    if may_change is not None:
        check_same(folder, settings, may_change)
    said = (
        f"the run in {folder} was ended before its first checkpoint, so there is nothing to go on from: it begins anew"
    )
    if not left:
        return said
    number = 1
    while (before := folder / f"before-{number}").exists():
        number += 1
    before.mkdir()
    for path in left:
        path.rename(before / path.name)
    return f"{said}; what it had recorded is in {before}"


def write(folder: Path, settings: Mapping[str, Any]) -> None:
    write_atomically(folder / _NAME, json.dumps(settings, indent=2) + "\n")


def check_same(folder: Path, settings: Mapping[str, Any], may_change: Collection[str]) -> None:
    """Refuse to go on with settings that the run did not begin with.

    Args:
        may_change: names of those that may be different when a run is resumed.

    Raises:
        CheckpointError: another one is different.
    """
    path = folder / _NAME
    if not path.exists():
        return
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    now: dict[str, Any] = json.loads(json.dumps(settings))
    different = [
        f"{name} was {earlier[name]!r}, is {value!r}"
        for name, value in now.items()
        if name not in may_change and name in earlier and earlier[name] != value
    ]
    if different:
        raise CheckpointError(
            f"{folder} was trained with other settings ({'; '.join(different)}): give the same ones to go on, or "
            "another folder to start anew"
        )
