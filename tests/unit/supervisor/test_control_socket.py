"""The control socket answers whatever comes, and whatever its handlers raise."""

from __future__ import annotations

import pytest
import zmq
from tests.serving import wait_until

from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, StatusRequest
from jurybox.protocol.errors import Code, ModelFailed
from jurybox.protocol.wire import PREFIX
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
