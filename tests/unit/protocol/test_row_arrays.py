"""Views of rows' memory take what their dtype holds, cast nothing silently, and take nothing after their release."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jurybox.protocol.dtypes import numpy_dtype
from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.protocol.row_arrays import Held, RowArray, RowArrays, array_of

HOLD = [("int8", -128), ("int8", 127), ("uint8", 0), ("bool", 1), ("bool", False), ("float32", 7), ("float32", 0.1)]
HOLD += [("float32", float("inf")), ("float32", float("-inf")), ("float32", float("nan")), ("float16", 65504)]
HOLD_NOT = [("int8", -129), ("int8", 128), ("uint8", -1), ("bool", 2), ("int32", 1.0), ("float16", -65536)]
HOLD_NOT += [("bool", 0.0), ("float32", 1e39), ("float32", -1e39)]
HOLD += [(numpy_dtype("bfloat16"), -np.inf), (numpy_dtype("float8_e5m2"), np.inf)]
HOLD_NOT += [(numpy_dtype("float8_e4m3fn"), value) for value in (np.inf, -np.inf, 449.0)]  # infinity would be NaN


def over(dtype, n=4):
    memory, held = np.zeros(n, dtype), Held()
    return memory, RowArray.over(memory, "input 'x' of 'm'", held), held


@pytest.mark.parametrize(("dtype", "value"), HOLD, ids=str)
def test_a_number_is_written_if_the_dtype_holds_it(dtype, value):
    memory, rows, _ = over(dtype)
    rows[1] = value
    rows[2:].fill(value)
    np.testing.assert_array_equal(memory, np.array([0, value, value, value], dtype))


@pytest.mark.parametrize(("dtype", "value"), HOLD_NOT, ids=str)
def test_a_number_that_the_dtype_does_not_hold_is_refused(dtype, value):
    memory, rows, _ = over(dtype)
    for write in (lambda: rows.fill(value), lambda: rows.__setitem__(0, value)):
        with pytest.raises(SpecMismatch, match=f"'x' of 'm': expected {dtype}, came .*, which {dtype} does not hold"):
            write()
    assert not memory.any()


def test_arrays_and_results_in_place_are_of_the_rows_dtype_or_refused():
    memory, rows, _ = over("float32")
    wide = np.full(4, 0.1)
    writes = [lambda: rows.__setitem__(..., wide), lambda: rows.__iadd__(wide), lambda: np.add(rows, wide, out=rows)]
    writes += [lambda: np.copyto(rows, wide), lambda: np.stack([wide[0], *wide[1:]], out=rows)]
    writes += [lambda: np.concatenate([wide[:2], wide[2:]], out=rows)]
    for write in writes:
        with pytest.raises(SpecMismatch, match="convert it on purpose"):
            write()
    assert not memory.any()
    rows += wide.astype(np.float32)
    np.copyto(rows[:2], wide[:2], casting="same_kind")  # on purpose
    np.testing.assert_array_equal(memory, wide.astype(np.float32))


def test_nothing_is_written_to_rows_that_were_released_by_whatever_view():
    memory, rows, held = over("float32")
    view = rows[1:].reshape(3, 1)
    held.released = True
    given = np.ones(4, np.float32)
    writes = [lambda: rows.__setitem__(0, 1.0), lambda: view.fill(1.0), lambda: rows.__iadd__(given)]
    writes += [lambda: np.negative(given, out=rows), lambda: np.copyto(rows, given)]
    writes += [lambda: np.concatenate([given[:2], given[2:]], out=rows)]
    for write in writes:
        with pytest.raises(Refused, match="'x' of 'm': these rows were released"):
            write()
    assert not memory.any()


def test_copies_and_results_are_the_callers_own():
    _, rows, held = over("float32")
    copy, result = rows.copy(), rows + np.ones(4)
    held.released = True
    copy[:] = np.full(4, 0.5)
    copy += np.ones(4)
    result[:] = 7
    assert copy.tolist() == [1.5] * 4 and result.tolist() == [7] * 4 and result.dtype == np.float64


def test_an_assignment_by_name_writes_to_the_memory():
    memory, rows, _ = over("float32")
    arrays = RowArrays({"x": rows}, "m", writable=True)
    arrays["x"] = np.arange(4, dtype=np.float32)
    arrays["x"] += 1
    assert memory.tolist() == [1, 2, 3, 4]
    with pytest.raises(SpecMismatch, match=r"rows of 'm' have \['x'\] here, 'y' came"):
        arrays["y"] = memory
    with pytest.raises(SpecMismatch, match="'x' of 'm' is memory that cannot be replaced"):
        RowArrays({"x": rows}, "m")["x"] = memory
    with pytest.raises(Refused, match="these rows were released"):
        RowArrays({}, "m", writable=True)["x"] = memory


def test_results_in_place_are_the_arrays_themselves():
    memory, rows, _ = over("float32")
    _, rest, _ = over("float32")
    given = np.array([7, 8, 9, 10], np.float32)
    assert np.add(rows, given, out=rows) is rows
    whole, left = np.divmod(given, np.float32(4), out=(rows, rest))
    assert whole is rows and left is rest
    assert memory.tolist() == [1, 2, 2, 2] and rest.tolist() == [3, 0, 1, 2]


def test_what_was_written_in_place_may_be_assigned_by_its_name_again():
    memory, rows, _ = over("float32")
    arrays = RowArrays({"x": rows}, "m")
    arrays["x"] += np.ones(4, np.float32)
    assert memory.tolist() == [1] * 4
    with pytest.raises(SpecMismatch, match="cannot be replaced"):
        arrays["x"] = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("tensor", "came", "convert"),
    [
        (torch.ones(2, requires_grad=True), "torch.float32 tensor that requires grad, and answers have none", ""),
        (torch.ones(2, dtype=torch.cfloat).conj().imag, "torch.float32 tensor", ".resolve_neg()"),
        (torch.ones(2).to_sparse(), "torch.float32 tensor", ".to_dense()"),
        (torch.ones(2, dtype=torch.float64, requires_grad=True), "torch.float64 tensor that requires grad, and answers "
         "have none", ".to(torch.float32)"),
        (torch.ones(2, device="meta"), "torch.float32 tensor, on meta", ".cpu()"),
    ],
    ids=["requires grad", "negative", "sparse", "of another dtype", "on a device"],
)  # fmt: skip
def test_a_tensor_that_numpy_cannot_have_is_refused_with_what_converts_it(tensor, came, convert):
    with pytest.raises(SpecMismatch) as refused:
        array_of("input 'x'", "float32", tensor)
    assert str(refused.value) == (
        f"input 'x': expected an array of float32, came a {came}: convert it on purpose: "
        f"tensor.detach(){convert}.numpy()"
    )


def test_what_is_no_array_is_refused_with_the_reason():
    with pytest.raises(SpecMismatch, match="expected an array of float32, came what is none: .*inhomogeneous"):
        array_of("input 'x'", "float32", [[1.0], [2.0, 3.0]])
