"""A server on a bridge network, and clients on it that share nothing with it: no volume, no /dev/shm, no user."""

import json
import secrets
from types import SimpleNamespace

import pytest
from tests.containers.engine import USER, Container, bridges, docker
from tests.serving import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
TIMEOUT = 150.0  # seconds, on a busy machine


def answered(line):
    return "score" in line


@pytest.fixture(scope="module")
def server(images):
    """One that listens for ZeroMQ and gRPC on all of its own addresses."""
    if not bridges():
        pytest.skip("this engine makes no bridge networks")
    name = f"jurybox-test-{secrets.token_hex(3)}"
    docker("network", "create", "--driver", "bridge", name)
    try:
        docker("run", "--detach", "--name", name, "--network", name, "--read-only", "--init", "--user", USER,
               "--cap-drop", "ALL", "--shm-size", "256m", "--tmpfs", "/tmp:mode=1777",
               "--tmpfs", "/run/jurybox:mode=0700,uid=10001,gid=10001", images["server"], "serve",
               "/etc/jurybox/server.toml", "--insecure", "--set", "server.tcp=0.0.0.0:5555",
               "--set", "server.grpc=0.0.0.0:8001")  # fmt: skip
        yield SimpleNamespace(name=name, image=images["client"])
    finally:
        docker("rm", "--force", "--volumes", name, check=False)
        docker("network", "rm", "--force", name, check=False)


def client(server, transport):
    return Container(server.image, [], 300, user="12345:12345", network=server.name,
                     env={"JURYBOX_ADDRESS": f"{transport[0]}://{server.name}:{transport[1]}"})  # fmt: skip


@pytest.mark.parametrize("transport", [("tcp", 5555), ("grpc", 8001)], ids=["tcp", "grpc"])
def test_a_client_beyond_a_bridge_gets_right_answers_through_an_engines_death(server, scores, transport):
    asking = client(server, transport)
    try:
        wait_until(lambda: len([*filter(answered, asking.lines())]) >= len(scores), TIMEOUT, "answers")
        said = len(asking.lines())
        engine = json.loads(docker("exec", server.name, "jurybox", "status", "--json"))["engines"][0]["pid"]
        docker("exec", server.name, "sh", "-c", f"kill -9 {engine}")
        asking.wait_for(answered, TIMEOUT, after=said + 5)
        for line in filter(answered, asking.lines()):
            assert line["score"] == pytest.approx(scores[line["picture"]], abs=1e-4)
    finally:
        asking.remove()


def test_rows_of_a_client_that_was_killed_beyond_a_bridge_come_back(server):
    asking = client(server, ("tcp", 5555))
    try:
        asking.wait_for(answered, TIMEOUT)
        before = json.loads(docker("exec", server.name, "jurybox", "status", "--json"))["lanes"]["in_use"]
        docker("kill", "--signal", "KILL", asking.name)
    finally:
        asking.remove()
    wait_until(
        lambda: json.loads(docker("exec", server.name, "jurybox", "status", "--json"))["lanes"]["in_use"] < before,
        TIMEOUT,
        "the return of its rows",
    )
