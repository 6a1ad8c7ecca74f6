"""Orders, their encoding and distance, and what it means to keep to one."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.training.environments.cage import tables as t
from jurybox.training.environments.cage.tables import UNIT_TYPES, Blue, action
from jurybox.training.search.rollouts import Alignment, judge, pooled_rate
from jurybox.training.search.settings import ORDERS, describe, distances, encode, parse

USER_LAST = parse("defender, enterprise, op_server, op_host, user")
USER_FIRST = parse("user > op_host > op_server > enterprise > defender")


def truth(*hosts: str, level: int = 1) -> np.ndarray:
    state = np.zeros((1, 13), np.int8)
    state[0, t.USER0] = 2
    for host in hosts:
        state[0, t.INDEX[host]] = level
    return state


def verdict(kind: Blue, host: str | None, state: np.ndarray, order=USER_LAST) -> tuple[bool, bool]:
    fixes, complied = judge(np.array([action(kind, host)]), state, order)
    return bool(fixes[0]), bool(complied[0])


def test_there_are_120_orders_and_each_can_be_told_and_read() -> None:
    assert len(set(ORDERS)) == 120 and USER_LAST == (0, 1, 2, 3, 4)
    assert all(parse(describe(order)) == order for order in ORDERS)
    with pytest.raises(ValueError, match="once"):
        parse("user, user, op_host, op_server, defender")


def test_an_order_is_encoded_position_by_position() -> None:
    code = encode(USER_FIRST).reshape(5, 5)
    assert code.dtype == np.float32 and code.sum() == 5
    assert [UNIT_TYPES[kind] for kind in code.argmax(1)] == ["user", "op_host", "op_server", "enterprise", "defender"]


def test_kendalls_distance_counts_pairs_the_other_way_round() -> None:
    swapped = (1, 0, 2, 3, 4)
    found = distances([USER_LAST], [USER_LAST, swapped, USER_FIRST])[0]
    np.testing.assert_allclose(found, [0.0, 0.1, 1.0])
    matrix = distances(ORDERS, ORDERS)
    np.testing.assert_allclose(matrix, matrix.T)
    assert (matrix[~np.eye(120, dtype=bool)] > 0).all()


@pytest.mark.parametrize("kind", [Blue.REMOVE, Blue.RESTORE])
def test_a_fix_complies_when_its_type_comes_first_among_those_compromised(kind: Blue) -> None:
    both = truth("User1", "Enterprise0")
    assert verdict(kind, "Enterprise0", both) == (True, True)
    assert verdict(kind, "Enterprise2", both) == (True, True), "the type counts, not the host"
    assert verdict(kind, "User1", both) == (True, False)
    assert verdict(kind, "User1", both, USER_FIRST) == (True, True)
    assert verdict(kind, "User1", truth("User1", level=2)) == (True, True)


def test_user0s_foothold_does_not_count_as_compromised() -> None:
    assert verdict(Blue.RESTORE, "Enterprise0", truth("Enterprise0"), USER_FIRST) == (True, True)


def test_fixes_of_user0_are_none_so_that_they_cannot_pad_a_rate() -> None:
    for kind in (Blue.REMOVE, Blue.RESTORE):
        assert verdict(kind, "User0", truth("User1"), USER_FIRST) == (False, False)


def test_the_strict_rule_wants_the_target_itself_compromised() -> None:
    actions = np.array([action(Blue.REMOVE, "User4"), action(Blue.REMOVE, "User1")])
    before = np.repeat(truth("User1"), 2, axis=0)
    assert judge(actions, before, USER_FIRST)[1].tolist() == [True, True]
    assert judge(actions, before, USER_FIRST, strict=True)[1].tolist() == [False, True]


def test_a_fix_with_nothing_compromised_counts_and_does_not_comply() -> None:
    assert verdict(Blue.RESTORE, "User1", truth()) == (True, False)


def test_only_removing_and_restoring_are_fixes() -> None:
    kinds = [kind for kind in Blue if kind not in (Blue.REMOVE, Blue.RESTORE)]
    for kind in kinds:
        host = None if kind in (Blue.SLEEP, Blue.MONITOR) else "Enterprise0"
        assert verdict(kind, host, truth("Enterprise0")) == (False, False)


def test_judging_leaves_the_truth_as_it_was() -> None:
    state = truth("User1")
    verdict(Blue.REMOVE, "User1", state)
    assert state[0, t.USER0] == 2


def test_alignment_pays_lambda_times_the_final_rate_over_an_episode() -> None:
    alignment = Alignment.begin(1, USER_LAST, 30.0)
    right, wrong, none = (action(Blue.RESTORE, "Enterprise0"), action(Blue.RESTORE, "User1"), 0)
    paid = [
        alignment.step(np.array([each]), truth("Enterprise0"), np.array([last]))[0]
        for each, last in ((right, False), (wrong, False), (none, False), (right, True))
    ]
    assert paid[0] == 30.0 and paid[2] == 0.0
    assert sum(paid) == pytest.approx(30.0 * 2 / 3)
    assert (alignment.fixes[0], alignment.complied[0]) == (3, 2)


def test_an_episode_without_a_fix_has_rate_zero_and_costs_a_little() -> None:
    alignment = Alignment.begin(1, USER_LAST, 30.0)
    assert alignment.step(np.array([0]), truth(), np.array([False]))[0] == 0.0
    assert alignment.step(np.array([0]), truth(), np.array([True]))[0] == pytest.approx(-6.0)
    assert alignment.rates()[0] == 0.0 == pooled_rate(0, 0)
