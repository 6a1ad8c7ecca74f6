"""How long do saving and loading take?

usage: python -m benchmarks.replay.files [--parts ordinary huge others] [--rows 50000] [--rounds 2] [--folder /tmp]
                                         [--peers-dir DIR]
Chess samples (119x8x8 planes mostly zero, policy of 4672 with some 30 moves, value), then random floats, which no codec
shortens. The machine's time for the same bytes (new memory touched, disk written and read cold) is measured beside it
by a C program. If this user may mount one, all is repeated with the replay in a tmpfs of huge pages, because most of a
load is the kernel's allocation of 4 KB pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as the peers' script sees its neighbours

from saving import PEERS  # noqa: E402

from benchmarks.replay.install import DEFAULT_DIR, missing, python_of  # noqa: E402
from benchmarks.replay.machine import keep, remember, remembered, storage  # noqa: E402
from jurybox.training.replay import Field, Replay  # noqa: E402

_LONGEST = 120.0
PARTS = ["ordinary", "huge", "others"]


def samples(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    planes = (rng.random((n, 119, 8, 8), np.float32) < 0.04).astype(np.float32)
    planes[:, 14:, :, :] *= rng.random((n, 105, 1, 1)) < 0.3
    policy = np.zeros((n, 4672), np.float32)
    for row in policy:
        row[rng.integers(0, 4672, 30)] = rng.random(30, np.float32)
    return {"observation": planes, "policy": policy, "value": rng.random(n, np.float32)}


def noise(n: int) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "observation": rng.random((n, 119, 8, 8), np.float32),
        "policy": rng.random((n, 4672), np.float32),
        "value": rng.random(n, np.float32),
    }


CASES: dict[str, tuple[str | None, Callable[[int], dict[str, Any]]]] = {
    "chess, floats": (None, samples),
    "chess, planes as bytes": ("uint8", samples),
    "chess, planes as bits, policy sparse": ("bits", samples),
    "random floats": (None, noise),
}


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def huge_pages() -> Path | None:
    """A tmpfs of huge pages, if this user may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="jurybox-huge-"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "huge=always,size=9g", "tmpfs", folder], check=False, capture_output=True
    )
    if done.returncode == 0:
        return folder
    folder.rmdir()
    return None


