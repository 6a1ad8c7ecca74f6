"""The measured parts of docs/performance.md: written from the JSON they cite. All tables are beside it, in DATE.md.

    python -m benchmarks.serving.page                                    # again, from what the page cites
    python -m benchmarks.serving.page benchmarks/serving/results/DATE.json ...    # cite these instead

A part stands between two comments, the first of which names the JSON. Citing another one removes the files of the run
that was cited before, where nothing else in the repository names them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.serving.results import Results

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
PARTS = ("crossover", "measured")
MEASURED = (
    "client/jurybox/client",
    "protos/jurybox/protocol",
    "server/jurybox/server/engine",
    "server/jurybox/server/relay",
    "server/jurybox/server/frontend",
    "native/serving",
)
"""What a request passes through."""


def cited(results: Results) -> str:
    """When, where and what was measured, in a sentence or two."""
    about, machine = results.about, results.about["machine"]
    took = f" in {about['duration_s'] / 60:.0f} minutes" if "duration_s" in about else ""
    return (
        f"Measured {about['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"{machine['kernel']}, Python {machine['python']}, commit {about['commit']}{took}: `{about['command']}`. "
        f"Medians of {about['rounds']} interleaved windows of {about['window_s']:g} s, every answer checked."
    )


def newer(commit: str) -> float | None:
    """The share of the lines a request passes through that came after a commit; None: git here does not know it."""
    lines = ["git", "grep", "-c", "", "--", *MEASURED]
    counted = subprocess.run(lines, cwd=ROOT, capture_output=True, text=True, check=False)
    found = subprocess.run(
        ["git", "diff", "--numstat", commit, "--", *MEASURED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode or counted.returncode:
        return None
    added = sum(int(line.split()[0]) for line in found.stdout.splitlines() if line[0].isdigit())
    return added / sum(int(line.rsplit(":", 1)[1]) for line in counted.stdout.splitlines())


def age(results: Results) -> str:
    """How much newer the code is, in tens of percent, so that it is not written anew with every change."""
    share = newer(results.about["commit"])
    if share is None or round(share, 1) == 0:
        return ""
    return f" Since then some {round(share, 1):.0%} of the lines a request passes through are new."


def versions(results: Results) -> str:
    """The packages that took part."""
    found: dict[str, set[str]] = {}
    for listed in results.about["versions"].values():
        for package, version in listed.items():
            found.setdefault(package, set()).add(version)
    said = ", ".join(f"{package} {' or '.join(sorted(which))}" for package, which in sorted(found.items()))
    return f"Versions: {said}."


def part(name: str, files: Sequence[Path]) -> str:
    """A part of the page, between and with its two comments."""
    from benchmarks.serving import crossover, report

    named = " ".join(file.name for file in files) or "none"
    lines = [f"<!-- {name}: {named}; written by python -m benchmarks.serving.page -->", ""]
    if not files:
        lines += [f"{crossover.FIRST} No run is cited yet." if name == "crossover" else "No run is cited yet.", ""]
    for file in files:
        results = Results.read(file)
        drawn = file.with_suffix(".svg")
        if name == "crossover":
            lines += [*crossover.answer(results), "", _picture(drawn, "a server over own copies, by width"), ""]
            lines += [*crossover.rates(results), cited(results) + age(results), _all(file, "CPU and memory, too"), ""]
        else:
            lines += [_picture(drawn, "throughput and p99 over clients"), "", *report.rates(results, "vector")]
            lines += [report.goals_in_short(results), "", *report.missing(results, "###")]
            lines += [cited(results) + age(results)]
            lines += [_all(file, "latencies, CPU, 64 rows a request, images, goals, versions"), ""]
    return "\n".join([*lines, f"<!-- end of {name} -->"])


def sources(name: str, text: str) -> list[Path]:
    """The JSON files that a part cites."""
    found = re.search(rf"<!-- {name}: ([^;]*);", text)
    names = found[1].split() if found else []
    return [ROOT / "benchmarks" / "serving" / "results" / name for name in names if name != "none"]


def rewritten(text: str, name: str, files: Sequence[Path]) -> str:
    """The page's text with a part written anew."""
    pattern = re.compile(rf"<!-- {name}: .*?<!-- end of {name} -->", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"docs/performance.md has no part <!-- {name}: FILE; ... --> ... <!-- end of {name} -->")
    return pattern.sub(lambda _: part(name, files), text)


def cite(name: str, *files: Path) -> list[str]:
    """Have the page cite these files in a part; gives what was done."""
    before = PAGE.read_text()
    old = sources(name, before)
    text = rewritten(before, name, files)
    PAGE.write_text(text)
    done = [f"wrote {PAGE}"]
    for file in old:
        if file not in files and not _named(file.stem):
            for written in sorted(file.parent.glob(f"{file.stem}.*")):
                written.unlink()
                done.append(f"removed {written}, which nothing names any more")
    return done


def _named(stem: str) -> bool:
    """Whether any tracked file but that run's own names it."""
    command = ["git", "grep", "-lF", stem, "--", ".", f":!benchmarks/serving/results/{stem}.*"]
    return bool(subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout.strip())


def _all(file: Path, what: str) -> str:
    tables = Path("..") / file.with_suffix(".md").relative_to(PAGE.parent.parent)
    return f"[All tables]({tables}): {what}."


def _picture(file: Path, says: str) -> str:
    return f"![{says}]({Path('..') / file.relative_to(PAGE.parent.parent)})" if file.exists() else ""


def main(arguments: Sequence[str]) -> int:
    asked: dict[str, list[Path]] = {}
    for argument in arguments:
        file = Path(argument).resolve()
        asked.setdefault("crossover" if file.name.startswith("crossover") else "measured", []).append(file)
    for name in asked or PARTS:
        for line in cite(name, *(asked.get(name) or sources(name, PAGE.read_text()))):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
