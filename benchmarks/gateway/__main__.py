"""The gateway's gRPC beside Triton's Python backend: one vector row a request, closed-loop tritonclient processes.

    python -m benchmarks.gateway [--clients 1,4,16] [--rounds 3] [--window 5] [...]

The serving benchmark (benchmarks/serving) with these contenders, interleaved; it has the same options.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.serving.__main__ import main

CONTENDERS = "jurybox-grpc,jurybox-grpc-client,triton-grpc,jurybox-grpc-shm,triton-shm"
DEFAULTS = {
    "--only": CONTENDERS,
    "--case": "vector",
    "--clients": "16",
    "--out": str(Path(__file__).with_name("results")),
}

if __name__ == "__main__":
    for option, value in DEFAULTS.items():
        if option not in sys.argv:
            sys.argv += [option, value]
    sys.exit(main())
