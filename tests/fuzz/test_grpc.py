"""Any bytes in any call of the gRPC door: a status, and the gateway goes on. No crash, no hang, no leak."""

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz.messages import NAMES, U64, mutated

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.spec import OIP_NAMES

AT_ONCE = 25
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
UNARY = [method for method in SERVICE.methods if method.name != "ModelStreamInfer"]
# UNKNOWN is what gRPC makes of an exception in a handler.
# UNKNOWN with a DecodeError is grpc.aio's word for a message that it cannot read.
HARMLESS = set(grpc.StatusCode) - {grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}

SHORT = pytest.param(250, id="short")
LONG = pytest.param(15_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1500)])

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
    st.one_of(st.lists(I64, max_size=3), st.sampled_from([[1, 4], [3, 4], [0, 4], [2**31, 2**31, 2**31, 4]])),
    PARAMETERS,
    st.lists(st.floats(width=32), max_size=8),
)
INFER = st.builds(
    lambda model, version, inputs, raw, parameters: pb.ModelInferRequest(
        model_name=model, model_version=version, inputs=inputs, raw_input_contents=raw, parameters=parameters
    ),
    NAMES,
    st.sampled_from(["", "0", "1", "-1", "x", "9" * 30]),
    st.lists(TENSORS, max_size=3),
    st.lists(st.one_of(st.just(bytes(16)), st.just(bytes(48)), st.binary(max_size=60)), max_size=3),
    PARAMETERS,
).map(lambda request: request.SerializeToString())
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
        return st.one_of(INFER, mutated(INFER))
    if name == "SystemSharedMemoryRegister":
        return st.one_of(REGISTER, mutated(REGISTER))
    if name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        return st.binary(max_size=40)
    return st.one_of(st.binary(max_size=60), mutated(NAMED))


CALLS = st.one_of(
    *(st.tuples(st.just(method.name), requests_of(method)) for method in UNARY),
    *([st.tuples(st.just("ModelInfer"), st.one_of(INFER, mutated(INFER)))] * 8),
)


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_in_any_call(server, nothing_leaks, count):
    sent = 0

    @settings(
        max_examples=-(-count // AT_ONCE),
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a batch that does harm is shown as it is: making it smaller takes minutes
        suppress_health_check=list(HealthCheck),
        derandomize=count < 10_000,
    )
    @given(st.lists(CALLS, min_size=AT_ONCE, max_size=AT_ONCE))
    def fuzz(batch):
        nonlocal sent
        sent += len(batch)
        calls = [
            (name, content, channel.unary_unary(f"/{SERVICE.full_name}/{name}").future(content, timeout=30))
            for name, content in batch
        ]
        for name, content, call in calls:
            unread = call.code() == grpc.StatusCode.UNKNOWN and "DecodeError" in call.details()
            assert unread or call.code() in HARMLESS, (name, content, call.code(), call.details())
            assert call.code() != grpc.StatusCode.DEADLINE_EXCEEDED or name == "ModelInfer", (name, content)

    with grpc.insecure_channel(server.told["grpc"]) as channel:
        fuzz()
    assert sent >= count * 0.8


def test_any_bytes_in_a_stream(server, nothing_leaks):
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(st.one_of(INFER, mutated(INFER)), min_size=1, max_size=20))
    def fuzz(batch):
        stream = channel.stream_stream(f"/{SERVICE.full_name}/ModelStreamInfer")(iter(batch), timeout=30)
        try:
            assert sum(1 for _ in stream) <= len(batch)
        except grpc.RpcError as error:
            unread = error.code() == grpc.StatusCode.UNKNOWN and "DecodeError" in error.details()
            assert unread or error.code() in HARMLESS - {grpc.StatusCode.DEADLINE_EXCEEDED}, error

    with grpc.insecure_channel(server.told["grpc"]) as channel:
        fuzz()
