"""Requests of forms that native code answers. The gateway's gRPC server runs in this process, so a test sees which.

Python answers the first requests of a form; `by_python` counts those.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from contextlib import suppress

import grpc
import numpy as np
import pytest
from tests.models import Affine
from tests.serving import serving, wait_until

from jurybox import native
from jurybox.client.local_link import LocalLink
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.source import ClientSource
from jurybox.server.gateway.grpc_server import GrpcServer
from jurybox.server.gateway.inference import fast_path, grpc_inference
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.security.access import Access

pytestmark = pytest.mark.skipif(bool(native.nghttp2()[1]), reason="the system has no libnghttp2")
SECRET = "s3cret-s3cret-s3cret"
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 1024},
    "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
    "policy": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256, "publish": "double_buffer"},
    "moody": {"factory": "tests.models:moody", "max_batch": 16, "rows": 256},
    "picky": {"factory": "tests.open_models:picky", "max_batch": 16, "rows": 256},
    "few": {"factory": "tests.models:affine", "max_batch": 4, "rows": 8},
}


class Gateway:
    """The gateway's gRPC server in a thread, with a loop of its own."""

    def __init__(self, address, access):
        self.by_python = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start(address, access))

    async def _start(self, address, access):
        self._source = ClientSource(address)
        self._frontend = Frontend(address, self._source)
        self._oip = OpenInference(self._frontend, self._source, shared_memory="")
        service = grpc_inference.service(self._oip, access.budget())
        ((path, answer),) = service.direct.items()
        self._lanes = answer.lanes

        def counted(message, call):
            self.by_python += 1
            return answer(message, call)

        service.direct[path] = counted
        self._server = GrpcServer("127.0.0.1:0", [service], self._oip.reasons, access, "nghttp2")
        await self._server.start()
        self.bound = self._server.bound

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _stop(self):
        await self._server.stop()
        self._frontend.close()
        self._oip.close()
        await self._source.close()

    def close(self):
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def pending(self, name):
        """Return the number of requests of a model that native code has not answered."""
        return self._lanes._open[name]._native.pending

    def channel(self):
        return grpc.insecure_channel(self.bound, [("grpc.use_local_subchannel_pool", 1)])

    def warm_up(self, make, **options):
        """Send requests of a form until native code answers them; return the stub."""
        stub = GRPCInferenceServiceStub(self.channel())

        def answered_natively():
            before = self.by_python
            stub.ModelInfer(make(), timeout=20, **options)
            return self.by_python == before

        wait_until(answered_natively, 20, "native code answers")
        return stub


@pytest.fixture(scope="module", params=[1, 2], ids=["engine", "engines"])
def server(request, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, replicas=request.param) as running:
        yield running


@pytest.fixture
def start(server):
    started = []

    def begin(access=None):
        started.append(Gateway(server.address, access or Access()))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.fixture
def gateway(start):
    return start()


def message(rows, name="affine", **fields):
    made = pb.ModelInferRequest(model_name=name, raw_input_contents=[rows.tobytes()], **fields)
    made.inputs.add(name="observation", datatype="FP32", shape=rows.shape)
    return made


def filled(value, n=1):
    return np.full((n, 4), value, np.float32)


def action(answer):
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


def test_answers_are_the_same_as_those_of_python(gateway):
    stub = gateway.warm_up(lambda: message(filled(1, 3)))
    before = gateway.by_python
    for i in range(50):
        ident = "x" * (i * 7)
        answer = stub.ModelInfer(message(filled(i, 3), id=ident), timeout=20)
        assert action(answer).tolist() == [2 * i + 1] * 12
    assert gateway.by_python == before
    natively = stub.ModelInfer(message(filled(5, 3), id="number"), timeout=20)
    by_python = None
    while by_python is None:  # until the machine is quick enough
        with suppress(grpc.RpcError):
            by_python = stub.ModelInfer(message(filled(5, 3), id="number"), timeout=0.09)  # too little for native code
    assert gateway.by_python > before and natively == by_python


