"""Token and TLS of HTTP and gRPC on a real server, as clients see them."""

import contextlib
import json
import shutil
import ssl

import grpc
import httpx
import numpy as np
import pytest
from tests.serving import serving, walls

from jurybox import native
from jurybox.client import Error, Refused, ServerGone, connect
from jurybox.client.remote.http2_calls import Http2Calls
from jurybox.client.remote.weights import RemotePublisher
from jurybox.client.rewards import Juror
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.errors import Code
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

TOKEN = "s3cret-s3cret-s3cret"
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "policy": {"factory": "tests.models:affine", "publish": "double_buffer"},
    "brightness": {"factory": "tests.reward_models:brightness", "max_batch": 16, "rows": 64},
}
X = np.ones((2, 4), np.float32)
BEARER = {"Authorization": f"Bearer {TOKEN}"}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder):
    security = {**walls(folder, TOKEN), "max_message_mib": 1}
    listen = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    with serving(tmp_path_factory.mktemp("server"), MODELS, **listen, **security) as running:
        running.http, running.grpc = running.listening("http"), running.listening("grpc")
        yield running


@pytest.fixture
def web(server, folder):
    verify = ssl.create_default_context(cafile=folder / "cert.pem")
    with httpx.Client(base_url=f"https://{server.http}", verify=verify, timeout=20) as client:
        yield client


def test_everything_but_health_needs_the_token(web):
    paths = list(web.get("/openapi.json", headers=BEARER).json()["paths"])
    assert len(paths) > 5
    for path in paths:
        status = web.get(path.replace("{name}", "affine").replace("{version}", "1")).status_code
        assert (status in (200, 503)) == (path in ("/health", "/health/live", "/health/ready", "/v2/health/live",
                                                   "/v2/health/ready")), path  # fmt: skip
    assert web.get("/status").status_code == 401
    assert web.get("/status", headers=BEARER).status_code == 200
    assert web.get("/status", headers={"Authorization": f"Bearer {TOKEN}x"}).status_code == 401


def test_a_repeated_request_needs_the_token_again(web):
    tensor = {"name": "observation", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = {"content": text + X.tobytes()}
    length = {"Inference-Header-Content-Length": str(len(text))}
    for _ in range(3):
        answer = web.post("/v2/models/affine/infer", headers={**BEARER, **length}, **body)
        assert answer.status_code == 200 and np.frombuffer(answer.content[-32:], np.float32).tolist() == [3.0] * 8
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        for wrong in ({}, {"Authorization": f"Bearer {TOKEN[:-1]}x"}):
            assert web.post("/v2/models/affine/infer", headers={**wrong, **length}, **body).status_code == 401


def test_a_browser_can_send_the_token_as_a_password(web):
    assert web.get("/status", auth=("anybody", TOKEN)).status_code == 200
    assert web.get("/status", auth=(TOKEN, "")).status_code == 401


def test_answers_carry_the_security_headers(web):
    for answer in (web.get("/status", headers=BEARER), web.get("/status"), web.get("/nowhere", headers=BEARER)):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_plain_text_is_refused_by_tls(server):
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{server.http}/health/live", timeout=5)


def test_another_hosts_name_is_refused(web):
    assert web.get("/health/live", headers={"Host": "evil.example"}).status_code == 421


def test_bodies_and_headers_have_limits(web):
    assert web.post("/v2/models/affine/infer", content=bytes((1 << 20) + 1), headers=BEARER).status_code == 413
    assert web.post("/v2/models/affine/infer", content=iter([bytes(1 << 20)] * 3), headers=BEARER).status_code == 413
    with contextlib.suppress(httpx.HTTPError):  # the connection may end before it is all sent
        assert web.get("/health/live", headers={"X-Long": "x" * 200_000}).status_code >= 400
    assert web.get("/health/live").status_code == 200


@pytest.fixture
def stub(server, folder):
    credentials = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        yield GRPCInferenceServiceStub(channel)


def status_of(call, *arguments, timeout=10, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=timeout, **options)
    return caught.value.code()


def test_every_call_but_liveness_needs_the_token(stub):
    metadata = [("authorization", f"Bearer {TOKEN}")]
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=10).live
    stub.ServerReady(pb.ServerReadyRequest(), timeout=10)
    for wrong in (None, [("authorization", "Bearer x")], metadata * 2, [("authorization", TOKEN)]):
        refused = grpc.StatusCode.UNAUTHENTICATED
        assert status_of(stub.ServerMetadata, pb.ServerMetadataRequest(), metadata=wrong) == refused
        assert status_of(stub.ModelInfer, pb.ModelInferRequest(model_name="affine"), metadata=wrong) == refused
        stream = stub.ModelStreamInfer(iter([pb.ModelInferRequest()]), timeout=10, metadata=wrong)
        assert status_of(lambda timeout, stream=stream: next(stream)) == refused
    assert stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=10, metadata=metadata).name == "jurybox"


