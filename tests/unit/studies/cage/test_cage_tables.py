"""The tables of the network are those of CybORG 2.1's Scenario 2, as documented and as measured on it."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.tables import Blue, action

LINUX_PLAIN = ["Defender", "Enterprise0", "Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0"]


def test_hosts_are_indexed_alphabetically_and_have_their_types() -> None:
    assert sorted(t.HOSTS) == list(t.HOSTS) and len(t.HOSTS) == 13
    types = {name: t.UNIT_TYPES[t.UNIT_TYPE[t.INDEX[name]]] for name in t.HOSTS}
    assert types["Defender"] == "defender" and types["Op_Server0"] == "op_server"
    assert {types[f"Enterprise{n}"] for n in range(3)} == {"enterprise"}
    assert {types[f"Op_Host{n}"] for n in range(3)} == {"op_host"}
    assert {types[f"User{n}"] for n in range(5)} == {"user"}
    assert [host for host, kind in zip(t.HOSTS, t.UNIT_TYPE, strict=True) if kind == 2] == ["Op_Server0"]


def test_the_subnets_hold_their_hosts() -> None:
    names = [{t.HOSTS[h] for h in range(13) if mask >> h & 1} for mask in t.SUBNET_HOSTS]
    assert names[t.Subnet.USER] == {f"User{n}" for n in range(5)}
    assert names[t.Subnet.ENTERPRISE] == {"Defender", "Enterprise0", "Enterprise1", "Enterprise2"}
    assert names[t.Subnet.OPERATIONAL] == {"Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0"}


@pytest.mark.parametrize(
    ("first", "last", "kind"),
    [
        (2, 14, Blue.ANALYSE),
        (15, 27, Blue.REMOVE),
        (28, 40, Blue.APACHE),
        (41, 53, Blue.FEMITTER),
        (54, 66, Blue.HARAKA),
        (67, 79, Blue.SMSS),
        (80, 92, Blue.SSHD),
        (93, 105, Blue.SVCHOST),
        (106, 118, Blue.TOMCAT),
        (119, 131, Blue.VSFTPD),
        (132, 144, Blue.RESTORE),
    ],
)
def test_action_ids_are_at_the_originals_positions(first: int, last: int, kind: Blue) -> None:
    assert set(t.KIND[first : last + 1]) == {kind}
    assert t.TARGET[first : last + 1].tolist() == list(range(13))
    assert action(kind, "Defender") == first and action(kind, "User4") == last


def test_there_are_145_actions_and_the_first_two_have_no_host() -> None:
    assert len(t.KIND) == len(t.ACTION_NAMES) == t.N_ACTIONS == 145
    assert (t.ACTION_NAMES[0], t.ACTION_NAMES[1], t.ACTION_NAMES[144]) == ("Sleep", "Monitor", "Restore User4")
    with pytest.raises(ValueError, match="expected a host"):
        action(Blue.RESTORE)


# Measured on a fresh network: the decoys that succeed.
DECOYS = {
    **{host: {Blue.APACHE, Blue.HARAKA, Blue.TOMCAT, Blue.VSFTPD} for host in LINUX_PLAIN},
    **{host: {Blue.FEMITTER} for host in ("Enterprise1", "Enterprise2")},
    **{host: {Blue.APACHE, Blue.SMSS, Blue.SVCHOST, Blue.TOMCAT} for host in ("User0", "User1")},
    "User2": {Blue.APACHE, Blue.FEMITTER, Blue.SSHD, Blue.TOMCAT},
    "User3": {Blue.SSHD, Blue.VSFTPD},
    "User4": {Blue.VSFTPD},
}


@pytest.mark.parametrize("host", t.HOSTS)
def test_the_decoys_that_a_fresh_host_takes(host: str) -> None:
    kinds = [kind for kind in Blue if Blue.APACHE <= kind <= Blue.VSFTPD]
    assert {kind for kind in kinds if t.DECOY_OPENS[action(kind, host)]} == DECOYS[host]


# What an exploit yields, columns FTP Haraka SQL HTTPS HTTP EternalBlue BlueKeep SSH.
EXPLOITS = {
    "Defender": "- - - - - - - -",
    **dict.fromkeys([*LINUX_PLAIN[1:]], "- - - - - - - u"),
    **dict.fromkeys(["Enterprise1", "Enterprise2"], "- - - u u - p u"),
    **dict.fromkeys(["User0", "User1"], "p - - - - - - u"),
    "User2": "- - - - - p u -",
    "User3": "- p - u u - - -",
    "User4": "- p p u u - - u",
}


@pytest.mark.parametrize("host", t.HOSTS)
def test_the_result_of_each_exploit(host: str) -> None:
    row = " ".join("-up"[level] for level in t.OUTCOME[t.INDEX[host]])
    assert row == EXPLOITS[host]
    # A port without a service has no effect.
    open_ports = t.OPEN_PORTS[t.INDEX[host]]
    assert all(open_ports >> kind & 1 for kind in np.flatnonzero(t.OUTCOME[t.INDEX[host]]))


def test_red_ranks_exploits_by_the_ports_it_saw_and_sql_wants_a_web_port_too() -> None:
    def ranked(*ports: int) -> list[str]:
        seen = t.ports_of(*ports)
        return [t.EXPLOITS[kind] for kind in t.EXPLOIT_ORDER[seen, : t.EXPLOIT_COUNT[seen]]]

    assert ranked(22, 3389, 139, 80, 443, 3390, 25, 21) == list(t.EXPLOITS)
    assert ranked(22, 3390) == ["SSH"] and ranked(3390, 80) == ["SQL", "HTTP"] and ranked() == []


def test_hosts_reveal_the_addresses_stored_on_them() -> None:
    revealed = {t.HOSTS[h]: t.HOSTS[t.MEMBERS[m, 0]] for h, m in enumerate(t.REVEALS) if m}
    assert revealed == {
        "User1": "Enterprise1",
        "User2": "Enterprise1",
        "User3": "Enterprise0",
        "User4": "Enterprise0",
        "Enterprise2": "Op_Server0",
    }


def test_the_cost_of_a_privileged_session_in_tenths() -> None:
    dear = {"Enterprise0", "Enterprise1", "Enterprise2", "Op_Server0"}
    for host in t.HOSTS:
        expected = 0 if host == "User0" else 10 if host in dear else 1
        assert t.COST[t.mask_of(host)] == expected
    assert t.COST[t.mask_of("User1", "Enterprise0", "Op_Server0")] == 21
