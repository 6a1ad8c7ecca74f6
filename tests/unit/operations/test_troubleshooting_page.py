"""Each entry of docs/troubleshooting.md is about a message that exists, and a newcomer's mistakes lead to one."""

from __future__ import annotations

import ast
import re
from functools import cache

import numpy as np
import pytest
from tests.serving import serving
from tests.sources import ROOT, SOURCES, parsed

from jurybox.client import connect
from jurybox.protocol.errors import Error
from jurybox.server.settings.config import load_settings
from jurybox.server.settings.sources import InvalidConfig
from jurybox.training.algorithms.registry import algorithm_named
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable, make_environment

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [each for line in re.findall(r"^### (.+)$", PAGE, re.M) for each in re.findall(r"`(.+?)`", line)]


@cache
def sources() -> list[str]:
    """Every text of the packages; where a value is put into it, it has a zero byte."""
    found = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.\w]*[sdf]", "\0", node.value))
    return found


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part.strip()) for part in message.split("...")), re.S)


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_of_an_entry_is_in_the_source(message: str) -> None:
    known, parts = pattern(message), [part.strip() for part in message.split("...")]
    assert any(all(part in text for part in parts) and known.search(text) for text in sources())


def test_no_message_has_two_entries() -> None:
    assert len(MESSAGES) > 60 and len(set(MESSAGES)) == len(MESSAGES)


def has_entry(said: str) -> bool:
    return any(pattern(message).search(said) for message in MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "[models.a",
        "[model.a]\nfactory = 'a:b'",
        "[models.a]\nmax_batch = 2",
        "[models.a]\nfactory = 'a:b'\nmax_bach = 2",
        "[models.a]\nfactory = 'a'",
        "[server]\ndevices = ['gpu']\n[models.a]\nfactory = 'a:b'",
    ],
)
def test_a_wrong_configuration_leads_to_an_entry(text, tmp_path) -> None:
    (tmp_path / "server.toml").write_text(text)
    with pytest.raises(InvalidConfig) as wrong:
        load_settings(tmp_path / "server.toml", (), {})
    assert has_entry(str(wrong.value)), wrong.value
    with pytest.raises(InvalidConfig) as missing:
        load_settings(tmp_path / "nothing.toml", (), {})
    assert has_entry(str(missing.value)), missing.value


@pytest.mark.parametrize(
    "name", ["Cartpole-v1", "nothing_there:Cart", "gymnasium:Enw", "builtins:dict", "gymnasium:Env"]
)
def test_an_environment_that_cannot_be_used_leads_to_an_entry(name) -> None:
    with pytest.raises(EnvironmentUnusable) as unusable:
        make_environment(name)
    assert has_entry(str(unusable.value)), unusable.value


def test_a_wrong_algorithm_leads_to_an_entry() -> None:
    with pytest.raises(ValueError) as wrong:
        algorithm_named("pqo")
    assert has_entry(str(wrong.value)), wrong.value


def test_mistakes_of_a_client_lead_to_entries(tmp_path) -> None:
    with serving(tmp_path, {"policy": {"factory": "tests.models:affine"}}) as running, running.connect() as server:
        model = server.model("policy")
        name, spec = next(iter(model.spec.inputs.items()))
        row = np.zeros(spec.shape, spec.numpy_dtype)
        for mistake in (
            lambda: server.model("polcy"),
            lambda: model(np.zeros((2, *spec.shape), spec.numpy_dtype)),
            lambda: model.infer(row.astype(np.complex128)[None]),
            lambda: model({f"{name}s": row}),
        ):
            with pytest.raises(Error) as failed:
                mistake()
            assert has_entry(str(failed.value)), failed.value
    with pytest.raises(Error) as gone:
        connect(f"ipc://{tmp_path}/nothing", timeout=0.1)
    assert has_entry(str(gone.value)), gone.value
