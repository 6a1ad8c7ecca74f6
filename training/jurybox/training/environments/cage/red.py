"""The two attackers of CAGE Challenge 2, over many networks at once: B_line and Meander.

Each is told what came of its last action and says what it does next, a verb and a target per network: a host, or for
a sweep a subnet. What they know of a network they learned by their own actions.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.cage import tables as t

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Verb(IntEnum):
    """What red can do."""

    SWEEP = 0
    SCAN = 1
    EXPLOIT = 2
    ESCALATE = 3
    IMPACT = 4
    SLEEP = 5


class Red(Protocol):
    """An attacker of (n,) networks.

    What it has heard of are masks, int64 (n,): `known` hosts, `scanned` hosts, whose ports it has seen, and `subnets`.
    """

    def reset(self, which: Bools, chance: Floats) -> None:
        """Begin anew in these networks; `chance` is uniform in [0, 1), (n,)."""

    def choose(
        self, success: Bools, known: t.Ints, scanned: t.Ints, subnets: t.Ints, chance: Floats
    ) -> tuple[t.Ints, t.Ints]:
        """Verbs and targets, int64 (n,) each, given whether the last action succeeded."""


# B_line's stages: verb, next stage after failure.
_VERBS = np.array([0, 1, 2, 3, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 4])
_AFTER_FAILURE = np.array([0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13])
_LAST = len(_VERBS) - 1
_SCAN_ENTRY, _EXPLOIT_SERVER = 1, 12
_OP_SERVER, _FOOTHOLD = 1 << t.OP_SERVER0, 1 << t.USER0
_ENTRIES = np.array([t.INDEX[f"User{number}"] for number in (1, 2, 3, 4)])
# By entry (row) and stage: the target. The entry knows one Enterprise host, that is where it goes on.
_TARGETS = np.zeros((t.N_HOSTS, len(_VERBS)), np.int64)
for _entry in _ENTRIES:
    _revealed = t.MEMBERS[t.REVEALS[_entry], 0]
    _TARGETS[_entry] = (
        [t.Subnet.USER, *[_entry] * 3, *[_revealed] * 3, t.Subnet.ENTERPRISE] + [t.ENTERPRISE2] * 3 + [t.OP_SERVER0] * 4
    )


class BLine:
    """Goes straight for Op_Server0: a user host drawn once, the Enterprise host that it knows, Enterprise2."""

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
        # A scan of Op_Server0 that found the way closed has succeeded and shown nothing to exploit.
        self.stage = np.where((stage == _EXPLOIT_SERVER) & (scanned & _OP_SERVER == 0), _SCAN_ENTRY, stage)
        return _VERBS[self.stage], _TARGETS[self.entry, self.stage]


class Meander:
    """Takes every host that it hears of, in random order, and Impact whenever it believes to own Op_Server0.

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
        # From the least urgent to the most: exploit, escalate, scan, sweep, Impact.
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
        """A failed exploit costs it all Op hosts, or having none all Enterprise hosts; else only the host is lost."""
        bit = 1 << self.target
        lost_address = (self.verb == Verb.EXPLOIT) & ~success
        lost_host = ((self.verb == Verb.ESCALATE) | (self.verb == Verb.IMPACT)) & ~success
        operational = self.owned & t.OPERATIONAL_HOSTS
        region = np.where(operational > 0, operational, self.owned & t.ENTERPRISE_HOSTS)
        self.owned &= ~(np.where(lost_address, region, 0) | np.where(lost_host, bit, 0))
        self.exploited &= ~(np.where(lost_address, region | bit, 0) | np.where(lost_host, bit, 0))


REDS: dict[str, Callable[[int], Red]] = {"B_line": BLine, "Meander": Meander}
