"""A served model, batch by batch as in an engine: what a batch leaves for the next, and which shapes fit."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from jurybox import native
from jurybox.client import ModelFailed
from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.engine.served import Served
from jurybox.server.models import RowErrors, ServedModel

NUMBER = TensorSpec("float32", ())


def asked(model, max_batch=8, shapes=()):
    """A served model, and a call that computes rows (n, ...) as one batch of one ticket: (outcome, outputs)."""
    spec = model.spec("m")
    columns = Columns.here(spec, 32)
    if spec.open:
        served = OpenServed("m", model, columns, max_batch, shapes=shapes)
    else:
        served = Served("m", model, columns.inputs, columns.outputs, max_batch, columns=columns, shapes=shapes)
    ticket = np.zeros(1, TICKET)

    def ask(rows):
        for name, column in columns.inputs.items():
            column[: len(rows)] = rows
            if name in columns.input_extents:
                columns.input_extents[name][: len(rows)] = rows.shape[1]
        ticket["rows"] = len(rows)
        with torch.inference_mode():
            outcome = served.run(ticket, len(rows))
        return outcome, {name: column[: len(rows)].copy() for name, column in columns.outputs.items()}

    return served, ask


@pytest.mark.parametrize("spec", [TensorSpec("float32", (2,)), TensorSpec("float32", (-1,), capacity=2)], ids=str)
def test_errors_of_a_failed_batch_are_not_reported_for_the_next(spec):
    class Short(nn.Module):
        def forward(self, x, x_lengths=None):
            if bool((x < 0).any()):
                return RowErrors({0: "negative"}, x[:-1, 0])  # and an output that is too short
            return x[:, 0]

    _, ask = asked(ServedModel(Short(), {"x": spec}, {"y": NUMBER}, collate="pad"))
    with contextlib.suppress(ModelFailed):
        assert ask(np.full((3, 2), -1, np.float32))[0].errors
    outcome, outputs = ask(np.full((3, 2), 7, np.float32))
    assert outcome is None
    np.testing.assert_array_equal(outputs["y"], [7, 7, 7])


def test_padding_is_never_a_row_that_the_model_cannot_bear():
    """Behind three rows of eight a row of the batch before was computed once more, and failed this one."""

    class Strict(nn.Module):
        def forward(self, x):
            if bool((x < 0).any()):
                raise ValueError("negative")
            return x[:, 0]

    served, ask = asked(ServedModel(Strict(), {"x": TensorSpec("float32", (2,))}, {"y": NUMBER}), shapes=(8,))
    with pytest.raises(ValueError, match="negative"):
        ask(np.array([[1, 1]] * 3 + [[-1, -1]] * 5, np.float32))
    outcome, outputs = ask(np.full((3, 2), 7, np.float32))
    assert outcome is None
    np.testing.assert_array_equal(outputs["y"], [7, 7, 7])


@pytest.mark.parametrize("example", [None, lambda rows: {"x": np.full((rows, 2), 3, np.float32)}])
def test_a_model_is_tried_with_the_smallest_and_the_largest_batch(example):
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append((len(x), float(x.sum())))
            return x[:, 0]

    served, _ = asked(ServedModel(Watched(), {"x": TensorSpec("float32", (2,))}, {"y": NUMBER}))
    served.warm_up(example)
    assert seen == [(rows, rows * 6.0 if example else 0.0) for rows in (1, 8)]


@pytest.mark.parametrize("spec", [TensorSpec("float32", (2,)), TensorSpec("float32", (-1,), capacity=2)], ids=str)
def test_outputs_that_do_not_match_the_spec_are_noticed_when_a_model_is_tried(spec):
    class Wide(nn.Module):
        def forward(self, x, x_lengths=None):
            return torch.zeros(len(x), 3)

    served, _ = asked(ServedModel(Wide(), {"x": spec}, {"y": NUMBER}, collate="pad"))
    with pytest.raises(ModelFailed, match="'y'"):
        served.warm_up()


class ByShape(nn.Module):
    """Answers as libraries do: a row's last bits are others in small batches, but of zeros they are the same."""

    def __init__(self, table=0):
        super().__init__()
        self.table = nn.Embedding(table, 1) if table else None

    def forward(self, x):
        rows = x.reshape(len(x), -1)
        if self.table is not None:
            rows = self.table(rows.long())[..., 0]
        return rows.float().sum(dim=1) * (1.0 if len(x) > 2 else 1.0 + 2e-7)


def agreed(module, dtype, example=None, published=False):
    model = ServedModel(module, {"x": TensorSpec(dtype, (3,))}, {"y": NUMBER}, example=example)
    served, _ = asked(model, shapes=(1, 2, 4, 8))
    served.published = published
    served.warm_up(example)
    return served.shapes


