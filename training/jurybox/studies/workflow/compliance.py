"""Compliance of a defender with a workflow: which fixes are judged, when they comply, what the reward is, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.settings import ENCODED, N_TYPES, GateOn

# Compliance of a defender with a workflow: which fixes are judged, when they comply, and what the reward is.
#
# A fix is a Remove or a Restore. A host is compromised if red has any session on it, except User0: red's foothold there
# cannot be removed and would keep "user" compromised for ever. There are two metrics:
#
# - compliance, the first definition: of ALL fixes, the share whose target is of the type that comes first in the
#   workflow among the truly compromised types before the action. It can be inflated: a Remove of a clean host is free
#   and complies if its type comes first, and where only one type is compromised all orders agree;
# - obedience, which the gate uses by default: counts only JUDGED fixes. A fix is judged if hosts of two types or more
#   were compromised before it, so that the workflow sets a priority, and if it changed the true state: its
#   target was compromised, and less so afterwards. Repeated and idle fixes count for nothing.
#
# A fix that red undoes within the same step has not changed the true state.


Bools = npt.NDArray[np.bool_]

_IS_FIX = np.isin(t.KIND, t.FIX_KINDS) & (t.TARGET != t.USER0)
_TYPE_OF_TARGET = t.UNIT_TYPE[t.TARGET]
_HOSTS_OF_TYPE = np.eye(N_TYPES, dtype=np.int64)[t.UNIT_TYPE]  # (13, 5)
_HOSTS_OF_TYPE[t.USER0] = 0
_NOWHERE = N_TYPES  # a place after all others


@dataclass(frozen=True, slots=True)
class Orders:
    """The workflows of n networks; some may have none.

    Attributes:
        given: bool (n,), which networks have one.
        places: int64 (n, 5), the place of each type in the workflow, from 0; zeros without a workflow.
        encoded: float32 (n, 25), the policy's input; zeros without a workflow.
    """

    given: Bools
    places: npt.NDArray[np.int64]
    encoded: npt.NDArray[np.float32]

    @classmethod
    def of(cls, order: Sequence[int] | npt.NDArray[np.int64] | None, n: int) -> Orders:
        """Create from one workflow (or None) for all networks, or from int (n, 5), one each, rows of -1 for none."""
        rows = np.broadcast_to(np.full(N_TYPES, -1) if order is None else np.asarray(order), (n, N_TYPES))
        given: Bools = rows[:, 0] >= 0
        sure = np.where(given[:, None], rows, np.arange(N_TYPES))
        one_hot = np.eye(N_TYPES, dtype=np.float32)[sure].reshape(n, ENCODED)
        places = np.where(given[:, None], np.argsort(sure, axis=1), 0)
        return cls(given, places, one_hot * given[:, None])

    def first(self, types: Bools) -> npt.NDArray[np.int64]:
        """Return which of these types, bool (n, 5), comes first, (n,)."""
        first: npt.NDArray[np.int64] = np.where(types, self.places, _NOWHERE).argmin(1)
        return first


def types_of(hosts: Bools) -> Bools:
    """Return the types of these hosts without User0: bool (n, 5) for bool (n, 13)."""
    found: Bools = hosts @ _HOSTS_OF_TYPE > 0
    return found


def judge(actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], orders: Orders) -> tuple[Bools, Bools]:
    """Return which actions are fixes, and which of them comply by the first definition: bool (n,) each.

    Args:
        actions: ids, (n,).
        before: true states before the actions, (n, 13), 0 for a clean host.
        orders: the workflows.
    """
    types = types_of(before > 0)
    fixes: Bools = _IS_FIX[actions]
    return fixes, fixes & types.any(1) & (_TYPE_OF_TARGET[actions] == orders.first(types)) & orders.given


def judge_changes(
    actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], after: npt.NDArray[np.int8], orders: Orders
) -> tuple[Bools, Bools]:
    """Return which actions are judged fixes, and which of them comply: bool (n,) each.

    Args:
        actions, before, orders: see `judge`.
        after: true states after the step.
    """
    rows, targets = np.arange(len(actions)), t.TARGET[actions]
    types = types_of(before > 0)
    changed = _IS_FIX[actions] & (after[rows, targets] < before[rows, targets])
    judged: Bools = changed & (types.sum(1) >= 2) & orders.given
    return judged, judged & (_TYPE_OF_TARGET[actions] == orders.first(types))


class Doubts:
    """The defender's memory of n networks: the hosts with activity since it last checked them.

    One reverse shell in twenty goes unseen: the exploit looks like a scan, and the defender believes the host clean. An
    Analyse finds the file that it leaves. So a host on which there was any activity is in doubt until it was analysed
    or restored, and one that is believed compromised until it was restored: a Remove leaves it in doubt, too.

    Attributes:
        stirred: bool (n, 13), activity since the last Analyse or Restore.
    """

    def __init__(self, n: int) -> None:
        self.stirred: Bools = np.zeros((n, t.N_HOSTS), np.bool_)

    def see(self, actions: npt.NDArray[np.int64], observations: npt.NDArray[Any]) -> None:
        """Record the actions of a step and the observations after it, (n, 52)."""
        cleared = np.flatnonzero(_RESETS_DOUBT[actions])
        self.stirred[cleared, t.TARGET[actions[cleared]]] = False
        self.stirred |= _by_host(observations)[:, :, :2].any(2)

    def hosts(self, observations: npt.NDArray[Any]) -> Bools:
        """Return the hosts that may be compromised, bool (n, 13)."""
        believed = _by_host(observations)[:, :, 2:].any(2)
        in_doubt: Bools = np.logical_or(self.stirred, believed)
        return in_doubt


_RESETS_DOUBT = np.isin(t.KIND, (t.Blue.ANALYSE, t.Blue.RESTORE))


def _by_host(observations: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return observations.reshape(len(observations), t.N_HOSTS, 4)


def order_masks(in_doubt: Bools, orders: Orders) -> Bools:
    """Return masks without fixes that may be out of order, bool (n, 145).

    Where hosts of two types or more may be compromised (see `Doubts`), only those of the type that comes first may be
    fixed.

    Args:
        in_doubt: bool (n, 13).
    """
    types = types_of(in_doubt)
    held = (types.sum(1) >= 2) & orders.given
    out_of_order = _IS_FIX & (orders.first(types)[:, None] != _TYPE_OF_TARGET)
    masks: Bools = ~(out_of_order & held[:, None])
    return masks


def in_turn(in_doubt: Bools, orders: Orders) -> Bools:
    """Return the hosts in doubt that may be fixed next, bool (n, 13): those of the type that comes first among them.

    Without an order these are all hosts in doubt. User0 never is.

    Args:
        in_doubt: bool (n, 13), see `Doubts`.

    Example:
        >>> in_doubt = np.zeros((1, 13), np.bool_)
        >>> in_doubt[0, [t.INDEX["User1"], t.INDEX["Enterprise0"]]] = True
        >>> in_turn(in_doubt, Orders.of((4, 3, 2, 1, 0), 1))[0].nonzero()[0] == [t.INDEX["User1"]]
        array([ True])
    """
    fixable = in_doubt.copy()
    fixable[:, t.USER0] = False
    first = orders.first(types_of(fixable))
    turn: Bools = fixable & ((first[:, None] == t.UNIT_TYPE) | ~orders.given[:, None])
    return turn


@dataclass(slots=True)
class Alignment:
    """Counts the fixes of running episodes, and computes what those out of order cost, and those in order gain.

    A fix that does not comply costs `weight`; one that complies gains `reward`, 0 unless set: a reward encourages
    letting the attacker in, to have something to fix in order, and with "compliance" also padding with idle fixes. So
    it is meant to be withdrawn by a schedule.

    Attributes:
        orders: the workflows. weight: lambda. reward: of a fix that complies. on: the fixes that cost and gain, the
            judged ones ("obedience") or all ("compliance").
        fixes, complied: int64 (n,), of the running episodes, by the first definition; counted in place.
        judged, obeyed: int64 (n,), fixes that are judged and those of them that comply.
    """

    orders: Orders
    weight: float
    reward: float
    on: GateOn
    fixes: npt.NDArray[np.int64]
    complied: npt.NDArray[np.int64]
    judged: npt.NDArray[np.int64]
    obeyed: npt.NDArray[np.int64]

    def step(
        self, actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], after: npt.NDArray[np.int8]
    ) -> npt.NDArray[np.float64]:
        """Count one step, and return its rewards, float64 (n,)."""
        fixes, complied = judge(actions, before, self.orders)
        judged, obeyed = judge_changes(actions, before, after, self.orders)
        self.fixes += fixes
        self.complied += complied
        self.judged += judged
        self.obeyed += obeyed
        counted, kept = (judged, obeyed) if self.on == "obedience" else (fixes & self.orders.given, complied)
        rewards: npt.NDArray[np.float64] = self.reward * kept - self.weight * (counted & ~kept)
        return rewards
