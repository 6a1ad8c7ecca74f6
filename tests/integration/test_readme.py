"""What the README shows is run as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.serving import serving

from jurybox.server.config import load_settings
from jurybox.server.engine.loader import load

TEXT = (Path(__file__).parents[2] / "README.md").read_text()


def block(language, containing):
    return next(code for code in re.findall(rf"```{language}\n(.*?)```", TEXT, re.S) if containing in code)


def test_the_clients_lines_run_as_they_stand(tmp_path, monkeypatch, capsys):
    models = {"photo": {"factory": "jurybox.server.jurors:panel", "max_batch": 8}}
    with serving(tmp_path, models) as server:
        monkeypatch.setenv("JURYBOX_ADDRESS", server.address)
        images = np.random.default_rng(0).integers(0, 255, (4, 384, 384, 3), dtype=np.uint8)
        names = {"image": images[0], "images": images}
        exec(block("python", "connect() as server"), names)
        assert names["scores"]["score"].shape == (4,)
        assert names["reply"].outputs["score"] == pytest.approx(names["scores"]["score"], abs=1e-4)
        assert 0 < float(capsys.readouterr().out) < 1


def test_the_servers_configuration_is_a_valid_one(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text(block("toml", "[models.photo]"))
    (tmp_path / "mine.pt2").touch()  # looked for when the configuration is read, loaded when the server starts
    assert set(load_settings(file).models) == {"photo", "mine"}


def test_the_model_of_your_own_is_one(tmp_path, monkeypatch):
    import torch

    from jurybox.server.config import ModelSettings

    net = (
        "import torch\nclass MyNet(torch.nn.Linear):\n    def __init__(self, hidden): super().__init__(52, 145)\n"
        "    def forward(self, observation): return super().forward(observation), observation.sum(1)\n"
    )
    (tmp_path / "readme_policy.py").write_text(net + block("python", "def policy"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = ModelSettings(factory="readme_policy:policy", args={"hidden": 512})
    loaded = load("mine", settings, torch.device("cpu"))
    assert set(loaded.model.outputs) == {"logits", "value"}
