"""What a metric is: its definition, and how its samples are read from a snapshot of the board."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from jurybox.server.gateway.metrics_table import TABLE
from jurybox.server.watch.sample import Snapshot

PREFIX = "jurybox_"


class Kind(StrEnum):
    """As Prometheus knows them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Distribution:
    """A histogram's sample: `counts` (buckets,) as the board keeps them, and the sum of all values in base units."""

    counts: NDArray[np.uint64]
    total: float


Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float | Distribution]]


@dataclass(frozen=True)
class Buckets:
    """Which of the board's powers of two are told: upper bounds 2^first to 2^last, divided by `scale`.

    A bucket of the board counts whole numbers below 2^i, so that of `exact` ones (rows) the bound is 2^i - 1.
    """

    first: int
    last: int
    scale: float = 1.0
    exact: bool = False

    def cumulated(self, value: Distribution) -> list[tuple[str, float]]:
        """(upper bound, values up to it), the last bound +Inf, as Prometheus wants them."""
        upto = np.cumsum(value.counts)
        told = [(str((2**i - self.exact) / self.scale), float(upto[i])) for i in range(self.first, self.last + 1)]
        return [*told, ("+Inf", float(upto[-1]))]


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Attributes:
        name: without prefix; a counter's without `_total`.
        labels: names of the labels that tell its samples apart.
        help: what it is; one sentence.
        use: what to conclude from it.
        read: its samples in a snapshot.
        unit: "seconds", "bytes", "rows", "versions", "ratio"; "" for what is counted one by one.
        like: what Triton or vLLM call the same.
        buckets: of a histogram.
    """

    name: str
    kind: Kind
    labels: Labels
    help: str
    use: str
    read: Callable[[Snapshot], Samples]
    unit: str = ""
    like: str = ""
    buckets: Buckets | None = None

    @property
    def full_name(self) -> str:
        """As it is queried; a histogram's with _bucket, _sum or _count behind it."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


def by_model(read: Callable[[Snapshot, int], float | Distribution | None]) -> Callable[[Snapshot], Samples]:
    """One sample a model, read by (snapshot, its place in the document); none where that is None."""

    def samples(snapshot: Snapshot) -> Samples:
        for at, model in enumerate(snapshot.models):
            if (value := read(snapshot, at)) is not None:
                yield (model["name"],), value

    return samples


def by_engine(read: Callable[[NDArray[Any], Snapshot, int], float | None]) -> Callable[[Snapshot], Samples]:
    """One sample an engine, read from (its record on the board, snapshot, its number); none where that is None."""

    def samples(snapshot: Snapshot) -> Samples:
        for index, record in enumerate(snapshot.engines):
            if (value := read(record, snapshot, index)) is not None:
                yield (str(index),), value

    return samples


def counted(field: str) -> Callable[[Snapshot], Samples]:
    """A counter of the board summed over engines, one sample a model."""
    return by_model(lambda snapshot, at: float(snapshot.counters[field][:, at].sum()))


def distributed(field: str, total: str, scale: float) -> Callable[[Snapshot], Samples]:
    """A histogram of the board summed over engines, one sample a model; `total` names the counter of its sum."""

    def read(snapshot: Snapshot, at: int) -> Distribution:
        counters = snapshot.counters[:, at]
        return Distribution(counters[field].sum(axis=0), float(counters[total].sum()) / scale)

    return by_model(read)


def told(values: Callable[[Snapshot], Mapping[str, float]]) -> Callable[[Snapshot], Samples]:
    """Samples with one label, from a mapping of its values."""
    return lambda snapshot: [((label,), value) for label, value in values(snapshot).items()]


# ----
# The exposition: a snapshot through the table of metrics, in Prometheus's formats.


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
