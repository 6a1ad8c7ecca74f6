"""The live page in a real browser, on a real server. `make test-browser` runs these.

With SCREENSHOTS=DIR pictures are left there; docs/images/live.png is one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from tests.browser.crowd import crowd
from tests.serving import wait_until

from jurybox.client import Error

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


class Visit:
    """A page in its own browser context, with its requests and its console errors."""

    def __init__(self, browser, url: str, **options) -> None:
        self.context = browser.new_context(**{"viewport": DESKTOP, **options})
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)
        self.page.goto(url)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def number(self, selector: str) -> float:
        found = re.search(r"[\d.]+", re.sub(r"[\s\u202f]", "", self.text(selector)))
        return float(found[0]) if found else 0.0

    def link(self) -> str | None:
        return self.page.locator("body").get_attribute("data-link")

    def until(self, condition, seconds: float, what: str) -> None:
        """As wait_until, giving the browser its turns."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} did not come true within {seconds} s: {self.errors}"
            self.page.wait_for_timeout(50)

    def picture(self, name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.fixture
def visit(chromium, watched):
    visits: list[Visit] = []

    def go(**options) -> Visit:
        visits.append(Visit(chromium, watched.url, **options))
        return visits[-1]

    yield go
    for one in visits:
        one.context.close()


def test_numbers_move_under_load_and_rest_without(visit, watched):
    page = visit()
    page.until(lambda: page.link() == "live", 10, "the first sample")
    assert page.number("#rows") == 0
    with crowd(watched.running):
        page.until(lambda: page.number("#rows") > 50, 20, "throughput")
        page.until(lambda: page.number("#models tr:nth-child(1) td[data-label=version]") >= 2, 20, "a version")
        seen = {page.text("#rows") for _ in range(8) if page.page.wait_for_timeout(400) is None}
        assert len(seen) > 2
        assert re.search(r"\d.*(µs|ms)", page.text("#p50"))
        assert page.number("#models tr:nth-child(1) td[data-label=lanes]") == 3
        # Beside each line is its scale; the peak is at least every value that was shown.
        assert page.page.locator("#rows-spark text.scale").last.text_content() == "0"
        assert page.page.locator("#latency-spark text.scale").count() == 2
        assert page.page.locator("#bars rect").count() >= 1
        assert page.page.locator("#rows-spark path.line").get_attribute("d").count("L") >= 5
        page.page.wait_for_timeout(int(os.environ.get("SCREENSHOT_AFTER", "0")) * 1000)
        page.picture("live")
    page.until(lambda: page.number("#rows") == 0, 20, "rest")
    assert page.errors == []


def test_the_page_requests_only_its_server(visit, watched):
    page = visit()
    page.until(lambda: page.link() == "live", 10, "the first sample")
    page.page.wait_for_timeout(1500)
    assert len(page.asked) >= 5
    assert {urlsplit(url).netloc for url in page.asked} == {urlsplit(watched.url).netloc}
    assert page.errors == []


def test_the_policy_lets_no_foreign_script_run(visit):
    page = visit()
    page.until(lambda: page.link() == "live", 10, "the first sample")
    ran = page.page.evaluate(
        """async () => {
            const inline = document.createElement("script");
            inline.textContent = "window.smuggled = true";
            document.body.append(inline);
            const reached = await fetch("http://192.0.2.1/").then(() => true, () => false);
            return [Boolean(window.smuggled), reached];
        }"""
    )
    assert ran == [False, False]
    assert sum("Content Security Policy" in error for error in page.errors) >= 2


def test_the_page_shows_a_killed_gateway_and_recovers(visit, watched):
    page = visit()
    page.until(lambda: page.link() == "live", 10, "the first sample")
    gateway = watched.running.pids()["gateway"]
    os.kill(gateway, signal.SIGSTOP)  # first it hangs
    page.until(lambda: page.link() == "gone", 15, "gone while it hangs")
    assert "silent" in page.text("#banner")
    os.kill(gateway, signal.SIGKILL)
    page.until(lambda: "Nothing answers" in page.text("#banner") or page.link() == "live", 15, "gone when it is dead")
    page.picture("gone")
    wait_until(lambda: watched.running.pids().get("gateway") not in (None, gateway), 20, "a new gateway")
    page.until(lambda: page.link() == "live", 20, "recovery")
    assert not page.page.locator("#banner").is_visible()
    assert page.text("#state") == "serving"
    page.until(lambda: "Gateway was killed by SIGKILL" in page.text("#events"), 10, "the event")


def test_a_server_without_an_engine_shows_no_rates_and_the_reason(visit, watched):
    page = visit()
    with crowd(watched.running):
        page.until(lambda: page.number("#rows") > 50, 20, "throughput")
        engine = watched.running.pids()["engine-0"]
        os.kill(engine, signal.SIGKILL)
        page.until(
            lambda: page.text("#state") != "serving" or "killed by SIGKILL" in page.text("#events"), 15, "the death"
        )
        page.picture("down")
        shown = {name: page.text(name) for name in ("#rows", "#p50", "#batch", "#banner", "#state")}
        if shown["#state"] == "down":  # another engine may serve before the page looks
            assert "No engine serves: engine 0 is" in shown["#banner"]
            assert (shown["#rows"], shown["#p50"], shown["#batch"]) == ("0", "–", "–")
        page.until(lambda: page.text("#state") == "serving" and page.number("#rows") > 50, 60, "a new engine")
        assert not page.page.locator("#banner").is_visible()
        assert "Engine 0 was killed by SIGKILL" in page.text("#events")


def test_errors_have_a_column(visit, watched):
    page = visit()
    page.until(lambda: page.link() == "live", 10, "the first sample")
    cell = "#models tr:nth-child(1) td[data-label=errors]"
    before = page.number(cell)
    with watched.running.connect() as connection:
        model = connection.model("policy/agent0", rows=2)
        with pytest.raises(Error):
            model.infer(np.zeros((1, 4), np.float32), timeout=1e-6)
    page.until(lambda: page.number(cell) > before, 10, "the error")
    assert "expired" in page.text(cell)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit, watched, scheme):
    page = visit(viewport=PHONE, device_scale_factor=2, color_scheme=scheme)
    with crowd(watched.running):
        page.until(lambda: page.number("#rows") > 50, 20, "throughput")
        for width in (390, 320, 768, 1280):
            page.page.set_viewport_size({"width": width, "height": 844})
            page.page.wait_for_timeout(600)
            overflow = page.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{overflow} pixels too wide at {width}"
        page.page.set_viewport_size(PHONE)
        page.picture(f"phone-{scheme}")