@pytest.mark.parametrize("dtype", ["float32", "uint8", "bool"])
def test_shapes_are_compared_on_distinct_rows(dtype):
    assert agreed(ByShape(), dtype) == (4, 8)


def test_shapes_are_compared_with_other_weights_if_weights_are_published():
    class Head(ByShape):
        """Answers zero until it is trained."""

        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.zeros(3, 1)), nn.Parameter(torch.ones(1))
            self.register_buffer("variance", torch.ones(1).expand(3))

        def forward(self, x):
            if bool((self.variance < 0).any()):
                raise ValueError("no variance")
            return (super().forward(x @ self.weight)) * self.scale

    head = Head()
    places = [value.data_ptr() for value in head.state_dict().values()]
    assert agreed(head, "float32") == (1, 2, 4, 8)
    assert agreed(head, "float32", published=True) == (4, 8)
    assert [value.flatten().tolist() for value in head.state_dict().values()] == [[0, 0, 0], [1], [1, 1, 1]]
    assert [value.data_ptr() for value in head.state_dict().values()] == places


def test_a_linear_layer_over_bytes_answers_a_row_the_same_in_any_company():
    torch.manual_seed(0)

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(600, 17)

        def forward(self, x):
            return self.net(x.float() / 255)

    inputs, outputs = {"x": TensorSpec("uint8", (600,))}, {"y": TensorSpec("float32", (17,))}
    served, ask = asked(ServedModel(Linear(), inputs, outputs), shapes=(1, 2, 4, 8))
    served.warm_up()
    rows = np.random.default_rng(0).integers(0, 256, (8, 600)).astype(np.uint8)
    _, alone = ask(rows[:1])
    for company in range(2, 9):
        assert ask(rows[:company])[1]["y"][0].tobytes() == alone["y"][0].tobytes(), served.shapes


@pytest.mark.parametrize("spec", [TensorSpec("float32", (3,)), TensorSpec("float32", (-1,), capacity=3)], ids=str)
def test_rows_are_aligned_as_those_with_which_shapes_were_compared(spec):
    class Where(nn.Module):
        def forward(self, x, x_lengths=None):
            places.append(x.data_ptr() % 64)
            return x.sum(dim=1)

    places = []
    model = ServedModel(Where(), {"x": spec}, {"y": NUMBER}, collate="pad")
    _, ask = asked(model, shapes=() if spec.variable else (1, 2, 4, 8))
    for rows in range(1, 9):
        ask(np.ones((rows, 3), np.float32))
    assert places == [0] * 8


@pytest.mark.parametrize("collate", ["list", lambda rows: {"x": [row["x"] for row in rows]}], ids=["list", "callable"])
def test_a_module_that_pads_its_rows_itself_answers_each_as_if_it_were_alone(collate):
    class Padded(nn.Module):
        def forward(self, x):
            longest = max(map(len, x))
            return torch.tensor([float(row.sum()) * (1 + 1e-3 * (longest - len(row))) for row in x])

    model = ServedModel(Padded(), {"x": TensorSpec("float32", (-1,), capacity=9)}, {"y": NUMBER}, collate=collate)
    columns = Columns.here(model.spec("m"), 8)
    served = OpenServed("m", model, columns, 8, shapes=(1, 2, 4, 8))
    served.warm_up()
    columns.inputs["x"][:] = 1
    columns.input_extents["x"][:3] = [[3], [9], [5]]
    tickets = np.zeros(2, TICKET)
    tickets["rows"], tickets["first"] = [2, 1], [0, 2]
    with torch.inference_mode():
        assert served.run(tickets, 3) is None
    assert columns.outputs["y"][:3].tolist() == [3, 9, 5]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint16"])
def test_inputs_of_unseen_sizes_are_computed_in_one_shape(dtype):
    """Which of them a model takes is not known: they may be places in a table."""
    assert agreed(ByShape(), dtype) == (8,)


def test_an_example_shows_which_whole_numbers_a_model_takes():
    def example(n):
        return {"x": torch.arange(3 * n, dtype=torch.int64).reshape(n, 3) % 5}

    assert agreed(ByShape(table=5), "int64", example) == (4, 8)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_an_example_of_zeros_tells_nothing(dtype):
    expected = (4, 8) if dtype == "float32" else (8,)
    assert agreed(ByShape(), dtype, lambda n: {"x": torch.zeros((n, 3), dtype=getattr(torch, dtype))}) == expected


def test_a_model_that_cannot_bear_random_rows_is_computed_in_one_shape():
    assert agreed(ByShape(table=5), "uint8") == (8,)


