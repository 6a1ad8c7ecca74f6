"""Chunks of actions are executed without waiting, and each action only at its step."""

from __future__ import annotations

import itertools
import os
import queue
import time

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.client import Refused, Timeout
from jurybox.client.chunks import (
    ANSWER_WITHIN,
    DELAY,
    PREFIX,
    PREFIX_LENGTH,
    REPORT,
    AsyncChunkPolicy,
    TemporalEnsemble,
)


def chunk(step, tag=0.0, horizon=6):
    """Actions that contain their step and their chunk."""
    return np.float32([[step + k, tag] for k in range(horizon)])


class ScriptedPolicy:
    """A policy that answers when the test says so."""

    def __init__(self):
        self.requests, self.answers = queue.Queue(), queue.Queue()

    def __call__(self, request, timeout):
        self.requests.put((request, timeout))
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self, policy, value):
        """Answer the request that is on its way, and wait until the answer is there."""
        request, _ = self.requests.get(timeout=60)
        self.answers.put(value)
        wait_until(lambda: policy._done is not None, 60, "the answer")
        return request


@pytest.fixture
def scripted():
    return ScriptedPolicy()


def test_an_ensemble_weighs_the_oldest_most():
    ensemble = TemporalEnsemble(m=0.5)
    chunks = [np.random.default_rng(step).normal(size=(4, 2)) for step in range(8)]
    for step in range(8):
        ensemble.add(step, chunks[step])
        predictions = [chunks[first][step - first] for first in range(max(0, step - 3), step + 1)]
        weights = np.exp(-0.5 * np.arange(len(predictions)))
        np.testing.assert_allclose(ensemble.action(step), (weights / weights.sum()) @ np.stack(predictions))
    assert ensemble.action(10) is not None and ensemble.action(11) is None
    ensemble.reset()
    assert ensemble.action(8) is None


def test_actions_are_of_their_step_however_late_the_chunk(scripted):
    with AsyncChunkPolicy(scripted) as policy:
        assert policy.act({"at": 0}) is None and policy.act({"at": 1}) is None
        assert scripted.answer(policy, chunk(0)) == {"at": 0}
        assert [policy.act({"at": step})[0] for step in (2, 3)] == [2, 3]
        assert scripted.answer(policy, chunk(2, tag=1.0)) == {"at": 2}  # requested as soon as the first arrived
        assert [tuple(policy.act({"at": step})) for step in range(4, 8)] == [(step, 1.0) for step in range(4, 8)]
        assert policy.act({"at": 8}) is None  # the planned actions are used up
        assert (policy.stats.answered, policy.stats.starved, policy.stats.delay_steps) == (2, 3, 2)


def test_act_never_waits_for_the_server(scripted):
    with AsyncChunkPolicy(scripted) as policy:
        for step in range(1000):
            policy.act({"at": step})
        assert policy.stats.asked == 1 and scripted.answers.empty()  # one request was in flight all the time
        scripted.answer(policy, chunk(0))


def test_answers_that_come_too_late_are_dropped(scripted):
    now = [0.0]
    with AsyncChunkPolicy(scripted, deadline=0.5, clock=lambda: now[0]) as policy:
        for step in range(6):
            policy.act({"at": step})
        scripted.answer(policy, chunk(0))  # of steps that are over
        assert policy.act({}) is None and (policy.stats.stale, policy.stats.answered) == (1, 0)
        wait_until(lambda: not scripted.requests.empty())
        now[0] = 1.0
        scripted.answer(policy, chunk(6))  # after the deadline, though its steps are to come
        assert policy.act({}) is None and (policy.stats.late, policy.stats.answered) == (1, 0)
        scripted.answer(policy, chunk(7))
        assert policy.act({})[0] == 8
        assert scripted.requests.get(timeout=60)[1] == 0.5  # the deadline is passed to the policy
        scripted.answers.put(chunk(8))


def test_an_answer_of_the_episode_before_is_never_executed(scripted):
    with AsyncChunkPolicy(scripted, reset_key="reset") as policy:
        policy.act({"at": "old"})
        policy.reset()
        assert policy.act({"at": "new"}) is None
        assert scripted.answer(policy, chunk(0, tag=9.0)) == {"at": "old", "reset": True}
        assert policy.act({"at": "new"}) is None and policy.stats.stale == 1
        assert scripted.answer(policy, RuntimeError("busy")) == {"at": "new", "reset": True}
        assert policy.act({}) is None and str(policy.error) == "busy" and policy.stats.failed == 1
        assert scripted.answer(policy, chunk(2, tag=1.0))["reset"] is True  # still: none has been answered
        assert tuple(policy.act({})) == (3, 1.0) and policy.error is None
        assert "reset" not in scripted.requests.get(timeout=60)[0]
        scripted.answers.put(chunk(3))


