"""Rows that a caller writes and reads in place, over a scripted engine."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.client.scripted import SIZES, SPEC, Engine, lane_of, serving_engine

from jurybox.client.in_flight import LOOK_AFTER, ModelLock
from jurybox.client.rows import Rows
from jurybox.protocol.errors import Busy, Code, ModelFailed, Refused, RowFailed, SpecMismatch, Timeout


def made(engine, n=3, batch=8, spec=SPEC):
    """A lane over `engine`, and n rows of it that begin with its third."""
    lane = lane_of(serving_engine(), engine, spec, leased=(4, 5))
    engine.columns = lane.columns
    before = lane.take(2)
    rows = Rows(ModelLock("m", 2.0), lane, lane.take(n), batch)
    lane.give(before)
    return lane, rows


def test_rows_are_written_computed_and_read_in_place():
    engine = Engine()
    lane, rows = made(engine)
    assert len(rows) == rows.rows == 3 and rows.version == 0 and rows.leased == (4, 5)
    assert repr(rows) == "<Rows of 'm', 3 rows>"
    assert list(rows.inputs) == ["x"] and list(rows.outputs) == ["y"]
    rows.inputs["x"] = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert lane.columns.inputs["x"].tolist() == [[0, 0], [0, 0], [0, 1], [2, 3], [4, 5], [0, 0], [0, 0], [0, 0]]
    assert rows.infer() == rows.version == 7 and engine.sent == [(2, 3, 0)]
    assert rows.outputs["y"].tolist() == [[0, 10], [20, 30], [40, 50]]
    rows.inputs["x"][0] = 9
    assert rows.infer(1, timeout=0.05, version=6) == 7 and engine.sent[1] == (2, 1, 6)
    assert rows.outputs["y"].tolist() == [[90, 90], [20, 30], [40, 50]], "of the first row alone"
    assert engine.seconds[0] == LOOK_AFTER and engine.seconds[1] <= 0.05, "what is left of its time"
    assert not lane.in_flight
    for wrong in (0, 4, 1.5):
        with pytest.raises(ValueError, match="rows=.*: expected a whole number from 1 to 3"):
            rows.infer(wrong)
    with pytest.raises(SpecMismatch, match="rows have|rows of 'm' have"):
        rows.inputs["y"] = 1
    with pytest.raises(SpecMismatch, match="memory that cannot be replaced"):
        rows.outputs["y"] = np.zeros((3, 2), np.float32)


def test_more_rows_than_a_batch_are_several_tickets_and_the_oldest_version_counts():
    engine = Engine(versions=[9, 4, 6])
    lane, rows = made(engine, n=5, batch=2)
    rows.inputs["x"] = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert rows.infer(version=3) == rows.version == 4
    assert engine.sent == [(2, 2, 3), (4, 2, 3), (6, 1, 3)] and not lane.in_flight
    assert (rows.outputs["y"] == np.arange(10).reshape(5, 2) * 10).all()
    engine.sent.clear()
    assert rows.infer(2) == 7 and engine.sent == [(2, 2, 0)] and len(engine.seconds) == 1, "one batch holds them"


def test_rows_that_failed_are_named_by_their_place_among_all():
    engine = Engine(Code.ROW_FAILED, versions=[3])
    lane, rows = made(engine)
    lane.columns.refuse(2, 3, {1: "bad"})
    with pytest.raises(RowFailed, match="1 of 3 rows of 'm' failed: row 1: bad") as failed:
        rows.infer()
    assert failed.value.errors == {1: "bad"} and failed.value.version == rows.version == 3
    engine.codes, engine.versions = [Code.OK, Code.ROW_FAILED, Code.ROW_FAILED], [9, 5, 6]
    lane, rows = made(engine, n=5, batch=2)
    lane.columns.refuse(2, 5, {0: "of an earlier request", 3: "bad", 4: "worse"})
    with pytest.raises(RowFailed, match="2 of 5 rows of 'm' failed: row 3: bad; row 4: worse") as failed:
        rows.infer()
    assert failed.value.errors == {3: "bad", 4: "worse"} and failed.value.version == 5


@pytest.mark.parametrize("batch", [1, 8])
def test_an_error_of_any_ticket_is_raised(batch):
    engine = Engine(*[Code.OK] * (2 if batch == 1 else 0), Code.MODEL_FAILED)
    lane, rows = made(engine, batch=batch)
    with pytest.raises(ModelFailed, match="what it said"):
        rows.infer()
    assert rows.version == 0 and not lane.in_flight


def test_rows_that_an_engine_still_has_are_left_alone_until_it_has_answered():
    engine = Engine()
    lane, rows = made(engine)
    engine.late = True
    with pytest.raises(Timeout):
        rows.infer(2, timeout=0.02)
    for use in (lambda: rows.infer(timeout=0.02), lambda: rows.raw("x")):
        with pytest.raises(Busy, match="an engine still has an earlier request for these rows"):
            use()
    other = Rows(ModelLock("m", 2.0), lane, lane.take(2), 8)
    engine.late = False
    other.raw("x")[:] = 1
    assert lane.in_flight, "other rows do not ask for it"
    assert rows.raw("x").shape == (3, 2) and not lane.in_flight
    assert rows.infer() == 7


def test_released_rows_are_refused_and_free():
    lane, rows = made(Engine())
    inputs = rows.inputs["x"]
    assert lane.free == 5
    with rows:
        assert lane.free == 5
    assert lane.free == 8 and repr(rows) == "<Rows of 'm', 3 rows, released>"
    for use in (rows.infer, lambda: rows.raw("x"), lambda: rows.place("x", 0, 1), lambda: rows.row("y", 0)):
        with pytest.raises(Refused, match="these rows were released: call rows\\(\\) again"):
            use()
    with pytest.raises(Refused, match="these rows were released"):
        inputs[0] = 1
    assert not rows.inputs and not rows.outputs


def test_rows_of_a_lane_that_is_lost_are_released_with_the_reason():
    lane, rows = made(Engine())
    lane.gone = Refused("the server was restarted")
    with pytest.raises(Refused, match=r"no longer yours \(the server was restarted\): call rows\(\) again"):
        rows.infer()
    assert "released" in repr(rows)


def test_the_memory_of_an_input_is_a_plain_array_that_casts():
    lane, rows = made(Engine())
    raw = rows.raw("x")
    assert type(raw) is np.ndarray and raw.shape == (3, 2) and np.shares_memory(raw, lane.columns.inputs["x"])
    raw[:] = np.ones((3, 2), np.float64)
    assert lane.columns.inputs["x"].sum() == 6 and lane.columns.inputs["x"][2:5].sum() == 6
    with pytest.raises(SpecMismatch, match=r"rows of 'm' have \['x'\] here, 'y' came"):
        rows.raw("y")


def test_rows_of_variable_size_have_their_place_and_their_size():
    engine = Engine()
    lane, rows = made(engine, spec=SIZES)
    rows.place("x", 1, (3, 2))[:] = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows.place("t", 2, 3)[:] = np.frombuffer(b"abc", np.uint8)
    rows.place("x", 2, (4, 2))[:] = 1
    assert lane.columns.input_extents["x"].tolist()[2:5] == [[0], [3], [4]]
    assert lane.columns.input_extents["t"].tolist()[2:5] == [[0], [0], [3]]
    rows.infer()
    assert [rows.row("y", at).tolist() for at in range(2)] == [[], [[0, 10], [20, 30], [40, 50]]]
    assert rows.row("y", 2).shape == (4, 2) and np.shares_memory(rows.row("y", 1), lane.columns.outputs["y"])
    for shape in ((5, 2), (3, 3), 3, (-1, 2)):
        with pytest.raises(SpecMismatch, match="input 'x': row 1 of .* came, expected float32"):
            rows.place("x", 1, shape)
    for length in (-1, 5):
        with pytest.raises(SpecMismatch, match="input 't': row 1 of .* came, expected bytes"):
            rows.place("t", 1, length)
    with pytest.raises(SpecMismatch, match="input 'z': row 0 of .* came, expected"):
        rows.place("z", 0, ())
    assert lane.columns.input_extents["x"].tolist()[2:5] == [[0], [3], [4]], "what it was"
    for at in (-1, 3):
        for use in (lambda at=at: rows.place("x", at, (1, 2)), lambda at=at: rows.row("y", at)):
            with pytest.raises(ValueError, match=f"row={at}: expected a whole number from 0 to 2"):
                use()
    with pytest.raises(SpecMismatch, match="here, 'X' came; did you mean 'x'"):
        rows.place("X", 0, (1, 2))
    with pytest.raises(SpecMismatch, match=r"rows of 'm' have \['y'\] here, 'x' came"):
        rows.row("x", 0)
    for sizes in (5, -1):
        lane.columns.output_extents["y"][3] = sizes
        with pytest.raises(Refused, match="output 'y' came with sizes .*: float32"):
            rows.row("y", 1)
    rows.inputs["z"] = 3
    lane.columns.input_extents["x"][:], lane.columns.inputs["z"][:] = 1, 3
    rows.clear()
    assert lane.columns.input_extents["x"].tolist() == [[1], [1], [0], [0], [0], [1], [1], [1]]
    assert lane.columns.inputs["z"].tolist() == [3, 3, 0, 0, 0, 3, 3, 3] and not lane.columns.input_extents["t"].any()
