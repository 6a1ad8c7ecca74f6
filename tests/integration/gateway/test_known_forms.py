"""Requests of a form that was read before: answered as the first was, refused as the first would be."""

from __future__ import annotations

import threading

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub


def message(rows, name="affine", **fields):
    made = pb.ModelInferRequest(model_name=name, raw_input_contents=[rows.tobytes()], **fields)
    made.inputs.add(name="observation", datatype="FP32", shape=rows.shape)
    return made


@pytest.fixture
def stub(gateway):
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield GRPCInferenceServiceStub(channel)


def action(answer):
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


def test_every_request_of_a_form_gets_its_own_answer(stub):
    for i in range(20):
        rows = np.full((3, 4), i, np.float32)
        answer = stub.ModelInfer(message(rows, id=f"number {i}" if i % 2 else ""), timeout=20)
        assert answer.id == (f"number {i}" if i % 2 else "") and answer.model_name == "affine"
        assert list(answer.outputs[0].shape) == [3, 4] and answer.outputs[0].datatype == "FP32"
        np.testing.assert_array_equal(action(answer), np.full(12, 2 * i + 1))


def test_clients_of_one_form_that_ask_at_once_get_their_own_answers(gateway):
    wrong = []

    def ask(number):
        with grpc.insecure_channel(gateway.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = GRPCInferenceServiceStub(channel)
            for i in range(100):
                value = 1000 * number + i
                answer = action(stub.ModelInfer(message(np.full((1, 4), value, np.float32)), timeout=20))
                if answer.tolist() != [2 * value + 1] * 4:
                    wrong.append((value, answer))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_contents_of_another_size_are_refused_as_ever(stub):
    rows = np.ones((2, 4), np.float32)
    stub.ModelInfer(message(rows), timeout=20)
    for change in (lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b""):
        wrong = message(rows)
        wrong.raw_input_contents[0] = change(wrong.raw_input_contents[0])
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(wrong, timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "expected 32 bytes" in caught.value.details()
    twice = message(rows)
    twice.raw_input_contents.append(twice.raw_input_contents[0])
    with pytest.raises(grpc.RpcError, match="2 raw_input_contents came for 1 inputs"):
        stub.ModelInfer(twice, timeout=20)
    assert action(stub.ModelInfer(message(rows), timeout=20)).tolist() == [3.0] * 8


def test_a_form_that_is_wrong_is_refused_each_time_it_comes(stub):
    for _ in range(3):
        with pytest.raises(grpc.RpcError, match="is not the model's"):
            wrong = message(np.ones((1, 4), np.float32))
            wrong.outputs.add(name="nothing")
            stub.ModelInfer(wrong, timeout=20)
        with pytest.raises(grpc.RpcError, match="no model 'nobody'"):
            stub.ModelInfer(message(np.ones((1, 4), np.float32), "nobody"), timeout=20)


def test_a_form_outlives_the_lane_it_was_read_for(gateway, stub):
    rows = np.ones((5, 4), np.float32)
    with gateway.server.connect() as connection:
        for _ in range(3):
            for _ in range(3):
                assert action(stub.ModelInfer(message(rows), timeout=20)).tolist() == [3.0] * 20
            connection.load("affine", timeout=60)


def test_rows_that_fail_are_told_of_requests_of_a_known_form(stub):
    for _ in range(3):
        assert action(stub.ModelInfer(message(np.ones((1, 4), np.float32), "team/moody"), timeout=20)).size == 4
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message(np.full((1, 4), 666, np.float32), "team/moody"), timeout=20)
        assert caught.value.code() == grpc.StatusCode.INTERNAL


def test_compressed_messages_are_read(gateway):
    with tritonclient.grpc.InferenceServerClient(gateway.grpc) as client:
        rows = np.zeros((4, 4), np.float32)
        tensor = tritonclient.grpc.InferInput("observation", [4, 4], "FP32")
        tensor.set_data_from_numpy(rows)
        for algorithm in ("gzip", "deflate"):
            answer = client.infer("affine", [tensor], compression_algorithm=algorithm, client_timeout=20)
            np.testing.assert_array_equal(answer.as_numpy("action"), rows + 1)
        with pytest.raises(InferenceServerException, match="is not the model's"):
            other = tritonclient.grpc.InferInput("other", [4, 4], "FP32")
            other.set_data_from_numpy(rows)
            client.infer("affine", [other], compression_algorithm="gzip", client_timeout=20)
