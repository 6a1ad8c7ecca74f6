import re

import numpy as np
import pytest

from jurybox.training.recipes.photo import PhotoTraining
from jurybox.training.recipes.photo_evaluation import KINDS, Case, PhotoEvaluation
from jurybox.training.recipes.photo_report import PhotoRun, render
from jurybox.training.report import charts

RNG = np.random.default_rng(5)
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
    {"env_steps": float(step), "rollout_return_mean": step / 1000, "rollout_return_error": 0.1} for step in (256, 512)
]


def evaluation_of(gain):
    cases = []
    for seed in range(6):
        for photo in ("cat.png", "temple <b>.jpg"):
            before = 0.6 + 0.02 * seed
            scores = dict(zip(KINDS, (before, before - 0.1, before + gain + 0.001 * seed, 0.95), strict=True))
            pictures = {kind: RNG.integers(0, 255, (384, 384, 3), dtype=np.uint8) for kind in KINDS}
            marks = {kind: {"score": score, "exposure": score / 2} for kind, score in scores.items()}
            cases.append(Case(photo, seed, pictures, marks))
    return PhotoEvaluation(tuple(cases))


def report(gain=0.1, status=STATUS, metrics=METRICS):
    settings = PhotoTraining().as_dict()
    return render(
        PhotoRun(evaluation_of(gain), metrics, status, "photo", settings, {"Seed": "3"}, "jurybox demo photo")
    )


def test_the_report_needs_nothing_from_elsewhere():
    html = report()
    assert not re.search(r"https?:|@import|url\(|<script|<link[^>]*stylesheet", html)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', html)
    assert sources and all(source.startswith("data:") for source in sources)


@pytest.mark.parametrize(("gain", "word"), [(0.1, "Yes:"), (-0.2, "No:"), (-0.0025, "Not shown:")])
def test_the_report_says_in_words_whether_it_learned(gain, word):
    assert f'<p class="headline">{word}' in report(gain)


def test_pictures_scores_curve_criteria_server_and_settings_are_there():
    html = report()
    for heading in (
        "Before and after",
        "Scores on held-out",
        "Learning curve",
        "by criterion",
        "The server",
        "The run",
    ):
        assert heading in html
    assert html.count("<img") == 6 * len(KINDS)
    assert "300 rows in 100 batches" in html and "8–15" in html and "40%" in html
    assert "12.0" in html and "learning_rate" in html


def test_names_of_photos_are_text_and_not_markup():
    html = report()
    assert "temple &lt;b&gt;.jpg" in html and "temple <b>" not in html


def test_what_is_missing_is_left_out():
    html = report(status=None, metrics=[])
    assert "The server" not in html and "Learning curve" not in html
    assert "The server" not in report(status={"models": []})
    assert "The server" in report(status={"models": [{"name": "photo", "rows": 1, "batches": 1}]})


@pytest.mark.parametrize("width", [640, 344])
def test_no_label_of_a_chart_leaves_its_drawing(width):
    drawings = re.findall(rf'<svg class="\w+" viewBox="0 0 {width} \d+".*?</svg>', report(), re.S)
    assert len(drawings) == 4, "scores, learning, criteria, batches; each for a wide screen and for a phone's"
    for drawing in drawings:
        for x, anchor, style, text in re.findall(
            r'<text x="([\d.]+)" [^>]*text-anchor="(\w+)" class="([^"]*)">([^<]*)<', drawing
        ):
            wide = len(text) * (6.5 if style == "axis" else 7.0)  # of a 12 and a 13 pixel font, on average
            begins = float(x) - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
            assert begins >= -4 and begins + wide <= width + 4, f"{text!r} at {x} of {width}"


def test_a_loss_is_not_shown_as_a_gain():
    def captions(gain):
        learned = re.findall(r'<figure class="learned">.*?</figure>', report(gain), re.S)
        return {re.search(r'<b class="(\w*)">([+-])', caption).groups() for caption in learned}

    assert captions(0.1) == {("gain", "+")}
    assert captions(-0.2) == {("loss", "-")}


def test_marks_that_are_the_same_hide_nothing():
    html = charts.dots_by_row({"size": [(name, 0.5, "plain") for name in "abcd"]}, "title", "axis")
    wide = re.search(r'<svg class="wide".*?</svg>', html, re.S)[0]
    circles = re.findall(r'<circle [^>]*r="([\d.]+)" class="(\w+)', wide)
    assert [kind for _, kind in circles] == ["mean", "mean", "ring", "ring"]
    assert float(circles[0][0]) < float(circles[2][0]) < float(circles[3][0])
