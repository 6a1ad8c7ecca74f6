"""Arbitrary bytes in any gRPC call get a status, and the gateway keeps serving. No crash, no hang, no leak."""

from random import Random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.messages import CLIENTS, EXTENTS, NAMES, OPEN, SEQUENCES, STEPS, STRINGS, U64, bent, mutated, sending

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.spec import OIP_NAMES

AT_ONCE = 25
AGAIN = 9  # of a hundred thousand, each comes so often once more, bent
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
UNARY = [method for method in SERVICE.methods if method.name != "ModelStreamInfer"]
# UNKNOWN is what gRPC makes of an exception in a handler, INTERNAL what the gateway makes of one.
HARMLESS = set(grpc.StatusCode) - {
    grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED,
}  # fmt: skip


def model_raised(call):
    """Whether a call failed with a model's own exception, such as at bytes that are no text, and not the gateway's."""
    return call.code() == grpc.StatusCode.INTERNAL and "the gateway failed" not in call.details()


SHORT = pytest.param(250, id="short")
LONG = pytest.param(100_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3000)])

I64 = st.one_of(st.sampled_from([-1, 0, 1, 3, 4, 2**62, -(2**63)]), st.integers(-(2**63), 2**63 - 1))
PARAMETERS = st.dictionaries(
    st.sampled_from(["timeout", "priority", "sequence_id", "shared_memory_region", "shared_memory_byte_size", "x"]),
    st.one_of(
        st.builds(lambda value: pb.InferParameter(int64_param=value), I64),
        st.builds(lambda value: pb.InferParameter(uint64_param=value), U64),
        st.builds(lambda value: pb.InferParameter(string_param=value), st.text(max_size=8)),
        st.builds(pb.InferParameter),
    ),
    max_size=2,
)


def parameter(value):
    kind = {bool: "bool_param", int: "int64_param" if type(value) is int and abs(value) < 2**63 else "uint64_param"}
    return pb.InferParameter(**{kind.get(type(value), "string_param"): value})


FLAGS = ["sequence_start", "sequence_end", "row_errors", "extents"]
OPEN_PARAMETERS = st.builds(
    lambda flags, given: {name: parameter(value) for name, value in {**flags, **given}.items()},
    st.dictionaries(st.sampled_from(FLAGS), st.one_of(st.booleans(), st.just(1)), max_size=3),
    st.one_of(
        st.just({}),
        st.builds(lambda value: {"sequence_id": value}, SEQUENCES),
        st.builds(lambda client, steps: {"session_client": client, "sessions": steps}, CLIENTS, STEPS),
        st.builds(lambda steps: {"sessions": steps}, STEPS),
    ),
)
OPEN_SHAPES = st.sampled_from(
    [[1], [2], [0], [-1], [2**40], [1, 1], [2, 1], [1, 1, 1, 3], [1, 2, 2, 3], [2, 0, 5, 3], [1, 2**40, 0, 3],
     [1, 40, 40, 3], [3], [12], []]
)  # fmt: skip


def open_request(model, shape, extents, raw, values, parameters, datatype):
    """For a model of messages.OPEN: rightly, or nearly so."""
    own = {"text": "BYTES", "x": "FP32", "image": "UINT8"}[OPEN[model]]
    message = pb.ModelInferRequest(model_name=model, parameters=parameters)
    tensor = message.inputs.add(name=OPEN[model], datatype=datatype or own, shape=shape)
    if extents is not None:
        tensor.parameters["extents"].string_param = extents
    if raw is not None:
        message.raw_input_contents.append(raw)
    else:
        tensor.contents.bytes_contents.extend(values)
    return message.SerializeToString()


