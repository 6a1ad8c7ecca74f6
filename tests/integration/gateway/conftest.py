"""One server with the gateway's HTTP and gRPC open, shared by all tests here: each must leave it unchanged."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.serving import serving

LOCAL = "127.0.0.1:0"
OPT_IN = {"shared_memory_prefix": "oip_test_"}  # of the regions in test_tritonclient_memory.py


@pytest.fixture(scope="package")
def gateway(tmp_path_factory):
    """A running server with its addresses: `http`, `grpc`."""
    models = {
        "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
        "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
        "policy": {"factory": "tests.models:affine", "publish": "double_buffer", "keep_versions": 2},
        "text": {"factory": "tests.open_models:shout", "max_batch": 8, "rows": 64},
        "image": {"factory": "tests.open_models:brightness", "max_batch": 8, "rows": 64},
        "mask": {"factory": "tests.open_models:threshold", "max_batch": 8, "rows": 64},
        "prompted": {"factory": "tests.open_models:prompted", "max_batch": 8, "rows": 64},
        "picky": {"factory": "tests.open_models:picky", "max_batch": 8, "rows": 64},
        "sum": {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 32},
        "team/moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
    }
    with serving(tmp_path_factory.mktemp("gateway"), models, http=LOCAL, grpc=LOCAL, **OPT_IN) as running:
        with running.connect() as connection:
            addresses = connection.status()["server"]
        yield SimpleNamespace(server=running, http=addresses["http"], grpc=addresses["grpc"])


@pytest.fixture
def rpc(gateway):
    with tritonclient.grpc.InferenceServerClient(gateway.grpc) as client:
        yield client


@pytest.fixture
def web(gateway):
    with tritonclient.http.InferenceServerClient(gateway.http, concurrency=8, network_timeout=20.0) as client:
        yield client


@pytest.fixture(params=["grpc", "http"])
def kind(request):
    """tritonclient's module and a client, which share most of their calls."""
    module = {"grpc": tritonclient.grpc, "http": tritonclient.http}[request.param]
    return module, request.getfixturevalue({"grpc": "rpc", "http": "web"}[request.param])


@pytest.fixture
def curl(gateway):
    with httpx.Client(base_url=f"http://{gateway.http}", timeout=20.0) as client:
        yield client
