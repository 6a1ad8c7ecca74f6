"""The search's phases, its gate, what it inherits, and that a resumed run does what it would have done."""

from __future__ import annotations

import csv
import itertools
import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.studies.workflow.test_rollouts import Cut

from jurybox.studies.workflow import environments
from jurybox.studies.workflow import train as workflow_run
from jurybox.studies.workflow import trainer as workflow_trainer
from jurybox.studies.workflow.cage.tables import UNIT_TYPES
from jurybox.studies.workflow.report import conclusion
from jurybox.studies.workflow.searched import Evaluated, OrderEvaluation
from jurybox.studies.workflow.settings import ORDERS, WorkflowTraining
from jurybox.studies.workflow.trainer import DONE, FINAL, MIXED, REFERENCE, SEARCH, WorkflowTrainer
from jurybox.training.algorithms.base import Update
from jurybox.training.algorithms.ppo import PPOSettings
from jurybox.training.checkpoints import CheckpointError, Checkpoints
from jurybox.training.interrupts import Signals
from jurybox.training.run_folder import RunLogError

SETTINGS = WorkflowTraining(
    envs=8,
    episode_length=12,
    total_episodes=8 * 20,
    max_train_episodes_per_env=3,
    evaluation_episodes=1,  # of eight networks each plays one, and ten times as many at the end
    mixed_share=0.2,
    final_share=0.2,
    min_judged=1,
    ppo=PPOSettings(batch_size=96, n_epochs=1, hidden=(16,)),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Context:
    """What a role reports to."""

    def __init__(self) -> None:
        self.returns: list[float] = []
        self.evaluations: list[tuple[dict[str, float], tuple]] = []

    def goes_on(self, env_steps: int = 0) -> bool:
        return True

    def episode(self, *, total: float, length: int) -> None:
        self.returns.append(total)

    def metrics(self, **numbers: float) -> None:
        pass

    def evaluated(self, env_steps, numbers, own) -> None:
        self.evaluations.append((numbers, own))


def trainer(**changed) -> WorkflowTrainer:
    settings = SETTINGS.changed(**changed)
    return WorkflowTrainer(Context(), settings, environments.make(settings, 0), environments.make(settings, 1))


def test_it_trains_without_a_workflow_then_all_for_a_falling_reward_then_searches_then_trains_the_best(
    monkeypatch,
) -> None:
    it = trainer(alignment_reward="lin_2_1")
    paid = rewards_of(it, monkeypatch)
    assert list(paid) == [REFERENCE, MIXED, SEARCH, FINAL] and it.phase == DONE
    assert [len(rewards) for rewards in paid.values()] == [4, 4, 8, 4]
    assert paid[REFERENCE] == [2.0] * 4
    assert paid[MIXED] == pytest.approx([2.0, 1.75, 1.5, 1.25])
    assert set(paid[SEARCH] + paid[FINAL]) == {1.0}
    assert it.episodes == 160 and it.env_steps == 160 * 12
    assert it.reference is not None and it.final is not None
    best = max(it.search.trace, key=lambda trial: trial.score)
    assert it.best == best.order
    assert [each.first for each in it.prices] == [None, 0, 1, 2, 3, 4]


def test_all_orders_are_trained_at_once_and_half_of_the_networks_continue_so() -> None:
    it = trainer(envs=200, total_episodes=200 * 20)
    it.phase = MIXED
    it._begin()
    orders, own = it._orders()
    assert own.all() and len(np.unique(orders, axis=0)) > 80
    assert 0.05 < (orders[:, 0] < 0).mean() < 0.25, "some are told no order"
    it.phase = SEARCH
    it._begin()
    orders, own = it._orders()
    assert own.sum() == 100 and (orders[own] == it.order).all() and len(np.unique(orders[~own], axis=0)) > 40


def test_a_final_policy_is_kept_by_the_returns_of_its_own_workflow(monkeypatch) -> None:
    it = trainer(envs=20, total_episodes=2000)
    it.phase, it.best = FINAL, ORDERS[0]
    _, own = it._orders()
    own_from_start = own & (it._head_starts() == 0)
    assert 0 < own_from_start.sum() < (it._head_starts() == 0).sum(), "or this proves nothing"
    kept = []
    monkeypatch.setattr(it, "_keep", lambda judged, shown: kept.append((len(judged.returns), len(shown.returns))))
    it.advance()
    assert kept == [(own.sum(), own_from_start.sum())]


def test_an_update_may_follow_a_part_of_an_episode_and_values_what_follows_it() -> None:
    found = trainer(update_every_steps=5)
    parts = []
    found.learner.update = lambda part, progress: parts.append(part) or Update({})
    found.advance()
    assert [len(part.reward) for part in parts] == [5, 5, 2] and found.updates == 3
    for part, following in pairwise(parts):  # there was no update in between, so the values are those of the next step
        np.testing.assert_allclose(part.last_value, following.value[0], rtol=1e-5, atol=1e-6)
        assert not part.ended[-1].any()
    assert parts[-1].ended[-1].all() and found.env_steps == 8 * 12


def test_an_update_after_all_steps_of_an_episode_is_what_happens_by_default() -> None:
    default, told = trainer(), trainer(update_every_steps=12)
    assert [default.advance() for _ in range(3)] == [told.advance() for _ in range(3)]


@pytest.mark.parametrize(
    ("judged", "obeyed", "verdict"),
    [(100, 90, "passed"), (100, 89, "failed"), (99, 99, "not judged"), (0, 0, "not judged")],
)
def test_too_few_judged_fixes_are_never_passed(judged: int, obeyed: int, verdict: str) -> None:
    assert trainer(gate=0.9, min_judged=100).verdict(judged, obeyed) == verdict


PADDED = Evaluated(-20.0, 0.1, 1.0, 10.0, 1000, 960, 200, 80, -40.0, 0.1, 200)  # 96 % of all fixes, 40 % of the judged


@pytest.mark.parametrize(
    ("gate_on", "verdict", "missing"), [("obedience", "failed", 0.55), ("compliance", "passed", 0)]
)
def test_the_gate_and_the_score_are_about_the_fixes_that_are_asked_for(monkeypatch, gate_on, verdict, missing) -> None:
    it = trainer(gate=0.95, gate_on=gate_on, min_judged=100, mixed_share=0.0, reference_share=0.0)
    monkeypatch.setattr(it, "evaluate", lambda *arguments: PADDED)
    it._begin()
    it._finish()
    assert it.tried[0].verdict == verdict
    assert it.tried[0].score == pytest.approx(-20.0 - 100.0 * missing)


def test_the_compliance_gate_counts_episodes_from_their_start(monkeypatch) -> None:
    gated = []
    for gate_on in ("obedience", "compliance"):
        it = trainer(envs=20, total_episodes=2000, gate_on=gate_on, mixed_share=0.0, reference_share=0.0)
        monkeypatch.setattr(it, "_update_phase", lambda played: gated.append(len(played.returns)))
        from_start = int((it._head_starts() == 0).sum())
        it.advance()
    assert gated == [20, from_start] and 0 < from_start < 20


def rewards_of(it: WorkflowTrainer, monkeypatch) -> dict[str, list[float]]:
    """Return what a fix that complies gained in the updates of each phase."""
    found: dict[str, list[float]] = {}
    play = workflow_trainer.play

    def watched(*arguments, **options):
        found.setdefault(it.phase, []).append(options["reward"])
        return play(*arguments, **options)

    monkeypatch.setattr(workflow_trainer, "play", watched)
    while not it.done:
        it.advance()
    return found


def test_a_workflow_that_is_not_learned_is_given_up_and_without_mixed_orders_each_is_paid_alike(monkeypatch) -> None:
    it = trainer(alignment_reward="lin_3", min_judged=10**6, mixed_share=0.0)
    found = rewards_of(it, monkeypatch)
    assert [each.episodes for each in it.tried] == [24] * 4
    assert len({each.order for each in it.tried}) == 4
    assert found[SEARCH][:9] == pytest.approx([3.0, 2.0, 1.0] * 3)
    assert set(found[FINAL]) == {0.0}


def test_a_workflow_that_passes_makes_way_and_at_the_end_the_last_weights_are_published_and_the_evaluated_are_the_best(
    monkeypatch,
) -> None:
    it = trainer()
    monkeypatch.setattr(it, "verdict", lambda judged, obeyed: "passed")
    while not it.done:
        it.advance()
        if it.phase == FINAL and it._kept is None:
            it._kept = (1000.0, {name: torch.zeros_like(each) for name, each in it.learner.acting.state_dict().items()})
    assert all(each.verdict == "passed" and each.episodes == 8 for each in it.tried[:-1])
    ((numbers, (best, of_best)),) = it.context.evaluations
    published, of_published = it.publication()
    assert numbers["return"] == it.final.returns
    assert not any(each.any() for each in best.values()), "what was the best of the last phase"
    assert any(each.any() for each in published.values())
    order = " > ".join(UNIT_TYPES[kind] for kind in it.best)
    assert of_best == of_published == {"environment_arguments": {"order": order}}


def test_a_policy_without_fixes_is_not_judged_and_scores_as_disobedient() -> None:
    it = trainer(min_judged=10**6, mixed_share=0.0)
    while not it.tried:
        it.advance()
    first = it.tried[0]
    assert first.verdict == "not judged"
    assert first.score == pytest.approx(first.evaluated.returns - 100.0 * it.settings.gate)


@pytest.mark.parametrize("inherit", [True, False])
def test_a_new_workflow_begins_with_the_last_policy_only_if_it_inherits(inherit: bool) -> None:
    it = trainer(inherit=inherit, min_judged=10**6, mixed_share=0.0)
    begun, begin = [], it._begin

    def watched():
        before, weights = it.learner, flat(it.learner)
        begin()
        begun.append((it.learner is before, torch.equal(flat(it.learner), weights), it.learner))

    it._begin = watched
    while len(it.tried) < 4:
        it.advance()
    assert len(begun) == 4
    # The same learner continues, or each workflow has its own, with new initial weights.
    assert [(same, equal) for same, equal, _ in begun] == [(inherit, inherit)] * 4
    assert len({id(learner) for *_, learner in begun}) == (1 if inherit else 4)
    assert all(learner.gradient_steps > 0 for *_, learner in begun), "each was trained"


def test_separate_learners_begin_differently_and_their_steps_are_added_up() -> None:
    it = trainer(inherit=False, min_judged=10**6, mixed_share=0.0)
    firsts, begin = [], it._begin

    def watched():
        begin()
        firsts.append(flat(it.learner))

    it._begin = watched
    steps = [0]
    while len(it.tried) < 3:
        it.advance()
        steps.append(it.learner_steps)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(firsts, 2))
    assert all(after > before for before, after in pairwise(steps)), "a new learner does not begin the count anew"


