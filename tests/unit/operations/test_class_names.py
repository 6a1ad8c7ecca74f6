"""A class name stands for one thing in the whole package, and "lane" is the name of few."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("protos", "client", "server", "training", "native")


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package / "jurybox").rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                    places[name].append(str(path.relative_to(ROOT)))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert not shared, "call one of them by what it is: the reader meets both"


# A client's; the gateway's, which its callers share; the native ones of gateway and relay; a lane's rings, and its
# record on the scoreboard.
LANES = {"Lane", "SharedLane", "FastLane", "RelayLane", "LaneRings", "LaneRecord"}


def test_six_classes_are_called_lanes() -> None:
    found = set()
    for path in [*(ROOT / "native").rglob("*.hpp"), *(ROOT / "native").rglob("*.cpp")]:
        if "tests" not in path.parts:
            found |= set(re.findall(r"^ *(?:class|struct) (\w*Lane\w*)", path.read_text(), re.MULTILINE))
    for package in PACKAGES:
        for path in (ROOT / package / "jurybox").rglob("*.py"):
            found |= set(re.findall(r"^class (\w*Lane\w*)", path.read_text(), re.MULTILINE))
    assert found == LANES, "name another by what it does with rows"