OPEN_INFER = st.builds(
    open_request,
    st.sampled_from(list(OPEN)),
    OPEN_SHAPES,
    st.one_of(st.none(), EXTENTS),
    st.one_of(st.none(), STRINGS, st.sampled_from([bytes(3), bytes(4), bytes(8), bytes(12), bytes(24)])),
    st.lists(st.sampled_from([b"", b"a", b"\xff", b"x" * 401]), max_size=3),
    OPEN_PARAMETERS,
    st.sampled_from(["", "", "", "FP32", "BYTES"]),
)
TENSORS = st.builds(
    lambda name, datatype, shape, parameters, floats: pb.ModelInferRequest.InferInputTensor(
        name=name,
        datatype=datatype,
        shape=shape,
        parameters=parameters,
        contents=pb.InferTensorContents(fp32_contents=floats) if floats else None,
    ),
    st.sampled_from(["observation", "image", "scale", "", "nothing"]),
    st.sampled_from([*OIP_NAMES.values(), "BYTES", "BF16", ""]),
    st.one_of(
        st.lists(I64, max_size=3),
        st.sampled_from([[1, 4], [3, 4], [0, 4], [2**60, 4], [2**31, 2**31, 2**31, 4], [1] * 100]),
    ),
    PARAMETERS,
    st.lists(st.floats(width=32), max_size=8),
)
INFER = st.builds(
    lambda model, version, inputs, raw, parameters, outputs: pb.ModelInferRequest(
        model_name=model,
        model_version=version,
        inputs=inputs,
        raw_input_contents=raw,
        parameters=parameters,
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="action")] * outputs,
    ),
    NAMES,
    st.sampled_from(["", "0", "1", "-1", "x", "9" * 30, "9" * 5000, str(2**63), str(2**64)]),
    st.lists(TENSORS, max_size=3),
    st.lists(st.one_of(st.just(bytes(16)), st.just(bytes(48)), st.binary(max_size=60)), max_size=3),
    PARAMETERS,
    st.sampled_from([0, 1, 2, 1000, 3000]),
).map(lambda request: request.SerializeToString())
# Few bytes that are sent often and become large when parsed or unpacked.
BOMBS = st.builds(
    lambda field, content, count: b"\x0a\x06affine" + (bytes([field << 3 | 2, len(content)]) + content) * count,
    st.integers(1, 9),
    st.sampled_from([b"", b"\x0a\x01a", b"\x22\x04\x0a\x02ab", b"\xff"]),
    st.sampled_from([10, 1000, 70_000]),
)
REGISTER = st.builds(
    lambda name, key, offset, size: pb.SystemSharedMemoryRegisterRequest(
        name=name, key=key, offset=offset, byte_size=size
    ),
    st.text(max_size=8),
    st.sampled_from(["/nothing", "../../etc/passwd", "/../x", "", "/jurybox-0-x", "\0"]),
    U64,
    U64,
).map(lambda request: request.SerializeToString())


# Of most calls the first field is a model's name, or a region's.
NAMED = NAMES.map(lambda name: pb.ModelReadyRequest(name=name).SerializeToString())


def requests_of(method):
    """Bytes for a method: its own messages bent, another's, or noise; models that are served stay loaded."""
    name = method.name
    if name == "ModelInfer":
        return st.one_of(INFER, mutated(INFER), OPEN_INFER, mutated(OPEN_INFER))
    if name == "SystemSharedMemoryRegister":
        return st.one_of(REGISTER, mutated(REGISTER))
    if name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        return st.binary(max_size=40)
    return st.one_of(st.binary(max_size=60), mutated(NAMED))


CALLS = st.one_of(
    *(st.tuples(st.just(method.name), requests_of(method)) for method in UNARY),
    *([st.tuples(st.just("ModelInfer"), st.one_of(INFER, mutated(INFER)))] * 6),
    *([st.tuples(st.just("ModelInfer"), st.one_of(OPEN_INFER, mutated(OPEN_INFER)))] * 6),
    st.tuples(st.just("ModelInfer"), BOMBS),
)
PACKED = [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_in_any_call(server, nothing_leaks, count):
    again = AGAIN if count >= 10_000 else 0
    random = Random(count)

    @sending(-(-count // AT_ONCE // (again + 1)), same=count < 10_000)
    @given(
        st.lists(CALLS, min_size=AT_ONCE, max_size=AT_ONCE),
        st.sampled_from(PACKED),
        st.sets(st.integers(0, AT_ONCE - 1), max_size=4),
    )
    def fuzz(batch, packed, given_up):
        for turn in range(again + 1):
            send([(name, bent(content, random)) for name, content in batch] if turn else batch, packed, given_up)
            nothing_leaks.came(len(batch))

    def send(batch, packed, given_up):
        calls = [
            (name, content, methods[name].future(content, timeout=30, compression=packed)) for name, content in batch
        ]
        for number in given_up:
            calls[number][2].cancel()
        for number, (name, content, call) in enumerate(calls):
            if number in given_up and call.cancelled():
                continue
            assert call.code() in HARMLESS or model_raised(call), (name, content[:500], call.code(), call.details())
            assert call.code() != grpc.StatusCode.DEADLINE_EXCEEDED or name == "ModelInfer", (name, content)

    with grpc.insecure_channel(server.told["grpc"]) as channel:
        methods = {name: channel.unary_unary(f"/{SERVICE.full_name}/{name}") for name in (it.name for it in UNARY)}
        fuzz()
    assert nothing_leaks.sent >= count * 0.8


@pytest.mark.parametrize(
    "count", [pytest.param(20, id="short"), pytest.param(10_000, id="long", marks=[pytest.mark.slow])]
)
def test_any_bytes_in_a_stream(server, nothing_leaks, count):
    @sending(count, same=count < 1000)
    @given(st.lists(st.one_of(INFER, mutated(INFER), OPEN_INFER, BOMBS), min_size=1, max_size=20), st.integers(0, 20))
    def fuzz(batch, given_up):
        stream = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")(iter(batch), timeout=30)
        try:
            for number, _ in enumerate(stream):
                assert number < len(batch)
                if number == given_up:
                    stream.cancel()
        except grpc.RpcError as error:
            assert error.code() in (HARMLESS | {grpc.StatusCode.CANCELLED}) - {grpc.StatusCode.DEADLINE_EXCEEDED}, error

    with grpc.insecure_channel(server.told["grpc"]) as channel:
        fuzz()
