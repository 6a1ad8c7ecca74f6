"""docs/containers.md, walked from top to bottom: every command of the page is carried out, as printed."""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from tests.containers.engine import BUILD, ROOT, bridges, docker, free_port
from tests.containers.test_train import SMALL
from tests.serving import wait_until

from jurybox.client import connect

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
PAGE = (ROOT / "docs/containers.md").read_text()


BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).replace("\\\n", " ")
LINES = [line for line in BLOCKS.splitlines() if line.strip()]


def commands(beginning):
    """The commands of the page's bash blocks that begin so, each as its words."""
    firsts = [shlex.split(line, comments=True) for each in LINES for line in [each.partition("||")[0]]]
    return [words for words in firsts if words[: len(beginning)] == beginning]


NAMES = ("HTTP", "GRPC", "TCP")


class Walk:
    """Carries out the page's lines, in a project of its own, and with trainings that end soon."""

    def __init__(self, images, folder):
        self.images, self.folder = images, folder
        self.name = f"jurybox-test-{secrets.token_hex(3)}"
        self.ports = {"8000": free_port(), "8001": free_port(), "8002": free_port()}
        small = {"train": ["train", "photo", "--out", "/runs/photo", "--workers", "2", "--steps", "64",
                           "--rollout", "64", "--damages", "2"],
                 "hockey": ["train", "hockey", "--out", "/runs/hockey", "--policy", "served", "--server",
                            "ipc:///run/jurybox/engine", *SMALL["hockey"]]}  # fmt: skip
        (folder / "small.yaml").write_text(
            yaml.safe_dump({"services": {name: {"command": words} for name, words in small.items()}})
        )
        self._files = ["" if bridges() else ":tests/containers/host.yaml", f":{folder}/small.yaml"]
        self.token = folder / "token"
        self.env = {
            **os.environ, "COMPOSE_PROJECT_NAME": self.name, "COMPOSE_FILE": "compose.yaml" + "".join(self._files),
            "IMAGE": images["name"], "TAG": images["tag"], "TOKEN_FILE": str(self.token),
            **{f"{name}_PORT": str(ours) for name, ours in zip(NAMES, self.ports.values(), strict=True)},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        # How a line is carried out, by its beginning; a line that begins with none of them fails.
        self.ways = {
            "docker compose --profile monitoring": self.is_valid,  # a registry's images
            "docker compose": self.run,
            "curl": self.run,
            "jurybox train hockey": lambda line: self.run(f"{line} {shlex.join(SMALL['hockey'])}"),
            "docker build": self.is_there,  # by the fixture, perhaps from other wheels
            "docker run": self.single,
            "kubectl apply": lambda line: self.run(line.replace("apply -k", "kustomize")),
            "kubectl": self.is_for_a_cluster,
            "openssl rand": self.makes_the_token,
            "COMPOSE_FILE=": self.with_other_files,
            "make test-containers": lambda line: None,  # it is running
        }

    def walk(self):
        for line in (re.sub(r"\s+#.*", "", each).strip() for each in LINES):
            way = next((way for begins, way in self.ways.items() if line.startswith(begins)), None)
            assert way is not None, f"nobody knows how to carry out {line!r}"
            way(line)

    def run(self, line, timeout=900):
        for port, ours in self.ports.items():
            line = re.sub(rf"(127\.0\.0\.1:){port}\b", rf"\g<1>{ours}", line)
        line = line.replace(" cp train:/runs/photo/report.html .", f" cp train:/runs/photo/report.html {self.folder}")
        line = line.replace("--out runs/", f"--out {self.folder}/runs/").replace("$(cat token)", f"$(cat {self.token})")
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def is_valid(self, line):
        self.run(re.sub(r" up .*", " config --quiet", line))

    def is_there(self, line):
        docker("image", "inspect", self.images["server"])

    def is_for_a_cluster(self, line):
        assert line.split()[1] in ("rollout", "port-forward")

    def makes_the_token(self, line):
        self.run(line.replace("sudo ", "").replace(" token", f" {self.token}").replace("> token", f"> {self.token}"))

    def with_other_files(self, line):
        self.run(re.sub(r"^COMPOSE_FILE=(\S+)", lambda found: f"COMPOSE_FILE={found[1]}{''.join(self._files)}", line))

    def single(self, line):
        if not bridges():
            return  # this engine publishes no ports
        for port, ours in self.ports.items():
            line = line.replace(f"127.0.0.1:{port}:{port}", f"127.0.0.1:{ours}:{port}")
        _, _, *words = shlex.split(line)
        words = [self.images["server"] if word == "jurybox" else word for word in words]
        network = f"{self.name}-single"
        docker("network", "create", "--driver", "bridge", network)
        try:
            docker("run", "--detach", "--name", network, "--network", network, *words)
            wait_until(lambda: "serving" in docker("logs", network), 150, f"serving; {network}")
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['8000']}/health", timeout=10) as answer:
                assert answer.status == 200 and answer.read().decode() in PAGE, "the page shows this answer"
            for way, port in (("grpc", "8001"), ("tcp", "8002")):
                with connect(f"{way}://127.0.0.1:{self.ports[port]}", timeout=30.0) as client:
                    assert client.models() == ["photo"]
        finally:
            docker("rm", "--force", "--volumes", network, check=False)
            docker("network", "rm", "--force", network, check=False)

    def end(self):
        docker("compose", "--profile", "*", "down", "--volumes", "--timeout", "5", check=False, env=self.env)


