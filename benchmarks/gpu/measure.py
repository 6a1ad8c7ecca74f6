"""One measurement in a process of its own: `python -m benchmarks.gpu.measure NAME --device cuda:0 --out FILE`.

FILE gets one JSON document, also if the measurement fails: its figures by name, its curves, the failures, and the
device's power and utilisation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Curves by the title of their chart, then by label: (x, y) pairs.
Curves = dict[str, dict[str, list[tuple[float, float]]]]


@dataclass(frozen=True)
class Setup:
    """The arguments of a measurement.

    Attributes:
        device: "cuda:0", or "cpu" for a rehearsal.
        quick: smallest sizes and few clients, to test that it works.
        window: seconds of one window.
        folder: for its files; removed afterwards.
    """

    device: str
    quick: bool
    window: float
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def clients(self) -> tuple[int, ...]:
        return (1, 2) if self.quick else (1, 4, 16, 64)


@dataclass
class Found:
    """The results of a measurement: figures by name, with units in the names; curves; remarks."""

    figures: dict[str, float]
    curves: Curves
    notes: list[str]

    @classmethod
    def nothing(cls) -> Found:
        return cls({}, {}, [])


MEASUREMENTS: dict[str, str] = {
    **dict.fromkeys(("floor", "loop", "overlap", "replay"), "benchmarks.gpu.bare"),
    **dict.fromkeys(("vector", "image", "publication", "torn", "jurors", "memory", "killed"), "benchmarks.gpu.served"),
    **dict.fromkeys(("photo", "hockey", "gym"), "benchmarks.gpu.trainings"),
    **dict.fromkeys(("payload", "device_weights", "asleep", "compiled"), "benchmarks.gpu.sharing"),
}


class Power:
    """Watts, utilisation and memory of the first device, read during a measurement, if available."""

    def __init__(self, gpu: bool) -> None:
        self._read = _reader() if gpu else None
        self._readings: list[tuple[float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="power", daemon=True)

    def __enter__(self) -> Power:
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def figures(self) -> dict[str, float]:
        if not self._readings:
            return {}
        watts, busy, mib = zip(*self._readings, strict=True)
        n = len(watts)
        return {
            "watts_mean": sum(watts) / n,
            "watts_most": max(watts),
            "utilisation_mean_percent": sum(busy) / n,
            "utilisation_most_percent": max(busy),
            "memory_most_mib": max(mib),
            "readings": n,
        }

    def _watch(self) -> None:
        assert self._read is not None
        while not self._stop.wait(0.5):
            try:
                self._readings.append(self._read())
            except Exception:  # noqa: BLE001  unreadable values are left out
                return


def _reader() -> Callable[[], tuple[float, float, float]] | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)

        def by_library() -> tuple[float, float, float]:
            busy, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
            return nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, float(busy.gpu), memory.used / 2**20

        by_library()
        return by_library
    except Exception as error:  # noqa: BLE001  no package, no driver, or an unsupported device
        print(f"NVML says nothing: {error}", file=sys.stderr)
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "-i", "0", "--query-gpu=power.draw,utilization.gpu,memory.used"]
    command.append("--format=csv,noheader,nounits")

    def by_command() -> tuple[float, float, float]:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        watts, busy, mib = (float(part) for part in said.splitlines()[0].split(","))
        return watts, busy, mib

    return by_command


class OutOfTime(Exception):
    """The harness has requested the end; the results so far are kept."""


def _stop(*_: object) -> None:
    raise OutOfTime("its time was up; the figures are those it had by then")


def carry_out(name: str, setup: Setup) -> dict[str, Any]:
    """Run a measurement; gives its document."""
    began, found, error = time.monotonic(), Found.nothing(), ""
    power = Power(setup.gpu)
    try:
        measure = getattr(importlib.import_module(MEASUREMENTS[name]), name)
        with power:
            measure(setup, found)  # it fills `found` step by step, so that results before a failure are kept
    except Exception as failure:  # noqa: BLE001  it is reported, and the others continue
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    return {
        "name": name,
        "ok": not error,
        "error": error if len(error) < 1000 else f"{error[:300]}\n...\n{error[-700:]}",
        "device": setup.device,
        "quick": setup.quick,
        "seconds": round(time.monotonic() - began, 1),
        "figures": {key: round(float(value), 4) for key, value in found.figures.items()},
        "curves": found.curves,
        "notes": found.notes,
        "power": {key: round(value, 1) for key, value in power.figures().items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--window", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory(prefix="jgpu-") as folder:
        setup = Setup(options.device, options.quick, options.window, Path(folder))
        document = carry_out(options.name, setup)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
