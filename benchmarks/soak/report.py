"""A soak on paper: CSV of every sample and window, tables, a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak.sampling import MIB, Sample, SharedSample
from benchmarks.soak.verdict import Row

_NOTE = (
    "A rise counts where it exceeds three times the noise around its line, and the floor. Latencies are told, but not",
    "judged: they follow whatever else the machine does.",
)
_COLUMNS = ("of", "quantity", "median", "rise over the run", "per hour", "noise", "floor")


def write_samples(file: Path, samples: Sequence[Sample], shared: Sequence[SharedSample]) -> None:
    """One line a process and moment; shared memory as a role of its own, its files as its descriptors."""
    with file.open("w", newline="") as sink:
        out = csv.writer(sink)
        out.writerow(["seconds", "role", "pid", "pss_mib", "anonymous_mib", "descriptors", "threads", "cpu_s"])
        lines = [
            (s.seconds, s.role, s.pid, s.pss / MIB, s.anonymous / MIB, s.descriptors, s.threads, s.cpu) for s in samples
        ]
        lines += [(s.seconds, "shared-memory", "", s.bytes / MIB, "", s.segments, "", "") for s in shared]
        for line in sorted(lines, key=lambda line: line[0]):
            out.writerow([round(value, 3) if isinstance(value, float) else value for value in line])


def write_windows(file: Path, windows: dict[str, list[dict[str, Any]]]) -> None:
    """One line a client and window."""
    with file.open("w", newline="") as sink:
        out = csv.writer(sink)
        out.writerow(["role", "seconds", "answered", "wrong", "errors", "p50_ms", "p99_ms"])
        for role, lines in windows.items():
            for line in lines:
                errors = len(line["errors"])
                out.writerow(
                    [role, *(line[key] for key in ("seconds", "answered", "wrong")), errors]
                    + [line[key] for key in ("p50_ms", "p99_ms")]
                )


def tables(facts: dict[str, Any], rows: Sequence[Row], windows: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    out = ["# A soak", ""]
    out += [f"- {name}: {value}" for name, value in facts.items()]
    out += ["", "| client | answered | wrong | errors |", "| --- | ---: | ---: | ---: |"]
    for role, lines in windows.items():
        answered, wrong = (sum(line[key] for line in lines) for key in ("answered", "wrong"))
        out.append(f"| {role} | {answered:,} | {wrong} | {sum(len(line['errors']) for line in lines)} |")
    out += ["", *_NOTE, ""]
    out += [f"| {' | '.join(_COLUMNS)} | |", f"| --- | --- |{' ---: |' * (len(_COLUMNS) - 2)} --- |"]
    for row in rows:
        t = row.trend
        figures = " | ".join(f"{figure:.3g}" for figure in (t.rise, t.per_hour, t.noise, t.floor))
        told = row.verdict if row.counts else "told"
        out.append(f"| {row.of} | {row.quantity} | {t.typical:.4g} | {figures} | {told} |")
    return "\n".join(out) + "\n"


def draw(
    file: Path,
    title: str,
    samples: Sequence[Sample],
    shared: Sequence[SharedSample],
    windows: dict[str, list[dict[str, Any]]],
) -> None:
    """Six quantities over time."""
    import matplotlib

    matplotlib.use("svg")
    # The same file from the same figures, and a small one: text as text, not as its outlines.
    matplotlib.rcParams.update({"svg.hashsalt": "jurybox", "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, ((memory, files, threads), (segments, median, tail)) = pyplot.subplots(2, 3, figsize=(14, 7))
    for role in dict.fromkeys(sample.role for sample in samples):
        of = [sample for sample in samples if sample.role == role]
        minutes = [sample.seconds / 60 for sample in of]
        memory.plot(minutes, [sample.anonymous / MIB for sample in of], label=role, linewidth=1.2)
        files.plot(minutes, [sample.descriptors for sample in of], label=role, linewidth=1.2)
        threads.plot(minutes, [sample.threads for sample in of], label=role, linewidth=1.2)
    segments.plot([item.seconds / 60 for item in shared], [item.segments for item in shared], label="files")
    segments.plot([item.seconds / 60 for item in shared], [item.bytes / MIB for item in shared], label="MiB")
    for role, lines in windows.items():
        there = [line for line in lines if line["answered"]]
        minutes = [line["seconds"] / 60 for line in there]
        median.plot(minutes, [line["p50_ms"] for line in there], label=role, linewidth=1)
        tail.plot(minutes, [line["p99_ms"] for line in there], label=role, linewidth=1)
    titles = {
        memory: "memory of each process's own, MiB",
        files: "open descriptors",
        threads: "threads",
        segments: "shared memory",
        median: "p50 of a call, ms",
        tail: "p99 of a call, ms",
    }
    for axis, name in titles.items():
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("minutes", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(True, alpha=0.25)
        # Room above the lines for who they are.
        top = axis.get_ylim()[1]
        if axis in (median, tail):
            axis.set_yscale("log")
            axis.set_ylim(top=4 * top)
        else:
            axis.set_ylim(bottom=0, top=1.2 * top)
        axis.legend(fontsize=7, frameon=False, loc="upper center", ncols=4)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
