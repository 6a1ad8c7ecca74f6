"""Where this installation comes from: the source revision, and the command that adds optional packages to it."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@functools.cache
def source_revision() -> str | None:
    """Return the git commit: from JURYBOX_REVISION, the install's record (PEP 610), or the source tree."""
    if given := os.environ.get("JURYBOX_REVISION"):
        return given
    record = _record()
    if commit := record.get("vcs_info", {}).get("commit_id"):
        return str(commit)
    url = urlsplit(record.get("url", ""))
    editable = record.get("dir_info", {}).get("editable") and url.scheme == "file"
    return checked_out(Path(unquote(url.path)) / ".git") if editable else None


def _record() -> dict[str, Any]:
    """Return the install's record (PEP 610); empty if there is none, as after an installation from an index."""
    try:
        found = json.loads(distribution("jurybox").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this jurybox, for messages.

    It never names the bare package: until the first release, that name on a package index may be anybody's.

    >>> install_command("grpc")
    "pip install -c constraints.txt '.[grpc]' in a clone of jurybox (docs/install.md)"
    """
    record = _record()
    url = urlsplit(str(record.get("url", "")))
    path = Path(unquote(url.path))
    if url.scheme == "file" and path.is_dir() and (path / "constraints.txt").is_file():
        editable = "-e " if record.get("dir_info", {}).get("editable") else ""
        return f"pip install -c {shlex.quote(f'{path}/constraints.txt')} {editable}{shlex.quote(f'{path}[{extra}]')}"
    if url.scheme == "file" and path.is_file():
        return f"pip install {shlex.quote(f'{path}[{extra}]')}"
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of jurybox (docs/install.md)"


def checked_out(git: Path) -> str | None:
    """Return the commit of a .git folder, or of the .git file of a worktree; None if it cannot be read."""
    try:
        if git.is_file():
            git = git.parent / git.read_text().strip().removeprefix("gitdir: ")
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        name = head.removeprefix("ref: ")
        common = git / "commondir"  # a worktree has its own HEAD, and the branches of its repository
        if common.is_file():
            git = git / common.read_text().strip()
        loose = git / name
        if loose.is_file():
            commit = loose.read_text().strip()
            return commit if _COMMIT.fullmatch(commit) else None
        for line in (git / "packed-refs").read_text().splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name and _COMMIT.fullmatch(commit):
                return commit
    except OSError:
        return None
    return None
