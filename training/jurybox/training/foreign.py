"""Code that is not ours: finding the module in which a user's environment or algorithm is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def imported(module: str) -> ModuleType:
    """Import a module; also find those in the current folder, as ``python -m`` does."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        folder = str(Path.cwd())
        if error.name != module.partition(".")[0] or folder in sys.path:
            raise
        sys.path.append(folder)  # also for processes that this one starts
        return importlib.import_module(module)
