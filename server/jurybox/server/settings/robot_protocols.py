"""What the protocols of robots expect of a model and of its settings; docs/robots.md has a page for each."""

from __future__ import annotations

from typing import Any

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

WITHOUT_TLS = ("gr00t", "lerobot")  # protocols whose clients have no TLS
WITHOUT_TOKEN = ("lerobot",)  # and no token
# Of GR00T's modality document.
MODALITIES = ("video", "state", "action", "language")
MODALITY_FIELDS = (
    "delta_indices", "modality_keys", "sin_cos_embedding_keys", "mean_std_embedding_keys", "action_configs",
)  # fmt: skip
AXES = {"video": 5, "state": 3}  # of GR00T's arrays, with a batch axis
ACTION = "action."  # begins the names of actions in GR00T's flat form


def problem(speaks: str, spec: ModelSpec) -> str:
    """Return why robots that speak a protocol can never be answered with a model; empty: they can."""
    if speaks == "act" and spec.state:
        return (
            f"model {spec.name!r} keeps state, and requests of POST /act name no episode: expected a model without "
            "state, or a protocol whose connections are episodes (speaks = 'openpi' or 'gr00t')"
        )
    if speaks == "gr00t":
        try:
            modalities(spec)
        except SpecMismatch as error:
            return f"model {spec.name!r}: {error}"
    return _lerobots_problem(spec) if speaks == "lerobot" else ""


def _lerobots_problem(spec: ModelSpec) -> str:
    for name, tensor in spec.required.items():
        if (tensor.dtype == BYTES) is not (name == "task") or not (name == "task" or name.startswith("observation.")):
            return (
                f"input {name!r} of model {spec.name!r}, {tensor}: expected observation.state, "
                "observation.images.CAMERA, and task for text"
            )
    actions = spec.outputs.get("actions") or (next(iter(spec.outputs.values())) if len(spec.outputs) == 1 else None)
    if actions is None or not 1 <= len(actions.shape) <= 2:
        return f"model {spec.name!r} has {', '.join(spec.outputs)}: expected one output, or actions, of (steps, motors)"
    return ""


def modalities(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return keys and times of each modality of a model.

    Raises:
        SpecMismatch: an input is of no modality, or those of one modality differ in their times.
    """
    times: dict[str, dict[str, int]] = {}
    for name, tensor in spec.required.items():
        kind, slash, key = name.partition("/")
        if (
            not slash
            or kind not in MODALITIES
            or kind == "action"
            or (kind == "language") is not (tensor.dtype == BYTES)
        ):
            raise SpecMismatch(
                f"input {name!r}, {tensor}: expected video/CAMERA and state/NAME for numbers, language/NAME for text"
            )
        times.setdefault(kind, {})[key] = _times(tensor, AXES.get(kind, 2) - 1)
    times["action"] = {name.removeprefix(ACTION): _times(tensor, 2) for name, tensor in spec.outputs.items()}
    if "error" in times["action"]:
        raise SpecMismatch("an output named 'error' would be read as an error: expected another name")
    for kind, of in times.items():
        if len(set(of.values())) > 1:
            raise SpecMismatch(f"{kind} has different times ({of}): expected as many in each of a modality")
    return {
        kind: {"delta_indices": _deltas(kind, next(iter(of.values()))), "modality_keys": list(of)}
        for kind, of in times.items()
    }


def _times(spec: TensorSpec, axes: int) -> int:
    """Return the times of an input, or the steps of an output: its first axis, if it has as many as those with it."""
    return max(1, spec.shape[0]) if len(spec.shape) == axes else 1


def _deltas(kind: str, times: int) -> list[int]:
    return list(range(times)) if kind == "action" else list(range(1 - times, 1))
