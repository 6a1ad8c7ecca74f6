"""Requests of a form that was parsed before are answered and refused like the first of that form."""

from __future__ import annotations

import json
import socket
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


def test_concurrent_clients_of_one_form_get_their_own_answers(gateway):
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


def test_a_lone_connection_and_one_that_joins_it_get_their_own_answers(gateway, stub):
    """The loop waits in place for a lone connection's answers; one that joins meanwhile is answered, too."""
    with grpc.insecure_channel(gateway.grpc, [("grpc.use_local_subchannel_pool", 1)]) as other:
        joining = GRPCInferenceServiceStub(other)
        for i in range(60):
            twice = message(np.full((2, 4), -i, np.float32))
            beside = joining.ModelInfer.future(twice, timeout=20) if i % 9 == 8 else None
            rows = [np.full((1, 4), i + k, np.float32) for k in range(i % 3)]
            many = [stub.ModelInfer.future(message(one), timeout=20) for one in rows]
            alone = stub.ModelInfer(message(np.full((1, 4), i, np.float32)), timeout=20)
            assert action(alone).tolist() == [2 * i + 1] * 4
            assert [action(call.result())[0] for call in many] == [2 * (i + k) + 1 for k in range(i % 3)]
            assert beside is None or action(beside.result()).tolist() == [1 - 2 * i] * 8


def test_contents_of_another_size_are_refused(stub):
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


def test_a_wrong_form_is_refused_each_time(stub):
    for _ in range(3):
        with pytest.raises(grpc.RpcError, match="is not the model's"):
            wrong = message(np.ones((1, 4), np.float32))
            wrong.outputs.add(name="nothing")
            stub.ModelInfer(wrong, timeout=20)
        with pytest.raises(grpc.RpcError, match="no model 'nobody'"):
            stub.ModelInfer(message(np.ones((1, 4), np.float32), "nobody"), timeout=20)


def test_a_form_outlives_the_lane_it_was_parsed_for(gateway, stub):
    rows = np.ones((5, 4), np.float32)
    with gateway.server.connect() as connection:
        for _ in range(3):
            for _ in range(3):
                assert action(stub.ModelInfer(message(rows), timeout=20)).tolist() == [3.0] * 20
            connection.load("affine", timeout=60)


def test_failed_rows_are_reported_for_a_known_form(stub):
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


# ---- HTTP


def http_request(rows, path="/v2/models/affine/infer", name="observation", **parameters):
    tensor = {"name": name, "shape": list(rows.shape), "datatype": "FP32",
              "parameters": {"binary_data_size": rows.nbytes}}  # fmt: skip
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True, **parameters}}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + rows.nbytes}\r\n\r\n"
    ).encode()
    return head + text + rows.tobytes()


