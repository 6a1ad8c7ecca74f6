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

__all__ = ["League", "LeagueSettings", "WinMatrix"]

Weighting = Literal["hard", "variance"]
LEARNER = "learner"
_WIN, _TIE, _LOSS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class LeagueSettings:
    """Settings of the choice of opponents.

    Attributes:
        anchors: names without "anchor:"; never leave.
        anchor_share: chance that the next opponent is an anchor (all alike) while the pool has anybody.
        pool: past selves kept; the oldest leaves for a new one.
        weighting: "variance" (f_var) or "hard" (f_hard).
        hardness: k of f_hard.
        least_games: against a pool member with fewer (decayed) games than this the weight is 1, the most there is.
        decay: what all earlier games of a pair count after one more, so that old results of a learner that got better
            fade; 1 forgets nothing.
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


class WinMatrix:
    """Games between players, by name: decayed counts of wins, ties and losses of each row against each column."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self._games: dict[tuple[str, str], npt.NDArray[np.float64]] = {}

    def record(self, player: str, opponent: str, outcome: int) -> None:
        """Record that `player` won (1), tied (0) or lost (-1), for both sides."""
        if outcome not in (-1, 0, 1):
            raise ValueError(f"outcome={outcome!r}: expected 1 (won), 0 (tied) or -1 (lost)")
        for pair, place in (((player, opponent), 1 - outcome), ((opponent, player), 1 + outcome)):
            counts = self._games.setdefault(pair, np.zeros(3))
            counts *= self.decay
            counts[place] += 1.0

    def games(self, player: str, opponent: str) -> float:
        """Decayed number of games."""
        return float(self._counts(player, opponent).sum())

    def shares(self, player: str, opponent: str) -> tuple[float, float, float]:
        """Shares of wins, ties and losses; equal without games."""
        counts = self._counts(player, opponent)
        total = counts.sum()
        if total == 0:
            return 0.0, 1.0, 0.0
        return float(counts[_WIN] / total), float(counts[_TIE] / total), float(counts[_LOSS] / total)

    def chance(self, player: str, opponent: str) -> float:
        """Estimated probability of a win, ties counting half; 0.5 without games."""
        won, tied, _ = self.shares(player, opponent)
        return won + 0.5 * tied

    def counts(self, player: str, opponent: str) -> list[float]:
        """Decayed wins, ties and losses."""
        return [float(count) for count in self._counts(player, opponent)]

    def put(self, player: str, opponent: str, counts: Sequence[float]) -> None:
        """Set `counts`, for both sides."""
        self._games[player, opponent] = np.array(counts, np.float64)
        self._games[opponent, player] = np.array(counts, np.float64)[::-1].copy()

    def copy_row(self, source: str, target: str) -> None:
        """Copy the results of `source` to `target`."""
        for (player, opponent), counts in list(self._games.items()):
            if player == source and opponent != target:
                self._games[target, opponent] = counts.copy()
                self._games[opponent, target] = self._games[opponent, source].copy()

    def forget(self, name: str) -> None:
        """Remove a player and its results."""
        self._games = {pair: counts for pair, counts in self._games.items() if name not in pair}

    def table(self, players: Sequence[str]) -> npt.NDArray[np.float64]:
        """(n, n) probabilities of a win; NaN for pairs without games."""
        out = np.full((len(players), len(players)), np.nan)
        for i, player in enumerate(players):
            for j, opponent in enumerate(players):
                if (player, opponent) in self._games:
                    out[i, j] = self.chance(player, opponent)
        return out

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values."""
        return {"decay": self.decay, "games": [[*pair, *counts.tolist()] for pair, counts in self._games.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.decay = float(state["decay"])
        self._games = {(a, b): np.array(counts, np.float64) for a, b, *counts in state["games"]}

    def _counts(self, player: str, opponent: str) -> npt.NDArray[np.float64]:
        return self._games.get((player, opponent), np.zeros(3))


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
        self.matrix = WinMatrix(self.settings.decay)
        self.anchors = tuple(f"anchor:{name}" for name in self.settings.anchors)
        self.pool: list[str] = []

    def add(self, version: int) -> tuple[str, str | None]:
        """Add the current learner to the pool.

        Args:
            version: of its weights; not in the pool yet.

        Returns:
            Its name, and the name of the member that had to leave for it.
        """
        name = f"pool:{version}"
        if name in self.pool:
            raise ValueError(f"{name} is in the pool already: expected the version of newer weights")
        if not self.settings.pool:
            raise ValueError("this league has no pool: make it with pool >= 1")
        left = self.pool.pop(0) if len(self.pool) >= self.settings.pool else None
        if left is not None:
            self.matrix.forget(left)
        self.matrix.copy_row(LEARNER, name)
        self.pool.append(name)
        return name, left

    def choose(self, rng: np.random.Generator) -> str:
        """Choose the next opponent; returns its name."""
        return draw(self.odds(), rng)

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
        if opponent in self.pool or opponent in self.anchors:
            self.matrix.record(LEARNER, opponent, outcome)

    @property
    def players(self) -> tuple[str, ...]:
        """Names of everybody: the learner, the anchors, the pool."""
        return (LEARNER, *self.anchors, *self.pool)

    def row(self) -> dict[str, list[float]]:
        """The learner's own (decayed) wins, ties and losses against each opponent: the input of the choice."""
        return {name: self.matrix.counts(LEARNER, name) for name in (*self.anchors, *self.pool)}

    def take_over(self, row: Mapping[str, Sequence[float]]) -> None:
        """Continue from another league's `row`, with its pool."""
        self.pool = [name for name in row if name not in self.anchors]
        for name, counts in row.items():
            if name in self.players:
                self.matrix.put(LEARNER, name, counts)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as JSON values."""
        return {"settings": asdict(self.settings), "pool": list(self.pool), "matrix": self.matrix.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> League:
        """A league in the state that `state_dict` gave."""
        settings = dict(state["settings"])
        league = cls(LeagueSettings(**{**settings, "anchors": tuple(settings["anchors"])}))
        league.pool = list(state["pool"])
        league.matrix.load_state_dict(state["matrix"])
        return league

    def _weight(self, name: str) -> float:
        s = self.settings
        if self.matrix.games(LEARNER, name) < s.least_games:
            return 1.0
        p = self.matrix.chance(LEARNER, name)
        return float((1.0 - p) ** s.hardness) if s.weighting == "hard" else p * (1.0 - p)
