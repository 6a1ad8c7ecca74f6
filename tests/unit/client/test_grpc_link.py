"""A connection to a gateway: what is asked of it, what is asked again, and what becomes of its words."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import grpc
import pytest
from tests.clocks import Clock, given

from jurybox.client import ModelFailed, ModelNotFound, Refused, ServerGone, Timeout
from jurybox.client.remote import grpc_link
from jurybox.client.remote.grpc_link import CONTRACT, GrpcLink
from jurybox.client.server import Server
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.errors import SLEEPS
from jurybox.protocol.spec import TensorSpec, plain_specs


class Failure(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code

    def details(self):
        return "the server did not answer within 1.0 s"

    def trailing_metadata(self):
        return ()

    initial_metadata = trailing_metadata


class Channels:
    """Fails so often, then answers."""

    def __init__(self, times, code=grpc.StatusCode.DEADLINE_EXCEEDED):
        self.times, self.code, self.timeouts = times, code, []

    def call(self, method, request, timeout):
        self.timeouts.append(timeout)
        if len(self.timeouts) <= self.times:
            raise Failure(self.code)
        return "told"


def link(channels):
    made = GrpcLink.__new__(GrpcLink)
    made._address, made._channels = "grpc://127.0.0.1:1", channels
    return made


def test_a_gateway_that_got_no_answer_itself_is_asked_again():
    channels = Channels(2)
    assert link(channels)._told("ModelMetadata", None, 30.0) == "told"
    assert len(channels.timeouts) == 3 and channels.timeouts == sorted(channels.timeouts, reverse=True)


def test_it_is_gone_when_the_time_is_over_and_at_once_if_it_cannot_be_reached():
    began = time.monotonic()
    with pytest.raises(ServerGone, match=r"within 0\.2 s"):
        link(Channels(10**6))._told("ModelMetadata", None, 0.2)
    assert time.monotonic() - began > 0.1
    channels = Channels(1, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(ServerGone):
        link(channels)._told("ModelMetadata", None, 30.0)
    assert len(channels.timeouts) == 1


def test_what_changes_something_is_asked_once():
    channels = Channels(1)
    with pytest.raises(ServerGone):
        link(channels)._call("RepositoryModelUnload", None, 30.0)
    assert len(channels.timeouts) == 1


# ---- what a gateway says of its models


class Gateway:
    """Answers the calls of the Open Inference Protocol; a list is of the answers in order, the last one stays."""

    def __init__(self):
        self.asked, self.answers = [], {}

    def call(self, method, request, timeout):
        self.asked.append((method, request, timeout))
        answer = self.answers.get(method)
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def has(self, *models):
        """Let these be the models: (name, state, reason) of each."""
        index = pb.RepositoryIndexResponse()
        for name, state, reason in models:
            index.models.add(name=name, state=state, reason=reason)
        return index

    def last(self):
        method, request, _ = self.asked[-1]
        return method, {name: one.int64_param or one.bool_param or one.string_param
                        for name, one in request.parameters.items()}  # fmt: skip


@pytest.fixture
def gateway():
    made = Gateway()
    made.answers["RepositoryIndex"] = made.has(("m", "READY", ""), ("b", "LOADING", ""))
    metadata = pb.ModelMetadataResponse(name="m")
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 2])
    metadata.outputs.add(name="y", datatype="INT64", shape=[-1])
    made.answers["ModelMetadata"] = metadata
    made.answers["ModelConfig"] = pb.ModelConfigResponse(config=pb.ModelConfig(max_batch_size=8))
    return made


@pytest.fixture
def reached(gateway):
    made = link(gateway)
    made._traces, made._infer = False, SimpleNamespace(started=lambda: SimpleNamespace(close=lambda: None))
    return made


def contract(gateway, text):
    config = pb.ModelConfig(max_batch_size=8)
    config.parameters[CONTRACT].string_value = text
    gateway.answers["ModelConfig"] = pb.ModelConfigResponse(config=config)


def test_a_model_of_any_server_of_the_protocol_is_described_by_its_metadata(gateway, reached):
    assert reached.models(9.0) == ["m", "b"]
    told = reached.describe("m", 9.0)
    assert (told.name, told.state, told.settled, told.max_batch) == ("m", "ready", True, 8)
    assert [(one.name, one.dtype, list(one.shape)) for one in (*told.inputs, *told.outputs)] == [
        ("x", "float32", [2]), ("y", "int64", [])
    ]  # fmt: skip
    assert {method: request.name for method, request, _ in gateway.asked if method.startswith("Model")} == {
        "ModelMetadata": "m", "ModelConfig": "m"
    }  # fmt: skip
    gateway.answers["ModelConfig"] = pb.ModelConfigResponse()
    assert reached.describe("m", 9.0).max_batch == 1, "a server that computes no batches"


def test_a_model_of_this_server_is_described_by_its_contract(gateway, reached):
    parts = {
        "inputs": plain_specs({"a": TensorSpec("float32", (-1,), capacity=9), "t": TensorSpec("float32")}),
        "outputs": plain_specs({"b": TensorSpec("bytes", capacity=4)}),
        "state": plain_specs({"s": TensorSpec("int32")}),
    }
    for parameters in ({}, {"parameters": {"heat": ["t", 0.5]}}):
        contract(gateway, json.dumps(parts | parameters))
        told = reached.describe("m", 9.0)
        assert [(one.name, one.dtype, one.capacity) for one in (*told.inputs, *told.outputs)] == [
            ("a", "float32", 9), ("t", "float32", 0), ("b", "bytes", 4)
        ]  # fmt: skip
        assert [one.name for one in told.session_state] == ["s"] and told.max_batch == 8
        assert [one.name for one in told.parameters] == (["heat"] if parameters else [])


@pytest.mark.parametrize("text", ["no", "[]", "{}", '{"inputs": 1, "outputs": [], "state": []}', '{"parameters": []}'])
def test_a_contract_that_cannot_be_read_is_refused_with_the_models_name(gateway, reached, text):
    contract(gateway, text)
    with pytest.raises(Refused, match="the server's description of model 'm' is malformed"):
        reached.describe("m", 9.0)


@pytest.mark.parametrize(("kind", "shape"), [("FP99", [-1]), ("FP32", [])])
def test_a_tensor_that_this_client_cannot_send_is_refused_by_its_name(gateway, reached, kind, shape):
    gateway.answers["ModelMetadata"].inputs.add(name="z", datatype=kind, shape=shape)
    with pytest.raises(Refused, match=f"tensor 'z' is {kind}.*, which this client cannot send"):
        reached.describe("m", 9.0)


@pytest.mark.parametrize(
    ("state", "reason", "told"),
    [
        ("LOADING", "", ("loading", "", False)),
        ("UNAVAILABLE", "no file", ("failed", "no file", True)),
        ("UNAVAILABLE", SLEEPS, ("sleeping", "", True)),
        ("UNAVAILABLE", f"{SLEEPS}: by order", ("sleeping", "by order", True)),
        ("READY", SLEEPS, ("ready", SLEEPS, True)),
        ("UNLOADING", "", ("loading", "", False)),
    ],
)
def test_a_models_state_is_told_with_its_reason(gateway, reached, state, reason, told):
    gateway.answers["RepositoryIndex"] = gateway.has(("m", state, reason))
    came = reached.describe("m", 9.0)
    assert (came.state, came.reason, came.settled) == told and bool(came.inputs) == (state == "READY")


def test_a_model_that_is_not_there_is_named_with_those_that_are(gateway, reached):
    with pytest.raises(ModelNotFound, match="^no model 'z' is served here; there are: b, m$"):
        reached.describe("z", 9.0)
    gateway.answers["RepositoryIndex"] = gateway.has()
    with pytest.raises(ModelNotFound, match="there are: none$"):
        reached.describe("z", 9.0)


# ---- orders


def test_orders_say_what_is_wanted(gateway, reached):
    reached.load("m", "", 9.0, keep=0.0, remote=False)
    assert gateway.last() == ("RepositoryModelLoad", {})
    reached.load("m", "{}", 9.0, keep=2.5, remote=False)
    assert gateway.last() == ("RepositoryModelLoad", {"settings": "{}", "keep": 3}) and len(gateway.asked) == 2
    reached.load("m", "", 9.0, keep=2.5, remote=False)
    assert gateway.last() == ("RepositoryModelLoad", {}) and len(gateway.asked) == 4
    assert gateway.asked[2][1].parameters["keep"].int64_param == 3
    reached.keep("m", 1.5, 9.0)
    assert gateway.last() == ("RepositoryModelLoad", {"keep": 2})
    reached.unload("m", 9.0)
    assert gateway.last() == ("RepositoryModelUnload", {})
    reached.sleep("m", 9.0)
    assert gateway.last() == ("RepositoryModelUnload", {"sleep": True})
    reached.wake("m", 9.0)
    assert gateway.last() == ("RepositoryModelLoad", {"wake": True})
    assert all((request.model_name, timeout) == ("m", 9.0) for _, request, timeout in gateway.asked)
    gateway.answers["Get"] = SimpleNamespace(json="{}")
    assert reached.status(9.0) == "{}"


@pytest.mark.parametrize("order", ["load", "sleep", "wake"])
def test_an_order_that_is_not_carried_out_in_time_goes_on_and_one_to_nobody_does_not(gateway, reached, order):
    ask = {
        "load": lambda: reached.load("m", "", 2.0, keep=0.0, remote=False),
        "sleep": lambda: reached.sleep("m", 2.0),
        "wake": lambda: reached.wake("m", 2.0),
    }[order]
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        gateway.answers[method] = Failure(grpc.StatusCode.DEADLINE_EXCEEDED)
    with pytest.raises(Timeout, match="model 'm' is still not ready after 2.0 s; it goes on"):
        ask()
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        gateway.answers[method] = Failure(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(ServerGone):
        ask()


def test_an_order_has_all_of_its_time_since_a_gateway_answers_when_it_is_carried_out(gateway, reached):
    Server("grpc://127.0.0.1:1", reached, 2.0).load("m", timeout=60.0)
    assert gateway.asked[0][0] == "RepositoryModelLoad" and gateway.asked[0][2] == 60.0


def test_nothing_is_loaded_if_it_may_not_be_kept(gateway, reached):
    gateway.answers["RepositoryModelLoad"] = Failure(grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(Refused):
        reached.load("m", "", 9.0, keep=2.0, remote=False)
    assert len(gateway.asked) == 1


# ---- lanes and weights


@pytest.fixture
def slept(monkeypatch):
    """What was slept; the time passes only then."""
    return given(Clock(), monkeypatch, grpc_link).slept


def test_a_lane_has_as_many_rows_as_are_wanted_or_a_batch(gateway, reached):
    for wanted, rows in ((0, 8), (3, 3)):
        lane, spec, most = reached.lease("m", wanted, 9.0)
        assert (lane.rows, spec.name, list(spec.inputs), most) == (rows, "m", ["x"], 8)


def test_a_model_that_is_loading_is_waited_for_as_long_as_there_is_time(gateway, reached, slept):
    loading, ready = gateway.has(("m", "LOADING", "")), gateway.has(("m", "READY", ""))
    gateway.answers["RepositoryIndex"] = [loading, loading, ready]
    assert reached.lease("m", 1, 1.0)[2] == 8 and len(slept) == 2
    slept.clear()
    gateway.answers["RepositoryIndex"] = loading
    with pytest.raises(Timeout, match=r"^model 'm' is still loading after 1\.0 s$"):
        reached.lease("m", 1, 1.0)
    assert 0.9 < sum(slept) < 1.15 and min(timeout for *_, timeout in gateway.asked) == pytest.approx(0.1)
    slept.clear()
    with pytest.raises(Timeout, match="^model 'm' is still loading$"):
        reached.lease("m", 1, 1.0, wait=False)
    assert not slept


@pytest.mark.parametrize(
    ("reason", "error", "told"),
    [("no file", ModelFailed, "model 'm' could not be loaded: no file"), (SLEEPS, Refused, "wake")],
)
def test_a_model_that_computes_nothing_is_not_waited_for(gateway, reached, slept, reason, error, told):
    gateway.answers["RepositoryIndex"] = gateway.has(("m", "UNAVAILABLE", reason))
    with pytest.raises(error, match=told):
        reached.lease("m", 1, 9.0)
    assert not slept


@pytest.mark.parametrize("transfer", ["exact", "changed", "bfloat16"])
def test_a_publisher_sends_as_it_was_asked_to(gateway, reached, monkeypatch, transfer):
    opened = []
    for name in ("RemotePublisher", "RemoteWeightsReader"):
        monkeypatch.setattr(grpc_link, name, lambda *given, **more: opened.append((given, more)))
    gateway.lasting, gateway.metadata = lambda: "channel", (("a", "b"),)
    reached.publisher("m", transfer, 9.0)
    reached.weights("m", 9.0)
    common = {"metadata": (("a", "b"),), "timeout": 9.0}
    kind = {"bfloat16": transfer == "bfloat16", "changed_only": transfer == "changed"}
    assert opened == [(("channel", "m"), kind | common), (("channel", "m"), common)]
    with pytest.raises(Refused, match="device memory can be shared only on one host"):
        reached.publisher("m", transfer, 9.0, driver=object())
