"""What a supervisor tells its log, its engines and its service manager about models and deaths, word for word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.supervisor.played_children import MODEL, Server

from jurybox.protocol.errors import asleep
from jurybox.protocol.wire import BEREFT
from jurybox.server.supervisor import children

LONG = 1000.0  # seconds; more than a test takes


def test_a_kill_soon_after_an_engine_began_to_serve_counts_as_its_own_failure(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_PROVEN", LONG)
    world = server()
    world.serves()
    assert world.dies(-9, served=5.0)["failures"] == 1 and world.child().failures == 1
    world.restarts()
    world.dies(-9, served=2 * LONG)
    assert world.child().failures == 0, "it was excused, and an engine that served for long begins anew"


def test_engines_that_moved_weights_get_the_order_to_move_them_back_with_all_that_they_need(
    server: Callable[..., Server],
) -> None:
    world = server({"first": MODEL, "m": MODEL}, replicas=2)
    world.serves()
    held = world.models["m"]

    def moved(kind: str, engine: int, reason: str = "") -> None:
        world.tells(kind, f"engine-{engine}", model=held.index, load=held.loads[engine], bytes=3 << 20, reason=reason)

    held.fall_asleep()
    for engine in (0, 1):
        moved("asleep", engine)
    held.wake_up()
    world.forget()
    moved("awake", 0)
    moved("awake", 1, "no room on the device")
    assert [line["event"] for line in world.lines] == ["model awake", "model not awake"]
    assert world.lines[0]["device_mib"] == 3.0
    (order,) = world.process("engine-0").heard()
    assert order == {"kind": "sleep", "model": held.index, "load": held.loads[0], "reason": str(asleep("m"))}
    moved("asleep", 0)
    held.wake_up()
    world.forget()
    moved("awake", 0)
    moved("awake", 1)
    held.fall_asleep()
    moved("asleep", 1)
    moved("asleep", 0, "no room on the host")
    (order,) = world.process("engine-1").heard()
    assert order == {"kind": "wake", "model": held.index, "load": held.loads[1]}


def test_restored_weights_are_logged_with_their_version_and_folder(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prepare(held: object, channel: object, settings: object) -> int | None:
        prepared.append((held, settings))
        return restored.pop(0)

    folder = str(tmp_path / "weights")
    restored, prepared = [41, None], list[tuple[Any, Any]]()
    world = server({"m": {**MODEL, "publish": "snapshot", "save_dir": folder}})
    monkeypatch.setattr(world.supervisor._weights_saver, "prepare", prepare)
    world.start()
    world.loads(weights=[["bias", "float32", [4]]])
    (line,) = world.logged("weights restored")
    assert (line["model"], line["version"], line["folder"]) == ("m", 41, folder)
    world.supervisor._engines.load(world.models["m"])
    world.loads(weights=[["bias", "float32", [4]]])
    assert len(world.logged("weights restored")) == 1
    assert prepared == [(world.models["m"], world.models["m"].settings)] * 2


@pytest.mark.parametrize("announced", [True, False])
def test_a_service_manager_hears_of_a_stop_only_after_it_heard_of_a_start(
    server: Callable[..., Server], announced: bool
) -> None:
    class Manager:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: told.append(name)

    told = list[str]()
    world = server()
    world.serves()
    world.supervisor._manager = Manager()  # type: ignore[assignment]
    world.supervisor._announced, world.closed_already = announced, True
    world.supervisor._close()
    assert ("stopping" in told) == announced and told[-1] == "close"


def test_a_model_of_several_clients_is_kept_until_the_last_of_them_would_ask_again(
    server: Callable[..., Server],
) -> None:
    world = server({"m": MODEL, "other": MODEL})
    world.serves()
    now = world.tick()
    for held in world.models.values():
        held.until = now + LONG
    held = world.models["m"]
    lanes = [world.supervisor._leases.grant(held.index, 1, 32, held.arena_number) for _ in range(2)]
    for lane in lanes:
        lane.granted -= 60.0
    now = world.tick()
    assert held.until == now + BEREFT and world.models["other"].until != held.until
