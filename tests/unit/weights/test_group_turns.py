"""A group in an engine: what it counts and names for each member, what it computes in, and where weights come from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.records import records
from tests.serving import wait_until

torch = pytest.importorskip("torch")

from tests.unit.weights.test_group import OUTPUTS, Grouped, assert_its_own, rows  # noqa: E402

from jurybox.protocol import TensorSpec  # noqa: E402
from jurybox.protocol.errors import ModelFailed  # noqa: E402
from jurybox.protocol.scoreboard import MAX_MODELS  # noqa: E402
from jurybox.protocol.spec import ModelSpec  # noqa: E402
from jurybox.protocol.weights import WeightsChannel, WeightsLayout  # noqa: E402
from jurybox.protocol.weights.publisher import Publisher  # noqa: E402
from jurybox.server.engine.served import Served  # noqa: E402
from jurybox.server.groups import group as group_module  # noqa: E402
from jurybox.server.groups.group import Member, Stack  # noqa: E402
from jurybox.server.groups.groups import CannotGroup, Groups, check_groupable, require_alike  # noqa: E402
from jurybox.server.inproc import InprocServer  # noqa: E402
from jurybox.server.models import ServedModel  # noqa: E402

CPU = torch.device("cpu")
ROW = TensorSpec("float32", (4,))
BY = {"a": 3.0, "b": 5.0}
SEEN: list[tuple[torch.dtype, torch.dtype]] = []


@pytest.fixture
def make() -> Iterator[Callable[..., Grouped]]:
    made: list[Grouped] = []

    def grouped(n: int = 3, **more: Any) -> Grouped:
        made.append(Grouped(n, **more))
        return made[-1]

    yield grouped
    for one in made:
        one.close()


def slot_of(grouped: Grouped) -> Any:
    return grouped.server.engine.slots[0]


tickets = functools.partial(records, ("model", "rows"))


# ---- what is counted and named


def test_rows_that_wait_are_shown_for_each_member_until_they_are_computed(make: Callable[..., Grouped]) -> None:
    grouped = make()
    slot, shown = slot_of(grouped), grouped.server.engine.scoreboard.counters["waiting"][0]
    slot.queue.push(tickets((0, 4), (2, 3), (0, 2)))
    slot.counters.waiting(9)
    assert shown[:3].tolist() == [6, 0, 3]
    slot.queue.push(tickets((1, 1)))
    slot.counters.waiting(10)
    assert shown[:3].tolist() == [6, 1, 3]
    slot.counters.waiting(0)
    assert shown[:3].tolist() == [0, 0, 0]
    slot.queue.take()


def test_only_members_of_a_batch_are_named_and_counted_for_it(make: Callable[..., Grouped]) -> None:
    grouped = make()
    slot, shown = slot_of(grouped), grouped.server.engine.scoreboard.counters[0]
    one, both = tickets((2, 1), (2, 3)), tickets((2, 1), (0, 3), (2, 2))
    assert (slot.name(one), slot.name(both)) == ("agent2", "agents")
    assert [part["sequence"].tolist() for part in slot.parts(both)] == [[2], [1, 3]]
    slot.counters.add("expired", both)
    assert shown["expired"][:3].tolist() == [1, 0, 2]
    slot.counters.batch(both, 6, 1000, 2000)
    assert shown["rows"][:3].tolist() == [3, 0, 3] and shown["requests"][:3].tolist() == [1, 0, 2]
    assert slot.parts(both[:0]) == [] and list(slot.answers(both[:0], 0)) == []


def test_a_batch_of_a_group_holds_what_those_of_its_members_hold_together(make: Callable[..., Grouped]) -> None:
    grouped = make(3, max_batch=5)
    assert slot_of(grouped).queue.max_batch == 15
    grouped.server.engine.remove(1)
    grouped.groups.leave(1)
    assert slot_of(grouped).queue.max_batch == 10


@pytest.mark.parametrize(("limits", "shortest"), [((0.0, 5.0, 3.0), 3.0), ((0.0, 0.0, 0.0), 0.0), ((2.0, 0, 0), 2.0)])
def test_a_groups_forward_may_take_as_long_as_the_least_patient_member_waits(
    make: Callable[..., Grouped], limits: tuple[float, ...], shortest: float
) -> None:
    grouped = make()
    slot = slot_of(grouped)
    for member, limit in zip(slot.grouped.members, limits, strict=True):
        member.served.forward_timeout = limit
    slot.grouped.rebind(slot.grouped.members, slot.grouped.stacks)
    assert slot.served.forward_timeout == shortest


def test_memory_that_a_group_frees_is_that_of_its_members_device(make: Callable[..., Grouped]) -> None:
    grouped, freed = make(), []
    slot_of(grouped).grouped.members[0].served.free_memory = lambda: freed.append(1)
    slot_of(grouped).served.free_memory()
    assert freed == [1]


def test_on_a_gpu_all_members_are_computed_together_and_on_a_cpu_many_neighbours() -> None:
    spec = ModelSpec("a", {"x": ROW}, {"y": ROW})
    on_cpu, on_gpu = (group_module.Grouped("g", spec, torch.device(kind), None) for kind in ("cpu", "cuda"))
    assert (on_cpu.hole, on_cpu.fewest) == (1, 8) and (on_gpu.hole, on_gpu.fewest) == (MAX_MODELS, 2)
    assert (on_cpu.spec.name, on_cpu.version, on_cpu.max_batch) == ("g", 0, 0)


@pytest.mark.parametrize(
    ("results", "came"),
    [
        ({"z": torch.zeros(2, 3, 4)}, "nothing"),
        ((), "nothing"),
        (torch.zeros(2, 3, 5), r"\[2, 3, 5\]"),
        ([torch.zeros(2, 4)], r"\[2, 4\]"),
    ],
)
def test_an_output_of_another_shape_than_promised_fails_the_batch(results: Any, came: str) -> None:
    grouped = group_module.Grouped("g", ModelSpec("a", {"x": ROW}, {"y": ROW}), CPU, None)
    with pytest.raises(
        ModelFailed,
        match=rf"output 'y' of group 'g': {came} came, the spec promises \[2, 3, 4\] for 2 models and 3 rows",
    ):
        grouped._checked(results, 2, 3)


# ---- what is computed


class Mixed(torch.nn.Module):
    """Scales numbers in the dtype of its weights by whole numbers, which are not converted."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((4,), by))

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        SEEN.append((x.dtype, n.dtype))
        return x * self.by * n[..., None].to(x.dtype)