def test_several_inputs_and_outputs_in_any_order(gateway):
    rng = np.random.default_rng(0)

    def request_and_expected(outputs):
        images, scale = rng.integers(0, 256, (2, 64, 64, 3), np.uint8), rng.random(2, np.float32)
        made = pb.ModelInferRequest(model_name="two", raw_input_contents=[scale.tobytes(), images.tobytes()])
        made.inputs.add(name="scale", datatype="FP32", shape=[2])
        made.inputs.add(name="image", datatype="UINT8", shape=images.shape)
        for name in outputs:
            made.outputs.add(name=name)
        return made, {"brightness": images.mean(axis=(1, 2, 3), dtype=np.float64) * scale, "corner": images[:, 0, 0, 0]}

    for outputs in (["corner", "brightness"], ["brightness"], ["corner"], []):
        stub = gateway.warm_up(lambda outputs=outputs: request_and_expected(outputs)[0])
        before = gateway.by_python
        for _ in range(20):
            request, expected = request_and_expected(outputs)
            answer = stub.ModelInfer(request, timeout=20)
            names = [one.name for one in answer.outputs]
            assert names == (outputs or ["brightness", "corner"])
            for name, raw in zip(names, answer.raw_output_contents, strict=True):
                found = np.frombuffer(raw, {"brightness": np.float32, "corner": np.uint8}[name])
                np.testing.assert_allclose(found, expected[name], rtol=1e-4)
        assert gateway.by_python == before


def test_concurrent_clients_get_their_own_answers(gateway):
    """Connections have one call or several, of two forms; Python answers requests that do not fit in the lane.

    How many those are depends on the machine.
    """
    gateway.warm_up(lambda: message(filled(1)))
    gateway.warm_up(lambda: message(filled(1, 5)))
    before, wrong, done = gateway.by_python, [], []

    def ask(number):
        stub = GRPCInferenceServiceStub(gateway.channel())
        for i in range(60):
            values = [1000 * number + 10 * i + k for k in range(1 + number % 4)]
            calls = [
                stub.ModelInfer.future(message(filled(v, 5 if v % 3 else 1), id=str(v)), timeout=20) for v in values
            ]
            for value, call in zip(values, calls, strict=True):
                answer = call.result()
                if answer.id != str(value) or set(action(answer).tolist()) != {2 * value + 1}:
                    wrong.append((value, answer))
            done.append(len(values))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(done) == 8 * 60
    assert gateway.by_python - before < sum(done)


def test_answers_name_the_weights_they_were_computed_with(gateway, server):
    gateway.warm_up(lambda: message(filled(0), "policy"))
    stop, wrong, seen = threading.Event(), [], set()

    def ask():
        stub = GRPCInferenceServiceStub(gateway.channel())
        while not stop.is_set():
            answer = stub.ModelInfer(message(filled(0), "policy"), timeout=20)
            version = int(answer.model_version)
            seen.add(version)
            if action(answer).tolist() != [version or 1] * 4:  # the offset
                wrong.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    with server.connect() as client:
        publisher = client.publisher("policy")
        for thread in threads:
            thread.start()
        for turn in range(30):
            publisher.publish(Affine(2.0, float(publisher.version + 1)))
            if turn % 5 == 4:  # the others replace each other as fast as they can
                wait_until(lambda: publisher.version in seen, 60, "the last version is used")
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong and len(seen) > 5


def test_rows_that_break_the_model_fail_alone(gateway):
    gateway.warm_up(lambda: message(filled(1), "moody"))
    stub, other = (GRPCInferenceServiceStub(gateway.channel()) for _ in range(2))
    before = gateway.by_python
    for i in range(20):
        beside = [other.ModelInfer.future(message(filled(i), "moody"), timeout=20) for _ in range(3)]
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message(filled(666), "moody"), timeout=20)
        assert caught.value.code() == grpc.StatusCode.INTERNAL and "this row breaks the model" in caught.value.details()
        assert [action(call.result()).tolist() for call in beside] == [[i + 1] * 4] * 3
    assert gateway.by_python > before
    gateway.warm_up(lambda: message(filled(1), "moody"))  # a second later, native code answers again


