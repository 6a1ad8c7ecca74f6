"""Check whether this tree can be released: `make release-check`. Exit status 0: it can; 1: a line for each problem.

    .venv/bin/python .ci/release.py [--version 0.2.0] [--skip-build]

It checks that the version is valid for PyPI and newer than the last tag; that the changelog has a section for it, with
a date; that the tag does not name another commit; that nothing is uncommitted; that the lock has all requirements, in
the versions of constraints.txt; that the source distribution has exactly git's files; and that the wheels, built twice,
are the same bytes.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / ".ci" / "development.lock"
# Files that stay in git alone: those for hosting, and those that a build does not use.
NOT_IN_SDIST: set[str] = set()
ONLY_IN_SDIST = {"PKG-INFO"}
_DATED = re.compile(r"^## \[(?P<version>[^\]]+)\] - (?P<date>\S+)$", re.MULTILINE)


def git(*words: str) -> str:
    told = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else ""


def check_version(version: str, tags: list[str]) -> list[str]:
    """Of PyPI's form, and newer than every version that has a tag."""
    try:
        ours = Version(version)
    except InvalidVersion:
        return [f"version {version!r} is none by PEP 440"]
    if str(ours) != version:
        return [f"version {version!r} is spelled {str(ours)!r} by PEP 440"]
    released = [Version(tag.removeprefix("v")) for tag in tags if re.fullmatch(r"v\d[\w.]*", tag)]
    return (
        [f"version {version} is not newer than {newest}, which has a tag"]
        if (released and (newest := max(released)) > ours)
        else []
    )


def check_changelog(text: str, version: str, today: datetime.date) -> list[str]:
    """A section "## [version] - date", not in the future and not empty; an empty [Unreleased] above it."""
    sections = {found["version"]: found for found in _DATED.finditer(text)}
    if version not in sections:
        return [f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD': give [Unreleased] that name and its date"]
    wrong = []
    try:
        if datetime.date.fromisoformat(sections[version]["date"]) > today:
            wrong.append(f"CHANGELOG.md dates {version} in the future: {sections[version]['date']}")
    except ValueError:
        wrong.append(f"CHANGELOG.md dates {version} with {sections[version]['date']!r}: expected YYYY-MM-DD")
    body = text[sections[version].end() :].split("\n## ", maxsplit=1)[0]
    if not re.search(r"^- ", body, re.MULTILINE):
        wrong.append(f"CHANGELOG.md says nothing of {version}")
    return wrong


def check_tag(version: str, head: str, tagged: str) -> list[str]:
    """The tag vVERSION, if there is one already, is this commit."""
    return [f"the tag v{version} is {tagged[:12]}, not this commit {head[:12]}"] if tagged and tagged != head else []


def check_lock(lock: str, constraints: str) -> list[str]:
    """Every version in the lock is the one of constraints.txt, and has hashes."""
    pinned = dict(_pins(constraints))
    wrong = []
    for name, version in _pins(lock):
        if name in pinned and pinned[name] != version:
            wrong.append(f"the lock has {name} {version}, constraints.txt {pinned[name]}: make lock")
    entries = re.split(r"\n(?=[a-z0-9])", lock)
    wrong += [
        f"{entry.split()[0]} has no hash in the lock" for entry in entries if "==" in entry and "sha256:" not in entry
    ]
    return wrong


def asked_for(project: dict[str, Any]) -> set[str]:
    """The names of a development environment's requirements, of pyproject.toml's [project]."""
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in ("server", "training", "dev") for line in extras[extra])]
    return {_plain(re.split(r"[^\w.-]", line)[0]) for line in lines} - {_plain(project["name"])}


def check_locked(lock: str, asked: set[str]) -> list[str]:
    """All requirements are in the lock, except torch, which has several indexes."""
    there = {name for name, _ in _pins(lock)}
    return [f"the lock has no {name}: make lock" for name in sorted(asked - there - {"torch"})]


def check_sdist(names: set[str], tracked: set[str]) -> list[str]:
    """It has exactly git's files."""
    missing, more = tracked - names - NOT_IN_SDIST, names - tracked - ONLY_IN_SDIST
    return [f"not in the source distribution: {name}" for name in sorted(missing)] + [
        f"in the source distribution but not in git: {name}" for name in sorted(more)
    ]


def check_wheels(python: str | None) -> list[str]:
    """Built twice, from two source distributions, they are the same bytes."""
    sums = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in ("first", "second"):
            out = Path(folder) / turn
            command = [sys.executable, ROOT / ".ci" / "wheels.py", "--out", out]
            done = subprocess.run([*map(str, command), *(["--python", python] if python else [])], check=False)
            if done.returncode:
                return ["the wheels cannot be built, see above"]
            sums.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())})
        names = sdist_names(next((Path(folder) / "first").glob("*.tar.gz")))
    first, second = sums
    wrong = check_sdist(names, set(git("ls-files").splitlines()))
    return wrong + [f"{name} differs when it is built again" for name in first if first[name] != second.get(name)]


def sdist_names(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}


def _pins(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return [(_plain(name), version) for name, version in found]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["version"]
    parser.add_argument("--version", help="that is to be released; pyproject.toml must say the same")
    parser.add_argument("--skip-build", action="store_true", help="build nothing")
    parser.add_argument("--python", help="build for this one alone")
    given = parser.parse_args()
    version = given.version or declared
    wrong = [f"pyproject.toml says {declared}, not {version}"] if version != declared else []
    wrong += check_version(version, git("tag", "--list").splitlines())
    wrong += check_changelog((ROOT / "CHANGELOG.md").read_text(), version, datetime.datetime.now(datetime.UTC).date())
    wrong += check_tag(
        version, git("rev-parse", "HEAD"), git("rev-parse", "--verify", "--quiet", f"v{version}^{{commit}}")
    )
    wrong += [f"not committed: {line.split(maxsplit=1)[1]}" for line in git("status", "--porcelain").splitlines()]
    wrong += check_lock(LOCK.read_text(), (ROOT / "constraints.txt").read_text())
    wrong += check_locked(LOCK.read_text(), asked_for(project))
    if not given.skip_build:
        wrong += check_wheels(given.python)
    for line in wrong:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{version} is not ready\n" if wrong else f"{version} can be released\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
