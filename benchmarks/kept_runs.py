"""Long runs, each a row of a CSV file: existing rows are not run again."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def known(path: Path) -> list[dict[str, str]]:
    """The rows that are there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def keep(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row; the first one names the columns."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)
