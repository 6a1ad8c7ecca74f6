"""Compare our hockey with github.com/martius-lab/hockey-env, which must be importable (it needs Box2D):

    PYTHONPATH=.../hockey-env python -m benchmarks.hockey_parity [--games 2000] [--record FILE]

1. One step from the same states with the same actions, by kind of state; how many end in contacts.
2. Games of random actions, side by side, until they differ or end.
3. The built-in opponents against each other, in both environments, and the fastest puck and player.

``--record`` writes the states, actions and the original's answers of the first as numbers:
``tests/unit/studies/hockey/data/original_steps.json`` is such a file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.studies.hockey import HockeyGame, make_opponent

Row = npt.NDArray[np.float64]
KINDS = ("free", "centre line", "side lines", "turned far", "too fast", "fast puck", "held", "goal")


def state(kind: str, rng: np.random.Generator) -> Row:
    """Player 0's observation at the start of a step: 18 numbers of four digits."""
    u = rng.uniform
    s = np.zeros(18)
    s[[0, 6]] = u(-3.2, -0.6), u(0.6, 3.2)
    s[[1, 7]] = u(-2.6, 2.6, 2)
    s[[2, 8]] = u(-1, 1, 2)
    s[[3, 4, 9, 10]] = u(-6.5, 6.5, 4)
    s[[5, 11]] = u(-12, 12, 2)
    s[12:14] = u(-3.4, 3.4), u(-2.8, 2.8)
    s[14:16] = u(-12, 12, 2)
    who = int(rng.integers(2))
    if kind == "centre line":
        s[[0, 6]] = u(-0.5, 0.0), u(0.5, 2.0)
        if who:
            s[[0, 6]] = -s[6], -s[0]
    elif kind == "side lines":
        s[[1, 7]] = u(2.75, 2.95, 2) * rng.choice([-1, 1], 2)
        s[[0, 1]] = (u(-3.65, -3.45), u(-0.6, 0.6)) if who else s[[0, 1]]
        s[[2, 8]] = u(-0.2, 0.2, 2)
        s[[5, 11]] = u(-2, 2, 2)
    elif kind == "turned far":
        s[[2, 8]] = u(1.05, 1.5, 2) * rng.choice([-1, 1], 2)
    elif kind == "too fast":
        directions = u(0, 2 * math.pi, 2)
        s[[3, 9]], s[[4, 10]] = 10.5 * np.cos(directions), 10.5 * np.sin(directions)
    elif kind == "fast puck":
        direction = u(0, 2 * math.pi)
        s[12:14] = u(-1, 1), u(-1, 1)
        s[14:16] = u(22, 60) * np.array([math.cos(direction), math.sin(direction)])
    elif kind == "held":
        s[16 + who] = rng.integers(2, 16)
        s[12:16] = s[[0, 1, 3, 4]] if not who else s[[6, 7, 9, 10]]
    elif kind == "goal":
        s[12:14] = rng.choice([-1, 1]) * u(3.84, 3.95), u(-1, 1)
        s[14:16] = u(-2, 2, 2)
    return s.round(4)


def actions(kind: str, rng: np.random.Generator) -> Row:
    chosen = rng.uniform(-1.2, 1.2, (2, 4))
    if rng.uniform() < 0.5:
        chosen[:, :3] = np.sign(chosen[:, :3])
    return np.clip(chosen, -1, 1).round(4)


class Original:
    """The other world, put into a state and stepped."""

    def __init__(self) -> None:
        self.module = importlib.import_module("hockey.hockey_env")
        self.env = self.module.HockeyEnv()

    def begin(self, start: Row) -> None:
        self.env.reset(seed=0)
        self.env.set_state(start)

    def step(self, chosen: Row) -> tuple[Row, bool]:
        seen, _, over, _, _ = self.env.step(chosen.reshape(-1))
        return np.asarray(seen), bool(over)

    @property
    def contacts(self) -> bool:
        """Whether anything that is solid touches anything, a held puck its holder excepted."""
        held = self.env.player1_has_puck or self.env.player2_has_puck
        for contact in self.env.world.contacts:
            if contact.touching and not (contact.fixtureA.sensor or contact.fixtureB.sensor):
                bodies = {contact.fixtureA.body, contact.fixtureB.body}
                carried = self.env.puck in bodies and bodies & {self.env.player1, self.env.player2}
                if not (held and carried):
                    return True
        return False

    def bot(self, name: str) -> Callable[[Row], Row]:
        made = self.module.BasicOpponent(weak=name == "weak")
        return lambda seen: np.asarray(made.act(seen))


def ours_from(game: HockeyGame, start: Row) -> None:
    game.reset(0)
    game.rink.set_state(start)


def cases(original: Original, per_kind: int, seed: int = 0) -> Iterator[tuple[str, Row, Row, Row, bool, bool]]:
    """(kind, state, actions, next state, a goal, contacts) of single steps in the original."""
    rng = np.random.default_rng(seed)
    for kind in KINDS:
        for _ in range(per_kind):
            start, chosen = state(kind, rng), actions(kind, rng)
            original.begin(start)
            seen, over = original.step(chosen)
            yield kind, start, chosen, seen, over, original.contacts


