from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.serving import segments, serving, wait_until

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
}


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """What is done inside must leave shared memory as it found it, at the latest when the last of it is dead."""
    before = segments()
    yield
    wait_until(lambda: segments() <= before, 30, "shared memory as it was before")


@pytest.fixture
def nothing_left():
    """The test must leave shared memory as it found it."""
    with leaving_nothing():
        yield


@pytest.fixture
def server(tmp_path, nothing_left):
    """A server of the test's own, to be mistreated."""
    with serving(tmp_path, MODELS) as running:
        yield running


@pytest.fixture(params=["native", "zmq"])
def door(request):
    return request.param
