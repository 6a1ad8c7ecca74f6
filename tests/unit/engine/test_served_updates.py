"""A served model and what updates its weights: versions, sleep, and the end; and where its batches lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import ModelFailed, VersionNotHeld
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.engine.served import Served, move
from jurybox.server.models import ServedModel

NUMBER = TensorSpec("float32", ())


class Updater:
    """Notes what it is told."""

    def __init__(self, told):
        self.told, self.version = told, 7

    def use(self, version):
        self.told.append(("use", version))

    def stop(self):
        self.told.append("updates stop")

    def sleep(self):
        self.told.append("updates sleep")

    def wake(self):
        self.told.append("updates wake")


class Adds(nn.Module):
    """Adds one; notes where its rows lie."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.places, self.sizes = [], []

    def forward(self, x):
        self.places.append(x.data_ptr())
        self.sizes.append(len(x))
        return x.reshape(len(x), -1)[:, 0] + 1


def served_of(module, given=NUMBER, updater=None, **options):
    model = ServedModel(module, {"x": given}, {"y": NUMBER})
    columns = Columns.here(model.spec("m"), 32)
    served = Served("m", model, columns.inputs, columns.outputs, 16, columns=columns, **options)
    served.weights_updater = updater
    return served


def run(served, *firsts_and_rows, version=0):
    tickets = np.zeros(len(firsts_and_rows), TICKET)
    tickets["first"], tickets["rows"] = zip(*firsts_and_rows, strict=True)
    with torch.inference_mode():
        return served.run(tickets, int(tickets["rows"].sum()), version)


def test_updates_stop_when_a_model_is_no_longer_served():
    told = []
    served_of(Adds(), updater=Updater(told)).close()
    assert told == ["updates stop"]
    served_of(Adds()).close()


def test_updates_are_asked_for_the_version_of_each_batch():
    told = []
    served = served_of(Adds(), updater=Updater(told))
    assert served.version == 7
    assert run(served, (0, 1), version=5) is None and run(served, (0, 1)) is None
    assert told == [("use", 5), ("use", 0)]


def test_a_model_without_updates_has_only_the_weights_it_came_with():
    served = served_of(Adds())
    assert served.version == 0 and run(served, (0, 1)) is None
    with pytest.raises(VersionNotHeld, match=r"'m' takes no publications \(models\.m\.publish\)"):
        run(served, (0, 1), version=5)


@pytest.mark.parametrize("moved", [123, None])
def test_a_module_moves_its_memory_itself_while_nothing_updates_it(moved):
    class Moves(Adds):
        def sleep(self):
            told.append("module sleeps")
            return moved

        def wake(self):
            told.append("module wakes")
            return moved

    told = []
    served = served_of(Moves(), updater=Updater(told))
    served.free_memory = lambda: told.append("memory is freed")
    served._prepare = lambda: told.append("prepared")
    assert (served.sleep(), served.wake()) == (moved or 0, moved or 0)
    assert told == [
        "updates sleep",
        "module sleeps",
        "memory is freed",
        "module wakes",
        "prepared",
        "updates wake",
    ]


def test_weights_in_the_hosts_memory_stay_where_they_are_in_sleep():
    module = Adds()
    module.sleep = nn.Linear(2, 2)  # a layer may have that name
    served, place = served_of(module), module.weight.data_ptr()
    assert (served.sleep(), served.wake()) == (0, 0)
    assert module.weight.data_ptr() == place


@pytest.mark.parametrize(
    ("elements", "tickets", "in_place"),
    [
        (1024, [(3, 2), (5, 1), (6, 4)], True),
        (1024, [(3, 2), (6, 1)], False),
        (1024, [(3, 2), (4, 1)], False),
        (1024, [(5, 1), (3, 2)], False),
        (1024, [(3, 1)], False),
        (1024, [(3, 8)], True),
        (1023, [(3, 5), (8, 5)], False),
        (1023, [(3, 10)], True),
    ],
)
def test_rows_are_read_where_they_are_if_they_lie_together_and_are_large(elements, tickets, in_place):
    module = Adds()
    served = served_of(module, TensorSpec("float32", (elements,)))
    served.columns.inputs["x"][:, 0] = np.arange(32)
    assert run(served, *tickets) is None
    assert (module.places == [served.columns.inputs["x"][tickets[0][0]].ctypes.data]) is in_place
    expected = np.zeros(32, np.float32)
    for first, rows in tickets:
        expected[first : first + rows] = np.arange(first, first + rows) + 1
    np.testing.assert_array_equal(served.columns.outputs["y"], expected)


