"""Loading, reloading and unloading while clients send requests."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from tests.models import Affine
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed, ModelNotFound, Refused, SpecMismatch, connect

X = np.ones((2, 4), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "offset").write_text("1")
    models = {"file": {"factory": "tests.models:from_file", "args": {"path": str(folder / "offset")}, "rows": 64}}
    loadable = {"factories": ["tests.models:*"], "exported": [str(tmp_path_factory.getbasetemp())]}
    with serving(folder, models, tcp="127.0.0.1:0", **loadable) as running:
        running.folder = folder
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def test_a_reload_drops_no_request_and_every_answer_is_of_one_version(server, client):
    seen, stop = set(), threading.Event()

    def ask():
        with server.connect() as connection:
            model = connection.model("file", rows=4)
            while not stop.is_set():
                answer = model.infer(X)
                assert (answer == answer[0, 0]).all()
                seen.add(float(answer[0, 0]))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: seen, 20, "the first answer")
    before = client.describe("file").digest
    (server.folder / "offset").write_text("5")
    client.load("file")
    assert client.model("file", rows=4).infer(X)[0, 0] == 6
    wait_until(lambda: 6.0 in seen, 20, "the first new answer")
    stop.set()
    for thread in threads:
        thread.join()
    assert seen == {2.0, 6.0}
    assert client.describe("file").digest != before


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
@pytest.mark.parametrize("call", ["__call__", "infer", "infer_async", "row_reply"])
def test_every_kind_of_call_works_across_a_reload(server, client, transport, call):
    address = f"tcp://{server.listening('tcp')}" if transport == "tcp" else server.address
    with connect(address, transport="auto" if transport == "tcp" else transport, timeout=30) as connection:
        model = connection.model("file", rows=4)

        def ask():
            if call == "infer_async":
                return asyncio.run(model.infer_async(X))[0]
            if call == "row_reply":
                return model.row_reply(X[0], 20.0).outputs.reshape(-1)
            return model(X[0]) if call == "__call__" else model.infer(X)[0]

        assert ask().shape == ask().shape == (4,)
        for offset in (3, 5):
            (server.folder / "offset").write_text(str(offset))
            client.unload("file")  # and its arena
            client.load("file", {"factory": "tests.models:from_file", "args": {"path": str(server.folder / "offset")}})
            for _ in range(2):
                assert ask().tolist() == [1.0 + offset] * 4


def test_after_a_failed_reload_the_earlier_model_serves(server, client):
    model = client.model("file", rows=4)
    before = model.infer(X)
    (server.folder / "offset").write_text("no number")
    with pytest.raises(ModelFailed, match="could not convert string to float"):
        client.load("file")
    np.testing.assert_array_equal(model.infer(X), before)
    (server.folder / "offset").write_text("1")
    client.load("file")


def test_a_model_can_be_added_and_removed(client):
    client.load("extra", {"factory": "tests.models:affine", "args": {"scale": 3.0}})
    model = client.model("extra")
    assert model.infer(X)[0, 0] == 4
    client.unload("extra")
    with pytest.raises((ModelNotFound, Refused)):
        model.infer(X, timeout=2)
    with pytest.raises(ModelNotFound, match="there are: file"):
        client.model("extra")


def test_a_reload_with_another_spec_is_an_error_for_holders_of_the_old_one(client):
    client.load("changing", {"factory": "tests.models:affine"})
    model = client.model("changing")
    assert model.infer(X)[0, 0] == 3
    client.load("changing", {"factory": "tests.models:two"})
    with pytest.raises((SpecMismatch, Refused)):
        model.infer(X, timeout=5)
        model.infer(X, timeout=5)
    assert set(client.model("changing").spec.inputs) == {"image", "scale"}
    client.unload("changing")


def test_wrong_settings_are_refused_by_name(client):
    with pytest.raises(Refused, match="max_batches"):
        client.load("wrong", {"factory": "tests.models:affine", "max_batches": 3})


def test_an_exported_program_is_served_by_its_own_names(tmp_path, client):
    batch = torch.export.Dim("batch")
    program = torch.export.export(Affine(3.0, 0.0), (torch.zeros(2, 4),), dynamic_shapes={"observation": {0: batch}})
    torch.export.save(program, tmp_path / "affine.pt2")
    client.load("exported", {"exported": str(tmp_path / "affine.pt2")})
    model = client.model("exported")
    assert list(model.spec.inputs) == ["observation"]
    np.testing.assert_array_equal(model.infer(X), 3 * X)
    client.unload("exported")


def test_an_exported_program_of_fixed_batch_is_refused_with_the_remedy(tmp_path, client):
    torch.export.save(torch.export.export(Affine(3.0, 0.0), (torch.zeros(2, 4),)), tmp_path / "fixed.pt2")
    with pytest.raises(ModelFailed, match="dynamic_shapes"):
        client.load("fixed", {"exported": str(tmp_path / "fixed.pt2")})
    client.unload("fixed")
