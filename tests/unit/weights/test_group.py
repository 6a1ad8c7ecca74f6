"""Models of one architecture as a group: one forward, and each still its own."""

from __future__ import annotations

import queue
import threading
import uuid
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.models import VECTOR  # noqa: E402
from tests.serving import wait_until  # noqa: E402

from jurybox.client import ModelFailed, ModelNotFound, Refused, RowFailed  # noqa: E402
from jurybox.protocol import TensorSpec  # noqa: E402
from jurybox.protocol.errors import Code  # noqa: E402
from jurybox.protocol.segment import segment_name  # noqa: E402
from jurybox.protocol.weights import WeightsChannel, WeightsLayout  # noqa: E402
from jurybox.protocol.weights.publisher import Publisher  # noqa: E402
from jurybox.server.engine.served import Served  # noqa: E402
from jurybox.server.groups.group import Member, Stack, plan, stacked_forward  # noqa: E402
from jurybox.server.groups.groups import CannotGroup, Groups, check_groupable, require_alike  # noqa: E402
from jurybox.server.inproc import InprocServer  # noqa: E402
from jurybox.server.models import ServedModel  # noqa: E402

OUTPUTS = {"logits": TensorSpec("float32", (3,)), "value": TensorSpec("float32")}
FORWARDS: list[int] = []


