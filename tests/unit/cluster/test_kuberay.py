"""The Kubernetes manifest is valid for KubeRay, and names an existing training."""

from __future__ import annotations

import copy
import json
import shlex
from itertools import pairwise
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from typer.testing import CliRunner

from jurybox.training import cli

FOLDER = Path(__file__).parents[3] / "docker" / "kuberay"
SCHEMA = json.loads((FOLDER / "rayjob.schema.json").read_text())
MANIFEST = yaml.safe_load((FOLDER / "marl.yaml").read_text())
PINNED = dict(line.split("==") for line in (FOLDER.parents[1] / "constraints.txt").read_text().split() if "==" in line)


def test_the_manifest_fits_the_schema() -> None:
    jsonschema_rs.Draft202012Validator(SCHEMA).validate(MANIFEST)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"]["rayClusterSpec"].pop("headGroupSpec"),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda job: job["spec"].update(entryPoint="jurybox"),
        lambda job: job["spec"].update(submissionMode="Batch"),
    ],
)
def test_the_schema_refuses_the_same_as_kuberay(spoil) -> None:
    job = copy.deepcopy(MANIFEST)
    spoil(job)
    assert not jsonschema_rs.Draft202012Validator(SCHEMA).is_valid(job)


def test_its_command_has_only_options_that_the_command_line_knows() -> None:
    words = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert words[:3] == ["jurybox", "train", "marl"]
    known = CliRunner().invoke(cli.train, ["marl", "--help"], env={"COLUMNS": "200"}).output
    assert all(word in known for word in words if word.startswith("--"))
    from jurybox.training.runtime.settings import changes_of
    from jurybox.training.trainings.marl import MarlTraining

    MarlTraining.read(None, changes_of([value for flag, value in pairwise(words) if flag == "--set"], {}))


def test_its_ray_is_the_one_that_is_pinned_and_every_pod_has_shared_memory() -> None:
    cluster = MANIFEST["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == PINNED["ray"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert any(mount["mountPath"] == "/dev/shm" for mount in pod["containers"][0]["volumeMounts"])
        assert any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["volumes"])


def test_its_volume_and_its_image_are_there() -> None:
    pod = MANIFEST["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    volumes = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    claims = [volume["claimName"] for volume in volumes]
    volume = yaml.safe_load((FOLDER / "results.yaml").read_text())
    assert claims == [volume["metadata"]["name"]] and volume["kind"] == "PersistentVolumeClaim"
    dockerfile = (FOLDER.parent / "Dockerfile").read_text()
    user = f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert "FROM image AS ray\n" in dockerfile and user in dockerfile and "ray[default]" in dockerfile
    clusters = MANIFEST["spec"]["rayClusterSpec"]
    for group in (clusters["headGroupSpec"], *clusters["workerGroupSpecs"]):
        assert group["template"]["spec"]["containers"][0]["image"] == "registry.example.com/jurybox-ray:latest"
