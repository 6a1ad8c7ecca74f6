"""A stop drains from the door inwards: what was accepted through any door is answered, and what is new is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.serving import RunningServer, serving, wait_until, wait_until_read
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as websocket

from jurybox import native
from jurybox.client import Error, Refused, connect
from jurybox.protocol.errors import Code
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb
from jurybox.server.security.access import make_pair
from tests import preloaded

LOCAL = "127.0.0.1:0"
MOOD = 100_000.0  # the model computes a batch, of one row, for 0.1 s
MODELS = {
    "moody": {"factory": "tests.models:moody", "max_batch": 1, "rows": 512},
    "policy": {"factory": "tests.models:affine", "publish": "double_buffer"},
    "texts": {"factory": "tests.reward_models:text_length", "rows": 64},
}
ROBOTS = f"""
[robots.arm]
model = "moody"
listen = "{LOCAL}"
clients = 4
"""
DOORS: dict[str, Any] = {
    "http": LOCAL,
    "grpc": LOCAL,
    "tcp": LOCAL,
    "more": ROBOTS,
    "dialects": {"openrlhf": {"model": "texts", "output": "score", "port": 0}},
}
SAMPLE = {"query": ["abc"], "prompts": ["p"], "labels": [None]}
EACH = 2  # requests at every door
HTTP2 = [
    pytest.param("nghttp2", marks=pytest.mark.skipif(bool(native.nghttp2()[1]), reason="the system has no libnghttp2")),
    "grpcio",
]


def row(mood: float = MOOD) -> np.ndarray:
    return np.array([[mood, 1, 2, 3]], np.float32)


def right(outputs: Any, mood: float) -> bool:
    return np.array_equal(np.asarray(outputs, np.float32).reshape(-1), row(mood)[0] + 1)


class Crowd:
    """A client at each door. `ask` sends requests through each, and returns, by door, whether an answer was right."""

    def __init__(self, server: RunningServer, stack: ExitStack) -> None:
        with server.connect() as client:
            self.where = where = client.status()["server"]
        self._pool = stack.enter_context(ThreadPoolExecutor(32))
        self._web = stack.enter_context(httpx.Client(base_url=f"http://{where['http']}", timeout=30.0))
        self.dialect_port = f"http://{where['dialects']['openrlhf']}/"
        self._rpc = stack.enter_context(tritonclient.grpc.InferenceServerClient(where["grpc"]))
        self._streaming = stack.enter_context(tritonclient.grpc.InferenceServerClient(where["grpc"]))
        self._streamed: list[Future[bool]] = []
        self._streaming.start_stream(self._on_streamed)
        self._robots = [
            stack.enter_context(websocket(f"ws://{where['robots']['arm']}", compression=None)) for _ in range(EACH)
        ]
        for robot in self._robots:
            robot.recv()
        self.clients = {
            "shm": stack.enter_context(server.connect()),
            "zmq": stack.enter_context(server.connect(transport="zmq")),
            "relay": stack.enter_context(connect(f"tcp://{where['tcp']}", timeout=60.0)),
            "grpc client": stack.enter_context(connect(f"grpc://{where['grpc']}", timeout=60.0)),
        }
        self.models = {name: client.model("moody", rows=4) for name, client in self.clients.items()}
        # Streams that stay open for ever; a stop does not wait for them.
        self.reader = stack.enter_context(self.clients["grpc client"].weights("policy"))
        self.publisher = stack.enter_context(self.clients["grpc client"].publisher("policy"))
        self.watching = stack.enter_context(self._web.stream("GET", "/events"))

    def ask(self, mood: float = MOOD, patience: float = 60.0) -> dict[str, list[Future[bool]]]:
        found: dict[str, list[Future[bool]]] = {}
        self._asked = found

        def through(door: str, work: Callable[..., bool], *arguments: Any) -> None:
            found.setdefault(door, []).append(self._pool.submit(work, *arguments))

        # All are submitted before one is waited for: a submission would wait for another thread's wait.
        tickets = [
            (name, model.submit(row(mood), timeout=patience))
            for _ in range(EACH)
            for name, model in self.models.items()
        ]
        for name, ticket in tickets:
            through(name, lambda ticket=ticket: right(ticket.result(patience).outputs, mood))
        for number in range(EACH):
            through("http", self._asks_json, mood)
            through("http, known form", self._asks_binary, mood)
            through("grpc", self._asks_rpc, mood)
            through("grpc stream", self._asks_stream(mood).result, 60)
            through("dialect", self._asks_dialect, "/dialects/openrlhf")
            through("dialect's port", self._asks_dialect, self.dialect_port)
            through("robot", self._asks_robot, self._robots[number], mood)
        return found

    def wait_until_read(self) -> None:
        """Wait until every door holds its requests, which the engine does not answer meanwhile."""
        wait_until(lambda: all(future.running() or future.done() for door in self._asked.values() for future in door))
        self.clients["relay"].status()  # comes in behind the tickets of its connection
        wait_until_read(self.where["http"])

    def _asks_json(self, mood: float) -> bool:
        given = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": row(mood)[0].tolist()}
        answer = self._web.post("/v2/models/moody/infer", json={"inputs": [given]})
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return right(answer.json()["outputs"][0]["data"], mood)

    def _asks_binary(self, mood: float) -> bool:
        given = tritonclient.http.InferInput("observation", [1, 4], "FP32")
        given.set_data_from_numpy(row(mood))
        wanted = [tritonclient.http.InferRequestedOutput("action")]
        body, length = tritonclient.http.InferenceServerClient.generate_request_body([given], outputs=wanted)
        headers = {"Inference-Header-Content-Length": str(length)}
        answer = self._web.post("/v2/models/moody/infer", content=body, headers=headers)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return right(np.frombuffer(answer.content[-16:], np.float32), mood)

    def _asks_rpc(self, mood: float) -> bool:
        given = tritonclient.grpc.InferInput("observation", [1, 4], "FP32")
        given.set_data_from_numpy(row(mood))
        return right(self._rpc.infer("moody", [given]).as_numpy("action"), mood)

    def _asks_stream(self, mood: float) -> Future[bool]:
        given = tritonclient.grpc.InferInput("observation", [1, 4], "FP32")
        given.set_data_from_numpy(row(mood))
        self._streamed.append(future := Future())
        self._mood = mood
        self._streaming.async_stream_infer("moody", [given])
        return future

    def _on_streamed(self, result: Any, error: Any) -> None:
        waiting = next((future for future in self._streamed if not future.done()), None)
        if waiting is None:  # the end of the stream
            return
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(right(result.as_numpy("action"), self._mood))

    def _asks_dialect(self, path: str) -> bool:
        answer = self._web.post(path, json=SAMPLE)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()["rewards"] == [3.0]

    def _asks_robot(self, robot: Any, mood: float) -> bool:
        robot.send(packb({"observation": row(mood)[0]}))
        came = robot.recv(60)
        assert isinstance(came, bytes), came
        return right(unpackb(came)["actions"], mood)


def lost(asked: dict[str, list[Future[bool]]]) -> dict[str, list[str]]:
    """What the requests of each door got instead of their answers."""
    found: dict[str, list[str]] = {}
    for door, futures in asked.items():
        for future in futures:
            try:
                if not future.result(60):
                    found.setdefault(door, []).append("a wrong answer")
            except Exception as error:  # noqa: BLE001  whatever it got instead
                found.setdefault(door, []).append(f"{type(error).__name__}: {error}")
    return found


def stop_in_the_middle(folder: Path, http2: str) -> None:
    with serving(folder, MODELS, grpc_http2=http2, **DOORS) as server, ExitStack() as stack:
        crowd = Crowd(server, stack)
        for _ in range(10):  # so that forms are known, and native code has taken over from Python
            assert not lost(crowd.ask(mood=1.0))
        with server.connect() as pausing, pausing.pause():
            asked = crowd.ask()
            crowd.wait_until_read()
            server.process.send_signal(signal.SIGTERM)
            assert not lost(asked), server.text()[-3000:]
        assert server.process.wait(20) == 0
        log = server.text()
        assert "Traceback" not in log and "draining took too long" not in log, log[-3000:]


@pytest.mark.parametrize("http2", [HTTP2[0], pytest.param("grpcio", marks=pytest.mark.runs)])
def test_requests_that_wait_in_every_door_are_answered_before_the_server_ends(
    tmp_path, nothing_left, monkeypatch, http2
):
    monkeypatch.setattr(preloaded, "wanted", False)  # once as a user starts it
    stop_in_the_middle(tmp_path, http2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_request_is_lost_in_fifty_stops(tmp_path, nothing_left, monkeypatch):
    monkeypatch.setattr(preloaded, "wanted", False)
    for number in range(50):
        stop_in_the_middle(tmp_path / str(number), ("nghttp2", "grpcio")[number % 5 == 4])


def test_while_it_drains_new_requests_are_refused_and_probes_answered(tmp_path, nothing_left):
    with serving(tmp_path, MODELS, drain_timeout=600, **DOORS) as server, ExitStack() as stack:
        crowd = Crowd(server, stack)
        assert not lost(crowd.ask(mood=1.0))
        http, rpc = f"http://{crowd.where['http']}", stack.enter_context(
            tritonclient.grpc.InferenceServerClient(crowd.where["grpc"])
        )  # fmt: skip
        assert rpc.is_server_ready()
        # Of their own: calls of the crowd's models wait for those that are under way.
        late_models = [crowd.clients[door].model("moody", rows=1) for door in ("relay", "grpc client")]
        held = crowd.ask(mood=5_000_000.0, patience=60.0)  # at least eight of them, of 5 s each, in which it drains
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{http}/health", timeout=10).status_code == 503, 10, "draining")
        assert httpx.get(f"{http}/health", timeout=10).json()["reasons"] == ["the server is draining"]
        assert httpx.get(f"{http}/health/live", timeout=10).status_code == 200
        for path in ("/v2/models/moody/infer", "/dialects/openrlhf", crowd.dialect_port):
            answer = httpx.post(path if path.startswith("http") else http + path, content=bytes(1 << 20), timeout=10)
            assert (answer.status_code, answer.headers["connection"]) == (503, "close"), (path, answer.text)
            assert int(answer.headers["retry-after"]) > 0 and "the server is stopping" in answer.text
        given = tritonclient.grpc.InferInput("observation", [1, 4], "FP32")
        given.set_data_from_numpy(row())
        with pytest.raises(tritonclient.utils.InferenceServerException, match="the server is stopping") as refused:
            rpc.infer("moody", [given])
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        assert not rpc.is_server_ready()
        with pytest.raises(InvalidStatus, match="503"):
            websocket(f"ws://{crowd.where['robots']['arm']}", compression=None)
        for model in late_models:
            with pytest.raises(Refused, match="the server is stopping") as late:
                model.infer(row(), timeout=60.0)
            assert late.value.code is Code.DRAINING
        with pytest.raises(Refused, match="stopping"):
            crowd.clients["relay"].model("policy")
        with pytest.raises(Error):
            crowd.reader.read()
        server.process.send_signal(signal.SIGTERM)  # a second signal stops it at once
        assert server.process.wait(20) == 0
        assert set(lost(held)) <= set(held)  # everybody has an end


@pytest.mark.parametrize("http2", [HTTP2[0], pytest.param("grpcio", marks=pytest.mark.runs)])
def test_a_stop_without_load_takes_no_time(tmp_path, nothing_left, http2):
    with serving(tmp_path, MODELS, grpc_http2=http2, drain_timeout=600, **DOORS) as server, ExitStack() as stack:
        crowd = Crowd(server, stack)
        assert not lost(crowd.ask(mood=1.0))
        assert server.stop(timeout=200) == 0, server.text()[-2000:]  # not 600, as if it waits for anybody
        assert "draining took too long" not in server.text()


def test_a_request_that_is_not_answered_in_time_is_refused(tmp_path, nothing_left):
    with serving(tmp_path, MODELS, drain_timeout=0.5, **DOORS) as server, ExitStack() as stack:
        crowd = Crowd(server, stack)
        assert not lost(crowd.ask(mood=1.0))
        with server.connect() as pausing, pausing.pause():
            asked = crowd.ask(mood=1_000_000.0, patience=30.0)
            crowd.wait_until_read()
            assert server.stop() == 0
        unanswered = lost(asked)
        for door in ("http", "http, known form", "grpc stream"):
            assert all("stopping" in why for why in unanswered[door]), unanswered
        assert "draining took too long" in server.text() and "Traceback" not in server.text()


def test_a_relay_with_keys_answers_what_it_accepted_large_answers_too(tmp_path, nothing_left):
    """Its messages are sent by a thread of libzmq, which may still hold them when the relay ends."""
    keys = tmp_path / "keys"
    keys.mkdir()
    make_pair(keys / "server")
    large = {"large": {"factory": "tests.models:big", "max_batch": 1, "rows": 16}}
    guarded = {"tcp": LOCAL, "curve_key": str(keys / "server.key_secret")}
    with serving(tmp_path, {"moody": MODELS["moody"], **large}, **guarded) as server:
        address = f"tcp://{server.listening('tcp')}"
        with connect(address, timeout=60.0, server_key=str(keys / "server.key")) as client:
            moody, big = client.model("moody", rows=4), client.model("large", rows=4)
            rows = {name: spec.zeros(1) for name, spec in big.spec.inputs.items()}
            with server.connect() as pausing, pausing.pause():
                tickets = [moody.submit(row(), timeout=60.0) for _ in range(2)]
                others = [big.submit(rows, timeout=60.0) for _ in range(4)]
                client.status()  # comes in behind them
                server.process.send_signal(signal.SIGTERM)
                assert all(right(ticket.result(60.0).outputs, MOOD) for ticket in tickets)
                for other in others:
                    other.result(60.0)
        assert server.process.wait(20) == 0
        assert "draining took too long" not in server.text()
