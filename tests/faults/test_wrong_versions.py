"""A package of another version than its neighbours ask for, as `pip install` of something else leaves it behind."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest
from tests.serving import START, launch, wait_until

# A forked one has imported what is broken here.
pytestmark = [pytest.mark.usefixtures("started_anew"), pytest.mark.runs]


def test_a_gateway_that_cannot_be_imported_is_told_with_the_versions_that_do_not_fit_and_the_remedy(tmp_path):
    broken = tmp_path / "broken" / "grpc_health" / "v1"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('gencode and runtime differ')\n")
    (broken.parent / "__init__.py").write_text("")
    metadata = tmp_path / "broken" / "grpcio_health_checking-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    wish = f"protobuf!={version('protobuf')}"
    metadata.write_text(f"Metadata-Version: 2.1\nName: grpcio-health-checking\nVersion: 99.0\nRequires-Dist: {wish}\n")
    path = os.pathsep.join([str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")])
    models = {"affine": {"factory": "tests.models:affine"}}
    server = launch(tmp_path / "server", models, {"PYTHONPATH": path}, grpc="127.0.0.1:0", max_restarts=0)
    try:
        wait_until(lambda: server.process.poll() is not None, START)
    finally:
        server.process.kill()
        server.process.wait()
    died = next(line for line in server.text().splitlines() if "child died" in line)
    assert server.process.returncode == 3, server.text()
    assert f"grpcio-health-checking 99.0 asks for {wish}, {version('protobuf')} is installed" in died
    assert "remedy=" in died and "pip install 'protobuf" in died
