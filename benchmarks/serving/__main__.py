"""``python -m benchmarks.serving``: measure every contender in turn, and write JSON, tables and a plot."""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import datetime
from importlib import metadata
from pathlib import Path

from benchmarks.serving import machine, report
from benchmarks.serving.cases import CASES
from benchmarks.serving.contender import CONTENDERS, YARDSTICK, contender
from benchmarks.serving.hosting import ROOT, Place
from benchmarks.serving.peers.install import DEFAULT_DIR, missing, versions
from benchmarks.serving.results import Results
from benchmarks.serving.rounds import Plan, run

RESULTS = Path(__file__).with_name("results")


def main() -> int:
    arguments = _arguments()
    plan = Plan(
        cases=tuple(arguments.case or CASES),
        contenders=tuple(name for name in CONTENDERS if not arguments.only or name in (*arguments.only, YARDSTICK)),
        clients=tuple(arguments.clients),
        rounds=arguments.rounds,
        window=arguments.window,
        warm_up=arguments.warm_up,
        noise=arguments.noise,
        retries=arguments.retries,
        patience=arguments.patience,
    )
    machine.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.out.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    stem = arguments.out / f"{now:%Y-%m-%d-%H%M}{'-quick' if arguments.quick else ''}"
    results = Results(_about(arguments, plan, now))
    with tempfile.TemporaryDirectory(prefix="jbench-samples-") as folder:
        samples = Path(folder)
        subprocess.run([sys.executable, "-m", "benchmarks.serving.samples", folder], cwd=ROOT, check=True)
        try:
            run(plan, Place(samples, arguments.peers_dir), results, stem.with_suffix(".json"), _say)
        except KeyboardInterrupt:
            _say("interrupted: what was measured so far is written")
        finally:
            machine.end_descendants()
            results.write(stem.with_suffix(".json"))
    for file in report.write(results, stem):
        _say(f"wrote {file}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 1-second windows, noisy ones kept: to debug")
    parser.add_argument(
        "--only", type=_names(CONTENDERS), metavar="NAME,...", help=f"and {YARDSTICK}: {', '.join(CONTENDERS)}"
    )
    parser.add_argument("--case", type=_names(CASES), metavar="NAME,...", help=", ".join(CASES))
    parser.add_argument("--clients", type=_counts, default=[], metavar="N,...", help="of those a case has")
    parser.add_argument("--rounds", type=int, help="turns of every contender, one window each (3)")
    parser.add_argument("--window", type=float, help="seconds (5)")
    parser.add_argument("--warm-up", type=float, help="seconds of the same load before each window (1)")
    parser.add_argument("--noise", type=float, help="cores that anything else may use in a window (0.1)")
    parser.add_argument("--retries", type=int, help="windows thrown away before a noisy one is kept and marked (5)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet before repeating (60)")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR, help=str(DEFAULT_DIR))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    quick = {"rounds": 1, "window": 1.0, "warm_up": 0.5, "noise": 0.1, "retries": 0}
    full = {"rounds": 3, "window": 5.0, "warm_up": 1.0, "noise": 0.1, "retries": 5}
    for name, value in (quick if arguments.quick else full).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _about(arguments: argparse.Namespace, plan: Plan, now: datetime) -> dict[str, object]:
    """Date, machine, commit, command and versions."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    found: dict[str, dict[str, str]] = {}
    for name in plan.contenders:
        kind = contender(name)
        if kind.peer:
            if not missing(arguments.peers_dir, kind.peer):
                listed = versions(arguments.peers_dir, kind.peer)
                found[name] = {package: listed.get(package, "?") for package in (*kind.packages, "torch", "numpy")}
        else:
            found[name] = {package: metadata.version(package) for package in (*kind.packages, "torch", "numpy")}
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]]),
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else ""),
        "machine": machine.describe(),
        "rounds": plan.rounds,
        "window_s": plan.window,
        "noise_cores": plan.noise,
        "versions": found,
    }


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
