"""The routes of the Open Inference Protocol over HTTP: what each asks for, what it refuses, and how bodies are read."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from tests.loops import turns

from jurybox.protocol.errors import Code, ModelFailed
from jurybox.server.gateway.app import create_app
from jurybox.server.gateway.inference.http_inference import Tensors, router
from jurybox.server.gateway.inference.requests import InferRequest, InferResponse, Output
from jurybox.server.gateway.known_paths import ANSWERED
from jurybox.server.security.doors import Doors
from jurybox.server.security.http import CHARGE

MOST = 1000  # bytes of a body
TENSOR = {"name": "x", "shape": [1], "datatype": "FP32"}
ASKED = {"inputs": [TENSOR | {"data": [3]}]}
STEP = ASKED | {"parameters": {"sequence_id": "s"}}
BINARY = {"parameters": {"binary_data_output": True}}
LENGTH = "inference-header-content-length"


class Models:
    """What the routes ask, which notes it."""

    idle = 60.0

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.alive = True
        self.why: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.error: BaseException | None = None
        self.cancelled = False
        names = "load", "unload", "sleep", "wake"
        self.repository = SimpleNamespace(**{name: self._noted(name) for name in names})
        self.regions = SimpleNamespace(**{name: self._noted(name, at_once=True) for name in ("register", "unregister")})
        self.cuda_regions = SimpleNamespace(
            register=self._noted("cuda register", at_once=True),
            unregister=self._noted("cuda unregister"),
            status=lambda name: [SimpleNamespace(name=name, device=3, size=64)],
        )
        self.sequences = SimpleNamespace(lose=self._noted("lose", at_once=True))

    def _noted(self, name: str, *, at_once: bool = False) -> Callable[..., Any]:
        def note(*arguments: object) -> None:
            self.asked.append((name, *arguments))

        async def note_soon(*arguments: object) -> None:
            note(*arguments)

        return note if at_once else note_soon

    async def live(self) -> bool:
        return self.alive

    async def reasons(self) -> list[str]:
        return self.why

    async def model_reason(self, name: str, version: str) -> str:
        return f"{name} {version}: {self.why[0]}" if self.why else ""

    async def index(self, repository: str, *, ready: bool) -> list[dict[str, Any]]:
        return [{"ready": ready}]

    async def infer(self, asked: InferRequest) -> InferResponse:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return InferResponse(asked.model, "7", asked.id, [Output("y", "FP32", (1,), np.array([2], np.float32))])


class Charged:
    """Counts the bytes that are made of a body."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, size: int) -> None:
        self.taken.append(size)


class Gateway:
    """The application, with what comes around it in a server."""

    def __init__(self) -> None:
        self.models, self.doors, self.charged = Models(), Doors(), Charged()
        self.learned: list[Any] = []
        routes = router(cast("Any", self.models), most=MOST, doors=self.doors)
        self._app = create_app(cast("Any", None), routers=[routes])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope[CHARGE], scope[ANSWERED] = self.charged, self.learned.append
        await self._app(scope, receive, send)

    async def hung_up(self, path: str, asked: object, go: asyncio.Event) -> list[int]:
        """Send a request of a client that hangs up at `go`; return the statuses of the answers."""
        body, statuses = json.dumps(asked).encode(), []
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await go.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "http_version": "1.1", "headers": [(b"host", b"x")], "client": None, "server": None, "scheme": "http",
            "root_path": "",
        }  # fmt: skip
        await asyncio.wait_for(self(scope, receive, send), 30)
        return statuses


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(cast("Any", gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_health_has_the_status_that_load_balancers_read(gateway: Gateway, http: httpx.AsyncClient) -> None:
    for path, told in (("live", {"live": True}), ("ready", {"ready": True, "reasons": []})):
        answer = await http.get(f"/v2/health/{path}")
        assert (answer.status_code, answer.json()) == (200, told)
    assert (await http.get("/v2/models/m/versions/3/ready")).status_code == 200
    gateway.models.alive, gateway.models.why = False, ["it hangs"]
    ways = {
        "/v2/health/live": {"live": False},
        "/v2/health/ready": {"ready": False, "reasons": ["it hangs"]},
        "/v2/models/m/versions/3/ready": {"ready": False, "reasons": ["m 3: it hangs"]},
    }
    for way, said in ways.items():
        answer = await http.get(way)
        assert (answer.status_code, answer.json()) == (503, said)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        (" GZip ", gzip.compress),
        ("identity", bytes),
        ("", bytes),
    ],
)
async def test_a_body_is_read_in_every_encoding(
    http: httpx.AsyncClient, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    body = pack(b'{"ready": true}')
    answer = await http.post("/v2/repository/index", content=body, headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()) == (200, [{"ready": True}])


@pytest.mark.parametrize(
    ("encoding", "body", "status", "says"),
    [
        ("br", b"{}", 400, "Content-Encoding 'br': expected gzip or deflate"),
        ("gzip", b"{}", 400, "the body is not valid gzip"),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-9], 400, "it ends early"),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"and", 400, "3 bytes came after the end of the gzip body"),
        ("gzip", gzip.compress(b" " * (MOST - 1) + b"{}", mtime=0), 413, f"more than {MOST} bytes"),
    ],
)
async def test_a_body_that_cannot_be_unpacked_is_refused(
    http: httpx.AsyncClient, encoding: str, body: bytes, status: int, says: str
) -> None:
    answer = await http.post("/v2/repository/index", content=body, headers={"content-encoding": encoding})
    assert answer.status_code == status and says in answer.json()["error"]