@pytest.mark.parametrize(("rows", "in_place"), [(1, False), (7, False), (8, True)])
def test_a_tickets_rows_are_copied_only_if_they_are_small(rows, in_place):
    """A view of the arena takes longer to create than a copy of less than 32 KiB."""

    class Where(nn.Module):
        def forward(self, x):
            places.append(x.data_ptr())
            return x[:, 0] + 1

    places = []
    served, ask = asked(ServedModel(Where(), {"x": TensorSpec("float32", (1024,))}, {"y": NUMBER}))
    outcome, outputs = ask(np.full((rows, 1024), 5, np.float32))
    assert outcome is None and outputs["y"].tolist() == [6.0] * rows
    assert (places == [served.columns.inputs["x"].ctypes.data]) is in_place


# ---- inputs and outputs of a batch in one call


def test_rows_of_all_inputs_are_gathered_in_one_call():
    tables = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8)
    packed = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    inputs = native.PlainInputs(list(zip(tables, packed, strict=True)))
    tickets = np.zeros(2, TICKET)
    tickets["first"], tickets["rows"] = [5, 1], [2, 1]
    inputs.gather(tickets)
    for table, rows in zip(tables, packed, strict=True):
        np.testing.assert_array_equal(rows[:3], table[[5, 6, 1]])
        assert not rows[3:].any()
    for wrong in ({"first": [7, 1]}, {"rows": [4, 1]}):
        bad = tickets.copy()
        for name, numbers in wrong.items():
            bad[name] = numbers
        with pytest.raises(IndexError):
            inputs.gather(bad)
    with pytest.raises(ValueError, match="differ in size"):
        native.PlainInputs([(tables[0], packed[1][:, None].repeat(2, 1))]).gather(tickets)


# ---- outputs: those that are copied as they are, and those that are looked at one by one

TWO = {"y": TensorSpec("float32", (2,)), "z": TensorSpec("int64", ())}


class Returns(nn.Module):
    """Returns what it is told to."""

    def __init__(self, results=None):
        super().__init__()
        self.results = results

    def forward(self, x):
        return self.results


def returned(results, outputs, rows=3):
    """What becomes of a module's results: whether they were copied in one call, and the outputs or the error."""
    served, ask = asked(ServedModel(Returns(results), {"x": NUMBER}, outputs))
    ticket = np.zeros(1, TICKET)
    ticket["rows"] = rows

    def answer():
        try:
            return {name: values.tolist() for name, values in ask(np.zeros(rows, np.float32))[1].items()}
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"

    with torch.inference_mode():
        at_once = served._plain_outputs.scatter(ticket, results, rows)
    either = answer()
    served._plain_outputs = native.PlainOutputs([])
    assert either == answer(), "it is another one if outputs are looked at one by one"
    return at_once, either


def plain_results():
    return torch.arange(6, dtype=torch.float32).reshape(3, 2), torch.arange(3)


EXPECTED = {"y": [[0, 1], [2, 3], [4, 5]], "z": [0, 1, 2]}
DESCRIBES = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")  # since torch 2.10


@pytest.mark.parametrize("form", ["tuple", "dict", "dict of more", "list", "mapping"])
def test_results_of_every_kind_are_written(form):
    y, z = plain_results()
    kinds = {
        "tuple": (y, z),
        "dict": {"z": z, "y": y},
        "dict of more": {"y": y, "other": "thing", "z": z},
        "list": [y, z],
        "mapping": RowErrors({}, (y, z)),
    }
    at_once, outputs = returned(kinds[form], TWO)
    assert at_once == (DESCRIBES and form in ("tuple", "dict", "dict of more"))
    assert outputs == EXPECTED


def test_the_only_output_may_come_alone():
    numbers = torch.tensor([3.0, 4.0, 5.0])
    for results in (numbers, (numbers,), {"y": numbers}):
        at_once, outputs = returned(results, {"y": NUMBER})
        assert at_once == DESCRIBES
        assert outputs == {"y": [3, 4, 5]}


@pytest.mark.parametrize(
    "odd",
    [
        torch.arange(6, dtype=torch.int16).reshape(3, 2),
        torch.tensor([[True, False]] * 3),
        torch.arange(6, dtype=torch.bfloat16).reshape(3, 2),
        torch._neg_view(torch.ones(3, 2)),
        [torch.ones(2)] * 3,
        [torch.ones(3, 2)],
        torch.tensor([[0, 2, 4], [1, 3, 5.0]]).t(),
        torch.arange(12, dtype=torch.float32).reshape(3, 4)[:, :2],
        nn.Parameter(torch.zeros(3, 2)),
    ],
    ids=[
        "int16",
        "bool",
        "bfloat16",
        "negative bit",
        "rows",
        "a list of one",
        "transposed",
        "with gaps",
        "a parameter",
    ],
)
def test_tensors_that_are_not_plain_are_converted(odd):
    at_once, outputs = returned((odd, torch.arange(3)), TWO)
    assert not at_once
    if isinstance(odd, list):
        odd = torch.cat(odd).reshape(3, 2)
    assert outputs == {"y": odd.detach().to(torch.float32).tolist(), "z": EXPECTED["z"]}