def test_requests_that_ask_for_row_errors_are_answered_natively_and_get_them(gateway):
    def asked(*values):
        rows = np.array(values, np.float32).reshape(-1, 1)
        made = pb.ModelInferRequest(model_name="picky", raw_input_contents=[rows.tobytes()])
        made.inputs.add(name="x", datatype="FP32", shape=rows.shape)
        made.parameters["row_errors"].bool_param = True
        return made

    stub = gateway.warm_up(lambda: asked(1, 2))
    before = gateway.by_python
    answer = stub.ModelInfer(asked(4, 5), timeout=20)
    assert gateway.by_python == before
    assert action(answer).tolist() == [8, 10] and not answer.parameters
    for _ in range(3):
        answer = stub.ModelInfer(asked(4, 6), timeout=20)  # sixes fail
        assert answer.parameters["row_errors"].string_param == '{"1": "six"}'
        np.testing.assert_array_equal(action(answer), [8, np.nan])
    assert gateway.by_python > before


def test_a_request_past_its_deadline_gets_its_status_and_the_next_one_its_answer(gateway, server):
    stub = gateway.warm_up(lambda: message(filled(1), "moody"))
    engines = [pid for role, pid in server.pids().items() if role.startswith("engine")]
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    patient = []
    try:
        for seconds in (0.5, 2.0, 8.0, 30.0):  # until both arrive in native code before the first one's deadline
            before = gateway.pending("moody")
            late = stub.ModelInfer.future(message(filled(1), "moody"), timeout=seconds)
            wait_until(lambda: gateway.pending("moody") == before + 1 or late.done(), 60, "it arrives")  # noqa: B023
            patient.append(stub.ModelInfer.future(message(filled(2), "moody"), timeout=100))
            wait_until(lambda: gateway.pending("moody") == before + 2 or late.done(), 60, "both arrive")  # noqa: B023
            if not late.done():
                break
        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: gateway.pending("moody") <= before + 1, 20, "the request is returned")
        assert not any(call.done() for call in patient)
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
    assert [action(call.result()).tolist() for call in patient] == [[3] * 4] * len(patient)


def test_cancelled_calls_do_not_affect_the_others(gateway):
    stub = gateway.warm_up(lambda: message(filled(1), "moody"))
    for i in range(5):
        calls = [stub.ModelInfer.future(message(filled(10_000 + k), "moody"), timeout=20) for k in range(6)]
        for call in calls[::2]:
            call.cancel()
        for k in (1, 3, 5):
            assert action(calls[k].result()).tolist() == [10_001 + k] * 4
        assert action(stub.ModelInfer(message(filled(i), "moody"), timeout=20)).tolist() == [i + 1] * 4


def test_connections_that_end_during_calls_do_not_affect_the_others(gateway):
    gateway.warm_up(lambda: message(filled(1), "moody"))
    for i in range(5):
        with gateway.channel() as ending:
            stub = GRPCInferenceServiceStub(ending)
            calls = [stub.ModelInfer.future(message(filled(50_000), "moody"), timeout=20) for _ in range(3)]
            time.sleep(0.01)
        del calls
        stub = GRPCInferenceServiceStub(gateway.channel())
        assert action(stub.ModelInfer(message(filled(i), "moody"), timeout=20)).tolist() == [i + 1] * 4


def test_native_code_answers_again_after_a_reload(gateway, server):
    stub = gateway.warm_up(lambda: message(filled(1)))
    with server.connect() as connection:
        for i in range(3):
            connection.load("affine", timeout=60)
            for k in range(40):
                assert action(stub.ModelInfer(message(filled(i + k)), timeout=20)).tolist() == [2 * (i + k) + 1] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "_AGAIN", 0.1)
        gateway.warm_up(lambda: message(filled(1)))


