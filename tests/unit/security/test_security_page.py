"""docs/security.md promises only what a test shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()


PLACES = [ROOT / place for place in ("server/jurybox/server", "protos/jurybox", "client/jurybox", "")]


def promises():
    """Every protection, with its place, and the files and tests that it names."""
    table = PAGE.partition("## Protections")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    return [(wall.strip(), *(re.findall(r"`([^`]*)`", cell) for cell in rest)) for wall, *rest in rows[2:]]


def test_every_protection_is_where_the_page_says():
    for wall, where, _ in promises():
        for name in where:
            if "/" in name:
                assert any((place / name).exists() for place in PLACES), (wall, name)
            else:
                module, _, defined = name.partition(".")
                files = [file for place in PLACES[:-1] for file in place.rglob(f"{module}.py")]
                assert any(re.search(rf"def {defined}\(", file.read_text()) for file in files), (wall, name)


def test_every_wall_names_tests_that_are_there():
    found = promises()
    assert len(found) > 20
    for wall, _, tests in found:
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
