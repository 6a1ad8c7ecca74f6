"""Debian's chromium, driven by Playwright; a real server behind the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.serving import RunningServer, serving

if TYPE_CHECKING:
    from playwright import sync_api

MODELS = {
    "policy/agent0": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256, "publish": "double_buffer"},
    "photo": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[sync_api.Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")  # not to collect tests
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium: apt-get install -y chromium")
    with sync_api.sync_playwright() as playwright:
        # As root chromium has no sandbox; in the background it would call home.
        flags = ["--no-sandbox", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=executable, args=flags)
        yield browser
        browser.close()


class WatchedServer:
    """A running server, and where its page is."""

    def __init__(self, running: RunningServer) -> None:
        self.running = running
        with running.connect() as connection:
            self.url = f"http://{connection.status()['server']['http']}/"


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[WatchedServer]:
    with serving(tmp_path_factory.mktemp("watched"), MODELS, http="127.0.0.1:0") as running:
        yield WatchedServer(running)
