"""The actors of a multi-agent training, each with its own world, and the evaluator.

Each agent's observations are stacked. Its transitions are added to its group's replay, and its policy is published on
its group's channel. Agents share nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jurybox.training.algorithms.base import Progress
from jurybox.training.contract import number
from jurybox.training.runtime.role_context import Actor, Evaluator, RoleContext
from jurybox.training.trainings.marl_policies import Acting, FrameStack, Observation, acting
from jurybox.training.trainings.marl_worlds import Environment, agent_spaces, encoders, make_world

_STEP_BITS = 40  # low bits of t; the bits above are its incarnation


class TurnTaker(Actor):
    """The actor role. One step is one turn of the world.

    In a turn every agent, in order, observes, acts with its newest policy, and adds its transition to the replay. If
    the world itself moves, the environment does this before the first agent's observation.

    After a failure, the new process begins a new episode with other random numbers.

    Args:
        environment: see `make_world`.
        groups: name of each agent's replay and channel.
        algorithms: arguments of `algorithms.make`, by group.
        number: number of this actor.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        environment: Environment,
        groups: Mapping[str, str],
        algorithms: Mapping[str, Mapping[str, Any]],
        number: int = 0,
    ) -> None:
        super().__init__(context)
        self.env = make_world(environment)
        self._encoders, self._spaces = encoders(self.env), agent_spaces(self.env)
        self.random = np.random.default_rng(context.seed)
        self._acting = acting(context, groups, algorithms)
        self._rows = {agent: context.replay(group).stream() for agent, group in groups.items()}
        self._seen = {agent: _stack(each) for agent, each in self._acting.items()}
        # A number for each agent of each world: only rows of the same agent and world follow each other.
        self._numbers = {agent: each for each, agent in enumerate(groups, number * len(groups))}
        self._pending: dict[str, dict[str, Any]] = {}
        self._totals = dict.fromkeys(groups, 0.0)
        self._gaps = dict.fromkeys(groups, 0)  # added to an agent's t: one for each time that it left
        self._turns = 0
        self._t = context.incarnation << _STEP_BITS  # so that no row follows one of an earlier process
        self._playing = False

    def step(self) -> int:
        if not self._playing:
            self._begin()
        self._t += 1
        for _ in range(len(self.env.agents)):
            self._take_turn(self.env.agent_selection)
        self._turns += 1
        while self.env.agents and self._is_over(self.env.agent_selection):
            self._take_turn(self.env.agent_selection)
        if not self.env.agents:
            self._end()
        return 1

    def save(self) -> dict[str, Any]:
        # In general a world's state cannot be saved: a resumed run begins a new episode, and this one goes on.
        return {"random": self.random.bit_generator.state, "t": self._t, "gaps": dict(self._gaps)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]
        self._t = int(state["t"])
        self._gaps.update(state["gaps"])

    def close(self) -> None:
        for each in self._acting.values():
            each.policy.close()
        self.env.close()

    def _begin(self) -> None:
        self.env.reset(seed=int(self.random.integers(2**31)))
        self._playing = True
        self._turns = 0
        self._t += 1  # so that the episode's rows do not follow those of the previous one
        for agent, seen in self._seen.items():
            seen.clear()
            self._totals[agent] = 0.0

    def _is_over(self, agent: str) -> bool:
        return bool(self.env.terminations[agent] or self.env.truncations[agent])

    def _take_turn(self, agent: str) -> None:
        observed, reward, terminated, truncated, _ = self.env.last()
        acting = self._acting[agent]
        algorithm = acting.algorithm
        frame, on_policy = self._encoders[agent].row(observed), algorithm.on_policy
        stacked = self._seen[agent].add(frame)
        over = bool(terminated or truncated)
        if agent in self._pending:
            # The result of an action is known at the agent's next turn.
            written = self._pending.pop(agent)
            paid = number(reward, f"the reward of {agent}")
            if on_policy:
                written |= {"next_observation": stacked, "ended": over}
            self._rows[agent].add(reward=paid, terminated=terminated, **written)
            self._totals[agent] += paid
        if over:
            if not on_policy:
                self._rows[agent].end(0, observation=frame)
            # If the agent returns in this episode, it has no earlier frames, and its rows do not follow those before.
            self._seen[agent].clear()
            self._gaps[agent] += 1
            self.env.step(None)
            return
        progress = Progress(self.context.env_steps, self.context.plan.budget.steps)
        if explores := algorithm.exploration(progress):
            self.context.metrics(**explores)
        actions, columns = algorithm.explore(acting.outputs(stacked), self.random, progress)
        action = int(actions[0])
        written = {"action": action, **{name: column[0] for name, column in columns.items()}}
        if on_policy:
            written |= {"environment": self._numbers[agent], "t": self._t + self._gaps[agent]}
            written |= {"observation": stacked.copy(), "updates": acting.policy.updates}
        else:
            written["observation"] = frame
        self._pending[agent] = written
        self.env.step(action + self._spaces[agent].first)

    def _end(self) -> None:
        self._playing = False
        each = {f"return_{agent}": total for agent, total in self._totals.items()}
        self.context.episode(total=float(np.mean(list(self._totals.values()))), length=self._turns, **each)