def test_reflection_needs_the_token_too(server, folder):
    credentials = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        assert status_of(lambda timeout: next(call(iter([b""]), timeout=timeout))) == grpc.StatusCode.UNAUTHENTICATED


def test_a_message_beyond_the_limit_is_refused(stub):
    request = pb.ModelInferRequest(model_name="affine", raw_input_contents=[bytes(2 << 20)])
    metadata = [("authorization", f"Bearer {TOKEN}")]
    assert status_of(stub.ModelInfer, request, metadata=metadata) == grpc.StatusCode.RESOURCE_EXHAUSTED
    long = [*metadata, ("x-long", "x" * 100_000)]
    assert status_of(stub.ServerMetadata, pb.ServerMetadataRequest(), metadata=long, timeout=1) is not None


@pytest.mark.parametrize("http2", ["auto", "grpcio"])
def test_the_client_connects_with_the_token_and_the_certificate(server, folder, monkeypatch, http2):
    monkeypatch.setenv("JURYBOX_TLS_CA", str(folder / "cert.pem"))
    monkeypatch.setenv("JURYBOX_GRPC_HTTP2", http2)
    with connect(f"grpcs://{server.grpc}", token=TOKEN) as client:
        assert isinstance(client._link._infer, Http2Calls) == (http2 == "auto" and not native.nghttp2()[1])
        model = client.model("affine")
        np.testing.assert_array_equal(model.infer(X), 2 * X + 1)
        many = np.resize(X, (model.max_batch, X.shape[1]))
        np.testing.assert_array_equal(model.submit(many).result().outputs, 2 * many + 1)
    monkeypatch.setenv("JURYBOX_TOKEN", TOKEN)
    with connect(f"grpcs://{server.grpc}") as client:
        assert set(client.models()) == set(MODELS)


def test_a_request_beyond_the_limit_is_too_large_and_not_for_later(server, folder, monkeypatch):
    monkeypatch.setenv("JURYBOX_TLS_CA", str(folder / "cert.pem"))
    monkeypatch.setenv("JURYBOX_TOKEN", TOKEN)
    pictures = [np.full((250, 250, 3), 51 * i, np.uint8) for i in range(1, 5)] * 2
    with connect(f"grpcs://{server.grpc}") as client:
        model = client.model("brightness")
        with pytest.raises(Refused, match="larger than max.*fewer rows.*max_message_mib") as caught:
            model.infer(pictures)
        assert caught.value.code == Code.TOO_LARGE
        assert model.infer(pictures[:4])["score"].shape == (4,)
    juror = Juror("brightness", output="score", address=f"grpcs://{server.grpc}")
    np.testing.assert_allclose(juror.scores({"image": pictures}, 8), [0.2, 0.4, 0.6, 0.8] * 2, rtol=1e-5)
    juror.close()


def test_weights_are_published_only_with_the_token(server, folder, monkeypatch):
    monkeypatch.setenv("JURYBOX_TLS_CA", str(folder / "cert.pem"))
    state = {"scale": np.array(2, np.float32), "offset": np.array(1, np.float32)}
    with connect(f"grpcs://{server.grpc}", token=TOKEN) as client:
        assert client.publisher("policy").publish(state) == 1
        assert client.weights("policy").read().version == 1
    credentials = grpc.ssl_channel_credentials((folder / "cert.pem").read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        for metadata in ((), (("authorization", "Bearer wrong-wrong-wrong"),)):
            with pytest.raises(Error, match="authorization: Bearer"):
                RemotePublisher(channel, "policy", metadata=metadata)


def test_the_clients_errors_say_what_was_wrong(server, folder, monkeypatch):
    monkeypatch.delenv("JURYBOX_TOKEN", raising=False)
    with pytest.raises(ServerGone, match="grpcs://"):  # a certificate of no known authority
        connect(f"grpcs://{server.grpc}", token=TOKEN, timeout=0.5)
    with pytest.raises(ServerGone, match="grpcs://"):
        connect(f"grpc://{server.grpc}", token=TOKEN, timeout=0.5)
    monkeypatch.setenv("JURYBOX_TLS_CA", str(folder / "cert.pem"))
    for wrong in (None, "wrong-wrong-wrong-wrong"):
        with pytest.raises(Refused, match="authorization: Bearer"):
            connect(f"grpcs://{server.grpc}", token=wrong)


def test_the_log_does_not_know_the_token(server):
    assert TOKEN not in server.text()