class Web:
    """A connection on which answers are read one after another."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.received = b""

    def answer(self):
        while (end := self.received.find(b"\r\n\r\n") + 4) < 4:
            self.received += self.socket.recv(65536)
        lines = self.received[:end].decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        size = int(headers.get("content-length", 0))
        while len(self.received) < end + size:
            self.received += self.socket.recv(65536)
        body, self.received = self.received[end : end + size], self.received[end + size :]
        return int(lines[0].split()[1]), headers, body


@pytest.fixture
def line(gateway):
    web = Web(gateway.http)
    yield web
    web.socket.close()


def test_a_known_head_is_answered_like_the_first(line):
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = []
    for i in range(4):
        line.socket.sendall(http_request(rows + i))
        status, headers, body = line.answer()
        headers.pop("date")
        length = int(headers["inference-header-content-length"])
        np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32), (2 * (rows + i) + 1).reshape(-1))
        found.append((status, headers, body[:length]))
    assert all(one == found[0] for one in found)


def json_request(data, more="", path="/v2/models/affine/infer", name="observation", **request):
    tensor = {"name": name, "shape": [len(data) // 4 or 1, min(4, len(data))], "datatype": "FP32", "data": data}
    text = json.dumps({"inputs": [tensor], **request})
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {len(text)}\r\n\r\n{text}".encode()


def test_json_behind_a_known_head_is_answered_like_json_behind_any_other(line):
    """Each body with a new head, which the application answers, then behind a known one, which it has not to read."""
    bodies = [
        {"data": list(range(4))}, {"data": list(range(8))}, {"data": list(range(400))}, {"data": []},
        {"data": [1, 2, 3, "x"]}, {"data": [1, 2, 3, 1e39]}, {"data": [0] * 4, "id": "a"}, {"data": [0] * 4, "id": 7},
        {"data": [0] * 4, "outputs": [{"name": "action", "parameters": {"binary_data": True}}]},
        {"data": [0] * 4, "outputs": [{"name": "nobody"}]}, {"data": [0] * 4, "parameters": {"sequence_id": 5}},
        {"data": [0] * 4, "parameters": {"binary_data_output": True}}, {"data": [0] * 4, "parameters": {"timeout": 0}},
        {"data": [0] * 4, "name": "x"}, {"data": [0] * 4, "unknown": 1},
    ]  # fmt: skip
    line.socket.sendall(json_request([1.0] * 4))
    assert line.answer()[0] == 200
    statuses = set()
    for number, body in enumerate(bodies):
        found = []
        for more in (f"X-Once: {number}\r\n", "", ""):
            line.socket.sendall(json_request(more=more, **body))
            status, headers, told = line.answer()
            headers.pop("date")
            found.append((status, headers, told))
        assert found[0] == found[1] == found[2]
        statuses.add(found[0][0])
    assert statuses > {200, 400, 422}


def test_failed_rows_of_a_known_form_are_reported_like_the_first(line, stub):
    rows = np.array([[1], [3], [6]], np.float32)  # threes and sixes fail
    whole = http_request(rows, "/v2/models/picky/infer", "x", row_errors=True)
    asked = pb.ModelInferRequest(model_name="picky", raw_input_contents=[rows.tobytes()])
    asked.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    asked.parameters["row_errors"].bool_param = True
    found = []
    for _ in range(3):
        line.socket.sendall(whole)
        status, headers, body = line.answer()
        assert status == 200 and json.loads(body[: int(headers["inference-header-content-length"])])["parameters"]
        np.testing.assert_array_equal(np.frombuffer(body[-12:], np.float32), [2, np.nan, np.nan])
        answer = stub.ModelInfer(asked, timeout=20)
        assert json.loads(answer.parameters["row_errors"].string_param) == {"1": "three", "2": "six"}
        np.testing.assert_array_equal(action(answer), [2, np.nan, np.nan])
        found.append((body, answer))
    assert all(one == found[0] for one in found)


def test_pipelined_requests_are_answered_in_order(line):
    line.socket.sendall(http_request(np.zeros((1, 4), np.float32)))
    line.answer()
    many = [np.full((1, 4), i, np.float32) for i in range(50)]
    line.socket.sendall(
        b"".join(http_request(rows) for rows in many) + b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    for rows in many:
        status, _, body = line.answer()
        assert status == 200 and np.frombuffer(body[-16:], np.float32).tolist() == (2 * rows[0] + 1).tolist()
    assert line.answer()[2] == b'{"live":true}'


def test_a_known_request_may_arrive_in_pieces(line):
    whole = http_request(np.ones((1, 4), np.float32))
    line.socket.sendall(whole)
    line.answer()
    head = whole.index(b"\r\n\r\n") + 4
    line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for cut in (1, 10, head - 1, head, head + 1, head + 30, len(whole) - 1):
        line.socket.sendall(whole[:cut])
        threading.Event().wait(0.02)
        line.socket.sendall(whole[cut:])
        status, _, body = line.answer()
        assert status == 200 and np.frombuffer(body[-16:], np.float32).tolist() == [3.0] * 4


def test_a_known_head_lets_no_wrong_body_through(line):
    right = http_request(np.ones((1, 4), np.float32))
    line.socket.sendall(right)
    line.answer()
    for what, with_, status in ((b"FP32", b"FP64", 422), (b"[1, 4]", b"[4, 1]", 422), (b'"shape"', b'"shame"', 400)):
        line.socket.sendall(right.replace(what, with_))
        found, _, body = line.answer()
        assert found == status and json.loads(body)["code"], body
    line.socket.sendall(right.replace(b"/affine/", b"/nobody/"))
    assert line.answer()[0] == 404
    line.socket.sendall(right.replace(b"Host: localhost", b"Host: evil.test"))
    assert line.answer()[0] == 421


def test_heads_with_special_fields_do_not_count_as_known(line):
    right = http_request(np.ones((1, 4), np.float32))
    for special in (b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Content-Encoding: identity\r\n"):
        for _ in range(2):
            host, port = line.socket.getpeername()
            web = Web(f"{host}:{port}")
            web.socket.sendall(right.replace(b"\r\n", b"\r\n" + special, 1))
            status, headers, _ = web.answer()
            if status == 100:
                status, headers, _ = web.answer()
            assert status in (200, 415) and (headers.get("connection") == "close") == special.startswith(b"Conn")
            web.socket.close()


def test_the_body_begins_where_the_head_ends_for_all_parsers(gateway):
    head, body = http_request(np.ones((1, 4), np.float32)).split(b"\r\n\r\n", 1)
    bare = head + b"\n\n" + body  # httptools refuses such a line end, and h11 accepts it
    statuses = []
    for whole in (bare, bare, head + b"\r\n\r\n" + body, bare):
        line = Web(gateway.http)
        line.socket.sendall(whole)
        status, _, answer = line.answer()
        line.socket.close()
        assert status == 400 or np.frombuffer(answer[-16:], np.float32).tolist() == [3.0] * 4
        statuses.append(status)
    assert statuses[2] == 200 and statuses[0] == statuses[1] == statuses[3]


def test_clients_that_disconnect_during_a_known_request_do_not_disturb_the_next(gateway):
    """tests/unit/server/test_http_forms.py tests that their bodies' bytes are released."""
    whole = http_request(np.ones((1, 4), np.float32))
    for cut in (len(whole) - 3, len(whole)):
        for _ in range(20):
            web = Web(gateway.http)
            web.socket.sendall(whole)
            web.answer()
            web.socket.sendall(whole[:cut])
            web.socket.close()
    web = Web(gateway.http)
    web.socket.sendall(whole)
    assert web.answer()[0] == 200
    web.socket.close()


def test_a_head_is_known_for_its_own_request_if_others_arrived_with_it(gateway):
    """Two heads that differ only in the model arrive together: later, neither may be answered by the other's."""
    rows = np.ones((1, 4), np.float32)
    affine, moody = http_request(rows), http_request(rows, "/v2/models/team%2Fmoody/infer")
    for turn, both in enumerate(((affine, moody), (moody, affine))):
        first, second = (one.replace(b"\r\n", b"\r\nTurn: %d\r\n" % turn, 1) for one in both)  # new heads
        web = Web(gateway.http)
        web.socket.sendall(first + second)
        web.answer(), web.answer()
        for whole, expected in ((first, 3.0 - turn), (second, 2.0 + turn)):
            web.socket.sendall(whole)
            status, _, body = web.answer()
            assert status == 200 and np.frombuffer(body[-16:], np.float32).tolist() == [expected] * 4
        web.socket.close()
