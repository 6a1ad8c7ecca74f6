"""The table of metrics: their definitions, and functions that read their samples from a snapshot of the scoreboard."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jurybox import native
from jurybox.client.chunks import DROPPED
from jurybox.protocol.revision import source_revision
from jurybox.protocol.scoreboard import BATCH_BUCKETS, EngineState
from jurybox.protocol.wire import PROTOCOL_VERSION
from jurybox.server.gateway.robots.counters import FAILURES as FAILURES_AT_PORT
from jurybox.server.gateway.robots.counters import REFUSALS, PortCounters, Times
from jurybox.server.security.limits import GRPC, HTTP, REASONS, ROBOTS
from jurybox.server.watch.sample import FAILURES, Snapshot

PREFIX = "jurybox_"


class MetricKind(StrEnum):
    """The metric types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Distribution:
    """A histogram's sample: `counts` (buckets,) as on the scoreboard, and the `total` of the values in base units."""

    counts: NDArray[np.uint64]
    total: float


Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float | Distribution]]


@dataclass(frozen=True)
class Buckets:
    """The buckets of a histogram: upper bounds 2^first to 2^last, divided by `scale`.

    A bucket of the scoreboard counts integers below 2^i, so for `exact` values (rows) the bound is 2^i - 1.
    """

    first: int
    last: int
    scale: float = 1.0
    exact: bool = False

    def cumulated(self, value: Distribution) -> list[tuple[str, float]]:
        """Return (upper bound, cumulative count) pairs; the last bound is +Inf."""
        upto = np.cumsum(value.counts)
        buckets = [(str((2**i - self.exact) / self.scale), float(upto[i])) for i in range(self.first, self.last + 1)]
        return [*buckets, ("+Inf", float(upto[-1]))]


