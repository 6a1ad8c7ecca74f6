"""`make gpu`: prepare this checkout, run the tests and the measurements for a GPU, and report which targets were met.

Needs only the standard library, and the installed torch, CUDA and compiler. Each step is a process with its own time
limit; a step that fails or hangs is recorded, its processes are ended, and the next step begins.

    python -m benchmarks.gpu                              all of it, in under 30 minutes
    python -m benchmarks.gpu --part 1                     the first part, in under 10
    python -m benchmarks.gpu --device cpu --quick         a rehearsal without a GPU
    python -m benchmarks.gpu --merge A/results.json B/results.json    one report of parts that ran elsewhere
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import page
from benchmarks.gpu.prepare import ROOT, NotPrepared, Prepared, machine, prepare
from benchmarks.serving.machine import adopt_orphans, end_descendants

_STOP_GRACE = 10.0  # seconds in which a step that must end writes its results
_REPORT = 25.0  # seconds that are kept for the report
# The last line of pytest, with "=" around it or without.
_COUNTED = re.compile(r"^=*\s*((?:\d+|no) (?:passed|failed|skipped|errors?|tests?|deselected).*?)\s*=*$", re.MULTILINE)
_LEAST = 15.0  # seconds under which a step is not begun


@dataclass(frozen=True)
class Step:
    """One thing to do; `bound` in seconds. "tests" is no measurement."""

    name: str
    part: int
    bound: float


STEPS = (
    Step("floor", 1, 45),
    Step("loop", 1, 45),
    Step("vector", 1, 110),
    Step("image", 1, 110),
    Step("overlap", 1, 40),
    Step("tests", 1, 150),
    Step("publication", 2, 110),
    Step("torn", 2, 50),
    Step("killed", 2, 100),
    Step("memory", 2, 50),
    Step("jurors", 2, 50),
    Step("replay", 2, 40),
    Step("gym", 2, 90),
    Step("hockey", 2, 90),
    Step("photo", 2, 90),
    Step("payload", 3, 70),
    Step("device_weights", 3, 120),
    Step("asleep", 3, 100),
    Step("compiled", 3, 260),
)
PARTS = tuple(sorted({step.part for step in STEPS}))
_SECONDS = 560.0  # of a part, preparation and report included


class Run:
    """One run of some parts: its options, and its results so far."""

    def __init__(self, options: argparse.Namespace, log: IO[str]) -> None:
        self._options = options
        self._log = log
        self._out: Path = options.out
        self._work: Path = options.work
        self._deadline = time.monotonic() + options.seconds
        self.results: dict[str, Any] = {"environment": {}, "tests": None, "measurements": {}, "not_run": {}}

    def __call__(self, steps: Sequence[Step]) -> bool:
        """Run it; return whether nothing failed."""
        for step in steps:
            if step.name != "tests":
                self.results["not_run"][step.name] = "not reached"
        try:
            ready = prepare(self._work, self._options.wheels)
            self.results["environment"] = ready.facts | machine(ready.environment)
        except (NotPrepared, OSError, subprocess.TimeoutExpired) as error:
            self._say(f"cannot run here: {error}")
            self.results["environment"]["error"] = str(error)
            self.write(None)
            return False
        facts = self.results["environment"]
        device = self._options.device
        if device == "auto":
            device = "cuda:0" if facts["cuda_available"] else "cpu"
        facts["measured_on"] = device
        facts["command"] = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
        if device == "cpu":
            facts["device"] = ""
            # A CPU in a rehearsal is shared, and thread pools would only wait for it.
            ready.environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._say(f"{facts['device'] or 'CPU, a rehearsal'}: torch {facts['torch']}, native {facts['native']}")
        if absent := [
            name for name, version in facts.get("packages", {}).items() if version is None and name != "triton"
        ]:
            self._say(f"not here, and what needs it will fail: {', '.join(absent)} (make gpu-wheels)")
        if facts.get("wheels_left_out"):
            self._say(f"wheels for another Python or processor, left out: {', '.join(facts['wheels_left_out'])}")
        self._keep_other_parts({step.name for step in steps})
        self.write(None)
        for step in steps:
            left = self._deadline - _REPORT - time.monotonic()
            if left < _LEAST and not self._options.only:
                self.results["not_run"][step.name] = "no time left"
                self._say(f"{step.name}: not run, no time left")
                continue
            bound = min(step.bound * self._options.patience, max(left, _LEAST))
            if step.name == "tests":
                self._tests(ready, device, bound)
            else:
                self._measure(ready, device, step.name, bound)
            self.write(None)
        self.write(ready)
        documents = self.results["measurements"].values()
        tests = self.results["tests"]
        return all(doc["ok"] for doc in documents) and not self.results["not_run"] and (tests is None or tests["ok"])

    def _keep_other_parts(self, mine: set[str]) -> None:
        """Results of other parts, from this device and this code, are kept."""
        file = self._out / "results.json"
        if not self._options.part or not file.exists():
            return
        earlier = json.loads(file.read_text())
        same = ("device", "measured_on", "commit")
        if any(earlier["environment"].get(key) != self.results["environment"][key] for key in same):
            return
        for kind in ("measurements", "not_run"):
            others = {name: each for name, each in earlier[kind].items() if name not in mine}
            self.results[kind] = others | self.results[kind]
        if "tests" not in mine:
            self.results["tests"] = earlier["tests"]

    def _measure(self, ready: Prepared, device: str, name: str, bound: float) -> None:
        file = self._work / f"{name}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu.measure", name, "--device", device, "--out", str(file)]
        command += ["--window", str(self._options.window), *(["--quick"] if self._options.quick else [])]
        code, seconds, said = self._process(ready, name, command, bound)
        try:
            document = json.loads(file.read_text())
        except (OSError, ValueError):
            last = next((line for line in reversed(said.splitlines()) if line.strip()), "it printed nothing")
            document = {
                "name": name, "ok": False, "device": device, "quick": self._options.quick, "seconds": round(seconds, 1),
                "error": f"ended with {code} and no figures: {last}"[:1000],
                "figures": {}, "curves": {}, "notes": [], "power": {},
            }  # fmt: skip
        self.results["not_run"].pop(name, None)
        self.results["measurements"][name] = document
        self._say(
            f"{name}: {'measured' if document['ok'] else 'FAILED: ' + page.short(document['error'])} in {seconds:.0f} s"
        )

    def _tests(self, ready: Prepared, device: str, bound: float) -> None:
        """tests/gpu; in a rehearsal they are collected, and those of the device's path run on the CPU."""
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if device == "cpu":
            commands = [
                [*pytest, "-m", "gpu", "--collect-only", "tests/gpu"],
                [*pytest, "tests/unit/engine/test_device_served.py"],
            ]
        else:
            commands = [[*pytest, "-m", "gpu", "--timeout", "100", "tests/gpu"]]
        ok, says = True, []
        for command in commands:
            code, _, said = self._process(ready, "tests", command, bound)
            ok = ok and code == 0
            counted = _COUNTED.findall(said)
            lost = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
            says.append((counted or [f"ended with {code}"])[-1] + (f" ({', '.join(lost[:4])})" if lost else ""))
        self.results["tests"] = {"ok": ok, "says": "; ".join(says)}
        self._say(f"tests: {self.results['tests']['says']}")

    def _process(self, ready: Prepared, name: str, command: list[str], bound: float) -> tuple[int, float, str]:
        """Run a step until its end or its limit, and end its processes; return code, seconds and output."""
        began, file = time.monotonic(), self._work / f"{name}.txt"
        with file.open("w") as sink:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=ready.environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(bound)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    code = process.wait(_STOP_GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
        left = end_descendants()
        said = file.read_text(errors="replace")
        seconds = time.monotonic() - began
        self._log.write(f"==== {name}: ended with {code} after {seconds:.1f} s of {bound:.0f}: {' '.join(command)}\n")
        self._log.write(said if len(said) < 60_000 else f"{said[:20_000]}\n[...]\n{said[-40_000:]}")
        if left:
            self._log.write(f"left behind, now ended: {', '.join(left)}\n")
        self._log.flush()
        return code, seconds, said

    def write(self, ready: Prepared | None) -> None:
        """Write the files so far, and the report if possible."""
        (self._out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        (self._out / "environment.json").write_text(json.dumps(self.results["environment"], indent=1) + "\n")
        if ready is None:
            return
        names = [str(self._out / "results.json"), str(self._out / "report.html")]
        command = [sys.executable, "-m", "benchmarks.gpu.page", *names]
        code, _, said = self._process(ready, "report", command, 60.0)
        if code:
            self._say(f"no report: {(said.strip().splitlines() or ['it printed nothing'])[-1]}")

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self._log.write(f"{text}\n")
        self._log.flush()


def _merge(files: Sequence[Path]) -> dict[str, Any]:
    """Merge results of parts; the later file has precedence."""
    merged: dict[str, Any] = {"environment": {}, "tests": None, "measurements": {}, "not_run": {}}
    for file in files:
        one = json.loads(file.read_text())
        earlier = merged["environment"].get("device")
        if earlier not in (None, one["environment"].get("device")):
            raise SystemExit(f"{file} is of {one['environment'].get('device')!r}, the others of {earlier!r}")
        merged["environment"] |= one["environment"]
        merged["tests"] = one["tests"] or merged["tests"]
        merged["measurements"] |= one["measurements"]
        merged["not_run"] |= one["not_run"]
    merged["not_run"] = {name: why for name, why in merged["not_run"].items() if name not in merged["measurements"]}
    return merged


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=PARTS, help="one part; without it, all")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="these steps")
    parser.add_argument("--device", default="auto", help="cuda:0; cpu: a rehearsal; auto: whichever there is")
    parser.add_argument("--quick", action="store_true", help="smallest sizes: whether it works, not how fast")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of one window")
    parser.add_argument("--patience", type=float, default=1.0, help="times the bound of every step, on a busy machine")
    parser.add_argument("--seconds", type=float, help="bound of the whole run")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"))
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu", help="folder for what is built, and logs")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/gpu-wheels")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RESULTS")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = _SECONDS * (1 if options.part or options.only else len(PARTS)) * options.patience
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    steps = [
        step for step in STEPS if (step.name in options.only if options.only else options.part in (None, step.part))
    ]
    if options.merge:
        results = _merge(options.merge)
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.out / "report.html").write_text(page.html(results, results["environment"].get("device", "")))
        print("\n".join(page.summary(results)))
        return 0
    with (options.out / "log.txt").open("w") as log:
        run = Run(options, log)
        try:
            whole = run(steps)
        except KeyboardInterrupt:
            run.write(None)
            whole = False
        lines = ["", *page.summary(run.results)]
        print("\n".join(lines), flush=True)
        log.write("\n".join(lines) + "\n")
    return 0 if whole else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
