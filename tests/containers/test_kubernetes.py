"""The pods of deploy/kubernetes in a container engine: their mounts, users, limits and probes."""

from __future__ import annotations

import json
import secrets
import time

import pytest
from tests.containers.engine import docker
from tests.kubernetes import pod, rendered
from tests.serving import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
PROBE = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError as error:
    print(error)
"""


class Pod:
    """A pod's containers: they share a network, and each emptyDir has the mode and group that a kubelet gives it."""

    def __init__(self, overlay: str, images: dict[str, str], folder) -> None:
        self.spec, self.name = pod(overlay), f"jurybox-test-{secrets.token_hex(3)}"
        self._volumes, self._containers = {}, []
        security = self.spec["securityContext"]
        for volume in self.spec["volumes"]:
            if "emptyDir" in volume:
                made = f"{self.name}-{volume['name']}"
                size = volume["emptyDir"]["sizeLimit"].lower().removesuffix("i")
                docker("volume", "create", "--opt", "type=tmpfs", "--opt", "device=tmpfs",
                       "--opt", f"o=mode=2777,uid=0,gid={security['fsGroup']},size={size}", made)  # fmt: skip
                self._volumes[volume["name"]] = made
            else:
                where = folder / volume["name"]
                where.mkdir(exist_ok=True)
                for name, text in rendered(overlay)[f"ConfigMap {volume['configMap']['name']}"]["data"].items():
                    (where / name).write_text(text)
                folder.chmod(0o755), where.chmod(0o755)
                self._volumes[volume["name"]] = str(where)
        network = "none"
        for container in self.spec["containers"]:
            name = f"{self.name}-{container['name']}"
            image = images["client"] if "client" in container["image"] else images["server"]
            entry, *words = container.get("command", [""])
            docker(
                "run", "--detach", "--name", name, "--network", network, "--read-only", "--cap-drop", "ALL",
                "--security-opt", "no-new-privileges", "--user", f"{security['runAsUser']}:{security['runAsGroup']}",
                "--group-add", str(security["fsGroup"]),
                "--memory", container["resources"]["limits"]["memory"].lower().removesuffix("i"),
                *(part for one in container["env"] for part in ("--env", f"{one['name']}={one['value']}")),
                *(part for one in container["volumeMounts"] for part in self._mount(one)),
                *(["--entrypoint", entry] if entry else []), image, *words, *container.get("args", ()),
            )  # fmt: skip
            self._containers.append(name)
            network = f"container:{self._containers[0]}"
        self.server = self._containers[0]

    def _mount(self, mount: dict) -> list[str]:
        return [
            "--volume",
            f"{self._volumes[mount['name']]}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}",
        ]

    def log(self, name: str) -> str:
        return docker("logs", f"{self.name}-{name}")

    def probe(self, kind: str) -> str:
        """What a kubelet would see."""
        server = next(each for each in self.spec["containers"] if each["name"] == "server")
        probe, ports = server[kind], {port["name"]: port["containerPort"] for port in server["ports"]}
        url = f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        return docker("exec", self.server, "python", "-c", PROBE, url, str(probe["timeoutSeconds"])).strip()

    def remove(self) -> None:
        docker("rm", "--force", *reversed(self._containers), check=False)
        made = [name for name in self._volumes.values() if name.startswith(self.name)]
        docker("volume", "rm", "--force", *made, check=False)


@pytest.fixture
def running(request, images, tmp_path):
    running = Pod(request.param, images, tmp_path)
    yield running
    running.remove()


@pytest.mark.parametrize("running", ["base"], indirect=True)
def test_a_pod_becomes_ready_and_ends_in_its_grace_period(running):
    wait_until(lambda: running.probe("startupProbe") == "200", 180, "the start")
    assert running.probe("readinessProbe") == running.probe("livenessProbe") == "200"
    assert docker("exec", running.server, "id", "-u").strip() == "10001"
    assert docker("exec", running.server, "stat", "-c", "%a %u", "/run/jurybox").strip() == "2777 0"
    began = time.monotonic()
    docker("stop", "--time", str(running.spec["terminationGracePeriodSeconds"]), running.server)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", running.server).strip() == "0"
    assert time.monotonic() - began < running.spec["terminationGracePeriodSeconds"]
    assert (
        '"event": "stopped"' in running.log("server")
        or "stopped" in json.loads(running.log("server").splitlines()[-1]).values()
    )


@pytest.mark.parametrize("running", ["worker"], indirect=True)
def test_a_worker_in_the_pod_uses_the_servers_memory(running):
    wait_until(lambda: running.probe("readinessProbe") == "200", 180, "the start")
    wait_until(lambda: len(running.log("worker").splitlines()) > 2, 120, "scores")
    scores = [float(line) for line in running.log("worker").splitlines()]
    assert all(0 <= score <= 1 for score in scores)


def test_a_folder_as_a_kubelet_makes_it_is_refused_with_words_that_a_pod_can_follow(images):
    volume = f"jurybox-test-{secrets.token_hex(3)}"
    docker("volume", "create", "--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", "o=mode=0777", volume)
    try:
        said = docker("run", "--rm", "--read-only", "--tmpfs", "/tmp", "--user", "10001:10001", "--network", "none",
                      "--volume", f"{volume}:/run/jurybox", images["server"], check=False)  # fmt: skip
    finally:
        docker("volume", "rm", "--force", volume, check=False)
    assert "server.shared_folder = true" in said and "emptyDir" in said