@dataclass(frozen=True)
class Metric:
    """A metric, one row of the table.

    Attributes:
        name: its name, without the prefix and a counter's `_total`.
        kind: its Prometheus type.
        labels: names of its labels.
        help: what it measures, in one sentence.
        use: what to conclude from its value.
        read: returns its samples in a snapshot.
        unit: "seconds", "bytes", "rows", "versions", "ratio"; "" for a number of events or objects.
        like: names of the same metric in Triton and vLLM.
        buckets: the buckets of a histogram.
    """

    name: str
    kind: MetricKind
    labels: Labels
    help: str
    use: str
    read: Callable[[Snapshot], Samples]
    unit: str = ""
    like: str = ""
    buckets: Buckets | None = None

    @property
    def full_name(self) -> str:
        """The name in queries; a histogram's series add _bucket, _sum or _count."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is MetricKind.COUNTER else ''}"


def by_model(read: Callable[[Snapshot, int], float | Distribution | None]) -> Callable[[Snapshot], Samples]:
    """Return a reader of one sample per model; `read(snapshot, model index)` returns it, or None for no sample."""

    def samples(snapshot: Snapshot) -> Samples:
        for at, model in enumerate(snapshot.models):
            if (value := read(snapshot, at)) is not None:
                yield (model["name"],), value

    return samples


def by_engine(read: Callable[[NDArray[Any], Snapshot, int], float | None]) -> Callable[[Snapshot], Samples]:
    """Return a reader of one sample per engine.

    Args:
        read: called with (record, snapshot, engine index); returns the sample, or None for no sample.
    """

    def samples(snapshot: Snapshot) -> Samples:
        for index, record in enumerate(snapshot.engines):
            if (value := read(record, snapshot, index)) is not None:
                yield (str(index),), value

    return samples


def counted(field: str) -> Callable[[Snapshot], Samples]:
    """Return a reader of a scoreboard counter, summed over engines: one sample per model."""
    return by_model(lambda snapshot, at: float(snapshot.counters[field][:, at].sum()))


def distributed(field: str, total: str, scale: float) -> Callable[[Snapshot], Samples]:
    """Return a reader of a scoreboard histogram, summed over engines: one sample per model.

    Args:
        field: the histogram's counters.
        total: the counter of the sum of its values.
        scale: divisor that converts this sum to base units.
    """

    def read(snapshot: Snapshot, at: int) -> Distribution:
        counters = snapshot.counters[:, at]
        return Distribution(counters[field].sum(axis=0), float(counters[total].sum()) / scale)

    return by_model(read)


def labelled(values: Callable[[Snapshot], Mapping[str, float]]) -> Callable[[Snapshot], Samples]:
    """Return a reader of samples with one label; `values` returns them by label value."""
    return lambda snapshot: [((label,), value) for label, value in values(snapshot).items()]


def by_port(read: Callable[[PortCounters], float | Distribution]) -> Callable[[Snapshot], Samples]:
    """Return a reader of one sample per robot port."""
    return lambda snapshot: [((name,), read(counters)) for name, counters in snapshot.ports.items()]


def by_port_and(
    reasons: Sequence[str], read: Callable[[PortCounters], Mapping[str, int]]
) -> Callable[[Snapshot], Samples]:
    """Return a reader of one sample per robot port and reason."""
    return lambda snapshot: [
        ((name, reason), float(read(counters).get(reason, 0)))
        for name, counters in snapshot.ports.items()
        for reason in reasons
    ]


def at_port(read: Callable[[PortCounters], Times]) -> Callable[[Snapshot], Samples]:
    """Return a reader of one histogram per robot port."""
    return by_port(lambda counters: Distribution(read(counters).counts, read(counters).total))


# Every metric of `/metrics`. The exposition, docs/metrics.md and the Grafana dashboard are all generated from this
# table.
#
# Names follow those of Triton and vLLM, with base units and Prometheus's suffixes. There are few labels on purpose:
# `model` or `engine`, whose number is bounded by the scoreboard. The counters are on the scoreboard, which the
# supervisor owns, so that a restarted engine continues the counts of its predecessor.


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_MODEL, _ENGINE, _PORT = ("model",), ("engine",), ("port",)
_NS = 1e9
_SHORT = Buckets(10, 36, _NS)  # a microsecond to a minute
_LONG = Buckets(17, 39, _NS)  # an eighth of a millisecond to nine minutes
_ROWS = Buckets(1, BATCH_BUCKETS - 3, exact=True)  # 1 to 131071, above the largest max_batch


def _failures(snapshot: Snapshot) -> Samples:
    for at, model in enumerate(snapshot.models):
        for reason in FAILURES:
            yield (model["name"], reason), float(snapshot.counters[reason][:, at].sum())


def _shared_bytes(snapshot: Snapshot) -> dict[str, float]:
    kinds: Counter[str] = Counter()
    for name, size in snapshot.document["memory"]["segments"].items():
        kinds[name.rsplit("-", 2)[-2]] += size
    return dict(kinds)


def _arena_bytes(snapshot: Snapshot, at: int) -> float | None:
    segment = snapshot.models[at]["arena"]["segment"]
    size: float | None = snapshot.document["memory"]["segments"].get(segment)
    return size


_HELD = ("received", "answers", "calls")  # in the order of native.Budget
_AT_DOOR = {"http": (HTTP, 2), "grpc": (GRPC, 3), "robots": (ROBOTS, 2)}  # its number, and how many of these it counts


def _held(read: Callable[[native.Budget, int], int], of_relay: str) -> Callable[[Snapshot], Samples]:
    """Return a reader of bytes received and of answers: from the gateway's budget, and from what the relay tells."""

    def samples(snapshot: Snapshot) -> Samples:
        for kind, name in enumerate(_HELD[:2]):
            if snapshot.budget is not None:
                yield ("gateway", name), float(read(snapshot.budget, kind))
            if name in (relay := snapshot.document["relay"]):  # with keys libzmq counts no requests
                yield ("relay", name), float(relay[name][of_relay])

    return samples


def _refusals(snapshot: Snapshot) -> Samples:
    for reason, whose in enumerate(REASONS, 1):
        if (budget := snapshot.budget) is not None:
            for door, (number, kinds) in _AT_DOOR.items():
                for kind in range(kinds):
                    yield (door, _HELD[kind], whose), float(budget.refused(kind, reason, number))
        if (refused := snapshot.document["relay"].get("refused")) is not None:
            yield ("tcp", "received", whose), float(refused[whose])


def _build(snapshot: Snapshot) -> Samples:
    server = snapshot.document["server"]
    labels = (server["build"], source_revision() or "", str(PROTOCOL_VERSION), platform.python_version(), server["id"])
    yield labels, 1.0