class Policy(torch.nn.Module):
    """Two heads, a buffer, and no more than four rows at once."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8))
        self.logits, self.value = torch.nn.Linear(8, 3), torch.nn.Linear(8, 1)
        self.register_buffer("mean", torch.randn(4))

    def forward(self, observation):
        FORWARDS.append(len(observation))
        if len(observation) > 4:
            raise RuntimeError("too many rows at once")
        x = self.body(observation - self.mean)
        return {"value": self.value(x)[:, 0], "logits": self.logits(x)}


class Grouped:
    """An engine in this thread with `n` grouped models, their modules and the channels they follow."""

    def __init__(self, n: int, max_batch: int = 4, outputs=OUTPUTS, mode="double_buffer") -> None:
        torch.manual_seed(0)
        self.modules = [Policy().eval() for _ in range(n)]
        self.own = [{key: value.clone() for key, value in module.state_dict().items()} for module in self.modules]
        models = {f"agent{i}": ServedModel(module, VECTOR, outputs) for i, module in enumerate(self.modules)}
        self.server = InprocServer(models, max_batch=max_batch)
        self.actions: queue.SimpleQueue = queue.SimpleQueue()
        self.groups = Groups(self.server.engine, torch.device("cpu"), self._later)
        name = segment_name(f"group{uuid.uuid4().hex[:8]}", "weights")
        layouts = [WeightsLayout.of(own) for own in self.own]
        self.channels = [WeightsChannel.create(f"{name}{i}", layout, mode) for i, layout in enumerate(layouts)]
        for i in range(n):
            self.join(i)
        self.server.engine.slots[0].served.fewest = 2  # as on a GPU, so that few members behave like many

    def _later(self, action) -> None:
        """The loop's thread is the test's: what comes from another waits for `between_turns`."""
        action() if threading.current_thread() is threading.main_thread() else self.actions.put(action)

    def columns(self, i: int) -> tuple[dict, dict]:
        arena = self.server._arenas[f"agent{i}"]
        return arena.inputs, arena.outputs

    def join(self, i: int, served: Served | None = None) -> None:
        engine, arena = self.server.engine, self.server._arenas[f"agent{i}"]
        served = served or engine.slots[i].served
        self.groups.join(
            "agents", Member(i, served, arena.inputs, arena.outputs, self.channels[i], engine.counters(i)), None, int
        )

    def between_turns(self) -> None:
        while not self.actions.empty():
            self.actions.get()()

    def ask(self, rows: dict[int, np.ndarray]) -> dict[int, object]:
        """Replies by member; all requests are sent before the engine runs."""
        self.between_turns()
        models = {i: self.server.model(f"agent{i}") for i in rows}
        tickets = {i: models[i].submit(x) for i, x in rows.items()}
        return {i: ticket.result() for i, ticket in tickets.items()}

    def wait_for(self, i: int, version: int) -> None:
        def adopted() -> bool:
            self.between_turns()
            return self.server.engine.scoreboard.counters["version"][0, i] == version

        wait_until(adopted, 10, f"version {version} of agent{i}")

    def close(self) -> None:
        self.server.engine.stop_updaters()
        self.server.close()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def make():
    made = []

    def grouped(n=5, **more):
        made.append(Grouped(n, **more))
        return made[-1]

    yield grouped
    for one in made:
        one.close()


def assert_its_own(reply, state, x):
    module = Policy()
    module.load_state_dict(state)
    expected = module(torch.from_numpy(x))
    for key, value in expected.items():
        np.testing.assert_allclose(reply.outputs[key], value.detach().numpy(), atol=1e-5)


def rows(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 4)).astype(np.float32)


@pytest.mark.parametrize("counts", [(1, 3, 2, 4, 1), (2, 0, 0, 2, 1), (0, 0, 3, 0, 0), (1, 1, 0, 1, 1)])
def test_every_member_answers_with_its_own_weights(make, counts):
    grouped = make()
    asked = {i: rows(n, i) for i, n in enumerate(counts) if n}
    for i, reply in grouped.ask(asked).items():
        assert_its_own(reply, grouped.own[i], asked[i])


def test_requests_to_several_members_are_one_forward(make):
    grouped = make()
    FORWARDS.clear()
    grouped.ask({i: rows(1 + i % 3) for i in range(5)})
    assert FORWARDS == [3]
    counters = grouped.server.engine.scoreboard.counters[0]
    assert counters["rows"][:5].tolist() == [1, 2, 3, 1, 2] and counters["batches"][:5].tolist() == [1] * 5


def test_a_learners_publication_reaches_only_its_member(make):
    grouped = make()
    publisher = Publisher(grouped.channels[2])
    x = {i: rows(2, i) for i in range(5)}
    for version in (1, 2, 3):
        new = {key: value + version for key, value in grouped.own[2].items()}
        assert publisher.publish(new) == version
        grouped.wait_for(2, version)
        replies = grouped.ask(x)
        assert [replies[i].version for i in range(5)] == [0, 0, version, 0, 0]
        assert_its_own(replies[2], new, x[2])
        assert_its_own(replies[1], grouped.own[1], x[1])
        alone = grouped.ask({2: x[2]})[2]
        assert alone.version == version
        assert_its_own(alone, new, x[2])
    with Publisher(grouped.channels[0]) as other:
        other.publish(grouped.own[4])
        grouped.wait_for(0, 1)
    replies = grouped.ask(x)
    assert [replies[i].version for i in range(5)] == [1, 0, 3, 0, 0]
    assert_its_own(replies[0], grouped.own[4], x[0])
    assert_its_own(replies[2], new, x[2])


def test_weights_do_not_change_while_a_batch_is_not_between_two_turns(make):
    grouped = make()
    Publisher(grouped.channels[0]).publish({key: value + 1 for key, value in grouped.own[0].items()})
    wait_until(lambda: not grouped.actions.empty(), 10, "a finished copy")
    model = grouped.server.model("agent0")
    assert model.infer_reply(rows(1)).version == 0
    grouped.between_turns()
    assert model.infer_reply(rows(1)).version == 1


def test_a_version_that_is_named_must_be_the_members_newest(make):
    grouped = make()
    publishers = [Publisher(channel) for channel in grouped.channels]
    publishers[1].publish(grouped.own[1])
    grouped.wait_for(1, 1)
    models = [grouped.server.model(f"agent{i}") for i in range(3)]
    tickets = [model.submit(rows(1), version=version) for model, version in zip(models, (1, 1, None), strict=True)]
    with pytest.raises(Refused, match="version 1 is not held, 0 is"):
        tickets[0].result()
    assert [tickets[i].result().version for i in (1, 2)] == [1, 0]


def test_a_member_that_fails_does_not_fail_the_others(make):
    grouped = make(max_batch=6)
    grouped_models = {i: grouped.server.model(f"agent{i}") for i in range(4)}
    tickets = {i: model.submit(rows(6 if i == 2 else 2, i)) for i, model in grouped_models.items()}
    with pytest.raises(ModelFailed, match="'agent2' raised RuntimeError: too many rows"):
        tickets[2].result()
    for i in (0, 1, 3):
        assert_its_own(tickets[i].result(), grouped.own[i], rows(2, i))
    assert grouped.server.engine.scoreboard.counters["failed"][0, :4].tolist() == [0, 0, 1, 0]


def test_an_error_is_answered_with_its_members_version(make, monkeypatch):
    grouped = make(3, max_batch=6)
    Publisher(grouped.channels[2]).publish(grouped.own[2])
    grouped.wait_for(2, 1)
    batches, answers = grouped.server.engine._batches, []
    answer = batches._answer

    def noted(tickets, code, version, message):
        answers.append((tickets["model"].tolist(), code, version))
        answer(tickets, code, version, message)

    monkeypatch.setattr(batches, "_answer", noted)
    models = [grouped.server.model(f"agent{i}") for i in range(3)]
    for ticket in [models[2].submit(rows(6)), models[1].submit(rows(6))]:
        with pytest.raises(ModelFailed, match="too many rows"):
            ticket.result()
    assert sorted(answers) == [([1], Code.MODEL_FAILED, 0), ([2], Code.MODEL_FAILED, 1)]


def test_more_rows_than_a_members_batch_holds_are_more_forwards(make):
    grouped = make(3)
    models = [grouped.server.model(f"agent{i}") for i in range(3)]
    x = rows(4, 7)
    tickets = [(models[0], models[0].submit(x)) for _ in range(3)] + [(models[1], models[1].submit(x))]
    replies = [ticket.result() for model, ticket in tickets]
    for reply in replies[:3]:
        assert_its_own(reply, grouped.own[0], x)
    assert_its_own(replies[3], grouped.own[1], x)


def test_a_member_leaves_and_returns_and_the_others_keep_their_versions(make):
    grouped = make(3)
    Publisher(grouped.channels[2]).publish(grouped.own[0])
    grouped.wait_for(2, 1)
    engine, waiting = grouped.server.engine, grouped.server.model("agent1")
    served = engine.slots[0]
    ticket = waiting.submit(rows(1))
    engine._take_in(engine._clock())
    engine.remove(1)
    grouped.groups.leave(1)
    with pytest.raises(ModelNotFound, match="'agent1' was unloaded"):
        ticket.result()
    x = rows(2)
    replies = grouped.ask({0: x, 2: x})
    assert [replies[i].version for i in (0, 2)] == [0, 1]
    assert_its_own(replies[2], grouped.own[0], x)
    assert engine.slots[0] is served and 1 not in engine.slots


def test_a_group_that_all_have_left_ends_and_the_next_member_begins_another(make):
    grouped = make(2)
    updater = grouped.server.engine.slots[0].updater
    for i in (0, 1):
        grouped.server.engine.remove(i)
        grouped.groups.leave(i)
    wait_until(lambda: not updater._thread.is_alive(), 20, "the end of the group's thread")
    grouped.groups.leave(1)
    served = Served("agent0", ServedModel(grouped.modules[0], VECTOR, OUTPUTS), *grouped.columns(0), 4)
    grouped.join(0, served)
    assert grouped.server.engine.slots[0].updater is not updater
    x = rows(2)
    assert_its_own(grouped.ask({0: x})[0], grouped.own[0], x)


def test_models_of_other_specs_are_in_other_groups(make):
    grouped = make(2)
    finite = {**OUTPUTS, "value": TensorSpec("float32", finite=True)}
    served = Served("agent1", ServedModel(grouped.modules[1], VECTOR, finite), *grouped.columns(1), 4)
    before = grouped.server.engine.slots[1]
    with pytest.raises(Refused, match="model 'agent1' cannot be in group 'agents': its spec differs from 'agent0''s"):
        grouped.join(1, served)
    assert grouped.server.engine.slots[1] is before


def test_a_publication_that_is_being_written_does_not_bring_back_an_earlier_one(make):
    grouped = make(2, mode="snapshot")
    channel = grouped.channels[0]
    with Publisher(channel) as publisher:
        for version in (1, 2):
            newest = {key: value + version for key, value in grouped.own[0].items()}
            publisher.publish(newest)
            grouped.wait_for(0, version)
        slot = channel.slots.begin()  # the third, which takes its time
        with Publisher(grouped.channels[1]) as other:
            other.publish(grouped.own[1])
            grouped.wait_for(1, 1)
        x = rows(2)
        reply = grouped.ask({0: x})[0]
        assert reply.version == 2
        assert_its_own(reply, newest, x)
        channel.slots.commit(slot, 3, b"")
        grouped.wait_for(0, 3)


def test_a_members_damaged_channel_keeps_no_publication_from_the_others(make):
    grouped = make(3)
    words = grouped.channels[1]._words
    words[9], words[11], words[0] = 1, 1 << 40, 2  # a version 1 whose extra is larger than its slot
    for i in (0, 2):
        Publisher(grouped.channels[i]).publish(grouped.own[i])
        grouped.wait_for(i, 1)
    assert grouped.ask({1: rows(1)})[1].version == 0
    again = Publisher(grouped.channels[1]).publish(grouped.own[1])
    grouped.wait_for(1, again)


@pytest.mark.parametrize("fewest", [2, 8])
def test_rows_of_a_member_that_are_not_finite_fail_alone(make, fewest):
    finite = {"logits": TensorSpec("float32", (3,), finite=True), "value": TensorSpec("float32")}
    grouped = make(3, outputs=finite)
    grouped.server.engine.slots[0].served.fewest = fewest  # computed together, or one by one
    Publisher(grouped.channels[0]).publish(grouped.own[0])
    grouped.wait_for(0, 1)
    bad = rows(3)
    bad[1] = np.nan
    models = [grouped.server.model(f"agent{i}") for i in range(3)]
    # More rows than a member's batch holds, and those that fail between others.
    tickets = [
        models[2].submit(rows(4, 2)),
        models[0].submit(rows(3)),
        models[0].submit(bad),
        models[1].submit(rows(2)),
    ]
    with pytest.raises(RowFailed) as failed:
        tickets[2].result()
    assert failed.value.errors == {1: "output 'logits' is not finite"}
    for i, ticket, x in ((2, tickets[0], rows(4, 2)), (0, tickets[1], rows(3)), (1, tickets[3], rows(2))):
        assert_its_own(ticket.result(), grouped.own[i], x)
    tickets = [models[0].submit(bad), models[1].submit(bad)]
    for ticket in tickets:  # nothing is left of the batch
        with pytest.raises(RowFailed):
            ticket.result()
    counters = grouped.server.engine.scoreboard.counters[0]
    assert counters["failed"][:3].tolist() == [2, 1, 0] and counters["requests"][:3].tolist() == [1, 1, 1]


class Scaled(torch.nn.Module):
    """Takes numbers of any dtype."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 2.0))

    def forward(self, observation):
        return observation.float() * self.scale


