"""Does a defender keep to a workflow? What counts as a fix, when it complies, and what that is worth.

A fix is a Remove or a Restore. It complies when its target is of the type that comes first in the workflow among those
that are compromised in the truth BEFORE the action. Compromised is a host with any session of red's, except User0:
red's foothold there cannot be removed and would make "user" compromised for ever.

Cases that this leaves open, as they are decided here:

- Remove and Restore of User0 are no fixes at all: a policy that is paid for its rate would repeat them to pad it;
- a fix while nothing is compromised counts, and does not comply;
- a fix of a clean host complies if its type comes first. Such a Remove costs nothing, so a policy can still pad its
  rate with it; the strict rule, an option, wants the target itself compromised;
- an episode without a fix has the rate 0 and costs `no_fix_penalty` x lambda at its end;
- a gate asks for a least number of fixes, so that nobody passes it by hardly ever fixing anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.cage import tables as t

Bools = npt.NDArray[np.bool_]

_IS_FIX = np.isin(t.KIND, t.FIX_KINDS) & (t.TARGET != t.USER0)
_TYPE_OF_TARGET = t.UNIT_TYPE[t.TARGET]


def judge(
    actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], order: Sequence[int], *, strict: bool = False
) -> tuple[Bools, Bools]:
    """Which actions are fixes, and which of them comply: bool (n,) each.

    Args:
        actions: ids, (n,).
        before: true states before the actions, (n, 13), 0 for a clean host.
        order: the workflow.
        strict: whether the target itself must be compromised.
    """
    compromised = before > 0
    compromised[:, t.USER0] = False
    by_type = np.stack([compromised[:, kind == t.UNIT_TYPE].any(1) for kind in order], axis=1)
    first = np.asarray(order)[by_type.argmax(1)]
    fixes = _IS_FIX[actions]
    complied = fixes & by_type.any(1) & (_TYPE_OF_TARGET[actions] == first)
    if strict:
        complied &= compromised[np.arange(len(actions)), t.TARGET[actions]]
    return fixes, complied


@dataclass(slots=True)
class Alignment:
    """Counts fixes of running episodes and pays for compliance as it changes.

    The reward of a step is lambda times the change of the episode's rate, so an episode's sum is lambda x its final
    rate, whenever it was earned.

    Attributes:
        order: the workflow.
        weight: lambda.
        no_fix_penalty: share of lambda that an episode without a fix costs.
        strict: see `judge`.
        fixes, complied: int64 (n,), of the running episodes.
    """

    order: tuple[int, ...]
    weight: float
    no_fix_penalty: float
    strict: bool
    fixes: npt.NDArray[np.int64]
    complied: npt.NDArray[np.int64]

    @classmethod
    def begin(
        cls, n: int, order: Sequence[int], weight: float, *, no_fix_penalty: float = 0.2, strict: bool = False
    ) -> Alignment:
        return cls(tuple(order), weight, no_fix_penalty, strict, np.zeros(n, np.int64), np.zeros(n, np.int64))

    def step(
        self, actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], over: Bools
    ) -> npt.NDArray[np.float64]:
        """Count one step and return its alignment rewards, float64 (n,); `over` marks episodes that it ends."""
        rate = self.rates()
        fixes, complied = judge(actions, before, self.order, strict=self.strict)
        self.fixes += fixes
        self.complied += complied
        rewards = self.weight * (self.rates() - rate)
        rewards[over & (self.fixes == 0)] -= self.no_fix_penalty * self.weight
        return rewards

    def rates(self) -> npt.NDArray[np.float64]:
        """Complied by fixes so far, 0 without a fix; float64 (n,)."""
        rates: npt.NDArray[np.float64] = self.complied / np.maximum(self.fixes, 1)
        return rates


def pooled_rate(fixes: int, complied: int) -> float:
    """Of all fixes together, the share that complied; 0 without a fix."""
    return complied / fixes if fixes else 0.0
