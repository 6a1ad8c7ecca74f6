"""Write docs/metrics.md, the Grafana dashboard and Prometheus's rules from the table of metrics.

.venv/bin/python docker/monitoring/generate.py           # write them
.venv/bin/python docker/monitoring/generate.py --check   # exit status 1 if one is not current
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jurybox.server.gateway.metrics import TABLE, Metric, MetricKind

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("docker/monitoring")
METRICS = {metric.name: metric for metric in TABLE}

# The dashboard: rows of panels, one panel a metric.
LAYOUT: dict[str, list[str]] = {
    "Requests": ["requests", "request_failures", "request_timeouts", "rows", "request_duration_seconds",
                 "queue_wait_seconds", "forward_duration_seconds"],
    "Batches": ["batches", "batch_rows", "rows_waiting", "cache_hits", "cache_misses"],
    "Engines": ["engine_up", "engine_restarts", "engine_busy_seconds", "engine_requests",
                "engine_expected_wait_seconds", "engine_heartbeat_age_seconds"],
    "Weights": ["weights_version", "weights_newest_version", "weights_lag_versions", "weights_publications",
                "weights_updates", "weights_update_duration_seconds", "weights_age_seconds", "versions_not_held"],
    "Clients and memory": ["lanes_in_use", "rows_in_use", "sessions_in_use", "arena_rows", "arena_bytes",
                           "shared_memory_bytes", "device_bytes", "model_ready", "client_bytes", "client_limit_bytes",
                           "client_calls", "client_refusals"],
    "Robots": ["robot_connections", "robot_requests", "robot_request_failures", "robot_delay_seconds",
               "robot_batch_wait_seconds", "robot_jitter_seconds", "robot_client_delay_seconds",
               "robot_client_jitter_seconds", "robot_client_chunks_dropped", "robot_client_starved_steps",
               "robot_sessions", "robot_connections_opened", "robot_connections_refused"],
}  # fmt: skip
COLLAPSED = {"Robots"}  # rows that are opened by whoever needs them
NOT_SHOWN = {"build_info", "start_time_seconds", "model_audit", "client_limit_calls"}

# Alerting rules: name, PromQL over metrics of the table, duration, summary.
ALERTS = [
    ("JuryboxDown", 'up{job="jurybox"} == 0', "30s", "nothing answers at {{ $labels.instance }}/metrics"),
    ("JuryboxEngineDown", "{engine_up} == 0", "30s", "engine {{ $labels.engine }} does not serve"),
    ("JuryboxEngineSilent", "{engine_heartbeat_age_seconds} > 10", "0s",
     "engine {{ $labels.engine }} has shown no sign of life for {{ $value }} s; at engine_timeout it is replaced"),
    ("JuryboxEngineRestarts", "increase({engine_restarts}[10m]) > 2", "0s",
     "engine {{ $labels.engine }} was started again {{ $value }} times in ten minutes; its log says why"),
    ("JuryboxModelNotReady", "{model_ready} == 0", "2m", "model {{ $labels.model }} cannot answer; /health says why"),
    ("JuryboxFailures", "rate({request_failures}[5m]) > 0", "2m",
     "requests to {{ $labels.model }} get errors ({{ $labels.reason }})"),
    ("JuryboxTimeouts", "rate({request_timeouts}[1m]) > 0", "0s",
     "requests to {{ $labels.model }} are not answered within their time-outs"),
    ("JuryboxLag", "{weights_lag_versions} > 10", "1m",
     "model {{ $labels.model }} computes with weights {{ $value }} versions old"),
]  # fmt: skip

_UNITS = {"seconds": "s", "bytes": "bytes", "rows": "short", "versions": "short", "": "short"}
_LEGEND = {"model": "{{model}}", "engine": "engine {{engine}}", "kind": "{{kind}}", "port": "{{port}}"}


def files() -> dict[Path, str]:
    """The content of every generated file, by its path in the repository."""
    return {
        Path("docs/metrics.md"): page(),
        HERE / "grafana/dashboards/jurybox.json": json.dumps(dashboard(), indent=1) + "\n",
        HERE / "prometheus/alerts.yml": alerts(),
    }


def page() -> str:
    """docs/metrics.md."""
    head = """\
# Metrics

<!-- Made by docker/monitoring/generate.py from the table in server/jurybox/server/gateway/metrics.py. -->

Every number that a server gives to Prometheus, with what it tells and what to change when it is wrong.
[Watch it](watching.md) has the other ways to look at a server.

```bash
curl http://127.0.0.1:8000/metrics
```

Prometheus's text format, or OpenMetrics where the scraper accepts it. The gateway reads the numbers from shared memory
(the scoreboard), so a scrape costs the engines nothing. Sums and counts are those of all engines; an engine that is
started again goes on counting, and only a new server, or a model that was unloaded, begins at zero. Those of `robot_`
are counted in the gateway, and begin at zero with it. Histograms have a bucket for every power of two, from a
microsecond on, without gaps; `le` of a time is 2^n nanoseconds, of rows 2^n - 1.

The last column names what Triton (`nv_`) or vLLM (`vllm:`) call the same, or nearly.
"""
    rows = "\n".join(
        f"| `{metric.full_name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels) or ''} | "
        f"{metric.help} {metric.use} | {', '.join(f'`{name}`' for name in metric.like.split(', ') if name)} |"
        for metric in TABLE
    )
    return f"""{head}
