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
from jurybox.protocol.errors import Code, error_for
from jurybox.protocol.scoreboard import LANE
from jurybox.protocol.spec import TensorSpec, plain_specs, specs_from_plain
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


def test_specs_survive_json():
    specs = {"a": TensorSpec("uint8", (3, 4)), "b": TensorSpec("float32")}
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