def flat(learner) -> torch.Tensor:
    return torch.cat([each.flatten().clone() for each in learner.acting.state_dict().values()])


def test_a_score_makes_up_for_missing_obedience() -> None:
    it = trainer(gate=1.0, shortfall_cost=50.0, episode_length=60, reference_share=0.0, mixed_share=0.0)
    while not it.tried:
        it.advance()
    first = it.tried[0]
    assert first.score == pytest.approx(first.evaluated.returns - 50.0 * (1.0 - first.evaluated.obedience))


def test_settings_that_make_no_sense_are_refused() -> None:
    for changed in (
        {"envs": 0},
        {"update_every_steps": 13},
        {"total_episodes": 3},
        {"reference_share": 0.6, "final_share": 0.5},
        {"gate": 0.0},
    ):
        with pytest.raises(ValueError, match="settings of the workflow training: "):
            SETTINGS.changed(**changed)


def with_cuts(**changed) -> WorkflowTrainer:
    """A trainer whose first network is truncated in an evaluation's first round, or more of them."""
    evaluation = Cut(SETTINGS.envs, SETTINGS.red, episode_length=SETTINGS.episode_length, restarted=True, **changed)
    evaluation.reset(seed=1)
    return WorkflowTrainer(Context(), SETTINGS, environments.make(SETTINGS, 0), ((evaluation,),))