| metric | type | labels | meaning | known as |
| --- | --- | --- | --- | --- |
{rows}

## Prometheus and Grafana

`docker/monitoring/` has a Prometheus configuration with rules to alert by, and a Grafana dashboard with a panel for
every metric, made from the same table.

```bash
prometheus --config.file=docker/monitoring/prometheus/prometheus.yml
```

Useful questions, in PromQL:

```promql
sum(rate(jurybox_rows_total[1m]))                                                     # rows a second
histogram_quantile(0.99, sum by (model, le) (rate(jurybox_request_duration_seconds_bucket[1m])))
rate(jurybox_rows_total[1m]) / rate(jurybox_batches_total[1m])                        # mean batch
rate(jurybox_queue_wait_seconds_sum[1m]) / rate(jurybox_request_duration_seconds_sum[1m])  # share of waiting
rate(jurybox_engine_busy_seconds_total[1m])                                           # how full an engine is
```
"""


def dashboard() -> dict[str, Any]:
    """The dashboard's JSON model."""
    return {
        "title": "Jurybox",
        "uid": "jurybox",
        "tags": ["jurybox"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                *(
                    {
                        "name": label, "type": "query", "label": label, "multi": True, "includeAll": True,
                        "allValue": ".*", "datasource": _SOURCE, "refresh": 2,
                        "query": {"query": f"label_values({METRICS[name].full_name}, {label})", "refId": label},
                        "current": {"text": "All", "value": "$__all"},
                    }
                    for label, name in (("instance", "build_info"), ("model", "model_ready"))
                ),
            ]
        },
        "panels": list(_panels()),
    }  # fmt: skip


def alerts() -> str:
    """Prometheus's rule file."""
    lines = ["# Made by docker/monitoring/generate.py.", "groups:", "  - name: jurybox", "    rules:"]
    for alert, expression, hold, summary in ALERTS:
        lines += [
            f"      - alert: {alert}",
            f"        expr: {json.dumps(_named(expression))}",
            f"        for: {hold}",
            "        annotations:",
            f"          summary: {json.dumps(summary)}",
        ]
    return "\n".join(lines) + "\n"


def _named(expression: str) -> str:
    """PromQL with the table's {names} written out; another's is an error."""
    return re.sub(r"\{(\w+)\}", lambda found: METRICS[found[1]].full_name, expression)


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _ACROSS = 8, 7, 3


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, names in LAYOUT.items():
        number += 1
        collapsed = title in COLLAPSED
        row = {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        y += 1
        panels = []
        for at, name in enumerate(names):
            number += 1
            place = {"x": _WIDTH * (at % _ACROSS), "y": y + _HEIGHT * (at // _ACROSS), "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(METRICS[name], number, place))
        yield {**row, "collapsed": collapsed, "panels": panels if collapsed else []}
        if not collapsed:
            yield from panels
            y += _HEIGHT * -(-len(names) // _ACROSS)


def _panel(metric: Metric, number: int, place: dict[str, int]) -> dict[str, Any]:
    queries = list(_queries(metric))
    unit = "percentunit" if metric.name == "engine_busy_seconds" else _UNITS[metric.unit]
    per_second = metric.kind is MetricKind.COUNTER and metric.name != "engine_restarts" and unit != "percentunit"
    return {
        "id": number,
        "type": "timeseries",
        "title": f"{metric.name.removesuffix('_seconds').replace('_', ' ')}{' per second' if per_second else ''}",
        "description": f"{metric.help} {metric.use}",
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "lineWidth": 1}}, "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for at, (expression, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def _queries(metric: Metric) -> Iterator[tuple[str, str]]:
    """PromQL and legend for a metric, by its kind."""
    chosen = '{instance=~"$instance"' + (', model=~"$model"}' if "model" in metric.labels else "}")
    by = ", ".join(("instance", *metric.labels))
    shown = ("{{instance}}", *(_LEGEND.get(label, "{{%s}}" % label) for label in metric.labels))  # noqa: UP031  braces
    legend = " ".join(shown)
    name = f"{metric.full_name}{chosen}"
    if metric.kind is MetricKind.HISTOGRAM:
        buckets = f"sum by ({by}, le) (rate({metric.full_name}_bucket{chosen}[$__rate_interval]))"
        for quantile in (0.5, 0.99):
            yield f"histogram_quantile({quantile}, {buckets})", f"{legend} p{quantile * 100:.0f}"
    elif metric.name == "engine_restarts":
        yield f"sum by ({by}) (increase({name}[$__range]))", legend
    elif metric.name == "engine_busy_seconds":
        # A batch counts at its end, and two may be in flight: a rate over a short time can exceed one.
        yield f"clamp_max(sum by ({by}) (rate({name}[$__rate_interval])), 1)", legend
    elif metric.kind is MetricKind.COUNTER:
        yield f"sum by ({by}) (rate({name}[$__rate_interval]))", legend
    else:
        yield f"max by ({by}) ({name})", legend


def main() -> int:
    """Write, or with --check compare."""
    stale = [path for path, text in files().items() if not (ROOT / path).is_file() or (ROOT / path).read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path} is not what the table of metrics says: run make monitoring\n")
        return 1 if stale else 0
    for path in stale:
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(files()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