ODD = {
    "too few rows": torch.zeros(2, 2),
    "too many rows": torch.zeros(4, 2),
    "flat": torch.zeros(6),
    "a number": torch.tensor(1.0),
    "sparse": torch.zeros(3, 2).to_sparse(),
    "no memory": torch.zeros(3, 2, device="meta"),
    "float64": torch.zeros(3, 2, dtype=torch.float64),
    "int64": torch.zeros(3, 2, dtype=torch.int64),
    "complex": torch.zeros(3, 2, dtype=torch.complex64),
    "quantized": torch.quantize_per_tensor(torch.zeros(3, 2), 0.1, 0, torch.qint8),
    "rows of two shapes": [torch.zeros(2), torch.zeros(2), torch.zeros(1)],
    "zeros without memory": torch._efficientzerotensor((3, 2)),
    "an array": np.zeros((3, 2), np.float32),
    "none": None,
    "a list": [0.0] * 6,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_outputs_that_are_not_plain_tensors_are_refused_one_by_one(odd):
    at_once, said = returned((odd, torch.arange(3)), TWO)
    assert not at_once and isinstance(said, str)
    if isinstance(odd, torch.Tensor) and odd.shape != (3, 2):
        promised = f"output 'y' has shape {list(odd.shape)}, the spec promises [3, 2] for 3 rows"
        assert said == f"ModelFailed: {promised}"


def test_a_wrong_second_output_is_noticed():
    at_once, said = returned((plain_results()[0], torch.arange(4)), TWO)
    assert not at_once and said.startswith("ModelFailed: output 'z' has shape [4]")
    for results in (plain_results()[:1], (*plain_results(), 1), ()):
        at_once, said = returned(results, TWO)
        assert not at_once and said == f"ModelFailed: model 'm' gave {len(results)} outputs, its spec promises 2: y, z"
    at_once, said = returned({"y": plain_results()[0]}, TWO)
    assert not at_once and said == "ModelFailed: the model gave no output 'z'; it gave y"


def test_a_tensor_whose_gradient_is_wanted_is_written_as_others():
    class Enables(Returns):
        def forward(self, x):
            torch.set_grad_enabled(True)
            return self.results

    wanted = torch.ones(3, 2, requires_grad=True)
    served, ask = asked(ServedModel(Enables((wanted, torch.arange(3))), {"x": NUMBER}, TWO))
    changed = []
    served.changed = changed.extend
    np.testing.assert_array_equal(ask(np.zeros(3, np.float32))[1]["y"], np.ones((3, 2)))
    assert changed == ["torch's grad mode"]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_each_dtype_is_copied_at_once(dtype):
    values = torch.tensor([[0, 1], [1, 1], [1, 0]]).to(getattr(torch, dtype))
    at_once, outputs = returned(values, {"y": TensorSpec(dtype, (2,))})
    assert at_once == DESCRIBES and outputs == {"y": values.tolist()}


def test_rows_are_copied_to_their_tickets_and_nowhere_else():
    table = np.full((8, 2), -1, np.float32)
    outputs = native.PlainOutputs([("y", table, torch.empty((0, 2)))])
    tickets = np.zeros(2, TICKET)
    tickets["first"], tickets["rows"] = [5, 1], [2, 1]
    values = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    if not DESCRIBES:
        assert not outputs.scatter(tickets, values, 3)
        return
    assert outputs.scatter(tickets, values, 3)
    np.testing.assert_array_equal(table[[5, 6, 1]], values.numpy())
    assert (table[[0, 2, 3, 4, 7]] == -1).all()
    for wrong, rows in (({"first": [7, 1]}, 3), ({"rows": [3, 1]}, 3)):
        bad = tickets.copy()
        for name, numbers in wrong.items():
            bad[name] = numbers
        with pytest.raises(IndexError):
            outputs.scatter(bad, values, rows)
    with pytest.raises(ValueError, match="differ in size"):
        native.PlainOutputs([("y", table, torch.empty((0, 3)))])


def test_without_a_library_that_describes_its_tensors_nothing_is_copied_at_once():
    outputs = native.PlainOutputs([("y", np.zeros((8, 2), np.float32), object())])
    assert not outputs.scatter(np.zeros(1, TICKET), torch.zeros(3, 2), 3)
    assert not native.PlainOutputs([]).scatter(np.zeros(1, TICKET), (), 3)
