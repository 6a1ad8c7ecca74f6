"""When a run is over: only once its learners have learned from every step, also from one that ends just then."""

from __future__ import annotations

import pytest
from tests.unit.runtime.toys import plan

from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules, make_turn


@pytest.fixture
def scene():
    """The learner's turn of a run of 100 steps, as in processes, and a function that makes steps of its actor."""
    planned = plan(steps=100, evaluate=50)
    with SharedResources.create(planned) as shared:
        rules = Rules(planned, shared.scoreboard)
        stream = shared.replay("rows").stream()

        def act(count):
            for _ in range(count):
                stream.add(value=1.0, version=1)
            shared.scoreboard.words[0][Word.ENV_STEPS] += count

        turn = make_turn(RoleContext(planned, 1, shared, lambda message: None, life=1), rules, None)
        yield turn, rules, act
        turn.close()


def test_an_evaluation_that_was_due_before_the_last_step_is_not_the_last_one(scene):
    learner, rules, act = scene
    context = learner.context
    evaluator = make_turn(RoleContext(context.plan, 2, context.shared, lambda message: None), rules, None)
    act(95)
    assert evaluator.may()
    act(5)
    evaluator.take()
    learn(learner)
    assert evaluator.may(), "the learner's last weights are still to be evaluated"
    evaluator.take()
    assert not evaluator.may()


def test_successors_draw_other_numbers_also_in_a_resumed_run(scene):
    turn, _, act = scene

    def marks(life):
        context = RoleContext(turn.context.plan, 0, turn.context.shared, lambda message: None, life=life)
        return context.seed, context.incarnation

    first, second = marks(1), marks(2)
    act(10)  # then the run is resumed, which counts lives from 1 again: a role that goes on restores its generator
    assert marks(1) == first
    for numbers in zip(first, second, marks(2), marks(3), strict=True):
        assert len(set(numbers)) == 4
    assert first[1] == 0 < second[1] < 1 << 23


def learn(turn):
    while turn.may():
        turn.take()


def test_steps_that_come_while_a_learner_looks_are_learned_from_before_the_run_is_over(scene, monkeypatch):
    turn, rules, act = scene
    act(98)
    learn(turn)
    looks = rules.may_learn

    def and_then_the_last_steps_come(number):
        answer = looks(number)
        monkeypatch.setattr(rules, "may_learn", looks)
        act(2)
        return answer

    monkeypatch.setattr(rules, "may_learn", and_then_the_last_steps_come)
    assert not turn.may()
    assert not rules.over(), "the last two steps are not learned from"
    learn(turn)
    assert rules.over() and turn.context.own_steps == 40


def test_a_step_that_ends_after_the_time_was_up_is_learned_from_before_the_run_is_over(scene):
    turn, rules, act = scene
    act(50)
    rules.close()
    learn(turn)
    assert rules.over()
    act(2)  # it was under way
    assert not rules.over()
    learn(turn)
    assert rules.over() and turn.context.own_steps == 16
