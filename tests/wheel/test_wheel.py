"""The published files: a source distribution, the wheel built from it, and a client in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from tests.serving import serving

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "protos/toplevel/jurybox": "jurybox",
    "protos/jurybox/protocol": "jurybox/protocol",
    "protos/jurybox/processes": "jurybox/processes",
    "client/jurybox/client": "jurybox/client",
    "server/jurybox/server": "jurybox/server",
    "training/jurybox/training": "jurybox/training",
    "training/jurybox/cluster": "jurybox/cluster",
    "training/jurybox/studies": "jurybox/studies",
}
PIP = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(*command: object, **more) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel from the source distribution, so nothing is missing in either; test_matrix.py tries all of them."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, env=PIP)
    assert len(list(out.glob("jurybox-*.tar.gz"))) == 1
    (built,) = out.glob("jurybox-*.whl")
    return built


@pytest.fixture(scope="module")
def clean(tmp_path_factory, wheel) -> Path:
    """The Python of an environment in which only the wheel was installed."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "pip", "install", "--quiet", wheel, env=PIP)
    return folder / "bin" / "python"


def test_the_wheel_holds_every_file_of_the_packages(wheel) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", *PACKAGES, cwd=ROOT).splitlines()
    assert len(tracked) > 200
    for path in tracked:
        folder = next(folder for folder in PACKAGES if path.startswith(folder))
        assert PACKAGES[folder] + path.removeprefix(folder) in inside
    assert any(name.startswith("jurybox/native.") and name.endswith(".so") for name in inside)
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in inside)


def test_a_plain_install_is_a_client_without_torch(clean, tmp_path) -> None:
    elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with serving(tmp_path, {"affine": {"factory": "tests.models:affine"}}) as server:
        said = run(clean, ROOT / "tests/wheel/plain_install.py", server.address, cwd=tmp_path, env=elsewhere)
    assert said == "a plain install works\n"
    installed = run(clean, "-m", "pip", "list", "--format=freeze").lower()
    assert not any(name in installed for name in ("torch", "fastapi", "grpcio", "gymnasium"))
