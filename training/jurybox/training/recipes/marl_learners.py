"""The learners of a multi-agent training: DQN or IQN from a replay, PPO on-policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms.base import Rollout
from jurybox.training.algorithms.dqn import DQNLearner, ValueLearner, ValueSettings
from jurybox.training.algorithms.iqn import IQNLearner
from jurybox.training.algorithms.networks import SeeingActorCritic
from jurybox.training.algorithms.ppo import PPOLearner, PPOSettings
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.recipes.marl_policies import make_network
from jurybox.training.replay import Windows
from jurybox.training.runtime.role_context import Learner, RoleContext

_LEARNERS: dict[str, type[ValueLearner]] = {"dqn": DQNLearner, "iqn": IQNLearner}


def _seed(context: RoleContext) -> int:
    """Return the seed of a learner, which is the same after a restart."""
    return int(np.random.SeedSequence([context.plan.seed, context.number]).generate_state(1)[0])


class ReplayLearner(Learner):
    """DQN or IQN on a group's replay. It publishes the network with the current epsilon.

    Args:
        group: name of its replay and channel.
        network: arguments of `make_network`, as for the actor.
        settings: arguments of `ValueSettings`.
        batch_size: rows per step.
        first: number of rows before the first step.
        epsilon: first value, last value, and the number of learner steps over which it falls linearly.
        device: "cpu", "cuda:0", ...
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        group: str,
        network: Mapping[str, Any],
        settings: Mapping[str, Any],
        batch_size: int,
        first: int,
        epsilon: tuple[float, float, int],
        device: str = "cpu",
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self._group, self._first, self._epsilon = group, first, epsilon
        self._replay = context.replay(group)
        self._seed = _seed(context)
        values = ValueSettings(**{**settings, "hidden": tuple(network["hidden"])})
        made = make_network(**network, seed=self._seed)
        self.learner = _LEARNERS[network["algorithm"]](made, values, device, self._seed)
        windows = Windows(
            n_step=values.n_steps,
            gamma=values.gamma,
            next=("observation",),
            stack=network["shape"][0],
            stacked=("observation",),
        )
        self._batch = self._replay.batch(batch_size, windows)

    @property
    def epsilon(self) -> float:
        """The current epsilon."""
        high, low, steps = self._epsilon
        return max(low, high - (high - low) * self.context.own_steps / max(1, steps))

    def ready(self) -> bool:
        return self._replay.added >= self._first

    def step(self) -> None:
        self._replay.seed(self._seed + self.context.own_steps)
        loss = self.learner.update(self._replay.sample(self._batch.n, self._batch))
        self.context.metrics(**{f"loss_{self._group}": loss, "epsilon": self.epsilon})

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        return self.learner.network, {"epsilon": self.epsilon, "learner_steps": self.context.own_steps}

    def adopt(self, published: WeightsReader) -> None:
        self.learner.load_published(published.read().state)

    def save(self) -> dict[str, Any]:
        return self.learner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state)


