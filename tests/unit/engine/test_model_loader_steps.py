"""The steps of a load: what is told of each, what is dropped when it fails or is outdated, and what a sleep moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jurybox.processes.surroundings import kept
from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.errors import ModelFailed
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import Segment, segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.server.engine import model_code, model_loader
from jurybox.server.engine.device import DeviceLost
from jurybox.server.engine.model_loader import ModelLoader
from jurybox.server.engine.served import Served
from jurybox.server.models import ServedModel
from jurybox.server.settings.config import ModelSettings

ROW = {"x": TensorSpec("float32", (4,))}
TEXT = {"x": TensorSpec("bytes", capacity=16)}


class Plus(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Calls(torch.nn.Module):
    """What a function returns."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> object:
        return self.function(x)


class Counts(torch.nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, h + 1


class Core:
    """An engine's core as far as the loader needs it: what is installed, and what rests."""

    def __init__(self) -> None:
        self.scoreboard = Scoreboard.create(segment_name("steptest", "scoreboard"), 1, 0.0)
        self.installed: dict[int, tuple[Served, int, int, int]] = {}
        self.resting_models: dict[int, SimpleNamespace] = {}
        self.removed: list[int] = []
        self.fails: BaseException | None = None

    def install(self, model: int, served: Served, min_batch: int, max_wait_ns: int, arena: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.installed[model] = served, min_batch, max_wait_ns, arena

    def arena(self, model: int) -> int:
        return self.installed[model][3]

    def counters(self, model: int) -> SimpleNamespace:
        return SimpleNamespace(adopted=lambda version, age: None)

    def rest(self, model: int, message: str) -> SimpleNamespace | None:
        if model in self.installed:
            self.resting_models[model] = SimpleNamespace(served=self.installed[model][0])
        return self.resting_models.get(model)

    def resting(self, model: int) -> SimpleNamespace | None:
        return self.resting_models.get(model)

    def resume(self, model: int) -> None:
        del self.resting_models[model]

    def remove(self, model: int) -> None:
        self.removed.append(model)


class Loads:
    """A loader, whose engine's loop and supervisor are the test."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.reported: list[tuple[str, dict[str, Any]]] = []
        self.details: list[tuple[str, dict[str, Any]]] = []
        self.later: list[Callable[[], None]] = []
        self.made: dict[str, Callable[[], ServedModel]] = {}
        self.core = Core()
        self.arenas: list[Arena] = []
        self.beats: list[int] = []
        self.undo = ExitStack()
        core: Any = self.core
        self.loader = ModelLoader(
            torch.device("cpu"),
            lambda kind, **fields: self.told.append({"kind": kind, **fields}),
            self.later.append,
            core,
            lambda event, **fields: self.reported.append((event, fields)),
            lambda event, **fields: self.details.append((event, fields)),
            beat=lambda: self.beats.append(1),
        )

    def idle(self) -> None:
        """Wait until the loader's thread has done all that it was given."""
        done = threading.Event()
        self.loader._jobs.put((0, 0, done.set))
        assert done.wait(30)

    def loop(self) -> None:
        """Do what the engine's loop is asked to do."""
        while self.later:
            self.later.pop(0)()

    def begin(
        self, make: Callable[[], ServedModel] | torch.nn.Module, model: int = 0, load: int = 1, **settings: Any
    ) -> None:
        name = f"m{model}"
        self.made[f"m:{name}{load}"] = (
            (lambda: ServedModel(make, ROW, {"y": ROW["x"]})) if isinstance(make, torch.nn.Module) else make
        )
        given = {"factory": f"m:{name}{load}", "max_batch": 4, **settings}
        self.loader.load(model, load, name, ModelSettings.model_validate(given).model_dump(mode="json"))

    def place(self, model: int = 0, load: int = 1, weights: str = "", number: int = 5) -> None:
        """Give a loaded model its arena, and wait for what becomes of it."""
        unplaced = self.loader._unplaced.get(model)
        spec = unplaced.model.spec(f"m{model}") if unplaced else None
        name = segment_name("steptest", "arena", len(self.arenas) + 1)
        if spec is not None:
            self.arenas.append(Arena.create(name, ArenaLayout(spec, 8)))
            self.undo.callback(self.arenas[-1].close)
        self.loader.arena(model, load, name, number, 8, weights)
        self.idle()
        self.loop()

    def serve(self, module: torch.nn.Module, model: int = 0, load: int = 1, weights: str = "", **settings: Any) -> None:
        self.begin(module, model, load, **settings)
        self.idle()
        self.place(model, load, weights)
        assert self.of("ready")[-1]["load"] == load, self.told

    def served(self, model: int = 0) -> Served:
        return self.core.installed[model][0]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.told if message["kind"] == kind]

    def reason(self, kind: str = "failed") -> str:
        (message,) = self.of(kind)
        reason: str = message["reason"]
        return reason


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    found = Loads()
    monkeypatch.setattr(model_code, "_from_factory", lambda name, settings, named: found.made[settings.factory]())
    yield found
    for model in list(found.loader._wanted):
        found.loader.unload(model)
    found.idle()
    for served, *_ in found.core.installed.values():
        served.close()
    found.undo.close()
    found.core.scoreboard.close()


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[Arena | WeightsChannel]:
    """The arenas and weights channels that loaders have attached."""
    found: list[Arena | WeightsChannel] = []

    def noting(attach: Callable[..., Any]) -> Callable[..., Any]:
        def attach_(*given: object) -> Any:
            found.append(attach(*given))
            return found[-1]

        return attach_

    arena, channel = noting(Arena.attach), noting(WeightsChannel.attach)
    monkeypatch.setattr(model_loader, "Arena", SimpleNamespace(attach=arena))
    monkeypatch.setattr(model_loader, "WeightsChannel", SimpleNamespace(attach=channel))
    return found


def closed(*ones: Arena | WeightsChannel) -> list[bool]:
    return [one.segment.fd < 0 for one in ones]


@pytest.fixture
def channel(loads: Loads) -> WeightsChannel:
    """A weights channel for Plus."""
    layout = WeightsLayout.of(Plus().state_dict())
    channel = WeightsChannel.create(segment_name("steptest", "weights", 1), layout, "snapshot", make=Segment.create)
    loads.undo.callback(channel.close)
    return channel


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


# ---- a load that goes well


def test_a_load_tells_its_spec_then_that_it_is_ready_and_installs_what_the_settings_say(loads: Loads) -> None:
    loads.begin(Plus(), model=3, load=7, min_batch=2, max_wait_us=1500, forward_timeout=9.5)
    loads.idle()
    begins, loaded, ends = loads.told
    assert begins == {"kind": "begins", "model": 3, "load": 7} and ends == {"kind": "ends"}
    assert (loaded["kind"], loaded["model"], loaded["load"], loaded["weights"]) == ("loaded", 3, 7, [])
    loads.told.clear()
    loads.place(3, 7, number=11)
    assert [message["kind"] for message in loads.told] == ["begins", "ends", "ready"]
    ready = loads.of("ready")[0]
    assert (ready["model"], ready["load"], ready["arena"], ready["warm_up"]["graphs"]) == (3, 7, 11, 0)
    served, min_batch, max_wait_ns, _ = loads.core.installed[3]
    assert (min_batch, max_wait_ns, served.forward_timeout, served.published) == (2, 1_500_000, 9.5, False)


def test_a_model_that_takes_publications_says_so_and_is_told_of_weights_that_are_copied(
    loads: Loads, channel: WeightsChannel
) -> None:
    module = Plus()
    module.view = module.bias.data[1:]
    loads.serve(module, publish="snapshot", weights=channel.name)
    assert loads.of("loaded")[0]["weights"] == [["bias", "float32", [4]]]
    assert loads.served().published and loads.served().weights_updater is not None
    (event, fields) = loads.reported[-1]
    assert (event, fields["model"]) == ("weights are copied in place", "m0") and "view" in fields["views"]


def test_a_model_that_changes_what_others_compute_in_is_named_while_it_warms_up_and_later(loads: Loads) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return x + 0

    loads.serve(Calls(forward))
    event, fields = "a model changed what others compute in, it was set back", {"model": "m0"}
    assert (event, {**fields, "changed": "torch's default dtype"}) in loads.reported
    assert torch.get_default_dtype() == torch.float32
    loads.reported.clear()
    with kept(loads.served().changed):
        torch.set_default_dtype(torch.float64)
    assert loads.reported == [(event, {**fields, "changed": "torch's default dtype"})]


def test_a_model_of_rows_of_any_size_shows_that_the_engine_is_alive(loads: Loads) -> None:
    spec = {"x": TensorSpec("float32", (-1,), capacity=4)}
    loads.begin(lambda: ServedModel(Calls(lambda x: x), spec, {"y": TensorSpec("float32", (-1,), capacity=4)}))
    loads.idle()
    loads.place()
    loads.beats.clear()
    served: Any = loads.served()
    served.beat()
    assert loads.beats == [1]


# ---- loads that are outdated


def test_only_the_newest_of_several_loads_goes_on(loads: Loads) -> None:
    begun, go_on, made = threading.Event(), threading.Event(), []

    def slow() -> ServedModel:
        begun.set()
        assert go_on.wait(30)
        return ServedModel(Plus(), ROW, {"y": ROW["x"]})

    def noted(load: int) -> Callable[[], ServedModel]:
        return lambda: (made.append(load), ServedModel(Plus(), ROW, {"y": ROW["x"]}))[1]  # type: ignore[func-returns-value]

    loads.begin(slow, load=1)
    assert begun.wait(30)
    loads.begin(noted(2), load=2)
    loads.begin(noted(3), load=3)
    go_on.set()
    loads.idle()
    assert made == [3] and [message["load"] for message in loads.of("begins")] == [1, 3]
    assert [message["load"] for message in loads.of("loaded")] == [3]


def test_a_model_that_is_unloaded_before_the_loop_installs_it_is_dropped_with_its_arena(
    loads: Loads, attached: list[Arena | WeightsChannel]
) -> None:
    loads.begin(Plus())
    loads.idle()
    name = segment_name("steptest", "arena", 9)
    loads.undo.callback(Arena.create(name, ArenaLayout(loads.loader._unplaced[0].model.spec("m0"), 8)).close)
    loads.loader.arena(0, 1, name, 5, 8, "")
    loads.idle()
    assert closed(*attached) == [False]
    loads.loader.unload(0)
    loads.loop()
    assert closed(*attached) == [True] and not loads.core.installed and not loads.of("ready") + loads.of("failed")


@pytest.mark.parametrize("loaded_anew", [True, False])
def test_a_member_that_its_group_serves_after_it_was_unloaded_is_removed_unless_it_is_loaded_anew(
    loads: Loads, loaded_anew: bool
) -> None:
    groups: Any = SimpleNamespace(
        leave=lambda model: None,
        join=lambda group, member, compute, installed, example: loads.later.append(installed),
    )
    loads.loader._groups = groups
    loads.begin(Plus(), group="g")
    loads.idle()
    name = segment_name("steptest", "arena", 9)
    loads.undo.callback(Arena.create(name, ArenaLayout(loads.loader._unplaced[0].model.spec("m0"), 8)).close)
    loads.loader.arena(0, 1, name, 5, 8, "")
    loads.idle()
    loads.loader.unload(0)
    if loaded_anew:
        loads.begin(Plus(), load=2)
    loads.loop()
    assert loads.core.removed == ([] if loaded_anew else [0]) and not loads.of("ready")


def test_an_arena_for_a_load_that_is_not_there_fails_that_load(loads: Loads) -> None:
    loads.begin(Plus(), load=1)
    loads.idle()
    loads.begin(raising(ValueError("broken")), load=2)
    loads.idle()
    loads.told.clear()
    loads.place(load=2)
    assert loads.reason() == "an arena arrived for a model that is not loaded: load it again"


def test_a_load_that_the_supervisor_gave_up_is_told_with_its_reason_and_gets_no_arena_any_more(loads: Loads) -> None:
    loads.begin(Plus())
    loads.idle()
    loads.loader.abandon(0, 1, "no room")
    loads.idle()
    assert loads.reason() == "no room" and not loads.loader._unplaced
    loads.told.clear()
    loads.place()
    assert "not loaded" in loads.reason()


# ---- loads that fail


def test_a_load_that_fails_is_told_before_it_ends(loads: Loads) -> None:
    loads.begin(raising(ValueError("broken")))
    loads.idle()
    assert [message["kind"] for message in loads.told] == ["begins", "failed", "ends"]
    assert loads.of("failed")[0] | {"reason": ""} == {"kind": "failed", "model": 0, "load": 1, "reason": ""}
    assert "broken" in loads.reason()


@pytest.mark.parametrize("what", ["a forward", "the loader"])
def test_the_log_has_the_traceback_of_an_error_that_is_not_the_users(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    loads.begin(Calls(raising(ZeroDivisionError("odd"))) if what == "a forward" else Plus())
    loads.idle()
    if what == "the loader":
        monkeypatch.setattr(model_loader, "Arena", SimpleNamespace(attach=raising(OSError("no memory"))))
        monkeypatch.setattr(model_loader, "place_of", lambda error: "")  # else it is this file
    loads.place()
    users = what == "a forward"
    assert (".py:" in loads.reason()) == users
    (event, fields), *others = loads.details if users else loads.reported
    assert not others and not (loads.reported if users else loads.details)
    assert (event, fields["model"]) == ("load failed", 0) and "Traceback" in fields["exception"]


def test_a_failed_warm_up_closes_what_was_attached(loads: Loads, attached: list[Arena | WeightsChannel]) -> None:
    loads.begin(Calls(raising(ValueError("broken"))))
    loads.idle()
    loads.place()
    assert "broken" in loads.reason() and closed(*attached) == [True]


def test_a_model_that_cannot_join_its_group_closes_what_was_attached(
    loads: Loads, channel: WeightsChannel, attached: list[Arena | WeightsChannel]
) -> None:
    module = Plus()
    module.view = module.bias.data[1:]
    loads.begin(module, publish="snapshot", group="g")
    loads.idle()
    loads.place(weights=channel.name)
    assert "is a view of a weight" in loads.reason() and closed(*attached) == [True, True]


def test_a_model_that_cannot_be_installed_fails_and_closes_what_was_attached(
    loads: Loads, attached: list[Arena | WeightsChannel]
) -> None:
    loads.core.fails = MemoryError("no room for a slot")
    loads.begin(Plus())
    loads.idle()
    loads.place()
    assert "no room for a slot" in loads.reason() and closed(*attached) == [True] and not loads.of("ready")


def test_a_device_that_is_lost_at_the_installation_ends_the_loop(loads: Loads) -> None:
    loads.core.fails = DeviceLost("the device fails every call", 1)
    loads.begin(Plus())
    loads.idle()
    with pytest.raises(DeviceLost):
        loads.place()
    assert not loads.of("failed") + loads.of("ready")


@pytest.mark.parametrize(
    ("inputs", "more", "settings", "says"),
    [
        (
            {"x": TensorSpec("float32", (-1,), capacity=4)},
            {},
            {"compile": True},
            "models.m0.compile: inputs of variable size have too many shapes to compile",
        ),
        ({"x": TensorSpec("float32", (-1,), capacity=4)}, {}, {"group": "g"}, "it cannot be in a group"),
        (ROW, {"state": {"h": TensorSpec("float32")}}, {"group": "g"}, "it cannot be in a group"),
        (
            ROW,
            {"state": {"h": TensorSpec("float32")}},
            {"cache_mib": 1, "deterministic": True},
            "models.m0.cache_mib is for models without state: an answer of 'm0' depends on the requests before it",
        ),
    ],
    ids=["compile", "group of variable rows", "group with state", "cache"],
)
def test_settings_that_do_not_fit_what_the_factory_returned_fail_the_load(
    loads: Loads, inputs: dict[str, TensorSpec], more: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    module = Counts() if more else Calls(lambda x: x)
    loads.begin(lambda: ServedModel(module, inputs, {"y": ROW["x"]}, **more), **settings)
    loads.idle()
    loads.place()
    assert says in loads.reason() and not loads.core.installed


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("inputs", [ROW, TEXT], ids=["numbers", "text"])
def test_an_error_at_a_made_up_text_says_that_the_factory_may_return_an_example(
    loads: Loads, inputs: dict[str, TensorSpec], example: bool
) -> None:
    examples = {"example": lambda rows: {"x": ["a"] * rows if inputs is TEXT else torch.ones(rows, 4)}}
    given: dict[str, Any] = examples if example else {}
    loads.begin(lambda: ServedModel(Calls(raising(KeyError("0000"))), inputs, {"y": TensorSpec("float32")}, **given))
    loads.idle()
    loads.place()
    assert ("it computed a made-up row, in which x is '0000'" in loads.reason()) == (inputs is TEXT and not example)
    assert "KeyError" in loads.reason()


def test_an_error_with_words_of_its_own_at_a_made_up_text_stays_as_it_is(loads: Loads) -> None:
    refusing = Calls(raising(ModelFailed("texts are of four words")))
    loads.begin(lambda: ServedModel(refusing, TEXT, {"y": TensorSpec("float32")}))
    loads.idle()
    loads.place()
    assert "texts are of four words" in loads.reason() and "made-up" not in loads.reason()


# ---- what is in service


def test_a_reload_closes_what_the_earlier_load_had_and_an_unload_the_rest(
    loads: Loads, channel: WeightsChannel, attached: list[Arena | WeightsChannel]
) -> None:
    loads.serve(Plus(), publish="snapshot", weights=channel.name)
    assert closed(*attached) == [False, False]
    earlier = loads.served()
    loads.serve(Plus(), load=2, publish="snapshot", weights=channel.name)
    assert closed(*attached) == [True, True, False, False]
    earlier.close()
    loads.loader.unload(0)
    assert closed(*attached) == [True] * 4


def test_a_model_that_is_served_alone_leaves_the_group_that_it_was_in(loads: Loads) -> None:
    left: list[int] = []
    groups: Any = SimpleNamespace(leave=left.append)
    loads.loader._groups = groups
    loads.serve(Plus(), model=2)
    loads.idle()
    assert left == [2]


def test_a_model_that_is_loaded_anew_right_after_its_unload_has_left_its_group_before(loads: Loads) -> None:
    loads.serve(Plus())
    loads.begin(Plus(), load=2)
    loads.idle()
    left: list[int] = []
    groups: Any = SimpleNamespace(leave=lambda model: left.append(loads.of("begins")[-1]["load"]))
    loads.loader._groups = groups
    go_on = threading.Event()
    loads.loader._jobs.put((0, 0, lambda: go_on.wait(30)))
    loads.loader.unload(0)
    loads.begin(raising(ValueError("broken")), load=3)
    go_on.set()
    loads.idle()
    assert left == [2], "not after load 3 has begun"
    assert loads.of("failed")[-1]["load"] == 3 and not loads.loader._unplaced


def test_weights_of_an_unloaded_model_may_be_changed(loads: Loads) -> None:
    module = Plus()
    loads.serve(module)
    loads.loader.unload(0)
    loads.serve(module, model=1, dtype="bfloat16")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"channels_last": True}, {}, "models.m0.channels_last changes them for both"),
        ({}, {"dtype": "bfloat16"}, "models.m1.dtype changes them for both"),
        ({"channels_last": True}, {"dtype": "bfloat16"}, "models.m1.dtype changes them for both"),
    ],
)
def test_the_setting_that_changes_weights_of_two_models_is_named(
    loads: Loads, first: dict[str, Any], second: dict[str, Any], says: str
) -> None:
    module = Plus()
    loads.serve(module, **first)
    loads.begin(module, model=1, **second)
    loads.idle()
    assert "models.m1: its factory returned weights that model 'm0' already has" in loads.reason()
    assert says in loads.reason()


