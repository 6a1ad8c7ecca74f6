import re

import numpy as np
import pytest

from jurybox.training.recipes.photo import PhotoTraining
from jurybox.training.recipes.photo_evaluation import KINDS, Case, PhotoEvaluation
from jurybox.training.recipes.photo_report import PhotoRun, render

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
    assert "300 pictures in 100 batches" in html and "8–15" in html and "40%" in html
    assert "12.0" in html and "learning_rate" in html


def test_names_of_photos_are_text_and_not_markup():
    html = report()
    assert "temple &lt;b&gt;.jpg" in html and "temple <b>" not in html


def test_what_is_missing_is_left_out():
    html = report(status=None, metrics=[])
    assert "The server" not in html and "Learning curve" not in html
    assert "The server" not in report(status={"models": []})
    assert "The server" in report(status={"models": [{"name": "photo", "rows": 1, "batches": 1}]})
