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


def shown() -> dict[str, list[str]]:
    """The queries of each panel, those in collapsed rows too, by title."""
    panels = generate.dashboard()["panels"]
    every = [each for panel in panels for each in (panel, *panel.get("panels", ()))]
    return {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in every if "targets" in panel}


def expressions() -> list[str]:
    panels = [query for queries in shown().values() for query in queries]
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


def test_every_panel_tells_instances_apart():
    for title, queries in shown().items():
        for query in queries:
            assert re.search(r"by \(instance\b", query) and '{instance=~"$instance"' in query, title


def test_an_engine_is_never_busier_than_always():
    assert all(query.startswith("clamp_max(") and query.endswith(", 1)") for query in shown()["engine busy"])


def test_the_panels_of_robots_are_in_a_collapsed_row():
    rows = {panel["title"]: panel for panel in generate.dashboard()["panels"] if panel["type"] == "row"}
    assert [title for title, row in rows.items() if row["collapsed"]] == ["Robots"]
    assert len(rows["Robots"]["panels"]) == len(generate.LAYOUT["Robots"])


def test_an_alert_uses_the_age_of_the_heartbeat():
    assert any("jurybox_engine_heartbeat_age_seconds >" in json.loads(rule) for rule in re.findall(
        r"expr: (.+)", (ROOT / "docker/monitoring/prometheus/alerts.yml").read_text()
    ))  # fmt: skip
