from __future__ import annotations

import numpy as np
import pytest

from jurybox.training.replay import Field, Replay


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (
            Field((7, 5), "float32", stored="bits"),
            np.random.default_rng(1).integers(0, 2, (9, 7, 5)).astype(np.float32),
        ),
        (Field((13,), "bool", stored="bits"), np.random.default_rng(2).integers(0, 2, (9, 13)).astype(bool)),
        (Field((13,), "uint8", stored="bits"), np.random.default_rng(2).integers(0, 2, (9, 13)).astype(np.uint8)),
        (
            Field((3, 4), "float32", stored="uint8"),
            np.random.default_rng(3).integers(0, 256, (9, 3, 4)).astype(np.float32),
        ),
        (
            Field((50,), "float32", stored="sparse", nonzero=50),
            np.random.default_rng(4).normal(size=(9, 50)).astype(np.float32),
        ),
        (Field((2, 2), "float64"), np.random.default_rng(5).normal(size=(9, 2, 2))),
        (Field((), "int64"), np.arange(9) * 10**12),
        (Field((), "uint16"), np.arange(9, dtype=np.uint16)),
        (Field((3,), "float16"), np.ones((9, 3), np.float16)),
    ],
    ids=str,
)
def test_values_survive_a_round_trip(make, field: Field, values: np.ndarray) -> None:
    replay: Replay = make(16, {"x": field, "n": Field((), "int32")})
    replay.extend(x=values, n=np.arange(9, dtype=np.int32))
    batch = replay.sample(9, replace=False)
    assert batch["x"].dtype == field.numpy_dtype
    order = np.argsort(batch["n"])
    np.testing.assert_array_equal(batch["x"][order], values)


def test_half_precision_rounds_to_nearest(make) -> None:
    replay = make(4, {"x": Field((11,), "float32", stored="float16")})
    values = np.linspace(-3, 7, 11, dtype=np.float32)
    replay.add(x=values)
    np.testing.assert_array_equal(replay.sample(1)["x"][0], values.astype(np.float16).astype(np.float32))


def test_a_scale_keeps_images_from_zero_to_one(make) -> None:
    replay = make(4, {"x": Field((4,), "float32", stored="uint8", scale=1 / 255)})
    replay.add(x=np.array([0, 0.5, 1, 2], np.float32))
    np.testing.assert_allclose(replay.sample(1)["x"][0], [0, 128 / 255, 1, 1], rtol=1e-6)


def test_narrow_forms_take_the_memory_they_promise() -> None:
    assert Field((119, 8, 8), "float32", stored="bits").stored_bytes == 952
    assert Field((119, 8, 8), "float32", stored="uint8").stored_bytes == 7616
    assert Field((4672,), "float32", stored="float16").stored_bytes == 9344
    assert Field((4672,), "float32", stored="sparse", nonzero=218).stored_bytes == 4 + 8 * 218


def test_a_sparse_row_may_have_one_element_or_all() -> None:
    assert [Field((3,), "float32", stored="sparse", nonzero=n).stored_bytes for n in (1, 3)] == [12, 28]


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": (0,)},
        {"dtype": "complex64"},
        {"dtype": "float64", "stored": "bits"},
        {"stored": "zip"},
        {"stored": "sparse"},
        {"nonzero": 3},
        {"shape": (3,), "stored": "sparse", "nonzero": 4},
        {"stored": "uint8", "scale": 0},
    ],
)
def test_a_field_that_cannot_be_kept_is_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"expected|must|cannot|goes with|below"):
        Field(**arguments)
