"""No order and no model ends an engine or the supervisor: failures are reported."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.faults.conftest import leaving_nothing
from tests.serving import serving, wait_until

from jurybox.client import Error, ModelFailed, ModelNotFound, Refused, connect
from jurybox.server.frontend.readiness import not_ready

X = np.ones((2, 4), np.float32)
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "leaver": {"factory": "tests.models:leaver", "rows": 64},
    "broken": {"factory": "tests.models:broken"},
}
SLOW = {"factory": "tests.models:slow_to_load", "args": {"seconds": 1.5}}
SURROGATE = "half \ud800 a pair"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    allowed = {"factories": ["tests.models:*"]}
    with leaving_nothing(), serving(folder, MODELS, tcp="127.0.0.1:0", **allowed) as running:
        yield running


@pytest.fixture
def server(lasting):
    """One server for all tests; its engine and its supervisor must survive and serve."""
    with lasting.connect() as client:
        before = client.status()["engines"]
    yield lasting
    with lasting.connect() as client:
        after = client.status()["engines"]
        np.testing.assert_array_equal(client.model("affine").infer(X), 2 * X + 1)
    assert [(engine["pid"], engine["restarts"]) for engine in after] == [
        (engine["pid"], engine["restarts"]) for engine in before
    ]


@pytest.fixture(params=["ipc", "tcp"])
def client(request, server):
    where = server.address if request.param == "ipc" else f"tcp://{server.listening('tcp')}"
    with connect(where, timeout=60.0) as connection:
        yield connection


def load_behind(server, name, settings, seconds=0.0):
    """Order a load and do not wait for it, or only so long that a large order is sent."""
    with server.connect() as client, contextlib.suppress(Error):
        client.load(name, settings, timeout=seconds)


def test_a_model_that_failed_to_load_can_be_unloaded_and_loaded_again(server, client):
    client.unload("broken")
    assert "broken" not in client.models()
    with pytest.raises(ModelFailed, match="never works"):
        client.load("broken")
    assert "broken" in client.models()  # the configuration names it


def test_a_model_that_is_still_loading_can_be_unloaded_completely(server, client):
    load_behind(server, "slow", SLOW)
    assert "slow" in client.models()
    client.unload("slow")
    # The next takes its place on the scoreboard while it is still being loaded: neither may be taken for the other.
    with server.connect() as local:
        local.load("next", {"factory": "tests.models:two"})
        assert set(local.model("next").spec.inputs) == {"image", "scale"}
        local.unload("next")
    with pytest.raises(ModelNotFound):
        client.describe("slow")


def test_loads_and_unloads_of_one_name_in_any_order_end_with_the_last(server):
    with server.connect() as client:
        for scale in (2.0, 3.0, 4.0):
            load_behind(server, "busy", {"factory": "tests.models:affine", "args": {"scale": scale}})
            if scale == 3.0:
                client.unload("busy")
        client.load("busy", {"factory": "tests.models:affine", "args": {"scale": 5.0}})
        np.testing.assert_array_equal(client.model("busy").infer(X), 5 * X + 1)
        client.unload("busy")


def test_an_order_larger_than_a_socket_holds_reaches_an_engine_that_was_stopped_whole(server):
    with server.connect() as client:
        engine = client.status()["engines"][0]["pid"]
        os.kill(engine, signal.SIGSTOP)
        try:
            load_behind(server, "large", {"factory": "tests.models:affine", "args": {"text": "x" * 500_000}}, 1.0)
            load_behind(server, "next", {"factory": "tests.models:affine", "args": {"scale": 4.0}})
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_until(lambda: client.describe("large").state == "failed", 30, "the load of the large order")
        assert "unexpected keyword argument 'text'" in client.describe("large").reason
        wait_until(lambda: client.describe("next").state == "ready", 30, "the load of the next order")
        for name in ("large", "next"):
            client.unload(name)


@pytest.mark.parametrize("factory", ["says", "named"])
def test_text_that_cannot_be_encoded_reaches_the_client_in_a_valid_form(server, client, factory):
    args = {"text": SURROGATE} if factory == "says" else {"name": SURROGATE}
    with server.connect() as local, pytest.raises(ModelFailed, match=r"half \? a pair"):
        local.load("odd", {"factory": f"tests.models:{factory}", "args": args})
    for ask in (client.describe, client.model):
        with contextlib.suppress(ModelFailed):
            ask("odd")
    assert "half ? a pair" in client.describe("odd").reason
    str(client.status()).encode()


def test_a_factory_that_ends_its_process_by_exception_fails_like_another(server):
    with server.connect() as client, pytest.raises(ModelFailed, match="SystemExit: 7"):
        client.load("exits", {"factory": "tests.models:exits"})


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("row", [671.0, 672.0, 673.0])
def test_an_exception_that_ends_processes_ends_no_engine(server, transport, row):
    with server.connect(transport=transport) as client:
        model = client.model("leaver", rows=2)
        for _ in range(3):
            with pytest.raises(ModelFailed):
                model.infer(np.full((2, 4), row, np.float32))
        np.testing.assert_array_equal(model.infer(X), X + 1)


def test_a_failed_load_of_a_new_model_leaves_the_server_as_it_was(server, client):
    with server.connect() as local:
        before, health = local.models(), not_ready(local.status())
        with pytest.raises(ModelFailed, match="never works"):
            local.load("try", {"factory": "tests.models:broken"})
        assert (local.models(), not_ready(local.status())) == (before, health)
    with pytest.raises(ModelFailed, match="never works"):
        client.model("try")
    client.unload("try")  # what is recorded of it
    with pytest.raises(ModelNotFound):
        client.describe("try")


def test_a_model_that_is_being_added_does_not_affect_readiness(server):
    with server.connect() as client:
        health = not_ready(client.status())
        load_behind(server, "slow", SLOW)
        while client.describe("slow").state == "loading":
            assert not_ready(client.status()) == health
            time.sleep(0.05)
        client.unload("slow")


def test_the_log_has_the_models_traceback(server):
    with server.connect() as client, pytest.raises(ModelFailed):
        client.model("leaver").infer(np.full((1, 4), 673.0, np.float32))
    wait_until(lambda: "in forward" in server.text(), 20, "the traceback in the log")


def test_a_reload_to_another_spec_that_fails_late_never_computes_in_the_wrong_memory(server):
    with server.connect() as client:
        client.load("spec", {"factory": "tests.models:affine"})
        with pytest.raises(ModelFailed):
            client.load("spec", {"factory": "tests.models:liar"})  # its warm-up fails, when the arena is already new
        with pytest.raises(ModelFailed):
            client.model("spec", timeout=5)
        client.load("spec", {"factory": "tests.models:affine"})
        np.testing.assert_array_equal(client.model("spec").infer(X), 2 * X + 1)
        client.unload("spec")


def test_new_settings_end_publications_only_if_they_say_so(server):
    with server.connect() as client:
        client.load("policy", {"factory": "tests.models:affine", "publish": "double_buffer"})
        with client.publisher("policy") as publisher:
            state = {"scale": np.float32(3), "offset": np.float32(0)}
            version = publisher.publish({key: np.array(value) for key, value in state.items()})
        wait_until(lambda: client.model("policy").infer_reply(X).version == version, 20, "the published weights")
        new = {"factory": "tests.models:affine", "max_batch": 8}
        with pytest.raises(Refused, match=r"'policy' has publish = 'double_buffer' \(weights version 1\).*null"):
            client.load("policy", new)
        client.load("policy", {**new, "publish": "double_buffer"})
        reply = client.model("policy").infer_reply(X)
        assert reply.version == version
        np.testing.assert_array_equal(reply.outputs, 3 * X)
        client.load("policy", {**new, "publish": None})
        assert client.model("policy").infer_reply(X).version == 0
        client.unload("policy")


def test_many_orders_at_once_from_many_clients(server):
    def trouble(number):
        with server.connect() as client:
            for turn in range(6):
                with contextlib.suppress(Error):
                    load_behind(server, f"m{turn % 2}", {"factory": f"tests.models:{('affine', 'broken')[number % 2]}"})
                with contextlib.suppress(Error):
                    client.unload(f"m{turn % 2}")

    threads = [threading.Thread(target=trouble, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with server.connect() as client:
        for name in ("m0", "m1"):
            with contextlib.suppress(ModelNotFound):
                client.unload(name)
            client.load(name, {"factory": "tests.models:affine"})
            np.testing.assert_array_equal(client.model(name).infer(X), 2 * X + 1)
            client.unload(name)
