"""`docker compose up`, and clients in containers of their own, through kills and restarts."""

import json
import time
import urllib.request

import pytest
from tests.containers.engine import ROOT, Project, docker
from tests.serving import wait_until

from jurybox.protocol.revision import checked_out

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]
AGAIN = 150.0  # seconds in which a client has answers again, on a busy machine


@pytest.fixture(scope="module")
def client(project, images):
    return project.client(images["client"])


def answered(line):
    return "score" in line


def verified(lines, scores):
    """The number of answers; every one of them must be right."""
    answers = [line for line in lines if answered(line)]
    for line in answers:
        assert line["score"] == pytest.approx(scores[line["picture"]], abs=1e-4)
    return len(answers)


def healthy(project):
    return project.inspect(".State.Health.Status") == "healthy"


def test_the_server_is_healthy_over_http(project):
    assert healthy(project)
    with urllib.request.urlopen(f"http://127.0.0.1:{project.http}/health", timeout=10) as answer:
        assert answer.status == 200, answer.read()
    assert project.in_server("jurybox", "health").strip() == "ready"


def test_it_has_no_rights_and_nothing_to_write_to(project):
    assert project.in_server("id", "-u").strip() == "10001"
    assert "CapEff:\t0000000000000000" in project.in_server("cat", "/proc/1/status")
    for folder in ("/", "/opt/jurybox", "/etc/jurybox"):
        assert "Read-only file system" in docker("exec", "-u", "0", project.server, "touch", f"{folder}/x", check=False)
    assert not docker("exec", project.server, "sh", "-c", "command -v cc gcc g++ c++ make", check=False).strip()


def test_the_image_has_labels(project, images):
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", images["server"]))
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert f"jurybox {labels['org.opencontainers.image.version']} " in project.in_server("jurybox", "--version")


def test_a_client_in_another_container_gets_right_answers(client, scores):
    client.wait_for(answered, AGAIN)
    wait_until(lambda: verified(client.lines(), scores) >= len(scores), AGAIN, "an answer for every picture")


def test_root_of_another_container_is_served_as_well(project, images, scores):
    root = project.client(images["client"], user="0:0", rights=True)
    line = root.wait_for(lambda line: True, AGAIN)
    assert answered(line), line
    assert verified(root.lines(), scores)
    root.remove()


def test_a_killed_clients_rows_come_back(project, images, client):
    client.wait_for(answered, AGAIN)

    # Lanes of the tests before and of health checks still come and go: the log says whose rows are taken back.
    def taken_back():
        return project.compose("logs", "server").count("client gone, rows taken back")

    killed = project.client(images["client"])
    killed.wait_for(answered, AGAIN)
    before = taken_back()
    docker("kill", "--signal", "KILL", killed.name)
    wait_until(lambda: taken_back() > before, 30, "the return of its rows")
    wait_until(lambda: project.status()["lanes"]["retiring"] == 0, 30, "the end of its lane")


def test_a_killed_engine_costs_no_client_an_answer(project, client, scores):
    client.wait_for(answered, AGAIN)
    said = len(client.lines())
    engine = project.status()["engines"][0]
    project.in_server("sh", "-c", f"kill -9 {engine['pid']}")
    wait_until(
        lambda: project.status()["engines"][0]["incarnation"] not in (engine["incarnation"], "0" * 16),
        AGAIN,
        "a new engine",
    )
    wait_until(lambda: verified(client.lines()[said:], scores) >= 100, AGAIN, "answers of the new engine")
    assert not [line for line in client.lines()[said:] if "error" in line]
    assert project.in_server("jurybox", "health").strip() == "ready"


@pytest.mark.parametrize("end", ["restart", "kill"])
def test_clients_continue_after_a_restart_of_the_servers_container(project, client, scores, end):
    client.wait_for(answered, AGAIN)
    server_id = project.status()["server"]["id"]
    if end == "kill":
        docker("kill", "--signal", "KILL", project.server)
        project.compose("up", "--detach", "--no-build", "server")
    else:
        project.compose("restart", "server")
    wait_until(lambda: healthy(project), AGAIN, "health")
    assert project.status()["server"]["id"] != server_id
    said = len(client.lines())
    client.wait_for(answered, AGAIN, after=said)
    assert verified(client.lines(), scores)
    assert {line["error"] for line in client.lines() if "error" in line} <= {"ServerGone", "Refused", "Timeout"}
    left = project.in_server(
        "sh", "-c", "ls /run/jurybox | grep ^jurybox- | cut -d- -f3 | cut -d. -f1 | sort -u"
    ).split()
    assert left == [project.status()["server"]["id"]], "what the old server left was not swept"


