"""The watchdog names the processes that hang, and what others wait for, from the scoreboard alone."""

from __future__ import annotations

import uuid

import pytest
from tests.unit.runtime.toys import plan

from jurybox.protocol.segment import segment_name
from jurybox.training.runtime.plan import Timeouts
from jurybox.training.runtime.scoreboard import ControlWord, RunScoreboard, State, Subject, Word
from jurybox.training.runtime.watchdog import examine

SECOND = 10**9
NOW = 1000 * SECOND
PLAN = plan(actors=2, timeouts=Timeouts(actor=10, learner=20, start=30, stall=60, reset=100))
ACTOR, OTHER, LEARNER = 0, 1, 2


@pytest.fixture
def scoreboard():
    scoreboard = RunScoreboard.create(segment_name(uuid.uuid4().hex[:8], "run"), PLAN, {"rows": "x"}, {"policy": "y"})
    for words in scoreboard.words:
        words[Word.STATE], words[Word.HEARTBEAT] = State.RUNNING, NOW
    yield scoreboard
    scoreboard.close()


def let_wait(scoreboard, number, subject, seconds):
    scoreboard.words[number][Word.WAITS_FOR] = subject << 32
    scoreboard.words[number][Word.WAITS_SINCE] = NOW - seconds * SECOND


def test_a_healthy_run_is_left_alone(scoreboard):
    let_wait(scoreboard, LEARNER, Subject.STEPS, 59)
    let_wait(scoreboard, ACTOR, Subject.ORDERS, 10_000)
    assert examine(PLAN, scoreboard, NOW) is None


def test_a_role_without_a_sign_of_life_hangs(scoreboard):
    scoreboard.words[OTHER][Word.HEARTBEAT] = NOW - 11 * SECOND
    found = examine(PLAN, scoreboard, NOW)
    assert found.role == OTHER and "actor-1 has given no sign of life for 11 s; at most 10 s" in found.text


def test_a_learner_has_more_time_than_an_actor(scoreboard):
    scoreboard.words[LEARNER][Word.HEARTBEAT] = NOW - 11 * SECOND
    assert examine(PLAN, scoreboard, NOW) is None


def test_a_reset_has_a_time_out_of_its_own(scoreboard):
    scoreboard.words[OTHER][Word.HEARTBEAT] = NOW - 95 * SECOND
    scoreboard.words[OTHER][Word.RESETS_SINCE] = NOW - 95 * SECOND
    assert examine(PLAN, scoreboard, NOW) is None
    scoreboard.words[OTHER][Word.RESETS_SINCE] = NOW - 101 * SECOND
    found = examine(PLAN, scoreboard, NOW)
    assert found.role == OTHER
    assert "actor-1 has been resetting an environment for 101 s; at most 100 s" in found.text
    assert examine(PLAN, scoreboard, NOW, since=NOW - 50 * SECOND) is None, "all processes were stopped"


def test_nobody_is_blamed_for_a_wait_on_who_resets_an_environment(scoreboard):
    let_wait(scoreboard, LEARNER, Subject.STEPS, 90)
    assert examine(PLAN, scoreboard, NOW) is not None
    scoreboard.words[OTHER][Word.RESETS_SINCE] = NOW - 90 * SECOND
    assert examine(PLAN, scoreboard, NOW) is None


def test_a_start_that_takes_too_long_is_given_up(scoreboard):
    scoreboard.words[ACTOR][Word.STATE] = State.STARTING
    scoreboard.orders[ACTOR][ControlWord.STARTED_AT] = NOW - 31 * SECOND
    assert examine(PLAN, scoreboard, NOW).role == ACTOR


def test_the_process_that_produces_nothing_is_found_behind_those_that_wait(scoreboard):
    let_wait(scoreboard, LEARNER, Subject.STEPS, 61)
    found = examine(PLAN, scoreboard, NOW)
    assert found.role == ACTOR
    assert "learner has waited 61.0 s for environment steps, on actor-0, actor-1" in found.text
    assert "actor-0 does not wait" in found.text


def test_slow_processes_are_not_replaced(scoreboard):
    let_wait(scoreboard, LEARNER, Subject.READY, 61)
    scoreboard.words[ACTOR][Word.MOVED_AT] = NOW - 59 * SECOND
    assert examine(PLAN, scoreboard, NOW) is None
    scoreboard.words[ACTOR][Word.MOVED_AT] = NOW - 61 * SECOND
    assert examine(PLAN, scoreboard, NOW).role == ACTOR


def test_in_a_circle_the_one_that_has_waited_longest_is_restarted(scoreboard):
    let_wait(scoreboard, LEARNER, Subject.STEPS, 61)
    let_wait(scoreboard, ACTOR, Subject.WEIGHTS, 70)
    let_wait(scoreboard, OTHER, Subject.WEIGHTS, 65)
    found = examine(PLAN, scoreboard, NOW)
    assert found.role == ACTOR
    assert "actor-0 has waited 70.0 s for weights on policy, on learner" in found.text


def test_time_in_which_the_orchestrator_was_stopped_is_no_silence(scoreboard):
    for words in scoreboard.words:
        words[Word.HEARTBEAT] = NOW - 500 * SECOND
    let_wait(scoreboard, LEARNER, Subject.STEPS, 500)
    assert examine(PLAN, scoreboard, NOW, since=NOW - 9 * SECOND) is None
    scoreboard.words[OTHER][Word.HEARTBEAT] = scoreboard.words[LEARNER][Word.HEARTBEAT] = NOW
    found = examine(PLAN, scoreboard, NOW, since=NOW - 11 * SECOND)
    assert found.role == ACTOR and "no sign of life for 11 s" in found.text


def test_time_in_which_the_orchestrator_was_stopped_delays_starts_and_waits(scoreboard):
    scoreboard.words[OTHER][Word.STATE] = State.STARTING
    scoreboard.orders[OTHER][ControlWord.STARTED_AT] = NOW - 500 * SECOND
    assert examine(PLAN, scoreboard, NOW, since=NOW - 29 * SECOND) is None
    assert examine(PLAN, scoreboard, NOW, since=NOW - 31 * SECOND).role == OTHER
    scoreboard.words[OTHER][Word.STATE] = State.RUNNING
    let_wait(scoreboard, LEARNER, Subject.STEPS, 500)
    assert examine(PLAN, scoreboard, NOW, since=NOW - 59 * SECOND) is None
    assert examine(PLAN, scoreboard, NOW, since=NOW - 61 * SECOND).role == ACTOR


def test_processes_that_just_started_get_their_time(scoreboard):
    let_wait(scoreboard, LEARNER, Subject.STEPS, 500)
    scoreboard.orders[ACTOR][ControlWord.STARTED_AT] = NOW - 5 * SECOND
    assert examine(PLAN, scoreboard, NOW) is None


def test_a_start_that_takes_longer_than_a_stall_leaves_its_role_a_stalls_time_for_its_first_step(scoreboard):
    let_wait(scoreboard, ACTOR, Subject.WEIGHTS, 110)
    scoreboard.orders[LEARNER][ControlWord.STARTED_AT] = NOW - 110 * SECOND
    scoreboard.words[LEARNER][Word.READY_AT] = NOW - 1 * SECOND
    assert examine(PLAN, scoreboard, NOW) is None
    scoreboard.words[LEARNER][Word.READY_AT] = NOW - 61 * SECOND
    assert examine(PLAN, scoreboard, NOW).role == LEARNER
