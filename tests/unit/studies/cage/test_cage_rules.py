"""The rules of the network, each on a hundred copies with red's chances of failing in them."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.network import Networks, Verb
from jurybox.studies.workflow.cage.tables import Blue, action

N = 400
SCAN, EXPLOIT, NONE = [1, 0], [1, 1], [0, 0]
NO, UNKNOWN, USER, PRIVILEGED = [0, 0], [1, 0], [0, 1], [1, 1]


class Scripted:
    """A red agent that takes the given action, the same in every network."""

    def __init__(self) -> None:
        self.next: tuple[Verb, int] = (Verb.SLEEP, 0)
        self.success = np.zeros(N, bool)

    def reset(self, which: np.ndarray, chance: np.ndarray) -> None: ...

    def choose(self, *heard: np.ndarray):
        verb, target = self.next
        return np.full(N, int(verb)), np.full(N, target)


class Table:
    """Networks, a scripted red, and a blue that does one thing everywhere."""

    def __init__(self, quirk: bool = False) -> None:
        self.networks = Networks(N, quirk=quirk, seed=7)
        self.red = self.networks.red = Scripted()

    def turn(self, blue: int = 0, verb: Verb = Verb.SLEEP, target: str | int = 0) -> np.ndarray:
        self.red.next = (verb, t.INDEX[target] if isinstance(target, str) else target)
        return self.networks.step(np.full(N, blue))

    def take(self, *hosts: str) -> None:
        """Red scans, exploits and escalates; tries until it has all copies."""
        for host in hosts:
            self.turn(0, Verb.SCAN, host)
            bit = t.mask_of(host)
            for _ in range(30):
                self.turn(0, Verb.EXPLOIT, host)
                if (self.networks.sessions & bit > 0).all():
                    break
            self.turn(0, Verb.ESCALATE, host)
            assert (self.networks.root & bit > 0).all()

    def activity(self, host: str) -> np.ndarray:
        return self.networks.belief[:, t.INDEX[host], :2]

    def belief(self, host: str) -> np.ndarray:
        return self.networks.belief[:, t.INDEX[host], 2:]


@pytest.fixture
def table() -> Table:
    return Table()


def test_all_is_zero_at_reset(table: Table) -> None:
    assert not table.networks.belief.any()
    assert (table.networks.true_state() == np.eye(13, dtype=np.int8)[t.USER0] * 2).all()


@pytest.mark.parametrize("host", ["Op_Host0", "User1", "Enterprise1"])
def test_a_port_scan_shows_as_a_scan_in_its_step_only(table: Table, host: str) -> None:
    table.take("Enterprise0")  # the way to Operational
    table.turn(0, Verb.SCAN, host)
    assert (table.activity(host) == SCAN).all() and (table.belief(host) == NO).all()
    table.turn()
    assert (table.activity(host) == NONE).all()


def test_a_reverse_shell_is_seen_nineteen_times_in_twenty_and_then_believed(table: Table) -> None:
    table.turn(0, Verb.SCAN, "Enterprise1")
    for _ in range(20):
        table.turn(0, Verb.EXPLOIT, "Enterprise1")
    table.networks.reset(np.ones(N, bool))
    table.networks.ports[:, t.INDEX["User3"]] = t.ports_of(80)  # HTTP only
    table.turn(0, Verb.EXPLOIT, "User3")
    seen = (table.activity("User3") == EXPLOIT).all(1)
    assert 0.9 < seen.mean() < 0.99
    assert (table.activity("User3")[~seen] == SCAN).all()
    assert (table.belief("User3") == np.where(seen[:, None], USER, NO)).all()
    assert (table.networks.sessions & t.mask_of("User3") > 0).all()
    table.turn()
    assert (table.belief("User3")[seen] == USER).all(), "what was believed stays"


def test_remove_ends_the_shells_that_were_seen_and_no_others(table: Table) -> None:
    table.networks.ports[:, t.INDEX["User3"]] = t.ports_of(80)
    table.turn(0, Verb.EXPLOIT, "User3")
    seen = (table.activity("User3") == EXPLOIT).all(1)
    table.turn(action(Blue.REMOVE, "User3"))
    assert ((table.networks.sessions & t.mask_of("User3") > 0) == ~seen).all()
    assert (table.belief("User3") == np.where(seen[:, None], UNKNOWN, NO)).all()


@pytest.mark.parametrize(("port", "host"), [(22, "User4"), (25, "User4")])
def test_remove_ends_neither_ssh_sessions_nor_privileged_ones(table: Table, port: int, host: str) -> None:
    table.networks.ports[:, t.INDEX[host]] = t.ports_of(port)
    table.turn(0, Verb.EXPLOIT, host)
    table.turn(action(Blue.REMOVE, host))
    assert (table.networks.sessions & t.mask_of(host) > 0).all()


def test_analyse_finds_the_file_of_a_shell_or_an_escalation_but_ssh_leaves_none(table: Table) -> None:
    table.networks.ports[:, t.INDEX["User4"]] = t.ports_of(22)
    table.turn(0, Verb.EXPLOIT, "User4")
    assert (table.activity("User4") == EXPLOIT).all()
    table.turn(action(Blue.ANALYSE, "User4"))
    assert (table.belief("User4") == USER).all()
    table.turn(0, Verb.ESCALATE, "User4")
    assert (table.belief("User4") == USER).all(), "escalation is not seen"
    table.turn(action(Blue.ANALYSE, "User4"))
    assert (table.belief("User4") == PRIVILEGED).all()


def test_restore_clears_sessions_files_decoys_and_belief_for_one_point(table: Table) -> None:
    table.take("User1")
    table.turn(action(Blue.TOMCAT, "User1"))
    rewards = table.turn(action(Blue.RESTORE, "User1"))
    networks = table.networks
    assert (rewards == -1.0).all()
    assert not (networks.sessions & t.mask_of("User1")).any() and not (networks.files & t.mask_of("User1")).any()
    assert not networks.decoys.any() and (table.belief("User1") == NO).all()


def test_the_foothold_on_user0_survives_everything(table: Table) -> None:
    for blue in (action(Blue.RESTORE, "User0"), action(Blue.REMOVE, "User0")):
        table.turn(blue)
    assert (table.networks.sessions == t.mask_of("User0")).all()


def test_an_exploit_of_a_decoy_fails_and_shows(table: Table) -> None:
    table.turn(action(Blue.TOMCAT, "Op_Host0"))
    table.take("Enterprise0")
    table.turn(0, Verb.SCAN, "Op_Host0")
    table.networks.ports[:, t.INDEX["Op_Host0"]] &= t.ports_of(443)
    table.turn(0, Verb.EXPLOIT, "Op_Host0")
    assert not (table.networks.sessions & t.mask_of("Op_Host0")).any()
    assert (table.activity("Op_Host0") == SCAN).all()


def test_an_exploit_of_a_closed_port_fails_undetected(table: Table) -> None:
    table.turn(action(Blue.TOMCAT, "User1"))
    table.turn(0, Verb.SCAN, "User1")
    table.turn(action(Blue.RESTORE, "User1"))
    table.networks.ports[:, t.INDEX["User1"]] &= t.ports_of(443)
    table.turn(0, Verb.EXPLOIT, "User1")
    assert (table.activity("User1") == NONE).all() and not table.networks._success.any()


def test_a_decoy_exists_once_but_vsftpd_always_does_and_takes_apaches_port(table: Table) -> None:
    apache, vsftpd = action(Blue.APACHE, "Op_Host0"), action(Blue.VSFTPD, "Op_Host0")
    assert table.networks.possible()[:, [apache, vsftpd]].all()
    table.turn(vsftpd)
    assert (table.networks.decoys[:, t.INDEX["Op_Host0"]] == t.ports_of(80)).all()
    assert not table.networks.possible()[:, apache].any() and table.networks.possible()[:, vsftpd].all()


def test_operational_is_closed_without_a_session_on_an_enterprise_host(table: Table) -> None:
    def seen() -> np.ndarray:
        return table.networks.scanned & t.mask_of("Op_Server0") > 0

    table.turn(0, Verb.SCAN, "Op_Server0")
    assert not seen().any() and (table.activity("Op_Server0") == NONE).all()
    assert table.networks._success.all(), "a scan that gets no answer is a success"
    table.turn(0, Verb.SWEEP, t.Subnet.OPERATIONAL)
    assert not table.networks._success.any()
    table.take("Enterprise0")
    table.turn(0, Verb.SCAN, "Op_Server0")
    assert seen().all()
    table.turn(action(Blue.RESTORE, "Enterprise0"), Verb.SCAN, "Op_Server0")
    assert (table.activity("Op_Server0") == NONE).all()


@pytest.mark.parametrize(("host", "port"), [("Enterprise1", 139), ("Enterprise2", 139), ("User3", 3389)])
def test_an_exploit_that_the_service_on_its_port_does_not_answer_is_not_seen(
    table: Table, host: str, port: int
) -> None:
    table.turn(0, Verb.SCAN, host)
    table.networks.ports[:, t.INDEX[host]] = t.ports_of(port)
    table.turn(0, Verb.EXPLOIT, host)
    assert (table.activity(host) == NONE).all() and not table.networks._success.any()


def test_a_new_scan_forgets_the_decoys_that_are_gone(table: Table) -> None:
    table.turn(action(Blue.TOMCAT, "User1"))
    table.turn(0, Verb.SCAN, "User1")
    table.turn(action(Blue.RESTORE, "User1"), Verb.SCAN, "User1")
    assert (table.networks.ports[:, t.INDEX["User1"]] == t.ports_of(21, 22)).all()


@pytest.mark.parametrize(("host", "shown"), [("Op_Host0", NONE), ("User1", SCAN), ("Enterprise1", SCAN)])
def test_a_decoy_put_up_in_the_same_step_hides_the_scan_of_a_host_with_few_ports(
    table: Table, host: str, shown: list[int]
) -> None:
    table.take("Enterprise0")
    decoy = Blue.FEMITTER if host == "Enterprise1" else Blue.TOMCAT
    table.turn(action(decoy, host), Verb.SCAN, host)
    assert (table.activity(host) == shown).all()


def test_a_decoy_put_up_in_the_same_step_hides_an_undetected_shell(table: Table) -> None:
    table.networks.ports[:, t.INDEX["User3"]] = t.ports_of(80)
    table.turn(action(Blue.SSHD, "User3"), Verb.EXPLOIT, "User3")
    seen = table.networks.shells & t.mask_of("User3") > 0
    assert 0 < (~seen).sum() < N
    assert (table.activity("User3") == np.where(seen[:, None], EXPLOIT, NONE)).all()


def test_an_exploit_of_a_decoy_beside_another_put_up_in_the_same_step_looks_as_if_it_had_worked(table: Table) -> None:
    table.take("Enterprise0")
    table.turn(action(Blue.TOMCAT, "Op_Host0"))
    table.networks.ports[:, t.INDEX["Op_Host0"]] = t.ports_of(443)
    table.turn(action(Blue.HARAKA, "Op_Host0"), Verb.EXPLOIT, "Op_Host0")
    assert (table.activity("Op_Host0") == EXPLOIT).all() and (table.belief("Op_Host0") == USER).all()
    assert not (table.networks.sessions & t.mask_of("Op_Host0")).any()


def test_escalating_where_red_is_privileged_already_leaves_no_file(table: Table) -> None:
    table.turn(0, Verb.ESCALATE, "User0")
    table.turn(action(Blue.ANALYSE, "User0"))
    assert (table.belief("User0") == NO).all()


def test_red_chooses_its_best_exploit_three_times_in_four(table: Table) -> None:
    table.turn(0, Verb.SCAN, "User2")  # EternalBlue gives SYSTEM, BlueKeep a user
    table.turn(0, Verb.EXPLOIT, "User2")
    share = (table.networks.root & t.mask_of("User2") > 0).mean()
    assert 0.68 < share < 0.82


def test_each_privileged_session_costs_and_an_impact_costs_ten_until_the_server_is_restored(table: Table) -> None:
    table.take("User1", "Enterprise0", "Op_Server0")
    assert (table.turn() == -2.1).all()
    assert (table.turn(0, Verb.IMPACT) == -12.1).all()
    assert (table.turn() == -12.1).all(), "the service stays down"
    restore = action(Blue.RESTORE, "Op_Server0")
    assert (table.turn(restore) == -2.1).all()
    assert (table.turn(0, Verb.IMPACT) == -1.1).all(), "no session, no impact"


@pytest.mark.parametrize(("quirk", "cost"), [(False, -12.0), (True, -2.0)])
def test_with_the_quirk_an_impact_after_a_restore_costs_nothing(quirk: bool, cost: float) -> None:
    table = Table(quirk)
    table.turn(action(Blue.RESTORE, "Op_Server0"))
    table.take("Enterprise0", "Op_Server0")
    assert (table.turn(0, Verb.IMPACT) == cost).all() and table.networks._success.all()
    table.networks.reset(np.ones(N, bool))
    table.take("Enterprise0", "Op_Server0")
    assert (table.turn(0, Verb.IMPACT) == -12.0).all(), "a new episode begins without it"
