"""The actor of any algorithm in any environment. It does not import torch if a server computes the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from jurybox.training.algorithms.base import Algorithm, Array, Arrays, Progress
from jurybox.training.environments.adapter import (
    Adapter,
    Lent,
    Moved,
    Result,
    Waiting,
    WithBots,
    WithState,
    made_adapter,
)
from jurybox.training.replay import Replay, Streams
from jurybox.training.roles.curriculum import Task
from jurybox.training.roles.players import Player, players
from jurybox.training.roles.policy_client import NEWEST, PAST
from jurybox.training.run_folder import audited
from jurybox.training.runtime.plan import ConfigError, load
from jurybox.training.runtime.role_context import INCARNATIONS, Actor, RoleContext
from jurybox.training.spaces import DISCOUNTED, MASK, MEMORY

_STEP_BITS = 40  # low bits of a step's number; the bits above are its incarnation
_ANY = Task()


class Exploration(Protocol):
    """How an actor explores, where that belongs to episodes; else the algorithm explores each step by itself."""

    def begin(self, environment: int, rng: np.random.Generator) -> None:
        """Begin an episode in an environment, which draws what it needs."""

    def explore(self, actions: Array, environments: Sequence[int]) -> Array:
        """Return what is done in these environments instead of the policy's own actions, (n, ...)."""


