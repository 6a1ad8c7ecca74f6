"""Rows of different sizes, rows that fail alone and sequences behave the same over every protocol of the gateway."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http import client
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tests.serving import serving, wait_until
from tritonclient.utils import InferenceServerException

from jurybox.client import RowFailed, SessionLost, SpecMismatch, connect
from jurybox.client.rewards import Juror
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.protocol.row_frames import joined_strings, split_strings

NUMPY = {"FP32": np.float32, "UINT8": np.uint8, "BOOL": np.bool_}


class Failed(Exception):
    """A request that was refused, over any protocol."""


class Way:
    """A kind of client: `infer` returns the outputs as lists of rows, and the answer's parameters."""

    def infer(self, model, inputs, **parameters):
        raise NotImplementedError

    def one(self, model, inputs, **parameters):
        """Return the only output."""
        (rows,) = self.infer(model, inputs, **parameters)[0].values()
        return rows


def shape_of(rows):
    return [len(rows)] if isinstance(rows[0], (bytes, str)) else [len(rows), *np.shape(rows[0])]


def datatype_of(rows):
    if isinstance(rows[0], (bytes, str)):
        return "BYTES"
    return {np.dtype(np.uint8): "UINT8", np.dtype(np.float32): "FP32"}[np.asarray(rows[0]).dtype]


def raw_of(rows):
    return joined_strings(rows) if isinstance(rows[0], bytes) else np.stack(rows).tobytes()


def rows_of(datatype, shape, data):
    if datatype == "BYTES":
        return split_strings("answer", data, shape[0], 1 << 20)
    return list(np.frombuffer(data, NUMPY[datatype]).reshape(tuple(shape)))


class Http(Way):
    def __init__(self, gateway, *, binary):
        self.client = httpx.Client(base_url=f"http://{gateway.http}", timeout=30)
        self.binary = binary

    def infer(self, model, inputs, **parameters):
        tensors, raw = [], []
        for name, rows in inputs.items():
            tensor = {"name": name, "shape": shape_of(rows), "datatype": datatype_of(rows)}
            if self.binary:
                raw.append(raw_of(rows))
                tensor["parameters"] = {"binary_data_size": len(raw[-1])}
            else:
                tensor["data"] = [r.decode() if isinstance(r, bytes) else np.asarray(r).tolist() for r in rows]
            tensors.append(tensor)
        if self.binary:
            parameters["binary_data_output"] = True
        head = json.dumps({"inputs": tensors, "parameters": parameters}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))} if self.binary else {}
        answer = self.client.post(f"/v2/models/{model}/infer", content=b"".join((head, *raw)), headers=headers)
        if answer.status_code != 200:
            raise Failed(f"{answer.status_code} {answer.json()['error']}")
        length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
        reply, binary, outputs = json.loads(answer.content[:length]), answer.content[length:], {}
        for output in reply["outputs"]:
            if self.binary:
                size = output["parameters"]["binary_data_size"]
                outputs[output["name"]] = rows_of(output["datatype"], output["shape"], binary[:size])
                binary = binary[size:]
            elif output["datatype"] == "BYTES":
                outputs[output["name"]] = [row.encode() for row in output["data"]]
            else:
                data = np.array(output["data"], NUMPY[output["datatype"]]).reshape(output["shape"])
                outputs[output["name"]] = list(data)
        return outputs, reply.get("parameters", {})

    def close(self):
        self.client.close()


class Grpc(Way):
    def __init__(self, gateway, *, typed):
        self.channel = grpc.insecure_channel(gateway.grpc)
        self.stub = GRPCInferenceServiceStub(self.channel)
        self.typed = typed

    def message(self, model, inputs, **parameters):
        message = pb.ModelInferRequest(model_name=model)
        for name, value in parameters.items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(message.parameters[name], kind, value)
        for name, rows in inputs.items():
            tensor = message.inputs.add(name=name, datatype=datatype_of(rows), shape=shape_of(rows))
            if not self.typed:
                message.raw_input_contents.append(raw_of(rows))
            elif isinstance(rows[0], bytes):
                tensor.contents.bytes_contents.extend(rows)
            else:
                field = {"UINT8": "uint_contents", "FP32": "fp32_contents"}[tensor.datatype]
                getattr(tensor.contents, field).extend(np.stack(rows).ravel().tolist())
        return message

    def infer(self, model, inputs, **parameters):
        try:
            answer = self.stub.ModelInfer(self.message(model, inputs, **parameters), timeout=30)
        except grpc.RpcError as error:
            raise Failed(f"{error.code().name} {error.details()}") from None
        outputs = {
            tensor.name: rows_of(tensor.datatype, tensor.shape, raw)
            for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }
        return outputs, {name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in answer.parameters.items()}

    def close(self):
        self.channel.close()


