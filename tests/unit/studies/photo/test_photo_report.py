import re
import shlex
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from typer.testing import CliRunner

from jurybox.studies.photo import train as photo_run
from jurybox.studies.photo.environment.evaluate import Straightened
from jurybox.studies.photo.evaluation import KINDS, Case, Intact, PhotoEvaluation
from jurybox.studies.photo.learning import PhotoTraining
from jurybox.studies.photo.report import PhotoRun, render
from jurybox.training.cli import demo as demo_commands
from jurybox.training.report import charts
from jurybox.training.report.verdict import compare, judge
from jurybox.training.runtime.progress import RoleTimeline, Timeline

pytestmark = pytest.mark.usefixtures("every_drawing")
# Of large squares: noise would take longer to encode than all else.
SQUARES = np.random.default_rng(5).integers(0, 255, (len(KINDS), 12, 12, 3), dtype=np.uint8)
PICTURES = dict(zip(KINDS, SQUARES.repeat(32, 1).repeat(32, 2), strict=True))
STATUS = {
    "models": [
        {
            "name": "photo",
            "rows": 300,
            "batches": 100,
            "latency": {"forward": {"p50": 0.012, "p90": 0.02, "p99": 0.05}, "request": {"p50": None}},
            "histograms": {"batch_rows": [0, 40, 30, 20, 10, 0, 0]},
        }
    ]
}
METRICS = [
    {
        "env_steps": float(step),
        "rollout_return_mean": step / 1000,
        "rollout_return_error": 0.1,
        "score_before": 0.5,
        "score_after": 0.5 + step / 4000,
        "audit_psnr_before": 16.0,
        "audit_psnr": 16.0 - step / 400,
        "audit_other_before": 0.5,
        "audit_other": 0.5 - step / 4000,
    }
    for step in (256, 512)
]


def audit_of(psnr, moved):
    return {"psnr": psnr, "ssim": psnr / 40, "ciede2000": moved}


def evaluation_of(gain, nearer=4.0, intact=1.0):
    cases = []
    for seed in range(6):
        for photo in ("cat.png", "temple <b>.jpg"):
            before = 0.6 + 0.02 * seed
            scores = dict(zip(KINDS, (before, before - 0.1, before + gain + 0.001 * seed, 0.95), strict=True))
            pictures = {kind: np.roll(each, len(cases), 0) for kind, each in PICTURES.items()}
            marks = {kind: {"score": score, "exposure": score / 2} for kind, score in scores.items()}
            audit = {
                "no edits": audit_of(16.0 + seed, 12.0),
                "random edits": audit_of(12.0, 15.0),
                "learned": audit_of(16.0 + nearer + 1.1 * seed, 12.0 - nearer - 0.1 * seed),
                "original": {},
            }
            fault = {"exposure": 1.0, "tilt": 5.0 + seed} if photo == "cat.png" else {"haze": 0.4}
            cases.append(Case(photo, seed, pictures, marks, audit, fault, {"straighten": -4.0 - seed}))
    whole = [
        Intact(
            case.photo, case.seed, case.pictures["original"], case.pictures["learned"], 0.95, 0.97, audit_of(30, intact)
        )
        for case in cases
        if case.seed % 2 == 0
    ]
    tilted = [
        Straightened(case.photo, case.seed, tilt, -tilt / 2)
        for case in cases
        for tilt in (3.5 + case.seed, -3.5 - case.seed)
    ]
    return PhotoEvaluation(tuple(cases), tuple(whole), tuple(tilted))


@pytest.fixture
def undrawn(monkeypatch):
    """Without charts, for tests that do not need them."""
    monkeypatch.setattr(charts, "chart", lambda *_, **__: charts.Chart("", ""))


@pytest.fixture(scope="module")
def html():
    return report()


def report(gain=0.1, status=STATUS, metrics=METRICS, **audit):
    settings = PhotoTraining.checked({"envs": 8}).as_dict()
    return render(
        PhotoRun(
            evaluation_of(gain, **audit), metrics, status, "photo", settings, {"Seed": "3"}, "jurybox demo photo", 5.0
        )
    )


