"""Rows that differ in size, rows that fail alone, and state that stays with its session: all in one process."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.client import ModelFailed, Refused, RowFailed, SessionLost, SpecMismatch
from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Code
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.inproc import InprocServer
from jurybox.server.models import RowErrors, ServedModel
from tests import open_models


@pytest.fixture
def served():
    servers = []

    def serve(model, rows=32, **settings):
        server = InprocServer({"m": model}, rows=128, **settings)
        servers.append(server)
        return server.model("m", rows=rows)

    serve.servers = servers
    yield serve
    for server in servers:
        server.close()


def images(rng, *sides):
    return [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in sides]


@pytest.mark.parametrize("collate", ["list", "pad"])
def test_images_of_any_size_are_answered_as_if_they_were_alone(served, collate):
    model = served(open_models.brightness(collate))
    pictures = images(np.random.default_rng(0), (4, 5), (9, 2), (1, 1), (4, 5), (16, 16))
    expected = [picture.mean() / 255 for picture in pictures]
    np.testing.assert_allclose(model.infer(pictures), expected, rtol=1e-5)
    np.testing.assert_allclose(model(pictures[1]), expected[1], rtol=1e-5)
    np.testing.assert_allclose(model.submit(pictures[:2]).result().outputs, expected[:2], rtol=1e-5)
    assert model.infer(np.stack([pictures[0]] * 3)).shape == (3,)


class Means(nn.Module):
    """The mean of each image; notes where a batch lies, and its shape."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, image, image_lengths=None):
        self.seen.append((tuple(image.shape), image.data_ptr()) if isinstance(image, torch.Tensor) else len(image))
        return torch.stack([one.float().mean() for one in image])


@pytest.mark.parametrize("collate", ["list", "pad"])
@pytest.mark.parametrize("side", [64, 63])
def test_images_that_fill_their_slots_are_not_copied(served, collate, side):
    means = Means()
    spec = TensorSpec("uint8", (-1, -1, 3), capacity=64 * 64 * 3)
    model = served(ServedModel(means, {"image": spec}, {"mean": TensorSpec("float32")}, collate=collate))
    pictures = images(np.random.default_rng(0), *[(side, side)] * 5)
    for several in (pictures, pictures[:1], pictures[2:4]):
        np.testing.assert_allclose(model.infer(several), [picture.mean() for picture in several], rtol=1e-5)
    arena = served.servers[0]._arenas["m"].inputs["image"]
    first, end = arena.ctypes.data, arena.ctypes.data + arena.nbytes
    if collate == "pad":
        inside = [first <= place < end for shape, place in means.seen if shape[1] == side]
        assert inside == [side == 64, True, side == 64]  # a single image is one run, whatever its size
    else:
        assert means.seen[-3:] == [5, 1, 2]


@pytest.mark.parametrize("shape", [(-1, 3), (3, -1), (-1,), (-1, -1)])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "bool"])
def test_rows_of_unlike_sizes_are_padded_with_zeros_behind_each(served, shape, dtype):
    class Sums(nn.Module):
        def forward(self, x, x_lengths):
            return x.reshape(len(x), -1).sum(dim=1).float(), x_lengths.reshape(len(x), -1).float().prod(dim=1)

    rng = np.random.default_rng(0)
    spec, number = TensorSpec(dtype, shape, capacity=36), TensorSpec("float32")
    model = ServedModel(Sums(), {"x": spec}, {"sum": number, "size": number}, collate="pad", max_padding=0.99)
    model = served(model)
    for sizes in ([4, 2, 3, 1], [4, 4, 4], [1], [2, 1, 4, 3, 2]):  # what one batch leaves is not in the next
        wide = [tuple(size if side < 0 else side for side in shape) for size in sizes]
        rows = [rng.integers(1, 2 if dtype == "bool" else 100, one).astype(dtype) for one in wide]
        answers = model.infer(rows)
        np.testing.assert_allclose(answers["sum"], [row.sum() for row in rows])
        np.testing.assert_allclose(answers["size"], [size ** shape.count(-1) for size in sizes])


def test_text_goes_in_as_str_or_bytes_and_comes_out_as_bytes(served):
    model = served(open_models.shout())
    assert model.infer(["größer", b"abc", ""]) == ["GRÖSSER".encode(), b"ABC", b""]
    assert model("one") == b"ONE"


def test_a_prompt_is_sent_with_a_picture(served):
    model = served(open_models.prompted())
    pictures = images(np.random.default_rng(1), (3, 3), (5, 4))
    answers = model.infer({"image": pictures, "prompt": ["a", "four"]})
    np.testing.assert_array_equal(answers["size"], [9, 20])
    np.testing.assert_array_equal(answers["words"], [1, 4])
    assert model({"image": pictures[0], "prompt": "xy"})["words"] == 2


