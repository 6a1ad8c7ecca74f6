"""States of torch objects as nested dicts of arrays and numbers, which state files can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimiser remembers of its parameters, by their number. Its settings are not in it."""
    remembered = optimiser.state_dict()["state"]
    return {str(number): dict(values) for number, values in remembered.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what `optimiser_state` gave, into one over the same parameters."""
    whole = optimiser.state_dict()
    whole["state"] = {
        int(number): {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in values.items()
        }
        for number, values in state.items()
    }
    optimiser.load_state_dict(whole)