def test_a_groups_only_member_that_is_loaded_anew_brings_its_own_dtype():
    whole, outputs = {"observation": TensorSpec("int32", (4,))}, {"action": TensorSpec("float32", (4,))}
    models = {name: ServedModel(Scaled(), whole, outputs) for name in ("a", "b")}
    with InprocServer(models) as server:
        engine, arenas = server.engine, [server._arenas[name] for name in models]
        loaded = [engine.slots[i].served for i in (0, 1)]
        groups = Groups(engine, torch.device("cpu"), lambda action: action())
        floats = {"observation": arenas[0].inputs["observation"].view(np.float32)}
        before = Served("a", ServedModel(Scaled(), VECTOR, outputs), floats, arenas[0].outputs, 64)
        groups.join("g", Member(0, before, floats, arenas[0].outputs, None, engine.counters(0)), None, int)
        earlier = engine.slots[0]
        for i in (0, 1):
            member = Member(i, loaded[i], arenas[i].inputs, arenas[i].outputs, None, engine.counters(i))
            groups.join("g", member, None, int)
        slot = engine.slots[0]
        assert slot is engine.slots[1]
        slot.served.fewest = 2
        x = np.arange(8, dtype=np.int32).reshape(2, 4)
        tickets = [server.model(name).submit(x) for name in models]
        for ticket in tickets:
            np.testing.assert_array_equal(ticket.result().outputs, 2 * x)
        assert earlier.updater._stopped.is_set()
        engine.stop_updaters()