class EnvActor(Actor):
    """The actor role. One step is one step of each of its environments, or of those of one split.

    Args:
        adapter: "package.module:callable" that makes an `Adapter`, called with `n` and the `arguments`.
        n: number of environments.
        policies: by agent, the name of its policy: that of its replay and of its channel.
        algorithms: by policy, arguments of `algorithms.make`.
        discounts: by policy, the discount factor of the returns until each step, which are recorded then
            ("discounted_return"), so that its learner can normalise rewards.
        max_lag: publications by which a served policy's answers may lag; None: any number.
        splits: adapters that the environments are dealt to. While those of one step, actions for the others are
            computed.
        recorded: agents whose rows are recorded; None: all.
        curriculum: "module:Class" of the learner's `Curriculum`, which is published with the first agent's policy; its
            tasks say who plays in each episode. None: the newest policies play.
        results: name of the replay for the results of its episodes.
        exploration: "make", the "module:callable" of an `Exploration`, called with the context and `n`, and its
            further arguments; None: the algorithm explores.
        clients: see `players.players`.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        adapter: str,
        arguments: Mapping[str, Any],
        n: int,
        policies: Mapping[str, str],
        algorithms: Mapping[str, Mapping[str, Any]],
        discounts: Mapping[str, float] | None = None,
        max_lag: int | None = None,
        splits: int = 1,
        recorded: Sequence[str] | None = None,
        curriculum: str | None = None,
        results: str = "results",
        exploration: Mapping[str, Any] | None = None,
        clients: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(context)
        self._random = np.random.default_rng(context.seed)
        # Env steps until which an agent acts at random.
        self._random_until = {
            agent: context.plan.pace_of_policy(name).learning_starts for agent, name in policies.items()
        }
        self._exploration: Exploration | None = None
        if exploration is not None:
            given = dict(exploration)
            self._exploration = load(given.pop("make"))(context, n, **given)
        self._curriculum: Any = None if curriculum is None else load(curriculum)  # a subclass of Curriculum
        self._results = None if curriculum is None else context.replay(results)
        dealt = [range(split, n, splits) for split in range(splits)]
        with ExitStack() as undo:
            made: list[Adapter] = []
            for numbers in dealt:
                made.append(made_adapter(load(adapter), arguments, context.worker_index, numbers))
                undo.callback(made[-1].close)
            rows = len(dealt[0])
            found = players(context, policies, algorithms, rows=rows, splits=splits, max_lag=max_lag, clients=clients)
            for each in found.values():
                undo.callback(each.policy.close)
            self._resources = undo.pop_all()
        self._newest = next(iter(found.values())).policy
        # Episodes are numbered over all workers, environments and agents: no row of one follows one of another.
        first, begun = context.number * n * len(found), context.incarnation << _STEP_BITS
        self._splits = []
        for split, (numbers, one) in enumerate(zip(dealt, made, strict=True)):
            recorders, single = {}, getattr(one, "leaves_out", False)
            for place, (agent, player) in enumerate(found.items()):
                if single and player.algorithm.remembers:
                    raise ConfigError(
                        f"{one.name} asks for an action in the step that begins an episode, and a recurrent policy "
                        "would remember the episode before: expected autoreset_mode SAME_STEP or DISABLED, or "
                        "recurrent = none"
                    )
                replay = context.replay(policies[agent]) if recorded is None or agent in recorded else None
                episodes, discount = first + place * n + np.array(numbers), (discounts or {}).get(policies[agent])
                recorders[agent] = _Recorder(player, replay, episodes, begun, discount, single=single)
            self._splits.append(_Split(one, numbers, recorders, Cast(one, found, split), self._at_random))
        self._lent = [each for each in made if isinstance(each, Lent) and each.shared]
        if self._lent and len(made) > 1:
            raise ConfigError("environments that are built once are stepped together: expected splits = 1")
        self._turn_of = 0  # the split that steps next
        self._playing = False

    def step(self) -> int:
        if not self._lent:
            return self._step()
        (adapter,), (split,) = self._lent, self._splits
        try:
            for number in adapter.hold(self.context.rests):
                for each in split.recorders.values():
                    each.cut(number)
                self._begin(split, number)
            return self._step()
        finally:
            adapter.release()

    def _step(self) -> int:
        if not self._playing:
            for split in self._splits:
                for number in range(split.adapter.n):
                    self._begin(split, number)
            self._playing = True
        split, steps = self._splits[self._turn_of], 0
        for other in self._splits:
            if other is not split:
                other.ask()
        while not steps:
            steps = self._turn(split)
        self._turn_of = (self._turn_of + 1) % len(self._splits)
        return steps

    def _turn(self, split: _Split) -> int:
        """Let the agent act whose turn it is; returns the environment steps that were completed."""
        asked = split.asked()
        chosen = self._choose(split, asked)
        moved = split.adapter.step(chosen)
        for result in moved.results:
            split.recorders[result.agent].add(result)
            split.infos[:] = result.infos
        if moved.steps:
            split.lengths += 1 if (acted := moved.results[0].acted if moved.results else None) is None else acted
        for number in moved.over:
            self._report(split, number, moved)
            self._begin(split, number)
        return moved.steps

    def _choose(self, split: _Split, asked: Asked) -> Array:
        waiting, recorder = asked.waiting, split.recorders[asked.waiting.agent]
        columns: Arrays = {}
        chosen: Array | None = None
        algorithm, outputs = recorder.player.algorithm, None if asked.newest is None else asked.newest()
        if outputs is not None and self._exploration is not None:
            moved = self._exploration.explore(algorithm.greedy(outputs), split.numbers)
            chosen = algorithm.checked(f"{type(self._exploration).__name__}.explore", moved, split.adapter.n)
        elif outputs is not None or asked.random:
            chosen, columns = self._explore(split, asked, outputs, algorithm)
        if outputs is not None and algorithm.remembers:
            columns = {**columns, MEMORY: outputs[MEMORY]}
        actions = split.cast.actions(asked, chosen)
        recorder.acted(waiting, actions, columns)
        return actions

    def _explore(
        self, split: _Split, asked: Asked, outputs: Arrays | None, algorithm: Algorithm
    ) -> tuple[Array, Arrays]:
        """Let the algorithm explore."""
        progress = Progress(self.context.env_steps, self.context.plan.budget.steps)
        if explores := algorithm.exploration(progress):
            algorithm.check_metrics("exploration", explores)
            self.context.metrics(**explores)
        mask = asked.waiting.observation.get(MASK) if algorithm.spec.masked else None
        if outputs is not None and not asked.random:
            actions, columns = algorithm.explore(outputs, self._random, progress)
            return algorithm.checked(f"{type(algorithm).__name__}.explore", actions, split.adapter.n, mask), columns
        return algorithm.spec.action.sample(self._random, split.adapter.n, mask), {}

    def _at_random(self, agent: str) -> bool:
        """Whether the newest policy's actions are drawn at random."""
        return self._exploration is None and self.context.env_steps < self._random_until[agent]

    def save(self) -> dict[str, Any]:
        # Where its environments cannot save themselves, a resumed run begins new episodes, and this one goes on.
        t = [{agent: each.t.tolist() for agent, each in split.recorders.items()} for split in self._splits]
        saved = {"random": self._random.bit_generator.state, "t": t, "turn_of": self._turn_of}
        # Who plays by a curriculum's task, and noise that is drawn for an episode, cannot be saved either.
        if self._playing and self._curriculum is None and self._exploration is None:
            running = [split.state() for split in self._splits]
            if None not in running:
                saved["running"] = running
        return saved

    def restore(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        here = [{agent: len(each.t) for agent, each in split.recorders.items()} for split in self._splits]
        if here != [{agent: len(t) for agent, t in saved.items()} for saved in state["t"]]:
            # The run was resumed with other numbers of environments: no row of these follows one of those.
            begun = int(self._random.integers(1, INCARNATIONS)) << _STEP_BITS
            for split in self._splits:
                for each in split.recorders.values():
                    each.t[:] = begun
            return
        for split, saved in zip(self._splits, state["t"], strict=True):
            for agent, each in split.recorders.items():
                each.t[:] = saved[agent]
        if "running" in state:
            for split, saved in zip(self._splits, state["running"], strict=True):
                split.restore(saved)
            self._playing, self._turn_of = True, int(state["turn_of"])

    def close(self) -> None:
        self._resources.close()

    def _begin(self, split: _Split, number: int) -> None:
        task: Task = _ANY
        if self._curriculum is not None:
            task = self._curriculum.draw(self._newest.extra["curriculum"], self._random)
            for agent in task.players:
                split.recorders[agent].check_others()
        seed = int(self._random.integers(2**31))
        with self.context.resetting():
            split.adapter.begin(number, seed)
        split.cast.begin(number, seed, task.players)
        if self._exploration is not None:
            self._exploration.begin(split.numbers[number], self._random)
        split.tasks[number], split.lengths[number] = task, 0
        # What is played at random is nothing to keep.
        anchor = task.anchor and self.context.env_steps >= max(self._random_until.values())
        for each in split.recorders.values():
            each.begin(number, anchor=anchor)

    def _report(self, split: _Split, number: int, moved: Moved) -> None:
        """Report an episode, with the returns of those whom the newest policies played."""
        totals = {agent: float(split.recorders[agent].totals[number]) for agent in split.cast.newest(number)}
        named = {f"return_{agent}": total for agent, total in totals.items() if agent}
        total, length = float(np.mean(list(totals.values()))), int(split.lengths[number])
        numbers = {**moved.numbers.get(number, {}), **named, **audited(split.infos[number])}
        self.context.episode(total=total, length=length, **numbers)
        if self._curriculum is not None and self._results is not None:
            told = {name: numbers[name] for name in self._curriculum.results}
            self._results.add(label=split.tasks[number].label, **told)


class Asked(NamedTuple):
    """Actions that are being computed.

    Attributes:
        waiting: who acts.
        newest: gives the newest policy's outputs for all environments; None: nobody needs them, since it plays in none,
            or its actions are drawn at random and it remembers nothing.
        past: environments and the outputs of the policy that plays there.
        random: whether actions are drawn at random where the newest policy plays.
    """

    waiting: Waiting
    newest: Callable[[], Arrays] | None
    past: list[tuple[list[int], Callable[[], Arrays]]]
    random: bool = False


class Cast:
    """Who plays which agent in an adapter's environments: the newest policy, a past one, or one of its bots.

    Args:
        split: number of the adapter, where a role has several.
    """

    def __init__(self, adapter: Adapter, players: Mapping[str, Player], split: int = 0) -> None:
        self._adapter, self._players, self._split = adapter, players, split
        self._past: dict[str, dict[int, str]] = {agent: {} for agent in adapter.agents}
        self._bots: dict[str, dict[int, Callable[[Array], Array]]] = {agent: {} for agent in adapter.agents}

    def begin(self, environment: int, seed: int, named: Mapping[str, str]) -> None:
        """An episode begins in which agents are played by those that are named, all others by the newest policy.

        Raises:
            KeyError: nobody has such a name.
        """
        for agent in self._adapter.agents:
            self._players[agent].policy.begin(environment, self._split)
            past, bots, name = self._past[agent], self._bots[agent], named.get(agent, NEWEST)
            past.pop(environment, None)
            bots.pop(environment, None)
            if name.startswith(PAST):
                past[environment] = name
            elif name != NEWEST:
                bots[environment] = cast("WithBots", self._adapter).scripted(name, seed)

    def memories(self) -> dict[str, Array]:
        """What recurrent policies remember of the environments, by agent."""
        found = {agent: self._players[agent].policy.memory(self._split) for agent in self._adapter.agents}
        return {agent: memory for agent, memory in found.items() if memory is not None}

    def remember(self, memories: Mapping[str, Array]) -> None:
        """Go on with what `memories` returned."""
        for agent, memory in memories.items():
            self._players[agent].policy.remember(memory, self._split)

    def newest(self, environment: int) -> list[str]:
        """Return the agents that the newest policy plays there."""
        return [
            agent
            for agent in self._adapter.agents
            if environment not in self._past[agent] and environment not in self._bots[agent]
        ]

    def ask(self, waiting: Waiting, *, random: bool = False) -> Asked:
        """Let an agent's actions be computed; where `random`, not those of the newest policy."""
        algorithm, policy = self._players[waiting.agent]
        past, bots = self._past[waiting.agent], self._bots[waiting.agent]
        groups: dict[str, list[int]] = {}
        for environment, name in past.items():
            groups.setdefault(name, []).append(environment)
        asked = [
            (rows, policy.submit({name: each[rows] for name, each in waiting.observation.items()}, who, self._split))
            for who, rows in groups.items()
        ]
        alone = len(past) + len(bots) < self._adapter.n
        asks = alone and (not random or algorithm.remembers)  # what is remembered is of every step
        newest = policy.submit(waiting.observation, split=self._split) if asks else None
        return Asked(waiting, newest, asked, random=random and alone)

    def actions(self, asked: Asked, chosen: Array | None) -> Array:
        """Return the actions of all environments.

        Args:
            chosen: those of the newest policy, (n, ...); None where it plays in none.
        """
        agent, observation = asked.waiting.agent, asked.waiting.observation
        algorithm, bots = self._players[agent].algorithm, self._bots[agent]
        mask = observation[MASK] if algorithm.spec.masked else None
        found: dict[int, Array] = {}
        for rows, outputs in asked.past:
            what, allowed = f"{type(algorithm).__name__}.greedy", None if mask is None else mask[rows]
            found |= zip(rows, algorithm.checked(what, algorithm.greedy(outputs()), len(rows), allowed), strict=True)
        if bots:
            (seen,) = observation.values()
            found |= {row: bot(seen[row]) for row, bot in bots.items()}
        if chosen is None:
            return np.stack([found[row] for row in range(self._adapter.n)])
        for row, action in found.items():
            chosen[row] = action
        return chosen


class _Split:
    """Environments that step together.

    Attributes:
        numbers: of its environments among all of the actor's.
        tasks: of the episodes in them. lengths: of these episodes so far. infos: of each environment's last step.
    """

    def __init__(
        self,
        adapter: Adapter,
        numbers: Sequence[int],
        recorders: dict[str, _Recorder],
        cast: Cast,
        at_random: Callable[[str], bool] = lambda agent: False,
    ) -> None:
        self.adapter, self.numbers, self.recorders, self.cast = adapter, numbers, recorders, cast
        self._at_random = at_random
        self.tasks = [_ANY] * adapter.n
        self.lengths = np.zeros(adapter.n, np.int64)
        self.infos: list[Mapping[str, Any]] = [{}] * adapter.n
        self._asked: dict[str, Asked] = {}

    def ask(self) -> None:
        """Let the actions be computed of the agent whose turn it is, and of those that act at the same time."""
        waiting = self.adapter.waiting()
        for each in (waiting, *waiting.others):
            if each.agent not in self._asked:
                self._asked[each.agent] = self.cast.ask(each, random=self._at_random(each.agent))

    def asked(self) -> Asked:
        """Return what the agent whose turn it is was asked for; the next call is for the next turn."""
        self.ask()
        return self._asked.pop(next(iter(self._asked)))

    def state(self) -> dict[str, Any] | None:
        """Return what `restore` needs to go on in the midst of the episodes; None: they cannot be saved."""
        if not isinstance(self.adapter, WithState) or (adapter := self.adapter.state()) is None:
            return None
        recorders = {agent: each.state() for agent, each in self.recorders.items()}
        return {"adapter": adapter, "lengths": self.lengths, "recorders": recorders, "memories": self.cast.memories()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        assert isinstance(self.adapter, WithState)
        self.adapter.restore(state["adapter"])
        self.lengths[:] = state["lengths"]
        self.cast.remember(state.get("memories", {}))
        for agent, each in self.recorders.items():
            each.restore(state["recorders"][agent])


class _Recorder:
    """Records an agent's transitions in its replay, each when the result of its action is known.

    Args:
        replay: None: they are not recorded.
        numbers: of the agent's episodes in each environment.
        begun: number of the first step.
        discount: of the returns that are recorded; None: none are.
        single: whether a step may leave out some environments, see `Result.acted`.

    Attributes:
        t: number of each environment's next row.
        totals: returns of the episodes so far.
    """

    def __init__(
        self,
        player: Player,
        replay: Replay | None,
        numbers: Array,
        begun: int,
        discount: float | None,
        *,
        single: bool = False,
    ) -> None:
        self.player, self._numbers = player, numbers
        self._rows = None if replay is None else _Rows(replay, len(numbers), single=single)
        self._discount, self._discounted = discount, np.zeros(len(numbers))
        self.t = np.full(len(numbers), begun, np.int64)
        self.totals = np.zeros(len(numbers))
        self._row: dict[str, Array] | None = None  # of an action whose result is not known yet
        self._newest: Result | None = None
        self._goes_on = np.zeros(len(numbers), np.bool_)  # whether the newest row has no successor yet

    def check_others(self) -> None:
        """Raise ConfigError if others than the newest policy must not play the agent."""
        if self.player.algorithm.on_policy and self._rows is not None:
            raise ConfigError(
                f"{type(self.player.algorithm).__name__} learns from the newest policy's own steps, and a task has "
                "named another player for its agent: leave such agents out of `recorded`"
            )

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, beside `t`."""
        return {"totals": self.totals, "discounted": self._discounted, "row": self._row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.totals[:], self._discounted[:], self._row = state["totals"], state["discounted"], state["row"]

    def begin(self, number: int, *, anchor: bool) -> None:
        """An episode begins: its rows do not follow those of the previous one."""
        self.t[number] += 1
        self.totals[number] = self._discounted[number] = 0.0
        self._goes_on[number] = False
        if self._rows is not None:
            self._rows.begin(number, anchor=anchor)

    def cut(self, number: int) -> None:
        """An episode was broken off: as if it was truncated after the agent's last result."""
        self._row = None
        if self._rows is not None and self._goes_on[number] and not self.player.algorithm.on_policy:
            assert self._newest is not None
            self._end(number, self._newest)

    def acted(self, waiting: Waiting, action: Array, columns: Arrays) -> None:
        """Keep an action until its result is known."""
        self._row = {"observation": waiting.rows, "action": action, **columns}
        if self.player.algorithm.spec.masked:
            self._row[MASK] = waiting.observation[MASK].copy()
        if self.player.algorithm.on_policy:
            self._row["updates"] = np.full(len(action), self.player.policy.updates)

    def add(self, result: Result) -> None:
        """Add the rows of the last actions, if it has acted."""
        self.totals += result.reward if result.score is None else result.score
        ended = result.terminated | result.truncated
        any_ended = ended.any()
        row, self._row = self._row, None
        if row is not None and self._rows is not None:
            row |= {"reward": result.reward.astype(np.float32), "terminated": result.terminated}
            if self._discount is not None:
                self._discounted = self._discount * self._discounted + result.reward
                row[DISCOUNTED] = self._discounted.astype(np.float32)
            if self.player.algorithm.on_policy:
                row |= {"next_observation": result.rows, "ended": ended, "environment": self._numbers, "t": self.t}
            self._rows.add(row, result.acted)
            self.t += 1
            self._goes_on = ~ended
            if any_ended and not self.player.algorithm.on_policy:
                for number in np.flatnonzero(result.truncated & ~result.terminated).tolist():
                    self._end(number, result)
        self._newest = result
        if any_ended:
            self._discounted[ended] = 0.0
            self.t[ended] += 1  # an agent may come back in the same episode of the environment

    def _end(self, number: int, result: Result) -> None:
        assert self._rows is not None
        mask = {} if result.mask is None else {MASK: result.mask[number]}
        self._rows.end(number, observation=result.rows[number], **mask)


class _Rows:
    """The rows of `n` environments: all in the replay's ring, or those of chosen episodes in its anchor."""

    def __init__(self, replay: Replay, n: int, *, single: bool = False) -> None:
        self._anchors = len(replay.parts) > 1
        self._group = None if self._anchors or single else replay.streams(n)
        self._ring: list[Streams] = []
        if self._group is None:
            self._ring = [replay.stream() for _ in range(n)]
        if self._anchors:
            self._anchor, self._kept = [replay.anchor for _ in range(n)], replay.parts[1]
        self._now = list(self._ring)

    def begin(self, number: int, *, anchor: bool) -> None:
        if self._anchors:
            # An episode that fills the anchor is cut off there: its last rows have no successors, so no window goes
            # past them.
            room = anchor and self._kept.ring.size < self._kept.capacity
            self._now[number] = (self._anchor if room else self._ring)[number]

    def add(self, row: Mapping[str, Array], acted: Array | None = None) -> None:
        """Add a row of each environment, or of those that acted."""
        if self._group is not None:
            self._group.add(**row)
            return
        for number, stream in enumerate(self._now):
            if acted is None or acted[number]:
                stream.add(**{name: values[number] for name, values in row.items()})

    def end(self, number: int, **final: Any) -> None:
        if self._group is not None:
            self._group.end(number, **final)
        else:
            self._now[number].end(**final)
