"""The source revision of this build."""

from __future__ import annotations

import functools
import json
import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@functools.cache
def source_revision() -> str | None:
    """Return the git commit: from JURYBOX_REVISION, the install's record (PEP 610), or the source tree."""
    if given := os.environ.get("JURYBOX_REVISION"):
        return given
    try:
        record = json.loads(distribution("jurybox").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    if commit := record.get("vcs_info", {}).get("commit_id"):
        return str(commit)
    url = urlsplit(record.get("url", ""))
    editable = record.get("dir_info", {}).get("editable") and url.scheme == "file"
    return checked_out(Path(unquote(url.path)) / ".git") if editable else None


def checked_out(git: Path) -> str | None:
    """Return the commit that is checked out in a .git folder; None if it cannot be read."""
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if _COMMIT.fullmatch(head) else None
        name = head.removeprefix("ref: ")
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
