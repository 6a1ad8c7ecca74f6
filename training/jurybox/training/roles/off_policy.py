"""The learner of algorithms that learn from a replay."""

from __future__ import annotations

from typing import Any

from jurybox.training.algorithms.base import OffPolicySettings
from jurybox.training.replay import Windows
from jurybox.training.replay.batch import BatchOnDevice
from jurybox.training.roles.learner import AlgorithmLearner
from jurybox.training.runtime.role_context import RoleContext

_REPORT_EVERY = 10  # learner steps between two reports of the losses, since reading a tensor's value takes time
_UPDATE_EVERY = 50  # learner steps between two updates of the normaliser
_SAMPLE_ROWS, _FIRST_SAMPLE_ROWS = 256, 8192  # rows that it sees at an update


class OffPolicyLearner(AlgorithmLearner):
    """An algorithm that learns from a replay. One step is one update.

    Args:
        first: rows that the replay has to hold before its first step.
        stack: observations of an environment that the network sees side by side; None: one, without a dimension of its
            own.
        options: those of `AlgorithmLearner`.
    """

    def __init__(self, context: RoleContext, *, first: int, stack: int | None = None, **options: Any) -> None:
        super().__init__(context, **options)
        s = self.algorithm.settings
        assert isinstance(s, OffPolicySettings)
        self._first, device = first, options.get("device", "cpu")
        windows = Windows(n_step=s.n_steps, gamma=s.gamma, next=("observation",))
        if stack is not None:
            windows = Windows(
                n_step=s.n_steps, gamma=s.gamma, next=("observation",), stack=stack, stacked=("observation",)
            )
        self._batch = self.replay.batch(s.batch_size, windows, pinned=device != "cpu")
        self._on_device = BatchOnDevice(self._batch, device)

    def ready(self) -> bool:
        return self.replay.added >= self._first

    def step(self) -> None:
        own = self.context.own_steps
        # The sampler is seeded with the step, so that checkpoints need not contain its state.
        self.replay.seed(self.seed + 2 * own)
        if self._normaliser is not None and own % _UPDATE_EVERY == 0:
            rows = _FIRST_SAMPLE_ROWS if self._normaliser.count == 0 else _SAMPLE_ROWS
            self.see(self.replay.sample(rows, uniform=True)["observation"])
        self._on_device.wait()
        self.replay.sample(self._batch.n, self._batch)
        metrics = self.learn(self._on_device.tensors())
        if own % _REPORT_EVERY == _REPORT_EVERY - 1:
            self.tell(**metrics)
