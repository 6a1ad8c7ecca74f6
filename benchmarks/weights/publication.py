"""The cost of one publication, and of one read, in memcpys of the same size.

The copy to beat is one memcpy between two warm heap buffers; everything takes turns with it in the same rounds, and the
ratio is of medians. 64 tensors a size.

    python -m benchmarks.weights.publication --megabytes 1 10 100 --out benchmarks/weights/results
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

TENSORS = 64


def measure(megabytes: int, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds and in memcpys."""
    size = megabytes * 2**20
    state = {f"tensor{i}": np.random.default_rng(i).random(size // 4 // TENSORS, np.float32) for i in range(TENSORS)}
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    name = segment_name(f"bench{os.getpid()}", "weights", megabytes)
    with (
        WeightsChannel.create(name, WeightsLayout.of(state)) as channel,
        WeightsChannel.create(name + "s", WeightsLayout.of(state), "snapshot") as single,
        Publisher(channel) as double_buffer,
        Publisher(single) as snapshot,
    ):
        reader = WeightsReader(WeightsChannel.attach(name))
        out, flat = reader.buffers(), np.zeros(channel.layout.nbytes, np.uint8)
        work: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, size),
            "publish": lambda: double_buffer.publish(state),
            "publish, check_finite": lambda: double_buffer.publish(state, check_finite=True),
            "publish to a snapshot": lambda: snapshot.publish(state),
            "read into arrays kept": lambda: reader.read(out=out),
            "read flat": lambda: reader.read_flat(flat),
            "read into new arrays": reader.read,
        }
        taken: dict[str, list[float]] = {key: [] for key in work}
        for number in range(-3, rounds):  # three rounds to warm up
            for key, call in work.items():
                begin = time.perf_counter()
                call()
                if number >= 0:
                    taken[key].append(time.perf_counter() - begin)
    medians = {key: statistics.median(values) for key, values in taken.items()}
    return {
        "megabytes": megabytes,
        "rounds": rounds,
        "ms": {key: round(value * 1e3, 3) for key, value in medians.items()},
        "memcpys": {key: round(value / medians["memcpy"], 2) for key, value in medians.items()},
    }


def main(name: str, about: str | None, measure: Callable[[int, int], dict[str, Any]], rounds: int) -> None:
    """Measure each size, print the report, and write it to NAME-DATE.json in --out."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--machine", default=f"{os.cpu_count()}-core {platform.machine()}")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {
        "date": date.today().isoformat(),
        "machine": options.machine,
        "sizes": [measure(size, options.rounds) for size in options.megabytes],
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}-{report['date']}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main("publication", __doc__, measure, rounds=31)
