"""The learners of a gym training, of any algorithm: one learns from a replay, the other from rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms.base import AlgorithmUnusable, Floats, Progress, Rollout, Update
from jurybox.training.algorithms.networks import features_of
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.statistics import Normaliser
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.recipes.gym import ROWS, GymTraining
from jurybox.training.replay import Windows
from jurybox.training.replay.batch import BatchOnDevice
from jurybox.training.replay.cursor import Cursor
from jurybox.training.runtime.role_context import Learner, RoleContext

_REPORT_EVERY = 10  # learner steps between two reports of the losses, since reading a tensor's value takes time
_UPDATE_EVERY = 50  # learner steps between two updates of the normaliser
_SAMPLE_ROWS, _FIRST_SAMPLE_ROWS = 256, 8192  # rows that it sees at an update


class _Publishing(Learner):
    """Base class of both learners: the algorithm, the network it publishes, and the statistics of observations.

    Args:
        settings: arguments of `GymTraining`.
        algorithm: arguments of `algorithms.make`.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        settings: Mapping[str, Any],
        algorithm: Mapping[str, Any],
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self.settings = s = GymTraining(**settings)
        self.seed = int(np.random.SeedSequence([context.plan.seed, context.number]).generate_state(1)[0])
        self.updates = 0
        self.algorithm = made = make(**algorithm)
        made.envs, made.alive = s.envs, context.alive
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made.setup(self.seed, s.device)
        if not isinstance(getattr(made, "acting", None), nn.Module):
            raise AlgorithmUnusable(f"{s.algorithm}.setup has not set `acting`, the network that is published")
        self._features = features_of(*(part for part in made.parts().values() if isinstance(part, nn.Module)))
        self._normaliser = Normaliser(made.spec.numbers) if made.spec.normalize else None
        torch.set_flush_denormal(True)

    @property
    def progress(self) -> Progress:
        """How far the training is: the env steps at which this update is due."""
        return Progress(self.context.plan.pace.env_steps(self.updates, 0), self.settings.steps)

    def learn(self, batch: Any) -> dict[str, float | torch.Tensor]:
        """Make one update, and return its metrics."""
        found: Any = self.algorithm.update(batch, self.progress)  # an algorithm may be anyone's
        if not isinstance(found, Update):
            what = f"{self.settings.algorithm}.update returned a {type(found).__name__}"
            raise AlgorithmUnusable(f"{what}, expected base.Update(metrics)")
        self.updates += 1
        return dict(found.metrics)

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        seen = 0 if self._normaliser is None else self._normaliser.count
        return self.algorithm.acting, {"updates": self.updates, "seen": seen}

    def close(self) -> None:
        torch.set_flush_denormal(False)  # in a serial run this is the caller's thread

    def see(self, rows: npt.NDArray[Any]) -> None:
        """Update the statistics with these observations, and apply them to the networks."""
        if self._normaliser is not None:
            self._normaliser.update(self._features[0].raw_numbers(torch.from_numpy(rows)).numpy())
            for each in self._features:
                each.use(*self._normaliser.shift_and_scale())

    def save(self) -> dict[str, Any]:
        statistics = {} if self._normaliser is None else self._normaliser.state_dict()
        return {"learner": self.algorithm.state_dict(), "statistics": statistics, "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.algorithm.load_state_dict(state["learner"])
        self.algorithm.restored = True
        if self._normaliser is not None:
            self._normaliser.load_state_dict(state["statistics"])
        self.updates = int(state["updates"])

    def adopt(self, published: WeightsReader) -> None:
        state, _, extra = published.read()
        self.updates = int(extra["updates"])
        self.algorithm.load_published(as_tensors(state), self.updates)
        self.adopted(extra)

    def adopted(self, extra: Mapping[str, Any]) -> None:
        """Go on from what was published with the weights."""


class ReplayLearner(_Publishing):
    """An algorithm that learns from a replay. One step is one update."""

    def __init__(self, context: RoleContext, **options: Any) -> None:
        super().__init__(context, **options)
        s, own = self.settings, self.settings.replayed
        self._replay = context.replay(ROWS)
        windows = Windows(n_step=own.n_steps, gamma=own.gamma, next=("observation",))
        self._batch = self._replay.batch(own.batch_size, windows, pinned=s.device != "cpu")
        self._on_device = BatchOnDevice(self._batch, s.device)

    def ready(self) -> bool:
        return bool(self._replay.added > self.settings.replayed.unsampled(self.settings.envs))

    def step(self) -> None:
        own = self.context.own_steps
        # The sampler is seeded with the step, so that checkpoints need not contain its state.
        self._replay.seed(self.seed + 2 * own)
        if self._normaliser is not None and own % _UPDATE_EVERY == 0:
            rows = _FIRST_SAMPLE_ROWS if self._normaliser.count == 0 else _SAMPLE_ROWS
            self.see(self._replay.sample(rows, uniform=True)["observation"])
        self._on_device.wait()
        self._replay.sample(self.settings.replayed.batch_size, self._batch)
        metrics = self.learn(self._on_device.tensors())
        if own % _REPORT_EVERY == _REPORT_EVERY - 1:
            self.context.metrics(**{name: float(value) for name, value in metrics.items()})


class RolloutLearner(_Publishing):
    """An algorithm that learns from the workers' transitions since the last step.

    Rows of weights that are more than one publication old are dropped, and counted as stale. A worker that acts before
    the newest weights arrive is one publication behind, which the loss's ratio corrects. A step that finds less than
    half a rollout, because a worker failed, leaves the rows to the next step.
    """

    def __init__(self, context: RoleContext, **options: Any) -> None:
        super().__init__(context, **options)
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
        found = rollout(rows, self.algorithm, self.settings.rolled_out.n_steps)
        metrics = self.learn(found)
        self.see(rows["observation"])
        self.context.metrics(**{name: float(value) for name, value in metrics.items()})

    def adopted(self, extra: Mapping[str, Any]) -> None:
        if self._normaliser is not None:  # the weights contain the statistics, otherwise one rollout would replace them
            own = self._features[0]
            self._normaliser.adopt(int(extra["seen"]), own.mean.cpu().numpy(), own.scale.cpu().numpy())
        # The previous process may have trained on all rows of weights before its last publication.
        self._oldest_use = self.updates

    def save(self) -> dict[str, Any]:
        self._take_rows()
        return {**super().save(), "stale": self.stale, "held": dict(self._held), "at": self._cursor.at}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.stale = int(state["stale"])
        self._held = {name: np.array(column) for name, column in state["held"].items()}
        self._cursor.resume(state["at"])  # workers may have added rows since, before this process was ready

    def _take_rows(self) -> None:
        columns = self._cursor.take()
        if self._held:
            columns = {name: np.concatenate((self._held[name], column)) for name, column in columns.items()}
        self._held = columns


class Values(Protocol):
    """What estimates values: an algorithm."""

    def values(self, observation: npt.NDArray[Any]) -> Floats:
        """Return values (n,) of rows (n, ...)."""


def rollout(rows: Mapping[str, npt.NDArray[Any]], learner: Values, steps: int) -> Rollout:
    """Create a rollout from the rows of several environments.

    It has a column for each environment if all made `steps` steps, otherwise one long column. An episode that was
    truncated or goes on is bootstrapped with the value of its last "next_observation".

    Args:
        rows: columns (n, ...) by name.
    """
    order = np.lexsort((rows["t"], rows["environment"]))
    rows = {name: column[order] for name, column in rows.items()}
    environment, t = rows["environment"], rows["t"]
    count = len(t)
    ended = rows["ended"].astype(np.bool_)
    # If the next row is not the successor (after a killed worker or a checkpoint), the episode was cut off there, too.
    broken = np.ones(count, np.bool_)
    broken[:-1] = (environment[1:] != environment[:-1]) | (t[1:] != t[:-1] + 1)
    ended = ended | broken
    final = np.zeros(count, np.float32)
    truncated = ended & ~rows["terminated"].astype(np.bool_)
    if truncated.any():
        final[truncated] = learner.values(rows["next_observation"][truncated])
    _, counts = np.unique(environment, return_counts=True)
    columns = len(counts) if (counts == steps).all() else 1

    def shaped(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(column.reshape(columns, -1, *column.shape[1:]).swapaxes(0, 1))

    return Rollout(
        observation=shaped(rows["observation"]),
        action=shaped(rows["action"]),
        log_prob=shaped(rows["log_prob"]),
        value=shaped(learner.values(rows["observation"])),
        reward=shaped(rows["reward"]),
        terminated=shaped(rows["terminated"].astype(np.bool_)),
        ended=shaped(ended),
        next_value=shaped(final),
        last_value=np.zeros(columns, np.float32),
    )
