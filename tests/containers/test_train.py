"""`docker compose --profile train`: a training as a client in a container of its own."""

import pytest
from tests.containers.engine import build

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]


def test_a_training_in_its_own_container_leaves_its_report(project, images):
    build("training", f"{images['name']}-training:{images['tag']}")
    said = project.compose(
        "--profile", "train", "run", "--name", f"{project.name}-train", "train", "train", "photo", "--out",
        "/runs/photo", "--workers", "2", "--steps", "64", "--rollout", "64", "--damages", "2", timeout=600,
    )  # fmt: skip
    assert "report: /runs/photo/report.html" in said
    assert project.status()["lanes"]["in_use"] <= 2, "the gateway's own are left at most"

    again = project.compose("--profile", "train", "up", "--no-build", "train", timeout=200)
    assert "/runs/photo holds a run already" in again
    assert "exited with code 2" in again
