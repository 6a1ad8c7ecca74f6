"""The exposition: a snapshot through the table of metrics, in Prometheus's formats."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from jurybox.server.gateway.metrics.metric import PREFIX, Distribution, Kind, Metric
from jurybox.server.gateway.metrics.table import TABLE
from jurybox.server.watch.snapshot import Snapshot


class SnapshotCollector(Collector):
    """Prometheus's view of one snapshot. It keeps nothing: what counts is on the board."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        """As prometheus_client asks."""
        return [_family(metric, self._snapshot) for metric in TABLE]


def exposition(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """The body of an answer to a scrape and its content type, in the format that the Accept header asks for."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _family(metric: Metric, snapshot: Snapshot) -> Family:
    name, help, labels = PREFIX + metric.name, metric.help, metric.labels
    if metric.kind is Kind.HISTOGRAM:
        assert metric.buckets is not None
        histogram = HistogramMetricFamily(name, help, labels=labels)
        for values, value in metric.read(snapshot):
            assert isinstance(value, Distribution)
            histogram.add_metric(values, metric.buckets.cumulated(value), value.total)
        return histogram
    family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    single = family(name, help, labels=labels)
    for values, value in metric.read(snapshot):
        assert not isinstance(value, Distribution)
        single.add_metric(values, value)
    return single