async def test_what_is_made_of_a_packed_body_is_counted_up_to_the_most(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    body = gzip.compress(b" " * (MOST - 2) + b"{}")
    answer = await http.post("/v2/repository/index", content=body, headers={"content-encoding": "gzip"})
    assert answer.status_code == 200 and gateway.charged.taken == [MOST]


@pytest.mark.parametrize(("path", "name"), [("m", "m"), ("a/b", "a/b")])
async def test_the_repository_is_told_the_model_and_its_parameters(
    gateway: Gateway, http: httpx.AsyncClient, path: str, name: str
) -> None:
    parameters = {"config": "{}"}
    for verb in ("load", "unload"):
        assert (await http.post(f"/v2/repository/models/{path}/{verb}")).status_code == 200
        answer = await http.post(f"/v2/repository/models/{path}/{verb}", json={"parameters": parameters})
        assert (answer.status_code, answer.json()) == (200, {})
    for verb in ("sleep", "wake"):
        assert (await http.post(f"/v2/repository/models/{path}/{verb}")).status_code == 200
    assert gateway.models.asked == [
        ("load", "", name, {}),
        ("load", "", name, parameters),
        ("unload", "", name, {}),
        ("unload", "", name, parameters),
        ("sleep", name),
        ("wake", name),
    ]


async def test_memory_is_registered_and_unregistered_by_its_name_or_all_at_once(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    system, cuda = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
    asked = [
        (f"{system}/region/r/register", {"key": "/k", "byte_size": 8}),
        (f"{system}/region/r/register", {"key": "/k", "offset": 4, "byte_size": 8}),
        (f"{cuda}/region/r/register", {"raw_handle": {"b64": "YWI="}, "byte_size": 8}),
        (f"{cuda}/region/r/register", {"raw_handle": {"b64": "YWI="}, "device_id": 1, "byte_size": 8}),
        *((f"{kind}{what}/unregister", {}) for kind in (system, cuda) for what in ("/region/r", "")),
    ]
    for path, body in asked:
        assert (await http.post(path, json=body)).status_code == 200
    assert gateway.models.asked == [
        ("register", "r", "/k", 0, 8),
        ("register", "r", "/k", 4, 8),
        ("cuda register", "r", b"ab", 0, 8),
        ("cuda register", "r", b"ab", 1, 8),
        ("unregister", "r"),
        ("unregister", ""),
        ("cuda unregister", "r"),
        ("cuda unregister", ""),
    ]
    told = (await http.get(f"{cuda}/region/r/status")).json()
    assert told == [{"name": "r", "device_id": 3, "byte_size": 64}]


KEY, HANDLE = {"key": "/k", "byte_size": 8}, {"raw_handle": {"b64": "YWI="}, "byte_size": 8}
NO_REGIONS: list[dict[str, Any]] = [{"key": 1}, {"offset": 1.0}, {"byte_size": "8"}, {"byte_size": True}, {"size": 8}]
NO_HANDLES: list[dict[str, Any]] = [
    {"raw_handle": "YWI="}, {"raw_handle": {}}, {"device_id": 1.0}, {"byte_size": None}, {"x": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v2/repository/index", {"ready": 1}, "expected no body"),
        ("/v2/repository/index", {"state": "ready"}, "expected no body"),
        ("/v2/repository/models/m/load", {"parameters": ["a"]}, "expected no body"),
        ("/v2/repository/models/m/load", {"name": "n"}, "expected no body"),
        ("/v2/repository/models/m/unload", {"parameters": None}, "expected no body"),
        *(("/v2/systemsharedmemory/region/r/register", KEY | wrong, "expected ") for wrong in NO_REGIONS),
        *(("/v2/cudasharedmemory/region/r/register", HANDLE | wrong, "expected ") for wrong in NO_HANDLES),
        ("/v2/cudasharedmemory/region/r/register", HANDLE | {"raw_handle": {"b64": "Y!WI="}}, "not valid base64"),
    ],
)
async def test_a_request_with_wrong_fields_is_refused_and_does_nothing(
    gateway: Gateway, http: httpx.AsyncClient, path: str, body: object, says: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]
    assert not gateway.models.asked


async def test_a_step_of_a_sequence_is_answered_while_its_client_waits(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v2/models/m/infer", json=STEP)
    assert answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [2]
    assert not gateway.models.asked and not gateway.models.cancelled


async def test_a_step_is_cancelled_when_its_client_hangs_up(gateway: Gateway) -> None:
    gateway.models.go.clear()
    now = asyncio.Event()
    now.set()
    await gateway.hung_up("/v2/models/m/infer", STEP, now)
    assert gateway.models.cancelled and not gateway.models.asked


@pytest.mark.parametrize(("error", "lost"), [(None, [("lose", "m", "s")]), (ModelFailed("no"), [])])
async def test_a_step_that_was_computed_when_its_client_hung_up_is_lost(
    gateway: Gateway, error: Exception | None, lost: list[tuple[object, ...]]
) -> None:
    """If it failed, whoever computed it knows what has become of the sequence."""
    models = gateway.models
    models.go.clear()
    models.error = error
    asking = asyncio.create_task(gateway.hung_up("/v2/models/m/infer", STEP, models.go))
    await turns()
    models.go.set()
    await asking
    assert models.asked == lost and not models.cancelled


async def test_a_request_of_no_sequence_is_answered_whoever_hangs_up(gateway: Gateway) -> None:
    gateway.models.go.clear()
    now = asyncio.Event()
    now.set()
    asking = asyncio.create_task(gateway.hung_up("/v2/models/m/infer", ASKED, now))
    await turns()
    assert not gateway.models.cancelled
    gateway.models.go.set()
    assert await asking == [200]


async def test_what_answered_json_answers_the_bodies_behind_the_same_head(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    first = await http.post("/v2/models/m/versions/7/infer", json=ASKED)
    (answer,) = gateway.learned
    reply = await answer(json.dumps(ASKED).encode())
    assert (reply.status, reply.media, reply.body, reply.headers) == (200, "application/json", first.content, ())
    reply = await answer(json.dumps(ASKED | BINARY).encode())
    assert (reply.media, reply.body[-4:]) == ("application/octet-stream", np.float32(2).tobytes())
    assert reply.headers == ((LENGTH, str(len(reply.body) - 4)),)
    assert await answer(json.dumps(STEP).encode()) is None, "it is lost with its connection"
    refused = await answer(b"{")
    assert refused.status == 400 and b"error" in refused.body
    gateway.models.error = ModelFailed("no")
    assert (await answer(json.dumps(ASKED).encode())).status == 500
    gateway.models.error = KeyError("y")
    assert await answer(json.dumps(ASKED).encode()) is None, "the application reports it"


async def test_a_known_request_that_is_cancelled_is_refused_if_the_doors_have_closed(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await http.post("/v2/models/m/infer", json=ASKED)
    (answer,) = gateway.learned
    gateway.models.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await answer(json.dumps(ASKED).encode())
    gateway.doors.close()
    refused = await answer(json.dumps(ASKED).encode())
    assert (refused.status, json.loads(refused.body)["code"]) == (503, Code.DRAINING.name)


async def test_a_head_of_binary_tensors_is_learned_if_the_answer_is_binary_too(
    gateway: Gateway, http: httpx.AsyncClient
) -> None:
    tensor = TENSOR | {"parameters": {"binary_data_size": 4}}
    for more, learned in (({}, 0), (BINARY, 1)):
        head = json.dumps({"inputs": [tensor], **more}).encode()
        answer = await http.post(
            "/v2/models/m/versions/7/infer", content=head + np.float32(3).tobytes(), headers={LENGTH: str(len(head))}
        )
        assert answer.status_code == 200 and (LENGTH in answer.headers) == bool(learned)
        assert len(gateway.learned) == learned
    assert gateway.learned == [Tensors("m", "7", len(head))]