@pytest.mark.timeout(2400)
def test_the_page_is_walked_from_top_to_bottom(images, image, tmp_path):
    if shutil.which("kubectl") is None or shutil.which("curl") is None:
        pytest.skip("needs kubectl and curl")
    tmp_path.chmod(0o755)
    walk = Walk(images, tmp_path)
    try:
        walk.walk()
        assert (tmp_path / "report.html").is_file() and (tmp_path / "runs/hockey/report.html").is_file()
        # The last that the page starts is a server with a token.
        status = f"http://127.0.0.1:{walk.ports['8000']}/status"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(status, timeout=10)
        shown = urllib.request.Request(status, headers={"Authorization": f"Bearer {walk.token.read_text().strip()}"})
        with urllib.request.urlopen(shown, timeout=10) as answer:
            assert json.load(answer)["server"]["tcp"] == ""
    finally:
        walk.end()


@pytest.mark.parametrize("command", commands(["docker", "compose"]), ids=" ".join)
def test_every_compose_command_is_valid_and_pulls_none_of_our_images(images, command):
    project = f"jurybox-test-{secrets.token_hex(3)}"
    services = docker("compose", "--profile", "*", "config", "--services").split()
    if "cp" in command:  # wants a container; the service is what can be wrong
        assert command[-2].split(":")[0] in services
        return
    if "monitoring" in command:  # two images that are a registry's
        assert {"prometheus", "grafana"} <= set(services)
        return
    said = docker("compose", "--dry-run", "-p", project, *command[2:], env={"IMAGE": images["name"]})
    assert not re.search(r"^.*(server|train) Pull", said, re.M), said


def test_a_torch_index_that_cannot_be_reached_ends_the_build(images):
    with pytest.raises(AssertionError, match="names another index .docker compose: TORCH_INDEX=URL in .env"):
        docker("build", "--network", "host", "-f", "docker/Dockerfile", "--target", "server-environment",
               "--build-arg", "TORCH_INDEX=http://127.0.0.1:9/simple", ".", timeout=BUILD)  # fmt: skip


def test_the_image_has_torch_without_cuda(images):
    said = docker("run", "--rm", "--network", "none", "--entrypoint", "python", images["server"], "-c",
                  "import torch; print(torch.version.cuda)")  # fmt: skip
    assert said.strip() == "None"
    assert int(docker("image", "inspect", "--format", "{{.Size}}", images["server"])) < 1.6e9
