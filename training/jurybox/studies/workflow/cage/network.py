"""CAGE Challenge 2 over many networks at once: the attackers, B_line and Meander, and the networks they attack."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.cage import tables as t

# Each attacker gets the success of its last action and returns the next, a verb and a target per network: a host, or
# for a sweep a subnet. Attackers know of a network only what their own actions revealed.


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Verb(IntEnum):
    """Actions of red."""

    SWEEP = 0
    SCAN = 1
    EXPLOIT = 2
    ESCALATE = 3
    IMPACT = 4
    SLEEP = 5


class Red(Protocol):
    """An attacker of (n,) networks.

    Its knowledge is masks, int64 (n,): `known` hosts, `scanned` hosts, whose ports it has seen, and `subnets`.
    """

    def reset(self, which: Bools, chance: Floats) -> None:
        """Reset these networks; `chance` is uniform in [0, 1), (n,)."""

    def choose(
        self, success: Bools, known: t.Ints, scanned: t.Ints, subnets: t.Ints, chance: Floats
    ) -> tuple[t.Ints, t.Ints]:
        """Return verbs and targets, int64 (n,) each, given whether the last action succeeded."""


# B_line's stages: verb, next stage after failure.
_VERBS = np.array([0, 1, 2, 3, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 4])
_AFTER_FAILURE = np.array([0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13])
_LAST = len(_VERBS) - 1
_SCAN_ENTRY, _EXPLOIT_SERVER = 1, 12
_OP_SERVER, _FOOTHOLD = 1 << t.OP_SERVER0, 1 << t.USER0
_ENTRIES = np.array([t.INDEX[f"User{number}"] for number in (1, 2, 3, 4)])
# By entry (row) and stage: the target. The entry host reveals one Enterprise host, the next target.
_TARGETS = np.zeros((t.N_HOSTS, len(_VERBS)), np.int64)
for _entry in _ENTRIES:
    _revealed = t.MEMBERS[t.REVEALS[_entry], 0]
    _TARGETS[_entry] = (
        [t.Subnet.USER, *[_entry] * 3, *[_revealed] * 3, t.Subnet.ENTERPRISE] + [t.ENTERPRISE2] * 3 + [t.OP_SERVER0] * 4
    )


class BLine:
    """Takes the shortest path to Op_Server0: a random user host, the known Enterprise host, Enterprise2."""

    def __init__(self, n: int) -> None:
        self.stage = np.zeros(n, np.int64)
        self.entry = np.full(n, _ENTRIES[0])

    def reset(self, which: Bools, chance: Floats) -> None:
        self.stage[which] = 0
        self.entry[which] = _ENTRIES[(chance[which] * len(_ENTRIES)).astype(np.int64)]

    def choose(
        self, success: Bools, known: t.Ints, scanned: t.Ints, subnets: t.Ints, chance: Floats
    ) -> tuple[t.Ints, t.Ints]:
        stage = np.where(success, np.minimum(self.stage + 1, _LAST), _AFTER_FAILURE[self.stage])
        # A scan of Op_Server0 over a closed path succeeds, but reveals nothing to exploit.
        self.stage = np.where((stage == _EXPLOIT_SERVER) & (scanned & _OP_SERVER == 0), _SCAN_ENTRY, stage)
        return _VERBS[self.stage], _TARGETS[self.entry, self.stage]


class Meander:
    """Attacks all known hosts in random order, and uses Impact when it believes that it owns Op_Server0.

    It escalates on its foothold User0 first, and later exploits it like any other.
    """

    def __init__(self, n: int) -> None:
        self.swept = np.zeros(n, np.int64)  # subnets
        self.scanned = np.zeros(n, np.int64)
        self.exploited = np.zeros(n, np.int64)
        self.owned = np.zeros(n, np.int64)
        self.verb = np.full(n, int(Verb.SLEEP))
        self.target = np.zeros(n, np.int64)

    def reset(self, which: Bools, chance: Floats) -> None:
        for each in (self.swept, self.scanned, self.exploited, self.owned, self.target):
            each[which] = 0
        self.verb[which] = Verb.SLEEP

    def choose(
        self, success: Bools, known: t.Ints, scanned: t.Ints, subnets: t.Ints, chance: Floats
    ) -> tuple[t.Ints, t.Ints]:
        self._forget(success)
        options = np.stack(
            [
                subnets & ~self.swept,
                known & ~self.scanned,
                known & ~self.exploited,
                (self.exploited | _FOOTHOLD) & ~self.owned,
                self.owned & _OP_SERVER,
            ]
        )
        # In ascending priority: exploit, escalate, scan, sweep, Impact.
        verb = np.full(len(success), int(Verb.SLEEP))
        option = np.zeros_like(verb)
        for each in (Verb.EXPLOIT, Verb.ESCALATE, Verb.SCAN, Verb.SWEEP, Verb.IMPACT):
            some = options[each] > 0
            verb = np.where(some, each, verb)
            option = np.where(some, options[each], option)
        target = t.MEMBERS[option, (chance * t.COUNT[option]).astype(np.int64)]
        bit = 1 << target
        self.swept |= np.where(verb == Verb.SWEEP, bit, 0)
        self.scanned |= np.where(verb == Verb.SCAN, bit, 0)
        self.exploited |= np.where(verb == Verb.EXPLOIT, bit, 0)
        self.owned |= np.where(verb == Verb.ESCALATE, bit, 0)
        self.verb, self.target = verb, target
        return verb, target

    def _forget(self, success: Bools) -> None:
        """After a failed exploit forget all Op hosts, or if there are none all Enterprise hosts; else only the host."""
        bit = 1 << self.target
        lost_address = (self.verb == Verb.EXPLOIT) & ~success
        lost_host = ((self.verb == Verb.ESCALATE) | (self.verb == Verb.IMPACT)) & ~success
        operational = self.owned & t.OPERATIONAL_HOSTS
        region = np.where(operational > 0, operational, self.owned & t.ENTERPRISE_HOSTS)
        self.owned &= ~(np.where(lost_address, region, 0) | np.where(lost_host, bit, 0))
        self.exploited &= ~(np.where(lost_address, region | bit, 0) | np.where(lost_host, bit, 0))


REDS: dict[str, Callable[[int], Red]] = {"B_line": BLine, "Meander": Meander}


# Many networks of CAGE Challenge 2, stepped at once: one row of every array is one network, sets of hosts are masks.
#
# A step is blue's action, red's action, then blue's monitor sweep and the reward; green sleeps. At most two hosts
# change in a step, blue's and red's target, so nothing here loops over hosts.


RedName = Literal["B_line", "Meander"]
"""The attacker: one that goes straight for the operational server, or one that takes host after host."""

_SCAN, _EXPLOIT = (1, 0), (1, 1)  # activity bits
# Belief bits.
_UNKNOWN, _USER, _PRIVILEGED = (1, 0), (0, 1), (1, 1)


class Networks:
    """`n` networks.

    Args:
        red: "B_line" or "Meander".
        quirk: behave as CybORG 2.1: after a restore of Op_Server0, Impact costs nothing in the rest of the episode.
            Without it, use the documented rule: the service is down from a successful Impact to the next restore.
        seed: of everything random.

    Attributes:
        belief: int8 (n, 13, 4), what blue sees: per host two bits of activity in this step (none 00, scan 10,
            exploit 11) and two of compromise (no 00, unknown 10, user 01, privileged 11).
        shells, sticky, root: sets of hosts with a red session: unprivileged and seen by the monitor with its process,
            so that Remove ends it; unprivileged and not removable; privileged.
        files: hosts with a file that Analyse finds.
        decoys: int64 (n, 13), ports that decoys hold.
        known, scanned, subnets: the hosts red knows, the hosts it has scanned, and the subnets it knows.
        down: int64 (n,), 1 where OTService of Op_Server0 is down.
        flagged: hosts on which this step's sweep saw a process of red's.
    """

    def __init__(self, n: int, red: RedName = "B_line", *, quirk: bool = False, seed: int | None = None) -> None:
        if red not in REDS:
            raise ValueError(f"expected a red agent of {', '.join(REDS)}, got {red!r}")
        self.n = n
        self.quirk = quirk
        self.random = np.random.default_rng(seed)
        self.red: Red = REDS[red](n)
        self._rows = np.arange(n)
        self.belief = np.zeros((n, t.N_HOSTS, 4), np.int8)
        self.decoys = np.zeros((n, t.N_HOSTS), np.int64)
        self.ports = np.zeros((n, t.N_HOSTS), np.int64)  # ports that red has seen
        self.shells, self.sticky, self.root, self.files = (np.zeros(n, np.int64) for _ in range(4))
        self.known, self.scanned, self.subnets = (np.zeros(n, np.int64) for _ in range(3))
        self.down, self.flagged, self._spared, self._placed = (np.zeros(n, np.int64) for _ in range(4))
        self._success = np.zeros(n, np.bool_)
        self.reset(np.ones(n, np.bool_))

    def reset(self, which: Bools) -> None:
        """Begin a new episode in these networks, bool (n,)."""
        for each in (self.belief, self.decoys, self.ports, self.shells, self.sticky, self.files):
            each[which] = 0
        for each in (self.scanned, self.down, self.flagged, self._spared):
            each[which] = 0
        self.root[which] = self.known[which] = _FOOTHOLD
        self.subnets[which] = 1 << t.Subnet.USER
        self._success[which] = False
        self.red.reset(which, self.random.random(self.n))

    @property
    def sessions(self) -> t.Ints:
        """Return the hosts with any red session, as masks (n,)."""
        return self.shells | self.sticky | self.root

    def true_state(self) -> npt.NDArray[np.int8]:
        """Return the true state by host: 0 clean, 1 a user session, 2 a privileged one; int8 (n, 13)."""
        state: npt.NDArray[np.int8] = t.BITS[self.sessions] + t.BITS[self.root]
        return state

    def possible(self) -> Bools:
        """Return masks without actions that must fail, bool (n, 145): a decoy needs its system and a free port."""
        free = (self.decoys[:, t.TARGET] & t.DECOY_NEEDS) == 0
        mask: Bools = t.POSSIBLE & free
        return mask

    def step(self, actions: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Execute blue's actions, ids (n,), then red's; returns the rewards, float64 (n,)."""
        found = self._defend(actions)
        self.belief[:, :, :2] = 0
        chance = self.random.random((4, self.n))
        verb, target = self.red.choose(self._success, self.known, self.scanned, self.subnets, chance[0])
        self._attack(verb, target, chance[1:])
        self._set_belief(self._rows[found > 0], t.TARGET[actions[found > 0]], 2, _PRIVILEGED)
        restored = t.RESTORE_HOST[actions] > 0
        tenths = t.COST[self.root] + t.IMPACT_COST * self.down + t.RESTORE_COST * restored
        rewards: npt.NDArray[np.float64] = tenths / -10.0
        return rewards

    def _defend(self, actions: npt.NDArray[Any]) -> t.Ints:
        """Execute blue's actions; returns the sets of hosts on which Analyse found something."""
        removed, restored = t.REMOVE_HOST[actions], t.RESTORE_HOST[actions]
        self.shells &= ~(removed | restored)
        self.sticky &= ~restored
        self.root &= ~restored | _FOOTHOLD
        found: t.Ints = t.ANALYSE_HOST[actions] & self.files
        self.files &= ~restored
        served = restored & _OP_SERVER > 0
        self.down[served] = 0
        if self.quirk:
            self._spared[served] = 1
        rows, host = self._rows, t.TARGET[actions]
        decoys = self.decoys[rows, host]
        opened = np.where(decoys & t.DECOY_NEEDS[actions], 0, t.DECOY_OPENS[actions])
        self.decoys[rows, host] = np.where(restored > 0, 0, decoys | opened)
        self._placed = np.where(opened > 0, 1 << host, 0)
        changed = (removed | restored) > 0
        rows, host = rows[changed], host[changed]
        belief = self.belief[rows, host, 2:]
        doubtful = (belief.any(1) & (removed[changed] > 0))[:, None]
        self.belief[rows, host, 2:] = np.where(doubtful, np.array(_UNKNOWN, np.int8), np.int8(0))
        return found

    def _attack(self, verb: t.Ints, target: t.Ints, chance: npt.NDArray[np.float64]) -> None:
        rows = self._rows
        sweep, scan, exploit = verb == Verb.SWEEP, verb == Verb.SCAN, verb == Verb.EXPLOIT
        host = np.where(sweep, 0, target)
        bit = 1 << host
        sessions = self.sessions
        subnet = np.where(sweep, target, t.SUBNET[host])
        open_way = (subnet != t.Subnet.OPERATIONAL) | (sessions & t.ENTERPRISE_HOSTS > 0)
        success = (sweep & open_way) | scan  # a scan that gets no answer is a success too
        self.known |= np.where(sweep & open_way, t.SUBNET_HOSTS[subnet], 0)

        scanning = scan & open_way
        decoys, ports = self.decoys[rows, host], self.ports[rows, host]
        self.ports[rows, host] = np.where(scanning, t.OPEN_PORTS[host] | decoys, ports)
        self.scanned |= np.where(scanning, bit, 0)

        escalate = (verb == Verb.ESCALATE) & (sessions & bit > 0)
        fresh = self.root & bit == 0  # hosts that are privileged already need no tool
        self.known |= np.where(escalate, t.REVEALS[host], 0)
        self.subnets |= np.where(escalate, 1 << subnet, 0)

        impact = (verb == Verb.IMPACT) & (self.root & _OP_SERVER > 0)
        self.down |= impact & (self._spared == 0)

        many = t.EXPLOIT_COUNT[ports]
        place = np.where(chance[0] < t.P_TOP_EXPLOIT, 0, 1 + (chance[1] * (many - 1)).astype(np.int64))
        kind = t.EXPLOIT_ORDER[ports, np.where(many > 1, place, 0)]
        trying = exploit & open_way & (many > 0)
        # Where a decoy shares a real service's port, the real one answers.
        real, fake = t.ANSWERING_PORTS[host] >> kind & 1, decoys >> kind & 1
        outcome = np.where(trying & (real > 0), t.OUTCOME[host, kind], 0)
        won, shell = outcome > 0, kind != t.SSH
        seen = won & shell & (chance[2] < t.P_DETECTED)
        user = np.where(outcome == 1, bit, 0)
        self.shells |= np.where(seen, user, 0)
        self.sticky |= np.where(seen, 0, user)
        self.root |= np.where((outcome == 2) | escalate, bit, 0)
        self.files |= np.where((won & shell) | (escalate & fresh), bit, 0)
        self.flagged = np.where(seen, bit, 0)
        self._success = success | escalate | impact | won

        noticed = trying & ((real | fake) > 0)
        # A decoy deployed in this step is also an event. It hides events without a pattern. With the two connections of
        # an exploit that met a decoy there are three events at one port, which is a pattern.
        beside = self._placed & bit > 0
        few = t.PORT_COUNT[host] + t.N_PORTS[decoys & ~t.OPEN_PORTS[host]] < t.FEW_PORTS
        # Ten password attempts are recognised, successful or not; so is a reverse shell, if it is detected.
        exploits = noticed & (seen | ~shell | (beside & (real == 0)))
        rows = self._rows[exploits]
        self._set_belief(rows, host[exploits], 0, _EXPLOIT)
        self._set_belief(rows, host[exploits], 2, _USER)
        scans = (noticed & ~exploits & ~beside) | (scanning & ~(beside & few))
        self._set_belief(self._rows[scans], host[scans], 0, _SCAN)

    def _set_belief(self, rows: t.Ints, hosts: t.Ints, first: int, bits: tuple[int, int]) -> None:
        self.belief[rows, hosts, first] = bits[0]
        self.belief[rows, hosts, first + 1] = bits[1]