class Doing(torch.nn.Module):
    """Does one thing in forward that a group cannot have."""

    def __init__(self, what):
        super().__init__()
        self.layer, self.what = torch.nn.Linear(4, 4), what
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation):
        return self.what(self, self.layer(observation))


def counting(self, x):
    self.calls += 1
    return x


def branching(self, x):
    return x if x.sum() > 0 else -x


def keeping(self, x):
    self.last = x
    return x


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (branching, "several sets of weights at once.*data-dependent control flow"),
        (lambda self, x: x * x.mean().item(), "several sets of weights at once"),
        (lambda self, x: x + torch.randn_like(x), "several sets of weights at once"),
        (counting, "writes into 'calls'"),
        (keeping, "keeps a tensor in the attribute 'last'"),
        (lambda self, x: x - x.mean(dim=0), "answered otherwise than by itself"),
    ],
)
def test_a_module_that_cannot_be_grouped_is_refused_and_the_reason_named(what, reason):
    with pytest.raises(CannotGroup, match=f"model 'a' cannot be in group 'g': .*{reason}"), torch.inference_mode():
        check_groupable("a", "g", Doing(what).eval(), VECTOR)


def test_a_module_that_computes_from_its_weights_is_refused():
    module = torch.nn.Linear(4, 4)
    module.weights_changed = lambda: None
    with pytest.raises(CannotGroup, match="its method weights_changed would not be called"):
        check_groupable("a", "g", module, VECTOR)


