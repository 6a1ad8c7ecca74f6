"""Which deaths of a role count as failures in a row: those of a life in which it did not work well for long."""

from __future__ import annotations

import time
import uuid

import pytest
from tests.unit.runtime.toys import plan

from jurybox.protocol.segment import segment_name
from jurybox.training.runtime.launching import RoleChild
from jurybox.training.runtime.plan import Timeouts
from jurybox.training.runtime.scoreboard import ControlWord, RunScoreboard, Subject, Word, _roles

SECOND = 10**9
PLAN = plan(timeouts=Timeouts(settled=30.0))
STARTED, READY, DIED = 1000, 1010, 1200  # seconds


class Dead:
    pid, lost = 1, False

    def kill(self):
        pass

    def end(self, timeout):
        return -9


class Launcher:
    def start(self, number, life, state, log, evaluated):
        return Dead()


@pytest.mark.parametrize(
    ("moved", "heartbeat", "subject", "condemned", "failures"),
    [
        pytest.param(1190, 1190, Subject.NOTHING, True, 1, id="hung after it had worked for long"),
        pytest.param(1020, 1020, Subject.NOTHING, True, 4, id="hung after a few steps"),
        pytest.param(900, 1010, Subject.NOTHING, True, 4, id="hung at once, its steps are those of the life before"),
        pytest.param(1020, 1200, Subject.NOTHING, True, 4, id="gave signs of life and brought nothing"),
        pytest.param(1020, 1200, Subject.READY, True, 4, id="was restarted because of a wait"),
        pytest.param(1020, 1200, Subject.READY, False, 1, id="was killed from outside in a long wait"),
        pytest.param(0, 1200, Subject.WORK, False, 1, id="was killed from outside before its first evaluation"),
        pytest.param(1020, 1200, Subject.NOTHING, False, 4, id="failed in a step that took long"),
        pytest.param(1190, 1190, Subject.NOTHING, False, 1, id="failed after it had worked for long"),
    ],
)
def test_the_count_begins_anew_after_a_life_that_went_well(tmp_path, moved, heartbeat, subject, condemned, failures):
    scoreboard = RunScoreboard.create(segment_name(uuid.uuid4().hex[:8], "run"), PLAN, {"rows": "x"}, {"policy": "y"})
    child = RoleChild(PLAN, 0, scoreboard, tmp_path / "log", Launcher(), tmp_path)
    child.start(STARTED, None)
    words, orders = scoreboard.words[0], scoreboard.orders[0]
    orders[ControlWord.FAILURES] = 3
    words[Word.READY_AT], words[Word.MOVED_AT] = READY * SECOND, moved * SECOND
    words[Word.HEARTBEAT], words[Word.WAITS_FOR] = heartbeat * SECOND, subject << 32
    if condemned:
        child.condemn()
    child.reap(DIED)
    assert child.failures == failures
    del words, orders, child
    scoreboard.close()


def test_a_death_at_the_start_counts_whatever_the_life_before_did(tmp_path):
    scoreboard = RunScoreboard.create(segment_name(uuid.uuid4().hex[:8], "run"), PLAN, {"rows": "x"}, {"policy": "y"})
    child = RoleChild(PLAN, 0, scoreboard, tmp_path / "log", Launcher(), tmp_path)
    words = scoreboard.words[0]
    words[Word.READY_AT], words[Word.MOVED_AT] = 500 * SECOND, 900 * SECOND
    child.start(STARTED, None)
    child.reap(DIED)
    assert child.failures == 1
    del words, child
    scoreboard.close()


def test_the_shared_state_of_a_role_that_starts_tells_no_heartbeat():
    scoreboard = RunScoreboard.create(segment_name(uuid.uuid4().hex[:8], "run"), PLAN, {"rows": "x"}, {"policy": "y"})
    try:
        assert all("no heartbeat yet" in line for line in _roles(scoreboard))
        scoreboard.words[0][Word.HEARTBEAT] = time.monotonic_ns()
        told = _roles(scoreboard)
        assert "heartbeat 0.0 s ago" in told[0] and "no heartbeat yet" in told[1]
    finally:
        scoreboard.close()
