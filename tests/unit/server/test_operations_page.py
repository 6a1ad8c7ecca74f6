"""The pages of the configuration and of running a server match the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jurybox.server.doctor.checks import examine
from jurybox.server.settings.config import ModelSettings, ServerSettings, load_settings
from jurybox.server.settings.door_settings import DialectSettings, RobotSettings
from jurybox.server.settings.sources import RESERVED_VARIABLES

PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
RUNNING = (Path(__file__).parents[3] / "docs" / "running.md").read_text()


DIALECTS = (Path(__file__).parents[3] / "docs" / "dialects.md").read_text()


def documented(heading: str, page: str = PAGE) -> dict[str, str]:
    """Settings of a section's table with the default that it names."""
    section = re.split(r"\n##+ ", page.split(f"### {heading}\n", 1)[1])[0]
    return {
        name: default.strip()
        for names, default in re.findall(r"^\| (`.+?`(?:, `.+?`)*) \|([^|]*)\|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }


@pytest.mark.parametrize(
    ("heading", "settings"),
    [("[server]", ServerSettings), ("[models.NAME]", ModelSettings), ("[robots.NAME]", RobotSettings)],
)
def test_every_setting_is_documented_with_its_default(heading, settings):
    said = documented(heading)
    assert set(said) == set(settings.model_fields)
    for name, field in settings.model_fields.items():
        if field.is_required():
            assert said[name] == "required", name
        elif field.default_factory is None:
            assert said[name] == ("none" if field.default is None else f"`{json.dumps(field.default)}`"), name


def test_every_setting_of_a_dialect_is_documented_with_its_default():
    said = documented("[dialects.NAME]", DIALECTS.split("| `speaks` | fields")[0])
    assert set(said) == set(DialectSettings.model_fields)
    for name, field in DialectSettings.model_fields.items():
        none = field.is_required() or field.default is None
        assert said[name] == ("none" if none else f"`{json.dumps(field.default)}`"), name


def test_every_reserved_variable_is_documented():
    assert all(f"| `{name}` |" in PAGE for name in RESERVED_VARIABLES)


def test_everything_the_doctor_looks_at_is_documented():
    assert [finding.subject for finding in examine() if f"\n| {finding.subject} |" not in PAGE] == []


def test_every_alert_is_explained():
    rules = (Path(__file__).parents[3] / "docker" / "monitoring" / "prometheus" / "alerts.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert len(alerts) > 3 and [alert for alert in alerts if f"\n| `{alert}` |" not in RUNNING] == []


def test_the_example_is_a_configuration(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(re.search(r"```toml\n(.+?)```", PAGE, re.DOTALL)[1])
    models = load_settings(path, (), {}).models
    assert (models["photo"].max_batch, models["policy/agent0"].publish) == (32, "double_buffer")
