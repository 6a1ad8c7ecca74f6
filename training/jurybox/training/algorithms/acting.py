"""Acting with a published actor, without torch: weights and statistics in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


class NumpyActor:
    """The forward pass of `networks.Actor` in NumPy.

    For a handful of rows it takes less time than torch needs to dispatch its operations, and an env worker that uses
    it never imports torch.

    Args:
        weights: the actor's state_dict as arrays (or CPU tensors), in its order.
        extra: what was published with it: `Normaliser.as_extra`. Empty: observations are taken as they come.
    """

    def __init__(self, weights: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> None:
        arrays = [np.asarray(value, np.float32) for value in weights.values()]
        if len(arrays) < 2 or len(arrays) % 2:
            raise ValueError(
                f"expected weights and biases of layers in turn, got {len(arrays)} arrays: {list(weights)}"
            )
        self._layers = [(np.ascontiguousarray(w.T), b.copy()) for w, b in zip(arrays[::2], arrays[1::2], strict=True)]
        given = extra or {}
        self._clip = np.float32(given.get("observation_clip", np.inf))
        if "observation_mean" in given:
            # The normaliser is linear but for its clipping, so it stays a step of its own.
            self._mean = np.asarray(given["observation_mean"], np.float32)
            self._scale = np.asarray(given["observation_scale"], np.float32)
        else:
            self._mean, self._scale = np.zeros(1, np.float32), np.ones(1, np.float32)

    @property
    def weights(self) -> dict[str, Array]:
        """The weights as `networks.Actor` names them."""
        named: dict[str, Array] = {}
        for number, (w, b) in enumerate(self._layers):
            named |= {f"layers.{number}.weight": np.ascontiguousarray(w.T), f"layers.{number}.bias": b}
        return named

    @property
    def extra(self) -> dict[str, Any]:
        """The statistics, as given."""
        return {
            "observation_mean": self._mean,
            "observation_scale": self._scale,
            "observation_clip": float(self._clip),
        }

    def __call__(self, observations: Array) -> Array:
        """Actions (n, action) in [-1, 1] for raw observations (n, observation)."""
        x = (observations - self._mean) * self._scale
        np.minimum(np.maximum(x, -self._clip, out=x), self._clip, out=x)
        *hidden, (last_weight, last_bias) = self._layers
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            np.maximum(x, 0.0, out=x)
        x = x @ last_weight
        x += last_bias
        out: Array = np.tanh(x, out=x)
        return out
