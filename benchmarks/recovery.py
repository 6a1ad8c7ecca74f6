"""How long a client waits when the engine is killed: from kill -9 to the answer of the next engine.

    python -m benchmarks.recovery [--kills 20] [--standby] [--out FILE.md]

Each kill is the first of its server, because a second restart soon after waits half a second. In turn with them a bare
Python imports the modules of an engine, which is most of the wait; other load on the machine slows both down.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np
from tests.serving import serving

from benchmarks.replay.machine import description

_PATIENCE = 60.0  # seconds for an answer
_ON_STANDBY = 4.0  # seconds in which the one on standby has imported all it needs
_CASES: dict[str, tuple[str, np.ndarray]] = {
    "a small network": ("tests.models:affine", np.ones((1, 4), np.float32)),
    "the photo jury": ("jurybox.server.jurors:panel", np.zeros((1, 384, 384, 3), np.uint8)),
}


def waits(factory: str, row: np.ndarray, *, standby: bool) -> float:
    """Seconds from the kill of a server's engine to an answer."""
    settings = {"factory": factory, "max_batch": 32, "rows": 64}
    with (
        tempfile.TemporaryDirectory(prefix="jurybox-recovery-") as folder,
        serving(Path(folder), {"model": settings}, standby=standby) as server,
        server.connect() as client,
    ):
        model = client.model("model", rows=1)
        model.infer(row, timeout=_PATIENCE)
        if standby:
            time.sleep(_ON_STANDBY)
        engine = client.status()["engines"][0]["pid"]
        began = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        model.infer(row, timeout=_PATIENCE)
        return time.monotonic() - began


def importing() -> float:
    """Seconds in which Python starts and imports an engine's modules, torch above all."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import jurybox.server.engine.process"], check=True)
    return time.monotonic() - began


def table(taken: dict[str, list[float]], command: str) -> str:
    """Markdown."""
    lines = [
        "# From a kill to the next answer",
        "",
        f"{datetime.now():%Y-%m-%d}, {description()}; `{command}`; seconds.",
        "",
        "| of | times | least | median | worst |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, seconds in taken.items():
        figures = " | ".join(f"{each:.2f}" for each in (min(seconds), statistics.median(seconds), max(seconds)))
        lines.append(f"| {name} | {len(seconds)} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each model's server")
    parser.add_argument("--out", type=Path, help="a file for the table")
    parser.add_argument("--standby", action="store_true", help="with an engine on standby")
    options = parser.parse_args()
    bare = "the same imports in a bare Python"
    taken: dict[str, list[float]] = {}
    for _ in range(options.kills):
        for name, (factory, row) in _CASES.items():
            taken.setdefault(name, []).append(waits(factory, row, standby=options.standby))
        taken.setdefault(bare, []).append(importing())
    command = f"python -m benchmarks.recovery --kills {options.kills}{' --standby' if options.standby else ''}"
    text = table(taken, command)
    if options.out is not None:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