class Triton(Way):
    """An unmodified tritonclient."""

    def __init__(self, module, address):
        self.module = module
        self.client = module.InferenceServerClient(address)

    def infer(self, model, inputs, **parameters):
        tensors = []
        for name, rows in inputs.items():
            tensor = self.module.InferInput(name, shape_of(rows), datatype_of(rows))
            whole = np.array(rows, np.object_) if isinstance(rows[0], bytes) else np.stack(rows)
            tensor.set_data_from_numpy(whole)
            tensors.append(tensor)
        own = {name: parameters.pop(name) for name in list(parameters) if name.startswith("sequence_")}
        try:
            answer = self.client.infer(model, tensors, parameters=parameters or None, **own)
        except InferenceServerException as error:
            raise Failed(f"{error.status()} {error.message()}") from None
        response = answer.get_response()
        names = [output["name"] for output in response["outputs"]] if isinstance(response, dict) else [
            output.name for output in response.outputs
        ]  # fmt: skip
        if isinstance(response, dict):
            reply_parameters = response.get("parameters", {})
        else:
            reply_parameters = {
                name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in response.parameters.items()
            }
        return {name: list(answer.as_numpy(name)) for name in names}, reply_parameters

    def close(self):
        self.client.close()


MAKERS = {
    "http-json": lambda gateway: Http(gateway, binary=False),
    "http-binary": lambda gateway: Http(gateway, binary=True),
    "grpc-raw": lambda gateway: Grpc(gateway, typed=False),
    "grpc-typed": lambda gateway: Grpc(gateway, typed=True),
    "triton-grpc": lambda gateway: Triton(tritonclient.grpc, gateway.grpc),
    "triton-http": lambda gateway: Triton(tritonclient.http, gateway.http),
}


@pytest.fixture(params=list(MAKERS))
def way(request, gateway):
    way = MAKERS[request.param](gateway)
    yield way
    way.close()


@pytest.fixture
def raw(gateway):
    way = Grpc(gateway, typed=False)
    yield way
    way.close()


@pytest.fixture
def ours(gateway):
    with connect(f"grpc://{gateway.grpc}", timeout=30) as client:
        yield client


def images(*sides, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in sides]


def numbers(*values):
    return [np.array([value], np.float32) for value in values]


def test_metadata_show_which_sizes_vary(kind):
    module, client = kind
    metadata = client.get_model_metadata("prompted")
    tensors = metadata["inputs"] if isinstance(metadata, dict) else metadata.inputs
    described = [
        (t["name"], t["datatype"], [int(size) for size in t["shape"]])
        if isinstance(t, dict)
        else (t.name, t.datatype, list(t.shape))
        for t in tensors
    ]
    assert described == [("image", "UINT8", [-1, -1, -1, 3]), ("prompt", "BYTES", [-1])]
    config = client.get_model_config("sum")
    config = config if isinstance(config, dict) else config.config
    idle = config["sequence_batching"] if isinstance(config, dict) else config.sequence_batching
    idle = idle["max_sequence_idle_microseconds"] if isinstance(idle, dict) else idle.max_sequence_idle_microseconds
    assert int(idle) == 60_000_000


def test_texts_are_inputs_and_outputs(way):
    rows = ["größer".encode(), b"abc", b"", b"x" * 400]
    assert way.one("text", {"text": rows}) == ["GRÖSSER".encode(), b"ABC", b"", b"X" * 400]


def test_more_texts_than_a_batch_are_split(way):
    rows = [f"row {i}".encode() for i in range(50)]
    assert way.one("text", {"text": rows}) == [row.upper() for row in rows]


@pytest.mark.parametrize("sides", [(1, 1), (5, 9), (32, 32), (0, 4)])
def test_images_of_any_size_are_scored(way, sides):
    pictures = images(sides, sides)
    if not pictures[0].size:
        # Their mean is NaN, which JSON cannot represent, and some clients send no empty tensors.
        with contextlib.suppress(Failed):
            outputs, _ = way.infer("image", {"image": pictures})
            assert np.isnan(outputs["score"]).all()
        return
    expected = [picture.mean() / 255 for picture in pictures]
    np.testing.assert_allclose(way.one("image", {"image": pictures}), expected, rtol=1e-5)


def test_a_prompt_accompanies_a_picture(way):
    outputs, _ = way.infer("prompted", {"prompt": [b"a", b"four"], "image": images((5, 4), (5, 4))})
    assert (list(outputs["size"]), list(outputs["words"])) == ([20, 20], [1, 4])


