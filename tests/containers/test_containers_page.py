"""The commands of docs/containers.md, as printed."""

import re
import secrets
import shlex
import urllib.error
import urllib.request

import pytest
from tests.containers.engine import BUILD, ROOT, bridges, docker, free_port
from tests.serving import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
PAGE = (ROOT / "docs/containers.md").read_text()


def commands(beginning):
    """The commands of the page's bash blocks that begin so, each as its words."""
    lines = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))[: len(beginning)] == beginning]


def test_the_single_container_serves_as_it_is_documented(images):
    if not bridges():
        pytest.skip("this engine publishes no ports")
    ((_, _, *words),) = commands(["docker", "run"])
    name, port = f"jurybox-test-{secrets.token_hex(3)}", free_port()
    # Changes to the command: the image's name, the port, and a network if the engine has none.
    words = [images["server"] if word == "jurybox" else word for word in words]
    words = [re.sub(r"127\.0\.0\.1:8000:8000", f"127.0.0.1:{port}:8000", word) for word in words]
    docker("network", "create", "--driver", "bridge", name)
    try:
        docker("run", "--detach", "--name", name, "--network", name, *words)
        wait_until(lambda: "serving" in docker("logs", name), 150, f"serving; {name}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            assert answer.status == 200
            assert answer.read().decode() in PAGE, "the page shows this answer"
    finally:
        docker("rm", "--force", "--volumes", name, check=False)
        docker("network", "rm", "--force", name, check=False)


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
