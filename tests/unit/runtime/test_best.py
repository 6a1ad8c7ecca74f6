"""``checkpoints/best`` holds the very weights that an evaluation liked best, whatever was learned meanwhile."""

from __future__ import annotations

import json

import pytest
from tests.unit.runtime.toys import Rows, plan

from jurybox.training.checkpoints import read_state
from jurybox.training.runtime.run import run

SLOW = {"pause": 0.003}


def evaluations(rows, name):
    return [
        (values[f"eval_{name}"], values["eval_version"], values["eval_w"]) for _, values in rows if "eval_w" in values
    ]


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.runs)])
def test_the_best_is_the_publication_that_was_evaluated(tmp_path, serial):
    rows = Rows()
    run(
        plan(steps=400, actor=SLOW, evaluate=40, judge={"pause": 0 if serial else 0.15}, best="liking", save_every=50),
        tmp_path,
        rows,
        serial=serial,
    )
    # Of two that are liked as much, the first is kept.
    liking, version, w = max(evaluations(rows, "liking"), key=lambda evaluation: evaluation[0])
    kept = read_state(tmp_path / "checkpoints" / "best" / "weights-policy.state")
    assert kept["version"] == version and kept["state"]["w"][0] == w
    said = json.loads((tmp_path / "checkpoints" / "best" / "evaluation.json").read_text())
    assert said["numbers"]["liking"] == liking and said["versions"] == {"policy": version}


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.runs)])
def test_the_last_evaluation_can_be_the_best_one(tmp_path, serial):
    """It ends after a checkpoint at the same step was made."""
    planned = plan(steps=100, evaluate=10**6, judge={"pause": 0.5}, save_every=1, best="version")
    outcome = run(planned, tmp_path, Rows(), serial=serial)
    kept = read_state(tmp_path / "checkpoints" / "best" / "weights-policy.state")
    assert kept["version"] == outcome.evaluation["eval_version"] > 5
