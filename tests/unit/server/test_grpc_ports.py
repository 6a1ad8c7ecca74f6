"""The gRPC port of a server, however it speaks HTTP/2: its health, its status, its options and what ends it."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.loops import turns

from jurybox.protocol import control_pb2, open_inference_pb2
from jurybox.server.gateway import grpc_server
from jurybox.server.gateway.grpc_server import GRACE, GrpcServer, HealthService, Service, Status, choose_http2
from jurybox.server.security.access import Access
from jurybox.server.security.grpc import limits
from jurybox.server.settings.endpoints import CannotListen

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SECRET = "a-token-of-more-than-sixteen-characters"


class Ended(Exception):
    """What ends an aborted call."""


class Context:
    """A call's."""

    async def abort(self, code, details):
        raise Ended(code, details)


class Health(HealthService):
    """The health of a service whose reasons the test sets."""

    def __init__(self, *services):
        self.why = []
        super().__init__(services, self.reasons)

    async def reasons(self):
        return self.why

    async def check(self, service):
        return (await self.Check(health_pb2.HealthCheckRequest(service=service), Context())).status

    def watch(self, service):
        return self.Watch(health_pb2.HealthCheckRequest(service=service), Context())


async def test_the_health_of_the_server_and_of_each_service_is_whether_it_is_ready():
    health = Health("a.A", "b.B")
    for why, status in (([], SERVING), (["it loads"], NOT_SERVING)):
        health.why = why
        assert [await health.check(service) for service in ("", "a.A", "b.B")] == [status] * 3
    with pytest.raises(Ended) as ended:
        await health.check("c.C")
    assert ended.value.args == (grpc.StatusCode.NOT_FOUND, "unknown service 'c.C'; available: a.A, b.B")
    with pytest.raises(Ended, match="available: none"):
        await Health().check("c.C")


async def test_who_watches_is_told_the_health_now_at_every_change_and_at_the_end(monkeypatch):
    monkeypatch.setattr(grpc_server, "_EVERY", 0.0)
    health = Health("a.A")
    watching = health.watch("a.A")
    assert (await asyncio.wait_for(anext(watching), 20)).status == SERVING
    changed = asyncio.ensure_future(anext(watching))
    await turns()
    assert not changed.done(), "nothing has changed"
    health.why = ["it loads"]
    assert (await asyncio.wait_for(changed, 20)).status == NOT_SERVING
    health.why = []
    assert (await asyncio.wait_for(anext(watching), 20)).status == SERVING
    last = asyncio.ensure_future(anext(watching))
    health.stop()
    assert (await asyncio.wait_for(last, 20)).status == NOT_SERVING
    with pytest.raises(StopAsyncIteration):
        await anext(watching)


async def test_who_watches_a_service_that_is_unknown_is_told_so():
    health = Health("a.A")
    watching = health.watch("b.B")
    assert (await anext(watching)).status == UNKNOWN
    health.stop()
    assert (await anext(watching)).status == NOT_SERVING


async def test_the_status_is_the_document_as_json():
    async def status():
        return {"server": "x"}

    answer = await Status(SimpleNamespace(status=status)).Get(None, None)
    assert json.loads(answer.json) == {"server": "x"}


@pytest.mark.parametrize(
    ("wanted", "version", "missing", "chosen"),
    [
        ("auto", "1.2", "", ("libnghttp2 1.2", True)),
        ("nghttp2", "1.2", "", ("libnghttp2 1.2", True)),
        ("grpcio", "1.2", "", (f"grpcio {grpc.__version__} (set by server.grpc_http2)", False)),
        ("auto", "", "no library", (f"grpcio {grpc.__version__} (no library)", False)),
        ("grpcio", "", "no library", (f"grpcio {grpc.__version__} (set by server.grpc_http2)", False)),
    ],
)
def test_the_systems_library_is_used_if_it_is_there_and_not_refused(monkeypatch, wanted, version, missing, chosen):
    monkeypatch.setattr(grpc_server.native, "nghttp2", lambda: (version, missing))
    assert choose_http2(wanted) == chosen


