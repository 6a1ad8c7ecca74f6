"""The learner of a hockey training: TD3 on the shared replay, and the league of all collectors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.studies.hockey.actor import name_of
from jurybox.studies.hockey.game import mirrors
from jurybox.studies.hockey.league import League
from jurybox.studies.hockey.opponents import Pool
from jurybox.studies.hockey.settings import LEAVING, POOL, RESULTS, ROWS, HockeyTraining
from jurybox.training.algorithms.td3 import TD3Learner
from jurybox.training.algorithms.td3_actor import NumpyActor
from jurybox.training.replay import Windows
from jurybox.training.replay.batch import BatchOnDevice
from jurybox.training.replay.cursor import Cursor
from jurybox.training.runtime.role_context import Learner, RoleContext

_UPDATE_EVERY = 50  # learner steps between two updates of results, normaliser and pool
_SAMPLE_ROWS, _FIRST_SAMPLE_ROWS = 256, 8192  # rows that the normaliser sees at an update
_REPORT_EVERY = 10  # learner steps between two reports of the losses, since reading a tensor's value takes time


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


class HockeyLearner(Learner):
    """The learner role. One step is one step of TD3.

    The league belongs to the learner, which publishes the opponents' odds with the weights.

    Args:
        settings: arguments of `HockeyTraining`.
        sizes: sizes of an observation and of an action.
        past: name of the model for past selves on the plan's server; None without a server.
    """

    def __init__(
        self, context: RoleContext, *, settings: Mapping[str, Any], sizes: tuple[int, int], past: str | None = None
    ) -> None:
        super().__init__(context)
        torch.set_num_threads(context.spec.threads)
        self._settings = s = HockeyTraining(**settings)
        self.learner = TD3Learner(*sizes, s.learner, device=s.device, seed=s.seed)
        self.league = League(s.league)
        self._pool = Pool(context.folder(POOL), most=s.league.pool + LEAVING)
        self._left: list[str] = []  # the past selves that left the league last
        self._replay = context.replay(ROWS)
        self._results = Cursor(context.replay(RESULTS))
        self._snapshot_at = 0
        self._restored = False
        windows = Windows(n_step=s.n_steps, gamma=s.gamma, next=("observation",))
        self._batch = self._replay.batch(s.batch_size, windows, pinned=s.device != "cpu")
        self._on_device = BatchOnDevice(self._batch, s.device)
        self._weights = None if self._batch.weights is None else torch.from_numpy(self._batch.weights)
        self._mirrors = mirrors(*sizes) if s.mirror else None
        self._resources = ExitStack()
        # In a serial run this is the caller's thread, which goes on after the training.
        torch.set_flush_denormal(True)
        self._resources.callback(torch.set_flush_denormal, False)
        self._served: Any = None
        if past is not None and context.plan.server is not None:
            from jurybox.studies.hockey.served import PastSelves

            self._served = self._resources.enter_context(PastSelves(context.plan.server.address, past, sizes[0]))

    def ready(self) -> bool:
        # The newest rows of each game have no successor yet.
        return bool(self._replay.added > self._settings.unsampled)

    def step(self) -> None:
        s, own = self._settings, self.context.own_steps
        # The sampler is seeded with the step, so that checkpoints need not contain its state.
        self._replay.seed(s.seed * 1_000_003 + 2 * own)
        if own % _UPDATE_EVERY == 0:
            self._update_league()
        self._on_device.wait()
        self._replay.sample(s.batch_size, self._batch, beta=s.beta, anchor_ratio=self._anchor_ratio())
        if self._mirrors is not None:
            observation, action = self._mirrors  # every second row, since the rows from the replay's anchor come first
            self._batch["observation"][::2] *= observation
            self._batch["next_observation"][::2] *= observation
            self._batch["action"][::2] *= action
        update = self.learner.update(self._on_device.tensors(), self._weights_on_device())
        if s.prioritized:
            assert update.priorities is not None
            self._replay.update_priorities(self._batch.indices, update.priorities.cpu().numpy())
        if own % _REPORT_EVERY == _REPORT_EVERY - 1:
            self.context.metrics(**{name: float(value) for name, value in update.metrics.items()})
            self.context.metrics(**device_utilization(s.device))

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        policy = self.learner.acting()
        return policy, {"odds": self.league.odds(), "row": self.league.row(), "snapshot_at": self._snapshot_at}

    def adopt(self, published: WeightsReader) -> None:
        state, _, extra = published.read()
        self.league.take_over(extra["row"])
        self._snapshot_at = int(extra["snapshot_at"])
        # Without restored critics the policy is not taken over, because new critics would ruin it. Before the first
        # checkpoint little is lost.
        if self._restored:
            self.learner.actor.load_state_dict(
                {
                    name.removeprefix("actor."): torch.from_numpy(value.copy())
                    for name, value in state.items()
                    if name.startswith("actor.")
                }
            )

    def save(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state(),
            "league": self.league.state_dict(),
            "snapshot_at": self._snapshot_at,
            "past": {name: dict(self._pool.actor(name).state) for name in self.league.pool},
            "results_at": self._results.at,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learner.restore(state["learner"])
        self.league = League.from_state_dict(state["league"])
        self._snapshot_at = int(state["snapshot_at"])
        self._restored = True
        if self.context.life == 1:
            # The run was resumed: the folder may contain past selves from after the checkpoint, and collectors may have
            # added results since. In a later life, the published league contains the results.
            self._pool.retain(())
            self._results.resume(state["results_at"])
        # The files of past selves that have left the league since the checkpoint are gone.
        there = set(self._pool.names())
        for name, actor in state["past"].items():
            if name not in there:
                self._pool.keep(name, NumpyActor(actor))
            if self._served is not None:
                self._served.keep(name, actor)

    def close(self) -> None:
        self._resources.close()

    def _update_league(self) -> None:
        self._take_results()
        first = self.learner.normaliser.count == 0
        n = _FIRST_SAMPLE_ROWS if first else _SAMPLE_ROWS
        rows = self._replay.sample(n, uniform=True, anchor_ratio=self._anchor_ratio())
        self.learner.normaliser.update(rows["observation"])
        self.learner.refresh_normaliser()
        s, episodes = self._settings, self.context.scoreboard.episodes
        if s.league.pool and self.context.own_steps and episodes - self._snapshot_at >= s.snapshot_every:
            self._snapshot_at = episodes
            name, left = self.league.add(self.context.own_steps)
            actor = self.learner.numpy_actor()
            self._pool.keep(name, actor)
            if left is not None:
                self._left = [*self._left, left][-LEAVING:]
            self._pool.retain((*self._left, *self.league.pool))
            if self._served is not None:
                self._served.keep(name, actor.state)
        self.context.metrics(pool=len(self.league.pool))

    def _anchor_ratio(self) -> float:
        """Return the anchor's share of a batch: 0 until the anchor has enough rows."""
        parts, s = self._replay.parts, self._settings
        return s.anchor_ratio if len(parts) > 1 and parts[1].ring.size >= s.least_kept else 0.0

    def _take_results(self) -> None:
        results = self._results.take()
        for opponent, winner in zip(results["opponent"].tolist(), results["winner"].tolist(), strict=True):
            self.league.record(name_of(opponent, self.league.anchors), winner)

    def _weights_on_device(self) -> torch.Tensor | None:
        return self._weights if self._weights is None else self._weights.to(self.learner.device)
