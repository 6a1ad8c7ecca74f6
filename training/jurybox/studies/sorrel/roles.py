"""The roles of a sorrel experiment in several processes: an actor with the environment, and a learner per model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.studies.sorrel.models import (
    EPOCH_BEGINS,
    EPOCH_ENDS,
    TRANSITION,
    GlobalRandom,
    MemoryRecorder,
    ModelWeights,
    acting_part,
    is_on_policy,
    remember,
)
from jurybox.training.algorithms.torch_states import as_tensors, optimiser_state, restore_optimiser
from jurybox.training.replay.cursor import Cursor
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.role_context import Actor, Learner, RoleContext

Make = tuple[str, Mapping[str, Any]]


class SorrelActor(Actor):
    """The actor. A step is one turn of the environment, with the same calls as in sorrel's `run_experiment`.

    What the agents add to their memories is also sent to their learners.

    Args:
        context: the role's context.
        make: "package.module:callable" that returns the environment, and its keyword arguments.
        groups: the numbers of the agents that share a model, by the name of its replay and channel.
    """

    def __init__(self, context: RoleContext, *, make: Make, groups: Mapping[str, Sequence[int]]) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        with GlobalRandom(context.seed)(), context.resetting():
            self.env: Any = load(make[0])(**make[1])
        # A new state: models without a given seed seed the global generators from the operating system.
        self._random = GlobalRandom(context.seed)
        self._recorders = {}
        for group, members in groups.items():
            model = self.env.agents[members[0]].model
            self._recorders[group] = MemoryRecorder(context.replay(group).add, model)
            context.follow(group, ModelWeights(context.reader(group), model))
        # A new life begins the epoch again in which the one before it died.
        self._epoch, self._runs = context.own_episodes, False

    def step(self) -> int:
        with self._random():
            if not self._runs:
                self._begin()
            self.env.take_turn(self._epoch)
            if self.env.turn >= self.env.config.experiment.max_turns or (
                self.env.world.is_done and self.env.stop_if_done
            ):
                self._end()
        return 1

    def save(self) -> dict[str, Any]:
        # In general a world cannot be saved: a resumed run begins the current epoch again, and this one goes on.
        return {"random": self._random.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._random.restore(state["random"])

    def _begin(self) -> None:
        with self.context.resetting():
            self.env.reset()
        for recorder in self._recorders.values():
            recorder.mark(EPOCH_BEGINS, self._epoch)
        for agent in self.env.agents:
            self.env._model_start_epoch_action(agent, self._epoch)
        self._runs = True

    def _end(self) -> None:
        self.env.world.is_done = True
        for agent in self.env.agents:
            self.env._model_end_epoch_action(agent, self._epoch)
        for recorder in self._recorders.values():
            recorder.mark(EPOCH_ENDS, self._epoch)
        self.context.episode(total=float(self.env.world.total_reward), length=self.env.turn)
        self._epoch += 1
        self._runs = False


class SorrelLearner(Learner):
    """A learner. A step is one `train_step` of the model, whose memory holds what its agents added to theirs.

    Off-policy models add all rows that have arrived; on-policy ones add one epoch at a time, and skip an epoch if some
    of its rows were overwritten before they were read.

    Args:
        context: the role's context.
        make: as for the actor; only the model of this environment is used.
        group: name of the replay and the channel.
        members: numbers of the agents.
    """

    def __init__(self, context: RoleContext, *, make: Make, group: str, members: Sequence[int]) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self._group = group
        seed = int(np.random.SeedSequence([context.plan.seed, context.number]).generate_state(1)[0])
        with GlobalRandom(seed)():
            self._env: Any = load(make[0])(**make[1])
        self._random = GlobalRandom(seed)
        self._agents = [self._env.agents[number] for number in members]
        self.model: Any = self._agents[0].model
        self._decay = self._env.config.model.get("epsilon_decay", 0.0)
        self._on_policy = is_on_policy(self.model)
        self._rows = Cursor(context.replay(group))
        self._queue: deque[dict[str, Any]] = deque()
        self._read_any, self._whole, self._complete = False, True, False
        # Rows that are there already were processed by an earlier learner: they fill the memory, but their epochs have
        # already been counted.
        self._old = self._rows.at  # the ticket of the first row that counts
        self._rows.resume(0)

    def ready(self) -> bool:
        with self._random():
            self._read_rows()
        return self._complete or (not self._on_policy and self._read_any)

    def step(self) -> None:
        with self._random():
            loss = float(np.mean(self._env._model_train_step(self._agents[0])))
        self._complete = False
        counted = {f"loss_{self._group}": loss, f"missed_{self._group}": float(self._rows.missed)}
        self.context.metrics(**counted, epsilon=float(self.model.epsilon))

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        return acting_part(self.model), {"epsilon": float(self.model.epsilon)}

    def adopt(self, published: WeightsReader) -> None:
        found = published.read()
        state = as_tensors(found.state)
        acting_part(self.model).load_state_dict(state)
        target = getattr(self.model, "models", {}).get("target")
        if target is not None:
            target.load_state_dict(state)
        self.model.epsilon = found.extra["epsilon"]

    def save(self) -> dict[str, Any]:
        optimiser = getattr(self.model, "optimizer", None)
        return {
            "model": dict(self.model.state_dict()),
            "optimiser": {} if optimiser is None else optimiser_state(optimiser),
            "epsilon": float(self.model.epsilon),
            "random": self._random.state(),
            "at": max(self._old, int(self._queue[0]["ticket"]) if self._queue else self._rows.at),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        put_back(self.model, state)
        if state["optimiser"]:
            restore_optimiser(self.model.optimizer, state["optimiser"])
        self._random.restore(state["random"])
        if self.context.life == 1:
            # Rows that the actor has added since, before this process was ready, are new, as are those that waited.
            self._old = int(state["at"])

    def _read_rows(self) -> None:
        missed = self._rows.missed
        columns = {**self._rows.take(), "ticket": self._rows.tickets}
        if self._rows.missed > missed:
            self._queue.clear()
            self._whole = False
        new = len(columns["ticket"])
        self._read_any = self._read_any or new > 0
        self._queue.extend({name: column[number] for name, column in columns.items()} for number in range(new))
        while self._queue and not self._complete:
            self._apply_row(self._queue.popleft())

    def _apply_row(self, row: Mapping[str, Any]) -> None:
        kind, epoch, is_old = int(row["kind"]), int(row["epoch"]), int(row["ticket"]) < self._old
        if kind == TRANSITION:
            if self._whole or not self._on_policy:
                remember(self.model, row)
        elif kind == EPOCH_BEGINS:
            self._whole = True
            for agent in self._agents:
                self._env._model_start_epoch_action(agent, epoch)
        elif kind == EPOCH_ENDS and (self._whole or not self._on_policy):
            for agent in self._agents:
                self._env._model_end_epoch_action(agent, epoch)
            if not is_old:
                for _ in self._agents if self._decay else ():
                    self.model.epsilon_decay(self._decay)
            self._complete = self._on_policy and not is_old


def put_back(model: Any, state: Mapping[str, Any]) -> None:
    """Restore a model from its learner's state: weights and epsilon."""
    model.load_state_dict(as_tensors(state["model"]))
    model.epsilon = state["epsilon"]