def test_a_batch_in_one_of_several_shapes_is_copied_since_it_is_padded():
    module = Adds()
    served = served_of(module, TensorSpec("float32", (1024,)), shapes=(4, 16))
    served.columns.inputs["x"][:, 0] = np.arange(32)
    for rows in (1, 4, 9, 16):
        served.columns.outputs["y"][:] = 0
        assert run(served, (2, rows)) is None
        assert served.columns.outputs["y"].tolist() == [0, 0, *range(3, 3 + rows), *[0] * (30 - rows)]
    assert module.sizes == [4, 4, 16, 16]
    inputs = served.columns.inputs["x"]
    assert not any(inputs.ctypes.data <= place < inputs.ctypes.data + inputs.nbytes for place in module.places)


@pytest.mark.parametrize(
    ("wrong", "came"),
    [(lambda total: total[:-1], r"shape \[\d\]"), (lambda total: total.double(), "float64"), (list, "list")],
    ids=["shape", "dtype", "kind"],
)
def test_states_that_do_not_match_the_spec_are_noticed_when_a_model_is_tried(wrong, came):
    class Odd(nn.Module):
        def forward(self, x, total):
            return x + total, wrong(total)

    model = ServedModel(Odd(), {"x": NUMBER}, {"y": NUMBER}, state={"total": NUMBER})
    served = OpenServed("m", model, Columns.here(model.spec("m"), 8), 4)
    with pytest.raises(ModelFailed, match=rf"state 'total' .*{came}"):
        served.warm_up()


@pytest.mark.parametrize("agreeing", [True, False])
def test_a_model_that_need_not_answer_alike_keeps_all_its_shapes(agreeing):
    class ByShape(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x + len(x)

    seen = []
    served = served_of(ByShape(), shapes=(1, 3, 8))
    served.agreeing = agreeing
    served.warm_up()
    assert seen[:3] == [1, 3, 8]
    assert served.shapes == ((8,) if agreeing else (1, 3, 8))
    if not agreeing:
        assert len(seen) == 3, "and no shapes are compared"


def test_a_model_is_tried_with_rows_that_do_not_count_writes():
    """An example may be made in inference mode, and texts are no tensors."""

    def example(rows):
        with torch.inference_mode():
            return {"x": torch.full((rows,), 3.0)}

    module = Adds()
    served_of(module).warm_up(example)
    assert module.sizes == [1, 16]

    class Lengths(nn.Module):
        def forward(self, text):
            return torch.tensor([float(len(row)) for row in text])

    model = ServedModel(Lengths(), {"text": TensorSpec("bytes", capacity=8)}, {"y": NUMBER}, collate="list")
    OpenServed("m", model, Columns.here(model.spec("m"), 8), 4).warm_up()


def test_the_grad_mode_that_a_forward_turns_on_is_off_for_the_next():
    class Learns(Adds):
        def forward(self, x):
            modes.append(torch.is_grad_enabled())
            torch.set_grad_enabled(True)
            return super().forward(x)

    modes, told = [], []
    served = served_of(Learns())
    served.changed = told.append
    tickets = np.zeros(1, TICKET)
    tickets["rows"] = 2
    with torch.inference_mode():
        for _ in range(2):
            assert served.run(tickets, 2) is None
            assert not torch.is_grad_enabled()
    assert modes == [False, False] and told == [["torch's grad mode"]] * 2


def test_moved_weights_keep_their_dtypes_values_and_what_they_share():
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    module.tied = module.weight
    module.narrow = nn.Parameter(torch.tensor([1.5, -2.5, 4], dtype=torch.bfloat16))
    module.register_buffer("nothing", torch.empty(0, 3, dtype=torch.int32))
    module.register_buffer("count", torch.tensor([7, 1 << 40]))
    module.register_buffer("column", module.weight.data[:, 1])
    parameter, before = module.weight, {key: value.clone() for key, value in module.state_dict().items()}
    places = [value.data_ptr() for value in (module.weight, module.narrow, module.count)]
    assert move(module, torch.device("cpu")) == 6 * 4 + 3 * 2 + 2 * 8
    for key, value in module.state_dict().items():
        assert value.dtype == before[key].dtype and torch.equal(value, before[key])
    assert not set(places) & {value.data_ptr() for value in (module.weight, module.narrow, module.count)}
    assert module.weight is module.tied is parameter
    module.weight.data[1, 1] = 9
    assert module.column.tolist() == [1, 9]