@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_inputs_of_floating_point_are_computed_in_the_groups_dtype_and_whole_numbers_as_they_came(
    compute: torch.dtype | None,
) -> None:
    inputs = {"x": ROW, "n": TensorSpec("int64")}
    models = {name: ServedModel(Mixed(by).to(compute or torch.float32), inputs, {"y": ROW}) for name, by in BY.items()}
    with InprocServer(models) as server:
        engine = server.engine
        groups = Groups(engine, CPU, lambda action: action())
        for i, name in enumerate(models):
            arena = server._arenas[name]
            served = Served(name, models[name], arena.inputs, arena.outputs, 64, compute=compute)
            member = Member(i, served, arena.inputs, arena.outputs, None, engine.counters(i))
            groups.join("g", member, compute, int)
        engine.slots[0].served.fewest = 2
        SEEN.clear()
        asked = {name: server.model(name).submit({"x": np.ones((2, 4), np.float32), "n": [2, 4]}) for name in models}
        for name, ticket in asked.items():
            assert ticket.result().outputs.tolist() == [[2 * BY[name]] * 4, [4 * BY[name]] * 4]
        (seen,) = SEEN  # one forward for both
        assert seen == (compute or torch.float32, torch.int64)
        engine.stop_updaters()


def test_matrices_of_a_stack_are_stored_transposed_on_a_cpu_and_keep_their_values() -> None:
    module = torch.nn.Linear(3, 2)
    module.register_buffer("whole", torch.arange(6).reshape(2, 3))
    stack = Stack(module, 2)
    for member, version in ((0, 4), (1, 7)):
        stack.fill(member, {name: tensor + member for name, tensor in module.state_dict().items()}, version)
    assert stack.versions == [4, 7] and stack.tensors["weight"].shape == (2, 2, 3)
    assert stack.tensors["weight"].mT.is_contiguous() and stack.tensors["whole"].is_contiguous()
    assert torch.equal(stack.row(1)["weight"], module.weight + 1) and torch.equal(stack.row(0)["bias"], module.bias)
    assert stack.row(1)["whole"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_rows_of_a_large_batch_leave_nothing_in_a_smaller_one_after_it(make: Callable[..., Grouped]) -> None:
    grouped = make()
    for counts in ((1, 1, 0), (4, 2, 4), (2, 1, 1), (4, 4, 4), (0, 3, 1)):
        asked = {i: rows(n, i + n) for i, n in enumerate(counts) if n}
        for i, reply in grouped.ask(asked).items():
            assert_its_own(reply, grouped.own[i], asked[i])


# ---- where weights come from


def test_the_threads_of_a_group_keep_no_process_from_ending_and_end_with_it() -> None:
    before = set(threading.enumerate())
    grouped = Grouped(2)
    begun = set(threading.enumerate()) - before
    assert len(begun) == 3 and all(thread.daemon for thread in begun)
    updater = slot_of(grouped).updater
    grouped.close()
    updater.join()
    wait_until(lambda: not any(thread.is_alive() for thread in begun), 30, "the end of the threads")


def test_a_member_that_joins_begins_with_what_was_published_for_it_and_counts_that_once(
    make: Callable[..., Grouped],
) -> None:
    grouped = make()
    new = {key: value * 0.5 for key, value in grouped.own[1].items()}
    grouped.server.engine.remove(1)
    grouped.groups.leave(1)
    Publisher(grouped.channels[1]).publish(new)
    served = Served("agent1", ServedModel(grouped.modules[1], {"observation": ROW}, OUTPUTS), *grouped.columns(1), 4)
    grouped.join(1, served)
    counters = grouped.server.engine.scoreboard.counters[0]
    assert counters["version"][:3].tolist() == [0, 1, 0] and counters["updates"][:3].tolist() == [0, 1, 0]
    x = rows(2)
    replies = grouped.ask({0: x, 1: x})
    assert [replies[i].version for i in (0, 1)] == [0, 1]
    assert_its_own(replies[1], new, x)


def test_a_member_that_is_loaded_anew_follows_its_new_channel_and_the_old_ones_thread_ends(
    make: Callable[..., Grouped],
) -> None:
    grouped = make(2)
    updater, old = slot_of(grouped).updater, grouped.channels[1]
    earlier = updater._readers[1]
    channel = WeightsChannel.create(f"{old.name}b", WeightsLayout.of(grouped.own[1]), "double_buffer")
    grouped.channels.append(old)  # closed at the end
    grouped.channels[1] = channel
    served = Served("agent1", ServedModel(grouped.modules[1], {"observation": ROW}, OUTPUTS), *grouped.columns(1), 4)
    grouped.join(1, served)
    wait_until(lambda: not earlier._thread.is_alive(), 30, "the end of the old channel's thread")
    new = {key: value * 0.5 for key, value in grouped.own[1].items()}
    Publisher(old).publish(grouped.own[0])
    Publisher(channel).publish(new)
    grouped.wait_for(1, 1)
    x = rows(2)
    assert_its_own(grouped.ask({1: x})[1], new, x)
    assert updater._readers[1]._thread.is_alive() and updater._readers[0]._thread.is_alive()


def test_a_member_whose_publications_cannot_be_read_is_named_in_the_log_unless_it_was_unloaded(
    make: Callable[..., Grouped],
) -> None:
    grouped = make(3)
    reports: list[tuple[str, Mapping[str, object]]] = []
    updater = slot_of(grouped).updater
    updater._report = lambda event, **fields: reports.append((event, fields))
    words = grouped.channels[1]._words
    words[9], words[11], words[0] = 1, 1 << 40, 2  # a version 1 whose extra is larger than its slot
    wait_until(lambda: reports, 30, "a line of the log")
    event, fields = reports[0]
    assert (event, fields["model"]) == ("weights not adopted", "agent1") and fields["error"]
    grouped.channels[1].close()
    wait_until(lambda: not updater._readers[1]._thread.is_alive(), 30, "the end of the thread of a closed channel")
    reports.clear()
    Publisher(grouped.channels[0]).publish(grouped.own[0])
    grouped.wait_for(0, 1)
    assert not reports


def test_a_switch_that_fails_in_the_loop_is_logged_for_the_group_and_tried_again(make: Callable[..., Grouped]) -> None:
    grouped = make(2)
    reports: list[tuple[str, Mapping[str, object]]] = []
    updater = slot_of(grouped).updater
    updater._report = lambda event, **fields: reports.append((event, fields))
    fails, later = [ValueError("odd")], updater._later

    def failing(action: Callable[[], None]) -> None:
        if fails:
            raise fails.pop()
        later(action)

    updater._later = failing
    Publisher(grouped.channels[0]).publish(grouped.own[0])
    grouped.wait_for(0, 1)
    assert reports == [("weights not adopted", {"model": "agents", "error": "ValueError: odd"})]


# ---- what may be a member


def test_a_module_is_tried_with_as_many_rows_of_its_example_as_the_trial_has() -> None:
    asked: list[int] = []

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.arange(20.0).reshape(10, 2))

        def forward(self, n: torch.Tensor) -> torch.Tensor:
            return self.table[n - 5]

    def example(n: int) -> dict[str, np.ndarray]:
        asked.append(n)
        return {"n": np.full(n, 9)}

    inputs = {"n": TensorSpec("int64")}
    check_groupable("a", "g", Looks(), inputs, None, example)
    assert asked == [6]
    seen: list[list[int]] = []

    class Notes(torch.nn.Module):
        def forward(self, n: torch.Tensor) -> torch.Tensor:
            if not torch._C._functorch.is_batchedtensor(n):
                seen.append(n.tolist())
            return n + 1.0

    check_groupable("a", "g", Notes(), inputs, None, example)
    check_groupable("a", "g", Notes(), inputs)
    assert seen == [[9], [9], [0], [0]], "and with zeros where there is no example"