def test_a_library_that_is_wanted_and_is_missing_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(grpc_server.native, "nghttp2", lambda: ("", "no library"))
    with pytest.raises(
        ValueError, match=r"server.grpc_http2 = 'nghttp2': no library; install it .* or set it to 'auto'"
    ):
        choose_http2("nghttp2")


def test_reflection_describes_a_file_and_all_that_it_imports_once():
    pool = grpc_server._pool_of([open_inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR])
    assert pool.FindMessageTypeByName("inference.ModelInferRequest")
    for file in (open_inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR):
        assert pool.FindFileByName(file.name).serialized_pb == file.serialized_pb


class Grpcio:
    """A server of grpcio that was made with these options, and which ends when the test says so."""

    def __init__(self, fails=None, **given):
        self.given, self.fails, self.handlers, self.graces = given, fails, [], []
        self.started, self.ended = False, asyncio.get_running_loop().create_future()

    def add_generic_rpc_handlers(self, handlers):
        self.handlers += handlers

    def add_registered_method_handlers(self, service, _handlers):
        self.handlers.append(service)

    def add_insecure_port(self, where):
        if self.fails is not None:
            raise self.fails
        self.where = where
        return int(where.rpartition(":")[2])

    async def start(self):
        self.started = True

    async def wait_for_termination(self):
        await self.ended

    async def stop(self, grace):
        self.graces.append(grace)
        self.ended.done() or self.ended.set_result(None)


async def ready():
    return []


@pytest.fixture
async def port(monkeypatch):
    """A port that speaks through grpcio, and grpcio's server."""
    made = []
    monkeypatch.setattr(grpc.aio, "server", lambda **given: made.append(Grpcio(**given)) or made[-1])
    service = Service("t.T", None, None, lambda servicer, server: None)
    return GrpcServer("127.0.0.1:0", [service], ready, Access(SECRET, max_message=1 << 20), "grpcio"), made[0]


async def test_a_port_of_grpcio_has_the_limits_the_token_and_an_address_of_its_own(port):
    server, grpcio = port
    options = dict(grpcio.given["options"])
    assert options.items() >= dict(limits(Access(max_message=1 << 20))).items()
    assert options["grpc.so_reuseport"] == 0, "two servers do not share a port"
    assert options["grpc.keepalive_time_ms"] == 20_000
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] == 5_000
    assert len(grpcio.given["interceptors"]) == 1
    assert grpcio.where == server.bound and not server.bound.endswith(":0")
    assert not server.busy and server.connections() == ()
    with server._guarding._working():
        assert server.busy


async def test_a_port_of_grpcio_that_ends_by_itself_is_told(port):
    server, grpcio = port
    await server.start()
    await turns()
    assert grpcio.started and not server.ended.is_set()
    grpcio.ended.set_exception(RuntimeError("a path that is no UTF-8"))
    await turns()
    assert server.ended.is_set()


async def test_a_port_of_grpcio_that_is_stopped_has_not_ended_by_itself(port):
    server, grpcio = port
    await server.start()
    await turns()
    watching = server._health.Watch(health_pb2.HealthCheckRequest(service="t.T"), None)
    assert (await anext(watching)).status == SERVING
    await server.stop()
    await turns()
    assert grpcio.graces == [GRACE] and not server.ended.is_set()
    assert (await anext(watching)).status == NOT_SERVING


async def test_an_address_that_grpcio_cannot_have_is_named_with_its_setting(monkeypatch):
    monkeypatch.setattr(grpc.aio, "server", lambda **given: Grpcio(RuntimeError("it is taken"), **given))
    with pytest.raises(
        CannotListen, match=r"cannot listen on grpc://127.0.0.1:\d+: it is taken; set robots.r.listen to"
    ):
        GrpcServer("127.0.0.1:0", [], ready, http2="grpcio", setting="robots.r.listen")


async def test_a_drained_port_ends_the_streams_of_those_who_watch(port):
    server, _ = port
    watching = server._health.Watch(health_pb2.HealthCheckRequest(), None)
    await anext(watching)
    server.drain()
    assert (await anext(watching)).status == NOT_SERVING
