"""Infos of many environments as one dictionary, by Gymnasium's rules: every key has a mask of who set it."""

from __future__ import annotations

from typing import Any

import numpy as np

from jurybox.training.vector.layout import take


def shared_infos(fields: dict[str, Any], told: dict[str, Any], rows: Any) -> dict[str, Any]:
    """Copies of the declared fields, those that nobody set left out."""
    infos: dict[str, Any] = {}
    for name, field in fields.items():
        mask = told[name][rows]
        if mask.any():
            values = take(field, rows)
            values[~mask] = 0
            infos[name], infos[f"_{name}"] = values, mask.copy()
    return infos


def add(infos: dict[str, Any], info: dict[str, Any], row: int, n: int) -> None:
    """Put one environment's info into row `row` of `n`, as `VectorEnv._add_info` does."""
    for name, value in info.items():
        if isinstance(value, dict):
            add(infos.setdefault(name, {}), value, row, n)
        else:
            if name not in infos:
                infos[name] = _empty(value, n)
            infos[name][row] = value
        infos.setdefault(f"_{name}", np.zeros(n, np.bool_))[row] = True


def _empty(value: Any, n: int) -> np.ndarray[Any, Any]:
    if isinstance(value, bool | int | float | np.number | np.bool_):
        return np.zeros(n, dtype=type(value))
    if isinstance(value, np.ndarray):
        return np.zeros((n, *value.shape), dtype=value.dtype)
    return np.full(n, None, dtype=object)
