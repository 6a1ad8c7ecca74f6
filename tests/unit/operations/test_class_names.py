"""A class name stands for one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("protos", "client", "server", "training", "native")


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package / "jurybox").rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                for node in ast.parse(path.read_text()).body:
                    if isinstance(node, ast.ClassDef):
                        places[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, "call one of them by what it is: the reader meets both"
