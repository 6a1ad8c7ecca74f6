"""Publications on disk: the next server serves what the first one saved, however that one ended."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.serving import serving, wait_until

from jurybox.client import ModelFailed

X = np.ones((2, 4), np.float32)


def affine(version):
    return {"scale": np.array(version, np.float32), "offset": np.array(1000 * version, np.float32)}


def models(**settings):
    return {"policy": {"factory": "tests.models:affine", "publish": "double_buffer", "save_dir": "kept", **settings}}


def weights_status(client):
    return client.status()["models"][0]["weights"]


def answered_by(client, version):
    reply = client.model("policy").infer_reply(X)
    assert (reply.outputs == np.float32(reply.version) * X + np.float32(1000 * reply.version)).all()
    return reply.version == version


def newest_file(folder: Path) -> Path:
    return sorted((folder / "kept" / "policy").glob("weights-*.safetensors"))[-1]


@pytest.mark.runs
def test_each_start_continues_from_the_right_version_however_the_last_server_ended(tmp_path):
    """One after the other: kill -9, a damaged newest file, an orderly stop, and only damaged files."""
    other = {"other": {"factory": "tests.models:affine"}}
    with serving(tmp_path, models(save_every=3, save_keep=2)) as server, server.connect() as client:
        publisher = client.publisher("policy")
        for version in range(1, 8):
            publisher.publish(affine(version), extra={"epsilon": 1 / version})
            wait_until(lambda: version not in (1, 4, 7) or weights_status(client)["saved"] == version, 30)  # noqa: B023
        with serving(tmp_path, models() | other, address=f"ipc://{tmp_path}/second") as second:
            assert "is where another server keeps weights" in second.text()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    saved = sorted(path.name for path in (tmp_path / "kept" / "policy").glob("weights-*"))
    assert saved == ["weights-000000000004.safetensors", "weights-000000000007.safetensors"]

    damaged = newest_file(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])  # the disk lost a byte
    with serving(tmp_path, models(save_every=3)) as server, server.connect() as client:
        assert f"{damaged} is passed over" in server.text()
        assert "weights restored" in server.text()
        assert answered_by(client, 4)
        state, version, extra = client.weights("policy").read()
        assert (version, extra, float(state["scale"])) == (4, {"epsilon": 0.25}, 4.0)
        assert client.publisher("policy").publish(affine(5)) == 5
        wait_until(lambda: weights_status(client)["version"] == 5, 30)
        assert server.stop() == 0
    assert newest_file(tmp_path).name == "weights-000000000005.safetensors", "an orderly stop saves the newest"

    with serving(tmp_path, models(save_every=3)) as server, server.connect() as client:
        assert answered_by(client, 5)
        assert weights_status(client)["saved"] == 5

    manifest = tmp_path / "kept" / "policy" / "manifest.json"
    rows = json.loads(manifest.read_text())
    for file in manifest.parent.glob("weights-*.safetensors"):
        file.write_bytes(b"")
    with serving(tmp_path, models() | other) as server, server.connect() as client:
        assert "every weights file" in client.describe("policy").reason
        assert not client.describe("policy").takes_publications
    assert json.loads(manifest.read_text()) == rows


def test_no_load_and_no_unload_at_run_time_loses_publications(tmp_path):
    settings = models(save_dir=str(tmp_path / "kept"))["policy"]
    with serving(tmp_path, {"policy": settings}) as server, server.connect() as client:
        publisher, model = client.publisher("policy"), client.model("policy")
        publisher.publish(affine(1))
        wait_until(lambda: weights_status(client)["saved"] == 1)
        with pytest.raises(ModelFailed, match=r"'scale': expected float32\[1\], .* expected another save_dir"):
            client.load("policy", {**settings, "args": {"scale": [2.0]}})
        assert client.describe("policy").state == "ready"
        assert publisher.publish(affine(2)) == 2
        wait_until(lambda: model.infer_reply(X).version == 2)
        wait_until(lambda: weights_status(client)["saved"] == 2)
        publisher.close()
        client.load("policy", {**settings, "save_every": 10})
        with client.publisher("policy") as again:
            assert again.publish(affine(3)) == 3
        client.unload("policy")  # saves the last version
        client.load("policy", settings)
        assert answered_by(client, 3)
        assert "weights not saved" not in server.text()
