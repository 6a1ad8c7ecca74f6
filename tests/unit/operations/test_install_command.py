"""Advice to install an extra names where this jurybox came from, never a name on an index that may be anybody's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from jurybox.protocol import revision
from jurybox.protocol.revision import install_command

ROOT = Path(__file__).parents[3]
GENERIC = "pip install -c constraints.txt '.[ray]' in a clone of jurybox (docs/install.md)"


@pytest.fixture
def installed(monkeypatch):
    """Sets the record of the installation."""

    def record(found):
        text = found if isinstance(found, (str, type(None))) else json.dumps(found)
        monkeypatch.setattr(revision, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))

    return record


def test_an_installation_from_a_clone_is_extended_from_it(installed, tmp_path):
    clone = tmp_path / "a clone"
    clone.mkdir()
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert install_command("ray") == GENERIC  # it is no clone (any more)
    (clone / "constraints.txt").touch()
    assert shlex.split(install_command("ray")) == [
        "pip", "install", "-c", f"{clone}/constraints.txt", f"{clone}[ray]",
    ]  # fmt: skip
    installed({"url": clone.as_uri(), "dir_info": {"editable": True}})
    assert shlex.split(install_command("ray"))[-2:] == ["-e", f"{clone}[ray]"]


def test_an_installation_of_a_wheel_is_extended_from_that_file(installed, tmp_path):
    wheel = tmp_path / "jurybox-0.1.0-py3-none-any.whl"
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("ray") == GENERIC
    wheel.touch()
    assert install_command("ray") == f"pip install '{wheel}[ray]'"


@pytest.mark.parametrize("record", [None, "", "no JSON", "[]", {"url": "https://example.com/x.git", "vcs_info": {}}])
def test_without_a_usable_record_the_command_is_the_install_pages(installed, record):
    installed(record)
    assert install_command("ray") == GENERIC


def test_no_error_and_no_page_advises_to_install_the_bare_name():
    """docs/install.md says why not."""
    sources = [path for part in ("protos", "client", "server", "training") for path in (ROOT / part).rglob("*.py")]
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "install.md"]
    advice = re.compile(r"pip install([^\n]*['\" ]jurybox\[| jurybox\b)")
    wrong = [str(path.relative_to(ROOT)) for path in [*sources, *pages] if advice.search(path.read_text())]
    assert wrong == []
