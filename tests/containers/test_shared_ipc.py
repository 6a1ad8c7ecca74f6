"""Sharing /dev/shm by `ipc:` works until the server's container restarts; then clients get an error."""

import secrets

import pytest
from tests.containers.engine import ADDRESS, USER, Container, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]


def test_a_client_whose_servers_dev_shm_is_gone_gets_an_error_that_says_to_restart(images):
    name = f"jurybox-test-{secrets.token_hex(3)}"
    sockets, client = f"{name}:/run/jurybox", None
    try:
        docker("run", "--detach", "--name", name, "--network", "none", "--read-only", "--init", "--ipc", "shareable",
               "--shm-size", "256m", "--tmpfs", "/tmp:mode=1777", "--user", USER, "--volume", sockets, images["server"],
               "serve", "/etc/jurybox/server.toml")  # fmt: skip
        client = Container(images["client"], [sockets], 300, env=ADDRESS, ipc=f"container:{name}")
        client.wait_for(lambda line: "score" in line, 150)
        docker("restart", name)
        line = client.wait_for(lambda line: line.get("error") == "SharedMemoryError", 150)
        assert "start this container again too" in line["text"]
        client.remove()
        client = Container(images["client"], [sockets], 300, env=ADDRESS, ipc=f"container:{name}")
        client.wait_for(lambda line: "score" in line, 150)
    finally:
        if client is not None:
            client.remove()
        docker("rm", "--force", "--volumes", name, check=False)
        docker("volume", "rm", "--force", name, check=False)