def test_a_client_with_another_shared_memory_gets_an_error_that_says_what_to_do(project, images):
    lost = project.client(images["client"], env={"JURYBOX_ADDRESS": "ipc:///run/jurybox/engine"})
    line = lost.wait_for(lambda line: True, AGAIN)
    assert line["error"] == "SharedMemoryError"
    assert "is not in /dev/shm" in line["text"]
    assert "JURYBOX_SHM_DIR" in line["text"]
    lost.remove()


def test_a_client_of_another_user_gets_an_error_with_the_right_user(project, images):
    stranger = project.client(images["client"], user="12345:12345")
    line = stranger.wait_for(lambda line: True, AGAIN)
    assert line["error"] == "ServerGone"
    assert "closed to user 12345" in line["text"]
    stranger.remove()


def test_sigterm_ends_it_in_order(project):
    began = time.monotonic()
    project.compose("stop", "server")
    assert project.inspect(".State.ExitCode") == 0, docker("logs", "--tail", "20", project.server)
    assert time.monotonic() - began < 20, "it was killed by the engine_timeout, not stopped by its signal"
    log = docker("logs", "--tail", "20", project.server)
    assert log.index("draining") < log.index("stopped")
    project.compose("start", "server")


def test_every_profile_and_the_one_for_cuda_are_sound(project):
    services = project.compose("--profile", "*", "config", "--services").split()
    trainings = {"train", "hockey", "workflow", "marl", "gym"}
    assert set(services) == {"server", "prometheus", "grafana"} | trainings
    for file in ("cuda", "token", "worker"):
        docker("compose", "-f", "compose.yaml", "-f", f"docker/{file}.yaml", "config", "--quiet")


def test_the_memory_limit_is_that_of_the_variable(project):
    assert project.inspect(".HostConfig.Memory") == 4 << 30
    project.compose("up", "--detach", "--no-build", "--wait", "server", timeout=200, MEMORY="1g")
    assert project.inspect(".HostConfig.Memory") == 1 << 30


def test_a_server_that_cannot_start_does_not_try_for_ever_and_its_log_says_why(images, tmp_path):
    project = Project(images["name"], images["tag"])
    (tmp_path / "server.toml").write_text('[models.photo]\nfactory = "nobody:knows"\nnonsense = 1\n')
    (tmp_path / "wrong.yaml").write_text(
        f"services: {{server: {{volumes: ['{tmp_path}/server.toml:/etc/jurybox/server.toml:ro']}}}}\n"
    )
    (tmp_path / "server.toml").chmod(0o644), tmp_path.chmod(0o755)
    try:
        said = project.compose("-f", str(tmp_path / "wrong.yaml"), "up", "--detach", "--no-build", "--wait", "server",
                               timeout=300, check=False)  # fmt: skip
        assert "exited" in said or "unhealthy" in said, said
        wait_until(lambda: project.inspect(".State.Status") == "exited", 300, "the end of the restarts")
        assert project.inspect(".RestartCount") == 5
        assert "nonsense" in project.compose("logs", "--tail", "5", "server")
    finally:
        project.down()


def test_a_kill_by_the_memory_limit_is_named_and_ends(images):
    project = Project(images["name"], images["tag"])
    try:
        project.compose("up", "--detach", "--no-build", "server", timeout=300, MEMORY="160m")
        wait_until(
            lambda: "out of memory: the limit of 160 MiB" in project.compose("logs", "server"), 200, "the reason"
        )
        wait_until(lambda: project.inspect(".State.Status") == "exited", 400, "the end of the restarts")
    finally:
        project.down()


def test_its_version_has_a_revision(project):
    commit = project.in_server("python", "-c", "from jurybox.protocol.revision import *; print(source_revision())")
    assert commit.strip() == (checked_out(ROOT / ".git") or "None")