def _stack(acting: Acting) -> FrameStack:
    (leaf,) = acting.algorithm.spec.inputs
    return FrameStack(leaf.shape, leaf.dtype)


class PlayingEvaluator(Evaluator):
    """The evaluator role: plays whole episodes with the newest policies, the same episodes every time.

    Args:
        episodes: number of episodes. Actions are explored as at the end of the training.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        environment: Environment,
        groups: Mapping[str, str],
        algorithms: Mapping[str, Mapping[str, Any]],
        episodes: int,
    ) -> None:
        super().__init__(context)
        self._env = make_world(environment)
        self._encoders, self._spaces = encoders(self._env), agent_spaces(self._env)
        self._acting = acting(context, groups, algorithms)
        self._episodes = episodes
        self._random_play: dict[str, float] | None = None

    def evaluate(self) -> Mapping[str, float]:
        if self._random_play is None:
            actions = {agent: each.algorithm.spec.action.size for agent, each in self._acting.items()}
            self._random_play = self._play(lambda agent, seen, random: int(random.integers(actions[agent])))
        learned = self._play(self._explored)
        numbers = {f"return_{agent}": total for agent, total in learned.items()}
        numbers |= {f"random_{agent}": total for agent, total in self._random_play.items()}
        return {"return": float(np.mean(list(learned.values()))), **numbers}

    def _explored(self, agent: str, stacked: Observation, random: np.random.Generator) -> int:
        each = self._acting[agent]
        return int(each.algorithm.explore(each.outputs(stacked), random, Progress(1, 1))[0][0])

    def _play(self, choose: Callable[[str, Observation, np.random.Generator], int]) -> dict[str, float]:
        """Return the mean returns over the episodes, by agent.

        The episodes are the same whatever is chosen in them: the seeds of both an environment and its actions are drawn
        in advance.
        """
        seeds = np.random.default_rng(self.context.plan.seed).integers(2**31, size=(self._episodes, 2))
        totals = dict.fromkeys(self._acting, 0.0)
        for world, actions in seeds.tolist():
            self._env.reset(seed=world)
            random = np.random.default_rng(actions)
            seen = {agent: _stack(each) for agent, each in self._acting.items()}
            for agent in self._env.agent_iter():
                observation, reward, terminated, truncated, _ = self._env.last()
                totals[agent] += number(reward, f"the reward of {agent}") / self._episodes
                if terminated or truncated:
                    seen[agent].clear()
                    self._env.step(None)
                    continue
                action = choose(agent, seen[agent].add(self._encoders[agent].row(observation)), random)
                self._env.step(action + self._spaces[agent].first)
            self.context.alive()
        return totals

    def close(self) -> None:
        self._env.close()