def test_normalisation_over_the_batch_is_refused_by_name():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()
    module[1].train()
    with pytest.raises(CannotGroup, match="1 is a BatchNorm1d in training mode"):
        check_groupable("a", "g", module, VECTOR)


def test_only_models_that_differ_in_nothing_but_weights_share_a_group():
    def net(width=8, slope=0.1):
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.LeakyReLU(slope))

    require_alike("b", "g", net(), net())
    with pytest.raises(CannotGroup, match="built otherwise"):
        require_alike("b", "g", net(), net(width=9))
    one, other = Policy(), Policy()
    other.temperature = one.temperature = 0.5
    require_alike("b", "g", one, other)
    other.temperature = 0.7
    with pytest.raises(CannotGroup, match="its temperature is 0.7, the group's first model has 0.5"):
        require_alike("b", "g", one, other)
    one, other = Policy(), Policy()
    other.mean = torch.zeros(5)
    with pytest.raises(CannotGroup, match=r"its 'mean' is torch.float32\[5\], the group's first model has .*\[4\]"):
        require_alike("b", "g", one, other)


@dataclass
class Data:
    scale: torch.Tensor
    function: object


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def times(self, x):
        return self.scale * x

    def plus(self, x):
        return self.scale + x


class Changed(torch.nn.Module):
    """A linear layer whose result is scaled by something that is no weight."""

    def __init__(self, kind, scale):
        super().__init__()
        self.layer, self.layers = torch.nn.Linear(4, 3), []
        self.layers.append(self.layer)  # a reference to a module of its own, whose weights may differ
        if kind == "buffer":
            self.register_buffer("scale", torch.tensor(scale), persistent=False)
        else:
            self.scale = {
                "tensor": lambda: torch.tensor(scale),
                "array": lambda: np.array([scale, np.nan]),
                "list": lambda: [[scale]],
                "dict": lambda: {"by": scale},
                "closure": lambda: lambda x: x * scale,
                "default": lambda: lambda x, by=scale: x * by,
                "partial": lambda: partial(torch.mul, scale),
                "object": lambda: SimpleNamespace(by=scale, at=torch.ones(2)),
                "dataclass": lambda: Data(torch.full((2,), scale), lambda x: x),
                "slots": lambda: Slots(scale),
                "method": lambda: Slots(scale).times,
                "generator": lambda: torch.Generator().manual_seed(int(scale)),
                "numpy generator": lambda: np.random.default_rng(int(scale)),
                "nan": lambda: [torch.tensor([scale, np.nan]), float("nan")],
            }[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        *("buffer", "tensor", "array", "list", "dict", "closure", "default", "partial", "object"),
        *("dataclass", "slots", "method", "generator", "numpy generator", "nan"),
    ],
)
def test_whatever_a_model_computes_with_besides_its_weights_must_be_the_same(kind):
    require_alike("b", "g", Changed(kind, 2.0), Changed(kind, 2.0))
    with pytest.raises(CannotGroup, match="its scale is .*, the group's first model has .*: only weights may differ"):
        require_alike("b", "g", Changed(kind, 2.0), Changed(kind, 3.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: [2.0], lambda: (2.0,)),
        (lambda: [2.0], lambda: [2.0, 2.0]),
        (lambda: {"by": 2.0}, lambda: {"at": 2.0}),
        (lambda: torch.ones(2), lambda: torch.ones(2).double()),
        (lambda: Slots(2.0).times, lambda: Slots(2.0).plus),
        (threading.Lock, threading.Lock),
    ],
    ids=["type", "length", "keys", "dtype", "method", "without comparable state"],
)
def test_values_that_are_unlike_or_cannot_be_compared_are_refused(one, other):
    first, second = Changed("list", 2.0), Changed("list", 2.0)
    first.scale, second.scale = one(), other()
    with pytest.raises(CannotGroup, match="only weights may differ"):
        require_alike("b", "g", first, second)
    second.scale = first.scale
    require_alike("b", "g", first, second)