# ---- sleep


class Moves(Plus):
    """Moves its memory by itself."""

    def sleep(self) -> int:
        return 16

    def wake(self) -> int:
        return 32


def test_a_model_sleeps_and_is_served_again_once_the_loop_has_resumed_it(loads: Loads) -> None:
    loads.serve(Moves())
    loads.loader.sleep(0, 1, "it sleeps")
    loads.idle()
    assert loads.of("asleep") == [{"kind": "asleep", "model": 0, "load": 1, "bytes": 16, "reason": ""}]
    loads.loader.wake(0, 1)
    loads.idle()
    assert 0 in loads.core.resting_models and not loads.of("awake")
    loads.loop()
    assert loads.of("awake") == [{"kind": "awake", "model": 0, "load": 1, "bytes": 32, "reason": ""}]
    assert not loads.core.resting_models


def test_a_model_that_was_loaded_anew_while_it_woke_is_not_resumed(loads: Loads) -> None:
    loads.serve(Plus())
    loads.loader.sleep(0, 1, "it sleeps")
    loads.loader.wake(0, 1)
    loads.idle()
    loads.begin(Plus(), load=2)
    loads.loop()
    assert 0 in loads.core.resting_models and not loads.of("awake")


@pytest.mark.parametrize("load", [1, 2])
def test_orders_to_move_weights_of_another_load_are_refused(loads: Loads, load: int) -> None:
    loads.serve(Plus(), load=3)
    loads.loader.sleep(0, load, "it sleeps")
    loads.loader.wake(0, load)
    assert loads.reason("asleep") == "this engine does not serve it, or serves it in a group"
    assert loads.reason("awake") == "it is not asleep in this engine" and not loads.core.resting_models
    loads.loader.sleep(0, 3, "it sleeps")
    loads.told.clear()
    loads.loader.wake(0, load)
    assert loads.reason("awake") == "it is not asleep in this engine" and 0 in loads.core.resting_models


