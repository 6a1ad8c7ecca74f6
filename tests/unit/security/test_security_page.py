"""docs/security.md promises only what a test shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()


def promises():
    """Every wall, with the files and tests that it names."""
    table = PAGE.partition("## Walls")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return {wall.strip(): re.findall(r"`([^`]*)`", tried) for wall, _, tried in rows[2:]}


def test_every_wall_names_tests_that_are_there():
    found = promises()
    assert len(found) > 20
    for wall, tests in found.items():
        file, named = None, 0
        for name in tests:
            path, _, test = name.partition("::")
            if path.startswith("tests/"):
                file = ROOT / path
                assert file.exists(), (wall, name)
                named += 1
            elif not test:
                continue  # a command, beside what it runs
            if test:
                assert file is not None and re.search(rf"def {test}\(", file.read_text()), (wall, name)
        assert named, f"{wall!r} names no test"
