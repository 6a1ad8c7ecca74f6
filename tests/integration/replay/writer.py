"""A writer process: stamps every field of every row with one number, until its stdin closes (or it is killed).

usage: writer.py NAME NUMBER ROWS_A_CALL ROWS (0: until stdin closes)
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from jurybox.training.replay import Replay


def main() -> None:
    name, number, rows, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    replay = Replay.attach(name, timeout=60)
    stop = threading.Event()
    if total == 0:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    specs = replay.layout.fields
    print("ready", flush=True)
    written = 0
    while not stop.is_set() and (total == 0 or written < total):
        # A stamp that float32 holds exactly and that no other writer uses.
        stamp = number * 1_000_000 + written % 1_000_000
        values = {n: np.full((rows, *spec.shape), stamp, spec.dtype) for n, spec in specs.items()}
        if rows == 1:
            replay.add(**{n: value[0] for n, value in values.items()})
        else:
            replay.extend(**values)
        written += rows
    print(written, flush=True)


if __name__ == "__main__":
    main()
