"""Generate the protobuf code beside its sources: `make proto`. With --check, say what is stale and fail."""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
PACKAGE = "jurybox/protocol"
# Public protocols whose messages other libraries bring as well, under the same names. They get a descriptor pool of
# their own: one pool takes a name once, and whoever came second could not be imported.
PUBLIC = ("open_inference",)
_POOL, _OWN_POOL = "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"


def generate(out: Path) -> list[Path]:
    """Write the generated modules for every .proto under `out`; gives their paths relative to it."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*.proto"))
    arguments = [
        "protoc",
        f"-I{ROOT}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        *map(str, sources),
    ]
    if code := protoc.main(arguments):
        raise SystemExit(code)
    services = [str(source) for source in sources if "\nservice " in (ROOT / source).read_text()]
    if services and (code := protoc.main([*arguments[:3], f"--grpc_python_out={out}", *services])):
        raise SystemExit(code)
    for name in PUBLIC:
        module = out / PACKAGE / f"{name}_pb2.py"
        module.write_text(module.read_text().replace(_POOL, _OWN_POOL))
    return sorted(path.relative_to(out) for path in (out / PACKAGE).glob("*_pb2*.py*"))


def stale() -> list[str]:
    """Names of generated files that differ from what their sources give."""
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
