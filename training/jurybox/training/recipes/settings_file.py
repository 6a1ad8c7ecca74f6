"""settings.json of a run: what it was told, so that it is never gone on with as another run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jurybox.training.recipes.checkpoints import CheckpointError
from jurybox.training.runlog import write_atomically

_NAME = "settings.json"


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
