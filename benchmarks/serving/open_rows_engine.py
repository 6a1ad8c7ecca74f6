"""What open rows cost the engine alone: CPU time of a batch beside the same forward with rows of a fixed shape.

    python -m benchmarks.serving.open_rows_engine [--rounds 15] [--only vector,memory]

One process and one thread, no clients: batches of tickets go to the served model as the engine's loop hands them over.
The two sides take turns; the ratio is the median of their pairs', so other programs on the machine weigh on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.serving import open_models
from jurybox.protocol.arena import Columns
from jurybox.protocol.scoreboard import LANE
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.engine.served import Served

LANES, LANE_ROWS, MAX_BATCH = 16, 8, 64
CASES = {  # name: model, tickets, rows of each, batches a round
    "vector": ("vector", 8, 1, 400),
    "image": ("image", 1, 1, 30),
    "images": ("image", 4, 1, 15),
    "text": ("text", 8, 1, 300),
    "sessions": ("memory", 8, 8, 60),
    "sessions, one client": ("memory", 1, 8, 200),
    "deterministic": ("vector", 8, 1, 300),
}


def _batch(case: str, *, open_: bool) -> tuple[Callable[[], None], int]:
    """A call that computes one batch, and its rows."""
    name, tickets, each, _ = CASES[case]
    deterministic = case == "deterministic"
    model = getattr(open_models, name)(open_=open_ and not deterministic)
    spec = model.spec(name)
    columns = Columns.here(spec, LANES * LANE_ROWS)
    lanes = np.zeros(LANES, LANE)
    lanes["lease"], lanes["first"], lanes["rows"] = np.arange(1, LANES + 1), np.arange(LANES) * LANE_ROWS, LANE_ROWS
    shapes = tuple(1 << i for i in range(MAX_BATCH.bit_length())) if deterministic and open_ else ()
    most = 16 if name == "image" else MAX_BATCH
    served = (
        OpenServed(name, model, columns, most, lanes=lanes)
        if spec.open
        else Served(name, model, columns.inputs, columns.outputs, most, columns=columns, shapes=shapes)
    )
    served.warm_up(model.example)
    rng, x = np.random.default_rng(0), columns.inputs["x"]
    for row in range(len(x)):
        drawn = rng.standard_normal(x.shape[1:]) if x.dtype == np.float32 else rng.integers(0, 256, x.shape[1:])
        x[row] = drawn
    if (extents := columns.input_extents.get("x")) is not None:
        sizes = {"vector": 52, "image": 384}
        extents[:] = sizes[name] if name in sizes else rng.integers(20, open_models.TEXT + 1, extents.shape)
    asked = np.zeros(tickets, TICKET)
    asked["lane"] = rng.permutation(LANES)[:tickets]
    asked["lease"], asked["first"], asked["rows"] = asked["lane"] + 1, asked["lane"] * LANE_ROWS, each
    if columns.sessions is not None:
        columns.sessions["slot"] = np.tile(np.arange(LANE_ROWS), LANES)

    def compute() -> None:
        if served.run(asked, tickets * each) is not None:
            raise RuntimeError(f"{case}: rows were not computed")
        if columns.sessions is not None:
            columns.sessions["step"] += 1

    return compute, tickets * each


def _microseconds(batch: tuple[Callable[[], None], int], times: int) -> float:
    """CPU time a row."""
    compute, rows = batch
    before = time.process_time()
    for _ in range(times):
        compute()
    return (time.process_time() - before) / times / rows * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(key for key in CASES if "," not in key))
    given = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [case for case in CASES if case.split(",")[0] in given.only.split(",")]
    with torch.inference_mode():
        for case in wanted:
            times = CASES[case][3]
            fixed, opened = _batch(case, open_=False), _batch(case, open_=True)
            pairs = [(_microseconds(fixed, times), _microseconds(opened, times)) for _ in range(given.rounds + 1)][1:]
            row = {"case": case, "fixed_us": round(statistics.median(pair[0] for pair in pairs), 2)}
            row |= {"open_us": round(statistics.median(pair[1] for pair in pairs), 2)}
            row |= {"ratio": round(statistics.median(pair[0] / pair[1] for pair in pairs), 3)}
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
