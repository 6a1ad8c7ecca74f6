import numpy as np
import pytest

from jurybox.training.report.verdict import compare, interval, judge

RNG = np.random.default_rng(3)
NONE = RNG.uniform(0.5, 0.9, 40)
NOISE = RNG.normal(0.0, 0.02, 40)
PHOTOS = ["cat", "temple"] * 20


def verdict(learned, random=None):
    return judge(
        [
            compare("no edits", learned, NONE, PHOTOS),
            compare("random edits", learned, NONE - 0.05 if random is None else random, PHOTOS),
        ]
    )


def test_a_policy_that_beats_both_is_reported_with_its_interval():
    given = verdict(NONE + 0.1 + NOISE)
    assert given.answer == "yes"
    assert given.headline.startswith("Yes")
    assert "no edits" in given.headline and "random edits" in given.headline
    assert "+0.1" in given.sentences[0] and "95 % interval" in given.sentences[0]


def test_a_policy_that_makes_photos_worse_gets_a_negative_verdict():
    given = verdict(NONE - 0.1 + NOISE)
    assert given.answer == "no"
    assert given.headline.startswith("No")
    assert "lower" in given.sentences[0]


def test_beating_one_and_losing_to_the_other_is_no():
    given = verdict(NONE + 0.1 + NOISE, random=NONE + 0.2)
    assert given.answer == "no"
    assert "random edits" in given.headline and "no edits" not in given.headline


def test_a_difference_within_the_noise_is_not_claimed():
    slightly_better = NOISE - NOISE.mean() + 0.001
    given = verdict(NONE + slightly_better)
    assert given.answer == "undecided"
    assert given.headline.startswith("Not shown") and "no edits" in given.headline
    assert "random edits" not in given.headline  # that one it does beat


def test_doing_nothing_does_not_beat_doing_nothing():
    assert compare("no edits", NONE, NONE).answer == "undecided"


def test_with_many_photos_the_interval_is_over_photos_and_as_wide_as_these_differ():
    rng = np.random.default_rng(1)
    photos = np.repeat(np.arange(12), 20)
    values = rng.normal(0, 1, 12)[photos] + rng.normal(0, 0.01, 240)  # twenty damages of one photo are one sample
    over = interval(values, list(photos))
    alone = interval(values[::20])
    assert over.high - over.low == pytest.approx(alone.high - alone.low, rel=0.1)
    few = interval(values[:60], list(photos[:60]))
    assert few.high - few.low < 0.02  # of three photos, only further damage to these can be spoken of


def test_the_interval_has_its_nominal_coverage():
    rng = np.random.default_rng(0)
    covered = 0
    for case in range(200):
        found = interval(rng.normal(1.0, 0.5, 30), resamples=800, seed=case)
        covered += found.low <= 1.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_differences_between_photos_do_not_widen_the_interval():
    level = np.array([0.0, 1.0] * 20)
    within = interval(level + NOISE, PHOTOS)
    across = interval(level + NOISE)
    assert within.high - within.low < 0.2 * (across.high - across.low)


def test_the_same_scores_give_the_same_interval():
    assert interval(NOISE, seed=1) == interval(NOISE, seed=1)


def test_a_group_of_one_case_is_drawn_as_it_is():
    found = interval([1.0, 2.0, 4.0, 9.0], ["cat", "cat", "cat", "temple"])
    assert found.mean == 4.0 and 12 / 4 <= found.low < found.high <= 21 / 4


def test_one_case_of_each_group_does_not_claim_an_exact_mean():
    assert interval([1.0, 3.0], ["cat", "temple"]).as_dict() == {"mean": 2.0, "low": 1.0, "high": 3.0}
    assert compare("no edits", [1.0, 3.0], [2.0, 1.0], ["cat", "temple"]).answer == "undecided"


@pytest.mark.parametrize("values", [[], [1.0], [1.0, np.nan]])
def test_too_little_to_go_by_is_refused(values):
    with pytest.raises(ValueError, match="two finite values"):
        interval(values)


def test_scores_of_other_cases_are_refused():
    with pytest.raises(ValueError, match="same cases"):
        compare("no edits", [1.0, 2.0], [1.0, 2.0, 3.0])