def test_masks_of_their_pictures_sizes_come_back(served):
    model = served(open_models.threshold())
    pictures = images(np.random.default_rng(2), (3, 7), (2, 2), (8, 1))
    masks = model.infer(pictures)
    assert [mask.shape for mask in masks] == [(3, 7), (2, 2), (8, 1)]
    for mask, picture in zip(masks, pictures, strict=True):
        np.testing.assert_array_equal(mask, picture.mean(axis=2) > 127)


def test_invalid_input_is_refused_with_the_reason(served):
    model = served(open_models.brightness("list"))
    with pytest.raises(SpecMismatch, match=r"row 1: expected uint8\[-1, -1, 3\] up to 3072, came shape \(40, 40, 3\)"):
        model.infer([np.zeros((2, 2, 3), np.uint8), np.zeros((40, 40, 3), np.uint8)])
    with pytest.raises(SpecMismatch, match="expected uint8, came float64"):
        model(np.zeros((2, 2, 3)))
    with pytest.raises(SpecMismatch, match="for a single row call the model itself"):
        served(open_models.shout()).infer("abc")
    with pytest.raises(SpecMismatch, match="differ in their numbers of rows: image 1, prompt 2"):
        served(open_models.prompted()).infer({"image": [np.zeros((2, 2, 3), np.uint8)], "prompt": ["a", "b"]})


def test_extents_that_lie_fail_their_own_row_and_no_other(served):
    model = served(open_models.brightness("pad"))
    with model.rows(3) as rows:
        for i in range(3):
            rows.place("image", i, (2, 2, 3))[:] = 51
        for lie in [(-1, 2), (1 << 40, 1 << 40), (33, 32), (np.iinfo(np.int64).min, -1)]:
            model.requests.lane.columns.input_extents["image"][rows.first + 1] = lie
            with pytest.raises(RowFailed) as failed:
                rows.infer()
            assert list(failed.value.errors) == [1] and "came with sizes" in failed.value.reason
            np.testing.assert_allclose(rows.outputs["score"][[0, 2]], 0.2, rtol=1e-5)


def test_a_row_that_fails_does_not_take_its_neighbours_with_it(served):
    model = served(open_models.picky())
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    with pytest.raises(RowFailed, match="2 of 8 rows of 'm' failed: row 3: three; row 6: six") as failed:
        model.infer(x)
    assert failed.value.errors == {3: "three", 6: "six"} and (failed.value.index, failed.value.reason) == (3, "three")
    np.testing.assert_array_equal(failed.value.outputs[[0, 1, 2, 4, 5, 7]], 2 * x[[0, 1, 2, 4, 5, 7], 0])
    tickets = [model.submit(x[i : i + 2]) for i in (0, 2, 4)]
    np.testing.assert_array_equal(tickets[0].result().outputs, [0, 2])
    with pytest.raises(RowFailed) as failed:
        tickets[1].result()
    assert failed.value.errors == {1: "three"}
    np.testing.assert_array_equal(tickets[2].result().outputs, [8, 10])
    with pytest.raises(RowFailed, match="three"):
        model(x[3])
    assert model(x[4]) == 8


def test_rows_that_fail_in_pieces_keep_their_numbers(served):
    model = served(open_models.picky(), max_batch=4)
    with pytest.raises(RowFailed) as failed:
        model.infer(np.array([[1], [3], [2], [2], [2], [6], [3]], np.float32))
    assert failed.value.errors == {1: "three", 5: "six", 6: "three"}
    assert failed.value.outputs[2] == 4


def test_a_value_that_is_not_finite_is_an_error_if_finite_values_are_promised(served):
    model = served(open_models.reciprocal())
    with pytest.raises(RowFailed) as failed:
        model.infer(np.array([[1], [0], [2]], np.float32))
    assert failed.value.errors == {1: "output 'y' is not finite"}
    np.testing.assert_array_equal(failed.value.outputs[[0, 2]], [1, 0.5])


class Normalised(nn.Module):
    """The means of images that are normalised in place, as torchvision's transforms can do."""

    def forward(self, image, image_lengths=None):
        if isinstance(image, list):
            return torch.stack([one.sub_(0.5).div_(0.25).mean() for one in image])
        return image.sub_(0.5).div_(0.25).mean(dim=(1, 2, 3))


@pytest.mark.parametrize("sizes", [(3, 64, 64), (3, -1, -1)])
@pytest.mark.parametrize("collate", ["list", "pad"])
def test_a_module_that_writes_to_its_inputs_does_not_change_the_clients_rows(served, sizes, collate):
    image = TensorSpec("float32", sizes, capacity=3 * 64 * 64 if -1 in sizes else 0)
    model = served(ServedModel(Normalised(), {"image": image}, {"y": TensorSpec("float32")}, collate=collate))
    served.servers[0].engine.slots[0].served.warm_up()
    with model.rows(2) as rows:
        for row in range(2):
            if -1 in sizes:
                rows.place("image", row, (3, 64, 64))[:] = 1
            else:
                rows.inputs["image"][row] = 1
        for _ in range(3):
            rows.infer()
            assert rows.outputs["y"].tolist() == [2, 2]


