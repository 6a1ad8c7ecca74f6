"""The learners of any algorithm: from a replay, and from the newest policy's steps alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms import recurrent
from jurybox.training.algorithms.base import (
    AlgorithmUnusable,
    Batch,
    Floats,
    OffPolicySettings,
    OnPolicySettings,
    Progress,
    RecurrentReplaySettings,
    Rollout,
    Update,
)
from jurybox.training.algorithms.compiling import compiler_missing
from jurybox.training.algorithms.networks import features_of
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.schedules import at
from jurybox.training.algorithms.statistics import Normaliser
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.replay import Batch as Sampled
from jurybox.training.replay import Field, Windows
from jurybox.training.replay.cursor import Cursor
from jurybox.training.roles.curriculum import Curriculum
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.role_context import Learner, RoleContext
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.spaces import DISCOUNTED, MASK, MEMORY

_log = logging.getLogger("jurybox.learner")

_MOST_DEVIATIONS = 10.0  # of a normalised reward
_WORTH_COMPILING = 10_000  # optimiser steps that save the time of compiling them, some twelve seconds of a core
_REPORT_EVERY = 10  # learner steps between two reports of the losses, since reading a tensor's value takes time
_UPDATE_EVERY = 50  # learner steps between two updates of the normaliser
_SAMPLE_ROWS, _FIRST_SAMPLE_ROWS = 256, 8192  # rows that it sees at an update

COLUMNS: Mapping[str, Field] = {
    "ended": Field((), "bool"),  # the episode, however
    "environment": Field((), "int64"),  # whose row it is: an environment's, or an agent's in one
    "t": Field((), "int64"),  # the next row of the same episode has the next number
    "updates": Field((), "int64"),  # made before the policy that acted was published
}
"""Columns of a row beside observation, next_observation, action, reward, terminated and the algorithm's own."""


