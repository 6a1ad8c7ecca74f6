"""Counting CUDA devices without torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jurybox.server.doctor import host
from jurybox.server.doctor.host import torch_has_cuda, visible_cuda_devices


@pytest.fixture(autouse=True)
def forget():
    visible_cuda_devices.cache_clear()
    yield
    visible_cuda_devices.cache_clear()


@pytest.fixture
def torch_version(monkeypatch, tmp_path):
    def install(text: str | None) -> None:
        if text is not None:
            (tmp_path / "version.py").write_text(text)
        spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return install


@pytest.mark.parametrize(
    ("text", "expected"),
    [("cuda: Optional[str] = None\n", False), ("cuda: Optional[str] = '12.8'\n", True), ("cuda = '13.0'\n", True),
     (None, False)],
)  # fmt: skip
def test_the_version_file_says_whether_torch_is_built_for_cuda(torch_version, text, expected):
    torch_version(text)
    assert torch_has_cuda() is expected


@pytest.mark.parametrize(
    ("status", "output", "expected"), [(0, "2", 2), (0, "", 0), (1, "2", 0), (-11, "", 0), (0, "x", 0)]
)
def test_a_driver_that_fails_means_no_device(torch_version, monkeypatch, status, output, expected):
    torch_version("cuda = '13.0'\n")
    done = subprocess.CompletedProcess([], status, output, "")
    monkeypatch.setattr(host.subprocess, "run", lambda *_, **__: done)
    assert visible_cuda_devices() == expected


def test_a_driver_that_hangs_means_no_device(torch_version, monkeypatch):
    torch_version("cuda = '13.0'\n")

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 30.0)

    monkeypatch.setattr(host.subprocess, "run", hang)
    assert visible_cuda_devices() == 0


def test_a_cpu_build_asks_no_driver(torch_version, monkeypatch):
    torch_version("cuda: Optional[str] = None\n")
    monkeypatch.setattr(host.subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert visible_cuda_devices() == 0


def test_the_driver_is_queried_in_a_separate_process():
    done = subprocess.run(
        [sys.executable, "-m", "jurybox.server.doctor.host"], capture_output=True, text=True, check=True
    )
    assert done.stdout.isdigit()
    assert done.stderr == ""


def test_a_named_device_that_is_not_there_is_a_setting_that_is_wrong(monkeypatch):
    from jurybox.server.settings import config, server_settings

    def told(devices, *, has_cuda, visible):
        monkeypatch.setattr(server_settings, "torch_has_cuda", lambda: has_cuda)
        monkeypatch.setattr(server_settings, "visible_cuda_devices", lambda: visible)
        settings = config.Configuration.model_validate({"server": {"devices": devices}})
        return settings.server.missing_devices()

    assert "has no CUDA" in told(["cuda:0"], has_cuda=False, visible=0)
    assert "no CUDA device is visible" in told(["cuda"], has_cuda=True, visible=0)
    assert "cuda:2 is not here, cuda:0, cuda:1 are there" in told(["cuda:1", "cuda:2"], has_cuda=True, visible=2)
    assert told(["cuda:1", "cpu"], has_cuda=True, visible=2) == ""
    assert told(["cpu"], has_cuda=False, visible=0) == told("auto", has_cuda=False, visible=0) == ""


def test_a_server_configured_with_a_missing_library_does_not_start(monkeypatch):
    from jurybox.server.settings import config, server_settings

    monkeypatch.setattr(server_settings, "torch_has_cuda", lambda: False)
    settings = config.Configuration.model_validate(
        {"server": {"devices": ["cuda:0"]}, "models": {"a": {"factory": "tests.models:affine"}}}
    )
    with pytest.raises(config.InvalidConfig, match=r"server.devices = \['cuda:0'\]"):
        config.require_servable(settings, insecure=False)