def test_a_mask_has_its_pictures_size(way):
    (picture,) = images((7, 3))
    np.testing.assert_array_equal(way.one("mask", {"image": [picture] * 2}), [picture.mean(axis=2) > 127] * 2)


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        ("image", {"image": images((40, 40))}, "expected shape [n, -1, -1, 3] with at most 3072 elements in a row"),
        ("image", {"image": [np.zeros((4, 4), np.uint8)]}, "expected shape [n, -1, -1, 3]"),
        ("image", {"image": [np.zeros((4, 4, 3), np.float32)]}, "expected datatype UINT8"),
        ("image", {"image": [b"png"]}, "expected datatype UINT8, came 'BYTES'"),
        ("text", {"text": [b"short", b"x" * 401]}, "row 1: 401 bytes came, expected at most 400"),
        ("text", {"text": numbers(1)}, "expected datatype BYTES"),
        ("prompted", {"image": images((2, 2)), "prompt": [b"a", b"b"]}, "rows"),
        ("prompted", {"image": images((2, 2))}, "takes image, prompt"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_the_reason(way, model, inputs, reason):
    with pytest.raises(Failed) as failed:
        way.infer(model, inputs)
    assert reason in str(failed.value)


def test_concurrent_requests_of_different_sizes_get_their_own_answers(raw):
    sides = [(1 + i % 7, 1 + i % 5) for i in range(60)]
    pictures = images(*sides)
    calls = [raw.stub.ModelInfer.future(raw.message("mask", {"image": [p]}), timeout=30) for p in pictures]
    for picture, call in zip(pictures, calls, strict=True):
        (mask,) = rows_of("BOOL", call.result().outputs[0].shape, call.result().raw_output_contents[0])
        np.testing.assert_array_equal(mask, picture.mean(axis=2) > 127)


def flat_masks(pictures, **parameters):
    message = pb.ModelInferRequest(model_name="mask")
    flat = np.concatenate([picture.ravel() for picture in pictures])
    tensor = message.inputs.add(name="image", datatype="UINT8", shape=[flat.size])
    tensor.parameters["extents"].string_param = ";".join(f"{p.shape[0]},{p.shape[1]}" for p in pictures)
    message.raw_input_contents.append(flat.tobytes())
    for name, value in parameters.items():
        message.parameters[name].bool_param = value
    return message


def test_outputs_of_different_sizes_are_refused_unless_requested_flat(raw):
    pictures = images((2, 3), (4, 1))
    with pytest.raises(grpc.RpcError) as unlike:
        raw.stub.ModelInfer(flat_masks(pictures), timeout=30)
    assert unlike.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "differ in size" in unlike.value.details() and "ask one row at a time" in unlike.value.details()
    answer = raw.stub.ModelInfer(flat_masks(pictures, extents=True), timeout=30)
    assert answer.outputs[0].parameters["extents"].string_param == "2,3;4,1" and list(answer.outputs[0].shape) == [10]


@pytest.mark.parametrize(
    ("extents", "reason"),
    [
        ("2,3;4", "row 1: extents '4' came"),
        ("2,3;4,-1", "row 1"),
        ("", "row 0"),
        ("2,3;99999999999,1", "row 1"),
        ("9999999999,0;1,1", "row 0: sizes [9999999999, 0] came"),
        ("40,40;1,1", "row 0: sizes [40, 40] came"),
        ("1,1", "its extents say 3 elements"),
        (";" * 70_000, "extents of more than 65536 rows came"),
    ],
)
def test_extents_that_lie_are_refused(raw, extents, reason):
    message = flat_masks(images((2, 3), (4, 1)), extents=True)
    message.inputs[0].parameters["extents"].string_param = extents
    with pytest.raises(grpc.RpcError) as lie:
        raw.stub.ModelInfer(message, timeout=30)
    assert lie.value.code() == grpc.StatusCode.INVALID_ARGUMENT and reason in lie.value.details(), lie.value.details()


@pytest.mark.parametrize(
    ("data", "shape", "reason"),
    [
        (b"\xff\xff\xff\xff", [1], "4294967295 bytes came, expected at most 400"),
        (b"\5\0\0\0abc", [1], "its length says 5 bytes, 3 are left"),
        (b"\3\0\0\0abcd", [1], "1 bytes came after the last"),
        (b"\3\0\0", [1], "1 byte strings"),
        (b"", [2**40], "expected at most 65536"),
        (b"\0\0\0\0" * 3, [2], "4 bytes came after the last"),
        (b"\0\0\0\0", [1, 1], "expected shape [n]"),
        (b"", [0], "expected shape [n]"),
        (b"", [-1], "expected shape [n]"),
    ],
)
def test_lengths_that_lie_are_refused(raw, data, shape, reason):
    message = pb.ModelInferRequest(model_name="text", raw_input_contents=[data])
    message.inputs.add(name="text", datatype="BYTES", shape=shape)
    with pytest.raises(grpc.RpcError) as lie:
        raw.stub.ModelInfer(message, timeout=30)
    assert lie.value.code() == grpc.StatusCode.INVALID_ARGUMENT and reason in lie.value.details(), lie.value.details()


def test_half_a_surrogate_pair_is_refused_in_json(gateway, curl):
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["\ud800"]}
    answer = curl.post("/v2/models/text/infer", content=json.dumps({"inputs": [tensor]}).encode())
    assert (answer.status_code, "half a surrogate pair" in answer.json()["error"]) == (422, True)


def test_byte_strings_in_shared_memory(kind):
    from tritonclient.utils import serialize_byte_tensor, shared_memory

    module, client = kind
    region = shared_memory.create_shared_memory_region("strings", "/oip_test_strings", 200)
    try:
        given = serialize_byte_tensor(np.array([b"ab", b"cde"], np.object_)).item()
        shared_memory.set_shared_memory_region(region, [np.frombuffer(given, np.uint8)])
        client.register_system_shared_memory("strings", "/oip_test_strings", 200)
        tensor = module.InferInput("text", [2], "BYTES")
        tensor.set_shared_memory("strings", len(given))
        output = module.InferRequestedOutput("text")
        output.set_shared_memory("strings", 100, offset=100)
        client.infer("text", [tensor], outputs=[output])
        written = shared_memory.get_contents_as_numpy(region, np.uint8, [13], offset=100).tobytes()
        assert split_strings("x", written, 2, 10) == [b"AB", b"CDE"]
        output.set_shared_memory("strings", 12, offset=100)
        with pytest.raises(InferenceServerException, match="has 13 bytes, 12 of region 'strings' were given"):
            client.infer("text", [tensor], outputs=[output])
    finally:
        client.unregister_system_shared_memory()
        shared_memory.destroy_shared_memory_region(region)