class Positional(torch.nn.Module):
    """Takes its inputs by their position, as the policies of trainings do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(2, 3)

    def forward(self, *seen):
        first, second = seen
        return self.first(first) - self.second(second)


def test_inputs_without_names_are_passed_in_their_order():
    inputs = {"z": TensorSpec("float32", (4,)), "a": TensorSpec("float32", (2,))}
    modules = [Positional().eval() for _ in range(2)]
    check_groupable("a", "g", modules[0], inputs)
    stack = Stack(modules[0], 2)
    for member, module in enumerate(modules):
        stack.fill(member, module.state_dict(), 0)
    given = {"a": torch.randn(2, 5, 2), "z": torch.randn(2, 5, 4)}
    found = stacked_forward(modules[0], list(inputs))(stack.tensors, given)
    for member, module in enumerate(modules):
        torch.testing.assert_close(found[member], module(given["z"][member], given["a"][member]))


@pytest.mark.parametrize(
    ("parts", "runs"),
    [
        ([(0, 4), (1, 4), (2, 4)], [(0, 3)]),
        ([(0, 4), (2, 4), (5, 4)], [(0, 2), (2, 3)]),
        ([(7, 1)], [(0, 1)]),
        ([(0, 1), (1, 1), (2, 64), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1)], [(0, 2), (2, 3), (3, 8)]),
    ],
)
def test_adjacent_rows_are_computed_together_and_distant_or_large_ones_alone(parts, runs):
    assert [(run.start, run.stop) for run in plan(parts, hole=1, fewest=2)] == runs


def test_few_members_are_computed_alone_if_a_stacked_forward_costs_more():
    parts = [(place, 1) for place in (0, 1, 2, 10, 11, 12, 13, 14)]
    assert [(run.start, run.stop) for run in plan(parts, hole=1, fewest=4)] == [(0, 1), (1, 2), (2, 3), (3, 8)]
    assert [(run.start, run.stop) for run in plan(parts, hole=128, fewest=2)] == [(0, 8)]


def test_the_thread_of_a_groups_weights_uses_the_groups_device(monkeypatch):
    """A thread has a current device of its own; without it, copies would wait for streams of the first GPU."""
    used = []
    monkeypatch.setattr(
        "jurybox.server.groups.weights_updater.use_device",
        lambda device: used.append((device, threading.current_thread().name)),
    )
    grouped = Grouped(2)
    try:
        wait_until(lambda: used, 30)
        assert used == [(torch.device("cpu"), "group agents")]
    finally:
        grouped.close()
