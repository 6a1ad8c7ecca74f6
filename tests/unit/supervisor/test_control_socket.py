"""The control socket answers whatever comes, and whatever its handlers raise."""

from __future__ import annotations

import pytest
import zmq
from tests.serving import wait_until

from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, SleepRequest, StatusRequest
from jurybox.protocol.errors import Code, ModelFailed
from jurybox.protocol.wire import MAX_CONTROL, PREFIX
from jurybox.server.supervisor.control import ControlSocket


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.fixture
def control_socket(tmp_path):
    context, address, raising = zmq.Context(), f"ipc://{tmp_path}/control_socket", []

    def handler(request):
        raise raising[0]

    control_socket = ControlSocket(context, address, {"status": handler}, lambda event, **fields: None)
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.RCVTIMEO, 20_000)
    client.connect(address)

    def ask(error, frames=None):
        raising[:] = [error]
        body = ControlRequest(status=StatusRequest()).SerializeToString()
        client.send_multipart(frames or (PREFIX, b"12345678", body))
        wait_until(lambda: control_socket.socket.poll(0), 20)
        control_socket.answer_waiting()
        return ControlReply.FromString(client.recv_multipart()[-1]).error

    yield ask
    client.close()
    control_socket.close()
    context.term()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelFailed("half \ud800 a pair"), Code.MODEL_FAILED),
        (ModelFailed("long " * 1_000_000), Code.MODEL_FAILED),
        (ValueError("half \ud800 a pair"), Code.REFUSED),
        (Speechless(), Code.REFUSED),
        (RecursionError(), Code.REFUSED),
        (MemoryError(), Code.REFUSED),
    ],
)
def test_every_exception_of_a_handler_is_answered(control_socket, error, code):
    told = control_socket(error)
    assert told.code == code
    assert 0 < len(told.message) < 6000
    assert control_socket(ModelFailed("fine")).message == "fine"


@pytest.mark.parametrize("frames", [(b"",), (PREFIX,), (PREFIX, b"x" * 5000, b""), (PREFIX, b"12345678", b"", b"more")])
def test_all_input_is_answered(control_socket, frames):
    assert control_socket(None, frames).code in (Code.MALFORMED, Code.PROTOCOL_MISMATCH)


@pytest.mark.parametrize(
    ("frames", "code", "said"),
    [
        ((b"",), Code.PROTOCOL_MISMATCH, "expected a Jurybox message"),
        ((PREFIX,), Code.MALFORMED, "has 3 frames (prefix, 8 bytes, body), got 1"),
        ((PREFIX, b"1234567", b""), Code.MALFORMED, "has 3 frames (prefix, 8 bytes, body), got 3"),
        ((PREFIX, b"12345678", b"", b"more"), Code.MALFORMED, "has 3 frames (prefix, 8 bytes, body), got 4"),
        ((PREFIX, b"12345678", b""), Code.MALFORMED, "unknown control request None"),
        ((PREFIX, b"12345678", b"\xff"), Code.MALFORMED, "not a control request"),
        (
            (PREFIX, b"12345678", ControlRequest(sleep=SleepRequest(model="m")).SerializeToString()),
            Code.MALFORMED,
            "unknown control request 'sleep'",
        ),
    ],
)
def test_what_is_no_control_request_is_answered_with_what_is_wrong(control_socket, frames, code, said):
    told = control_socket(None, frames)
    assert told.code == code and said in told.message


def test_a_client_that_sends_more_than_a_control_request_may_have_is_cut_off(tmp_path):
    context, address = zmq.Context(), f"ipc://{tmp_path}/control_socket"
    control_socket = ControlSocket(context, address, {}, lambda event, **fields: None)
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    gone = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        client.connect(address)
        client.send_multipart((PREFIX, b"12345678", bytes(MAX_CONTROL + 1)))
        assert gone.poll(20_000) and not control_socket.socket.poll(0)
    finally:
        client.disable_monitor()
        gone.close()
        client.close()
        control_socket.close()
        context.term()
