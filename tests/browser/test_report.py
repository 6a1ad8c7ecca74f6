"""A training's report in a real browser: complete on a phone, light and dark, without requests to other hosts."""

from __future__ import annotations

import pytest
from tests.unit.studies.photo.test_photo_report import report

from jurybox.training.report import charts, page
from jurybox.training.runtime.progress import RoleTimeline, Timeline

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# Texts of the drawings that are shown, with those that leave their drawing and those that lie on each other.
LOOK = """() => {
  const shown = [...document.querySelectorAll("svg")].filter(svg => getComputedStyle(svg).display != "none");
  const wider = document.documentElement.scrollWidth - innerWidth;
  const tables = [...document.querySelectorAll(":not(details) > .scroll")].filter(each => each.querySelector("table"));
  const scrolled = tables.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText);
  const found = {drawings: shown.length, left: [], touching: [], wider: wider, scrolled: scrolled};
  for (const svg of shown) {
    const around = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [name, box] of texts)
      if (box.left < around.left - 1 || box.right > around.right + 1 || box.bottom > around.bottom + 1)
        found.left.push(name);
    texts.forEach(([one, a], i) => texts.slice(0, i).forEach(([other, b]) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        found.touching.push(`${one} on ${other}`);
    }));
  }
  return found;
}"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A file and its number of charts, by name."""
    folder = tmp_path_factory.mktemp("reports")
    lanes = tuple(
        RoleTimeline(f"learner-agent_{n}+agent_{n + 1}", 0.5, [(0.0, 1.0, ""), (2.0, 3.0, "")]) for n in range(4)
    )
    same = [charts.Curve(name, [0, 9000], [0, 50], "learned") for name in ("weak", "strong", "random")]
    drawn = [charts.timeline(Timeline(lanes), "lanes"), charts.curves(same, "curves", "env steps", "% of games won")]
    texts = {"photo": (report(), 6), "run": (page.render("Report", "Report", [page.Section("Charts", drawn)]), 2)}
    for name, (text, _) in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html", drawings) for name, (_, drawings) in texts.items()}


@pytest.mark.parametrize("width", [390, 960])
@pytest.mark.parametrize("name", ["photo", "run"])
def test_every_label_is_whole_and_none_lies_on_another(chromium, reports, name, width):
    file, drawings = reports[name]
    asked, ink = [], {}
    for scheme in ("light", "dark"):
        context = chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        shown = context.new_page()
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(file.as_uri())
        assert shown.evaluate(LOOK) == {
            "drawings": drawings, "left": [], "touching": [], "wider": 0, "scrolled": [],
        }  # fmt: skip
        ink[scheme] = shown.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
        context.close()
    assert ink["light"] != ink["dark"], "drawings follow the page's colours"
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_what_was_learned_and_what_the_server_did_are_seen_without_scrolling(chromium, reports):
    shown = chromium.new_page(viewport={"width": 1280, "height": 800})
    shown.goto(reports["photo"][0].as_uri())
    first = shown.locator(".verdict")
    assert first.locator(".pairs img").count() == 12 and first.locator(".figures dd").count() == 6
    box = first.bounding_box()
    assert box["y"] + box["height"] < 800
    shown.close()
