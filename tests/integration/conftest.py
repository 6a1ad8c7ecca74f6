import pytest
from tests.serving import serving

AFFINE = {"factory": "tests.models:affine"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for a module's tests: they must leave it as they found it."""
    models = {
        "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
        "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
        "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
        "broken": {"factory": "tests.models:broken"},
        "liar": {"factory": "tests.models:liar"},
    }
    with serving(tmp_path_factory.mktemp("server"), models) as running:
        yield running


@pytest.fixture(params=["native", "zmq"])
def door(request):
    return request.param


@pytest.fixture
def client(server, door):
    with server.connect(door=door) as connection:
        yield connection
