import os

import pytest
from tests.serving import ServerElsewhere, serving, until_last_tests

from jurybox.client import connect

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
    "broken": {"factory": "tests.models:broken"},
    "liar": {"factory": "tests.models:liar"},
}


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server for all files that start none of their own: each must leave it unchanged.

    MATRIX_SERVER: the address of a server that serves MODELS already, perhaps with another Python (tests/wheel).
    """
    if elsewhere := os.environ.get("MATRIX_SERVER"):
        yield ServerElsewhere(elsewhere)
        return
    with until_last_tests(serving(tmp_path_factory.mktemp("server"), MODELS, tcp="127.0.0.1:0")) as running:
        yield running


@pytest.fixture(scope="session")
def gateway_server(tmp_path_factory):
    """Another server for clients over gRPC: its gateway leases rows of every model."""
    if elsewhere := os.environ.get("MATRIX_GATEWAY"):
        yield ServerElsewhere(elsewhere)
        return
    with until_last_tests(serving(tmp_path_factory.mktemp("gateway"), MODELS, grpc="127.0.0.1:0")) as running:
        yield running


@pytest.fixture(params=["shm", "zmq", "tcp", "grpc"])
def transport(request):
    return request.param


@pytest.fixture
def leased(transport):
    """For tests of rows leased from the server's arena: over gRPC the gateway leases them for all its clients."""
    if transport == "grpc":
        pytest.skip("over gRPC a client leases no rows: those of its model are its own, and free when a call ends")


@pytest.fixture
def connecting(request, transport):
    """Return a function that connects: local transports by name, others by the server's address."""
    if transport in ("shm", "zmq"):
        server = request.getfixturevalue("server")
        return lambda: server.connect(transport=transport)
    if transport == "grpc":
        pytest.importorskip("grpc", reason="gRPC is not installed here: there are no wheels for a free-threaded Python")
    server = request.getfixturevalue("gateway_server" if transport == "grpc" else "server")
    url = f"{transport}://{server.listening(transport)}"
    return lambda: connect(url, timeout=60.0)


@pytest.fixture
def client(connecting):
    with connecting() as connection:
        yield connection