class AlgorithmLearner(Learner):
    """Base class of the learners of an algorithm. It publishes the acting network.

    Args:
        replay: name of its replay.
        algorithm: arguments of `algorithms.make`.
        envs: environments whose rows it gets, over all workers.
        device: where it computes.
        suffix: of its metrics' names, where several learners report.
        curriculum: "make", the "module:Class" of a `Curriculum`, and its arguments; None: there is none.
        results: name of the replay that actors write the results of episodes to, for the curriculum.
        compile: whether updates are compiled graphs (see `algorithms.compiling`), where they can be: of networks on the
            CPU without pictures. "auto": if the run makes so many that it is worth the time.
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
        suffix: str = "",
        curriculum: Mapping[str, Any] | None = None,
        results: str = "results",
        normalize_rewards: bool = False,
        compile: Literal["auto", "always", "never"] = "never",
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self.seed = int(np.random.SeedSequence([context.plan.seed, context.number]).generate_state(1)[0])
        self.updates = 0
        self.name, self._suffix = str(algorithm["algorithm"]), suffix
        self.replay = context.replay(replay)
        self.algorithm = made = make(**algorithm)
        made.envs, made.alive, made.stops = envs, context.alive, context.stops
        made.compiles = self._compiles(compile, device)
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

    def _compiles(self, when: str, device: str) -> bool:
        """Whether updates are to be compiled, and can be."""
        pace, made = self.context.plan.pace_of(self.context.number), self.algorithm
        steps = pace.learner_steps(self.context.plan.budget.steps) * made.steps_of(pace.train_freq)
        if when == "never" or (when == "auto" and steps < _WORTH_COMPILING):
            return False
        # Most of the time is in operations that are large; sequences have other shapes in each minibatch.
        if device != "cpu" or made.spec.pictures or made.remembers:
            return False
        if missing := compiler_missing():
            level = logging.WARNING if when == "always" else logging.INFO
            _log.log(level, "the learner runs without compiling, at some half to a quarter of the speed: %s", missing)
        return missing is None

    @property
    def progress(self) -> Progress:
        """How far the training is: the env steps at which this update is due."""
        plan = self.context.plan
        return Progress(plan.pace_of(self.context.number).env_steps(self.updates, 0), plan.budget.steps)

    def learn(self, batch: Any) -> Update:
        """Make one update. Its metrics are returned with what the schedules gave."""
        progress = self.progress
        # Until `close`, which one that could not begin has not: in a serial run this is the caller's thread.
        torch.set_flush_denormal(True)
        found: Any = self.algorithm.update(batch, progress)  # an algorithm may be anyone's
        if not isinstance(found, Update):
            what = f"{self.name}.update returned a {type(found).__name__}"
            raise AlgorithmUnusable(f"{what}, expected base.Update(metrics)")
        self.algorithm.check_metrics("update", found.metrics)
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


class BatchOnDevice:
    """Copies the fields of a batch, which is filled again and again, to a device.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """

    def __init__(self, batch: Sampled, device: str) -> None:
        self._fields, self._device = dict(batch.torch()), device
        if batch.weights is not None:
            self._fields["weights"] = torch.from_numpy(batch.weights)
        if "sequence" in batch.valid:
            self._fields["valid"] = torch.from_numpy(batch.valid["sequence"])
        # The last copies to a GPU; None for other devices.
        self._copied = torch.cuda.Event() if device.startswith("cuda") else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the last copies, which read the batch's page-locked memory; call it before that is filled again."""
        if self._copied is not None:
            self._copied.synchronize()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields, "weights" of a prioritized batch and "valid" of sequences, on the device; on the host they
        are its memory."""
        if self._copied is None:
            return {name: tensor.to(self._device) for name, tensor in self._fields.items()}
        moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in self._fields.items()}
        self._copied.record(torch.cuda.current_stream(self._device))
        return moved


class OffPolicyLearner(AlgorithmLearner):
    """An algorithm that learns from a replay. One step is one update.

    Args:
        first: rows that the replay has to hold before its first step.
        beta: exponent of the importance weights, where the replay is prioritized.
        anchor_ratio: share of each batch that comes from the replay's anchor, if it has one.
        anchor_first: rows that the anchor has to hold before any come from it.
        augment: "module:function", which gets each batch, by name and on the device, and returns it or another one; it
            may change it in place.
        options: those of `AlgorithmLearner`.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        first: int,
        beta: float = 0.4,
        anchor_ratio: float = 0.0,
        anchor_first: int = 1,
        augment: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(context, **options)
        s = self.algorithm.settings
        assert isinstance(s, OffPolicySettings)
        self._first, self._device = first, str(options.get("device", "cpu"))
        self._beta, self._anchor_ratio, self._anchor_first = beta, anchor_ratio, anchor_first
        self._augment: Callable[[Batch], Batch] | None = None if augment is None else load(augment)
        following = ("observation", MASK) if self.algorithm.spec.masked else ("observation",)
        rows, windows = s.batch_size, Windows(n_step=s.n_steps, gamma=s.gamma, next=following)
        self._rows_of: Callable[[Batch], Batch] | None = None
        if self.algorithm.remembers:
            if not isinstance(s, RecurrentReplaySettings) or self.replay.layout.prioritized:
                raise AlgorithmUnusable(
                    f"{self.name} remembers, so it learns from windows: expected settings that are a subclass of "
                    "RecurrentReplaySettings, and a replay that is not prioritized"
                )
            rows, windows = (
                rows // s.sequence_length,
                Windows(next=following, length=s.sequence_length, before=s.burn_in),
            )
            self._rows_of = partial(recurrent.rows_of, burn_in=s.burn_in, gamma=s.gamma)
        self._batch = self.replay.batch(rows, windows, pinned=self._device != "cpu")
        self._on_device = BatchOnDevice(self._batch, self._device)

    def ready(self) -> bool:
        return self.replay.added >= self._first

    def step(self) -> None:
        own, ratio = self.context.own_steps, self.anchor_ratio()
        # The sampler is seeded with the step, so that checkpoints need not contain its state.
        self.replay.seed(self.seed + 2 * own)
        if own % _UPDATE_EVERY == 0:
            self.follow_curriculum()
            self._see_rows(ratio)
        self._on_device.wait()
        self.replay.sample(self._batch.n, self._batch, beta=self._beta, anchor_ratio=ratio)
        batch: Batch = self._on_device.tensors()
        if self._returns is not None:
            batch = {**batch, "reward": self.scaled(batch["reward"])}
        if self._augment is not None:
            batch = self._augment(batch)
        update = self.learn(batch if self._rows_of is None else self._rows_of(batch))
        if self._batch.weights is not None:
            if update.priorities is None:
                raise AlgorithmUnusable(
                    f"{self.name}.update returned no priorities, which a prioritized replay needs: take another "
                    "algorithm, or a replay that is not"
                )
            self.replay.update_priorities(self._batch.indices, update.priorities.cpu().numpy())
        if own % _REPORT_EVERY == _REPORT_EVERY - 1:
            self.tell(**update.metrics, **device_utilization(self._device))

    def _see_rows(self, anchor_ratio: float) -> None:
        """Update the statistics of observations and of returns with rows of the replay."""
        if self._normaliser is not None:
            rows = _FIRST_SAMPLE_ROWS if self._normaliser.count == 0 else _SAMPLE_ROWS
            self.see(self.replay.sample(rows, uniform=True, anchor_ratio=anchor_ratio)["observation"])
        if self._returns is not None:
            # As many as were added since, so that each row counts about once.
            rows = min(self.replay.added - self._returns.count, _FIRST_SAMPLE_ROWS)
            if rows > 0:
                self.see_returns(self.replay.sample(rows, uniform=True)[DISCOUNTED])

    def anchor_ratio(self) -> float:
        """The anchor's share of a batch: 0 until it has enough rows."""
        parts = self.replay.parts
        return self._anchor_ratio if len(parts) > 1 and parts[1].ring.size >= self._anchor_first else 0.0


