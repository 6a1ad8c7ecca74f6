"""deploy/kubernetes fits Kubernetes' API, and says what the server does."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from tests.kubernetes import FOLDER, OVERLAYS, pod, rendered

from jurybox.server.security.http import OPEN_PATHS
from jurybox.server.settings.config import ServerSettings, load_settings

SCHEMA = json.loads((Path(__file__).parent / "kubernetes.schema.json").read_text())
VALIDATOR = jsonschema_rs.Draft202012Validator(SCHEMA)
SPOIL = {
    "a field that is not known": lambda spec: spec["containers"][0].update(image_pull_policy="Always"),
    "a container without a name": lambda spec: spec["containers"][0].pop("name"),
    "no containers": lambda spec: spec.pop("containers"),
    "an environment variable that is a number": lambda spec: spec["containers"][0]["env"][0].update(value=1),
    "a probe without a port": lambda spec: spec["containers"][0]["livenessProbe"]["httpGet"].pop("port"),
    "a mount without a path": lambda spec: spec["containers"][0]["volumeMounts"][0].pop("mountPath"),
}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_the_api(overlay):
    objects = rendered(overlay)
    assert {"Deployment jurybox", "Service jurybox", "PodMonitor jurybox", "ConfigMap jurybox"} <= set(objects)
    for document in objects.values():
        VALIDATOR.validate(document)


@pytest.mark.parametrize("what", SPOIL)
def test_the_schema_refuses(what):
    deployment = copy.deepcopy(rendered("base")["Deployment jurybox"])
    SPOIL[what](deployment["spec"]["template"]["spec"])
    assert not VALIDATOR.is_valid(deployment)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_makes_the_same_of_it(overlay):
    made = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / overlay)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = {document["kind"]: document for document in yaml.safe_load_all(made) if document["kind"] != "ConfigMap"}
    ours = {document["kind"]: document for document in rendered(overlay).values() if document["kind"] != "ConfigMap"}
    spec = found["Deployment"]["spec"]["template"]["spec"]
    for volume in spec["volumes"]:  # kustomize adds a hash of the contents to the names of its config maps
        if "configMap" in volume:
            volume["configMap"]["name"] = volume["configMap"]["name"].rpartition("-")[0]
    for each in (spec, ours["Deployment"]["spec"]["template"]["spec"]):
        for named in ("containers", "volumes"):
            each[named].sort(key=lambda one: one["name"])
    assert found == ours


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_what_the_server_and_its_clients_need(overlay):
    spec = pod(overlay)
    assert spec["securityContext"]["runAsUser"] == 10001 and spec["securityContext"]["runAsNonRoot"]
    assert spec["terminationGracePeriodSeconds"] > ServerSettings().drain_timeout + 5
    volumes = {volume["name"] for volume in spec["volumes"]}
    server = next(container for container in spec["containers"] if container["name"] == "server")
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    environment = {variable["name"]: variable["value"] for variable in server["env"]}
    assert {name: int(environment[f"JURYBOX_{name.upper()}"].rpartition(":")[2]) for name in ports} == ports
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"]["path"] in OPEN_PATHS and server[probe]["httpGet"]["port"] in ports
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["resources"]["limits"]["memory"] and container["securityContext"]["readOnlyRootFilesystem"]
        of_ours = {variable["name"]: variable["value"] for variable in container["env"]}
        assert of_ours["JURYBOX_ADDRESS"] == environment["JURYBOX_ADDRESS"]
    service = rendered(overlay)["Service jurybox"]["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    assert rendered(overlay)["PodMonitor jurybox"]["spec"]["podMetricsEndpoints"][0]["port"] in ports


def test_the_configuration_is_one(tmp_path):
    (tmp_path / "server.toml").write_text(rendered("base")["ConfigMap jurybox"]["data"]["server.toml"])
    assert list(load_settings(tmp_path / "server.toml").models) == ["photo"]


def test_a_gpu_has_its_limit():
    (server,) = pod("gpu")["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "1" and server["image"].endswith(":cuda")
