"""The search over orders learns from scores and balances what it knows with what it does not."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from jurybox.studies.workflow.gp_ucb import WorkflowSearch
from jurybox.studies.workflow.settings import ORDERS, vectors

BEST = ORDERS[77]


def distances(left, right) -> np.ndarray:
    from scipy.spatial.distance import cdist  # not to collect tests: it takes a second

    return cdist(vectors(left), vectors(right), "sqeuclidean")


def score(order) -> float:
    return -20.0 - 60.0 * float(distances([order], [BEST])[0, 0])


def test_the_kernel_is_positive_definite_over_all_orders_and_the_naive_one_is_not() -> None:
    from sklearn.gaussian_process.kernels import RBF

    assert np.linalg.eigvalsh(RBF(0.5)(vectors(ORDERS))).min() > 0
    assert np.linalg.eigvalsh(np.exp(-(distances(ORDERS, ORDERS) ** 2) / 0.5)).min() < -0.5


def test_it_finds_a_good_order_in_a_fraction_of_the_trials() -> None:
    search = WorkflowSearch(seed=3)
    for _ in range(25):
        proposal = search.propose()
        search.tell(proposal, score(proposal.order))
    assert max(trial.score for trial in search.trace) >= score(BEST) - 60.0 * 0.1
    assert len({trial.order for trial in search.trace}) == 25
    assert all(t.bound == pytest.approx(t.mean + search.beta * t.std) for t in search.trace)


def test_a_larger_beta_explores_further() -> None:
    spread = {}
    for beta in (0.0, 10.0):
        search = WorkflowSearch(beta=beta, revisit=True, seed=3)
        for _ in range(12):
            proposal = search.propose()
            search.tell(proposal, score(proposal.order))
        orders = [trial.order for trial in search.trace]
        spread[beta] = distances(orders, orders).mean()
    assert spread[10.0] > 1.5 * spread[0.0]


def test_the_belief_is_more_certain_near_evaluated_points() -> None:
    search = WorkflowSearch()
    for order, got in ((ORDERS[0], -30.0), (ORDERS[119], -90.0)):
        search.tell(search.propose(), 0.0)
        search.trace[-1] = type(search.trace[-1])(order, 0.0, 0.0, 0.0, got)
    mean, std = search.belief()
    near = distances(ORDERS, [ORDERS[0]])[:, 0]
    assert mean[0] > mean[119] and mean[0] > mean[near == 0.5].mean()
    assert std[0] < std[near == 0.5].min()


def test_a_saved_trace_continues_where_it_ended() -> None:
    search = WorkflowSearch(seed=3)
    for _ in range(4):
        proposal = search.propose()
        search.tell(proposal, score(proposal.order))
    other = WorkflowSearch(seed=3)
    other.restore(json.loads(json.dumps([asdict(trial) for trial in search.trace])))
    assert other.propose() == search.propose() and other.trace == search.trace


def test_ten_scores_that_are_all_the_same_do_no_harm() -> None:
    search = WorkflowSearch()
    for _ in range(10):
        search.tell(search.propose(), 0.0)
    assert np.isfinite(search.propose().bound)
