"""Models that behave oddly on a real server: they are answered rightly or refused, and the others never notice."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.faults.conftest import leaving_nothing
from tests.serving import serving, wait_until

from jurybox.client import Error, ModelFailed

X, BAD = np.full((1, 4), 3, np.float32), np.full((1, 4), -1, np.float32)
FACTORY = "tests.odd_models:"
MODELS = {
    **{how: {"factory": f"{FACTORY}scale", "args": {"how": how}} for how in ("weight", "view", "computed")},
    "compiled": {"factory": f"{FACTORY}compiled"},
    "parallel": {"factory": f"{FACTORY}parallel"},
}
MODELS = {name: {**model, "publish": "double_buffer"} for name, model in MODELS.items()} | {
    "thirds": {"factory": f"{FACTORY}thirds"},
    "slow": {"factory": f"{FACTORY}slow", "args": {"seconds": 0.15}},
    "stuck": {"factory": f"{FACTORY}slow", "forward_timeout": 0.3},
    "restless": {"factory": f"{FACTORY}restless_forward"},
    "shared": {"factory": f"{FACTORY}shared"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    factories = [f"{FACTORY}*", "tests.models:*"]
    with leaving_nothing():
        with serving(tmp_path_factory.mktemp("server"), MODELS, factories=factories, engine_timeout=4.0) as running:
            yield running


@pytest.mark.parametrize("name", ["weight", "view", "computed", "compiled", "parallel"])
def test_answers_are_of_the_version_that_they_name_whatever_keeps_the_weights(server, name):
    with server.connect() as client, client.publisher(name) as publisher:
        model = client.model(name, rows=1)
        assert (model.infer_reply(X).version, model.infer(X)[0, 0]) == (0, 3)
        until = time.monotonic() + 60
        for version in (1, 2, 3):
            publisher.publish({"scale": np.full(4, 10 * version, np.float32)})
            while (reply := model.infer_reply(X)).version < version and time.monotonic() < until:
                np.testing.assert_array_equal(reply.outputs, X * max(1, 10 * reply.version))
            np.testing.assert_array_equal(reply.outputs, X * 10 * version)


def test_a_model_that_fails_slowly_takes_neither_its_engine_nor_other_models_away(server):
    with server.connect() as client:
        models = [client.model("slow", rows=1) for _ in range(16)]
        other = client.model("thirds", rows=1)
        other.infer(np.ones((1, 4), np.int64))
        restarts = client.status()["engines"][0]["restarts"]
        tickets = [model.submit(BAD, timeout=100) for model in models]
        waited = []
        while not all(ticket.done() for ticket in tickets):
            began = time.monotonic()
            other.infer(np.ones((1, 4), np.int64), timeout=100)
            waited.append(time.monotonic() - began)
        for ticket in tickets:
            with pytest.raises(ModelFailed, match="negative"):
                ticket.result(100)
        assert len(waited) >= 8, "it was answered between the parts: 31 forwards of 0.15 s"
        assert client.status()["engines"][0]["restarts"] == restarts


def test_a_forward_that_does_not_end_fails_and_charges_nobody_else(server):
    with server.connect() as client:
        model = client.model("stuck", rows=1)
        restarts = client.status()["engines"][0]["restarts"]
        with pytest.raises(ModelFailed, match=r"within forward_timeout = 0.3 s; raise models.stuck.forward_timeout"):
            model.infer(BAD, timeout=100)
        np.testing.assert_array_equal(model.infer(X, timeout=100), X + 1)
        assert client.status()["engines"][0]["restarts"] == restarts
    assert "in forward" in server.text(), "the log has the place where it was"


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_factory_changes_for_the_process_changes_no_answer_of_others(server, fails):
    with server.connect() as client:
        model, stop, wrong, asked = client.model("thirds", rows=1), threading.Event(), [], []
        rows = np.arange(1, 5).reshape(1, 4)
        expected = rows.astype(np.float32) / np.float32(3)

        def ask():
            while not stop.is_set():
                got = model.infer(rows, timeout=100)
                asked.append(1)
                if not np.array_equal(got, expected):
                    wrong.append(got)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            settings = {"factory": f"{FACTORY}restless", "args": {"seconds": 0.3, "fails": fails}}
            if fails:
                with pytest.raises(Error, match="this factory fails"):
                    client.load("arriving", settings, timeout=100)
            else:
                client.load("arriving", settings, timeout=100)
                np.testing.assert_array_equal(client.model("arriving").infer(X), X)
                client.unload("arriving")
            before = len(asked)
            wait_until(lambda: len(asked) > before + 10, 60)
        finally:
            stop.set()
            asking.join()
        assert not wrong
        line = next(line for line in reversed(server.text().splitlines()) if "changed what others compute in" in line)
        for name in ("working directory", "NumPy's error state", "torch's default dtype", "number of threads"):
            assert name in line


def test_what_a_forward_changes_for_the_process_is_set_back_and_named(server):
    with server.connect() as client:
        model, thirds = client.model("restless", rows=1), client.model("thirds", rows=1)
        np.testing.assert_array_equal(model.infer(np.full((1, 4), 7, np.float32)), np.full((1, 4), 8))

        def named():
            lines = [line for line in server.text().splitlines() if "model=restless" in line and "set back" in line]
            return all(any(name in line for line in lines) for name in ("default dtype", "error state", "directory"))

        wait_until(named, 30)
        rows = np.arange(1, 5).reshape(1, 4)
        np.testing.assert_array_equal(thirds.infer(rows), rows.astype(np.float32) / np.float32(3))


def test_one_module_is_not_served_as_two_models_if_its_weights_may_change(server):
    with server.connect() as client:
        settings = {"factory": f"{FACTORY}shared"}
        with pytest.raises(Error, match=r"weights that model 'shared' already has, and models.second.publish changes"):
            client.load("second", {**settings, "publish": "double_buffer"}, timeout=100)
        client.load("second", settings, timeout=100)
        np.testing.assert_array_equal(client.model("second").infer(X), client.model("shared").infer(X))
        with pytest.raises(Error, match="weights in common with model 'second'"):
            client.sleep("shared", timeout=100)
        np.testing.assert_array_equal(client.model("shared").infer(X), X)
        client.unload("second")
