"""The bytes of a file of weights: an aligned header, the tensors without gaps, and the hash that belongs to them."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest

from jurybox.protocol.weights import WeightsLayout
from jurybox.server import safetensors_file
from jurybox.server.safetensors_file import DamagedFile


@pytest.mark.parametrize("name", ["w" * length for length in range(1, 9)])
def test_a_file_has_its_tensors_behind_a_header_of_whole_words_and_its_hash_is_returned(
    tmp_path: Path, name: str
) -> None:
    layout = WeightsLayout([(name, "float32", (2, 3)), ("mask", "bool", (5,)), ("n", "int64", ())])
    flat = np.arange(layout.nbytes, dtype=np.uint8)
    sink = io.BytesIO()
    sha = safetensors_file.write(sink, layout, flat, {"version": "7"})
    data = sink.getvalue()
    assert sha == hashlib.sha256(data).hexdigest()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0 and size - len(data[8 : 8 + size].rstrip(b" ")) < 8
    assert [header[key]["data_offsets"] for key in (name, "mask", "n")] == [[0, 24], [24, 29], [29, 37]]
    assert len(data) == 8 + size + 37
    (tmp_path / "file").write_bytes(data)
    found, arrays, metadata = safetensors_file.read(tmp_path / "file", sha)
    assert not layout.difference(found) and metadata == {"version": "7"}
    for key, place in layout.places.items():
        assert arrays[key].tobytes() == flat[place.offset : place.offset + place.nbytes].tobytes()


def test_a_file_with_another_hash_is_damaged_and_one_without_strings_has_none(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    _, arrays, metadata = safetensors_file.read(path)
    assert arrays["a"].tobytes() == b"ab" and metadata == {}
    with pytest.raises(DamagedFile, match=r"file is damaged: expected SHA-256 0{12}\.\.\., got "):
        safetensors_file.read(path, "0" * 64)


def test_a_tensor_that_the_format_does_not_know_is_named() -> None:
    assert safetensors_file.unsaveable(WeightsLayout([("a", "float32", (2,)), ("z", "complex128", (1,))])) == "z"
    assert safetensors_file.unsaveable(WeightsLayout([("a", "float32", (2,))])) == ""