def test_a_failed_row_is_named_and_nothing_invented(way):
    with pytest.raises(Failed) as failed:
        way.infer("picky", {"x": numbers(1, 3, 2, 6)})
    assert "2 of 4 rows of 'picky' failed: row 1: three; row 3: six" in str(failed.value)


def test_row_errors_returns_the_other_rows_and_the_reasons(way):
    for values in ((1, 3, 2, 6), range(1, 21)):  # the second is split
        outputs, reply_parameters = way.infer("picky", {"x": numbers(*values)}, row_errors=True)
        wrong = {str(i): {3: "three", 6: "six"}[v] for i, v in enumerate(values) if v in (3, 6)}
        assert json.loads(reply_parameters["row_errors"]) == wrong
        expected = [np.nan if v in (3, 6) else 2.0 * v for v in values]
        np.testing.assert_array_equal(np.array(outputs["y"], np.float32), expected)
    assert way.infer("picky", {"x": numbers(1)}, row_errors=True)[1] == {}


def test_a_failed_row_does_not_affect_other_rows_of_its_ticket(raw):
    good, bad = raw.message("picky", {"x": numbers(1, 2)}), raw.message("picky", {"x": numbers(2, 3)})
    calls = [(n % 5 == 0, raw.stub.ModelInfer.future(bad if n % 5 == 0 else good, timeout=30)) for n in range(60)]
    for wrong, call in calls:
        if wrong:
            assert call.code() == grpc.StatusCode.INVALID_ARGUMENT and "row 1: three" in call.details()
        else:
            assert np.frombuffer(call.result().raw_output_contents[0], np.float32).tolist() == [2, 4]


def test_a_sequence_continues_from_its_state(way):
    for name in (4711, "a name of text"):
        steps = [(1, {"sequence_start": True}), (2, {}), (3, {"sequence_end": True})]
        totals = [float(way.one("sum", {"x": numbers(v)}, sequence_id=name, **flags)[0]) for v, flags in steps]
        assert totals == [1, 3, 6]
        with pytest.raises(Failed, match="START"):
            way.infer("sum", {"x": numbers(1)}, sequence_id=name)


def test_a_sequences_state_is_read_and_written(way):
    ask = {"sequence_id": "kept", "session_state": "get"}
    assert way.one("sum", {"x": numbers(5)}, sequence_id="kept", sequence_start=True)[0] == 5
    assert way.infer("sum", {}, **ask)[0] == {"total": [5]}
    assert way.infer("sum", {"total": [np.float32(40)]}, sequence_id="kept", session_state="set")[0] == {}
    assert way.one("sum", {"x": numbers(2)}, sequence_id="kept")[0] == 42
    assert way.infer("sum", {}, sequence_start=True, **ask)[0] == {"total": [0]}
    for inputs, parameters, message in (
        ({}, {"session_state": "get"}, "sequence_id"),
        ({}, {"session_state": "take", "sequence_id": "kept"}, "'get' or 'set'"),
        ({}, {"session_state": "set", "sequence_id": "kept"}, "takes total"),
        ({"x": numbers(1)}, ask, "is not the model's"),
        ({"total": numbers(1)}, {"session_state": "set", "sequence_id": "kept"}, "expected shape"),
        ({}, {"session_state": "get", "sequence_id": "never"}, "START"),
    ):
        with pytest.raises(Failed, match=message):
            way.infer("sum", inputs, **parameters)
    assert way.one("sum", {"x": numbers(2)}, sequence_id="kept", sequence_end=True)[0] == 2


def test_sequence_start_resets_the_state(way):
    for value, start, expected in ((5, True, 5), (1, False, 6), (2, True, 2), (2, False, 4)):
        flags = {"sequence_start": start, "sequence_id": 99}
        assert way.one("sum", {"x": numbers(value)}, **flags)[0] == expected
    way.infer("sum", {"x": numbers(1)}, sequence_id=99, sequence_end=True)


def test_concurrent_sequences_are_independent(raw):
    ids = [f"apart {n}" for n in range(12)]
    for step in range(5):
        messages = [
            raw.message("sum", {"x": numbers(n)}, sequence_id=id_, sequence_start=step == 0, sequence_end=step == 4)
            for n, id_ in enumerate(ids)
        ]
        calls = [raw.stub.ModelInfer.future(message, timeout=30) for message in messages]
        for n, call in enumerate(calls):
            assert np.frombuffer(call.result().raw_output_contents[0], np.float32) == n * (step + 1)


