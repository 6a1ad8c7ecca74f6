"""All of the replay's benchmark, or parts of it; then the goals, from new and earlier measurements.

usage: python -m benchmarks.replay [PART ...] [--rounds N] [--peers-dir DIR]
Parts: "throughput large", "throughput small", "writers large", "writers small", "files ordinary", "files huge",
"files others"; all of them without one. Each takes one to three minutes and is kept in benchmarks/replay/results/.
Needs the peers of `python -m benchmarks.replay.install`; missing ones are left out and named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.replay import files, goals, throughput, writers
from benchmarks.replay.install import DEFAULT_DIR

PARTS: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {
    "throughput large": (throughput.main, ["--sizes", "large"]),
    "throughput small": (throughput.main, ["--sizes", "small"]),
    "writers large": (writers.main, ["--sizes", "large"]),
    "writers small": (writers.main, ["--sizes", "small"]),
    "files ordinary": (files.main, ["--parts", "ordinary"]),
    "files huge": (files.main, ["--parts", "huge"]),
    "files others": (files.main, ["--parts", "others"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rounds = [] if options.rounds is None else ["--rounds", str(options.rounds)]
    begin = time.perf_counter()
    for name in options.parts or PARTS:
        run, arguments = PARTS[name]
        run([*arguments, *rounds, "--peers-dir", str(options.peers_dir)])
    missed = goals.report()
    print(f"took {time.perf_counter() - begin:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
