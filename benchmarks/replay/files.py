"""How long do saving and loading take?

usage: python -m benchmarks.replay.files [--rows 50000] [--rounds 3] [--folder /tmp]
Chess samples (119x8x8 planes mostly zero, policy of 4672 with some 30 moves, value), then random floats, which no
codec shortens. What the disk takes is measured beside it: the same bytes written with fsync,
and read after the cache is dropped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.replay.machine import keep
from jurybox.training.replay import Field, Replay


def samples(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    planes = (rng.random((n, 119, 8, 8), np.float32) < 0.04).astype(np.float32)
    planes[:, 14:, :, :] *= rng.random((n, 105, 1, 1)) < 0.3
    policy = np.zeros((n, 4672), np.float32)
    for row in policy:
        row[rng.integers(0, 4672, 30)] = rng.random(30, np.float32)
    return {"observation": planes, "policy": policy, "value": rng.random(n, np.float32)}


def noise(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "observation": rng.random((n, 119, 8, 8), np.float32),
        "policy": rng.random((n, 4672), np.float32),
        "value": rng.random(n, np.float32),
    }


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(folder: Path, size: int) -> tuple[float, float]:
    """Seconds to write `size` bytes with fsync, and to read them cold."""
    path, block = folder / "disk", np.random.default_rng(0).bytes(8 << 20)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    written = time.perf_counter() - begin
    drop_cache(path)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while file.readinto(buffer):
            pass
    read = time.perf_counter() - begin
    path.unlink()
    return written, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    lines = [
        "| what | MB in memory | MB in the file | save, s | load into a new replay, s | restore into one in use, s "
        "| 5 % changed, s | disk: write, read, s | CPU seconds of save, restore |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cases = [
        ("chess, floats", None, samples),
        ("chess, planes as bytes", "uint8", samples),
        ("chess, planes as bits, policy sparse", "bits", samples),
        ("random floats", None, noise),
    ]
    for name, stored, make in cases:
        fields = {
            "observation": Field((119, 8, 8), stored=stored),
            "policy": Field((4672,), stored="sparse", nonzero=64) if stored == "bits" else Field((4672,)),
            "value": Field(()),
        }
        rows = make(1000)
        times: dict[str, list[float]] = {}
        path = options.folder / f"replay-{os.getpid()}.jbr"
        with Replay.create(f"files-{os.getpid()}", options.rows, fields) as replay:
            for _ in range(-(-options.rows // 1000)):
                replay.extend(**rows)
            for _ in range(options.rounds):

                def timed(key: str, call: object, *arguments: object, times: dict[str, list[float]] = times) -> object:
                    begin, cpu = time.perf_counter(), time.process_time()
                    result = call(*arguments)  # type: ignore[operator]
                    times.setdefault(key, []).append(time.perf_counter() - begin)
                    times.setdefault(key + " cpu", []).append(time.process_time() - cpu)
                    return result

                timed("save", replay.save, path)
                size = path.stat().st_size
                few = {k: v[: options.rows // 20] for k, v in rows.items()}
                for _ in range(max(1, options.rows // 20 // len(few["value"]))):
                    replay.extend(**few)
                timed("step", lambda replay=replay, path=path: replay.save(path, incremental=True))
                drop_cache(path)
                loaded = timed("load", Replay.load, path, f"loaded-{os.getpid()}")
                assert isinstance(loaded, Replay)
                assert len(loaded) == options.rows
                loaded.unlink()
                loaded.close()
                drop_cache(path)
                timed("restore", replay.restore, path)
                write, read = disk(options.folder, size)
                times.setdefault("disk write", []).append(write)
                times.setdefault("disk read", []).append(read)
            memory = replay.nbytes / 1e6
        path.unlink()
        t = {key: statistics.median(values) for key, values in times.items()}
        lines.append(
            f"| {name} | {memory:,.0f} | {size / 1e6:,.0f} "
            f"| {t['save']:.2f} | {t['load']:.2f} | {t['restore']:.2f} | {t['step']:.2f} "
            f"| {t['disk write']:.2f}, {t['disk read']:.2f} | {t['save cpu']:.2f}, {t['restore cpu']:.2f} |"
        )
    keep("files", [f"{options.rows:,} rows; medians of {options.rounds}; wall time unless said", "", *lines])


if __name__ == "__main__":
    main()