def test_a_model_that_shares_its_weights_cannot_sleep_until_the_other_is_unloaded(loads: Loads) -> None:
    module = Plus()
    for model in (0, 1):
        loads.serve(module, model=model)
    loads.loader.sleep(0, 1, "it sleeps")
    assert loads.reason("asleep") == "it has weights in common with model 'm1', which would lose them"
    assert not loads.core.resting_models
    loads.loader.unload(1)
    loads.told.clear()
    loads.loader.sleep(0, 1, "it sleeps")
    loads.idle()
    assert loads.reason("asleep") == ""


def test_a_model_that_cannot_be_moved_to_the_host_is_moved_back_and_served(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads.serve(Plus())
    woken: list[int] = []
    monkeypatch.setattr(loads.served(), "sleep", raising(MemoryError("no room on the host")))
    monkeypatch.setattr(loads.served(), "wake", lambda: woken.append(1))
    loads.loader.sleep(0, 1, "it sleeps")
    loads.idle()
    assert "no room on the host" in loads.reason("asleep") and woken == [1] and 0 in loads.core.resting_models
    loads.loop()
    assert not loads.core.resting_models
    (event, fields) = loads.reported[-1]
    assert (event, fields["model"]) == ("sleep failed", 0) and "Traceback" in fields["exception"]


@pytest.mark.parametrize("again", [None, ValueError("nor to the host")], ids=["moved back", "stuck"])
def test_a_model_that_cannot_be_moved_to_the_device_is_moved_back_and_sleeps(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, again: Exception | None
) -> None:
    loads.serve(Plus())
    loads.loader.sleep(0, 1, "it sleeps")
    loads.idle()
    asleep: list[int] = []
    monkeypatch.setattr(loads.served(), "wake", raising(MemoryError("no room on the device")))
    monkeypatch.setattr(loads.served(), "sleep", raising(again) if again else lambda: asleep.append(1))
    loads.loader.wake(0, 1)
    loads.idle()
    loads.loop()
    assert "no room on the device" in loads.reason("awake") and 0 in loads.core.resting_models
    assert ("; then " in loads.reason("awake")) == (again is not None) and asleep == ([] if again else [1])
    assert loads.reported[-1][0] == "wake failed"