def test_requests_of_one_sequence_in_a_stream_keep_their_order(raw):
    messages = [
        raw.message("sum", {"x": numbers(2**n)}, sequence_id=5, sequence_start=n == 0, sequence_end=n == 15)
        for n in range(16)
    ]
    answers = list(raw.stub.ModelStreamInfer(iter(messages), timeout=60))
    assert [answer.error_message for answer in answers] == [""] * 16
    totals = [np.frombuffer(a.infer_response.raw_output_contents[0], np.float32)[0] for a in answers]
    assert totals == [2 ** (n + 1) - 1 for n in range(16)]


@pytest.mark.parametrize("wrong", [{"x": numbers(-1)}, {"y": numbers(1)}, {"x": numbers(1, 2)}, "unknown parameter"])
@pytest.mark.parametrize("known", [False, True], ids=["together", "after the failure"])
def test_steps_after_a_failed_one_in_a_stream_are_refused_and_the_sequence_is_lost(raw, wrong, known):
    failed = threading.Event()

    def messages():
        for n in range(4):
            inputs = wrong if n == 1 and isinstance(wrong, dict) else {"x": numbers(1)}
            unknown = {"no_such_parameter": 1} if n == 1 and not isinstance(wrong, dict) else {}
            yield raw.message("sum", inputs, sequence_id="fails", sequence_start=n == 0, **unknown)
            if n == 1 and known:
                failed.wait(30)

    errors = []
    for answer in raw.stub.ModelStreamInfer(messages(), timeout=60):
        errors.append(answer.error_message)
        if len(errors) == 2:
            failed.set()
    assert failed.is_set()
    assert errors[0] == "" and errors[1] and "START" in errors[2] and "START" in errors[3]
    with pytest.raises(Failed, match="FAILED_PRECONDITION"):
        raw.infer("sum", {"x": numbers(1)}, sequence_id="fails")
    assert raw.one("sum", {"x": numbers(1)}, sequence_id="fails", sequence_start=True)[0] == 1
    raw.infer("sum", {"x": numbers(1)}, sequence_id="fails", sequence_end=True)


def test_a_failed_step_in_a_stream_loses_its_sequence_in_every_form_of_its_number(raw):
    """Clients of another language may send an unsigned number. It names the same sequence as a signed one."""
    for field in ("int64_param", "uint64_param"):
        messages = [raw.message("sum", {"x": numbers(*values)}) for values in ((1,), (2, 3), (4,))]
        for message in messages:
            setattr(message.parameters["sequence_id"], field, 4712)
        messages[0].parameters["sequence_start"].bool_param = True
        errors = [answer.error_message for answer in raw.stub.ModelStreamInfer(iter(messages), timeout=60)]
        assert errors[0] == "" and "expected 1 row each" in errors[1] and "START" in errors[2], (field, errors)


def test_a_step_that_is_refused_or_fails_alone_leaves_the_state(way):
    way.infer("sum", {"x": numbers(5)}, sequence_id=8, sequence_start=True)
    for wrong in ({"x": numbers(-1)}, {"x": numbers(1, 2)}, {"y": numbers(1)}, {"x": [np.zeros(3, np.float32)]}):
        with pytest.raises(Failed):
            way.infer("sum", wrong, sequence_id=8)
    assert way.one("sum", {"x": numbers(1)}, sequence_id=8, sequence_end=True)[0] == 6


@pytest.mark.parametrize(
    ("model", "parameters", "reason"),
    [
        ("sum", {}, "keeps state (total): expected the parameter sequence_id"),
        ("picky", {"sequence_id": 7, "sequence_start": True}, "keeps no state"),
        ("sum", {"sequence_id": 7, "sequence_start": False}, "START"),
    ],
)
def test_sequences_are_for_models_with_state(way, model, parameters, reason):
    with pytest.raises(Failed) as failed:
        way.infer(model, {"x": numbers(1)}, **parameters)
    assert reason in str(failed.value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"sequence_id": -1},
        {"sequence_id": "x" * 129},
        {"sequence_id": True},
        {"sequence_start": True},
        {"sequence_id": 1, "sequence_start": 1},
        {"session_client": "x", "sessions": "0:0"},
        {"session_client": "0" * 32},
        {"sessions": "0:0"},
        {"session_client": "0" * 32, "sessions": "0:0", "sequence_id": 1},
        {"session_client": "0" * 32, "sessions": "0"},
        {"session_client": "0" * 32, "sessions": "0:-1"},
        {"session_client": "0" * 32, "sessions": "0:99999999999"},
        {"session_client": "0" * 32, "sessions": "0:0;0:0"},
        {"session_client": "0" * 32, "sessions": ";" * 70_000},
        {"session_client": "0" * 32, "sessions": "0:0;1:0"},
    ],
)
def test_names_and_steps_that_are_none_are_refused(raw, parameters):
    with pytest.raises(Failed, match="INVALID_ARGUMENT"):
        raw.infer("sum", {"x": numbers(1)}, **parameters)