TABLE = (
    Metric(
        "requests", _COUNTER, _MODEL, "Tickets answered by the model, on every transport.",
        "A ticket is a request of a client on this host. One of the gateway carries all requests that arrived "
        "together, and more rows than fit into one are sent as several, so use `rows` for the throughput. Failed "
        "tickets are not included.", counted("requests"),
        like="nv_inference_request_success, vllm:request_success_total",
    ),
    Metric(
        "request_failures", _COUNTER, ("model", "reason"), "Tickets that got an error from the engine.",
        "`failed`: the model raised or broke its spec, see the engine's log. `expired`: the deadline passed while the "
        "ticket waited, so the server is too slow for its clients' time-outs. `refused`: rows outside the lane.",
        _failures, like="nv_inference_request_failure",
    ),
    Metric(
        "request_timeouts", _COUNTER, _MODEL, "Requests to the gateway that were not answered within their time-outs.",
        "It grows while an engine hangs, when `request_failures` cannot. Counted in the gateway, with whose process it "
        "begins at zero.", by_model(lambda snapshot, at: float(snapshot.timeouts.get(snapshot.models[at]["name"], 0))),
    ),
    Metric(
        "versions_not_held", _COUNTER, _MODEL, "Tickets for a weights version that was not kept, or no longer.",
        "Not a failure of the model: the client requested a version too late, or one that was never published. "
        "`keep_versions` sets how many are kept.", counted("not_held"),
    ),
    Metric(
        "cache_hits", _COUNTER, _MODEL, "Rows that were answered from the model's cache (`cache_mib`).",
        "They are included in `rows`. Few beside the misses: rows seldom repeat, or learners publish often.",
        counted("cache_hits"), "rows", like="nv_cache_num_hits_per_model",
    ),
    Metric(
        "cache_misses", _COUNTER, _MODEL, "Rows that a model with a cache has computed.",
        "Growing while `cache_hits` stands still: `cache_mib` may be smaller than the rows that repeat.",
        counted("cache_misses"), "rows", like="nv_cache_num_misses_per_model",
    ),
    Metric(
        "rows", _COUNTER, _MODEL, "Rows computed.",
        "The throughput, and the work of the device; a request has one row or more. Rows from a cache are included.",
        counted("rows"), "rows", like="nv_inference_count",
    ),
    Metric(
        "batches", _COUNTER, _MODEL, "Batches computed.",
        "Rows divided by batches is the mean batch: near 1 under load means that clients send one after another.",
        counted("batches"), like="nv_inference_exec_count",
    ),
    Metric(
        "request_duration_seconds", _HISTOGRAM, _MODEL, "From a ticket's submission to the engine's reply.",
        "The latency that clients on this host see. Requests over HTTP and gRPC also wait in the gateway for the "
        "ticket before theirs. If it grows while `forward_duration_seconds` does not, tickets queue.",
        distributed("request_ns", "request_total_ns", _NS), "seconds",
        like="nv_inference_request_duration_us, vllm:e2e_request_latency_seconds", buckets=_SHORT,
    ),
    Metric(
        "queue_wait_seconds", _HISTOGRAM, _MODEL, "From a ticket's submission to the start of its batch.",
        "Up to one forward is normal: a ticket waits for the batch that is computing. Much more: raise `max_batch`, "
        "add replicas, or connect fewer clients.",
        distributed("queue_ns", "queue_total_ns", _NS), "seconds",
        like="nv_inference_queue_duration_us, vllm:request_queue_time_seconds", buckets=_SHORT,
    ),
    Metric(
        "forward_duration_seconds", _HISTOGRAM, _MODEL, "Time of a batch: gather its rows, compute, write its outputs.",
        "The lower bound of every latency. Use it to compare `compile`, `dtype` and `max_batch`.",
        distributed("forward_ns", "forward_total_ns", _NS), "seconds",
        like="nv_inference_compute_infer_duration_us, vllm:request_inference_time_seconds", buckets=_SHORT,
    ),
    Metric(
        "batch_rows", _HISTOGRAM, _MODEL, "Rows of a batch.",
        "All at `max_batch` with a long queue: raise `max_batch`. All at 1: few clients, or they send in turns.",
        distributed("batch_rows", "rows", 1.0), "rows", buckets=_ROWS,
    ),
    Metric(
        "rows_waiting", _GAUGE, _MODEL, "Rows of tickets that wait for a batch.",
        "Above `max_batch` for long: the engine is saturated. Rows that wait in the gateway for their ticket are not "
        "included.",
        counted("waiting"), "rows", like="nv_inference_pending_request_count, vllm:num_requests_waiting",
    ),
    Metric(
        "lanes_in_use", _GAUGE, _MODEL, "Lanes leased: connected clients of the model.",
        "It falls when a client dies; the client's rows are free again at once.",
        by_model(lambda snapshot, at: float(len(snapshot.leased(at)))),
    ),
    Metric(
        "rows_in_use", _GAUGE, _MODEL, "Rows of the arena that are leased.",
        "At `arena_rows`, new clients get `Busy`: raise `rows`, or ask for smaller lanes.",
        by_model(lambda snapshot, at: float(snapshot.leased(at)["rows"].sum())), "rows",
    ),
    Metric(
        "sessions_in_use", _GAUGE, _MODEL, "Sessions whose state an engine keeps; absent for a model without state.",
        "Open sessions. At `arena_rows`, `sessions` raises `Busy`: raise `rows`. Zero after an engine's death.",
        by_model(Snapshot.sessions),
    ),
    Metric(
        "arena_rows", _GAUGE, _MODEL, "Rows of the arena.", "The upper bound of `rows_in_use`.",
        by_model(lambda snapshot, at: float(snapshot.models[at]["arena"]["rows"])), "rows",
    ),
    Metric(
        "arena_bytes", _GAUGE, _MODEL, "Shared memory of the model's arena.", "It grows with `rows`.",
        by_model(_arena_bytes), "bytes",
    ),
    Metric(
        "shared_memory_bytes", _GAUGE, ("kind",), "Shared memory of the server, by kind of segment.",
        "It is constant while no model is loaded or unloaded.", labelled(_shared_bytes), "bytes",
    ),
    Metric(
        "device_bytes", _GAUGE, _ENGINE, "Memory that the engine uses on its device; 0 on a CPU.",
        "Should be flat after the warm-up.", by_engine(lambda record, _, __: float(record["device_bytes"])), "bytes",
        like="nv_gpu_memory_used_bytes",
    ),
    Metric(
        "weights_version", _GAUGE, _MODEL, "Version of the weights in use, by the serving engine furthest behind.",
        "0: the weights that the model was loaded with.", by_model(lambda snapshot, at: float(snapshot.weights(at)[0])),
        "versions",
    ),
    Metric(
        "weights_newest_version", _GAUGE, _MODEL, "Newest version that a learner published.",
        "See `weights_lag_versions`.",
        by_model(lambda snapshot, at: float(snapshot.weights(at)[1])), "versions",
    ),
    Metric(
        "weights_lag_versions", _GAUGE, _MODEL, "Newest version minus the one in use.",
        "Constantly above 1: the learner publishes faster than the engine copies; publish less often.",
        by_model(lambda snapshot, at: float(snapshot.weights(at)[1] - snapshot.weights(at)[0])), "versions",
    ),
    Metric(
        "weights_publications", _COUNTER, _MODEL, "Publications of weights, whatever their versions.",
        "Constant while a training runs: the learner has stopped.",
        by_model(lambda snapshot, at: float(snapshot.models[at]["weights"]["publications"])),
    ),
    Metric(
        "weights_updates", _COUNTER, _MODEL, "Updates to published weights, summed over all engines.",
        "Fewer than publications times engines: versions were skipped, which is normal with a fast learner.",
        counted("updates"),
    ),
    Metric(
        "weights_update_duration_seconds", _HISTOGRAM, _MODEL, "From a publication to its use.",
        "The lag in time.", distributed("adopt_ns", "adopt_total_ns", _NS), "seconds", buckets=_LONG,
    ),
    Metric(
        "weights_age_seconds", _GAUGE, _MODEL, "Time since the last update of the weights; absent before the first.",
        "It keeps growing when the learner is dead.", by_model(Snapshot.weights_age), "seconds",
    ),
    Metric(
        "model_ready", _GAUGE, _MODEL, "1 when an engine that does not hang can answer for the model, else 0.",
        "`/health/ready` reports the reason.", by_model(lambda snapshot, at: float(snapshot.ready(at))),
    ),
    Metric(
        "model_audit", _GAUGE, _MODEL, "1 for an audit juror, whose scores are logged and never rewarded, else 0.",
        "Its rows cost as much as those of other models; do not train on its scores.",
        by_model(lambda snapshot, at: float(snapshot.models[at]["audit"])),
    ),
    Metric(
        "engine_up", _GAUGE, _ENGINE,
        "1 while the engine serves and has shown a sign of life within a third of `engine_timeout`, else 0.",
        "Alert on 0.",
        by_engine(lambda record, snapshot, index: float(
            record["state"] == EngineState.SERVING and not snapshot.document["engines"][index]["hung"]
        )),
    ),
    Metric(
        "engine_restarts", _COUNTER, _ENGINE, "Deaths of the engine's process; it was started again after each.",
        "The log has the reason of each increase.", by_engine(lambda record, _, __: float(record["restarts"])),
    ),
    Metric(
        "engine_requests", _COUNTER, _ENGINE, "Tickets answered by the engine, of all models.",
        "Replicas of equal speed get about equal load.",
        by_engine(lambda _, snapshot, index: float(snapshot.counters["requests"][index].sum())),
    ),
    Metric(
        "engine_busy_seconds", _COUNTER, _ENGINE, "Time the engine spent in batches.",
        "Its rate is the fraction of time that the engine computes. Near 1 it is saturated: add a replica or a device.",
        by_engine(lambda _, snapshot, index: float(snapshot.counters["forward_total_ns"][index].sum()) / _NS),
        "seconds", like="nv_gpu_utilization",
    ),
    Metric(
        "engine_expected_wait_seconds", _GAUGE, _ENGINE, "Expected wait of a request that arrives now.",
        "Clients use it to choose an engine.", by_engine(lambda record, _, __: float(record["expected_wait"]) / _NS),
        "seconds",
    ),
    Metric(
        "engine_heartbeat_age_seconds", _GAUGE, _ENGINE, "Time since the engine's last heartbeat.",
        "Normally below a second, or up to the longest forward; at a third of `engine_timeout` it counts as hung, at "
        "`engine_timeout` it is killed.",
        by_engine(lambda record, snapshot, _: (snapshot.taken - int(record["heartbeat"])) / _NS
                  if record["heartbeat"] else None),
        "seconds",
    ),
    Metric(
        "client_bytes", _GAUGE, ("process", "kind"), "Bytes that gateway and relay hold for their clients.",
        "`received`: requests until they are answered. `answers`: what clients have not read. At "
        "`client_limit_bytes`, more is refused. With CURVE keys the relay counts answers only.",
        _held(lambda budget, kind: budget.held(kind), "bytes"), "bytes",
    ),
    Metric(
        "client_limit_bytes", _GAUGE, ("process", "kind"),
        "Bytes that gateway and relay may hold for all their clients.",
        "It follows from `max_message_mib` and the memory limit.",
        _held(lambda budget, kind: budget.in_all[kind], "limit"), "bytes",
    ),
    Metric(
        "client_calls", _GAUGE, (), "gRPC calls in progress.", "At `client_limit_calls`, more are refused.",
        lambda snapshot: [] if snapshot.budget is None else [((), float(snapshot.budget.held(2)))],
    ),
    Metric(
        "client_limit_calls", _GAUGE, (), "gRPC calls that may be in progress.", "A constant.",
        lambda snapshot: [] if snapshot.budget is None else [((), float(snapshot.budget.in_all[2]))],
    ),
    Metric(
        "client_refusals", _COUNTER, ("door", "kind", "reason"), "Requests that were refused for want of room.",
        "`http` has the dialects, `tcp` is the relay's. `connection`: a client holds its share, so it should wait for "
        "answers and read them. `all`: clients together hold what the process may: raise `max_message_mib`, or look "
        "for the one that does not read. Begins at zero with the process.", _refusals,
    ),
    Metric(
        "robot_connections", _GAUGE, _PORT, "Robots connected to a port of [robots].",
        "At `clients` of that table, the next connection is refused.", by_port(lambda port: float(port.connected)),
    ),
    Metric(
        "robot_connections_opened", _COUNTER, _PORT, "Connections of robots that were accepted.",
        "It grows with a constant number of robots: connections drop, or robots reconnect for each episode.",
        by_port(lambda port: float(port.opened)),
    ),
    Metric(
        "robot_connections_refused", _COUNTER, ("port", "reason"), "Connections of robots that were refused.",
        "`token`: without the server's token, or with another one. `full`: `clients` of that table are connected.",
        by_port_and(REFUSALS, lambda port: port.refused),
    ),
    Metric(
        "robot_sessions", _COUNTER, _PORT, "Episodes that robots started.",
        "Every connection, every reset and every new `session_id` starts one.",
        by_port(lambda port: float(port.sessions)),
    ),
    Metric(
        "robot_requests", _COUNTER, _PORT, "Observations of robots that were answered.",
        "Its rate is the number of chunks per second. Observations that got an error are not included.",
        by_port(lambda port: float(port.requests)),
    ),
    Metric(
        "robot_request_failures", _COUNTER, ("port", "reason"), "Observations of robots that got an error.",
        "`malformed`: not a valid message. `observation`: not as the model's inputs. `row`: the model refused it. "
        "`late`: no answer within `timeout`. `session`: the episode's state was lost. `model`: the model raised. "
        "`server`: anything else; the answer and the gateway's log have the reason.",
        by_port_and(FAILURES_AT_PORT, lambda port: port.failures),
    ),
    Metric(
        "robot_batch_wait_seconds", _HISTOGRAM, _PORT,
        "From reading a robot's observation to sending its batch to an engine.",
        "Up to one and a half forwards is normal with many robots: the current batch, then a wait for others to join.",
        at_port(lambda port: port.batch_wait), "seconds", buckets=_SHORT,
    ),
    Metric(
        "robot_delay_seconds", _HISTOGRAM, _PORT, "From a robot's observation to its answer, measured at the gateway.",
        "Above the duration of a chunk, robots stop. `robot_client_delay_seconds` minus this is the network's delay.",
        at_port(lambda port: port.delay), "seconds", buckets=_SHORT,
    ),
    Metric(
        "robot_jitter_seconds", _GAUGE, _PORT,
        "Difference of `robot_delay_seconds` between successive answers to a robot, smoothed as in RFC 3550.",
        "Real-time chunking plans for the longest of the last delays, so jitter makes it react later.",
        by_port(lambda port: port.jitter.seconds), "seconds",
    ),
    Metric(
        "robot_client_delay_seconds", _HISTOGRAM, _PORT, "From a robot's request to its answer, measured by robots.",
        "Only from clients with `AsyncChunkPolicy(report=True)`.",
        at_port(lambda port: port.client_delay), "seconds", buckets=_SHORT,
    ),
    Metric(
        "robot_client_jitter_seconds", _GAUGE, _PORT, "As `robot_jitter_seconds`, of the delays measured by robots.",
        "Above the gateway's: the network.", by_port(lambda port: port.client_jitter.seconds), "seconds",
    ),
    Metric(
        "robot_client_chunks_dropped", _COUNTER, ("port", "reason"), "Answers that robots did not execute.",
        "`late`: after the client's deadline. `stale`: all its steps, or its episode, were over. `failed`: an error, "
        "or not a chunk.", by_port_and(DROPPED, lambda port: port.dropped),
    ),
    Metric(
        "robot_client_starved_steps", _COUNTER, _PORT, "Control steps for which a robot had no action.",
        "Use longer chunks, or make the answers faster.", by_port(lambda port: float(port.starved)),
    ),
    Metric(
        "start_time_seconds", _GAUGE, (), "When the server was started, seconds since 1970.",
        "It changes when the server restarts; all counters then start at zero.",
        lambda snapshot: [((), float(snapshot.document["server"]["started"]))], "seconds",
    ),
    Metric(
        "build_info", _GAUGE, ("version", "revision", "protocol", "python", "server"),
        "Always 1; its labels are the versions and the server's id.", "`server` changes at every start.", _build,
    ),
)  # fmt: skip


class SnapshotCollector(Collector):
    """A stateless Prometheus collector over one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        """Return the metric families; see `prometheus_client.registry.Collector`."""
        return [_family(metric, self._snapshot) for metric in TABLE]


def exposition(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the body and the content type of a scrape, in the format that the Accept header asks for."""
    encode, content_type = choose_encoder(accept)
    return encode(SnapshotCollector(snapshot)), content_type


def format_of(accept: str) -> str:
    """Return the content type that `exposition` chooses."""
    content_type: str = choose_encoder(accept)[1]
    return content_type


def _family(metric: Metric, snapshot: Snapshot) -> Family:
    name, help, labels = PREFIX + metric.name, metric.help, metric.labels
    if metric.kind is MetricKind.HISTOGRAM:
        assert metric.buckets is not None
        histogram = HistogramMetricFamily(name, help, labels=labels)
        for values, value in metric.read(snapshot):
            assert isinstance(value, Distribution)
            histogram.add_metric(values, metric.buckets.cumulated(value), value.total)
        return histogram
    family = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    single = family(name, help, labels=labels)
    for values, value in metric.read(snapshot):
        assert not isinstance(value, Distribution)
        single.add_metric(values, value)
    return single
