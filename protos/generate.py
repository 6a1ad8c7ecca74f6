"""Generate the protobuf code beside its sources: `make proto`. With --check, report stale files and fail.

A generated module is the descriptor of its file; jurybox/protocol/messages.py makes the classes of it, with any
protobuf from 4.25 on, and says why not protoc's own code. The types, for mypy and editors, are protoc's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).parent
PACKAGE = "jurybox/protocol"
_MESSAGES = '''\
# Made by protos/generate.py of {source}; do not edit.
"""Messages of {source}."""

from jurybox.protocol.messages import define

DESCRIPTOR = define(
    globals(),
{descriptor},
)
'''
_CALLS = '''\
# Made by protos/generate.py of {source}; do not edit.
"""gRPC services of {source}, under the names that gRPC's own generator gives them."""

from jurybox.protocol import messages
from jurybox.protocol.{module} import DESCRIPTOR
'''
_SERVICE = '''

def {name}Stub(channel):
    """The service's calls on a channel."""
    return messages.stub(channel, DESCRIPTOR.services_by_name["{name}"])


def add_{name}Servicer_to_server(servicer, server):
    """Let the servicer answer them on a server."""
    messages.add_servicer(DESCRIPTOR.services_by_name["{name}"], servicer, server)
'''
_WIDTH = 100


def generate(out: Path) -> list[Path]:
    """Write the generated modules for every .proto under `out`; returns their paths relative to it."""
    (out / PACKAGE).mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    with tempfile.NamedTemporaryFile() as descriptors:
        arguments = [
            "protoc",
            f"-I{ROOT}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--descriptor_set_out={descriptors.name}",
            f"--pyi_out={out}",
            *sources,
        ]
        if code := protoc.main(arguments):
            raise SystemExit(code)
        described = FileDescriptorSet.FromString(Path(descriptors.name).read_bytes())
    for file in described.file:
        _write(file, out)
    return sorted(path.relative_to(out) for path in (out / PACKAGE).glob("*_pb2*.py*"))


def _write(file: FileDescriptorProto, out: Path) -> None:
    source = Path(file.name)
    for message in file.message_type:
        _forget_json_names(message)  # protoc makes them of the names; so does whoever reads the descriptor
    lines = "\n".join(f"    {line!r}" for line in _pieces(file.SerializeToString(deterministic=True)))
    (out / PACKAGE / f"{source.stem}_pb2.py").write_text(_MESSAGES.format(source=source.name, descriptor=lines))
    if file.service:
        calls = _CALLS.format(source=source.name, module=f"{source.stem}_pb2")
        calls += "".join(_SERVICE.format(name=service.name) for service in file.service)
        (out / PACKAGE / f"{source.stem}_pb2_grpc.py").write_text(calls)


def _forget_json_names(message: DescriptorProto) -> None:
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _forget_json_names(nested)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Split before names, so that a new field in a .proto changes few lines."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _WIDTH // 2)
        end = min(len(data), start + _WIDTH) if end < 0 else min(end, start + _WIDTH)
        yield data[start:end]
        start = end


def stale() -> list[str]:
    """Names of generated files that are out of date."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path: (Path(folder) / path).read_text() for path in generate(Path(folder))}
    present = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    differing = [path for path, text in fresh.items() if path not in present or (ROOT / path).read_text() != text]
    return sorted(map(str, {*differing, *(present - set(fresh))}))


if __name__ == "__main__":
    if "--check" in sys.argv:
        if names := stale():
            sys.exit(f"stale generated code, run 'make proto': {', '.join(names)}")
    else:
        generate(ROOT)