def test_more_sequences_than_rows_are_refused_for_now(raw):
    def start(name):
        return raw.one("sum", {"x": numbers(1)}, sequence_id=name, sequence_start=True)

    opened = []
    with pytest.raises(Failed, match=r"RESOURCE_EXHAUSTED .*sequences of model 'sum' are open"):
        for n in range(40):
            start(f"many {n}")
            opened.append(f"many {n}")
    assert len(opened) == 15  # half of the arena, minus the one that health checks use
    for name in opened:
        raw.infer("sum", {"x": numbers(1)}, sequence_id=name, sequence_end=True)
    start("one more")
    raw.infer("sum", {"x": numbers(1)}, sequence_id="one more", sequence_end=True)


def test_health_checks_of_a_model_with_state_leave_its_sequences_alone(raw, curl):
    raw.infer("sum", {"x": numbers(5)}, sequence_id="ill", sequence_start=True)
    for _ in range(3):
        assert curl.get("/v2/models/sum/ready").status_code == 200
        assert curl.get("/health/ready").status_code == 200
    assert raw.one("sum", {"x": numbers(1)}, sequence_id="ill", sequence_end=True)[0] == 6


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """A connection to a server whose models have few rows."""
    running_sum = {"factory": "tests.open_models:running_sum", "max_batch": 4}
    models = {name: {**running_sum, "rows": rows} for name, rows in (("few", 18), ("kept", 18), ("fewer", 9))}
    length = {"factory": "tests.reward_models:text_length", "max_batch": 4, "rows": 16}
    models |= {f"length-{target}": length for target in ("model", "panel", "juror")}
    options = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
    options["more"] = "[panels.both.members]\nlength-panel = {weight = 1.0, output = 'score'}\n"
    with serving(tmp_path_factory.mktemp("near"), models, **options) as running, running.connect() as connection:
        yield connection


def wait_until_held(near):
    """Wait until the gateway has read a request that it cannot answer yet."""
    page = f"http://{near.status()['server']['http']}/metrics"
    held = re.compile(r'^jurybox_client_bytes{[^}]*kind="received"[^}]*} [1-9]', re.MULTILINE)
    wait_until(lambda: held.search(httpx.get(page, timeout=30).text), what="a held request")


def test_sequences_wait_a_moment_for_rows_to_be_returned(near):
    """This happens after a gateway died: its lane is reclaimed after the next one has requested rows."""
    way = Http(SimpleNamespace(http=near.status()["server"]["http"]), binary=False)

    def one_step(name):
        return way.one("few", {"x": numbers(5)}, sequence_id=name, sequence_start=True, sequence_end=True)

    with near.model("few", rows=1).sessions(16):
        for _ in range(2):  # in the one row that is left; the second time no more are available
            assert one_step("alone") == [5]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one_step, range(1, 41))) == [[5]] * 40


def test_a_first_sequence_does_not_pin_the_small_lane_of_a_new_gateway(near):
    """A gateway that was just started exchanges its lane for a larger one before a sequence begins on it."""
    way = Http(SimpleNamespace(http=near.status()["server"]["http"]), binary=False)

    def begin(name):
        return way.one("kept", {"x": numbers(5)}, sequence_id=name, sequence_start=True)

    with ThreadPoolExecutor(1) as pool:
        with near.model("kept", rows=1).sessions(14):
            first = pool.submit(begin, "first")
            wait_until_held(near)
        assert first.result(60) == [5]
    for name in range(1, 7):
        assert begin(name) == [5]
    for name in ("first", *range(1, 7)):
        assert way.one("kept", {"x": numbers(1)}, sequence_id=name, sequence_end=True) == [6]


@pytest.mark.parametrize("target", ["model", "panel", "juror"])
def test_requests_without_state_wait_a_moment_for_rows_to_be_returned(near, target):
    """This happens after a gateway died: no row is free until its lane is reclaimed. Dialects use jurors."""
    way, length = Http(SimpleNamespace(http=near.status()["server"]["http"]), binary=False), f"length-{target}"

    def ask():
        if target == "juror":
            return Juror(length, output="score", address=near.address).scores({"text": ["abc"]}, 1)[0]
        outputs, _ = way.infer("both" if target == "panel" else length, {"text": [b"abc"]})
        return outputs["score"][0]

    with ThreadPoolExecutor(1) as pool:
        with near.model(length, rows=16):
            answer = pool.submit(ask)
            if target == "juror":  # it asks from this process, and nobody sees that it waits
                time.sleep(0.3)
            else:
                wait_until_held(near)
        assert answer.result(60) == 3


def test_health_checks_take_no_rows_from_sessions(near):
    address = near.status()["server"]["http"]
    assert httpx.get(f"http://{address}/health/ready", timeout=30).status_code == 200
    with near.model("fewer", rows=1).sessions(7) as sessions:
        np.testing.assert_array_equal(sessions.infer(np.ones((4, 1), np.float32), session=range(4)), [1] * 4)
        # No row is left, so a sequence can only have the one that health checks use.
        way = Http(SimpleNamespace(http=address), binary=False)
        assert way.one("fewer", {"x": numbers(5)}, sequence_id=1, sequence_start=True) == [5]
        with pytest.raises(Failed, match="429"):
            way.infer("fewer", {"x": numbers(5)}, sequence_id=2, sequence_start=True)
    for _ in range(2):
        assert httpx.get(f"http://{address}/health/ready", timeout=30).status_code == 200
    assert way.one("fewer", {"x": numbers(2)}, sequence_id=1, sequence_end=True) == [7]

    def two_at_once():  # once the rows are returned, more sequences fit
        try:
            for name in (1, 2):
                way.infer("fewer", {"x": numbers(5)}, sequence_id=name, sequence_start=True)
        except Failed as error:
            assert "429" in str(error)
            way.infer("fewer", {"x": numbers(5)}, sequence_id=1, sequence_end=True)
            return False
        return True

    wait_until(two_at_once)
    way.close()


