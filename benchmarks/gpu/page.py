"""The summary of the measurements: each target, the last lines, and the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = Mapping[str, Mapping[str, float]]  # by measurement, then by name


@dataclass(frozen=True)
class Target:
    """A sentence, its bound, and how to find the value; a figure that is missing is a KeyError."""

    says: str
    bound: float
    at_least: bool
    unit: str
    value: Callable[[Figures], float]


def _image_ceiling(at: Figures) -> float:
    return min(at["floor"]["image_rows_per_s_by_pcie"], at["loop"]["image_model_rows_per_s"])


TARGETS = (
    Target("lone vector request: p50 above the forward", 40.0, False, "us",
           lambda at: at["vector"]["graphs_p50_us_1"] - at["loop"]["vector_forward_us"]),
    Target("vector, 16 clients: requests/s over plain ZeroMQ", 3.0, True, "x",
           lambda at: at["vector"]["graphs_over_zmq_16"]),
    Target("images: rate over the lower of PCIe and model", 0.9, True, "x",
           lambda at: at["image"]["most_requests_per_s"] / _image_ceiling(at)),
    Target("pause at a publication of 100 MB", 1.0, False, "ms",
           lambda at: at["publication"]["100mb_pause_ms"]),
    Target("torn reads of weights on the device", 0.0, False, "",
           lambda at: at["torn"]["torn_reads"]),
    Target("device memory lost by killed engines", 64.0, False, "MiB",
           lambda at: at["killed"]["lost_by_kills_mib"]),
    Target("device payload: p50 of a 3 MB image above that of a 27 KB one", 50.0, False, "us",
           lambda at: at["payload"]["device_p50_us_1024"] - at["payload"]["device_p50_us_96"]),
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A target and its result; `verdict` is "held", "missed by ...", "not measured" or "not judged ..."."""

    target: Target
    found: float | None
    verdict: str

    def line(self) -> str:
        unit = f" {self.target.unit}".rstrip() if self.target.unit != "x" else "x"
        sign = ">=" if self.target.at_least else "<="
        found = "" if self.found is None else f" {self.found:.3g}{unit}"
        return f"{self.target.says}:{found} (wanted {sign} {self.target.bound:g}{unit}): {self.verdict}"


def judge(results: Mapping[str, Any]) -> list[Judged]:
    """Every target, in order; figures that were not measured on a GPU are not judged."""
    documents = results["measurements"]
    figures = {name: document["figures"] for name, document in documents.items()}
    judged = []
    for target in TARGETS:
        try:
            found: float | None = target.value(figures)
        except (KeyError, ZeroDivisionError):
            found = None
        if found is None:
            verdict = "not measured"
        elif not _is_real(results):
            verdict = "not judged (a rehearsal)"
        elif found >= target.bound if target.at_least else found <= target.bound:
            verdict = "held"
        else:
            unit = f" {target.unit}".rstrip() if target.unit != "x" else "x"
            verdict = f"missed by {abs(found - target.bound):.3g}{unit}"
        judged.append(Judged(target, found, verdict))
    return judged


def _is_real(results: Mapping[str, Any]) -> bool:
    return all(doc["device"].startswith("cuda") and not doc["quick"] for doc in results["measurements"].values())


def summary(results: Mapping[str, Any]) -> list[str]:
    """Ten lines: where, the tests, the measurements, the targets, the report."""
    machine, documents, tests = results["environment"], results["measurements"], results.get("tests")
    failed = {name: doc["error"] for name, doc in documents.items() if not doc["ok"]}
    where = machine.get("device") or "CPU"
    kind = "" if documents and _is_real(results) else " (a rehearsal: figures mean nothing)"
    missing = "; ".join(f"{name} ({why})" for name, why in results["not_run"].items())
    broken = "; ".join(f"{name} ({short(error)})" for name, error in failed.items())
    tests = "not run" if tests is None else tests["says"]
    lines = [
        f"{where}{kind}; commit {machine.get('commit', 'unknown')}; {machine.get('date', '')}",
        f"tests: {tests}" if "error" not in machine else f"CANNOT RUN HERE: {short(machine['error'])}",
        f"measured: {len(documents) - len(failed)} of {len(documents) + len(results['not_run'])}"
        + (f"; not run: {missing}" if missing else ""),
        f"failed: {broken or 'nothing'}",
    ]
    return lines + [judged.line() for judged in judge(results)]


def short(text: str) -> str:
    """One line of an error: its first line and, of many, its last, where Python names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    said = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return said if len(said) < 160 else f"{said[:157]}..."


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


_STYLES = {"graphs": "learned", "eager": "reference", "zmq": "random"}


def html(results: Mapping[str, Any], folder: str) -> str:
    """The report: one page without other files."""
    from jurybox.training.report import charts
    from jurybox.training.report.page import Conclusion, Details, Part, Section, Table, render

    judged, documents = judge(results), results["measurements"]
    missed = [each for each in judged if each.verdict.startswith("missed")]
    silent = [each for each in judged if each.verdict.startswith("not")]
    broken = [name for name, doc in documents.items() if not doc["ok"]]
    held = sum(each.verdict == "held" for each in judged)
    answer = "no" if missed or broken else "undecided" if silent or results["not_run"] else "yes"
    table = Table(
        ("target", "found", "wanted", ""),
        [
            (
                each.target.says,
                "-" if each.found is None else f"{_number(each.found)} {each.target.unit}",
                f"{'at least' if each.target.at_least else 'at most'} {each.target.bound:g} {each.target.unit}",
                each.verdict,
            )
            for each in judged
        ],
    )
    sections: list[Section | Conclusion] = [
        Conclusion(
            answer,
            f"{held} of {len(judged)} targets held",
            summary(results)[:4],
        ),
        Section("Targets", [table]),
    ]
    for name, doc in documents.items():
        parts: list[Part] = []
        if doc["error"]:
            parts.append(f"It failed: {doc['error']}")
        for title, lines in doc["curves"].items():
            drawn = [
                charts.Curve(label, [x for x, _ in line], [y for _, y in line], _STYLES.get(label, "plain"))
                for label, line in lines.items()
                if len(line) > 1
            ]
            if drawn:
                across = "rows of a batch" if "loop" in title else "clients"
                parts.append(charts.curves(drawn, title, across, title))
        figures = Table(("figure", "value"), [(key, _number(value)) for key, value in doc["figures"].items()])
        parts.append(Details(f"{len(doc['figures'])} figures", [figures]) if len(doc["figures"]) > 8 else figures)
        if doc["power"]:
            parts.append(Details("Power and utilisation", [doc["power"]]))
        sections.append(Section(f"{name}, {doc['seconds']:.0f} s", parts, "; ".join(doc["notes"])))
    if results.get("tests"):
        sections.append(Section("Tests", [results["tests"]["says"]]))
    facts = {
        key: json.dumps(value) if isinstance(value, dict | list) else value
        for key, value in results["environment"].items()
    }
    sections.append(Section("The machine", [facts]))
    return render("Jurybox on a GPU", f"Jurybox on a GPU: {folder}", sections)


def main(arguments: Sequence[str]) -> None:
    """`python -m benchmarks.gpu.page RESULTS.json REPORT.html`; writes the report."""
    results = json.loads(Path(arguments[0]).read_text())
    Path(arguments[1]).write_text(html(results, results["environment"].get("device") or "rehearsal on the CPU"))


if __name__ == "__main__":
    main(sys.argv[1:])