# WCAG 2.2, 1.4.3: text needs a contrast of 4.5 to its background.
CONTRAST = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour.length < 4 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const node of document.querySelectorAll("h1, h2, p, th, td span, td small, li, time, em, a, svg text")) {
        if (!node.textContent.trim() || !node.getClientRects().length) continue;
        const style = getComputedStyle(node);
        const a = light(parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color)), b = light(behind(node));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push(`${node.tagName} ${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_it_needs(visit, scheme):
    page = visit(color_scheme=scheme)
    page.until(lambda: page.link() == "live", 10, "the first sample")
    page.page.wait_for_timeout(600)
    assert page.page.evaluate(CONTRAST) == []
    page.picture(f"idle-{scheme}")


def test_a_screen_reader_finds_its_way(visit):
    page = visit()
    page.until(lambda: page.link() == "live", 10, "the first sample")
    names = page.page.evaluate(
        "[...document.querySelectorAll('svg')].map((svg) => svg.getAttribute('aria-label') || "
        "document.getElementById(svg.getAttribute('aria-labelledby'))?.textContent)"
    )
    assert all(names)
    assert page.page.get_by_role("status").inner_text() == "serving"
    assert page.page.get_by_role("table").count() == 2
    assert page.page.get_by_role("rowheader", name="photo").count() == 1
    assert page.page.evaluate("document.documentElement.lang") == "en"