def one_case(name: str, options: argparse.Namespace, shared: Path) -> dict[str, float]:
    """Medians of seconds (and CPU seconds, "... cpu"), and sizes."""
    stored, make = CASES[name]
    fields = {
        "observation": Field((119, 8, 8), stored=stored),
        "policy": Field((4672,), stored="sparse", nonzero=64) if stored == "bits" else Field((4672,)),
        "value": Field(()),
    }
    os.environ["JURYBOX_SHM_DIR"] = str(shared)
    rows = make(1000)
    times: dict[str, list[float]] = {}

    def timed(key: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin, cpu = time.perf_counter(), time.process_time()
        result = call(*arguments)
        times.setdefault(key, []).append(time.perf_counter() - begin)
        times.setdefault(f"{key} cpu", []).append(time.process_time() - cpu)
        return result

    path = options.folder / f"replay-{os.getpid()}.jbr"
    size = 0
    try:
        with Replay.create(f"files-{os.getpid()}", options.rows, fields) as replay:
            for _ in range(-(-options.rows // 1000)):
                replay.extend(**rows)
            for _ in range(options.rounds):
                timed("save", replay.save, path)
                size = path.stat().st_size
                few = {k: v[: max(1, options.rows // 20)] for k, v in rows.items()}
                for _ in range(max(1, options.rows // 20 // len(few["value"]))):
                    replay.extend(**few)
                timed("step", lambda: replay.save(path, incremental=True))
                # Before the load, so that both get memory which this machine has used before.
                for key, value in storage(shared, options.folder, size, replay.nbytes).items():
                    times.setdefault(f"C {key}", []).append(value)
                drop_cache(path)
                loaded = timed("load", Replay.load, path, f"loaded-{os.getpid()}")
                assert len(loaded) == options.rows
                loaded.unlink()
                loaded.close()
                del loaded
                drop_cache(path)
                timed("restore", replay.restore, path)
            memory = replay.nbytes
    finally:
        path.unlink(missing_ok=True)
    return {key: statistics.median(values) for key, values in times.items()} | {"memory": memory, "file": size}


def peer(name: str, options: argparse.Namespace) -> dict[str, float] | str:
    environment = PEERS[name][1]
    if environment and (reason := missing(options.peers_dir, environment)):
        return reason
    python = str(python_of(options.peers_dir, environment)) if environment else sys.executable
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        command = [python, str(HERE / "saving.py"), name, str(options.rows), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        return f"not done within {_LONGEST:.0f} s"
    finally:
        shutil.rmtree(folder)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["it failed without a word"])[-1][:200]
    found: dict[str, float] = json.loads(lines[-1])
    return found


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, float]] = {}
    ordinary, huge = Path(os.environ.get("JURYBOX_SHM_DIR", "/dev/shm")), None
    try:
        if "ordinary" in options.parts:
            found = {name: one_case(name, options, ordinary) for name in CASES}
            remember("files ordinary", {"rows": options.rows, "rounds": options.rounds, "cases": found})
            results |= found
        if "huge" in options.parts and (huge := huge_pages()) is not None:
            found = {f"{name}; huge pages": one_case(name, options, huge) for name in CASES}
            remember("files huge", {"rows": options.rows, "rounds": options.rounds, "cases": found})
            results |= found
    finally:
        os.environ["JURYBOX_SHM_DIR"] = str(ordinary)
        if huge is not None:
            subprocess.run(["umount", huge], check=True)
            huge.rmdir()
    if "others" in options.parts:
        remember("files others", {name: peer(name, options) for name in PEERS})
    render()
    return results


def render() -> None:
    """Write new and earlier measurements as one document."""
    known, lines = remembered(), []
    for part in ("files ordinary", "files huge"):
        if part not in known:
            continue
        figures = known[part]["figures"]
        lines += [
            f"## {figures['rows']:,} rows, {'huge' if 'huge' in part else 'ordinary'} pages",
            "",
            f"{known[part]['when'].split(';')[0]}; medians of {figures['rounds']}; seconds of wall time (of CPU time)",
            "",
            "| what | MB in memory, in the file | save | load into a new replay | restore into one in use "
            "| 5 % changed | C: that memory touched, again | C: that file written, read |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, t in figures["cases"].items():
            lines.append(
                f"| {name} | {t['memory'] / 1e6:,.0f}, {t['file'] / 1e6:,.0f} | {t['save']:.2f} ({t['save cpu']:.2f}) "
                f"| {t['load']:.2f} ({t['load cpu']:.2f}) | {t['restore']:.2f} ({t['restore cpu']:.2f}) "
                f"| {t['step']:.2f} | {t['C touch']:.2f}, {t['C again']:.2f} | {t['C write']:.2f}, {t['C read']:.2f} |"
            )
        lines.append("")
    if "files huge" not in known:
        lines += ["Huge pages: this user may not mount a tmpfs, so not measured.", ""]
    if "files others" in known:
        lines += [
            "## Others, 50,000 rows of 49,156 bytes, mostly zero",
            "",
            known["files others"]["when"].split(";")[0],
        ]
        lines += ["", "| | save, s | load, s | MB |", "| --- | --- | --- | --- |"]
        for name, found in known["files others"]["figures"].items():
            if isinstance(found, str):
                lines.append(f"| {name} | {found} | | |")
            else:
                lines.append(f"| {name} | {found['save']:.2f} | {found['load']:.2f} | {found['bytes'] / 1e6:,.0f} |")
    keep("files", lines)


if __name__ == "__main__":
    main()
