"""What is claimed for a platform, a version or an extra is run somewhere, or docs/install.md says when it last was."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "install.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE, CI = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
# Of the tables under this heading: what is claimed, what runs it, and when it was run.
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.split("## What is run, and where")[1].split("README's two commands")[0].splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| platform |", "| extra |"))
]


def script(name: str):
    """A module of .ci/."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets_of_ci() -> set[str]:
    """The targets that .ci/run makes, and those that these need."""
    found = set(re.findall(r"^make ([\w-]+)(?: \|\| once_more.*)?$", CI, re.MULTILINE))
    while (
        more := {
            need
            for target in found
            for line in re.findall(rf"^{target}:([^#\n]*)", MAKEFILE, re.MULTILINE)
            for need in re.findall(r"[a-z][\w-]*", line)
        }
        - found
    ):
        found |= more
    return found


def test_every_extra_is_a_row() -> None:
    named = {extra for claimed, _, _ in ROWS for extra in re.findall(r"`\[(\w+)\]`", claimed)}
    assert named == set(PYPROJECT["project"]["optional-dependencies"])


def test_every_platform_is_a_row() -> None:
    claimed = "\n".join(first for first, _, _ in ROWS)
    linux = PYPROJECT["tool"]["cibuildwheel"]["linux"]["archs"]
    assert all(f"Linux on {arch.replace('_', '-')}" in claimed for arch in linux)
    for system in ("Linux", "macOS", "Windows"):
        assert system in (ROOT / "README.md").read_text() and system in claimed
    for tag in PYPROJECT["tool"]["cibuildwheel"]["build"]:
        free, version = tag.endswith("t-*"), re.sub(r"cp3(\d+)t?-.*", r"3.\1", tag)
        rows = [first for first, _, _ in ROWS if first.startswith("free-threaded Python" if free else "Python")]
        assert any(version in first for first in rows), tag


def test_every_row_names_a_target_and_a_time() -> None:
    assert len(ROWS) > 20
    in_ci = targets_of_ci()
    for claimed, runs, when in ROWS:
        targets = re.findall(r"`make ([\w-]+)`", runs)
        assert targets or (ROOT / runs.strip("`")).exists(), claimed
        assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets), claimed
        assert when.startswith(("CI", "never")) or re.match(r"2\d{3}-\d\d-\d\d", when), claimed
        assert not when.startswith("CI") or set(targets) & in_ci, f"CI does not run {targets}: {claimed}"


def test_the_pythons_that_are_named_are_those_that_are_tried() -> None:
    tried = script("pythons")
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PYPROJECT["project"]["classifiers"]))
    assert classified == list(tried.VERSIONS)
    server = [version for version in tried.VERSIONS if tried.minor(version) >= tried.SERVER_FROM]
    training = [version for version in server if version not in tried.WITHOUT_TRAINING]
    told = f"Python {', '.join(training[:-1])} or {training[-1]}"
    for page in ("README.md", "docs/start.md"):
        assert told in (ROOT / page).read_text(), page
    assert f"| Python | {tried.VERSIONS[0]} to {tried.VERSIONS[-1]} | {training[0]} to {training[-1]}" in PAGE
    rows = {first.partition(":")[0] for first, _, _ in ROWS if first.startswith("Python")}
    assert {version for first in rows for version in re.findall(r"3\.\d+", first)} == set(classified)


def test_results_on_fresh_machines_replace_older_ones(tmp_path, monkeypatch) -> None:
    fresh = script("fresh")
    assert [fresh.named_minutes((ROOT / "README.md").read_text(), command) for command in ("demo", "test")] == [3, 10]
    page = tmp_path / "install.md"
    head = "| machine | command | date, commit | result | took | README |\n| --- | --- | --- | --- | --- | --- |"
    old = "| Debian 12 (12.1), Python 3.11.2 | `make demo` | 2026-01-01, abc | passed | 1.0 min | 3 min |"
    page.write_text(f"before\n{fresh.FIRST}\n\n{head}\n{old}\n\n{fresh.LAST}\nafter\n")
    monkeypatch.setattr(fresh, "PAGE", page)
    new, other = old.replace("passed", "**failed** (2)"), old.replace("Debian 12", "Debian 13").replace("12.1", "13.1")
    fresh.list_on_page({("13", "demo"): other})
    fresh.list_on_page({("12", "demo"): new})
    assert page.read_text() == f"before\n{fresh.FIRST}\n\n{head}\n{new}\n{other}\n\n{fresh.LAST}\nafter\n"
    assert fresh.FIRST in PAGE and fresh.LAST in PAGE


def test_a_machine_without_what_fresh_roots_need_is_told(monkeypatch) -> None:
    fresh = script("fresh")
    monkeypatch.setattr(fresh.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fresh.py"])
    with pytest.raises(SystemExit, match="mmdebstrap"):
        fresh.main()
