"""safetensors files of weights, written from and read to the bytes of a channel's slot, without torch.

The format (github.com/huggingface/safetensors, "Format"): eight bytes with the header's length, the header as JSON
(name, dtype, shape and offsets of every tensor, and strings under ``__metadata__``), then the tensors without gaps.

The library validates files that are read. This module reads and writes the bytes itself, because the library can
neither hash a file while writing it nor read bfloat16 without torch except as copies. Measured with safetensors 0.8.0
and 64 tensors of 1 MiB: writing, hashing and syncing took 0.47 s here and 0.58 s with `serialize_file`, whose file must
be read again for the hash (64 MiB more of memory); reading took 0.11 s here and 0.35 s with `deserialize`, which holds
each tensor twice (128 MiB, not 64).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jurybox.protocol.errors import Error
from jurybox.protocol.weights import WeightsLayout

# torch's dtype names to the format's; it has none for complex128.
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"


class DamagedFile(Error):
    """The file is not a complete safetensors file, or its checksum is wrong."""


def unsaveable(layout: WeightsLayout) -> str:
    """Return the name of a tensor that the format cannot store; empty if there is none."""
    return next((name for name, place in layout.places.items() if place.dtype not in _NAMES), "")


def write(file: IO[bytes], layout: WeightsLayout, flat: NDArray[np.uint8], metadata: Mapping[str, str]) -> str:
    """Write the tensors of a slot.

    Args:
        layout: their layout in the slot; none of them may be `unsaveable`.
        flat: the slot's ``layout.nbytes`` bytes.
        metadata: strings for the header.

    Returns:
        The SHA-256 of the file as 64 hexadecimal digits.
    """
    sha = hashlib.sha256()
    for part in _parts(layout, flat, metadata):
        file.write(part)
        sha.update(part)
    return sha.hexdigest()


def _parts(layout: WeightsLayout, flat: NDArray[np.uint8], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for name, place in layout.places.items():
        end = at + place.nbytes
        header[name] = {"dtype": _NAMES[place.dtype], "shape": list(place.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for place in layout.places.values():
        yield flat[place.offset : place.offset + place.nbytes].data


def read(path: Path, sha256: str | None = None) -> tuple[WeightsLayout, dict[str, NDArray[Any]], dict[str, str]]:
    """Read a file; return its tensors' layout, arrays in the layout's stored dtypes, and the header's strings.

    Args:
        sha256: the expected hash of the file; None: not checked.

    Raises:
        DamagedFile: the hash differs, or it is no safetensors file (tensors must cover its bytes, each byte once).
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    if sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise DamagedFile(f"{path} is damaged: expected SHA-256 {sha256[:12]}..., got {found[:12]}...")
    try:
        with safe_open(path, framework="numpy") as checked:  # also compares the header with the file's size
            metadata = checked.metadata() or {}
        begin = 8 + int.from_bytes(data[:8], "little")
        header: dict[str, Any] = json.loads(data[8:begin])
        header.pop(_METADATA, None)
        layout = WeightsLayout((name, _DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items())
        arrays = {
            name: np.ndarray(place.shape, place.stored, data, begin + header[name]["data_offsets"][0])
            for name, place in layout.places.items()
        }
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFile(f"{path} is no safetensors file: {type(error).__name__}: {error}") from error
    return layout, arrays, metadata