def test_a_module_is_tried_in_the_dtype_that_it_computes_in() -> None:
    module = torch.nn.Linear(4, 2).to(torch.bfloat16)
    check_groupable("a", "g", module, {"x": ROW}, torch.bfloat16)
    with pytest.raises(CannotGroup, match="cannot be computed for several sets of weights at once: RuntimeError: "):
        check_groupable("a", "g", module, {"x": ROW})


def calls(function: Callable[[Any], Any]) -> torch.nn.Module:
    class Calls(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return function(x * self.by)

    return Calls()


@pytest.mark.parametrize(
    ("dtype", "difference", "fine"),
    [
        (torch.float32, 5e-4, True),
        (torch.float32, 0.5, False),
        (torch.float64, 1e-4, False),
        (torch.float64, 1e-7, True),
        (torch.float16, 0.01, True),
        (torch.float16, 0.9, False),
    ],
)
def test_answers_may_differ_by_the_rounding_of_their_dtype(dtype: torch.dtype, difference: float, fine: bool) -> None:
    module = calls(lambda x: torch.zeros_like(x, dtype=dtype) + difference * (x.shape[0] > 1))
    if fine:
        check_groupable("a", "g", module, {"x": ROW})
        return
    by = rf"by up to {torch.tensor(difference, dtype=dtype).item():.3g}\)"
    with pytest.raises(CannotGroup, match=f"among others a row is answered otherwise than by itself .{by}"):
        check_groupable("a", "g", module, {"x": ROW})


def test_answers_that_are_not_finite_and_whole_numbers_may_be_in_a_group() -> None:
    check_groupable("a", "g", calls(lambda x: x * float("nan")), {"x": ROW})
    check_groupable("a", "g", calls(lambda x: x.argmax(dim=1)), {"x": ROW})


def test_a_weight_that_is_not_a_number_is_not_taken_for_one_that_forward_writes() -> None:
    module = torch.nn.Linear(4, 2)
    with torch.no_grad():
        module.weight[0, 0] = float("nan")
    check_groupable("a", "g", module, {"x": ROW})


def test_an_error_without_words_and_one_of_many_lines_are_one_sentence() -> None:
    def failing(error: Exception) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            raise error

        return function

    with pytest.raises(CannotGroup, match="at once: ValueError: no message; expected tensor operations alone"):
        check_groupable("a", "g", calls(failing(ValueError())), {"x": ROW})
    with pytest.raises(CannotGroup, match="at once: ValueError: first; expected tensor operations alone"):
        check_groupable("a", "g", calls(failing(ValueError("first\nsecond"))), {"x": ROW})


def test_normalisation_that_does_not_learn_from_rows_may_be_in_a_group() -> None:
    check_groupable("a", "g", torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval(), {"x": ROW})
    check_groupable("a", "g", torch.nn.Linear(4, 4).train(), {"x": ROW})
    with pytest.raises(CannotGroup, match="in group 'g': it is a BatchNorm1d in training mode"):
        check_groupable("a", "g", torch.nn.BatchNorm1d(4).train(), {"x": ROW})


@pytest.mark.parametrize("swapped", [False, True])
def test_a_part_that_only_one_of_two_models_has_is_named(swapped: bool) -> None:
    def refused(change: Callable[[torch.nn.Module], None]) -> str:
        first, second = (torch.nn.Sequential(torch.nn.Linear(4, 2)) for _ in range(2))
        change(first if swapped else second)
        with pytest.raises(CannotGroup) as error:
            require_alike("b", "g", first, second)
        return str(error.value).removeprefix("model 'b' cannot be in group 'g': ")

    had, came = ("torch.float32[3]", "nothing") if swapped else ("nothing", "torch.float32[3]")
    text = f"its '0.more' is {came}, the group's first model has {had}"
    assert refused(lambda module: module[0].register_buffer("more", torch.zeros(3))) == text
    had, came = ("0.5", "'nothing'") if swapped else ("'nothing'", "0.5")
    text = f"its 0.slope is {came}, the group's first model has {had}: only weights may differ"
    assert refused(lambda module: setattr(module[0], "slope", 0.5)) == text
    assert refused(lambda module: module.eval()).startswith("its training is ")
    assert refused(lambda module: module[0].eval()).startswith("its 0.training is ")


def test_models_of_two_classes_that_look_the_same_are_not_alike() -> None:
    class Other(torch.nn.Linear):
        def _get_name(self) -> str:
            return "Linear"

    first, second = torch.nn.Linear(4, 2), Other(4, 2)
    assert str(first) == str(second)
    with pytest.raises(CannotGroup, match="it is built otherwise than the group's first model"):
        require_alike("b", "g", first, second)
    second = torch.nn.Linear(4, 2).to(torch.bfloat16)
    with pytest.raises(CannotGroup, match=r"its 'weight' is torch.bfloat16\[2, 4\], .* has torch.float32\[2, 4\]"):
        require_alike("b", "g", first, second)


def test_attributes_that_refer_to_their_model_or_to_themselves_are_alike() -> None:
    def module() -> torch.nn.Module:
        found = torch.nn.Linear(4, 2)
        found.ring = [1, SimpleNamespace(of=found)]  # type: ignore[assignment]
        found.ring.append(found.ring)
        found.numbers = (np.float32(1), {"a": float("nan")}, None)
        return found

    require_alike("b", "g", module(), module())


def hooked(how: str) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def add(*given: Any, by: float = 1.0) -> Any:
        return given[-1] + by if isinstance(given[-1], torch.Tensor) else None

    if how == "before":
        module[0].register_forward_pre_hook(add)
    elif how == "before, with its keywords":
        module[0].register_forward_pre_hook(add, with_kwargs=True)
    elif how == "after, always":
        module[0].register_forward_hook(add, always_call=True)
    elif how == "after by 7":
        module[0].register_forward_hook(functools.partial(add, by=7.0))
    elif how == "twice":
        module[0].register_forward_hook(add)
        module[0].register_forward_hook(add)
    elif how != "nothing":
        module[0].register_forward_hook(add)
    return module


HOOKED = ["nothing", "after", "twice", "after, always", "after by 7", "before", "before, with its keywords"]


@pytest.mark.parametrize("one", HOOKED)
@pytest.mark.parametrize("other", HOOKED)
def test_only_models_with_the_same_hooks_are_alike(one: str, other: str) -> None:
    """A group computes with the hooks of its first model."""
    if one == other:
        require_alike("b", "g", hooked(one), hooked(other))
        return
    with pytest.raises(CannotGroup, match=r"its 0\._forward_(pre_)?hooks is .* only weights may differ"):
        require_alike("b", "g", hooked(one), hooked(other))


def test_an_attribute_is_compared_whatever_its_name() -> None:
    one, other = hooked("nothing"), hooked("nothing")
    one[0].gain_of_the_hook, other[0].gain_of_the_hook = 1.0, 2.0
    with pytest.raises(CannotGroup, match=r"its 0\.gain_of_the_hook is 2\.0, the group's first model has 1\.0"):
        require_alike("b", "g", one, other)