def test_an_evaluation_scores_whole_episodes_alone() -> None:
    found = with_cuts().evaluate(None, 8)
    assert found.episodes == 15, "of 16, without the one of which the process was replaced"
    assert found.returns > -1000, "which was the worst by far"


def test_a_round_without_a_whole_episode_is_played_again_and_not_for_ever() -> None:
    assert with_cuts(first=7).evaluate(None, 8).episodes == 16
    with pytest.raises(RuntimeError, match="none of 8 networks reached the end of an episode in 5 tries"):
        with_cuts(first=7, times=99).evaluate(None, 8)


def test_a_training_step_is_judged_by_whole_episodes_alone() -> None:
    it = trainer()
    cut = Cut(SETTINGS.envs, SETTINGS.red, episode_length=SETTINGS.episode_length, restarted=True)
    cut.reset(seed=1)
    it._env = ((cut,),)
    numbers = it.advance()
    assert numbers["return_mean"] > -1000 and numbers["total_reward"] > -1000
    assert len(it.context.returns) == 7 and min(it.context.returns) > -1000, "the eighth did not end"


FILES = {"metrics.csv", "workflows.csv", "summary.json", "report.html", "settings.json", "checkpoints", "tensorboard"}


def rows(folder, name="metrics.csv", without=("seconds", "steps_per_second")):
    with (folder / name).open() as file:
        return [{key: value for key, value in row.items() if key not in without} for row in csv.DictReader(file)]