def test_our_client_sends_rows_of_any_size(ours):
    pictures = images((4, 5), (9, 2), (1, 1), (4, 5), (16, 16))
    np.testing.assert_allclose(ours.model("image").infer(pictures), [p.mean() / 255 for p in pictures], rtol=1e-5)
    masks = ours.model("mask").infer(pictures * 5)
    for mask, picture in zip(masks, pictures * 5, strict=True):
        np.testing.assert_array_equal(mask, picture.mean(axis=2) > 127)
    np.testing.assert_array_equal(ours.model("mask")(pictures[1]), pictures[1].mean(axis=2) > 127)
    texts = ours.model("text")
    assert texts.infer(["größer", b"abc", ""]) == ["GRÖSSER".encode(), b"ABC", b""]
    assert texts("one") == b"ONE" and texts.submit(["a", "bc"]).result().outputs == [b"A", b"BC"]
    answer = ours.model("prompted").infer({"image": pictures[:2], "prompt": ["a", "four"]})
    assert (answer["size"].tolist(), answer["words"].tolist()) == ([20, 18], [1, 4])
    with pytest.raises(SpecMismatch, match="row 0: expected"):
        ours.model("image").infer([np.zeros((40, 40, 3), np.uint8)])


def test_our_client_has_the_same_spec_as_a_local_one(ours, gateway):
    with gateway.server.connect() as near:
        for name in ("affine", "two", "text", "image", "mask", "prompted", "sum"):
            assert ours.model(name).spec == near.model(name, rows=1).spec


def test_our_client_reports_which_rows_failed(ours):
    model = ours.model("picky")
    x = np.arange(20, dtype=np.float32).reshape(20, 1)
    with pytest.raises(RowFailed) as failed:
        model.infer(x)
    assert failed.value.errors == {3: "three", 6: "six"}
    np.testing.assert_array_equal(np.delete(failed.value.outputs, [3, 6]), np.delete(2 * x[:, 0], [3, 6]))
    assert model(x[4]) == 8


def test_our_clients_sessions_keep_their_state(ours):
    x = np.array([[1], [10], [100]], np.float32)
    with ours.model("sum").sessions(3) as one, ours.model("sum").sessions(3) as other:
        np.testing.assert_array_equal(one.infer(x), [1, 10, 100])
        np.testing.assert_array_equal(other.infer(x), [1, 10, 100])
        np.testing.assert_array_equal(one.infer(x), [2, 20, 200])
        np.testing.assert_array_equal(one.infer(x[:2], session=[2, 0]), [201, 12])
        np.testing.assert_array_equal(one.infer(x, reset=[False, True, False]), [13, 10, 301])
        np.testing.assert_array_equal(other.infer(x), [2, 20, 200])
        np.testing.assert_array_equal(one.get_state([2, 0])["total"], [301, 13])
        np.testing.assert_array_equal(one.infer(x), [14, 20, 401])
        other.set_state({"total": one.get_state()["total"][[2, 0]]}, session=[0, 2])
        np.testing.assert_array_equal(other.infer(x), [402, 30, 114])
        with pytest.raises(Exception, match="negative"):
            one.infer(-x)
        one._book.next[1] = 9  # a client that claims steps it never made
        with pytest.raises(SessionLost) as lost:
            one.get_state()
        assert lost.value.sessions == [1]
        one.set_state({"total": np.zeros(1, np.float32)}, session=[1])
        np.testing.assert_array_equal(one.get_state()["total"], [14, 0, 401])
    for _ in range(8):  # closed sessions return their rows: there are 15
        with ours.model("sum").sessions(4) as sessions:
            np.testing.assert_array_equal(sessions.infer(np.ones((4, 1), np.float32)), [1, 1, 1, 1])


def test_our_clients_requests_in_flight_are_computed_in_order(ours):
    x = np.ones((2, 1), np.float32)
    with ours.model("sum").sessions(8) as sessions:
        tickets = [sessions.submit(x, session=[3, 5]) for _ in range(4)]
        assert [ticket.result().outputs.tolist() for ticket in tickets] == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_our_client_reports_the_numbers_of_lost_sessions(ours):
    one = np.ones((1, 1), np.float32)
    with ours.model("sum").sessions(4) as sessions:
        sessions.infer(np.ones((4, 1), np.float32))
        with pytest.raises(Exception, match="negative"):
            sessions.infer(-one, session=[2])
        np.testing.assert_array_equal(sessions.infer(one, session=[2]), [2])
        sessions._book.next[1] = 7  # a client that claims steps it never made
        with pytest.raises(SessionLost) as lost:
            sessions.infer(np.ones((3, 1), np.float32), session=[0, 1, 3])
        assert lost.value.sessions == [1]
        np.testing.assert_array_equal(
            sessions.infer(np.ones((2, 1), np.float32), session=[0, 1], reset=[False, True]), [2, 1]
        )


