"""Chunks of actions are executed without waiting, and each action only at its step."""

from __future__ import annotations

import itertools
import os
import queue
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.serving import wait_until

from jurybox.client import Refused, Timeout
from jurybox.client.chunks import (
    ANSWER_WITHIN,
    DELAY,
    PREFIX,
    PREFIX_LENGTH,
    REPORT,
    AsyncChunkPolicy,
    ChunkStats,
    TemporalEnsemble,
)


def chunk(step: int, tag: float = 0.0, horizon: int = 6) -> NDArray[np.float32]:
    """Actions that contain their step and their chunk."""
    return np.array([[step + k, tag] for k in range(horizon)], np.float32)


def acted(policy: AsyncChunkPolicy) -> NDArray[Any]:
    """The action of this step, which is there."""
    action = policy.act({})
    assert action is not None
    return action


class ScriptedPolicy:
    """A policy that answers when the test says so."""

    def __init__(self) -> None:
        self.requests: queue.Queue[tuple[dict[str, Any], float]] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()

    def __call__(self, request: dict[str, Any], timeout: float) -> Any:
        self.requests.put((request, timeout))
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answer(self, policy: AsyncChunkPolicy, value: Any) -> dict[str, Any]:
        """Answer the request that is on its way, and wait until the answer is there."""
        request, _ = self.requests.get(timeout=60)
        self.answers.put(value)
        wait_until(lambda: policy._done is not None, 60, "the answer")
        return request


@pytest.fixture
def scripted() -> ScriptedPolicy:
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
        with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
            policy.begin({"at": 0}, timeout=float("nan"))  # no clock reaches it
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


def test_an_action_of_an_ensemble_has_the_chunks_dtype_and_none_comes_before_its_chunk() -> None:
    ensemble = TemporalEnsemble()
    ensemble.add(5, np.array([[1], [2], [3]], np.float32))
    assert ensemble.action(3) is None
    action = ensemble.action(5)
    assert action is not None and action.dtype == np.float32 and action.tolist() == [1]


