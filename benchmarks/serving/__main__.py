"""``python -m benchmarks.serving``: measure every contender in turn, and write JSON, tables and a plot.

Results are of a clean tree: with changes in it a run is refused, or marked and kept elsewhere (--dirty)."""

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

from benchmarks.serving import machine, page, report
from benchmarks.serving.cases import CASES
from benchmarks.serving.contender import CONTENDERS, YARDSTICK, contender
from benchmarks.serving.hosting import ROOT, Place
from benchmarks.serving.peers.install import DEFAULT_DIR, missing, versions
from benchmarks.serving.results import Results
from benchmarks.serving.rounds import SETS, Plan, run

RESULTS = Path(__file__).with_name("results")
ELSEWHERE = ROOT / "build" / "bench"  # for runs that are no results: of a changed tree, or of short windows
# Files of a run are no change of the tree that it measures.
_WRITTEN = (":!benchmarks/*/results/*", ":!docs/performance.md")


def main() -> int:
    arguments = _arguments()
    plan = _plan(arguments)
    commit = commit_measured(arguments)
    machine.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.out.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    stem = arguments.out / f"{now:%Y-%m-%d-%H%M}{'-quick' if arguments.quick else ''}"
    results = Results(about(arguments, plan, plan.contenders, now, commit))
    whole = False
    with tempfile.TemporaryDirectory(prefix="jbench-samples-") as folder:
        samples = Path(folder)
        subprocess.run([sys.executable, "-m", "benchmarks.serving.samples", folder], cwd=ROOT, check=True)
        try:
            run(plan, Place(samples, arguments.peers_dir), results, stem.with_suffix(".json"), _say)
            whole = True
        except KeyboardInterrupt:
            _say("interrupted: what was measured so far is written")
        finally:
            machine.end_descendants()
            finish(results, now)
            results.write(stem.with_suffix(".json"))
    for file in report.write(results, stem):
        _say(f"wrote {file}")
    if arguments.page and whole:
        for text in page.cite("measured", stem.with_suffix(".json")):
            _say(text)
    return 0 if whole else 130


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--set", choices=SETS, default="full", help="bench: some 20 minutes on two cores; full: 90 (the default)"
    )
    parser.add_argument("--only", type=_names(CONTENDERS), metavar="NAME,...", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--case", type=_names(CASES), metavar="NAME,...", help=", ".join(CASES))
    parser.add_argument("--clients", type=_counts, default=[], metavar="N,...", help="of those a case has")
    parser.add_argument("--rounds", type=int, help="turns of every contender, one window each (3)")
    add_common(parser)
    return settled(
        parser.parse_args(), {"rounds": 1, "window": 1.0}, {"rounds": 3, "window": 5.0, "retries": 5, "patience": 20.0}
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that the crossover run has, too."""
    parser.add_argument("--quick", action="store_true", help="short windows, once, noisy ones kept: to debug")
    parser.add_argument("--dirty", action="store_true", help="measure a tree with changes, marked, kept elsewhere")
    parser.add_argument("--page", action="store_true", help="cite the run in docs/performance.md")
    parser.add_argument("--window", type=float, help="seconds (5)")
    parser.add_argument("--warm-up", type=float, help="seconds of the same load before each window (0.5)")
    parser.add_argument("--noise", type=float, help="cores that anything else may use in a window (0.1)")
    parser.add_argument("--retries", type=int, help="windows thrown away before a noisy one is kept and marked (5)")
    parser.add_argument("--patience", type=float, help="seconds to wait for quiet before repeating (20)")
    parser.add_argument("--spare", type=float, help="seconds that repeating may take in all (bench: 120; full: 1200)")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR, help=str(DEFAULT_DIR))
    parser.add_argument("--out", type=Path, help=f"folder for the results ({RESULTS.relative_to(ROOT)})")


def settled(arguments: argparse.Namespace, quick: dict[str, float], full: dict[str, float]) -> argparse.Namespace:
    """With defaults for missing options."""
    spare = 120.0 if getattr(arguments, "set", "bench") == "bench" else 1200.0
    common = {"warm_up": 0.5, "noise": 0.1, "retries": 0, "patience": 5.0, "spare": spare}
    for name, value in {**common, **(quick if arguments.quick else full)}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.out is None:
        arguments.out = ELSEWHERE if arguments.quick or arguments.dirty else RESULTS
    return arguments


def _plan(arguments: argparse.Namespace) -> Plan:
    asked = {}
    for case, (names, counts) in SETS[arguments.set].items():
        if arguments.case and case not in arguments.case:
            continue
        wanted = tuple(name for name in names if not arguments.only or name in (*arguments.only, YARDSTICK))
        some = tuple(count for count in counts if not arguments.clients or count in arguments.clients)
        if wanted and some:
            asked[case] = wanted, some
    return Plan(
        asked=asked, rounds=arguments.rounds, window=arguments.window, warm_up=arguments.warm_up,
        noise=arguments.noise, retries=arguments.retries, patience=arguments.patience, spare=arguments.spare,
    )  # fmt: skip


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def commit_measured(arguments: argparse.Namespace) -> str:
    """The commit, marked if the tree has changes; end the program if the run would count as a result."""
    changes = _git("status", "--porcelain", "--", ".", *_WRITTEN)
    if changes and (not (arguments.quick or arguments.dirty) or arguments.out == RESULTS):
        print(f"the tree has changes: commit them, or measure with --dirty, marked and kept elsewhere.\n{changes}")
        sys.exit(2)
    if arguments.page and (changes or arguments.quick):
        print("docs/performance.md cites whole runs of a clean tree alone: leave out --page")
        sys.exit(2)
    return _git("rev-parse", "--short", "HEAD") + ("+changes" if changes else "")


def finish(results: Results, began: datetime) -> None:
    """Print the duration of a run, and mark it if the tree changed meanwhile."""
    results.about["duration_s"] = round((datetime.now().astimezone() - began).total_seconds())
    commit = _git("rev-parse", "--short", "HEAD")
    if not results.about["commit"].startswith(commit) or _git("status", "--porcelain", "--", ".", *_WRITTEN):
        results.about["commit"] = results.about["commit"].removesuffix("+changes") + "+changes"


def about(
    arguments: argparse.Namespace, plan: Plan, contenders: Iterable[str], now: datetime, commit: str
) -> dict[str, object]:
    """Date, machine, commit, command and versions."""
    found: dict[str, dict[str, str]] = {}
    for name in contenders:
        kind = contender(name)
        if kind.peer:
            if not missing(arguments.peers_dir, kind.peer):
                listed = versions(arguments.peers_dir, kind.peer)
                found[name] = {package: listed.get(package, "?") for package in (*kind.packages, "torch", "numpy")}
        else:
            found[name] = {package: metadata.version(package) for package in (*kind.packages, "torch", "numpy")}
    module = sys.modules["__main__"].__spec__
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module.name.removesuffix(".__main__") if module else "", *sys.argv[1:]]),
        "commit": commit,
        "machine": machine.describe(),
        "rounds": plan.rounds,
        "window_s": plan.window,
        "noise_cores": plan.noise,
        "titles": {name: contender(name).title for name in contenders},
        "versions": found,
    }


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
