"""How a server comes to serve, drains at a signal, and ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.unit.supervisor.played_children import MODEL, Process, Server, drains

from jurybox.protocol.errors import Refused
from jurybox.server.settings.config import Configuration


def test_a_server_drains_from_the_outside_inwards(server: Callable[..., Server]) -> None:
    world = server(http="127.0.0.1:0", tcp="127.0.0.1:0", replicas=2)
    world.serves()
    drains(world)
    assert world.logged("draining; a second signal stops at once") and world.supervisor._control.draining
    assert world.process("gateway").kinds() == world.process("relay").kinds() == ["drain"]
    world.tells("drained", "gateway")
    assert [order["kind"] for order in world.process().heard()] == ["pause"] and not world.closed()
    world.tells("drained", "relay")
    assert world.closed()
    assert world.process().kinds() == ["drain"] and world.process("engine-1").kinds() == ["pause", "drain"]
    world.tells("drained", "engine-1")
    assert world.exit() is None
    world.tells("drained")
    assert world.exit() == 0


def test_a_service_that_starts_or_dies_while_the_server_drains_does_not_hold_it_up(
    server: Callable[..., Server],
) -> None:
    world = server(http="127.0.0.1:0", tcp="127.0.0.1:0")
    world.serves()
    world.child("relay").serving = False
    drains(world)
    world.process("gateway").ends(1)
    world.turn()
    assert not world.logged("child died") and not world.child("gateway").alive
    assert world.closed(), "one is dead, and the other has accepted nothing"
    world.process("relay").heard()
    world.tells("ready", "relay")
    assert world.process("relay").kinds() == ["drain"]
    world.process().ends(1)
    world.turn()
    assert world.exit() == 0, "without engines nothing can be answered any more"


def test_engines_drain_before_the_end_although_the_doors_still_have_requests(server: Callable[..., Server]) -> None:
    world = server(http="127.0.0.1:0", drain_timeout=100.0)
    world.serves()
    drains(world)
    assert world.supervisor._drain_until is not None
    began = world.supervisor._drain_until - 100.0
    world.supervisor._tick(began + 79.0)
    assert not world.closed()
    world.supervisor._tick(began + 81.0)
    assert world.closed() and world.exit() is None
    world.supervisor._tick(began + 90.0)
    assert [kind for kind in world.process().kinds() if kind == "drain"] == ["drain"]
    world.supervisor._tick(began + 101.0)
    assert world.exit() == 0 and world.logged("draining took too long, stopping")


@pytest.mark.parametrize("how", ["a second signal", "two at once", "before it served"])
def test_a_signal_stops_at_once(server: Callable[..., Server], how: str) -> None:
    world = server()
    world.serves()
    world.supervisor._announced = how != "before it served"
    world.kernel.send(b"\x02\x02" if how == "two at once" else b"\x02")
    world.turn()
    if how == "a second signal":
        assert world.exit() is None
        drains(world)
    assert world.exit() == 0
    said = "interrupted before it served, stopping" if how == "before it served" else "stopping at once"
    assert world.logged(said)
    world.closed_already = True
    world.supervisor._close()
    assert bool(world.logged("stopped")) == (how != "before it served"), "then one line is enough"


@pytest.mark.parametrize("error", [Refused("no room"), OSError("no room")], ids=["refused", "OSError"])
def test_a_fault_in_the_loop_ends_a_start_with_its_error_and_no_server_that_serves(
    server: Callable[..., Server], error: Exception
) -> None:
    def part() -> None:
        raise error

    world = server()
    with pytest.raises(type(error), match="no room"):
        world.supervisor._survive("tick", part)
    world.serves()
    world.supervisor._survive("tick", part)
    (line,) = world.logged("a part of the loop failed")
    assert line["part"] == "tick" and "no room" in line["error"] and "Traceback" in line["exception"]


def test_an_odd_fault_in_the_loop_does_not_end_a_start(server: Callable[..., Server]) -> None:
    def part() -> None:
        raise ValueError("odd")

    world = server()
    world.supervisor._survive("hearing engine-0", part)
    (line,) = world.logged("a part of the loop failed")
    assert line["part"] == "hearing engine-0" and "ValueError" in line["exception"]


@pytest.mark.parametrize(("states", "status"), [(("failed", "ready"), 3), (("ready", "ready"), 0)])
def test_a_dry_run_reports_what_it_tried_with_the_addresses_of_the_server_that_is_meant(
    server: Callable[..., Server], states: tuple[str, str], status: int
) -> None:
    world = server({"m": MODEL, "n": MODEL})
    meant = Configuration.model_validate({"server": {"address": "ipc:///run/meant/engine", "http": "1.2.3.4:80"}})
    world.start()
    world.supervisor._announce(meant, late=False)
    assert world.exit() is None, "it has not loaded yet"
    world.tells("serving")
    for name, state in zip(("m", "n"), states, strict=True):
        held = world.models[name]
        held.engines[0] = state
    world.supervisor._announce(meant, late=False)
    failed = "failed" in states
    (line,) = world.logged("dry run done, some models failed" if failed else "dry run done, all models work")
    assert (line["address"], line["http"]) == ("ipc:///run/meant/engine", "1.2.3.4:80")
    assert line["level"] == ("warning" if failed else "info") and line.get("failed", "") == ("m" if failed else "")
    assert line["models"] == ("n (ready)" if failed else "m (ready), n (ready)")
    assert world.exit() == status


@pytest.mark.parametrize(
    ("died", "remedy"),
    [("engine-0", "'child died' above has the reason"), ("engine-1", "raise server.start_timeout")],
)
def test_a_start_that_takes_too_long_says_what_it_waits_for(
    server: Callable[..., Server], died: str, remedy: str
) -> None:
    world = server(start_timeout=77.0, replicas=2)
    world.start()
    world.tells("serving", "engine-1")
    world.child(died).failures = 1
    world.supervisor._announce(None, late=True)
    (line,) = [line for line in world.lines if line["event"].startswith("could not start")]
    assert line["event"] == f"could not start within 77.0 s: {remedy}"
    assert (line["waiting_for"], line["models"]) == ("engine-0", "m (loading)") and world.exit() == 3


def test_a_server_that_serves_says_where_and_what_and_how_much_memory_it_shares(server: Callable[..., Server]) -> None:
    world = server({"m": {**MODEL, "rows": 20_000}}, http="127.0.0.1:0")
    world.start()
    world.tells("ready", "gateway", http="127.0.0.1:8080", grpc_http2="")
    world.tells("serving")
    world.loads()
    world.readies()
    world.supervisor._announce(None, late=False)
    (line,) = world.logged("serving")
    arena, scoreboard = world.models["m"].arena, world.supervisor._scoreboard
    assert arena is not None
    assert line["shared_memory_mib"] == round((arena.segment.size + scoreboard.segment.size) / 2**20, 1)
    assert (line["http"], line["models"], line["devices"]) == ("127.0.0.1:8080", "m (ready)", "cpu")
    assert line["address"] == f"ipc://{world.folder}/engine" and line["tcp"] == ""
    assert not {"grpc_http2", "robots", "dialects", "failed"} & line.keys(), "only where there are any"


def test_a_server_without_models_serves(server: Callable[..., Server]) -> None:
    server({}).serves()


def test_a_loop_whose_children_never_serve_ends_and_stops_them(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, turns = server(start_timeout=0.01), list[float]()
    listen = world.supervisor._listen

    def turn(timeout: float) -> None:
        assert len(turns) < 120, "it still waits"
        turns.append(timeout)
        listen(timeout)

    monkeypatch.setattr(world.supervisor, "_listen", turn)
    world.closed_already = True
    assert world.supervisor.run() == 3
    assert [process.status for process in world.spawned] == [0] and world.logged("stopped")[0]["status"] == 3


@pytest.mark.parametrize(("announced", "status"), [(True, 1), (False, 3)])
def test_a_loop_that_cannot_go_on_stops_all_children_and_says_why(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, announced: bool, status: int
) -> None:
    def listen(timeout: float) -> None:
        raise OSError("no descriptor")

    world = server()
    world.supervisor._announced, world.closed_already = announced, True
    monkeypatch.setattr(world.supervisor, "_listen", listen)
    assert world.supervisor.run() == status
    assert world.logged("failed")[0]["error"] == "no descriptor"
    assert [process.status for process in world.spawned] == [0]


def test_a_server_whose_models_all_failed_does_not_start(server: Callable[..., Server]) -> None:
    world = server({"m": MODEL, "n": MODEL})
    world.start()
    world.models["m"].engines[0], world.models["n"].quarantined = "failed", "it ends engines"
    world.supervisor._announce(None, late=False)
    (line,) = world.logged("could not start: every model failed")
    assert line["models"] == "m (failed), n (quarantined)" and world.exit() == 3


def test_children_are_stopped_from_the_outside_inwards_and_nothing_is_left(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, ended = server(http="127.0.0.1:0", tcp="127.0.0.1:0", replicas=2), []
    world.serves()
    (world.folder / "engine.0").touch()
    processes = [world.process(role) for role in ("gateway", "relay", "engine-0", "engine-1")]

    def ends(process: Process, status: int) -> None:
        ended.append(process)
        Process.ends(process, status)

    for process in processes:
        monkeypatch.setattr(process, "ends", partial(ends, process))
    processes[2].stops = False
    world.supervisor._exit = 0
    world.supervisor._close()
    assert ended == processes and [process.status for process in processes] == [0, 0, -9, 0]
    assert not (world.folder / "engine").exists()
    assert world.logged("stopped")[0]["status"] == 0
    world.closed_already = True