def test_the_report_needs_nothing_from_elsewhere(html):
    assert not re.search(r"https?:|@import|url\((?!#)|<script|<link[^>]*stylesheet", html)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', html)
    assert sources and all(source.startswith(("data:", "#")) for source in sources)


@pytest.mark.parametrize(("gain", "word"), [(0.1, "Yes:"), (-0.2, "No:"), (-0.0025, "Not shown:")])
def test_the_report_says_in_words_whether_it_learned(undrawn, gain, word):
    assert f'<p class="headline">{word}' in report(gain)


@pytest.mark.parametrize(
    ("audit", "headline"),
    [
        ({}, "and the audit agrees"),
        ({"nearer": -4.0}, "The juror was gamed: its score rose, while pictures moved away"),
        ({"intact": 12.0}, "The juror was gamed: its score rose, while intact photos were not left alone."),
        ({"nearer": -0.25}, "Not shown: the juror&#39;s score rose"),
    ],
)
def test_yes_needs_the_jury_and_the_audit(undrawn, audit, headline):
    told = report(**audit)
    assert headline in told
    assert ("Where score and audit part" in told) == bool(audit), "with the pictures that show it"


def test_a_picture_that_scores_no_better_is_not_saved_by_its_audit(undrawn):
    assert '<p class="headline">No:' in report(gain=-0.2)


def test_the_report_shows_measures_without_a_juror(html):
    for told in ("The audit: what no juror scored", "CIEDE2000", "By PSNR the edited pictures are nearer to"):
        assert told in html
    assert "The audit by kind of damage" in html and "<td>haze</td>" in html and "<td>blur</td>" not in html
    assert "Intact photos (6 crops without damage): the score rises in 100%" in html
    assert "Straightening, measured on 24 pictures: 2 photos, each damaged in 6 ways" in html
    assert "It follows the tilt with a correlation of +1.00 (+1.00 to +1.00 over pairs of pictures of these" in html
    assert "of every degree of tilt 0.50° are turned back (+0.50 to +0.50)" in html and "left tilted by 3.0°" in html
    assert "happen to be tilted" in html
    assert "Is the juror overoptimised?" in html and "rewarded juror" in html and "other" in html


def test_pictures_scores_curve_criteria_server_and_settings_are_there(html):
    for heading in (
        "Before and after",
        "Scores on held-out",
        "Learning curve",
        "by criterion",
        "What the server did",
        "The run",
    ):
        assert heading in html
    assert html.count("<img") == 6 * 2 + 6 * len(KINDS)
    assert "300 rows in 100 batches" in html and "8–15" in html and "40%" in html
    assert "12.0" in html and "learning_rate" in html


def test_the_first_part_has_six_pictures_before_and_after_and_what_the_server_did(html):
    first = re.search(r'<section class="verdict.*?</section>', html, re.S)[0]
    assert len(set(re.findall(r'<img class="" src="([^"]+)"', first))) == 12
    assert first.count("before 0.") == first.count("after 0.") == 6 and first.count('<b class="gain">+') == 6
    told = dict(re.findall(r"<div><dd>(.*?)</dd><dt>(.*?)</dt></div>", first))
    assert told["8"] == "env workers" and told["300"] == "requests" and told["60"] == "rows a second"
    assert told["3.0"] == "rows a batch, in 40% 1" and told["– / –"] == "ms a request, p50 / p99"
    assert told["version 0"] == "of the juror served"
    assert "Of 12 damaged pictures it raised the score in 100% and came nearer" in first
    assert "(PSNR 100%, SSIM 100%, CIEDE2000 100%); it moved intact photos by 1.0 CIEDE2000." in first


def test_names_of_photos_are_text_and_not_markup(html):
    assert "temple &lt;b&gt;.jpg" in html and "temple <b>" not in html