def bot_answers(original: Original, n: int) -> list[dict[str, Any]]:
    """The actions of the original's opponents, except for the racket's swing, which is random."""
    rng, lines = np.random.default_rng(2), []
    for number in range(n):
        seen = state(KINDS[number % len(KINDS)], rng)
        if number % 2:  # near its target, where it brakes
            seen[[0, 1]] = seen[[12, 13]] - [rng.uniform(0, 0.5), rng.uniform(-0.2, 0.2)]
        seen[16] = rng.integers(0, 16)
        name = "weak" if rng.uniform() < 0.7 else "strong"
        x, y, _, shoot = original.bot(name)(seen)
        lines.append(
            {"bot": name, "seen": seen.round(4).tolist(), "action": [round(float(v), 5) for v in (x, y, shoot)]}
        )
    return lines


def compare_steps(original: Original, per_kind: int) -> None:
    game = HockeyGame()
    worst: dict[tuple[str, bool], list[float]] = {}
    for kind, start, chosen, seen, over, contacts in cases(original, per_kind):
        ours_from(game, start)
        turn = game.step(chosen)
        away = float(np.abs(turn.observations[0] - seen).max())
        if over != turn.terminated:
            away = math.inf
        worst.setdefault((kind, contacts), []).append(away)
    print("| a step | contacts | steps | furthest apart | within 0.001 |\n| --- | --- | ---: | ---: | ---: |")
    for (kind, contacts), found in worst.items():
        within = np.mean(np.array(found) < 1e-3)
        print(f"| {kind} | {'yes' if contacts else 'no'} | {len(found)} | {max(found):.1e} | {within:.1%} |")


def compare_games(original: Original, games: int) -> None:
    game, together, steps = HockeyGame(time_out="original"), 0, []
    for number in range(games):
        rng = np.random.default_rng(number)
        start, _ = original.env.reset(seed=number, one_starting=number % 2 == 0)
        ours_from(game, start)
        over = False
        while not over:
            chosen = rng.uniform(-1, 1, (2, 4))
            seen, over = original.step(chosen)
            turn = game.step(chosen)
            if np.abs(seen - turn.observations[0]).max() > 0.01 or over != turn.terminated:
                break
        else:
            together += 1
        steps.append(game.taken)
    print(
        f"\n{together} of {games} games of random actions are the same to their end, the others for {min(steps)} steps"
    )


def standing(play: Callable[[int], tuple[int, float, float]], games: int) -> str:
    winners, pucks, players = zip(*(play(number) for number in range(games)), strict=True)
    shares = " | ".join(f"{winners.count(which) / games:.1%}" for which in (1, 0, -1))
    return f"{shares} | {max(pucks):.1f} | {max(players):.1f} |"


def speeds(seen: Row) -> tuple[float, float]:
    return math.hypot(seen[14], seen[15]), max(math.hypot(seen[3], seen[4]), math.hypot(seen[9], seen[10]))


def bots_in_original(original: Original, names: tuple[str, str]) -> Callable[[int], tuple[int, float, float]]:
    env, (left, right) = original.env, [original.bot(name) for name in names]

    def play(number: int) -> tuple[int, float, float]:
        seen, _ = env.reset(seed=number, one_starting=number % 2 == 0)
        over, info, most = False, {"winner": 0}, (0.0, 0.0)
        while not over:
            seen, _, over, _, info = env.step(np.concatenate((left(seen), right(env.obs_agent_two()))))
            now = speeds(seen)
            most = max(most[0], now[0]), max(most[1], now[1])
        return info["winner"], *most

    return play


def bots_in_ours(names: tuple[str, str]) -> Callable[[int], tuple[int, float, float]]:
    game, players = HockeyGame(time_out="original"), [make_opponent(name) for name in names]

    def play(number: int) -> tuple[int, float, float]:
        seen, most = game.reset(number, first=number % 2), (0.0, 0.0)
        for side, player in enumerate(players):
            player.reset(2 * number + side)
        info: Mapping[str, Any] = {}
        while not game.over:
            turn = game.step(np.stack([player.act(row) for player, row in zip(players, seen, strict=True)]))
            seen, info = turn.observations, turn.infos[0]
            now = speeds(np.asarray(seen[0], np.float64))
            most = max(most[0], now[0]), max(most[1], now[1])
        return info["winner"], *most

    return play


def record(original: Original, per_kind: int, path: Path) -> None:
    lines = []
    for kind, start, chosen, seen, over, contacts in cases(original, 4 * per_kind, seed=1):
        if not contacts and sum(line["kind"] == kind for line in lines) < per_kind:
            answer = [round(float(value), 5) for value in seen]
            lines.append(
                {"kind": kind, "state": start.tolist(), "actions": chosen.tolist(), "seen": answer, "over": over}
            )
    source = "one step each of github.com/martius-lab/hockey-env 2.6, measured with benchmarks/hockey_parity.py"
    steps = ",\n".join(json.dumps(line) for line in lines)
    bots = ",\n".join(json.dumps(line) for line in bot_answers(original, 40))
    path.write_text(f'{{"source": "{source}",\n"steps": [\n{steps}\n],\n"bots": [\n{bots}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="single steps of each kind")
    parser.add_argument("--games", type=int, default=2000, help="of each pair of bots in each world")
    parser.add_argument("--record", type=Path, help="write single steps of the original to this file, and no more")
    options = parser.parse_args()
    original = Original()
    if options.record is not None:
        record(original, 16, options.record)
        return
    compare_steps(original, options.steps)
    compare_games(original, 50)
    print("\n| bots | world | won | tied | lost | fastest puck | fastest player |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for names in (("strong", "weak"), ("weak", "strong"), ("strong", "strong"), ("weak", "weak")):
        for world, play in (("original", bots_in_original(original, names)), ("here", bots_in_ours(names))):
            print(f"| {' v '.join(names)} | {world} | {standing(play, options.games)}", flush=True)


if __name__ == "__main__":
    main()
