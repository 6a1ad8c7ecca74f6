"""Opponents: fixed anchors, and a pool of past policies chosen by prioritised fictitious self-play.

The weighting is that of O. Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement learning"
(Nature 575, 2019, Methods): an opponent is drawn in proportion to f(p), where p is the chance to win against it;
f_hard(p) = (1 - p)^k prefers those that still win, f_var(p) = p (1 - p) those of equal strength.

The league knows names only, "anchor:weak" or "pool:17". Its owner maps names to players (a bot, a pinned version on the
policy server, weights in memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["League", "LeagueSettings"]

Weighting = Literal["hard", "variance"]


@dataclass(frozen=True, slots=True)
class LeagueSettings:
    """Settings of the choice of opponents.

    Attributes:
        anchors: names without "anchor:"; they are never removed.
        anchor_share: probability that the next opponent is an anchor (uniformly) while the pool is not empty.
        pool: maximum number of past policies; a new one replaces the oldest.
        weighting: "variance" (f_var) or "hard" (f_hard).
        hardness: k of f_hard.
        least_games: a pool member with fewer (decayed) games than this weighs as much as any member can.
        decay: factor for all earlier games of a pair at each new game, so that old results of an improving learner
            lose weight; 1 forgets nothing.
    """

    anchors: tuple[str, ...] = ("weak", "strong")
    anchor_share: float = 0.5
    pool: int = 25
    weighting: Weighting = "variance"
    hardness: float = 2.0
    least_games: float = 10.0
    decay: float = 0.99

    def __post_init__(self) -> None:
        if not self.anchors:
            raise ValueError("a league needs at least one anchor: there is nobody else to play against at the start")
        if not 0 <= self.anchor_share <= 1 or not 0 < self.decay <= 1 or self.pool < 0:
            raise ValueError("expected 0 <= anchor_share <= 1, 0 < decay <= 1 and pool >= 0")
        if self.weighting not in ("hard", "variance"):
            raise ValueError(f"weighting={self.weighting!r} is unknown: expected 'hard' or 'variance'")


def draw(odds: Mapping[str, float], rng: np.random.Generator) -> str:
    """Draw one of these names with the given probabilities."""
    return list(odds)[int(rng.choice(len(odds), p=list(odds.values())))]


class League:
    """Chooses opponents for one learner, and records the results.

    Args:
        settings: see `LeagueSettings`.
    """

    def __init__(self, settings: LeagueSettings | None = None) -> None:
        self.settings = settings or LeagueSettings()
        self.anchors = tuple(f"anchor:{name}" for name in self.settings.anchors)
        self.pool: list[str] = []
        self._games: dict[str, npt.NDArray[np.float64]] = {}  # the learner's decayed wins, ties and losses

    def add(self, version: int) -> tuple[str, str | None]:
        """Add the current learner to the pool.

        Args:
            version: of its weights; not in the pool yet.

        Returns:
            Its name, and the name of the member that it replaces.
        """
        name = f"pool:{version}"
        if name in self.pool:
            raise ValueError(f"{name} is in the pool already: expected the version of newer weights")
        if not self.settings.pool:
            raise ValueError("this league has no pool: make it with pool >= 1")
        left = self.pool.pop(0) if len(self.pool) >= self.settings.pool else None
        if left is not None:
            self._games.pop(left, None)
        self.pool.append(name)
        return name, left

    def chances(self) -> npt.NDArray[np.float64]:
        """(len(pool),) probabilities of the members, given that one of the pool is chosen."""
        weights = np.array([self._weight(name) for name in self.pool])
        total = weights.sum()
        if total <= 0:  # all of them always win, or always lose
            return np.full(len(weights), 1.0 / max(len(weights), 1))
        share: npt.NDArray[np.float64] = weights / total
        return share

    def odds(self) -> dict[str, float]:
        """The probability of each opponent, for others that choose for this league."""
        share = self.settings.anchor_share if self.pool else 1.0
        anchors = dict.fromkeys(self.anchors, share / len(self.anchors))
        pool = zip(self.pool, ((1.0 - share) * self.chances()).tolist(), strict=True)
        return {**anchors, **dict(pool)}

    def record(self, opponent: str, outcome: int) -> None:
        """Record that the learner won (1), tied (0) or lost (-1). Results of removed members are ignored."""
        if outcome not in (-1, 0, 1):
            raise ValueError(f"outcome={outcome!r}: expected 1 (won), 0 (tied) or -1 (lost)")
        if opponent in self.pool or opponent in self.anchors:
            counts = self._games.setdefault(opponent, np.zeros(3))
            counts *= self.settings.decay
            counts[1 - outcome] += 1.0

    def games(self, opponent: str) -> float:
        """The decayed number of games against an opponent."""
        return float(self._counts(opponent).sum())

    def chance(self, opponent: str) -> float:
        """Estimated probability to win, ties counting half; 0.5 without games."""
        won, tied, _ = self._counts(opponent).tolist()
        total = self.games(opponent)
        return won / total + 0.5 * (tied / total) if total else 0.5

    def row(self) -> dict[str, list[float]]:
        """Decayed wins, ties and losses against each opponent: the input of the choice."""
        return {name: self._counts(name).tolist() for name in (*self.anchors, *self.pool)}

    def take_over(self, row: Mapping[str, Sequence[float]]) -> None:
        """Continue from another league's `row`, with its pool."""
        self.pool = [name for name in row if name not in self.anchors]
        self._games |= {name: np.array(counts, np.float64) for name, counts in row.items()}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values."""
        games = {name: counts.tolist() for name, counts in self._games.items()}
        return {"settings": asdict(self.settings), "pool": list(self.pool), "games": games}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> League:
        """A league in the state that `state_dict` gave."""
        settings = dict(state["settings"])
        league = cls(LeagueSettings(**{**settings, "anchors": tuple(settings["anchors"])}))
        league.pool = list(state["pool"])
        league._games = {name: np.array(counts, np.float64) for name, counts in state["games"].items()}
        return league

    def _weight(self, name: str) -> float:
        s = self.settings
        if self.games(name) < s.least_games:
            return 1.0 if s.weighting == "hard" else 0.25  # that of one that always wins, and that of an equal one
        p = self.chance(name)
        return (1.0 - p) ** s.hardness if s.weighting == "hard" else p * (1.0 - p)

    def _counts(self, opponent: str) -> npt.NDArray[np.float64]:
        return self._games.get(opponent, np.zeros(3))
