"""compose.yaml as a file: every training is a service there, and a client of the server that it starts."""

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from jurybox.server.settings.config import load_settings
from jurybox.server.settings.loadable import require_loadable_from_elsewhere
from jurybox.training.cli import train

ROOT = Path(__file__).parents[3]
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
OF_TRAININGS = {name: service for name, service in SERVICES.items() if "train" in service.get("profiles", ())}


def test_every_training_that_needs_a_server_has_a_service():
    trainings = {service["command"][1] for service in OF_TRAININGS.values()}
    assert trainings == {"photo", "hockey", "workflow", "marl", "gym"}


@pytest.mark.parametrize("name", OF_TRAININGS)
def test_a_trainings_service_is_a_client_of_the_server_that_is_there(name):
    service = OF_TRAININGS[name]
    environment, volumes = service["environment"], service["volumes"]
    assert environment["JURYBOX_ADDRESS"] == SERVICES["server"]["environment"]["JURYBOX_ADDRESS"]
    assert "shared:/run/jurybox" in volumes and service["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert service["network_mode"] == "none" and service["read_only"] and service["pull_policy"] == "never"
    command, training, *options = service["command"]
    assert command == "train"
    with get_command(train).get_command(None, training).make_context(training, list(options)) as context:
        given = context.params
    assert str(given["out"]).startswith("/runs/")
    if training != "photo":
        assert given["setting_policy"] == "served" and given["setting_server"] == environment["JURYBOX_ADDRESS"]


def test_the_servers_configuration_allows_models_of_local_trainings_over_grpc():
    from jurybox.server.settings.config import ModelSettings

    settings = load_settings(ROOT / "docker" / "server.toml")
    factory = "jurybox.training.algorithms.served_networks:gym_policy"
    model = ModelSettings(factory=factory, publish="double_buffer")
    require_loadable_from_elsewhere(settings, "policy/mine", model, 60.0)
    assert SERVICES["server"]["environment"]["JURYBOX_GRPC"].startswith("0.0.0.0:")


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def test_every_service_of_ours_is_bounded_and_its_log_too():
    for name in ("server", *OF_TRAININGS):
        service = SERVICES[name]
        assert service["mem_limit"].startswith("${"), name
        assert service["stop_grace_period"] == ("20s" if name == "server" else "60s"), name
    for name, service in SERVICES.items():
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
    assert re.fullmatch(r"on-failure:\d+", SERVICES["server"]["restart"])


def test_every_transport_is_published_and_nothing_is_called_shared_memory_that_is_not():
    ports = {port.rpartition(":")[2] for port in SERVICES["server"]["ports"]}
    assert ports == {"8000", "8001", "8002"}
    assert {SERVICES["server"]["environment"][f"JURYBOX_{name}"][-4:] for name in ("HTTP", "GRPC", "TCP")} == ports
    assert all("shm_size" not in service for service in SERVICES.values())
    assert "name" not in read("compose.yaml")["volumes"]["shared"], "`down --volumes` removes it, whatever its size was"


def test_the_file_for_cuda_is_for_the_trainings_too():
    cuda = read("docker/cuda.yaml")["services"]
    assert cuda.keys() == {"server", *OF_TRAININGS}
    for name, service in cuda.items():
        assert service["build"]["args"]["DEVICE"] == "cuda" and service["deploy"]["resources"], name
        assert service["image"].endswith(":${TAG:-cuda}"), name


def test_a_token_is_a_secret_and_a_worker_has_a_file_of_its_own():
    token, worker = read("docker/token.yaml"), read("docker/worker.yaml")["services"]["worker"]
    assert token["services"]["server"]["secrets"] == ["jurybox_token"] and "file" in token["secrets"]["jurybox_token"]
    assert token["services"]["server"]["environment"]["JURYBOX_TOKEN_FILE"] == "/run/secrets/jurybox_token"
    prometheus = read("docker/monitoring/prometheus/prometheus.token.yml")
    plain = read("docker/monitoring/prometheus/prometheus.yml")
    (scrape,) = prometheus["scrape_configs"]
    assert scrape.pop("authorization") == {"credentials_file": "/run/secrets/jurybox_token"}
    assert prometheus == plain
    assert worker["build"]["target"] == "client" and worker["user"] == SERVICES["server"]["user"]


def test_what_a_host_sets_is_kept_out_of_git_and_the_commit_gets_into_images():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/.env", "/token"} <= set(ignored)
    assert {"!.git/HEAD", "!.git/refs/heads", "!docker/revision.py"} <= set(
        (ROOT / ".dockerignore").read_text().split()
    )
    assert all("REVISION" in SERVICES[name]["build"]["args"] for name in ("server", *OF_TRAININGS))
