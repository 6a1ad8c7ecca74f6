"""A module is short, or docs/architecture.md says what holds it together."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MOST = 400  # lines
# Generated, or a declaration of what is elsewhere.
NOT_OURS = re.compile(r"_pb2(_grpc)?\.py$|\.pyi$")


def long_modules() -> set[str]:
    found = set()
    for part, kinds in {"client": ".py", "server": ".py", "protos": ".py", "native": ".hpp .cpp"}.items():
        for path in (ROOT / part).rglob("*"):
            name = str(path.relative_to(ROOT))
            ours = path.suffix in kinds.split() and not NOT_OURS.search(name) and "native/tests" not in name
            if ours and len(path.read_text().splitlines()) > MOST:
                found.add(name)
    return found


def test_every_long_module_says_what_holds_it_together_and_none_says_so_in_vain() -> None:
    page = (
        (ROOT / "docs" / "architecture.md").read_text().split("## Modules of more than 400 lines")[1].split("\n## ")[0]
    )
    told = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, re.MULTILINE))
    assert told.keys() == long_modules(), "split it at a seam, or say in docs/architecture.md why it has none"
    assert all(len(why.split()) > 1 for why in told.values())
