"""The learner of algorithms that learn from a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from jurybox.training.algorithms.base import AlgorithmUnusable, Batch, OffPolicySettings
from jurybox.training.replay import Windows
from jurybox.training.replay.batch import BatchOnDevice
from jurybox.training.roles.learner import AlgorithmLearner
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.spaces import DISCOUNTED, MASK

_REPORT_EVERY = 10  # learner steps between two reports of the losses, since reading a tensor's value takes time
_UPDATE_EVERY = 50  # learner steps between two updates of the normaliser
_SAMPLE_ROWS, _FIRST_SAMPLE_ROWS = 256, 8192  # rows that it sees at an update


class OffPolicyLearner(AlgorithmLearner):
    """An algorithm that learns from a replay. One step is one update.

    Args:
        first: rows that the replay has to hold before its first step.
        stack: observations of an environment that the network sees side by side; None: one, without a dimension of its
            own.
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
        stack: int | None = None,
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
        windows = Windows(n_step=s.n_steps, gamma=s.gamma, next=following)
        if stack is not None:
            windows = Windows(n_step=s.n_steps, gamma=s.gamma, next=following, stack=stack, stacked=("observation",))
        self._batch = self.replay.batch(s.batch_size, windows, pinned=self._device != "cpu")
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
        update = self.learn(batch if self._augment is None else self._augment(batch))
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