def test_missing_values_are_left_out(undrawn):
    html = report(status=None, metrics=[])
    assert "What the server did" not in html and "Learning curve" not in html
    assert "What the server did" not in report(status={"models": []})
    assert "What the server did" in report(status={"models": [{"name": "photo", "rows": 1, "batches": 1}]})


def drawings(html, width):
    """Of each drawing of that width its texts, each with its begin and end, in units, as wide as text is on average."""
    for drawing in re.findall(rf'<svg class="\w+" viewBox="0 0 {width} \d+".*?</svg>', html, re.S):
        texts = []
        for element in ElementTree.fromstring(drawing).iter("text"):
            place = {"start": 0.0, "middle": 0.5, "end": 1.0}
            anchor = re.search(r"text-anchor: (\w+)", element.get("style"))
            size = float(re.search(r"([\d.]+)px", element.get("style"))[1])
            wide = len(element.text) * size * 0.5
            x = element.get("x") or re.search(r"translate\(([\d.]+)", element.get("transform"))[1]
            begins = float(x) - place[anchor[1] if anchor else "start"] * wide
            texts.append((begins, begins + wide, element.text))
        yield texts


@pytest.mark.parametrize("width", [640, 344])
def test_no_label_of_a_chart_leaves_its_drawing(html, width):
    found = list(drawings(html, width))
    assert len(found) == 6, "scores, learning, two of the audit, criteria, batches; each for wide screens and phones"
    for begins, ends, text in (each for texts in found for each in texts):
        assert begins >= -4 and ends <= width + 4, f"{text!r} from {begins} to {ends} of {width}"


@pytest.mark.parametrize("width", [640, 344])
def test_a_long_name_leaves_room_for_its_value(width):
    lanes = tuple(
        RoleTimeline(f"learner-agent_{n}+agent_{n + 1}+agent_{n + 2}", 0.5, [(0.0, 1.0, "")]) for n in range(3)
    )
    drawn = charts.timeline(Timeline(lanes), "who worked when")
    (texts,) = drawings(drawn.wide + drawn.narrow, width)
    assert all(begins >= -4 and ends <= width + 4 for begins, ends, _ in texts), texts
    assert max(ends for _, ends, text in texts if "agent" in text) < width * 0.6


def test_a_chart_has_the_pages_colours_in_light_and_dark(html):
    svg = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
    assert "var(--learned)" in svg and "var(--rule)" in svg and not re.findall(r"#[0-9a-f]{6}\b(?!\d)", svg)
    named = set(re.findall(r"var\((--\w+)\)", svg))
    for scheme in re.findall(r":root \{(.*?)\}", html, re.S):
        assert all(f"{name}:" in scheme for name in named)


def test_text_in_a_chart_is_text():
    name = "<b>$x^2$ & co"
    drawn = charts.curves([charts.Curve(name, [0, 1], [0, 1], "learned")], name, name, name)
    for svg in (drawn.wide, drawn.narrow):
        root = ElementTree.fromstring(svg)
        assert [each.text for each in root.iter("text")].count(name) == 3 and root.get("aria-label") == name


def test_the_same_run_gives_the_same_report(monkeypatch):
    first = charts.curves([charts.Curve("a", [0, 1], [0, 1], "learned")], "title", "across", "up")
    matplotlib.rcParams["lines.linewidth"] = 17.0  # a user's own juror
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 31.0)
    try:
        assert charts.curves([charts.Curve("a", [0, 1], [0, 1], "learned")], "title", "across", "up") == first
        assert matplotlib.rcParams["lines.linewidth"] == 17.0
    finally:
        matplotlib.rcdefaults()


def test_a_training_does_not_wait_for_what_only_its_report_needs():
    told = "import sys\nfrom jurybox.training.report import charts, page\n"
    told += "print({'matplotlib', 'jinja2', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "set()"