def hung_up(pid):
    """Connections of a process whose client has left, and that it has not closed."""
    return [one for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_CLOSE_WAIT]


def unread(port):
    """How many bytes a process on this host has not read of what a socket with this port has sent to it."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(of[4].rpartition(":")[2], 16) for of in sockets if int(of[2].rpartition(":")[2], 16) == port)


@pytest.mark.parametrize("known", [False, True])
def test_a_step_whose_http_client_hung_up_loses_its_sequence(gateway, known):
    http = Http(gateway, binary=False)
    engine = gateway.server.pids()["engine-0"]
    try:
        assert http.one("sum", {"x": numbers(1)}, sequence_id="hung up", sequence_start=True)[0] == 1
        body = {
            "inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [10]}],
            "parameters": {"sequence_id": "hung up"},
        }
        host, _, port = gateway.http.rpartition(":")
        if known:  # so that the next request with this head takes the shorter way
            earlier = client.HTTPConnection(host, int(port), timeout=30)
            earlier.request("POST", "/v2/models/sum/infer", json.dumps(body))
            assert earlier.getresponse().read().endswith(b'"data":[11.0]}]}')
            earlier.close()
        os.kill(engine, signal.SIGSTOP)
        try:
            leaving = client.HTTPConnection(host, int(port), timeout=30)
            leaving.request("POST", "/v2/models/sum/infer", json.dumps(body))
            wait_until(lambda: not unread(leaving.sock.getsockname()[1]), 20, "the gateway has it")
            for _ in range(5):  # and has gone on meanwhile: the ticket is on its way to the engine
                assert httpx.get(f"http://{gateway.http}/v2/health/live", timeout=30).status_code == 200
            leaving.close()
            wait_until(lambda: not hung_up(gateway.server.pids()["gateway"]), 20, "the gateway notices")
        finally:
            os.kill(engine, signal.SIGCONT)
        with pytest.raises(Failed, match="no state here"):  # the client cannot know whether the 10 was added
            http.infer("sum", {"x": numbers(10)}, sequence_id="hung up")
        assert http.one("sum", {"x": numbers(2)}, sequence_id="hung up", sequence_start=True)[0] == 2
    finally:
        http.close()


def test_a_killed_engine_loses_its_states_and_no_answer_is_wrong(raw, ours, gateway):
    ones = np.ones((2, 1), np.float32)
    with ours.model("sum").sessions(2) as sessions:
        np.testing.assert_array_equal(sessions.infer(ones), [1, 1])
        raw.infer("sum", {"x": numbers(5)}, sequence_id="down", sequence_start=True)
        killed = gateway.server.pids()["engine-0"]
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(Failed, match="FAILED_PRECONDITION"):
            raw.infer("sum", {"x": numbers(1)}, sequence_id="down")
        with pytest.raises(SessionLost) as lost:
            sessions.infer(ones, timeout=60)
        assert lost.value.sessions == [0, 1]
        np.testing.assert_array_equal(sessions.infer(ones, reset=[True, True], timeout=60), [1, 1])
        assert raw.one("sum", {"x": numbers(1)}, sequence_id="down", sequence_start=True)[0] == 1
        raw.infer("sum", {"x": numbers(1)}, sequence_id="down", sequence_end=True)


def test_a_killed_gateway_loses_its_states_and_no_answer_is_wrong(raw, ours, gateway):
    ones = np.ones((2, 1), np.float32)
    with ours.model("sum").sessions(2) as sessions:
        np.testing.assert_array_equal(sessions.infer(ones), [1, 1])
        raw.infer("sum", {"x": numbers(5)}, sequence_id="gone", sequence_start=True)
        os.kill(gateway.server.pids()["gateway"], signal.SIGKILL)

        def lost(ask):
            try:
                ask()
            except (SessionLost, Failed) as error:
                return "FAILED_PRECONDITION" in str(error) or isinstance(error, SessionLost)
            except Exception:  # noqa: BLE001  it is being started again
                return False
            raise AssertionError("answered from a state that is gone")

        wait_until(lambda: lost(lambda: raw.infer("sum", {"x": numbers(1)}, sequence_id="gone")), 60)
        wait_until(lambda: lost(lambda: sessions.infer(ones, timeout=10)), 60)
        np.testing.assert_array_equal(sessions.infer(ones, reset=[True, True], timeout=60), [1, 1])


def test_sessions_of_many_threads_are_independent(gateway):
    def run(seed):
        rng = np.random.default_rng(seed)
        with connect(f"grpc://{gateway.grpc}", timeout=30) as client, client.model("sum").sessions(3) as sessions:
            totals = np.zeros(3, np.float32)
            for _ in range(40):
                x = rng.integers(0, 9, (3, 1)).astype(np.float32)
                reset = rng.random(3) < 0.2
                totals = np.where(reset, 0, totals) + x[:, 0]
                np.testing.assert_array_equal(sessions.infer(x, reset=reset), totals)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
