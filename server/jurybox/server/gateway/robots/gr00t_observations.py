"""GR00T's observations, in its two forms, as a model's inputs: `video/CAMERA`, `state/NAME` and `language/NAME`.

    nested  {"video": {CAMERA: (B, T, H, W, 3)}, "state": {NAME: (B, T, D)}, "language": {NAME: [[text], ...]}}
    flat    {"video.CAMERA": ..., "state.NAME": ..., NAME: [text, ...]}, whose answers have the names `action.NAME`

Older robots leave out the batch axis B. T is the number of a modality's `delta_indices`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jurybox.protocol.spec import ModelSpec
from jurybox.server.settings.robot_protocols import ACTION, AXES, MODALITY_FIELDS, modalities

_FIRST = MODALITY_FIELDS[:2]  # of N1.5


class Gr00tObservation(NamedTuple):
    """An observation.

    Attributes:
        values: by name of input.
        flat: whether it came in the flat form.
        batched: whether it came with a batch axis.
    """

    values: dict[str, Any]
    flat: bool
    batched: bool

    def answer(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's outputs by the names, and with the axes, that the robot expects."""
        lead = ACTION if self.flat else ""
        return {
            lead + name.removeprefix(ACTION): value if self.batched or len(value) != 1 else value[0]
            for name, value in outputs.items()
        }


def gr00t_observation(given: Mapping[str, Any]) -> Gr00tObservation:
    """Read an observation of either form; what is in neither is left to `observations.rows_of`."""
    values: dict[str, Any] = {}
    flat = False
    for key, value in given.items():
        kind, dot, name = key.partition(".")
        if kind in AXES and dot:
            values[f"{kind}/{name}"] = value
            flat = True
        elif isinstance(value, Mapping):
            values |= {f"{key}/{name}": one for name, one in value.items()}
        else:
            values[f"language/{key}"] = value
    arrays = {name: one for name, one in values.items() if isinstance(one, np.ndarray) and one.dtype.kind != "U"}
    axes = {name: array.ndim - AXES.get(name.partition("/")[0], array.ndim) for name, array in arrays.items()}
    if arrays and set(axes.values()) == {-1}:
        return Gr00tObservation(values | {name: array[None] for name, array in arrays.items()}, flat, False)
    return Gr00tObservation(values, flat, True)


def modality_document(spec: ModelSpec, given: Mapping[str, Mapping[str, Any]], like: str) -> dict[str, Any]:
    """Return what `get_modality_config` answers.

    Args:
        spec: the model's. Its names are the keys; the times of an input, and the steps of an output, are the number of
            `delta_indices`: those of an input end with the present, 0, those of an output begin with it.
        given: fields by modality that replace these.
        like: "n1.5" or "n1.6".

    Raises:
        SpecMismatch: see `modalities`.
    """
    found = {
        kind: dict.fromkeys(MODALITY_FIELDS) | fields | dict(given.get(kind, {}))
        for kind, fields in modalities(spec).items()
    }
    return {
        kind: {
            "__ModalityConfig_class__": True,
            "as_json": json.dumps({key: fields[key] for key in _FIRST}) if like == "n1.5" else fields,
        }
        for kind, fields in found.items()
    }
