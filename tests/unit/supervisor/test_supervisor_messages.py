"""What a supervisor does about the messages of its engines, of the gateway and of the relay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.serving import wait_until
from tests.unit.supervisor.played_children import MODEL, VECTOR, WARM_UP, Server

from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.protocol.spec import TensorSpec, plain_specs
from jurybox.server.settings.config import ModelSettings
from jurybox.server.supervisor import supervisor as supervisor_module

# ---- what children tell


def test_a_bad_message_is_logged_and_the_next_one_is_heard(server: Callable[..., Server]) -> None:
    world = server()
    world.start()
    world.process().tells("retired", lane=1)
    world.process().tells("serving")
    world.turn()
    (line,) = world.logged("a message of a child failed")
    assert (line["role"], line["kind"]) == ("engine-0", "retired") and "lease" in line["error"]
    assert world.child().serving


def test_an_order_that_an_engine_could_not_carry_out_is_logged(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    world.tells("order failed", order="load", reason="why\0")
    (line,) = world.logged("an engine could not carry out an order")
    assert (line["role"], line["order"]) == ("engine-0", "load") and line["reason"].startswith("why")


def test_messages_about_a_load_that_is_outdated_change_nothing(server: Callable[..., Server]) -> None:
    world = server()
    world.start()
    index = world.models["m"].index
    fields: dict[str, Any] = {"inputs": VECTOR, "outputs": VECTOR, "state": [], "digest": "d", "weights": []}
    world.tells("loaded", model=index, load=77, **fields)
    world.tells("ready", model=index, load=77, arena=1, warm_up=WARM_UP)
    world.tells("failed", model=index, load=77, reason="why")
    world.tells("asleep", model=index, load=77, bytes=1, reason="")
    held = world.models["m"]
    assert (held.spec, held.arena, held.engines) == (None, None, {0: "loading"})


def test_an_engine_whose_model_cannot_be_placed_drops_it_and_hears_why(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def adopt(*_: object) -> bool:
        raise Refused("no room for the arena")

    world = server()
    world.start()
    world.forget()
    monkeypatch.setattr(world.supervisor._models, "adopt", adopt)
    world.loads()
    (order,) = world.process().heard()
    assert (order["kind"], order["load"], order["reason"]) == (
        "abandon",
        world.models["m"].loads[0],
        "no room for the arena",
    )


def test_a_load_whose_folder_is_still_being_saved_to_waits_until_it_is_free(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, busy = server(), [True]
    world.start()
    world.forget()
    monkeypatch.setattr(world.supervisor._weights_saver, "busy", lambda *_: busy[0])
    world.loads()
    world.tick()
    assert world.process().kinds() == []
    busy[0] = False
    world.tick()
    world.tick()
    assert world.process().kinds() == ["arena"]


def test_a_load_with_another_spec_takes_back_the_rows_of_the_earlier_one(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    lane = world.supervisor._leases.grant(held.index, 1, 32, held.arena_number)
    world.supervisor._engines.load(held)
    world.loads()
    assert world.process().kinds() == ["load", "arena"] and lane.retiring is None
    world.supervisor._engines.load(held)
    world.loads(spec=plain_specs({"x": TensorSpec("float32", (5,))}))
    load, retire, arena = world.process().heard()
    assert (load["kind"], retire["kind"], arena["kind"]) == ("load", "retire", "arena")
    assert retire["lane"] == lane.lane and world.supervisor._leases.held(lane.lane, lane.lease) is None
    assert (arena["number"], arena["rows"], arena["weights"]) == (held.arena_number, 32, "")


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("served", [True, False])
def test_a_model_of_a_client_that_fails_before_it_ever_served_is_removed_and_its_error_kept(
    server: Callable[..., Server], configured: bool, served: bool
) -> None:
    world = server({"m": MODEL, "own": MODEL})
    world.serves()
    held = world.models["m"] if served else world.supervisor._models.add("new", ModelSettings.model_validate(MODEL))
    held.configured = configured
    world.supervisor._engines.load(held)
    held.engines[0] = "loading"  # as after a restart: no earlier load serves
    world.tells("failed", model=held.index, load=held.loads[0], reason="")
    (line,) = world.logged("model failed")
    assert (line["model"], line["role"], line["reason"]) == (held.name, "engine-0", "no reason was given")
    assert (held.name in world.models) == (configured or served)
    assert ("unload" in world.process().kinds()) == (not configured and not served)
    assert world.supervisor._models.described(held.name) is held


@pytest.mark.parametrize("graphs", [0, 5])
def test_a_model_that_is_ready_is_logged_with_what_its_warm_up_took(server: Callable[..., Server], graphs: int) -> None:
    world = server()
    world.start()
    world.loads()
    held = world.models["m"]
    warm_up = {"seconds": 0.12345, "shapes": [1, 2], "graphs": graphs}
    world.tells("ready", model=held.index, load=held.loads[0], arena=held.arena_number, warm_up=warm_up)
    (line,) = world.logged("model ready")
    assert (line["model"], line["role"], line["warm_up"]) == ("m", "engine-0", 0.123)
    assert line.get("compiled", 0) == graphs and held.warm_up == warm_up and held.state == "ready"


def test_moved_weights_are_logged_in_mib_and_a_failure_with_its_reason(server: Callable[..., Server]) -> None:
    world = server(replicas=2)
    world.serves()
    held = world.models["m"]
    held.fall_asleep()
    world.tells("asleep", model=held.index, load=held.loads[0], bytes=3 << 19, reason="")
    (line,) = world.logged("model asleep")
    assert (line["role"], line["device_mib"], held.engines) == ("engine-0", 1.5, {0: "sleeping", 1: "ready"})
    world.forget()
    world.tells("asleep", "engine-1", model=held.index, load=held.loads[1], bytes=0, reason="no room")
    (line,) = world.logged("model not asleep")
    assert (line["role"], line["reason"]) == ("engine-1", "no room")
    assert world.process().kinds() == ["wake"], "a model sleeps in all of its engines or in none"


PUBLISHES = {**MODEL, "publish": "snapshot"}


def weights(size: int) -> dict[str, Any]:
    return {"weights": [["bias", "float32", [size]]]}


def test_the_weights_channel_of_a_load_is_the_models_once_it_serves(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, saved = server({"m": PUBLISHES}), list[object]()
    saver = world.supervisor._weights_saver
    monkeypatch.setattr(saver, "take_over", lambda held, channel, settings: saved.append(channel))
    world.start()
    held = world.models["m"]
    world.loads(**weights(4))
    first = held.channel
    assert first is not None, "no load is in service that needs its own"
    assert world.process().heard()[-1]["weights"] == first.name
    world.readies()
    world.supervisor._engines.load(held)
    world.loads(**weights(5))
    assert held.channel is first and len(held.channels) == 2
    assert world.process().heard()[-1]["weights"] == held.channels[1].name
    world.readies()
    assert held.channel is not first and held.channels == [held.channel]
    assert {*saved[:-1]} == {first} and saved[-1] is held.channel, "whose publications are saved"


@pytest.mark.parametrize("then", ["it is loaded anew", "it fails", "its engine dies"])
def test_the_weights_channel_of_a_load_that_never_served_is_closed(server: Callable[..., Server], then: str) -> None:
    world = server({"m": PUBLISHES})
    world.start()
    held = world.models["m"]
    world.loads(**weights(4))
    world.readies()
    world.supervisor._engines.load(held)
    world.loads(**weights(5))
    first, second = held.channels
    if then == "it is loaded anew":
        world.supervisor._engines.load(held)
        world.loads(**weights(4))
    elif then == "it fails":
        world.tells("failed", model=held.index, load=held.loads[0], reason="why")
    else:
        world.dies(-11)
        world.tick()
    assert held.channels == [first] == [held.channel] and second.closed and not first.closed


def test_engines_that_load_other_settings_than_those_in_service_load_anew_if_the_channel_was_replaced(
    server: Callable[..., Server],
) -> None:
    world = server({"m": PUBLISHES}, replicas=2)
    world.start()
    held = world.models["m"]
    for role in ("engine-0", "engine-1"):
        world.loads(role=role, **weights(4))
        world.readies(role=role)
    world.supervisor._engines.load(held, [1])
    world.supervisor._models.add("m", ModelSettings.model_validate({**PUBLISHES, "max_batch": 8}))
    world.supervisor._engines.load(held, [0])
    world.forget()
    world.loads(**weights(5))
    world.readies()
    assert world.process("engine-1").kinds() == ["load"] and held.orders[1] is held.settings


def test_a_replaced_arena_stays_until_no_engine_computes_in_rows_of_it(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    held = world.models["m"]
    arena = held.arena
    assert arena is not None
    lane = world.supervisor._leases.grant(held.index, 1, 32, held.arena_number)
    world.supervisor._engines.load(held)
    world.loads(spec=plain_specs({"x": TensorSpec("float32", (5,))}))
    world.tick()
    assert held.arena is not arena and arena.segment.fd >= 0
    world.tells("retired", lane=lane.lane, lease=lane.lease)
    world.tick()
    assert arena.segment.fd < 0


def test_a_spec_that_no_request_could_have_ends_a_start_and_later_fails_its_load(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(*_: object) -> None:
        raise SpecMismatch("[dialects.d] can never be answered")

    monkeypatch.setattr(supervisor_module, "require_answerable", require)
    world = server()
    world.start()
    world.loads()
    (line,) = world.logged("could not start")
    assert line["error"] == "[dialects.d] can never be answered" and world.exit() == 3
    world.supervisor._exit, world.supervisor._announced = None, True
    world.forget()
    world.loads()
    (order,) = world.process().heard()
    assert order["kind"] == "abandon" and world.exit() is None and not world.lines


# ---- gateway and relay


def test_the_gateways_addresses_are_those_that_it_reports_and_others_stay(server: Callable[..., Server]) -> None:
    world = server(http="127.0.0.1:0", tcp="127.0.0.1:0")
    world.start()
    world.tells("ready", "gateway", http="127.0.0.1:8080", secret="x")
    listening = world.supervisor._control.listening
    assert (listening["http"], listening["tcp"]) == ("127.0.0.1:8080", "127.0.0.1:0") and "secret" not in listening
    assert world.child("gateway").serving and not world.child("relay").serving
    world.tells("alive", "relay", relay={"clients": 3})
    world.tells("alive", "gateway")
    assert world.supervisor._control.relay == {"clients": 3}


@pytest.mark.parametrize(("announced", "status"), [(True, None), (False, 3)])
def test_a_gateway_that_cannot_listen_ends_a_start_and_no_server_that_serves(
    server: Callable[..., Server], announced: bool, status: int | None
) -> None:
    world = server(http="127.0.0.1:0")
    world.serves()
    world.supervisor._announced = announced
    world.tells("failed", "gateway", reason="the port is taken")
    (line,) = world.logged("gateway failed")
    assert line["reason"] == "the port is taken" and world.exit() == status


def test_an_order_that_a_child_did_not_read_at_once_is_sent_on_when_it_does(server: Callable[..., Server]) -> None:
    world = server()
    world.serves()
    world.child().send("load", text="x" * (1 << 22))
    assert world.child().orders_waiting == 1
    heard: list[Any] = []
    reader = threading.Thread(target=lambda: heard.append(world.process()._end.receive(30)), daemon=True)
    reader.start()

    def read() -> bool:
        world.turn()
        return bool(heard)

    wait_until(read)
    assert heard[0]["kind"] == "load" and world.child().orders_waiting == 0
