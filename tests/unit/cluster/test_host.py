"""What a machine of a run tells the others."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.runtime.toys import plan

from jurybox.cluster.host import Host, RoleCounters, TimelineCopy
from jurybox.training.runtime.progress import Timeline
from jurybox.training.runtime.scoreboard import Subject, Word
from jurybox.training.runtime.shared_resources import SharedResources

PLAN = plan(actors=2)  # actor-0, actor-1, learner


@pytest.fixture
def run():
    with SharedResources.create(PLAN) as shared:
        yield shared.scoreboard


@pytest.fixture
def away():
    host = Host(PLAN)
    yield host
    host.close()


def written(scoreboard, number, at, *rows) -> None:
    scoreboard.timeline[number][at : at + len(rows)] = list(rows)
    scoreboard.words[number][Word.INTERVALS] = at + len(rows)


def test_the_timeline_of_a_role_on_another_machine_is_moved_to_the_clock_of_the_run(run, away) -> None:
    now = time.monotonic_ns()
    written(run, 2, 0, (now - 5 * 10**9, now - 4 * 10**9, Subject.NOTHING))
    # The other machine was started a minute ago.
    written(away.shared.scoreboard, 0, 0, (58 * 10**9, 59 * 10**9, Subject.LEARNERS))
    TimelineCopy(60 * 10**9, away.timeline(0).rows).write(run, 0)
    since = (time.monotonic_ns() - now) / 1e9
    there, _, here = Timeline.of(run).lanes
    assert here.intervals == [(0.0, 1.0, "")]
    ((start, end, what),) = there.intervals
    assert 3.0 <= start <= 3.0 + since + 1e-4 and end == pytest.approx(start + 1.0) and what == "learners"


def test_a_role_that_comes_back_to_a_machine_keeps_the_timeline_of_its_time_elsewhere(run, away) -> None:
    there = away.shared.scoreboard
    written(there, 0, 0, (1, 2, Subject.NOTHING), (2, 3, Subject.STEPS))
    written(run, 0, 0, (10, 20, Subject.NOTHING), (20, 30, Subject.STEPS), (30, 40, Subject.NOTHING))
    away.context(RoleCounters.of(run, [0], orders=True))
    assert there.words[0][Word.INTERVALS] == 3, "it goes on after what the run has"
    written(there, 0, 3, (100, 200, Subject.NOTHING))
    away.timeline(0).write(run, 0)
    kept = run.intervals(0)
    assert kept["start"][:3].tolist() == [10, 20, 30] and len(kept) == 4


def test_intervals_that_were_lost_with_a_machine_are_left_out(run) -> None:
    run.words[0][Word.INTERVALS] = 5
    written(run, 1, 0, (7 * 10**9, 8 * 10**9, Subject.NOTHING))
    lost, lives, _ = Timeline.of(run).lanes
    assert not lost.intervals and lives.intervals == [(0.0, 1.0, "")]
    assert isinstance(run.intervals(0), np.ndarray)


def test_the_sums_of_priorities_that_a_role_killed_on_another_machine_left_wrong_are_corrected_when_they_are_saved():
    host = Host(replace(PLAN, replays=(replace(PLAN.replays[0], prioritized=True),)))
    try:
        host.make_home(["rows"])
        home = host._home("rows")
        home.add(value=1.0, version=1)
        part = home.parts[0]
        part.leaves[0] += 10**6  # a priority whose sums were not set any more
        host.replay_file("rows")
        assert part.ring.total_priority == int(part.leaves.sum())
    finally:
        host.close()
