"""Open rows over every transport: rows of any size, rows that fail alone, sessions."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import Busy, ModelFailed, Refused, RowFailed, SessionLost, SpecMismatch, connect

MODELS = {
    name: {"factory": f"tests.open_models:{name}", "max_batch": 8, "rows": 64, "lane_rows": 8}
    for name in ("brightness", "shout", "prompted", "threshold", "picky", "running_sum")
}
MODELS["running_sum"]["rows"] = 256  # of which the gateway takes up to half
MODELS["few"] = {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 32}  # the gateway takes none
MODELS["of_two"] = {"factory": "tests.open_models:lstm", "args": {"inputs": 2}, "max_batch": 8, "rows": 64}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, tcp="127.0.0.1:0", grpc="127.0.0.1:0") as running:
        yield running


@pytest.fixture(params=["shm", "zmq", "tcp", "grpc"])
def client(request, server):
    local = request.param in ("shm", "zmq")
    address = server.address if local else f"{request.param}://{server.listening(request.param)}"
    with connect(address, transport=request.param if local else "auto", timeout=60) as connection:
        yield connection


def images(*sides):
    rng = np.random.default_rng(len(sides))
    return [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in sides]


def test_rows_of_any_size_are_sent_and_returned(client):
    pictures = images((4, 5), (9, 2), (1, 1), (30, 30), (2, 2), (3, 4), (5, 5), (6, 6), (7, 7), (8, 8), (9, 9))
    model = client.model("brightness", rows=6)  # fewer than there are pictures: requests are split
    np.testing.assert_allclose(model.infer(pictures), [p.mean() / 255 for p in pictures], rtol=1e-5)
    masks = client.model("threshold").infer(pictures)
    for mask, picture in zip(masks, pictures, strict=True):
        np.testing.assert_array_equal(mask, picture.mean(axis=2) > 127)


def test_text_and_pictures_together(client):
    assert client.model("shout").infer(["größer", b"", "x" * 400]) == ["GRÖSSER".encode(), b"", b"X" * 400]
    answers = client.model("prompted").infer({"image": images((3, 3), (5, 4)), "prompt": ["a", "four"]})
    np.testing.assert_array_equal(answers["words"], [1, 4])


def test_single_calls_take_any_row_that_fits_and_refuse_others_with_the_same_error(client):
    model, shout = client.model("threshold", rows=2), client.model("shout", rows=2)
    for picture in (*images((30, 30), (1, 7)), images((9, 12))[0][:, ::3], images((4, 4))[0].transpose(1, 0, 2)):
        np.testing.assert_array_equal(model(picture), picture.mean(axis=2) > 127)
        np.testing.assert_array_equal(model({"image": picture}), picture.mean(axis=2) > 127)
    wrong = (np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((33, 33, 3), np.uint8))
    for picture in (*wrong, np.zeros((0, 2000, 3), np.uint8), np.zeros((4, 4, 3), np.float32)):
        with pytest.raises(SpecMismatch) as single:
            model(picture)
        with pytest.raises(SpecMismatch) as several:
            model.infer([picture])
        assert str(single.value) == str(several.value)
    assert (shout("größer"), shout(b"a"), shout(""), shout(b"")) == ("GRÖSSER".encode(), b"A", b"", b"")
    for text in ("x" * 401, b"x" * 401, 3):
        with pytest.raises(SpecMismatch, match="'text' of 'shout', row 0"):
            shout(text)
    assert shout(b"x" * 400) == b"X" * 400
    both = client.model("prompted", rows=2)
    assert both({"image": images((5, 4))[0], "prompt": "four"}) == {"size": 20, "words": 4}
    np.testing.assert_array_equal(model.infer(images((3, 2)))[0], images((3, 2))[0].mean(axis=2) > 127)


def test_a_row_of_another_shape_and_as_many_bytes_is_refused(client):
    model, row = client.model("picky", rows=8), np.ones(1, np.float32)
    assert model(row) == model.row_reply(row, 60.0).outputs == 2
    for wrong in (row[0], row[None]):
        for ask in (model, lambda given: model.row_reply(given, 60.0)):
            with pytest.raises(SpecMismatch, match="a call takes one row"):
                ask(np.asarray(wrong))


def test_a_model_with_state_computes_no_row_without_a_session(client):
    model = client.model("of_two")
    for ask in (model, lambda row: model.row_reply(row, 60.0)):
        for row in (np.ones(2, np.float32), np.array(1.0)):  # the second has as many bytes
            with pytest.raises(Refused, match=r"keeps state \(hidden, cell\)"):
                ask(row)


def test_rows_fail_alone_on_every_path(client):
    model = client.model("picky", rows=8)
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    with pytest.raises(RowFailed) as failed:
        model.infer(x)
    assert failed.value.errors == {3: "three", 6: "six"}
    np.testing.assert_array_equal(failed.value.outputs[[0, 1, 2, 4, 5, 7]], [0, 2, 4, 8, 10, 14])
    with pytest.raises(RowFailed, match="three"):
        model(x[3])
    with pytest.raises(RowFailed) as failed:
        model.submit(x[2:4]).result()
    assert failed.value.errors == {1: "three"}
    with model.rows(4) as rows:
        rows.inputs["x"][:] = x[:4]
        with pytest.raises(RowFailed) as failed:
            rows.infer()
        assert failed.value.errors == {3: "three"} and rows.outputs["y"][1] == 2
    with pytest.raises(RowFailed):
        asyncio.run(model.infer_async(x))
    assert model(x[4]) == 8


def test_zero_copy_rows_take_pictures_in_place(client):
    picture = images((6, 7))[0]
    with client.model("threshold").rows(2) as rows:
        for i in range(2):
            rows.place("image", i, picture.shape)[:] = picture
        rows.infer()
        np.testing.assert_array_equal(rows.row("mask", 1), picture.mean(axis=2) > 127)


def test_sessions_on_every_path(client):
    x = np.ones((4, 1), np.float32)
    with client.model("running_sum").sessions(4) as sessions:
        np.testing.assert_array_equal(sessions.infer(x), [1] * 4)
        np.testing.assert_array_equal(asyncio.run(sessions.infer_async(x[:2], session=[3, 1])), [2, 2])
        tickets = [sessions.submit(x[:1], session=[0]) for _ in range(3)]
        assert [ticket.result().outputs.item() for ticket in tickets] == [2, 3, 4]
        np.testing.assert_array_equal(sessions.get_state()["total"], [4, 2, 1, 2])
        sessions.set_state({"total": np.array([40, 20], np.float32)}, session=[0, 1])
        np.testing.assert_array_equal(sessions.infer(x), [41, 21, 2, 3])
        with pytest.raises(ModelFailed):
            sessions.infer(-x[:1], session=[2])
        np.testing.assert_array_equal(sessions.infer(x, reset=[True, False, False, True]), [1, 22, 3, 1])


def test_as_many_sessions_as_rows_and_then_busy(server):
    with server.connect() as client:
        model = client.model("few", rows=1)
        with model.sessions(16), model.sessions(8), pytest.raises(Busy):
            with connect(server.address, timeout=5) as other:
                other.model("few", rows=1).sessions(16)


def test_the_status_shows_how_many_sessions_are_in_use(server):
    def sessions_in_use(client):
        (model,) = (model for model in client.status()["models"] if model["name"] == "few")
        return model["sessions"]

    with server.connect() as client:
        wait_until(lambda: sessions_in_use(client) == 0, 30, "the sessions of others to end")
        with client.model("few", rows=1).sessions(5) as sessions:
            sessions.infer(np.ones((3, 1), np.float32), session=[4, 0, 2])
            wait_until(lambda: sessions_in_use(client) == 3, 30, "the sessions that began")
        wait_until(lambda: sessions_in_use(client) == 0, 30, "the release of the sessions")


@pytest.mark.parametrize(
    ("client", "role"),
    [("shm", "engine-0"), ("zmq", "engine-0"), ("tcp", "engine-0"), ("tcp", "relay")],
    indirect=["client"],
)
def test_a_process_that_dies_loses_its_sessions_and_the_error_names_them(server, client, role):
    x = np.ones((3, 1), np.float32)
    with client.model("running_sum").sessions(3) as sessions:
        sessions.infer(x)
        sessions.infer(x, reset=[False, True, False])
        kill(server, role)
        with pytest.raises(SessionLost) as lost:
            sessions.infer(x, timeout=60)
        assert lost.value.sessions == [0, 1, 2]
        np.testing.assert_array_equal(sessions.infer(x, reset=[True] * 3, timeout=60), [1, 1, 1])
        np.testing.assert_array_equal(sessions.infer(x), [2, 2, 2])


@pytest.mark.parametrize("client", ["tcp"], indirect=True)
def test_new_sessions_survive_a_killed_relay(server, client):
    x = np.ones((3, 1), np.float32)
    with client.model("running_sum").sessions(3) as sessions:
        sessions.infer(x)
        kill(server, "relay")
        np.testing.assert_array_equal(sessions.infer(x, reset=[True] * 3, timeout=60), [1, 1, 1])
        kill(server, "relay")
        begun = sessions.infer_async(x, reset=[True] * 3, timeout=60)
        np.testing.assert_array_equal(asyncio.run(begun), [1, 1, 1])
        kill(server, "relay")
        sessions.set_state({"total": np.full(3, 5, np.float32)}, timeout=60)
        np.testing.assert_array_equal(sessions.infer(x), [6, 6, 6])


def kill(server, role):
    os.kill(pid := server.pids()[role], signal.SIGKILL)
    wait_until(lambda: server.pids().get(role, pid) != pid, 60, "its restart")


def test_a_killed_clients_sessions_are_freed(server):
    code = (
        "import sys, time\nimport numpy as np\nfrom jurybox.client import connect\n"
        f"sessions = connect({server.address!r}).model('few', rows=1).sessions(12)\n"
        "sessions.infer(np.full((12, 1), 5, np.float32))\nprint('there', flush=True)\ntime.sleep(60)\n"
    )
    with server.connect() as client:
        before = client.status()["lanes"]["rows"]
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "there\n"
    finally:
        process.kill()
        process.communicate()
    with server.connect() as client:
        wait_until(lambda: client.status()["lanes"]["rows"] <= before, 30, "the killed client's rows")
        with client.model("few", rows=1).sessions(24) as sessions:
            np.testing.assert_array_equal(sessions.infer(np.ones((24, 1), np.float32)), np.ones(24))
