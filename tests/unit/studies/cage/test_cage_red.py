"""The attackers go the ways that were read off the original."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.studies.workflow.cage import network as red
from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.network import BLine, Meander, Verb

NOTHING = np.zeros(1, np.int64)
ALL = np.full(1, (1 << t.N_HOSTS) - 1)
CHANCE = np.zeros(1)
JUMPS = [0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13]


def _bline(entry: str) -> BLine:
    agent = BLine(1)
    agent.reset(np.ones(1, bool), CHANCE)
    agent.entry[:] = t.INDEX[entry]
    return agent


@pytest.mark.parametrize(
    ("entry", "enterprise"),
    [("User1", "Enterprise1"), ("User2", "Enterprise1"), ("User3", "Enterprise0"), ("User4", "Enterprise0")],
)
def test_bline_goes_straight_to_the_server_when_nothing_fails(entry: str, enterprise: str) -> None:
    agent = _bline(entry)
    done = []
    for step in range(17):
        verb, target = agent.choose(np.array([step > 0]), NOTHING, ALL, NOTHING, CHANCE)
        name = t.Subnet(target[0]).name if verb[0] == Verb.SWEEP else t.HOSTS[target[0]]
        done.append((Verb(verb[0]).name, name))
    take = ["SCAN", "EXPLOIT", "ESCALATE"]
    expected = [("SWEEP", "USER"), *[(verb, entry) for verb in take], *[(verb, enterprise) for verb in take]]
    expected += [("SWEEP", "ENTERPRISE"), *[(verb, "Enterprise2") for verb in take]]
    expected += [(verb, "Op_Server0") for verb in take] + [("IMPACT", "Op_Server0")] * 3
    assert done == expected


@pytest.mark.parametrize("stage", range(15))
def test_bline_jumps_back_after_a_failure(stage: int) -> None:
    agent = _bline("User1")
    agent.stage[:] = stage
    agent.choose(np.array([False]), NOTHING, ALL, NOTHING, CHANCE)
    assert agent.stage[0] == JUMPS[stage]


def test_bline_begins_anew_with_its_entry_when_the_scan_of_the_server_showed_nothing() -> None:
    agent = _bline("User3")
    agent.stage[:] = 11
    verb, target = agent.choose(np.array([True]), NOTHING, NOTHING, NOTHING, CHANCE)
    assert (verb[0], target[0]) == (Verb.SCAN, t.INDEX["User3"])


def test_bline_enters_through_each_user_host_as_often() -> None:
    agent = BLine(4000)
    agent.reset(np.ones(4000, bool), np.random.default_rng(0).random(4000))
    counts = np.bincount(agent.entry, minlength=13)[[t.INDEX[f"User{n}"] for n in (1, 2, 3, 4)]]
    assert counts.sum() == 4000 and counts.min() > 900


def _meander(**state: int) -> Meander:
    agent = Meander(1)
    for name, value in state.items():
        getattr(agent, name)[:] = value
    return agent


def test_meander_impacts_before_it_sweeps_before_it_scans_before_it_escalates_before_it_exploits() -> None:
    known, subnets = np.array([t.USER_HOSTS]), np.array([1])
    everything, first = t.USER_HOSTS, t.mask_of("User0")
    cases = [
        ({"owned": t.mask_of("Op_Server0"), "exploited": t.mask_of("User1")}, Verb.IMPACT),
        ({"exploited": t.mask_of("User1")}, Verb.SWEEP),
        ({"swept": 1, "exploited": t.mask_of("User1")}, Verb.SCAN),
        ({"swept": 1, "scanned": everything, "exploited": t.mask_of("User1")}, Verb.ESCALATE),
        ({"swept": 1, "scanned": everything}, Verb.ESCALATE),  # on User0, where it begins
        ({"swept": 1, "scanned": everything, "owned": first}, Verb.EXPLOIT),
        ({"swept": 1, "scanned": everything, "exploited": everything, "owned": everything}, Verb.SLEEP),
    ]
    for state, expected in cases:
        verb, _ = _meander(**state).choose(np.array([True]), known, NOTHING, subnets, CHANCE)
        assert verb[0] == expected


@pytest.mark.parametrize(
    ("owned", "kept"),
    [
        (["User1", "Enterprise0", "Op_Host0", "Op_Server0"], ["User1", "Enterprise0"]),
        (["User1", "Enterprise0", "Enterprise1"], ["User1"]),
        (["User1"], ["User1"]),
    ],
)
def test_meander_loses_a_region_to_a_failed_exploit(owned: list[str], kept: list[str]) -> None:
    mine = t.mask_of(*owned)
    agent = _meander(owned=mine, exploited=mine | t.mask_of("Defender"), verb=Verb.EXPLOIT, target=0)
    agent._forget(np.array([False]))
    assert agent.owned[0] == agent.exploited[0] == t.mask_of(*kept)


@pytest.mark.parametrize("verb", [Verb.ESCALATE, Verb.IMPACT])
def test_meander_loses_one_host_to_a_failed_escalation_or_impact(verb: Verb) -> None:
    mine = t.mask_of("Enterprise0", "Op_Server0")
    agent = _meander(owned=mine, exploited=mine, verb=verb, target=t.OP_SERVER0)
    agent._forget(np.array([False]))
    assert agent.owned[0] == agent.exploited[0] == t.mask_of("Enterprise0")


def test_a_member_of_every_set_can_be_drawn() -> None:
    agent = _meander(swept=7, scanned=(1 << 13) - 1)
    many = Meander(1000)
    many.swept[:], many.scanned[:], many.owned[:] = agent.swept[0], agent.scanned[0], t.mask_of("User0")
    known = np.full(1000, t.mask_of("User1", "User3", "Defender"))
    chance = np.random.default_rng(1).random(1000)
    _, target = many.choose(np.ones(1000, bool), known, known, np.ones(1000, int), chance)
    assert {t.HOSTS[host] for host in target} == {"User1", "User3", "Defender"}
    assert set(red.REDS) == {"B_line", "Meander"}
