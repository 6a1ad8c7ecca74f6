"""Learning curves of finished trainings, one small CSV, a drawing and a table:

    python -m benchmarks.marl.curves ppo-double_buffer-0 ppo-double_buffer-1 ... --out benchmarks/marl/results/learning

Folders are those that `jurybox train marl` wrote.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

_BIN = 2000  # turns of a point


def points(folder: Path) -> list[dict[str, Any]]:
    """Each agent's return, mean over the episodes of so many turns."""
    found: dict[int, dict[str, list[float]]] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name.startswith("return_agent") and value:
                    place = (int(row["env_steps"]) - 1) // _BIN * _BIN + _BIN
                    found.setdefault(place, {}).setdefault(name.removeprefix("return_"), []).append(float(value))
    return [
        {"run": folder.name, "turns": turns, **{agent: round(float(np.mean(all_)), 2) for agent, all_ in each.items()}}
        for turns, each in sorted(found.items())
    ]


def told(folder: Path) -> str:
    """A run's line in the table."""
    summary = json.loads((folder / "summary.json").read_text())
    settings = json.loads((folder / "settings.json").read_text())
    evaluation = summary["evaluation"]
    agents = sorted(name.removeprefix("eval_random_") for name in evaluation if name.startswith("eval_random_"))
    each = [
        f"{evaluation[f'eval_return_{agent}']:.1f} / {evaluation[f'eval_random_{agent}']:.1f} = "
        f"{evaluation[f'eval_return_{agent}'] / evaluation[f'eval_random_{agent}']:.1f}"
        for agent in agents
    ]
    return (
        f"| {settings['algorithm']} | {settings['publish_mode']} | {settings['seed']} | {summary['env_steps']:,} "
        f"| {summary['seconds']:.0f} | {' | '.join(each)} |"
    )


def draw(rows: list[dict[str, Any]], random: float, file: Path) -> None:
    """A line for each agent of each run, random play and three times that."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jurybox"  # the same file from the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    kinds = sorted({str(row["run"]).rsplit("-", 1)[0] for row in rows})
    for number, kind in enumerate(kinds):
        labels = iter([kind])
        for run in sorted({str(row["run"]) for row in rows if str(row["run"]).rsplit("-", 1)[0] == kind}):
            own = [row for row in rows if row["run"] == run]
            for agent in (name for name in own[0] if name.startswith("agent")):
                known = [(row["turns"], row[agent]) for row in own if agent in row]
                axes.plot(*zip(*known, strict=True), color=f"C{number}", linewidth=0.9, label=next(labels, None))
    axes.axhline(random, color="grey", linestyle=":", label="random play")
    axes.axhline(3 * random, color="black", linestyle=":", label="three times random play")
    axes.set(xlabel="turns", ylabel="an agent's return in an episode", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="stem of the files")
    asked = parser.parse_args()
    rows = [point for folder in asked.folders for point in points(folder)]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    agents = sorted({name for row in rows for name in row if name.startswith("agent")})
    with asked.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "turns", *agents], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summaries = [json.loads((folder / "summary.json").read_text())["evaluation"] for folder in asked.folders]
    random = [value for each in summaries for name, value in each.items() if name.startswith("eval_random_")]
    draw(rows, float(np.mean(random)), asked.out.with_suffix(".svg"))
    head = f"| algorithm | publish_mode | seed | turns | seconds | {' | '.join(agents)} |"
    table = "\n".join([head, "|---" * (5 + len(agents)) + "|", *(told(folder) for folder in asked.folders)])
    asked.out.with_suffix(".md").write_text(
        "Returns of an episode: what was learned / random play, the same episodes of an evaluation.\n\n" + table + "\n"
    )
    print(table)


if __name__ == "__main__":
    main()
