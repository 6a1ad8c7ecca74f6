"""The packages' source files, each parsed once for all tests of a process that look into it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for part in ("protos", "client", "server", "training")
    for path in sorted((ROOT / part / "jurybox").rglob("*.py"))
]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; it must be left unchanged."""
    return ast.parse(path.read_text(encoding="utf-8"))
