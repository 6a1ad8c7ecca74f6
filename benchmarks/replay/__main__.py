"""All of the replay's benchmark: throughput, writers, files; then the goals.

usage: python -m benchmarks.replay [--peers-dir DIR]
Needs the peers of `python -m benchmarks.replay.install`; who is missing is left out and named. Takes under ten
minutes and writes benchmarks/replay/results/.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.replay import files, goals, throughput, writers
from benchmarks.replay.install import DEFAULT_DIR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    peers = ["--peers-dir", str(parser.parse_args().peers_dir)]
    begin = time.perf_counter()
    found = goals.of_throughput(throughput.main(peers))
    found += goals.of_writers(writers.main(peers))
    found += goals.of_files(files.main(peers))
    missed = goals.report(found)
    print(f"took {time.perf_counter() - begin:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
