"""The learners of a gym training: DQN, TD3 and SAC from a replay, PPO on-policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms.dqn import DQN, ValueNetwork, ValueSettings
from jurybox.training.algorithms.networks import (
    Features,
    SeeingActorCritic,
    SeeingCritic,
    SquashedGaussianActor,
    acting_network,
    features_of,
)
from jurybox.training.algorithms.ppo import PPO, PPOSettings, Rollout
from jurybox.training.algorithms.sac import SAC, SACSettings
from jurybox.training.algorithms.td3 import TD3, Normaliser
from jurybox.training.algorithms.td3_actor import TD3Settings
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.recipes.gym import ROWS, GymTraining
from jurybox.training.replay import Windows
from jurybox.training.replay.batch import BatchOnDevice
from jurybox.training.replay.cursor import Cursor
from jurybox.training.runtime.role_context import Learner, RoleContext
from jurybox.training.spaces import Leaf

Batch = Mapping[str, torch.Tensor]

_REPORT_EVERY = 10  # learner steps between two reports of the losses, since reading a tensor's value takes time
_UPDATE_EVERY = 50  # learner steps between two updates of the normaliser
_SAMPLE_ROWS, _FIRST_SAMPLE_ROWS = 256, 8192  # rows that it sees at an update


def _setting_values(settings: GymTraining, *names: str) -> dict[str, Any]:
    """Return the values of these settings, or the algorithm's defaults."""
    return {name: settings.of(name) for name in names}


