"""What a supervisor does about the death of a child: it starts another one, charges a model, or ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.supervisor.played_children import MODEL, Server

from jurybox.server.supervisor import supervisor as supervisor_module


def test_an_engine_that_ends_is_replaced_at_once_though_a_process_of_its_model_keeps_its_pipe_open(
    server: Callable[..., Server],
) -> None:
    world = server()
    world.serves()
    first = world.process()
    first.status = 1  # and its end of the pipe stays open
    world.turn()
    assert not world.logged("child died")
    world.tick()
    (line,) = world.logged("child died")
    assert (line["role"], line["status"]) == ("engine-0", 1) and world.process() is not first


@pytest.mark.parametrize(("announced", "status"), [(True, 4), (False, 3)])
def test_a_server_ends_when_a_child_has_died_more_often_in_a_row_than_it_may(
    server: Callable[..., Server], announced: bool, status: int
) -> None:
    world = server(max_restarts=2)
    world.serves()
    world.supervisor._announced = announced
    for failures in (1, 2):
        assert world.dies(-11)["failures"] == failures and world.exit() is None
        assert world.child().alive == (failures == 1), "the first restart is due at once, later ones are not"
        world.restarts()
    assert world.dies(-11)["failures"] == 3
    assert world.exit() == status and world.logged("gave up on a child") and not world.child().alive


def test_a_child_that_is_due_is_started_at_a_tick_and_not_before(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    for _ in range(2):
        world.dies(7)
    due = world.child().restart_at
    world.supervisor._tick(due - 0.1)
    assert not world.child().alive
    world.supervisor._tick(due)
    assert world.child().alive


def test_an_engine_that_ends_while_it_loads_a_model_is_charged_to_it_until_that_is_in_quarantine(
    server: Callable[..., Server],
) -> None:
    world = server({"m": MODEL, "other": MODEL}, max_restarts=2)
    world.serves()
    held = world.models["m"]
    lane = world.supervisor._leases.grant(held.index, 1, 32, held.arena_number)
    for deaths in (1, 2, 3):
        world.tells("begins", model=held.index, load=held.loads[0])
        line = world.dies(7)
        assert (line["charged_to"], held.deaths, world.child().failures) == ("m", {0: deaths}, 0)
        assert world.supervisor._scoreboard.lanes["deaths"][lane.lane] == deaths
        assert bool(held.quarantined) == (deaths == 3) and world.exit() is None
        if deaths < 3:
            world.restarts()
    assert "3 engines died in a row" in held.quarantined and held.engines == {0: "quarantined"} and not held.placed
    (line,) = world.logged("model in quarantine")
    assert (line["model"], line["deaths"]) == ("m", 3)
    configured = world.process().heard()[0]
    assert [model["name"] for model in configured["models"]] == ["other"]
    assert [refused["reason"] for refused in configured["refused"]] == [held.quarantined]


def test_other_engines_refuse_a_model_that_is_put_in_quarantine(server: Callable[..., Server]) -> None:
    world = server(max_restarts=0, replicas=2)
    world.serves()
    held = world.models["m"]
    world.supervisor._engines.load(held, [1])
    world.loads("m", "engine-1")
    assert held.placed
    world.tells("begins", model=held.index, load=held.loads[0])
    world.dies(7)
    order = world.process("engine-1").heard()[-1]
    assert (order["kind"], order["model"], order["reason"]) == ("refuse", held.index, held.quarantined)
    assert held.engines == {0: "quarantined", 1: "quarantined"} and not held.placed


@pytest.mark.parametrize("what", ["it has ended", "it is another one", "nothing was begun"])
def test_a_death_is_not_charged_to_a_model_of_which_no_load_is_under_way(
    server: Callable[..., Server], what: str
) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    if what != "nothing was begun":
        world.tells("begins", model=held.index, load=held.loads[0] + (what == "it is another one"))
    if what == "it has ended":
        world.tells("ends")
    assert "charged_to" not in world.dies(7) and held.deaths == {} and world.child().failures == 1


def computes(world: Server, *, before: bool) -> None:
    """The engine computes a batch of the model, not its first one if it has computed one `before`."""
    index = world.models["m"].index
    world.supervisor._scoreboard.engines["computing"][0] = index + 1
    if before:
        world.supervisor._scoreboard.counters["batches"][0, index] += 1


def test_kills_from_outside_are_excused_until_the_same_model_was_computed_at_many_in_a_row(
    server: Callable[..., Server],
) -> None:
    world = server(max_restarts=1)
    world.serves()
    held = world.models["m"]
    held.deaths[0] = 1
    for kill in range(1, 7):
        computes(world, before=True)
        assert "charged_to" not in world.dies(-9, served=5.0), kill
        assert (held.deaths, world.child().failures, world.child().alive) == ({}, 0, True)
        world.restarts()
    computes(world, before=True)
    assert world.dies(-9, served=5.0)["charged_to"] == "m"
    assert held.deaths == {0: 7} and "7 engines died" in held.quarantined
    assert not world.supervisor._killed, "they are counted anew once it is loaded again"


@pytest.mark.parametrize("between", ["an idle engine", "an engine that has long served"])
def test_kills_from_outside_are_counted_anew_after_one_of(server: Callable[..., Server], between: str) -> None:
    world = server(max_restarts=0)
    world.serves()
    for kill in (1, 2, 3):
        computes(world, before=True)
        world.dies(-9, served=5.0)
        world.restarts()
        assert world.supervisor._killed[0] == (world.models["m"].index, kill)
    if between == "an idle engine":
        world.dies(-9, served=5.0)
        assert world.supervisor._killed[0] == (-1, 1)
    else:
        computes(world, before=True)
        world.dies(-9, served=100.0)
        assert world.supervisor._killed[0] == (world.models["m"].index, 1)
    world.restarts()
    computes(world, before=True)
    assert "charged_to" not in world.dies(-9, served=5.0)


def test_a_kill_from_outside_is_charged_to_a_model_that_the_engine_had_never_computed(
    server: Callable[..., Server],
) -> None:
    world = server()
    world.serves()
    computes(world, before=True)
    world.dies(-9, served=5.0)
    world.restarts()
    computes(world, before=False)  # what the engine before it has computed does not count
    assert world.dies(-9, served=5.0)["charged_to"] == "m" and world.models["m"].deaths == {0: 1}


@pytest.mark.parametrize(("served", "deaths"), [(100.0, 1), (30.0, 2)])
def test_deaths_of_engines_that_served_for_long_are_not_in_a_row(
    server: Callable[..., Server], served: float, deaths: int
) -> None:
    world = server(max_restarts=5)
    world.serves()
    held = world.models["m"]
    computes(world, before=True)
    world.dies(7)
    world.restarts()
    computes(world, before=True)
    world.dies(7, served=served)
    assert held.deaths == {0: deaths}


@pytest.mark.parametrize(("status", "by_supervisor"), [(-9, False), (-9, True), (-11, False)])
def test_a_lack_of_memory_is_the_reason_of_a_kill_that_was_not_the_supervisors(
    server: Callable[..., Server], status: int, by_supervisor: bool
) -> None:
    world = server(max_restarts=0)
    world.serves()
    world.supervisor._memory_kills.look = lambda: "out of memory: ..."  # type: ignore[method-assign]
    world.child().killed_by_supervisor = by_supervisor
    line = world.dies(status, served=5.0)
    (end,) = world.logged("gave up on a child")
    expected = status == -9 and not by_supervisor
    assert ("reason" in line, "reason" in end) == (expected, expected)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("status", [1, -11])
def test_packages_that_do_not_fit_are_named_once_where_an_import_may_have_failed(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, announced: bool, status: int
) -> None:
    monkeypatch.setattr(supervisor_module, "unsatisfied", lambda: {"packages": "torch asks for numpy<2"})
    world = server(max_restarts=0)
    world.serves()
    world.supervisor._announced = announced
    line = world.dies(status)
    (end,) = world.logged("gave up on a child")
    assert ("packages" in line) == (status == 1 and not announced)
    assert ("packages" in end) == (status == 1 and announced)


def test_a_dead_engine_frees_the_rows_that_waited_for_it_and_its_models_load_again(
    server: Callable[..., Server],
) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    lane = world.supervisor._leases.grant(held.index, 1, 32, held.arena_number)
    world.supervisor._leases.release(lane.lane, lane.lease, [0])
    assert world.supervisor._leases.in_use()
    world.dies(7)
    assert not world.supervisor._leases.in_use() and held.engines == {0: "loading"}


def test_a_child_that_cannot_be_started_ends_a_start_and_is_tried_again_by_a_server_that_serves(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(module: str) -> None:
        raise OSError("no memory")

    world = server()
    with monkeypatch.context() as patch:
        patch.setattr(world, "spawn", no_memory)
        with pytest.raises(OSError, match="no memory"):
            world.start()
    world.serves()
    with monkeypatch.context() as patch:
        patch.setattr(world, "spawn", no_memory)
        world.dies(7)
        (line,) = world.logged("cannot start a child yet")
        assert (line["role"], line["error"]) == ("engine-0", "no memory") and world.exit() is None
    world.supervisor._tick(world.child().restart_at)
    assert world.child().alive
