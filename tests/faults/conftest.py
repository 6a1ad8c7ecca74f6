import pytest
from tests.serving import segments, serving

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
}


@pytest.fixture
def nothing_left():
    """The test must leave shared memory as it found it."""
    before = segments()
    yield
    assert segments() - before == set()


@pytest.fixture
def server(tmp_path, nothing_left):
    """A server of the test's own, to be mistreated."""
    with serving(tmp_path, MODELS) as running:
        yield running


@pytest.fixture(params=["native", "zmq"])
def door(request):
    return request.param
