"""`server.transport`: what clients on this host use that do not choose; everyone is answered the same."""

import numpy as np
import pytest
from tests.serving import serving

from jurybox.client import connect
from jurybox.client.transports.shm import ShmTransport
from jurybox.client.transports.zmq import ZmqTransport


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = {"affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64}}
    folder = tmp_path_factory.mktemp("zmq")
    with serving(folder, models, transport="zmq", tcp="127.0.0.1:0", grpc="127.0.0.1:0") as running:
        yield running


@pytest.mark.parametrize(("chosen", "used"), [("auto", ZmqTransport), ("zmq", ZmqTransport), ("shm", ShmTransport)])
def test_clients_that_do_not_choose_use_the_servers_transport(server, chosen, used):
    x = np.ones((3, 4), np.float32)
    with server.connect(transport=chosen) as client:
        model = client.model("affine")
        np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
        assert isinstance(model.requests.lane.transport, used)


@pytest.mark.parametrize("door", ["tcp", "grpc"])
def test_clients_of_gateway_and_relay_are_answered_as_ever(server, door):
    x = np.ones((3, 4), np.float32)
    with connect(f"{door}://{server.listening(door)}") as client:
        np.testing.assert_array_equal(client.model("affine").infer(x), 2 * x + 1)
