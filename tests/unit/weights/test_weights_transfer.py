"""Weights in chunks: the received weights, and the detected errors."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.protocol.errors import Code, Error
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.transfer import Assembly, chunks, narrow, restored, transfer_layout


@pytest.fixture
def flat():
    return np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)


def test_joined_chunks_equal_the_sent_bytes(flat):
    assembly = Assembly(np.zeros_like(flat), gaps=False)
    sent = 0
    for chunk in chunks(flat, size=3000):
        assembly.put(chunk)
        sent += len(chunk.data)
    assembly.finish(sent)
    assert (assembly.flat == flat).all()


def test_only_changes_are_sent(flat):
    new = flat.copy()
    new[[100, 6500]] += 1
    changed = list(chunks(new, flat, size=1000))
    assert [chunk.offset for chunk in changed] == [0, 6000]
    assembly = Assembly(flat.copy(), gaps=True)
    for chunk in changed:
        assembly.put(chunk)
    assembly.finish(2000)
    assert (assembly.flat == new).all()
    assert not list(chunks(flat, flat))


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (lambda chunk: setattr(chunk, "data", b"x" + chunk.data[1:]), Code.MALFORMED, "came damaged"),
        (lambda chunk: setattr(chunk, "offset", 9_999), Code.TOO_LARGE, "these are other weights"),
        (lambda chunk: setattr(chunk, "offset", 1000), Code.MALFORMED, "expected it at 3000"),
        (lambda chunk: setattr(chunk, "offset", 6000), Code.MALFORMED, "expected it at 3000"),
        (lambda chunk: setattr(chunk, "data", b""), Code.MALFORMED, "expected it at"),
    ],
)
def test_a_damaged_chunk_is_refused(flat, spoil, code, message):
    assembly = Assembly(np.zeros_like(flat), gaps=False)
    first, second, *_ = chunks(flat, size=3000)
    assembly.put(first)
    spoil(second)
    with pytest.raises(Error, match=message) as caught:
        assembly.put(second)
    assert caught.value.code == code


def test_a_missing_chunk_is_noticed_at_the_end(flat):
    assembly = Assembly(np.zeros_like(flat), gaps=False)
    for chunk in list(chunks(flat, size=3000))[:-1]:
        assembly.put(chunk)
    for sent in (10_000, 9_000):
        with pytest.raises(Error, match="send the weights again"):
            assembly.finish(sent)


def test_bfloat16_is_the_nearest_and_nothing_else_changes():
    torch = pytest.importorskip("torch")
    values = np.concatenate(
        [
            np.random.default_rng(1).normal(size=5000).astype(np.float32),
            np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38], np.float32),
        ]
    )
    expected = torch.from_numpy(values).bfloat16()
    bits = narrow(values)
    finite = ~np.isnan(values)
    assert (bits[finite] == expected.view(torch.uint16).numpy()[finite]).all()
    assert np.isnan(torch.from_numpy(bits).view(torch.bfloat16).float().numpy()[~finite]).all()
    arrays = {"w": values, "n": np.arange(3)}
    layout = WeightsLayout.of(arrays)
    travelling = transfer_layout(layout, bfloat16=True)
    assert travelling.places["w"].dtype == "bfloat16" and travelling.places["n"].dtype == "int64"
    flat = np.zeros(travelling.nbytes, np.uint8)
    views = travelling.views(flat, bits=True)
    views["w"][...], views["n"][...] = bits, arrays["n"]
    back = restored(layout, travelling, flat)
    np.testing.assert_array_equal(back["w"], expected.float().numpy())
    assert (back["n"] == arrays["n"]).all() and back["w"].dtype == np.float32
    assert narrow(np.float32(1.5).reshape(())).shape == ()
