"""compose.yaml as a file: every training is a service there, and a client of the server that it starts."""

from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from jurybox.server.settings.config import load_settings, require_loadable_from_elsewhere
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
    for factory in ("hockey_policy", "actor_critic", "choosing_policy", "gym_policy"):
        model = ModelSettings(factory=f"jurybox.training.recipes.served_networks:{factory}", publish="double_buffer")
        require_loadable_from_elsewhere(settings, "policy/mine", model, 60.0)
    assert SERVICES["server"]["environment"]["JURYBOX_GRPC"].startswith("0.0.0.0:")
