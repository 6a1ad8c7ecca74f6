"""What a supervisor does as time passes: models that nobody keeps, children that hang, memory of the dead, standbys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.supervisor.played_children import MODEL, Server, drains

from jurybox.protocol.wire import BEREFT
from jurybox.server.supervisor import supervisor as supervisor_module
from jurybox.server.supervisor.children import Standby


def test_a_model_is_kept_for_as_much_longer_as_the_supervisor_was_paused_and_no_longer(
    server: Callable[..., Server],
) -> None:
    world = server({"m": MODEL, "of_the_server": MODEL})
    world.serves()
    world.supervisor._announced = False  # else its engines, which show no sign of life, would be replaced
    began = world.tick()
    world.models["m"].until = began + 3.0
    world.supervisor._tick(began + 60.0)  # a keep request could come only now
    assert world.models["m"].until == pytest.approx(began + 63.0)
    for later in (61.0, 62.0, 62.9):
        world.supervisor._tick(began + later)
    assert world.models["m"].until == pytest.approx(began + 63.0) and not world.logged(
        "no client keeps this model any more, unloading it"
    )
    world.supervisor._tick(began + 63.1)
    assert list(world.models) == ["of_the_server"]
    (line,) = world.logged("no client keeps this model any more, unloading it")
    assert line["model"] == "m" and "unload" in world.process().kinds()


@pytest.mark.parametrize(("until", "left"), [(100.0, BEREFT), (1.0, 1.0), (None, None)])
def test_a_model_whose_client_has_gone_is_kept_a_little_longer_and_not_longer_than_before(
    server: Callable[..., Server], until: float | None, left: float | None
) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    lane = world.supervisor._leases.grant(held.index, 1, 32, held.arena_number)
    lane.granted -= 60.0  # and no client has locked it
    now = time.monotonic()
    held.until = None if until is None else now + until
    world.supervisor._tick(now)
    assert held.until == (None if left is None else pytest.approx(now + left))
    (line,) = world.logged("client gone, rows taken back")
    assert (line["lane"], line["rows"]) == (lane.lane, 1) and world.process().kinds() == ["retire"]


def test_engines_that_a_process_paused_go_on_when_it_is_gone(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    world.supervisor._engines.pause(True)
    world.tick()
    assert world.logged("the process that paused the engines is gone, resuming them")
    assert [order["pause"] for order in world.process().heard()] == [True, False]
    world.lines.clear()
    world.tick()
    assert not world.logged("the process that paused the engines is gone, resuming them")


def hang(world: Server) -> None:
    """Let more time pass than a child may be silent, in steps in which the supervisor ran."""
    began = time.monotonic()
    for second in range(8):
        world.supervisor._tick(began + second)


def test_a_child_that_hangs_is_killed_and_its_end_is_no_kill_from_outside(server: Callable[..., Server]) -> None:
    world = server(engine_timeout=5.0)
    world.serves()
    first = world.process()
    hang(world)
    (line,) = world.logged("child hangs, killing it")
    assert line["role"] == "engine-0" and "no sign of life" in line["why"] and first.status == -9
    assert world.child().failures == 1 and world.process() is not first


def test_no_child_is_taken_for_one_that_hangs_before_the_server_serves_and_while_it_drains(
    server: Callable[..., Server],
) -> None:
    world = server(engine_timeout=5.0, drain_timeout=60.0)
    world.serves()
    world.supervisor._announced = False
    hang(world)
    world.supervisor._announced, world.supervisor._drain_until = True, time.monotonic() + 60.0
    world.supervisor._doors_until = time.monotonic() + 60.0
    hang(world)
    assert not world.logged("child hangs, killing it") and world.process().status is None


def test_memory_of_dead_owners_is_looked_for_once_more_some_seconds_after_the_start(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, found = server(), [["a", "b"], ["c"]]
    monkeypatch.setattr(supervisor_module, "sweep", lambda: found.pop(0))
    due = world.supervisor._sweep_at
    world.supervisor._tick(due - 1.0)
    assert len(found) == 2
    world.supervisor._tick(due + 1.0)
    world.supervisor._tick(due + 2.0)
    (line,) = world.logged("removed shared memory of dead owners")
    assert line["segments"] == 2 and len(found) == 1


def test_a_server_without_a_descriptor_to_look_for_memory_goes_on(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep() -> list[str]:
        raise OSError("too many open files")

    world = server()
    monkeypatch.setattr(supervisor_module, "sweep", sweep)
    world.supervisor._tick(world.supervisor._sweep_at + 1.0)
    (line,) = world.logged("cannot look for shared memory of dead owners")
    assert line["error"] == "too many open files"


class Manager:
    """A service manager that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.told.append(name)


def test_the_service_manager_hears_of_progress_then_of_life_and_of_a_stop_once(server: Callable[..., Server]) -> None:
    world = server(http="127.0.0.1:0")
    manager: Any = Manager()
    world.supervisor._manager = manager

    def told() -> list[str]:
        found: list[str] = list(manager.told)
        manager.told.clear()
        return found

    world.tick()
    assert told() == ["starting"], "it expects signs of life from READY on"
    world.serves()
    assert told() == ["ready"]
    world.tick()
    assert told() == ["alive"]
    drains(world)
    assert told() == ["stopping"]
    world.tick()
    assert told() == ["draining", "alive"]
    world.supervisor._drain_until = None
    world.supervisor._tell_stopping()
    assert told() == ["draining", "alive"], "also while the last weights are saved"
    world.closed_already = True
    world.supervisor._close()  # without a signal: a child is lost
    stops = told()
    assert (stops[0], stops[-1]) == ("stopping", "close")


def test_standby_processes_start_when_all_children_serve_and_a_failed_start_ends_nothing(
    server: Callable[..., Server],
) -> None:
    def look(now: float) -> None:
        looks.append(now)
        raise OSError("no memory")

    world, looks = server(http="127.0.0.1:0"), list[float]()
    standby = Standby("m")
    standby.look, standby.close = look, lambda: looks.append(-1.0)  # type: ignore[method-assign]
    world.supervisor._standbys = {standby}
    world.start()
    world.tells("serving")
    world.tick()
    assert not looks
    world.tells("ready", "gateway")
    now = world.tick()
    (line,) = world.logged("cannot start a standby process yet")
    assert looks == [now] and line["error"] == "no memory"
    drains(world)
    world.supervisor._close()
    assert looks == [now, -1.0]
    world.closed_already = True


def test_what_another_process_wrote_to_the_servers_memory_is_reported(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = server()
    world.serves()
    world.tick()
    assert not world.lines
    monkeypatch.setattr(world.supervisor._models, "look", lambda now: ["m"])
    monkeypatch.setattr(world.supervisor._scoreboard, "restore", lambda: True)
    world.tick()
    scoreboard, channel = world.lines
    assert "wrote to the server's scoreboard" in scoreboard["event"]
    assert "wrote to a weights channel" in channel["event"] and channel["model"] == "m"
