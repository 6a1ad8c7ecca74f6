"""What both learners have in common: the algorithm, the network that it publishes, statistics of observations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms.base import AlgorithmUnusable, Progress, Update
from jurybox.training.algorithms.networks import features_of
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.schedules import at
from jurybox.training.algorithms.statistics import Normaliser
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.replay.cursor import Cursor
from jurybox.training.roles.curriculum import Curriculum
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.role_context import Learner, RoleContext

_MOST_DEVIATIONS = 10.0  # of a normalised reward


class AlgorithmLearner(Learner):
    """Base class of the learners of an algorithm. It publishes the acting network.

    Args:
        replay: name of its replay.
        algorithm: arguments of `algorithms.make`.
        envs: environments whose rows it gets, over all workers.
        device: where it computes.
        raw: whether rows hold the environment's own observations instead of packed ones, see `Algorithm.raw`.
        suffix: of its metrics' names, where several learners report.
        curriculum: "make", the "module:Class" of a `Curriculum`, and its arguments; None: there is none.
        results: name of the replay that actors write the results of episodes to, for the curriculum.
        normalize_rewards: whether rewards are divided by the running deviation of the column "discounted_return", and
            cut off at 10 deviations, as Stable-Baselines3's VecNormalize does.

    Attributes:
        updates: number of updates so far.
        curriculum: what chooses the tasks of episodes, or None.
    """

    _returns: Normaliser | None = None
    _scheduled: Mapping[str, str] = MappingProxyType({})
    curriculum: Curriculum | None = None

    def __init__(
        self,
        context: RoleContext,
        *,
        replay: str,
        algorithm: Mapping[str, Any],
        envs: int,
        device: str = "cpu",
        raw: bool = False,
        suffix: str = "",
        curriculum: Mapping[str, Any] | None = None,
        results: str = "results",
        normalize_rewards: bool = False,
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self.seed = int(np.random.SeedSequence([context.plan.seed, context.number]).generate_state(1)[0])
        self.updates = 0
        self.name, self._suffix = str(algorithm["algorithm"]), suffix
        self.replay = context.replay(replay)
        self.algorithm = made = make(**algorithm)
        made.envs, made.alive, made.raw = envs, context.alive, raw
        self._scheduled = made.settings.scheduled
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made.setup(self.seed, device)
        if not isinstance(getattr(made, "acting", None), nn.Module):
            raise AlgorithmUnusable(f"{self.name}.setup has not set `acting`, the network that is published")
        self._features = features_of(*(part for part in made.parts().values() if isinstance(part, nn.Module)))
        self._normaliser = Normaliser(made.spec.numbers) if made.spec.normalize else None
        if curriculum is not None:
            arguments = dict(curriculum)
            self._episodes = Cursor(context.replay(results))
            self.curriculum = load(arguments.pop("make"))(context, **arguments)
        if normalize_rewards:
            self._returns = Normaliser(1)
        # In a serial run this is the caller's thread, which goes on after the training.
        torch.set_flush_denormal(True)

    @property
    def progress(self) -> Progress:
        """How far the training is: the env steps at which this update is due."""
        plan = self.context.plan
        return Progress(plan.pace.env_steps(self.updates, 0), plan.budget.steps)

    def learn(self, batch: Any) -> Update:
        """Make one update. Its metrics are returned with what the schedules gave."""
        progress = self.progress
        found: Any = self.algorithm.update(batch, progress)  # an algorithm may be anyone's
        if not isinstance(found, Update):
            what = f"{self.name}.update returned a {type(found).__name__}"
            raise AlgorithmUnusable(f"{what}, expected base.Update(metrics)")
        self.updates += 1
        told = {name: at(each, progress.remaining) for name, each in self._scheduled.items()}
        if self._returns is not None:
            told["return_deviation"] = float(self._returns.std[0])
        return found._replace(metrics={**found.metrics, **told}) if told else found

    def scaled(self, reward: Any) -> Any:
        """Return rewards, an array or a tensor, in deviations of discounted returns, if that is asked for."""
        if self._returns is None:
            return reward
        return (reward / float(self._returns.std[0])).clip(-_MOST_DEVIATIONS, _MOST_DEVIATIONS)

    def see_returns(self, discounted: npt.NDArray[Any]) -> None:
        """Update the deviation of discounted returns (n,)."""
        if self._returns is not None:
            self._returns.update(discounted.reshape(-1, 1))

    def tell(self, **metrics: float | torch.Tensor) -> None:
        """Report metrics under their names with the suffix."""
        self.context.metrics(**{f"{name}{self._suffix}": float(value) for name, value in metrics.items()})

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        seen = 0 if self._normaliser is None else self._normaliser.count
        extra: dict[str, Any] = {"updates": self.updates, "seen": seen}
        if self.curriculum is not None:
            extra["curriculum"] = self.curriculum.published()
        if self._returns is not None:
            extra["returns"] = self._returns.state_dict()
        return self.algorithm.acting, extra

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the acting network's state."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.algorithm.acting.state_dict().items()}

    def close(self) -> None:
        torch.set_flush_denormal(False)
        if self.curriculum is not None:
            self.curriculum.close()

    def follow_curriculum(self) -> None:
        """Let the curriculum take the results of episodes since the last call, and do what is due."""
        if self.curriculum is not None:
            self.curriculum.record(self._episodes.take())
            self.tell(**self.curriculum.between_updates(self))

    def see(self, rows: npt.NDArray[Any]) -> None:
        """Update the statistics with these observations, and apply them to the networks."""
        if self._normaliser is not None:
            self._normaliser.update(self._features[0].raw_numbers(torch.from_numpy(rows)).numpy())
            for each in self._features:
                each.use(*self._normaliser.shift_and_scale())

    def save(self) -> dict[str, Any]:
        statistics = {} if self._normaliser is None else self._normaliser.state_dict()
        state = {"learner": self.algorithm.state_dict(), "statistics": statistics, "updates": self.updates}
        if self._returns is not None:
            state["returns"] = self._returns.state_dict()
        if self.curriculum is not None:
            state |= {"curriculum": self.curriculum.state_dict(), "episodes_at": self._episodes.at}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        self.algorithm.load_state_dict(state["learner"])
        self.algorithm.restored = True
        if self._normaliser is not None:
            self._normaliser.load_state_dict(state["statistics"])
        if self._returns is not None:
            self._returns.load_state_dict(state["returns"])
        self.updates = int(state["updates"])
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])
            # Of a resumed run: actors may have added results since. In a later life, what was published counts them.
            if self.context.life == 1:
                self._episodes.resume(state["episodes_at"])

    def adopt(self, published: WeightsReader) -> None:
        state, _, extra = published.read()
        self.updates = int(extra["updates"])
        self.algorithm.load_published(as_tensors(state), self.updates)
        if self.curriculum is not None:
            self.curriculum.load_published(extra["curriculum"])
        if self._returns is not None:
            self._returns.load_state_dict(extra["returns"])
        self.adopted(extra)

    def adopted(self, extra: Mapping[str, Any]) -> None:
        """Go on from what was published with the weights."""
