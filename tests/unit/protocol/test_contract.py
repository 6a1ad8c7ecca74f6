"""The contract itself: errors, specs, records, generated code, import weight."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jurybox import native
from jurybox.client.transports import transport
from jurybox.protocol import errors
from jurybox.protocol.control_pb2 import ModelMessage
from jurybox.protocol.errors import Code, error_for
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.scoreboard import LANE
from jurybox.protocol.spec import ModelSpec, TensorSpec, parameters_of, plain_specs, specs_from_plain, tell_spec
from jurybox.protocol.wire import IDENTITY, PREFIX, TICKET, lane_identity, prefix_error

ROOT = Path(__file__).parents[3]
PROTOS = ROOT / "protos/jurybox/protocol"


def test_every_code_has_its_exception_and_its_statuses():
    assert set(errors.TABLE) == set(Code) - {Code.OK}
    for code, row in errors.TABLE.items():
        assert issubclass(row.exception, errors.Error)
        assert 400 <= row.http < 600
        assert 0 < row.grpc <= 16
        assert error_for(code, "what").code == code


def test_an_unknown_code_of_a_newer_peer_is_still_an_error():
    assert "code 999" in str(error_for(999, "strange"))


def test_errors_are_also_pythons_builtin_exceptions():
    assert isinstance(error_for(Code.TIMEOUT, ""), TimeoutError)
    assert isinstance(error_for(Code.SERVER_GONE, ""), ConnectionError)
    assert isinstance(error_for(Code.MODEL_NOT_FOUND, ""), LookupError)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("complex64", ()), ("float32", (0,)), ("object", (1,)), ("float8_e3m4", (2,))]
)
def test_a_spec_that_cannot_be_served_is_refused(dtype, shape):
    with pytest.raises(ValueError, match=r"dtype|size below 1"):
        TensorSpec(dtype, shape)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dtype": "bytes", "shape": (2,), "capacity": 4}, "a row is one byte string"),
        ({"dtype": "bytes"}, "expected the bytes of the longest row, at least 1"),
        ({"dtype": "uint8", "shape": (-1, 3)}, "expected the elements of the largest row, at least 3"),
        ({"dtype": "uint8", "shape": (-1, 3), "capacity": 2}, "at least 3"),
        ({"dtype": "uint8", "shape": (3,), "capacity": 3}, "a fixed shape needs none"),
        ({"dtype": "uint8", "shape": (1 << 31, 2)}, "4294967296 elements, expected at most"),
        ({"dtype": "uint8", "shape": (-2,), "capacity": 3}, "size below 1"),
        ({"dtype": "uint8", "shape": 3}, "no tuple"),
        ({"dtype": "uint8", "shape": (3,), "finite": True}, "finite is for floating-point numbers"),
    ],
)
def test_a_tensor_that_no_row_can_have_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        TensorSpec(**given)


X, TEXT, ONE = TensorSpec("float32", (2,)), TensorSpec("bytes", capacity=9), TensorSpec("float32")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"inputs": {}}, "at least one input and one output"),
        ({"outputs": {}}, "at least one input and one output"),
        ({"inputs": {"": X}}, "names a tensor ''"),
        ({"outputs": {"y" * 1000: X}}, "names a tensor 'yyy"),
        ({"state": {"half \ud800": X}}, "that UTF-8 can carry"),
        ({"state": {"h": TEXT}}, "state has a fixed shape"),
        ({"state": {"x": X}}, "an input and a state 'x'"),
        ({"parameters": {"p": Parameter("x", 0.0)}}, "parameter 'p' is the input 'x': expected one of a single value"),
        ({"parameters": {"p": Parameter("z", 0.0)}}, "parameter 'p' is the input 'z'"),
        ({"parameters": {"p": Parameter("k", "no number")}}, "p.default"),
        ({"parameters": {"p": Parameter("k", 0.0), "q": Parameter("k", 0.0)}}, "two parameters of model 'm'"),
    ],
)
def test_a_model_whose_tensors_do_not_go_together_is_refused(given, why):
    with pytest.raises((ValueError, errors.Error), match=why):
        ModelSpec("m", **{"inputs": {"x": X, "k": ONE}, "outputs": {"y": X}, **given})


def test_a_model_says_what_a_request_must_bring_and_how_large_its_rows_are():
    made = ModelSpec("m", {"x": X, "k": ONE}, {"y": X}, {"h": ONE}, parameters={"p": Parameter("k", 0.5)})
    assert made.required == {"x": X}
    assert made.row_bytes == 8 + 4 + 8 + 2 * 4, "its state is loaded and stored"
    assert made.open
    plain = ModelSpec("m", {"x": X}, {"y": X})
    assert (plain.open, ModelSpec("m", {"x": X}, {"y": TEXT}).open, ModelSpec("m", {"t": TEXT}, {"y": X}).open) == (
        False, True, True,
    )  # fmt: skip


VARIED = TensorSpec("uint8", (-1, 3, -1), capacity=30)


@pytest.mark.parametrize(
    ("spec", "shape", "extents"),
    [
        (VARIED, (2, 3, 5), (2, 5)),
        (VARIED, (0, 3, 10), (0, 10)),
        (VARIED, (0, 3, 11), None),
        (VARIED, (2, 3, 6), None),
        (VARIED, (2, 4, 3), None),
        (VARIED, (2, 3), None),
        (VARIED, (-1, 3, 2), None),
        (TEXT, (9,), (9,)),
        (TEXT, (-1,), None),
        (TEXT, (10,), None),
        (TEXT, (), None),
        (X, (2,), ()),
        (X, (3,), None),
    ],
)
def test_the_sizes_of_a_row_that_fits_give_its_shape_back(spec, shape, extents):
    assert spec.extents_of(shape) == extents
    if extents is not None:
        assert spec.measured(extents) == shape
        assert len(extents) == spec.extents


def test_rows_of_zeros_are_rows_of_their_spec():
    assert [row.shape for row in VARIED.zeros(2)] == [(3, 3, 3)] * 2
    assert X.zeros(3).shape == (3, 2)
    assert TEXT.zeros(2) == [b"0000"] * 2 and TensorSpec("bytes", capacity=2).zeros(1) == [b"00"]
    assert [str(spec) for spec in (X, VARIED, TEXT)] == ["float32[2]", "uint8[-1, 3, -1] up to 30", "bytes up to 9"]


def test_a_row_is_stored_in_its_shape_or_flat_with_its_capacity():
    assert (X.stored_shape, VARIED.stored_shape, TEXT.stored_shape) == ((2,), (30,), (9,))
    assert (X.row_bytes, VARIED.row_bytes, TEXT.row_bytes) == (8, 30, 9)
    assert [row.shape for row in TensorSpec("uint8", (-1,), capacity=5000).zeros(1)] == [(32,)]


def test_sizes_of_one_are_served_and_a_shape_is_kept_as_a_tuple():
    assert TensorSpec("uint8", [1, 1]).shape == (1, 1)
    assert TensorSpec("uint8", [1, 1]) == TensorSpec("uint8", (1, 1))


def test_a_model_is_told_whole_in_a_message():
    made = ModelSpec("m", {"x": VARIED, "k": ONE}, {"y": X}, {"h": ONE}, parameters={"p": Parameter("k", 0.5)})
    message = ModelMessage()
    tell_spec(message, made)
    assert [(one.name, one.dtype, list(one.shape), one.capacity) for one in message.inputs] == [
        ("x", "uint8", [-1, 3, -1], 30), ("k", "float32", [], 0),
    ]  # fmt: skip
    assert [one.name for one in (*message.outputs, *message.session_state)] == ["y", "h"]
    assert parameters_of(message) == made.parameters


def test_specs_survive_json():
    specs = {"a": TensorSpec("uint8", (3, 4)), "b": TensorSpec("float32", finite=True), "c": VARIED}
    assert specs_from_plain(plain_specs(specs)) == specs


def test_records_have_the_native_cores_sizes():
    assert TICKET.itemsize == 64
    assert LANE.itemsize == 32


def test_an_identity_is_a_valid_routing_id():
    identity = lane_identity(7, 2**60)
    assert len(identity) == IDENTITY.size < 256
    assert identity[0] != 0  # those belong to ZeroMQ


@pytest.mark.parametrize(
    ("frame", "says"),
    [(b"J\x63rest", "version 99 came"), (b"GET / HTTP", "expected a Jurybox message"), (b"", "0 bytes")],
)
def test_foreign_bytes_are_named(frame, says):
    assert says in prefix_error(frame)
    assert prefix_error(PREFIX + b"anything") is None


def test_the_generated_code_matches_the_protos():
    result = subprocess.run([sys.executable, "protos/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_client_imports_neither_torch_nor_fastapi_nor_grpc():
    code = (
        "import sys, jurybox.client, jurybox.client.transports.shm\n"
        "heavy = {'torch', 'fastapi', 'grpc', 'pydantic', 'cv2', 'gymnasium'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_client_requires_no_new_protobuf_and_has_no_upper_bounds():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*packages["dependencies"], *packages["optional-dependencies"]["grpc"]]
    assert "protobuf>=4.25" in asked
    assert not [line for line in asked if "<" in line or "==" in line]
    for path in PROTOS.glob("*_pb2*.py"):
        assert "ValidateProtobufRuntimeVersion" not in path.read_text()  # refuses whatever is older than protoc
        assert "GRPC_GENERATED_VERSION" not in path.read_text()


def test_the_clients_time_outs_are_caught_in_python_310_too():
    """There asyncio's TimeoutError, and that of concurrent.futures, are not Python's own yet."""
    for path in [*(ROOT / "client").rglob("*.py"), *PROTOS.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Try) and "wait_for(" in "".join(map(ast.unparse, node.body)):
                caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type is not None)
                assert "TimeoutError" not in caught or "asyncio.TimeoutError" in caught, f"{path}:{node.lineno}"


def test_the_native_core_returns_the_clients_error_codes():
    for name in ("NOT_SENT", "NOT_ANSWERED", "NOT_FIT"):
        assert getattr(native, name) == getattr(transport, name)