def test_a_killed_engine_loses_no_answer(gateway, server):
    """No answer is wrong or lost, and native code answers again."""
    gateway.warm_up(lambda: message(filled(1)))
    stop, wrong, counts = threading.Event(), [], [0] * 4

    def ask(number):
        stub = GRPCInferenceServiceStub(gateway.channel())
        for value in itertools.count(number * 1_000_000):
            if stop.is_set():
                return
            rows = filled(value % 4096, 1 + value % 2)
            answer = stub.ModelInfer(message(rows), timeout=60)
            if action(answer).tolist() != [2 * (value % 4096) + 1] * rows.size:
                wrong.append((value, answer))
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        before = sum(counts)
        wait_until(lambda before=before: sum(counts) > before + 200, 60, "answers")
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
    before = sum(counts)
    wait_until(lambda: sum(counts) > before + 200, 60, "answers")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    gateway.warm_up(lambda: message(filled(1)))


def test_a_server_that_is_late_to_grant_a_lane_costs_no_request(gateway, server, monkeypatch):
    """On a loaded machine the supervisor may get no core for a while, and the request has time."""
    lease, late = LocalLink.lease, []

    def lease_late(*arguments, **options):
        os.kill(server.process.pid, signal.SIGSTOP)
        late.append(threading.Timer(0.5, os.kill, (server.process.pid, signal.SIGCONT)))
        late[-1].start()
        return lease(*arguments, **options)

    monkeypatch.setattr(LocalLink, "lease", lease_late)
    answer = GRPCInferenceServiceStub(gateway.channel()).ModelInfer(message(filled(3)), timeout=20)
    assert late and action(answer).tolist() == [7] * 4
    for each in late:
        each.join()


def test_only_calls_with_the_token_are_answered(start):
    """Earlier calls on the connection do not count: a proxy may send several clients' calls over one."""
    gateway = start(Access(secret=SECRET))
    valid = [("authorization", f"Bearer {SECRET}")]
    stub = gateway.warm_up(lambda: message(filled(1)), metadata=valid)
    before = gateway.by_python
    for i in range(20):
        assert action(stub.ModelInfer(message(filled(i)), timeout=20, metadata=valid)).tolist() == [2 * i + 1] * 4
        for wrong in (
            [],
            [("authorization", "Bearer other")],
            [*valid, *valid],
            [("authorization", f"Bearer {SECRET}x")],
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(message(filled(i)), timeout=20, metadata=wrong)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert gateway.by_python == before


def test_requests_with_special_features_are_left_to_python(gateway):
    stub = gateway.warm_up(lambda: message(filled(1)))
    before = gateway.by_python
    assert stub.ModelInfer(message(filled(1), id="ä"), timeout=20).id == "ä"
    with pytest.raises(grpc.RpcError, match="expected 16 bytes"):
        wrong = message(filled(1))
        wrong.raw_input_contents[0] += b"\0"
        stub.ModelInfer(wrong, timeout=20)
    with pytest.raises(grpc.RpcError, match="takes no publications"):
        stub.ModelInfer(message(filled(1), model_version="99"), timeout=20)
    assert gateway.by_python == before + 3
    assert (
        action(stub.ModelInfer(message(filled(7)), timeout=20, compression=grpc.Compression.Gzip)).tolist() == [15] * 4
    )


def test_an_arena_with_few_rows_is_left_to_other_clients(gateway, server):
    stub = GRPCInferenceServiceStub(gateway.channel())
    before = gateway.by_python
    for i in range(40):
        assert action(stub.ModelInfer(message(filled(i), "few"), timeout=20)).tolist() == [2 * i + 1] * 4
    assert gateway.by_python == before + 40
    with server.connect() as connection:
        assert connection.model("few", rows=2)(filled(1)[0]).tolist() == [3] * 4