def test_real_time_chunking_sends_what_is_planned_and_the_delay_it_measured(scripted):
    with AsyncChunkPolicy(scripted, real_time=(6, 2)) as policy:
        policy.act({"at": 0})
        first = scripted.answer(policy, chunk(0))
        assert first[PREFIX].shape == (6, 2) and not first[PREFIX].any()
        assert (first[PREFIX_LENGTH], first[DELAY]) == (0, 0)
        assert policy.act({"at": 1})[0] == 1 and policy.act({"at": 2})[0] == 2
        second = scripted.answer(policy, chunk(1, tag=1.0))  # requested at step 1, when steps 1 to 5 were planned
        assert second[PREFIX][:, 0].tolist() == [1, 2, 3, 4, 5, 0]
        assert (second[PREFIX_LENGTH], second[DELAY]) == (5, 1)
        assert second[PREFIX].dtype == np.float32 and second[DELAY].dtype == np.int32
        assert tuple(policy.act({"at": 3})) == (3, 1.0)
        third, _ = scripted.requests.get(timeout=60)
        assert third[DELAY] == 2 and third[PREFIX_LENGTH] == 4  # the longest of late
        scripted.answers.put(chunk(3))


def test_with_report_a_request_has_the_outcome_of_those_before_it(scripted):
    now = [0.0]
    with AsyncChunkPolicy(scripted, report=True, deadline=0.5, clock=lambda: now[0]) as policy:
        policy.act({})
        nothing = {"late": 0, "stale": 0, "failed": 0, "starved": 0}
        now[0] = 0.25
        assert scripted.answer(policy, chunk(0))[REPORT] == nothing
        assert policy.act({}) is not None
        now[0] = 1.0  # after its deadline
        report = nothing | {"starved": 1, "delay": 0.25}
        assert scripted.answer(policy, chunk(1))[REPORT] == report
        policy.act({})
        report = nothing | {"late": 1, "delay": 0.75}
        assert scripted.answer(policy, RuntimeError("a broken connection"))[REPORT] == report
        policy.act({})
        assert scripted.answer(policy, chunk(3))[REPORT] == report | {"failed": 1}  # unanswered reports are sent again
        policy.act({})
        assert scripted.requests.get(timeout=60)[0][REPORT] == nothing | {"delay": 0.0}
        scripted.answers.put(chunk(4))


def test_the_deadline_is_sent_with_the_request_if_configured(scripted):
    with AsyncChunkPolicy(scripted, send_deadline=True, deadline=0.25) as policy:
        policy.act({"at": 0})
        assert scripted.answer(policy, chunk(0)) == {"at": 0, ANSWER_WITHIN: 0.25}


def test_chunks_are_averaged_with_an_ensemble(scripted):
    with AsyncChunkPolicy(scripted, ensemble=0.0) as policy:
        policy.act({})
        scripted.answer(policy, chunk(0, tag=1.0))
        assert policy.act({})[1] == 1.0
        scripted.answer(policy, chunk(1, tag=3.0))
        assert policy.act({})[1] == 2.0
        policy.reset()
        assert policy.act({}) is None
        scripted.answers.put(chunk(0))


@pytest.mark.parametrize(
    "wrong", [np.float32(1), np.zeros((0, 2)), np.full((6, 2), np.nan), np.zeros((6, 3)), np.array(["x"]), "x"]
)
def test_an_invalid_chunk_is_a_failure_and_not_an_action(scripted, wrong):
    with AsyncChunkPolicy(scripted) as policy:
        policy.act({})
        scripted.answer(policy, chunk(0))
        assert policy.act({}) is not None
        scripted.answer(policy, wrong)
        assert policy.act({})[0] == 2 and policy.stats.failed == 1 and policy.error is not None
        scripted.answers.put(chunk(2))


def test_begin_waits_for_the_first_chunk_or_raises_the_reason(scripted):
    with AsyncChunkPolicy(scripted) as policy:
        with pytest.raises(Timeout):
            policy.begin({"at": 0}, timeout=0.05)
        scripted.answers.put(chunk(0))
        policy.begin({"at": 0}, timeout=60)
        assert [policy.act({})[0] for _ in range(3)] == [0, 1, 2]
        policy.reset()
        wait_until(lambda: policy._busy)
        scripted.answers.put(chunk(1))  # the one in flight
        scripted.answers.put(RuntimeError("no such model"))
        with pytest.raises(RuntimeError, match="no such model"):
            policy.begin({}, timeout=60)


def test_every_bounds_the_rate_of_requests():
    with AsyncChunkPolicy(lambda request, timeout: chunk(request["at"]), every=3) as policy:
        policy.begin({"at": 0}, timeout=60)
        for step in range(12):
            policy.act({"at": step})
            wait_until(lambda: policy._waiting is None and not policy._busy)
        assert policy.stats.asked == 4


def test_a_closed_policy_raises_an_error_and_its_thread_ends(scripted):
    policy = AsyncChunkPolicy(scripted)
    policy.close()
    assert not policy._thread.is_alive()
    with pytest.raises(Refused, match="closed"):
        policy.act({})


def test_a_forked_child_gets_an_error_because_the_thread_does_not_exist(scripted):
    with AsyncChunkPolicy(scripted) as policy:
        child = os.fork()
        if not child:
            try:
                policy.act({})
            except Refused:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_control_loop_keeps_its_pace_while_answers_take_longer_than_a_step():
    def slow(request, timeout):
        time.sleep(0.05)
        return chunk(request["at"], horizon=50)

    with AsyncChunkPolicy(slow) as policy:
        policy.begin({"at": 0}, timeout=60)
        wrong = []
        for step in itertools.count():
            if step >= 60 and policy.stats.answered >= 2:
                break
            action = policy.act({"at": step})
            if action is not None and action[0] != step:
                wrong.append((step, action))
            time.sleep(0.005)
        assert not wrong and policy.stats.delay > 0.04 and policy.stats.jitter >= 0
