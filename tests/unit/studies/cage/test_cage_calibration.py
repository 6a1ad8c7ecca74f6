"""Whole episodes return what the original's do: leader board of CAGE Challenge 2, 1000 episodes each."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.cage.simulator import Sleeping, UniformlyRandom, episode_returns

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.network import Networks
from jurybox.studies.workflow.cage.tables import Blue, action

EPISODES = 2000
PUBLISHED = {
    ("B_line", "sleep"): (-219, -480, -1134),
    ("Meander", "sleep"): (-39, -268, -972),
    ("B_line", "random"): (-154, -347, -727),
    ("Meander", "random"): (-33, -171, -566),
}


@pytest.mark.parametrize(("red", "defender"), PUBLISHED)
def test_mean_returns_are_the_published_ones(red: str, defender: str) -> None:
    # The published figures are the original's, which has the quirk; a random defender meets it in half its episodes.
    who = Sleeping() if defender == "sleep" else UniformlyRandom(3)
    returns = episode_returns(who, red, episodes=EPISODES, episode_length=100, seed=11, quirk=True)
    allowed = 0.05 if defender == "sleep" else 0.10
    assert returns.mean() == pytest.approx(PUBLISHED[red, defender][2], rel=allowed)


@pytest.mark.parametrize(("red", "step"), [("B_line", 15.4), ("Meander", 36.0)])
def test_the_first_impact_is_at_the_same_time_as_in_the_original(red: str, step: float) -> None:
    networks = Networks(EPISODES, red, seed=5)
    first = np.zeros(EPISODES)
    for now in range(1, 101):
        networks.step(np.zeros(EPISODES, int))
        first[(first == 0) & (networks.down > 0)] = now
    assert first.min() >= 15 and first.mean() == pytest.approx(step, rel=0.05)


@pytest.mark.parametrize(("red", "published"), [("B_line", -281), ("Meander", -334)])
def test_one_early_restore_of_the_server_scores_as_in_the_original_with_the_quirk(red: str, published: float) -> None:
    networks = Networks(EPISODES, red, quirk=True, seed=5)
    total = networks.step(np.full(EPISODES, action(Blue.RESTORE, t.OP_SERVER0)))
    for _ in range(99):
        total += networks.step(np.zeros(EPISODES, int))
    # Measured on few episodes of the original.
    assert total.mean() == pytest.approx(published, rel=0.1)
