"""Throughput and p99 over clients, one column a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.serving.cases import CASES
from benchmarks.serving.contender import CONTENDERS
from benchmarks.serving.results import Results

_OURS = {
    "jurybox-native": "#c1121f", "jurybox-native-exported": "#780000",
    "jurybox-zmq": "#f77f00", "jurybox-tcp": "#e36414", "jurybox-http": "#fb8b24",
    "jurybox-grpc": "#9a031e",
}  # fmt: skip
_STYLES = {"limit": ("black", ":"), "plain-zmq": ("#003049", "-"), "own-copy": ("#777777", "--")}
_SKIPPED = (  # too near to their neighbours to tell apart
    "limit-best",
    "own-copy-exported",
    "jurybox-native-rows",
    "jurybox-zmq-rows",
)


def draw(results: Results, file: Path) -> Path | None:
    """Draw a run; None where it has nothing to draw."""
    cases = [case for case in CASES.values() if any(point.case == case.name for point in results.points)]
    if not cases:
        return None
    plots = pyplot()
    figure, axes = plots.subplots(2, len(cases), figsize=(max(8, 4 * len(cases)), 6.5), squeeze=False)
    colours = iter(plots.get_cmap("tab20").colors)  # type: ignore[attr-defined]
    labelled: dict[str, Any] = {}
    for name in CONTENDERS:
        if name in _SKIPPED:
            continue
        colour, dash = (_OURS[name], "-") if name in _OURS else _STYLES.get(name, (None, "-"))
        colour = colour or next(colours)
        width = 2.4 if name in _OURS else 1.2
        for column, case in enumerate(cases):
            points = sorted(
                (p for p in results.points if (p.case, p.contender) == (case.name, name) and p.windows),
                key=lambda point: point.clients,
            )
            if not points:
                continue
            clients = [point.clients for point in points]
            style = {"color": colour, "linestyle": dash, "linewidth": width, "marker": "o", "markersize": 3}
            rates = [point.median("requests_per_s") for point in points]
            (line,) = axes[0][column].plot(clients, rates, **style)
            if name != "limit":  # a batch's own time is no latency of a request
                axes[1][column].plot(clients, [point.median("p99_us") / 1e3 for point in points], **style)
            labelled.setdefault(results.title(name), line)
    for column, case in enumerate(cases):
        axes[0][column].set_title(f"{case.name}\n{case.title}", fontsize=7)
        axes[1][column].set_xlabel("clients")
        for row in (0, 1):
            axis = axes[row][column]
            axis.set_xscale("log", base=4)
            axis.set_yscale("log")
            axis.minorticks_off()
            counts = sorted({point.clients for point in results.points if point.case == case.name})
            axis.set_xticks(counts, [str(count) for count in counts])
            axis.grid(True, alpha=0.25)
    axes[0][0].set_ylabel("requests/s")
    axes[1][0].set_ylabel("p99, ms")
    figure.legend(list(labelled.values()), list(labelled), loc="lower center", ncol=3, fontsize=8, frameon=False)
    save(figure, file, (0, 0.16, 1, 1))
    return file


def pyplot() -> Any:
    """Matplotlib's, set up for small files that are the same from the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "jurybox", "svg.fonttype": "none"})  # text as text, not as its outlines
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, file: Path, room: tuple[float, float, float, float] = (0, 0, 1, 1)) -> None:
    """Write a figure; `room` is what its axes may fill."""
    figure.tight_layout(rect=room)
    figure.savefig(file, metadata={"Date": None})
    pyplot().close(figure)
