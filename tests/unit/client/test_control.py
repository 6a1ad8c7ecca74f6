"""The control connection when its sockets accept no messages."""

from __future__ import annotations

import time

import pytest
import zmq

from jurybox.client import ServerGone
from jurybox.client.control import Control
from jurybox.protocol.control_pb2 import StatusRequest


class Refused(zmq.Socket):
    """A socket without a connection, like one after a handshake that was refused before the first message."""

    def send_multipart(self, *_, **__):
        raise zmq.Again()


@pytest.mark.parametrize("far", [None, lambda lease: None], ids=["local", "far"])
def test_a_connection_that_is_refused_at_once_is_server_gone(far):
    with zmq.Context() as context:
        control = Control(context, "ipc:///nowhere", lambda: Refused(context, zmq.DEALER), far=far)
        try:
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(ServerGone, match="no answer from ipc:///nowhere within 0.2 s"):
                    control.call(0.2, status=StatusRequest())
                assert time.monotonic() - began >= 0.2
        finally:
            control.close()
