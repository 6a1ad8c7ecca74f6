"""The page of metrics, the dashboard and the rules match the table of metrics."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from jurybox.server.gateway.metrics import TABLE

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docker" / "monitoring" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)

NAMES = {metric.full_name for metric in TABLE}


@pytest.mark.parametrize("path", generate.files(), ids=str)
def test_generated_files_are_current(path):
    assert (ROOT / path).read_text() == generate.files()[path], "run make monitoring"


def test_every_metric_has_a_panel_or_a_reason_for_none():
    shown = [name for names in generate.LAYOUT.values() for name in names]
    assert sorted([*shown, *generate.NOT_SHOWN]) == sorted(metric.name for metric in TABLE)


def expressions() -> list[str]:
    dashboard = json.loads((ROOT / "docker/monitoring/grafana/dashboards/jurybox.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = re.findall(r"expr: (.+)", (ROOT / "docker/monitoring/prometheus/alerts.yml").read_text())
    page = re.findall(r"jurybox_\w+", (ROOT / "docs/metrics.md").read_text())
    return [*panels, *map(json.loads, rules), *page]


def test_queries_ask_for_metrics_there_are():
    asked = {name for text in expressions() for name in re.findall(r"jurybox_\w+", text)}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in NAMES else name for name in asked}
    assert bare <= NAMES


def test_panels_do_not_lie_on_each_other():
    panels = generate.dashboard()["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