class PacedDQN(DQN):
    """DQN whose target updates are counted in env steps, as in Stable-Baselines3."""

    def __init__(self, settings: GymTraining, network: Mapping[str, Any], seed: int) -> None:
        s = settings
        made = acting_network(**network, seed=seed)
        assert isinstance(made, ValueNetwork)
        chosen = _setting_values(s, "learning_rate", "n_steps", "max_grad_norm")
        super().__init__(made, ValueSettings(gamma=s.gamma, target_update_interval=0, **chosen), s.device, seed)
        self._pace, self._tau = s.pace, s.of("tau")
        # All environments step together, so the interval is a multiple of their number.
        self._interval = max(s.of("target_update_interval") // s.envs, 1) * s.envs

    def learn(self, batch: Batch) -> torch.Tensor:
        # The target moves before the first learner step of a round, once for each interval's end among its env steps.
        first, pace = self.steps % self._pace.learn == 0, self._pace
        reached = pace.env_steps(self.steps, 0)
        if first and (ends := reached // self._interval - (reached - pace.collect) // self._interval):
            self.move_target(1.0 - (1.0 - self._tau) ** ends)  # the network is the same at all of them
        return super().learn(batch)


def _td3(settings: GymTraining, network: Mapping[str, Any], seed: int) -> TD3:
    s = settings
    td3_settings = TD3Settings(
        actor_learning_rate=s.of("learning_rate"),
        critic_learning_rate=s.of("learning_rate"),
        pre_tanh_penalty=0.0,
        reward_scale=1.0,
        **_setting_values(s, "tau", "policy_delay", "target_policy_noise", "target_noise_clip"),
    )
    networks = acting_network(**network, seed=seed), _critic(network, seed)
    return TD3(1, int(network["actions"]), td3_settings, device=s.device, seed=seed, networks=networks)


def _sac(settings: GymTraining, network: Mapping[str, Any], seed: int) -> SAC:
    sac_settings = SACSettings(
        **_setting_values(settings, "learning_rate", "tau", "target_update_interval", "ent_coef", "target_entropy")
    )
    actor = acting_network(**network, seed=seed)
    assert isinstance(actor, SquashedGaussianActor)
    actions = int(network["actions"])
    return SAC(actor, _critic(network, seed), actions, sac_settings, device=settings.device, seed=seed)


def _critic(network: Mapping[str, Any], seed: int) -> SeeingCritic:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        inputs = [Leaf.of(each) for each in network["inputs"]]
        features = Features(network["numbers"], network["pictures"], normalise=network["normalise"], inputs=inputs)
        return SeeingCritic(features, int(network["actions"]), network["hidden"])


_ALGORITHMS: Mapping[str, Callable[[GymTraining, Mapping[str, Any], int], PacedDQN | TD3 | SAC]] = {
    "dqn": PacedDQN,
    "td3": _td3,
    "sac": _sac,
}


class _Publishing(Learner):
    """Base class of both learners: the published network and the statistics of observations.

    Args:
        settings: arguments of `GymTraining`.
        network: arguments of `acting_network`.
    """

    acting: nn.Module

    def __init__(
        self,
        context: RoleContext,
        *,
        settings: Mapping[str, Any],
        network: Mapping[str, Any],
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self.settings = GymTraining(**settings)
        self.seed = int(np.random.SeedSequence([context.plan.seed, context.number]).generate_state(1)[0])
        self.updates = 0
        self._normaliser = Normaliser(network["numbers"]) if network["normalise"] else None
        torch.set_flush_denormal(True)

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        seen = 0 if self._normaliser is None else self._normaliser.count
        return self.acting, {"updates": self.updates, "seen": seen}

    def close(self) -> None:
        torch.set_flush_denormal(False)  # in a serial run this is the caller's thread

    def see(self, rows: npt.NDArray[Any], features: list[Features]) -> None:
        """Update the statistics with these observations, and apply them to the features."""
        if self._normaliser is not None:
            self._normaliser.see(features[0].raw_numbers(torch.from_numpy(rows)).numpy())
            for each in features:
                each.use(*self._normaliser.shift_and_scale())

    def statistics(self) -> dict[str, Any]:
        return {} if self._normaliser is None else self._normaliser.state_dict()

    def put_back(self, statistics: Mapping[str, Any]) -> None:
        if self._normaliser is not None:
            self._normaliser.load_state_dict(statistics)


class ReplayLearner(_Publishing):
    """DQN, TD3 or SAC on the replay. One step is one update."""

    def __init__(self, context: RoleContext, **options: Any) -> None:
        super().__init__(context, **options)
        s = self.settings
        self._replay = context.replay(ROWS)
        self.learner = _ALGORITHMS[s.algorithm](s, options["network"], self.seed)
        self.acting = self.learner.network if isinstance(self.learner, PacedDQN) else self.learner.actor
        self._features = features_of(*(part for part in vars(self.learner).values() if isinstance(part, nn.Module)))
        windows = Windows(n_step=s.of("n_steps"), gamma=s.gamma, next=("observation",))
        self._batch = self._replay.batch(s.of("batch_size"), windows, pinned=s.device != "cpu")
        self._on_device = BatchOnDevice(self._batch, s.device)
        self._restored = False

    def ready(self) -> bool:
        return bool(self._replay.added > self.settings.unsampled)

    def step(self) -> None:
        s, own = self.settings, self.context.own_steps
        # The sampler is seeded with the step, so that checkpoints need not contain its state.
        self._replay.seed(self.seed + 2 * own)
        if self._normaliser is not None and own % _UPDATE_EVERY == 0:
            rows = _FIRST_SAMPLE_ROWS if self._normaliser.count == 0 else _SAMPLE_ROWS
            self.see(self._replay.sample(rows, uniform=True)["observation"], self._features)
        self._on_device.wait()
        self._replay.sample(s.of("batch_size"), self._batch)
        tensors, learner = self._on_device.tensors(), self.learner
        metrics = {"loss": learner.learn(tensors)} if isinstance(learner, PacedDQN) else learner.update(tensors).metrics
        self.updates += 1
        if own % _REPORT_EVERY == _REPORT_EVERY - 1:
            self.context.metrics(**{name: float(value) for name, value in metrics.items()})

    def adopt(self, published: WeightsReader) -> None:
        state, _, extra = published.read()
        self.updates = int(extra["updates"])
        if isinstance(self.learner, PacedDQN):
            self.learner.adopt(state)
            self.learner.steps = self.updates
        elif self._restored:
            # Without restored critics the policy is not taken over, because new critics would ruin it. Before the
            # first checkpoint little is lost.
            self.acting.load_state_dict(as_tensors(state))

    def save(self) -> dict[str, Any]:
        return {"learner": self.learner.state(), "statistics": self.statistics(), "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state["learner"])
        self.put_back(state["statistics"])
        self.updates = int(state["updates"])
        self._restored = True


class RolloutLearner(_Publishing):
    """PPO on the workers' transitions since the last step.

    Rows of weights that are more than one publication old are dropped, and counted as stale. A worker that acts before
    the newest weights arrive is one publication behind, which the loss's ratio corrects. A step that finds less than
    half a rollout, because a worker failed, leaves the rows to the next step.
    """

    def __init__(self, context: RoleContext, **options: Any) -> None:
        super().__init__(context, **options)
        s, network = self.settings, options["network"]
        made = acting_network(**network, seed=self.seed)
        assert isinstance(made, SeeingActorCritic)
        self.acting = made
        same = ("learning_rate", "n_epochs", "batch_size", "clip_range", "ent_coef", "max_grad_norm", "gae_lambda")
        settings = PPOSettings(
            betas=(0.9, 0.999),
            adam_eps=1e-5,
            gamma=s.gamma,
            vf_coef=2.0 * s.of("vf_coef"),  # here it weights half the squared error, in Stable-Baselines3 all of it
            normalise_returns=False,
            clip_value=False,
            **_setting_values(s, *same, "normalize_advantage", "target_kl"),
        )
        self.learner = PPO(0, 0, settings, self.seed, network=made, device=s.device, alive=context.alive)
        self._features = features_of(made)
        self._cursor = Cursor(context.replay(ROWS))
        if context.life > 1:  # the previous process may have ended before it trained on the newest rows
            self._cursor.resume(0)
        self._least = max(2, context.plan.pace.collect // 2)
        self._held: dict[str, npt.NDArray[Any]] = {}
        self._oldest_use = self.stale = 0

    def step(self) -> None:
        self._take_rows()
        usable = self._held["updates"] >= max(self.updates - 1, self._oldest_use)
        self.stale += int((~usable).sum())
        self._held = {name: column[usable] for name, column in self._held.items()}
        self.context.metrics(stale=self.stale)
        if len(self._held["reward"]) < self._least:
            return
        rows, self._held = self._held, {}
        metrics = self.learner.update(rollout(rows, self.learner, self.settings.of("n_steps")))
        self.see(rows["observation"], self._features)
        self.updates += 1
        self.context.metrics(**{name: value for name, value in metrics.items() if name != "learner_steps"})

    def adopt(self, published: WeightsReader) -> None:
        state, _, extra = published.read()
        self.acting.load_state_dict(as_tensors(state))
        if self._normaliser is not None:  # the weights contain the statistics, otherwise one rollout would replace them
            own = self._features[0]
            self._normaliser.adopt(int(extra["seen"]), own.mean.cpu().numpy(), own.scale.cpu().numpy())
        # The previous process may have trained on all rows of weights before its last publication.
        self.updates = self._oldest_use = int(extra["updates"])

    def save(self) -> dict[str, Any]:
        self._take_rows()
        return {
            "learner": self.learner.state(),
            "statistics": self.statistics(),
            "updates": self.updates,
            "stale": self.stale,
            "held": dict(self._held),
            "at": self._cursor.at,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state["learner"])
        self.put_back(state["statistics"])
        self.updates, self.stale = int(state["updates"]), int(state["stale"])
        self._held = {name: np.array(column) for name, column in state["held"].items()}
        self._cursor.resume(state["at"])  # workers may have added rows since, before this process was ready

    def _take_rows(self) -> None:
        columns = self._cursor.take()
        if self._held:
            columns = {name: np.concatenate((self._held[name], column)) for name, column in columns.items()}
        self._held = columns


def rollout(rows: Mapping[str, npt.NDArray[Any]], learner: PPO, steps: int) -> Rollout:
    """Create a rollout from the rows of several environments.

    It has a column for each environment if all made `steps` steps, otherwise one long column. An episode that was
    truncated or goes on is bootstrapped with the value of its last "next_observation".

    Args:
        rows: columns (n, ...) by name.
    """
    order = np.lexsort((rows["moment"], rows["environment"]))
    rows = {name: column[order] for name, column in rows.items()}
    environment, moment = rows["environment"], rows["moment"]
    count = len(moment)
    over = rows["over"].astype(np.bool_)
    # If the next row is not the successor (after a killed worker or a checkpoint), the episode was cut off there, too.
    broken = np.ones(count, np.bool_)
    broken[:-1] = (environment[1:] != environment[:-1]) | (moment[1:] != moment[:-1] + 1)
    over = over | broken
    final = np.zeros(count, np.float32)
    cut = over & ~rows["terminated"].astype(np.bool_)
    if cut.any():
        final[cut] = learner.values(rows["next_observation"][cut])
    _, counts = np.unique(environment, return_counts=True)
    columns = len(counts) if (counts == steps).all() else 1

    def shaped(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(column.reshape(columns, -1, *column.shape[1:]).swapaxes(0, 1))

    return Rollout(
        observations=shaped(rows["observation"]),
        actions=shaped(rows["action"]),
        log_probs=shaped(rows["log_prob"]),
        values=shaped(learner.values(rows["observation"])),
        rewards=shaped(rows["reward"]),
        terminated=shaped(rows["terminated"].astype(np.bool_)),
        over=shaped(over),
        final_values=shaped(final),
        last_values=np.zeros(columns, np.float32),
    )