def device_utilization(device: str) -> dict[str, float]:
    """Return the recent utilization of the GPU in per cent, as NVIDIA's driver measures it; nothing for a CPU.

    The result is also empty if torch cannot query the driver, or without the package nvidia-ml-py.
    """
    if not device.startswith("cuda"):
        return {}
    try:
        return {"device_utilization": float(torch.cuda.utilization(device))}
    except (ModuleNotFoundError, RuntimeError):
        return {}


class OnPolicyLearner(AlgorithmLearner):
    """An algorithm that learns from the workers' transitions since the last step, in order.

    Rows of a policy that is more than `max_stale` updates older than the published one are dropped, and counted as
    stale. So are whole rollouts before the newest ``1 + max_stale``: a learner that kept pace would have made more than
    `max_stale` updates since. One that is slower than its actors thus learns from what is new, and its updates do not
    grow with what it is behind. Rows that were overwritten before they were taken count as missed. An older policy's
    rows are corrected by the loss's ratio. A step that finds less than half a rollout, because a worker failed or since
    rows were dropped, leaves the rows to the next step: the run's counters advance anyway, so no role waits for rows
    that were dropped.

    Args:
        rollout: expected number of rows in a step.
        max_stale: see above.
        options: those of `AlgorithmLearner`.
    """

    def __init__(self, context: RoleContext, *, rollout: int, max_stale: int = 1, **options: Any) -> None:
        super().__init__(context, **options)
        assert isinstance(self.algorithm.settings, OnPolicySettings)
        self._cursor = Cursor(self.replay)
        if context.life > 1:  # the previous process may have ended before it trained on the newest rows
            self._cursor.resume(0)
        self._rollout, self._least, self._max_stale = rollout, max(2, rollout // 2), max_stale
        self._held: dict[str, npt.NDArray[Any]] = {}
        self._published = self._oldest_use = self.stale = 0

    def step(self) -> None:
        self.follow_curriculum()
        self._take_rows()
        usable = self._held["updates"] >= max(self._published - self._max_stale, self._oldest_use)
        late = max(0, int(usable.sum()) // self._rollout - 1 - self._max_stale) * self._rollout
        dropped = int((~usable).sum()) + late
        self.stale += dropped
        self.context.words[Word.ROWS_DROPPED] += dropped
        self._held = {name: column[usable][late:] for name, column in self._held.items()}
        skipped = len(self._held["reward"]) < self._least
        self.tell(stale=self.stale, missed=self._cursor.missed, skipped=float(skipped))
        if skipped:
            return
        rows, self._held = self._held, {}
        if DISCOUNTED in rows:
            self.see_returns(rows[DISCOUNTED])
            rows = {**rows, "reward": self.scaled(rows["reward"])}
        update = self.learn(rollout(rows, self.algorithm))
        self.see(rows["observation"])
        self.tell(**update.metrics)

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        self._published = self.updates
        return super().publication()

    def adopted(self, extra: Mapping[str, Any]) -> None:
        if self._normaliser is not None:  # the weights contain the statistics, otherwise one rollout would replace them
            own = self._features[0]
            self._normaliser.adopt(int(extra["seen"]), own.mean.cpu().numpy(), own.scale.cpu().numpy())
        # The previous process may have trained on all rows of weights before its last publication.
        self._published = self._oldest_use = self.updates

    def save(self) -> dict[str, Any]:
        self._take_rows()
        return {**super().save(), "stale": self.stale, "held": dict(self._held), "at": self._cursor.at}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._published, self.stale = self.updates, int(state["stale"])
        self._held = {name: np.array(column) for name, column in state["held"].items()}
        self._cursor.resume(state["at"])  # workers may have added rows since, before this process was ready

    def _take_rows(self) -> None:
        missed = self._cursor.missed
        columns = self._cursor.take()
        self.context.words[Word.ROWS_DROPPED] += self._cursor.missed - missed
        if self._held:
            columns = {name: np.concatenate((self._held[name], column)) for name, column in columns.items()}
        self._held = columns


class Values(Protocol):
    """What estimates values: an algorithm."""

    def values(self, observation: npt.NDArray[Any], memory: npt.NDArray[Any] | None = None) -> Floats:
        """Return values (n,) of rows (n, ...)."""

    def remembered(self, observation: npt.NDArray[Any], memory: npt.NDArray[Any]) -> Floats:
        """Return the memory (n, numbers) after rows (n, ...), of what remembers."""


def _valued(learner: Values, observation: npt.NDArray[Any], *memory: npt.NDArray[Any]) -> Floats:
    """Return the values of rows. Raises AlgorithmUnusable: they are not one number a row, and would be spread."""
    found: Any = learner.values(observation, *memory)  # an algorithm may be anyone's
    if np.shape(found) != (len(observation),):
        what = f"{type(learner).__name__}.values returned the shape {np.shape(found)}"
        raise AlgorithmUnusable(f"{what}, expected ({len(observation)},), a number for each observation")
    return found  # type: ignore[no-any-return]


def rollout(rows: Mapping[str, npt.NDArray[Any]], learner: Values) -> Rollout:
    """Create a rollout from the rows of several environments.

    It has a column for each environment if all made as many steps, otherwise one long column. An episode that was
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
    memory = (rows[MEMORY],) if MEMORY in rows else ()
    if truncated.any():
        after = [learner.remembered(rows["observation"][truncated], each[truncated]) for each in memory]
        final[truncated] = _valued(learner, rows["next_observation"][truncated], *after)
    _, counts = np.unique(environment, return_counts=True)
    columns = len(counts) if (counts == counts[0]).all() else 1

    def shaped(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(column.reshape(columns, -1, *column.shape[1:]).swapaxes(0, 1))

    return Rollout(
        observation=shaped(rows["observation"]),
        action=shaped(rows["action"]),
        log_prob=shaped(rows["log_prob"]),
        value=shaped(_valued(learner, rows["observation"], *memory)),
        reward=shaped(rows["reward"]),
        terminated=shaped(rows["terminated"].astype(np.bool_)),
        ended=shaped(ended),
        next_value=shaped(final),
        last_value=np.zeros(columns, np.float32),
        mask=shaped(rows[MASK].astype(np.bool_)) if MASK in rows else None,
        memory=shaped(rows[MEMORY]) if MEMORY in rows else None,
    )