def trained(folder):
    """The rows of updates, without that of the last evaluation."""
    return [row for row in rows(folder) if row["phase"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    said = workflow_run.run(SETTINGS, folder, command="jurybox train workflow")
    return folder, said


def test_a_run_writes_the_files_of_every_training(whole) -> None:
    folder, said = whole
    assert {path.name for path in folder.iterdir()} >= FILES
    summary = json.loads((folder / "summary.json").read_text())
    wanted = "env_steps learner_steps episodes seconds return_mean return_std seed version"
    assert set(wanted.split()) <= set(summary) and summary["episodes"] == 160
    assert said.splitlines() == summary["conclusion"]
    assert len(rows(folder, "workflows.csv")) == summary["workflows_tried"]
    page = (folder / "report.html").read_text()
    assert summary["workflow"].replace(">", "&gt;") in page and "the 120 orders" in page and "jurybox train" in page
    assert "One policy with each type first in its order" in page and "user first" in page
    assert [each["first"] for each in summary["prices"]] == [None, *UNIT_TYPES]


@pytest.mark.parametrize(
    ("judged", "obeyed", "told"), [(99, 99, "Not judged: 99"), (100, 95, "Found: "), (100, 5, "Not found: ")]
)
def test_the_report_names_the_criterion_and_keeps_the_first_rules_figure(judged, obeyed, told) -> None:
    it = trainer(min_judged=100)
    it.best = ORDERS[7]
    it.final = Evaluated(-20.0, 0.1, 2.0, 30.0, 6000, 5940, judged, obeyed, -40.0, 0.5, 400)
    said = conclusion(it)
    assert said[0].startswith(told)
    assert any("99.0% of 30.0 fixes an episode" in sentence and "can pad" in sentence for sentence in said)


@pytest.mark.parametrize(
    ("without", "told"),
    [
        (-15.0, "the order costs 5.0 points (± 0.3)."),
        (-25.0, "the order gains 5.0 points (± 0.3)."),
        (-19.9, "no difference is seen (at most 0.4 points)."),
        (0.0, "the order costs 20.0 points (± 0.3)."),
    ],
)
def test_an_orders_price_is_that_for_the_same_policy_after_the_same_training(without, told) -> None:
    it = trainer()
    it.best = ORDERS[0]
    it.final = Evaluated(-20.0, 0.1, 1.0, 0.5, 8, 8, 100, 100, -1.0, 0.1, 16)
    it.prices = [OrderEvaluation(None, Evaluated(without, 0.1, 1.0, 0.0, 0, 0, 0, 0, -1.0, 0.1, 16), 0.0)]
    it.reference = Evaluated(-483.9, 0.1, 0.0, 0.0, 0, 0, 0, 0, -1.0, 0.1, 16)
    *_, price, before = conclusion(it)
    assert price.startswith("Without an order the same policy") and price.endswith(told)
    assert "-483.9" in before and before.endswith("so this is no measure of what an order costs.")


def test_policies_of_other_training_are_not_compared() -> None:
    it = trainer()
    it.best = ORDERS[0]
    it.final = Evaluated(-52.4, 0.1, 1.0, 0.5, 8, 8, 100, 100, -1.0, 0.1, 16)
    it.reference = Evaluated(-483.9, 0.1, 0.0, 0.0, 0, 0, 0, 0, -1.0, 0.1, 16)
    said = " ".join(conclusion(it))
    assert "What the order costs is not known" in said and "worse" not in said


def test_a_stop_is_noticed_within_an_update_and_within_an_evaluation(tmp_path) -> None:
    seen = []

    def watch(shared):
        seen.append((shared.scoreboard.env_steps, shared.scoreboard.under_way))

    workflow_run.run(SETTINGS.changed(total_episodes=40, mixed_share=0.0), tmp_path, watch=watch)
    made = [counted + under_way for counted, under_way in seen]
    assert {8, 16, 24, 88} <= set(made) and made == sorted(made), (
        "the first update is of eight episodes of twelve steps"
    )
    assert seen.count((0, 88)) == 1 + 4 * 12, "at the end of the first update the policy without an order is evaluated"


class Stopped(Exception):
    pass


@pytest.mark.runs
@pytest.mark.parametrize("at", [11, *(pytest.param(at, marks=pytest.mark.slow) for at in (3, 18))])
def test_a_resumed_run_is_the_same_as_one_without_a_stop(whole, tmp_path, monkeypatch, at) -> None:
    advance = WorkflowTrainer.advance

    def stops(self):
        if self.updates == at:
            raise Stopped
        return advance(self)

    monkeypatch.setattr(workflow_run, "_CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(WorkflowTrainer, "advance", stops)
    with pytest.raises(Stopped):
        workflow_run.run(SETTINGS, tmp_path)
    monkeypatch.setattr(WorkflowTrainer, "advance", advance)
    workflow_run.run(SETTINGS, tmp_path, resume=True)
    assert left_by(tmp_path) == left_by(whole[0])


def left_by(folder):
    """What has to be equal, to the last bit, of two runs that are the same."""
    checkpoints = Checkpoints(folder / "checkpoints")
    places = checkpoints.folder / "best", checkpoints.existing().folder
    weights = {place.name: (place / "weights-policy.state").read_bytes() for place in places}
    return rows(folder), rows(folder, "workflows.csv"), weights, checkpoints.best()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.studies.workflow.test_trainer import SETTINGS, WorkflowTrainer, workflow_run

advance = WorkflowTrainer.advance

def killed(self):
    if self.updates == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return advance(self)

WorkflowTrainer.advance = killed
workflow_run.run(SETTINGS, Path(sys.argv[1]))
"""


@pytest.mark.runs
def test_a_run_that_was_killed_and_resumed_is_the_same_as_one_at_once(whole, tmp_path) -> None:
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(rows(tmp_path)) == 13 and not (tmp_path / "summary.json").exists()
    workflow_run.run(SETTINGS, tmp_path, resume=True)
    assert left_by(tmp_path) == left_by(whole[0]), "three updates after the checkpoint were made once more"


@pytest.mark.runs
@pytest.mark.parametrize("evaluating", [False, True])
def test_a_stop_leaves_the_update_and_the_run_goes_on_with_resume(whole, tmp_path, evaluating) -> None:
    signals, asked = Signals(), []

    def watch(shared):
        counted, under_way = shared.scoreboard.env_steps, shared.scoreboard.under_way
        asked.append((counted, under_way))
        if counted == 96 * (3 if evaluating else 12) and asked.count((counted, under_way)) > (3 if evaluating else 1):
            signals.ask(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        workflow_run.run(SETTINGS, tmp_path, watch=watch, signals=signals)
    assert not (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["end"] == "a stop was requested"
    workflow_run.run(SETTINGS, tmp_path, resume=True)
    assert left_by(tmp_path) == left_by(whole[0])


def best_of(folder):
    return Checkpoints(folder / "checkpoints").best()["numbers"]["return"]


def test_a_run_that_ends_during_its_last_save_has_its_best_policy_when_it_is_resumed(tmp_path, monkeypatch) -> None:
    settings = SETTINGS.changed(total_episodes=40, mixed_share=0.0)
    complete = Checkpoints.complete

    def stops(self, scratch, env_steps, document):
        complete(self, scratch, env_steps, document)
        raise Stopped

    monkeypatch.setattr(Checkpoints, "complete", stops)
    with pytest.raises(Stopped):  # at the end, since there are fewer than ten updates
        workflow_run.run(settings, tmp_path)
    monkeypatch.undo()
    workflow_run.run(settings, tmp_path, resume=True)
    assert best_of(tmp_path) == json.loads((tmp_path / "summary.json").read_text())["return_mean"]


@pytest.mark.runs
def test_a_finished_run_goes_on_with_a_larger_budget(tmp_path) -> None:
    fewer = SETTINGS.changed(total_episodes=80)
    workflow_run.run(fewer, tmp_path)
    tried = rows(tmp_path, "workflows.csv")
    workflow_run.run(fewer.changed(total_episodes=160), tmp_path, resume=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["episodes"] == 160 and summary["env_steps"] == 160 * 12
    more = trained(tmp_path)
    assert [row["episodes"] for row in more] == [str(8 * number) for number in range(1, 21)]
    assert [row["phase"] for row in more[10:]] == ["2.0"] * 6 + ["3.0"] * 4, "the search, then the best workflow"
    now = rows(tmp_path, "workflows.csv")
    assert now[: len(tried)] == tried and len(now) > len(tried)
    assert best_of(tmp_path) == summary["return_mean"]


def test_a_folder_that_holds_a_run_is_not_overwritten_nor_resumed_as_another(whole, tmp_path) -> None:
    with pytest.raises(RunLogError, match="holds a run already"):
        workflow_run.run(SETTINGS, whole[0])
    with pytest.raises(CheckpointError, match="align_lambda was 10"):
        workflow_run.run(SETTINGS.changed(align_lambda=30.0), whole[0], resume=True)
    with pytest.raises(CheckpointError, match="start without --resume"):
        workflow_run.run(SETTINGS, tmp_path, resume=True)


def test_only_the_newest_checkpoints_and_the_best_are_kept(whole) -> None:
    found = sorted(path.name for path in (whole[0] / "checkpoints").iterdir())
    steps = json.loads((whole[0] / "summary.json").read_text())["env_steps"]
    assert found[0] == "best" and len(found) == 3 and found[-1] == f"step-{steps:012d}"