class Thousandfold(nn.Module):
    """1000 times each row, which may differ in size."""

    def forward(self, x):
        return [1000 * row for row in x] if isinstance(x, list) else 1000 * x


def test_a_value_that_the_outputs_dtype_cannot_hold_is_not_finite(served):
    class Half(Thousandfold):
        def forward(self, x):
            return super().forward(x).half()

    half = TensorSpec("float16", finite=True)
    model = served(ServedModel(Half(), {"x": TensorSpec("float32")}, {"y": half}))
    with pytest.raises(RowFailed) as failed:
        model.infer(np.array([1, 100], np.float32))
    assert failed.value.errors == {1: "output 'y' is not finite"}


def test_finite_values_of_rows_that_differ_in_size_may_be_promised(served):
    rows, finite = TensorSpec("float32", (-1,), capacity=8), TensorSpec("float32", (-1,), capacity=8, finite=True)
    model = served(ServedModel(Thousandfold(), {"x": rows}, {"y": finite}))
    np.testing.assert_array_equal(model.infer([np.ones(3, np.float32)])[0], [1000] * 3)
    with pytest.raises(RowFailed) as failed:
        model.infer([np.ones(2, np.float32), np.full(1, 3e38, np.float32)])
    assert failed.value.errors == {1: "output 'y' is not finite"}


class Accumulator(nn.Module):
    """Writes to its state in place."""

    def forward(self, x, total):
        total += x + 1
        return total.clone(), total


@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_module_that_writes_to_its_state_does_not_change_the_initial_one(max_batch):
    number = TensorSpec("float32")
    model = ServedModel(Accumulator(), {"x": number}, {"y": number}, state={"total": number})
    served = OpenServed("m", model, Columns.here(model.spec("m"), 8), max_batch)
    served.warm_up(None)
    assert served._states.initial(2)["total"].tolist() == [0, 0]


def test_a_module_is_called_by_position_if_its_parameters_have_other_names(served):
    net = nn.Sequential(nn.Linear(3, 2))
    model = served(ServedModel(net, {"observation": TensorSpec("float32", (3,))}, {"y": TensorSpec("float32", (2,))}))
    x = np.ones((2, 3), np.float32)
    with torch.inference_mode():
        np.testing.assert_allclose(model.infer(x), net(torch.ones(2, 3)), rtol=1e-6)


def test_long_rows_are_computed_apart_so_that_a_batch_stays_within_its_bound(served):
    seen = []
    model = served(open_models.recorded(seen, max_elements=100))
    model.infer(["x" * n for n in (10, 90, 5, 60, 8, 90)])
    assert all(rows * longest <= 100 for rows, longest in seen), seen
    assert sum(rows for rows, _ in seen) == 6
    seen.clear()
    assert model.infer(["x" * 10] * 11).tolist() == [10] * 11
    assert seen == [(10, 10), (1, 10)], "as many as there is room for"
    seen.clear()
    assert model.infer(["x" * n for n in [9] + [10] * 9]).tolist() == [9] + [10] * 9
    assert seen == [(10, 10)]


