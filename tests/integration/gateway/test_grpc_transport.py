"""The gateway's gRPC below tritonclient: health, reflection, deadlines, invalid requests, cancelled calls."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.serving import wait_until, wait_until_computing

from jurybox.client import ServerGone, Timeout, connect
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

SERVING = health_pb2.HealthCheckResponse.SERVING
ROW = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def channel(gateway):
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return GRPCInferenceServiceStub(channel)


def request(rows=ROW, model="affine", **fields):
    tensor = pb.ModelInferRequest.InferInputTensor(name="observation", datatype="FP32", shape=rows.shape)
    message = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[rows.tobytes()])
    for name, value in fields.items():
        message.parameters[name].int64_param = value
    return message


def values(answer):
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(tuple(answer.outputs[0].shape))


def test_reflection_lists_the_services_and_their_messages(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    assert {"inference.GRPCInferenceService", "jurybox.RemoteWeights", "grpc.health.v1.Health"} <= services
    assert "jurybox.protocol.ServerStatus" in services
    file = database.FindFileContainingSymbol("inference.GRPCInferenceService")
    assert "ModelInferRequest" in {message.name for message in file.message_type}


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_health_can_be_checked_and_watched(channel, service):
    health = health_pb2_grpc.HealthStub(channel)
    query = health_pb2.HealthCheckRequest(service=service)
    assert health.Check(query, timeout=10).status == SERVING
    watching = health.Watch(query, timeout=10)
    assert next(watching).status == SERVING
    watching.cancel()


def test_typed_contents_work_like_raw_ones(stub):
    message = request()
    del message.raw_input_contents[:]
    message.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
    assert values(stub.ModelInfer(message, timeout=10)).tolist() == [[3, 5, 7, 9]]


def test_a_deadline_is_kept_and_its_rows_are_returned(stub):
    slow = np.full((1, 4), 500_000, np.float32)  # half a second
    for _ in range(8):
        with pytest.raises(grpc.RpcError) as late:
            stub.ModelInfer(request(slow, "team/moody"), timeout=0.05)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # A lane has at most 16 rows here: if each of the calls above lost one, this would not be answered.
    assert len(values(stub.ModelInfer(request(np.zeros((64, 4), np.float32), "team/moody"), timeout=20))) == 64


def test_cancelled_calls_return_their_rows(stub, gateway):
    slow = np.full((1, 4), 200_000, np.float32)
    for _ in range(3):
        calls = [stub.ModelInfer.future(request(slow, "team/moody"), timeout=20) for _ in range(20)]
        with gateway.server.connect() as connection:
            wait_until_computing(connection, "team/moody")
        for call in calls:
            call.cancel()
    assert len(values(stub.ModelInfer(request(np.zeros((64, 4), np.float32), "team/moody"), timeout=30))) == 64

    def idle():
        with gateway.server.connect() as connection:
            return all(model["waiting"] == 0 for model in connection.status()["models"])

    wait_until(idle, what="every row answered")


def test_concurrent_requests_are_batched(stub, gateway):
    def batches():
        with gateway.server.connect() as connection:
            model = next(one for one in connection.status()["models"] if one["name"] == "team/moody")
            return model["batches"], model["rows"]

    before = batches()
    block = stub.ModelInfer.future(request(np.full((1, 4), 2_500_000, np.float32), "team/moody"), timeout=20)
    with gateway.server.connect() as connection:
        wait_until_computing(connection, "team/moody")  # while it does, the others arrive
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: stub.ModelInfer(request(model="team/moody"), timeout=20), range(8)))
    block.result()
    after = batches()
    assert after[1] - before[1] >= 9
    assert after[0] - before[0] <= 6  # nine if each were alone


@pytest.mark.parametrize(
    ("broken", "code", "reason"),
    [
        (lambda m: m.raw_input_contents.append(b"more"), "INVALID_ARGUMENT", "2 raw_input_contents came for 1 inputs"),
        (lambda m: m.inputs[0].contents.fp32_contents.append(1), "INVALID_ARGUMENT", "contents beside raw"),
        (lambda m: m.ClearField("raw_input_contents"), "INVALID_ARGUMENT", "came without data"),
        (lambda m: m.ClearField("inputs"), "INVALID_ARGUMENT", "raw_input_contents"),
        (lambda m: m.ClearField("model_name"), "NOT_FOUND", "no model ''"),
        (lambda m: m.inputs[0].shape.append(1), "INVALID_ARGUMENT", "expected shape [n, 4]"),
        (lambda m: m.inputs[0].shape.__setitem__(0, 2**62), "INVALID_ARGUMENT", "bytes for shape"),
        (lambda m: m.parameters["priority"], "INVALID_ARGUMENT", "holds no value"),
        (lambda m: setattr(m, "model_version", "-1"), "NOT_FOUND", "expected a whole number"),
    ],
)
def test_the_error_of_a_wrong_request_says_what_was_expected(stub, broken, code, reason):
    message = request()
    broken(message)
    with pytest.raises(grpc.RpcError) as wrong:
        stub.ModelInfer(message, timeout=10)
    assert (wrong.value.code().name, reason in wrong.value.details()) == (code, True), wrong.value.details()
    assert values(stub.ModelInfer(request(), timeout=10)).tolist() == [[3, 5, 7, 9]]


@pytest.mark.parametrize("body", [b"\xff" * 100, b"", b"\x0a\x05affi"])
def test_invalid_bytes_are_an_error_and_end_nothing(channel, stub, body):
    raw = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError):
        raw(body, timeout=10)
    with pytest.raises(grpc.RpcError) as unknown:
        channel.unary_unary("/inference.GRPCInferenceService/Nonsense")(b"", timeout=10)
    assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert values(stub.ModelInfer(request(), timeout=10)).tolist() == [[3, 5, 7, 9]]


def test_a_message_beyond_the_bound_is_refused(stub):
    rows = np.zeros(((65 << 20) // 16, 4), np.float32)
    with pytest.raises(grpc.RpcError) as large:
        stub.ModelInfer(request(rows), timeout=20)
    assert large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_killed_engine_only_delays_requests_with_a_late_deadline(stub, gateway):
    stub.ModelInfer(request(), timeout=10)
    answers, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(values(stub.ModelInfer(request(), timeout=30))[0, 0])

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask) for _ in range(4)]
        wait_until(lambda: len(answers) > 20, 30, "answers by the first engine")
        os.kill(gateway.server.pids()["engine-0"], signal.SIGKILL)
        killed = len(answers)
        wait_until(lambda: len(answers) > killed + 100, 30, "answers by the next engine")
        stop.set()
        for one in futures:
            one.result()
    assert set(answers) == {3.0}


def test_tritonclient_works_beside_our_own_messages(rpc, stub):
    assert rpc.is_server_live() and stub.ServerLive(pb.ServerLiveRequest(), timeout=10).live
    assert (
        tritonclient.grpc.service_pb2.ModelInferRequest.DESCRIPTOR.full_name
        == pb.ModelInferRequest.DESCRIPTOR.full_name
    )


@pytest.mark.parametrize("transfer", ["exact", "changed", "bfloat16"])
def test_a_learner_elsewhere_publishes_on_the_same_port(gateway, transfer):
    with gateway.server.connect() as connection, connect(f"grpc://{gateway.grpc}") as elsewhere:
        model, publisher = connection.model("policy"), elsewhere.publisher("policy", transfer=transfer)
        version = publisher.publish({"scale": np.array(3, np.float32), "offset": np.array(5, np.float32)})
        wait_until(lambda: model.infer_reply(ROW).version == version, 30, "adoption")
        np.testing.assert_array_equal(model.infer(ROW), 3 * ROW + 5)
        publisher.publish({"scale": np.array(2, np.float32), "offset": np.array(1, np.float32)})  # as it was loaded
        state, version, _ = elsewhere.weights("policy").read()
        assert version == publisher.version and state["scale"] == 2


def test_a_client_of_a_grpc_address_has_the_status_document(gateway):
    with connect(f"grpc://{gateway.grpc}", timeout=30) as far, gateway.server.connect() as near:
        far_status, near_status = far.status(), near.status()
    assert far_status.keys() == near_status.keys() and far_status["server"]["grpc"] == gateway.grpc
    assert [model["name"] for model in far_status["models"]] == [model["name"] for model in near_status["models"]]


def test_status_fails_in_time_if_the_supervisor_does_not_answer(gateway):
    with connect(f"grpc://{gateway.grpc}", timeout=30) as far:
        far.status()
        os.kill(gateway.server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises((Timeout, ServerGone)):
                while True:  # a recent status is cached for a moment
                    far.status()
        finally:
            os.kill(gateway.server.process.pid, signal.SIGCONT)

        def answered():
            with contextlib.suppress(Timeout, ServerGone):
                return far.status()["server"]["state"] == "serving"

        wait_until(answered)
