"""Acting with a published policy, without torch: weights and statistics in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


class NumpyActor:
    """The forward pass of `networks.Policy` in NumPy.

    For a handful of rows it takes less time than torch needs to dispatch its operations, and an env worker that uses
    it never imports torch.

    Args:
        state: the policy's state_dict as arrays, such as ``server.weights(name).read().state``; not copied.
        clip: the policy's.

    Raises:
        ValueError: the state is of another module.
    """

    def __init__(self, state: Mapping[str, Any], *, clip: float = 5.0) -> None:
        self.state: dict[str, Array] = {name: np.asarray(value, np.float32) for name, value in state.items()}
        try:
            self._mean = self.state["observation_mean"]
            self._scale = self.state["observation_scale"]
            layers = (len(self.state) - 2) // 2
            self._layers = [
                (
                    np.ascontiguousarray(self.state[f"actor.layers.{number}.weight"].T),
                    self.state[f"actor.layers.{number}.bias"],
                )
                for number in range(layers)
            ]
        except KeyError as error:
            raise ValueError(
                f"expected the state of a policy (observation_mean, observation_scale, actor.layers.0.weight ...), "
                f"{error} is missing among {', '.join(self.state)}"
            ) from error
        self._clip = np.float32(clip)

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