@pytest.mark.parametrize("m", [-0.1, float("nan")])
def test_an_ensemble_refuses_a_decay_that_would_give_new_chunks_more_weight(m: float) -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        TemporalEnsemble(m)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ensemble": 0.0, "real_time": (6, 2)}, "exclude each other"),
        ({"every": 0}, "at least one step"),
        ({"deadline": 0.0}, "a time above 0"),
        ({"deadline": float("nan")}, "a time above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AsyncChunkPolicy(lambda request, timeout: chunk(0), **options)


def test_the_delays_of_the_last_64_answers_are_told() -> None:
    stats = ChunkStats()
    assert (stats.delay, stats.jitter, stats.delay_steps) == (0, 0, 0)
    stats.delays.extend([(1.0, 9), (5.0, 2)])
    assert (stats.delay, stats.jitter, stats.delay_steps) == (3, 2, 9)
    stats.delays.extend([(1.0, 1)] * 62)
    assert stats.delay_steps == 9
    stats.delays.append((1.0, 1))
    assert stats.delay_steps == 2


def test_begin_asks_again_after_an_error_of_an_earlier_request(scripted: ScriptedPolicy) -> None:
    with AsyncChunkPolicy(scripted) as policy:
        policy.act({})
        scripted.answer(policy, RuntimeError("not loaded yet"))
        policy.act({})
        scripted.answers.put(chunk(1))
        policy.begin({}, timeout=60)
        assert acted(policy)[0] == 2 and policy.error is None
        scripted.answers.put(chunk(2))


def test_an_episode_begins_with_a_request_and_without_the_error_of_the_one_before(scripted: ScriptedPolicy) -> None:
    with AsyncChunkPolicy(scripted, every=5) as policy:
        for _ in range(2):
            policy.act({"at": "old"})
        scripted.answer(policy, RuntimeError("busy"))
        policy.act({"at": "old"})
        assert str(policy.error) == "busy"
        policy.reset()
        assert policy.error is None
        policy.act({"at": "new"})
        assert scripted.answer(policy, chunk(0)) == {"at": "new"}
        assert acted(policy)[0] == 1
        scripted.answers.put(chunk(1))


def test_a_request_that_was_not_sent_before_the_policy_closed_is_never_sent(scripted: ScriptedPolicy) -> None:
    policy = AsyncChunkPolicy(scripted)
    with policy._changed:  # the thread cannot take the request meanwhile
        policy.act({})
        policy.close(timeout=0)
    scripted.answers.put(chunk(0))
    policy._thread.join(30)
    assert not policy._thread.is_alive() and scripted.requests.empty()


def test_a_policy_closes_while_its_request_is_in_flight(scripted: ScriptedPolicy) -> None:
    policy = AsyncChunkPolicy(scripted)
    policy.act({})
    scripted.requests.get(timeout=60)
    policy.close(timeout=0.01)
    assert policy._thread.is_alive()
    scripted.answers.put(chunk(0))
    policy._thread.join(30)
    assert not policy._thread.is_alive()


def test_a_policy_may_be_closed_by_what_it_asks() -> None:
    def closing(request: dict[str, Any], timeout: float) -> NDArray[np.float32]:
        policy.close()
        return chunk(0)

    policy = AsyncChunkPolicy(closing)
    policy.act({})
    policy._thread.join(30)
    assert not policy._thread.is_alive() and policy._done is not None and policy._done.error is None


def test_the_callers_observation_stays_as_it_is(scripted: ScriptedPolicy) -> None:
    observation = {"at": 0}
    with AsyncChunkPolicy(scripted, reset_key="reset", send_deadline=True) as policy:
        policy.act(observation)
        assert scripted.answer(policy, chunk(0)).keys() == {"at", "reset", ANSWER_WITHIN}
    assert observation == {"at": 0}


def test_the_delay_told_in_real_time_is_no_longer_than_the_plan(scripted: ScriptedPolicy) -> None:
    with AsyncChunkPolicy(scripted, real_time=(6, 2)) as policy:
        for step in range(3):
            policy.act({"at": step})
        scripted.answer(policy, chunk(0))
        assert acted(policy)[0] == 3 and policy.stats.delay_steps == 3
        scripted.answer(policy, chunk(3))
        policy.reset()
        policy.act({})
        request = scripted.answer(policy, chunk(0))
        assert (request[PREFIX_LENGTH], request[DELAY]) == (0, 0)


def test_an_answer_that_comes_at_its_deadline_is_used(scripted: ScriptedPolicy) -> None:
    now = [0.0]
    with AsyncChunkPolicy(scripted, deadline=0.5, clock=lambda: now[0]) as policy:
        policy.act({})
        now[0] = 0.5
        scripted.answer(policy, chunk(0))
        assert acted(policy)[0] == 1 and policy.stats.late == 0
        scripted.answers.put(chunk(1))


def test_an_answer_may_be_overwritten_by_the_next_one(scripted: ScriptedPolicy) -> None:
    memory = chunk(0)
    with AsyncChunkPolicy(scripted) as policy:
        policy.act({})
        scripted.answer(policy, memory)
        memory[:] = -1
        assert acted(policy)[0] == 1
        scripted.answers.put(chunk(1))


def test_actions_may_be_switches(scripted: ScriptedPolicy) -> None:
    with AsyncChunkPolicy(scripted) as policy:
        policy.act({})
        scripted.answer(policy, np.array([False, True]))
        action = policy.act({})
        assert action is not None and action.dtype == bool and bool(action)
        scripted.answers.put(np.array([True]))


def test_a_chunk_of_another_shape_than_real_time_says_is_a_failure(scripted: ScriptedPolicy) -> None:
    with AsyncChunkPolicy(scripted, real_time=(6, 2)) as policy:
        policy.act({})
        scripted.answer(policy, chunk(0, horizon=7))
        assert policy.act({}) is None and "real_time says" in str(policy.error)
        scripted.answers.put(chunk(1))