@pytest.mark.parametrize(("most", "forwards"), [(0, [4]), (20, [4]), (19, [3, 1])])
def test_rows_that_a_module_takes_as_a_list_are_computed_together_up_to_its_bound(served, most, forwards):
    seen = []

    class Sums(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return torch.stack([row.sum() for row in x])

    inputs = {"x": TensorSpec("float32", (-1,), capacity=16)}
    model = served(
        ServedModel(Sums(), inputs, {"y": TensorSpec("float32")}, collate="list", max_elements=most), max_batch=8
    )
    seen.clear()
    assert model.infer([np.ones(n, np.float32) for n in (2, 10, 3, 5)]).tolist() == [2, 10, 3, 5]
    assert sorted(seen) == sorted(forwards)


@pytest.mark.parametrize(("most", "forwards"), [(0, [4]), (80, [4]), (79, [3, 1]), (40, [2, 2]), (39, [1, 1, 1, 1])])
def test_the_inputs_of_a_forward_stay_within_its_bound_together(served, most, forwards):
    seen = []

    class Sums(nn.Module):
        def forward(self, x, x_lengths, y, y_lengths):
            seen.append(len(x))
            return x.sum(1) + y.sum(1)

    open_row = TensorSpec("float32", (-1,), capacity=16)
    spec = ServedModel(
        Sums(), {"x": open_row, "y": open_row}, {"z": TensorSpec("float32")}, collate="pad", max_elements=most
    )
    model = served(spec, max_batch=8)
    seen.clear()
    rows = [np.ones(10, np.float32)] * 4
    assert model.infer({"x": rows, "y": rows}).tolist() == [20] * 4
    assert seen == forwards


def test_tickets_of_long_rows_wait_for_a_later_batch(served):
    model = served(open_models.recorded([], max_elements=100))
    tickets = [model.submit(["x" * 40]) for _ in range(5)]
    assert [ticket.result().outputs.item() for ticket in tickets] == [40] * 5
    record = served.servers[0].engine.scoreboard.counters[0, 0]
    assert (record["batches"], record["rows"]) == (3, 5)


def test_one_client_with_long_rows_does_not_starve_those_with_short_ones():
    seen = []
    with InprocServer({"m": open_models.recorded(seen, max_elements=400)}, rows=128) as server:
        greedy, modest = server.model("m", rows=32), [server.model("m", rows=2) for _ in range(4)]
        longs = [greedy.submit(["x" * 400]) for _ in range(20)]
        shorts = [model.submit(["y" * 4]) for model in modest]
        for ticket in shorts:
            ticket.result()
        assert (4, 4) in seen[:2], seen  # after the first of the long ones, at the latest
        assert [ticket.result().outputs.item() for ticket in longs] == [400] * 20


def test_padding_stays_below_its_share(served):
    seen = []
    model = served(open_models.recorded(seen, max_padding=0.25))
    lengths = [1, 2, 3, 50, 55, 60, 400, 390]
    model.infer(["x" * n for n in lengths])
    assert 1 < len(seen) < len(lengths)


def test_rows_of_one_size_and_unlike_shapes_are_not_padded_to_each_other(served):
    """Pictures of 1 x 300 and of 300 x 1 would make 90,000 pixels each; larger ones, more than there is memory."""
    seen = []

    class Seen(nn.Module):
        def forward(self, image, image_lengths):
            seen.append((image[..., 0].numel(), int(image_lengths.prod(dim=1).sum())))
            return image_lengths.prod(dim=1).float()

    spec = TensorSpec("uint8", (-1, -1, 3), capacity=3072)
    model = served(ServedModel(Seen(), {"image": spec}, {"score": TensorSpec("float32")}, collate="pad"))
    seen.clear()
    sides = [(1, 300), (300, 1), (300, 1), (1, 300), (20, 15), (15, 20), (0, 300), (300, 0)]
    scores = model.infer([np.zeros((*side, 3), np.uint8) for side in sides])
    assert scores.tolist() == [h * w for h, w in sides]
    assert all(padded <= 2 * max(real, 301) for padded, real in seen), seen
    assert len(seen) < len(sides)


@pytest.mark.parametrize("lie", [(1 << 40, 0), (0, 1025), (1, 1025)])
def test_a_size_of_nothing_does_not_excuse_the_other(served, lie):
    model = served(open_models.brightness("pad"))
    with model.rows(2) as rows:
        for i in range(2):
            rows.place("image", i, (2, 2, 3))[:] = 51
        model.requests.lane.columns.input_extents["image"][rows.first + 1] = lie
        with pytest.raises(RowFailed) as failed:
            rows.infer()
        assert list(failed.value.errors) == [1] and "came with sizes" in failed.value.reason
        with pytest.raises(SpecMismatch):
            rows.place("image", 0, (*lie, 3))


def test_sessions_keep_their_state_apart(served):
    model = served(open_models.running_sum())
    with model.sessions(3) as sessions:
        x = np.array([[1], [10], [100]], np.float32)
        np.testing.assert_array_equal(sessions.infer(x), [1, 10, 100])
        np.testing.assert_array_equal(sessions.infer(x), [2, 20, 200])
        np.testing.assert_array_equal(sessions.infer(x[:2], session=[2, 0]), [201, 12])
        np.testing.assert_array_equal(sessions.infer(x, reset=[False, True, False]), [13, 10, 301])
        state = sessions.get_state()
        np.testing.assert_array_equal(state["total"], [13, 10, 301])
        sessions.set_state({"total": np.array([7.0], np.float32)}, session=[1])
        np.testing.assert_array_equal(sessions.infer(x[:1], session=[1]), [8])


class Given(nn.Module):
    """Answers with its state; the input is the next one."""

    def forward(self, x, last):
        return last, x


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_a_state_may_have_any_dtype_of_whole_numbers(served, dtype):
    spec, largest = TensorSpec(dtype), np.iinfo(dtype).max
    start = torch.tensor(np.array(largest, dtype))
    model = served(ServedModel(Given(), {"x": spec}, {"y": spec}, state={"last": spec}, initial_state={"last": start}))
    x = np.array([largest - 1, 5], dtype)
    with model.sessions(2) as sessions:
        assert sessions.infer(x).tolist() == [largest, largest]
        assert sessions.infer(x, reset=[False, True]).tolist() == [largest - 1, largest]
        sessions.set_state({"last": x[::-1].copy()})
        assert sessions.get_state()["last"].tolist() == [5, largest - 1]
        tickets = [sessions.submit(x[:1], session=[i]) for i in (1, 1)]  # one by one
        assert [ticket.result().outputs.item() for ticket in tickets] == [largest - 1, largest - 1]


def test_a_model_with_state_wants_sessions(served):
    model = served(open_models.running_sum())
    with pytest.raises(Refused, match=r"keeps state \(total\): open sessions"):
        model.infer(np.zeros((1, 1), np.float32))
    with pytest.raises(Refused, match="keeps no state"):
        served(open_models.shout()).sessions(1)


def test_requests_of_a_session_in_flight_are_computed_in_order(served):
    model = served(open_models.running_sum())
    x = np.ones((2, 1), np.float32)
    with model.sessions(8) as sessions:
        tickets = [sessions.submit(x, session=[3, 5]) for _ in range(4)]
        assert [ticket.result().outputs.tolist() for ticket in tickets] == [[1, 1], [2, 2], [3, 3], [4, 4]]


def test_a_request_that_fails_leaves_the_state_and_a_later_one_in_flight_is_not_computed(served):
    model = served(open_models.running_sum())
    one = np.ones((1, 1), np.float32)
    with model.sessions(4) as sessions:
        sessions.infer(np.ones((4, 1), np.float32))
        with pytest.raises(ModelFailed):
            sessions.infer(-one, session=[2])
        np.testing.assert_array_equal(sessions.infer(one, session=[2]), [2])
        first, second = sessions.submit(-one, session=[1]), sessions.submit(one, session=[1])
        with pytest.raises(ModelFailed):
            first.result()
        with pytest.raises(SessionLost):
            second.result()
        with pytest.raises(SessionLost) as lost:
            sessions.infer(np.ones((2, 1), np.float32), session=[0, 1])
        assert lost.value.sessions == [1]
        np.testing.assert_array_equal(
            sessions.infer(np.ones((2, 1), np.float32), session=[0, 1], reset=[False, True]), [2, 1]
        )


def running_totals(most_long=8):
    """A model with a total for each session, which fails for a negative number, and for more rows of 64 than these."""

    class Sums(nn.Module):
        def forward(self, x, x_lengths, total):
            if len(x) > most_long and x.shape[1] == 64:
                raise torch.OutOfMemoryError("out of memory")
            if bool((x < 0).any()):
                raise ValueError("negative")
            total = total + x.sum(dim=1)
            return total, total

    number = TensorSpec("float32")
    inputs = {"x": TensorSpec("float32", (-1,), capacity=64)}
    return ServedModel(Sums(), inputs, {"y": number}, state={"total": number}, collate="pad", max_padding=0.0)


def test_sessions_that_stepped_in_a_request_that_failed_are_lost_and_named(served):
    model = served(running_totals())
    x = [np.ones(n, np.float32) for n in (1, 64, 4)]
    with model.sessions(3) as sessions:
        assert sessions.infer(x).tolist() == [1, 64, 4]
        with pytest.raises(ModelFailed, match="negative"):
            sessions.infer([x[0], -x[1], x[2]])
        with pytest.raises(SessionLost) as lost:
            sessions.infer(x)
        assert lost.value.sessions == [0, 2]
        assert sessions.infer(x, reset=[True, False, True]).tolist() == [1, 128, 4]


def test_of_requests_that_have_stepped_together_only_the_one_that_fails_later_is_failed(served):
    """Their short rows are computed first, so that neither can be computed again; the long ones are then divided."""
    model = served(running_totals(most_long=1))
    beats = []
    served.servers[0].engine.slots[0].served.beat = lambda: beats.append(1)
    short, long = np.ones(1, np.float32), np.ones(64, np.float32)
    with model.sessions(6) as sessions:
        tickets = [sessions.submit([short, sign * long], session=[i, i + 1]) for i, sign in ((0, 1), (2, -1), (4, 1))]
        assert [tickets[i].result().outputs.tolist() for i in (0, 2)] == [[1, 64], [1, 64]]
        with pytest.raises(ModelFailed, match="negative"):
            tickets[1].result()
        assert len(beats) == 4, "the engine shows that it lives before each of these forwards"
        assert sessions.infer([short] * 4, session=[0, 1, 4, 5]).tolist() == [2, 65, 2, 65]


def test_rows_of_unlike_sizes_that_are_too_many_for_the_memory_are_computed_in_smaller_batches_from_then_on(served):
    class Hungry(nn.Module):
        room, seen = 64, []

        def forward(self, x):
            self.seen.append(len(x))
            if len(x) > self.room:
                raise torch.OutOfMemoryError("out of memory")
            return torch.stack([row.sum() for row in x])

    hungry, inputs = Hungry(), {"x": TensorSpec("float32", (-1,), capacity=8)}
    model = served(ServedModel(hungry, inputs, {"y": TensorSpec("float32")}, collate="list"))
    model.infer([np.ones(1, np.float32)])
    hungry.room = 2

    def batches():
        hungry.seen.clear()
        tickets = [model.submit([np.ones(n, np.float32)]) for n in range(1, 9)]
        assert [ticket.result().outputs.item() for ticket in tickets] == list(range(1, 9))
        return hungry.seen

    assert batches()[0] == 8
    assert batches() == [2, 2, 2, 2]


def test_a_batch_whose_later_rows_are_too_many_for_the_memory_loses_no_session(served):
    class Hungry(open_models.RunningSum):
        """Has memory for one row of 9 or more, and for none of 99."""

        def forward(self, x, total):
            if int((x >= 9).sum()) > 1 or bool((x == 99).any()):
                raise torch.OutOfMemoryError("out of memory")
            total = total + x[:, 0]
            return total, total

    number = TensorSpec("float32")
    model = served(ServedModel(Hungry(), {"x": TensorSpec("float32", (1,))}, {"y": number}, state={"total": number}))
    one = np.ones((1, 1), np.float32)
    with model.sessions(8) as sessions:
        sessions.infer(np.ones((8, 1), np.float32))
        tickets = [sessions.submit(np.ones((3, 1), np.float32), session=range(3))]
        # Of the same sessions, so that they are computed after the first request's step.
        tickets += [sessions.submit(x * one, session=[i]) for i, x in enumerate((9, 10, 99))]
        assert tickets[0].result().outputs.tolist() == [2, 2, 2]
        assert [ticket.result().outputs.item() for ticket in tickets[1:3]] == [11, 12]
        with pytest.raises(ModelFailed, match="out of memory"):
            tickets[3].result()
        answers = sessions.infer(np.ones((3, 1), np.float32), session=[0, 1, 3])
        np.testing.assert_array_equal(answers, [12, 13, 2])


def test_no_client_gets_the_state_of_the_rows_earlier_sessions(served):
    model = served(open_models.running_sum())
    with model.sessions(4) as sessions:
        sessions.infer(np.full((4, 1), 5, np.float32))
    with model.sessions(4) as sessions:
        np.testing.assert_array_equal(sessions.infer(np.ones((4, 1), np.float32)), [1, 1, 1, 1])
        records = sessions._requests.lane.columns.sessions
        sessions._book.next[:] = 7  # a client that claims steps it never took
        with pytest.raises(SessionLost):
            sessions.infer(np.ones((4, 1), np.float32))
        assert records is not None


def test_the_same_session_twice_in_a_request_is_refused(served):
    with served(open_models.running_sum()).sessions(2) as sessions, pytest.raises(SpecMismatch, match="twice"):
        sessions.infer(np.zeros((2, 1), np.float32), session=[1, 1])


def posted(lane, *rows):
    """Send rows (slot, step, x) as one ticket of a lane, as another client could."""
    first = lane.take(len(rows)).first
    for i, (slot, step, x) in enumerate(rows, start=first):
        lane.columns.sessions[i] = (slot, step, 0, b"")
        lane.columns.inputs["x"][i] = x
    return lane.submit(first, len(rows), time.monotonic_ns() + 60_000_000_000)


def answered(lane, *tickets):
    """Code, and the outputs, of each."""
    answers = [lane.wait(ticket, time.monotonic_ns() + 60_000_000_000) for ticket in tickets]
    places = [slice(ticket.first, ticket.first + ticket.rows) for ticket in tickets]
    return [
        (answer.code, answer.message, lane.columns.outputs["y"][at].tolist())
        for answer, at in zip(answers, places, strict=True)
    ]


@pytest.mark.parametrize("steps", [(1, 2), (1, 1), (0, 0), (1, 0), (0, 1)])
def test_the_same_session_twice_in_a_request_is_refused_and_makes_no_step(served, steps):
    model = served(open_models.running_sum())
    with model.sessions(4) as sessions:
        lane = sessions._requests.lane
        sessions.infer(np.ones((4, 1), np.float32))
        sessions._requests.give_up_kept()  # which it keeps for the next call
        ((code, message, _),) = answered(lane, posted(lane, (1, 1, 5), (2, steps[0], 5), (2, steps[1], 5)))
        assert code == Code.SPEC_MISMATCH and "session 2 stands in this request twice" in message
        np.testing.assert_array_equal(sessions.infer(np.ones((4, 1), np.float32)), [2, 2, 2, 2])


def test_a_session_is_not_computed_if_an_earlier_request_was_refused_for_another_one(served):
    """The later request of session 1 would be answered from a state that lacks the earlier one's step."""
    model = served(open_models.running_sum())
    with model.sessions(8) as sessions:
        lane = sessions._requests.lane
        sessions.infer(np.ones((8, 1), np.float32))
        sessions._requests.give_up_kept()  # which it keeps for the next call
        answers = answered(
            lane, posted(lane, (0, 7, 1), (1, 1, 1)), posted(lane, (1, 2, 1), (2, 1, 1)), posted(lane, (3, 1, 1))
        )
        assert [code for code, _, _ in answers] == [Code.SESSION_LOST, Code.SESSION_LOST, Code.OK]
        ((code, _, values),) = answered(lane, posted(lane, (0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1)))
        assert (code, values) == (Code.OK, [2, 2, 2, 3])


def test_steps_of_a_session_do_not_come_round_to_its_beginning(served):
    model = served(open_models.running_sum())
    with model.sessions(1) as sessions:
        lane = sessions._requests.lane
        sessions.infer(np.ones((1, 1), np.float32))
        sessions._requests.give_up_kept()  # which it keeps for the next call
        ((code, _, _),) = answered(lane, posted(lane, (0, 0xFFFFFFFF, 1)))
        assert code == Code.SESSION_LOST
        ((code, _, values),) = answered(lane, posted(lane, (0, 1, 1)))
        assert (code, values) == (Code.OK, [2])


@pytest.mark.parametrize("away", [True, False])
def test_states_move_with_a_model_that_sleeps_if_its_device_has_its_own_memory(served, away):
    model = served(open_models.running_sum())
    computed = served.servers[0].engine.slots[0].served
    computed._away = away
    with model.sessions(2) as sessions:
        assert sessions.infer(np.array([[1], [2]], np.float32)).tolist() == [1, 2]
        states = 128 * 4 if away else 0  # a number for each row of the arena; the module has no weights
        assert computed.sleep() == states and computed.wake() == states
        assert sessions.infer(np.ones((2, 1), np.float32)).tolist() == [2, 3]


def test_sessions_are_counted_until_their_client_returns_them(served):
    model = served(open_models.running_sum())
    engine = served.servers[0].engine
    sessions, others = model.sessions(4), model.sessions(3)
    sessions.infer(np.ones((4, 1), np.float32))
    assert engine.slots[0].served.sessions == 4
    others.infer(np.ones((2, 1), np.float32), session=[2, 0])
    assert engine.slots[0].served.sessions == 6
    lane = sessions._requests.lane._transport.lane
    lease = engine.scoreboard.lanes["lease"].item(lane)
    sessions.close()
    engine.retire(lane, lease)
    assert engine.slots[0].served.sessions == 2
    np.testing.assert_array_equal(others.infer(np.ones((3, 1), np.float32)), [2, 1, 2])


@pytest.mark.parametrize("whole", [True, False])
def test_failed_rows_keep_their_sessions_state_and_the_others_continue(served, whole):
    class Careful(open_models.RunningSum):
        def forward(self, x, total):
            bad = dict.fromkeys(torch.nonzero(x[:, 0] < 0).flatten().tolist(), "negative")
            total = total + x[:, 0]
            return RowErrors(bad, (total, total)) if bad else (total, total)

    number = TensorSpec("float32")
    model = served(ServedModel(Careful(), {"x": TensorSpec("float32", (1,))}, {"y": number}, state={"total": number}))
    with model.sessions(8) as sessions:
        sessions.infer(np.ones((3, 1), np.float32), session=range(3))
        x = np.array([[1], [-5], [1]], np.float32)
        ones = np.ones((2, 1), np.float32)
        if whole:
            with pytest.raises(RowFailed) as failed:
                sessions.infer(x, session=range(3))
            assert failed.value.errors == {1: "negative"}
            np.testing.assert_array_equal(sessions.infer(ones, session=[1, 2]), [2, 3])
        else:  # with another request of one of them in the same batch
            first, second = sessions.submit(x, session=range(3)), sessions.submit(ones[:1], session=[2])
            with pytest.raises(RowFailed):
                first.result()
            assert second.result().outputs.item() == 3
            np.testing.assert_array_equal(sessions.infer(ones, session=[0, 2]), [3, 4])


def test_a_failed_row_among_rows_of_unlike_sizes_keeps_its_sessions_state(served):
    class Careful(nn.Module):
        def forward(self, x, x_lengths, total):
            bad = dict.fromkeys(torch.nonzero(x[:, 0] < 0).flatten().tolist(), "negative")
            total = total + x.sum(dim=1)
            return RowErrors(bad, (total, total))

    number, inputs = TensorSpec("float32"), {"x": TensorSpec("float32", (-1,), capacity=4)}
    careful = ServedModel(Careful(), inputs, {"y": number}, state={"total": number}, collate="pad", max_padding=0.9)
    with served(careful).sessions(3) as sessions:
        x = [np.ones(n, np.float32) for n in (1, 2, 3)]
        assert sessions.infer(x).tolist() == [1, 2, 3]
        with pytest.raises(RowFailed) as failed:
            sessions.infer([x[0], -x[1], x[2]])
        assert failed.value.errors == {1: "negative"}
        assert sessions.infer(x).tolist() == [3, 4, 9]


@pytest.mark.parametrize("device", ["host", "elsewhere"])
def test_sessions_of_a_padded_batch_are_those_of_its_rows_and_the_padding_repeats_the_last(served, device):
    seen = []

    class Seen(open_models.RunningSum):
        def forward(self, x, total):
            seen.append(torch.stack((x[:, 0], total)).tolist())
            return super().forward(x, total)

    number, inputs = TensorSpec("float32"), {"x": TensorSpec("float32", (1,))}
    start = {"total": torch.tensor(100.0)}
    model = served(ServedModel(Seen(), inputs, {"y": number}, state={"total": number}, initial_state=start))
    computed = served.servers[0].engine.slots[0].served
    computed._states._host, computed.shapes = device == "host", (2, 5)
    x = np.array([[1], [2], [3]], np.float32)
    with model.sessions(3) as sessions:
        assert sessions.infer(x).tolist() == [101, 102, 103]
        assert sessions.infer(x, reset=[False, True, False]).tolist() == [102, 102, 106]
        assert sessions.infer(x[:1], session=[2]).tolist() == [107]
    assert seen == [
        [[1, 2, 3, 3, 3], [100, 100, 100, 100, 100]],
        [[1, 2, 3, 3, 3], [101, 100, 103, 103, 103]],
        [[1, 1], [106, 106]],
    ]


@pytest.mark.parametrize(
    ("given", "came"),
    [(lambda total: total[:, None], r"shape \[2, 1\]"), (lambda total: total[:1], r"shape \[1\]"), (list, "list")],
)
def test_a_state_that_does_not_match_the_spec_fails_the_batch_and_says_what_came(served, given, came):
    class Odd(nn.Module):
        def forward(self, x, total):
            return x[:, 0], given(total)

    number, inputs = TensorSpec("float32"), {"x": TensorSpec("float32", (1,))}
    model = served(ServedModel(Odd(), inputs, {"y": number}, state={"total": number}))
    with model.sessions(2) as sessions, pytest.raises(ModelFailed) as failed:
        sessions.infer(np.ones((2, 1), np.float32))
    assert re.search(rf"state 'total' came back as {came}, the spec promises \[2\]", str(failed.value))


@pytest.mark.parametrize(
    ("start", "said"),
    [(torch.zeros(2), r"has shape \[2\], the spec says \[\]"), (torch.tensor(0.1, dtype=torch.float64), "float64")],
)
def test_an_initial_state_that_the_spec_cannot_hold_is_refused(served, start, said):
    number, inputs = TensorSpec("float32"), {"x": TensorSpec("float32", (1,))}
    module, state = open_models.RunningSum(), {"total": number}
    with pytest.raises(ModelFailed, match=f"initial_state 'total' .*{said}"):
        served(ServedModel(module, inputs, {"y": number}, state=state, initial_state={"total": start}))
    served(ServedModel(module, inputs, {"y": number}, state=state, initial_state={"total": torch.tensor(0.5).double()}))


@pytest.mark.parametrize("device", ["host", "elsewhere"])
def test_an_lstm_answers_as_a_local_one_does_through_resets(served, device):
    policy = open_models.lstm()
    model = served(policy)
    served.servers[0].engine.slots[0].served._states._host = device == "host"  # as on a GPU, but for the copies
    rng = np.random.default_rng(3)
    hidden, cell = torch.zeros(6, 16), torch.zeros(6, 16)
    with model.sessions(6) as sessions, torch.inference_mode():
        for _ in range(50):
            x = rng.standard_normal((6, 4)).astype(np.float32)
            reset = rng.random(6) < 0.1
            answers = sessions.infer(x, reset=reset)
            hidden[torch.from_numpy(reset)], cell[torch.from_numpy(reset)] = 0, 0
            logits, hidden, cell = policy.module(torch.from_numpy(x), hidden, cell)
            np.testing.assert_allclose(answers, logits, atol=1e-6)


def test_row_errors_may_be_given_by_any_model():
    assert RowErrors({1: "x"}, ()).errors == {1: "x"}