class OnPolicyLearner(Learner):
    """PPO on the transitions of a group's agents since the last update, in order.

    A step takes the transitions that arrived since the previous one. Transitions of a policy that is more than
    `max_stale` updates older than the published one are dropped and counted as stale; those that the ring overwrote
    before they were taken are counted as missed. A step that finds less than half a rollout does not train and leaves
    the transitions to the next step: the run's counters advance anyway, so no role waits for transitions that were
    dropped. The loss uses the probabilities of the policy that acted, so a lag of one update is corrected as far as
    the clipping allows.

    Args:
        group: name of its replay and channel.
        network: arguments of `make_network`, as for the actor.
        settings: arguments of `PPOSettings`.
        rollout: expected number of transitions per step.
        max_stale: maximum age of a transition's policy, in updates.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        group: str,
        network: Mapping[str, Any],
        settings: Mapping[str, Any],
        rollout: int,
        max_stale: int,
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self._group, self._least, self._max_stale = group, max(2, rollout // 2), max_stale
        seed = _seed(context)
        made = make_network(**network, seed=seed)
        assert isinstance(made, SeeingActorCritic)
        ppo_settings = PPOSettings(**{**settings, "hidden": tuple(network["hidden"])})
        self.learner = PPOLearner(0, 0, ppo_settings, seed, network=made, alive=context.alive)
        self._windows = Windows(next=("observation",), stack=network["shape"][0], stacked=("observation",))
        # A copy of the replay's rows in this process's memory, in order.
        self._resident = context.replay(group).resident("cpu")
        self._looked_at = 0  # number of the first row that no step has looked at
        self._held = self._open = torch.empty(0, dtype=torch.int64)
        self.updates = self._published = self._oldest_use = 0
        self.stale = 0

    def step(self) -> None:
        counted = {f"stale_{self._group}": self.stale, f"missed_{self._group}": self._resident.missed}
        rows = self._new_transitions()
        if rows is None:
            self.context.metrics(**counted, **{f"skipped_{self._group}": 1.0})
            return
        metrics = self.learner.update(self._rollout(rows))
        self.updates += 1
        self.context.metrics(
            **counted,
            **{
                f"skipped_{self._group}": 0.0,
                f"loss_{self._group}": metrics.get("policy_loss", 0.0),
                f"entropy_{self._group}": metrics.get("entropy", 0.0),
            },
        )

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        self._published = self.updates
        return self.learner.network, {"updates": self.updates, "learner_steps": self.context.own_steps}

    def adopt(self, published: WeightsReader) -> None:
        found = published.read()
        self.learner.network.load_state_dict(as_tensors(found.state))
        # The previous process may have trained on everything up to its last publication.
        self.updates = self._published = self._oldest_use = int(found.extra["updates"])

    def save(self) -> dict[str, Any]:
        return {
            **self.learner.state(),
            "updates": [self.updates, self._published],
            "stale": self.stale,
            "at": self._resident.at,
            "held": self._resident.tickets_of(self._held),
            "open": self._resident.tickets_of(self._open),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state)
        self.updates, self._published = state["updates"]
        self.stale = int(state["stale"])
        # Rows go on after those that were looked at. Actors may have added some since, before this process was ready.
        self._resident.refresh()
        self._looked_at = self._resident.position_of(state["at"])
        self._held, self._open = (
            torch.from_numpy(np.sort(self._resident.positions_of(np.asarray(state[name], np.int64))))
            for name in ("held", "open")
        )

    def _new_transitions(self) -> dict[str, torch.Tensor] | None:
        """Return the transitions to train on, ordered by agent and time; None if there are too few."""
        resident = self._resident
        resident.refresh()
        taken, oldest = resident.taken, resident.taken - len(resident)
        new = torch.arange(max(self._looked_at, oldest), taken)
        self._looked_at = taken
        again = torch.cat((self._held, self._open))
        candidates = torch.cat((again[again >= oldest], new))
        fits = resident.rows.fits(candidates, self._windows, taken)
        # Each agent's newest transition waits for its successor. One that has none by the next call was cut off.
        self._open = candidates[~fits & (candidates >= (int(new[0]) if len(new) else taken))]
        candidates = candidates[fits]
        rows = resident.rows.columns(candidates, self._windows, taken)
        usable = rows["version"] >= max(self._published - self._max_stale, self._oldest_use)
        self.stale += int((~usable).sum())
        self._held = candidates[usable]
        if len(self._held) < self._least:
            return None
        order = torch.argsort(rows["agent"][usable].long() * (taken + 1) + self._held)
        self._held = torch.empty(0, dtype=torch.int64)
        return {name: column[usable][order] for name, column in rows.items()}

    def _rollout(self, rows: Mapping[str, torch.Tensor]) -> Rollout:
        """Return the rows as the rollout of one environment, which ends wherever the next row is not the successor."""
        seen, after = (rows[name].numpy() for name in ("observation", "next_observation"))
        moment, agent = rows["moment"].numpy(), rows["agent"].numpy()
        over = np.ones(len(moment), np.bool_)
        over[:-1] = (moment[1:] != moment[:-1] + 1) | (agent[1:] != agent[:-1])
        terminated = rows["terminated"].numpy().astype(np.bool_)
        return Rollout(
            observation=seen[:, None],
            action=rows["action"].numpy().astype(np.int64)[:, None],
            log_prob=rows["log_probability"].numpy()[:, None],
            value=self.learner.values(seen)[:, None],
            reward=rows["reward"].numpy()[:, None],
            terminated=terminated[:, None],
            ended=over[:, None],
            next_value=self.learner.values(after)[:, None],
            last_value=np.zeros(1, np.float32),
        )
