from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from jurybox.studies.hockey.league import League, LeagueSettings, draw


def league(**options) -> League:
    return League(LeagueSettings(**options))


def play(of: League, opponent: str, wins: int, losses: int) -> None:
    for outcome in [1] * wins + [-1] * losses:
        of.record(opponent, outcome)


def drawn(of: League, n: int = 4000) -> Counter:
    rng = np.random.default_rng(0)
    return Counter(draw(of.odds(), rng) for _ in range(n))


def test_without_a_pool_anchors_are_drawn_alike() -> None:
    counts = drawn(league())
    assert set(counts) == {"anchor:weak", "anchor:strong"}
    assert counts["anchor:weak"] == pytest.approx(2000, abs=150)


def test_half_of_the_games_are_against_the_pool() -> None:
    of = league()
    of.add(10)
    of.add(20)
    counts = drawn(of)
    assert counts["pool:10"] + counts["pool:20"] == pytest.approx(2000, abs=150)


@pytest.mark.parametrize(("weighting", "most"), [("variance", "pool:2"), ("hard", "pool:3")])
def test_prioritised_self_play_prefers_the_equal_or_the_hard(weighting, most: str) -> None:
    of = league(weighting=weighting, decay=1.0, anchor_share=0.0)
    for version in (1, 2, 3):
        of.add(version)
    play(of, "pool:1", 18, 2)
    play(of, "pool:2", 10, 10)
    play(of, "pool:3", 2, 18)
    p = np.array([0.9, 0.5, 0.1])
    weights = p * (1 - p) if weighting == "variance" else (1 - p) ** 2
    np.testing.assert_allclose(of.chances(), weights / weights.sum())
    assert drawn(of).most_common(1)[0][0] == most


@pytest.mark.parametrize(("weighting", "wins"), [("variance", 10), ("hard", 0)])
def test_a_member_that_hardly_played_weighs_as_much_as_the_most_interesting_can(weighting, wins) -> None:
    of = league(anchor_share=0.0, weighting=weighting, decay=1.0)
    of.add(1)
    of.add(2)
    play(of, "pool:1", wins, 20 - wins)
    play(of, "pool:2", 3, 3)
    assert of.chances().tolist() == pytest.approx([0.5, 0.5])


def test_members_that_are_always_beaten_are_still_drawn_when_all_are() -> None:
    of = league(decay=1.0)
    for version in (1, 2):
        of.add(version)
        play(of, f"pool:{version}", 20, 0)
    np.testing.assert_array_equal(of.chances(), [0.5, 0.5])


def test_the_oldest_leaves_a_full_pool_and_its_games_with_it() -> None:
    of = league(pool=2)
    assert of.add(1) == ("pool:1", None)
    of.add(2)
    play(of, "pool:1", 5, 0)
    assert of.add(3) == ("pool:3", "pool:1")
    assert of.pool == ["pool:2", "pool:3"]
    assert of.games("pool:1") == 0
    of.record("pool:1", 1)  # a game that was still running
    assert of.games("pool:1") == 0


def test_old_results_fade() -> None:
    of = league(decay=0.9)
    play(of, "anchor:weak", 0, 50)
    play(of, "anchor:weak", 20, 0)
    assert of.chance("anchor:weak") > 0.85
    assert of.games("anchor:weak") == pytest.approx(10, abs=0.1)


def test_a_tie_counts_half_and_no_game_has_no_result() -> None:
    of = league(decay=1.0)
    of.record("anchor:weak", 1)
    of.record("anchor:weak", 0)
    assert of.chance("anchor:weak") == 0.75 and of.row()["anchor:weak"] == [1.0, 1.0, 0.0]
    assert of.chance("anchor:strong") == 0.5 and of.games("anchor:strong") == 0
    with pytest.raises(ValueError, match="expected 1"):
        of.record("anchor:weak", 2)


def test_a_restored_league_continues_identically() -> None:
    of = league(pool=3, weighting="hard", anchors=("strong",))
    for version in range(4):
        of.add(version)
        play(of, f"pool:{version}", version, 12)
    again = League.from_state_dict(json.loads(json.dumps(of.state_dict())))
    assert again.settings == of.settings
    assert drawn(again, 300) == drawn(of, 300)
    assert again.row() == of.row()


@pytest.mark.parametrize("options", [{"anchors": ()}, {"anchor_share": 1.5}, {"decay": 0.0}, {"weighting": "easy"}])
def test_settings_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError):
        LeagueSettings(**options)


def test_a_version_joins_once() -> None:
    of = league()
    of.add(1)
    with pytest.raises(ValueError, match="already"):
        of.add(1)


def test_the_learners_row_is_all_that_its_successor_needs_to_choose_alike() -> None:
    of = league(pool=2, least_games=3)
    for version in (1, 2):
        of.add(version)
    play(of, "pool:1", 5, 1)
    play(of, "pool:2", 2, 4)
    play(of, "anchor:weak", 1, 1)
    successor = league(pool=2, least_games=3)
    successor.take_over(json.loads(json.dumps(of.row())))
    assert successor.pool == of.pool and successor.odds() == of.odds()
    assert sum(of.odds().values()) == pytest.approx(1)
    assert successor.chance("pool:1") == of.chance("pool:1")
