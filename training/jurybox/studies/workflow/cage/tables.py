"""The network of CAGE Challenge 2 as tables: hosts, actions, exploits, knowledge, rewards.

Facts of CybORG 2.1, Scenario 2 (https://github.com/cage-challenge/cage-challenge-2), partly documented there and partly
measured on it. Hosts are indexed alphabetically; a set of hosts is a 13-bit mask, a set of ports an 8-bit mask.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

HOSTS = (
    "Defender",
    "Enterprise0",
    "Enterprise1",
    "Enterprise2",
    "Op_Host0",
    "Op_Host1",
    "Op_Host2",
    "Op_Server0",
    "User0",
    "User1",
    "User2",
    "User3",
    "User4",
)
N_HOSTS = len(HOSTS)
INDEX = {name: index for index, name in enumerate(HOSTS)}
USER0, OP_SERVER0, ENTERPRISE2 = INDEX["User0"], INDEX["Op_Server0"], INDEX["Enterprise2"]

# Types of units, in the order in which workflows are encoded.
UNIT_TYPES = ("defender", "enterprise", "op_server", "op_host", "user")
UNIT_TYPE = np.array([0, 1, 1, 1, 3, 3, 3, 2, 4, 4, 4, 4, 4])


def mask_of(*names: str) -> int:
    """The set of these hosts."""
    return sum(1 << INDEX[name] for name in names)


ENTERPRISE_HOSTS = mask_of("Enterprise0", "Enterprise1", "Enterprise2")
OPERATIONAL_HOSTS = mask_of("Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0")
USER_HOSTS = mask_of("User0", "User1", "User2", "User3", "User4")


class Subnet(IntEnum):
    """The three subnets; a set of them is a 3-bit mask."""

    USER = 0
    ENTERPRISE = 1
    OPERATIONAL = 2


SUBNET = np.array([1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0, 0])
SUBNET_HOSTS = np.array([USER_HOSTS, ENTERPRISE_HOSTS | mask_of("Defender"), OPERATIONAL_HOSTS])

WINDOWS = mask_of("Enterprise1", "Enterprise2", "User0", "User1", "User2")

# The relevant ports: each is the target of one exploit, in the order of red's preference.
PORTS = (21, 25, 3390, 443, 80, 139, 3389, 22)
EXPLOITS = ("FTP", "Haraka", "SQL", "HTTPS", "HTTP", "EternalBlue", "BlueKeep", "SSH")
SSH = EXPLOITS.index("SSH")


def ports_of(*numbers: int) -> int:
    """The set of these ports."""
    return sum(1 << PORTS.index(number) for number in numbers)


_LINUX_PLAIN, _ENTERPRISE_SERVER = ports_of(22), ports_of(22, 3389, 139, 80, 443)
OPEN_PORTS = np.array(
    [
        _LINUX_PLAIN,
        _LINUX_PLAIN,
        _ENTERPRISE_SERVER,
        _ENTERPRISE_SERVER,
        *[_LINUX_PLAIN] * 4,
        ports_of(22, 21),
        ports_of(22, 21),
        ports_of(139, 3389),
        ports_of(25, 80, 443, 3389),
        ports_of(22, 25, 80, 443, 3390),
    ]
)

# What an exploit of a host yields: 0 nothing, 1 a user's session, 2 a privileged one. Columns as EXPLOITS.
_SSH_ONLY, _SERVER, _FTP = [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 2, 1], [2, 0, 0, 0, 0, 0, 0, 1]
OUTCOME = np.array(
    [
        [0] * 8,
        _SSH_ONLY,
        _SERVER,
        _SERVER,
        *[_SSH_ONLY] * 4,
        _FTP,
        _FTP,
        [0, 0, 0, 0, 0, 2, 1, 0],
        [0, 2, 0, 1, 1, 0, 0, 0],
        [0, 2, 2, 1, 1, 0, 0, 1],
    ]
)
# Ports whose service answers the exploit aimed at them. EternalBlue finds no matching service on the
# Enterprise servers, nor BlueKeep on User3, where a database listens on the RDP port: these attempts are invisible.
ANSWERING_PORTS = OPEN_PORTS.copy()
ANSWERING_PORTS[[INDEX["Enterprise1"], INDEX["Enterprise2"]]] &= ~ports_of(139)
ANSWERING_PORTS[INDEX["User3"]] &= ~ports_of(3389)
# All ports that a scan finds open, also those that no exploit targets.
PORT_COUNT = np.array([3, 1, 7, 7, 1, 1, 1, 1, 2, 2, 4, 4, 5])
FEW_PORTS = 3  # fewer ports are no pattern
P_TOP_EXPLOIT = 0.75  # else one of the others, uniformly
P_DETECTED = 0.95  # of a reverse shell, by blue's sweep

# Addresses that escalating on a host reveals.
REVEALS = np.zeros(N_HOSTS, np.int64)
REVEALS[[INDEX["User1"], INDEX["User2"]]] = mask_of("Enterprise1")
REVEALS[[INDEX["User3"], INDEX["User4"]]] = mask_of("Enterprise0")
REVEALS[ENTERPRISE2] = mask_of("Op_Server0")


class Blue(IntEnum):
    """Kinds of actions of the defender, in the order of their ids."""

    SLEEP = 0
    MONITOR = 1
    ANALYSE = 2
    REMOVE = 3
    APACHE = 4
    FEMITTER = 5
    HARAKA = 6
    SMSS = 7
    SSHD = 8
    SVCHOST = 9
    TOMCAT = 10
    VSFTPD = 11
    RESTORE = 12


N_ACTIONS = 145
KIND = np.array([0, 1, *np.repeat(np.arange(2, 13), N_HOSTS)])
TARGET = np.array([0, 0, *np.tile(np.arange(N_HOSTS), 11)])
_VERBS = ("Analyse", "Remove", *(f"Decoy{name}" for name in ("Apache", "Femitter", "HarakaSMPT", "Smss", "SSHD")))
_VERBS += ("DecoySvchost", "DecoyTomcat", "DecoyVsftpd", "Restore")
ACTION_NAMES = ("Sleep", "Monitor", *(f"{verb} {host}" for verb in _VERBS for host in HOSTS))

# Port that a decoy opens. Vsftpd's checks that 21 is free, but then opens 80, even if 80 is taken.
_DECOY_PORT = {
    Blue.APACHE: 80,
    Blue.FEMITTER: 21,
    Blue.HARAKA: 25,
    Blue.SMSS: 139,
    Blue.SSHD: 22,
    Blue.SVCHOST: 3389,
    Blue.TOMCAT: 443,
    Blue.VSFTPD: 80,
}
_WINDOWS_ONLY, _LINUX_ONLY = (Blue.FEMITTER, Blue.SMSS, Blue.SVCHOST), (Blue.HARAKA, Blue.VSFTPD)


def action(kind: Blue, host: str | int | None = None) -> int:
    """The id of an action."""
    if kind in (Blue.SLEEP, Blue.MONITOR):
        return int(kind)
    if host is None:
        raise ValueError(f"expected a host for {kind.name}, got none: it is one of {', '.join(HOSTS)}")
    return 2 + (kind - 2) * N_HOSTS + (INDEX[host] if isinstance(host, str) else host)


def _targets(kind: Blue) -> Ints:
    return np.where(kind == KIND, 1 << TARGET, 0)


ANALYSE_HOST, REMOVE_HOST, RESTORE_HOST = _targets(Blue.ANALYSE), _targets(Blue.REMOVE), _targets(Blue.RESTORE)
# Per action: the port a decoy opens if the host allows it (else 0), and the ports that must be free of decoys.
DECOY_OPENS = np.zeros(N_ACTIONS, np.int64)
DECOY_NEEDS = np.zeros(N_ACTIONS, np.int64)
for _id in range(N_ACTIONS):
    _kind, _host = Blue(KIND[_id]), int(TARGET[_id])
    if _kind in _DECOY_PORT:
        _windows = bool(WINDOWS >> _host & 1)
        _port = ports_of(_DECOY_PORT[_kind])
        _checked = ports_of(21) if _kind == Blue.VSFTPD else _port
        _runs = not (_kind in _WINDOWS_ONLY and not _windows) and not (_kind in _LINUX_ONLY and _windows)
        if _runs and not _checked & OPEN_PORTS[_host]:
            DECOY_OPENS[_id], DECOY_NEEDS[_id] = _port, 0 if _kind == Blue.VSFTPD else _port
# Actions that may have an effect on a new network.
POSSIBLE = (DECOY_OPENS > 0) | (KIND < Blue.APACHE) | (KIND == Blue.RESTORE)

FIX_KINDS = (Blue.REMOVE, Blue.RESTORE)

# Rewards a step, in tenths so that sums stay exact.
_LOW, _HIGH = 1, 10
HOST_COST = np.array([_LOW, _HIGH, _HIGH, _HIGH, _LOW, _LOW, _LOW, _HIGH, 0, _LOW, _LOW, _LOW, _LOW])
IMPACT_COST, RESTORE_COST = 100, 10

# Lookups by mask.
BITS = (np.arange(1 << N_HOSTS)[:, None] >> np.arange(N_HOSTS) & 1).astype(np.int8)
COST = BITS @ HOST_COST
COUNT = BITS.sum(1, dtype=np.int64)


def _members(bits: npt.NDArray[Any]) -> Ints:
    """Row m: the members of set m in ascending order, padded with 0."""
    count = bits.sum(1)
    order = np.argsort(-bits, axis=1, kind="stable")
    return np.where(np.arange(bits.shape[1]) < count[:, None], order, 0)


MEMBERS = _members(BITS)  # (8192, 13)

# Exploits open to red by the ports it has seen, best first: (256, 8) and how many. SQL also needs a web port.
_KNOWN = np.arange(256)[:, None] >> np.arange(8) & 1
N_PORTS = _KNOWN.sum(1)  # of sets of ports
_CANDIDATES = _KNOWN.copy()
_CANDIDATES[:, 2] &= _KNOWN[:, 3] | _KNOWN[:, 4]
EXPLOIT_ORDER = _members(_CANDIDATES)
EXPLOIT_COUNT = _CANDIDATES.sum(1)