def test_a_loss_is_not_shown_as_a_gain(undrawn):
    def captions(gain):
        learned = re.findall(r'<figure class="learned">.*?</figure>', report(gain), re.S)
        learned += re.findall(r"after [\d.]+ .*?</figcaption>", report(gain), re.S)
        return {re.search(r'<b class="(\w*)">([+-])', caption).groups() for caption in learned}

    assert captions(0.1) == {("gain", "+")}
    assert captions(-0.2) == {("loss", "-")}


def test_marks_that_are_the_same_hide_nothing():
    drawn = charts.dots_by_row({"size": [(name, 0.5, "plain") for name in "abcd"]}, "title", "axis")
    root = ElementTree.fromstring(drawn.wide)
    shapes = {path.get("id"): path.get("d") for path in root.iter("path")}
    marks = {each.find("title").text: each.find(".//use") for each in root.iter("g") if each.find("title") is not None}
    assert sorted(marks) == ["a: 0.500", "b: 0.500", "c: 0.500", "d: 0.500"]
    rings = ["fill: none" in marks[name].get("style") for name in sorted(marks)]
    assert rings == [False, False, True, True]
    drawn_as = [shapes[marks[name].get("href").removeprefix("#")] for name in sorted(marks)]
    wide = [max(map(float, re.findall(r"-?[\d.]+", shape))) for shape in drawn_as]
    assert wide[0] < wide[2] < wide[3]


def test_a_curve_of_many_rows_is_their_means_up_to_the_last_row():
    curve = charts.stretches("return", np.arange(1, 1001), np.arange(1000.0), points=10)
    assert len(curve.xs) == 10 and curve.xs[-1] == 1000 and curve.ys[0] == 49.5
    assert curve.errors[0] == pytest.approx(np.arange(100).std())
    assert charts.stretches("return", [1, 2], [3.0, 4.0]).errors is None, "no deviation of one value"


@pytest.mark.parametrize(
    ("options", "replicas"),
    [({}, 1), ({"seconds": 30.0, "damages": 2, "workers": 3, "juror": "my.models:juror"}, 2)],
    ids=["defaults", "all"],
)
def test_the_command_in_the_report_repeats_the_demo_with_all_its_options(tmp_path, monkeypatch, options, replicas):
    wanted = {"seed": 4, "steps": 320, **options}
    defaults = {"juror": photo_run.DEMO_ENVIRONMENT["juror"], "damages": photo_run.DAMAGES, "juror-replicas": 1}
    given = {**defaults, **wanted, "juror-replicas": replicas}
    command = photo_run._demo_command(tmp_path / "a folder", "photo", given, defaults)
    assert options or command.endswith("--seed 4 --steps 320")
    received = {}

    def demo(folder, watcher, resources, **given):
        received.update(given, folder=folder)
        return judge([compare("no edits", np.ones(9), np.zeros(9))])

    monkeypatch.setattr(photo_run, "demo", demo)
    done = CliRunner().invoke(demo_commands, shlex.split(command)[2:])
    assert done.exit_code == 0, done.output
    assert received == {**wanted, "replicas": replicas, "folder": tmp_path / "a folder"}


def test_the_gamed_demo_is_the_same_training_with_another_juror(tmp_path, monkeypatch):
    received = {}

    def demo(folder, watcher, resources, **given):
        received.update(given, folder=folder)
        return judge([compare("no edits", np.ones(9), np.zeros(9))])

    monkeypatch.setattr(photo_run, "demo", demo)
    assert CliRunner().invoke(demo_commands, ["gamed", "--out", str(tmp_path / "g"), "--seed", "3"]).exit_code == 0
    assert received == {"seed": 3, "gamed": True, "folder": tmp_path / "g"}
    for training, environment in (
        (photo_run.DEMO, photo_run.DEMO_ENVIRONMENT),
        (photo_run.GAMED, photo_run.GAMED_ENVIRONMENT),
    ):
        settings = photo_run.PhotoTraining.checked({**training, "environment": photo_run.PhotoConfig(**environment)})
        assert settings.steps >= settings.rollout
