"""LeRobot's checkpoints of ACT, served from a folder on disk.

The folder is written by LeRobot's `save_pretrained` or by its training: config.json, model.safetensors, and since
version 0.4 the pipelines policy_preprocessor.json and policy_postprocessor.json with their statistics; earlier versions
stored those among the weights. Nothing is downloaded or unpickled. A folder with unknown contents that would change the
answers is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import plain
from jurybox.server.models import ServedModel
from jurybox.server.robot_policies.act import ActNetwork, ActSizes, resnet

__all__ = ["lerobot"]

_EPS = 1e-8
_STATISTICS = {  # the statistics that each kind of normalisation uses
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "IDENTITY": (),
}
_HARMLESS = ("to_batch_processor", "device_processor")  # steps that the engine performs itself
_TRAINING = ("vae_encoder", "vae_encoder_pos_enc")  # prefixes of weights that only training needs


def lerobot(folder: str, horizon: int = 0) -> ServedModel:
    """Load the ACT policy in a LeRobot folder; a model factory.

    The inputs are the policy's features: images uint8 (height, width, 3), states float32. The output is `actions`,
    float32 (horizon, dimension), the same as those of LeRobot's policy and postprocessor.

    Args:
        folder: contains config.json and model.safetensors.
        horizon: the number of actions of a chunk that are returned; 0: as many as LeRobot would execute
            (`n_action_steps`), or all if the policy averages chunks.

    Raises:
        ValueError, OSError: the folder has no such policy.

    Example:
        [models.arm]
        factory = "jurybox.server.robot_policies:lerobot"
        args = { folder = "/models/act_aloha" }
    """
    where = Path(folder)
    config = _object(where / "config.json")
    if config.get("type") != "act":
        raise ValueError(f"{where}/config.json has type {plain(config.get('type'), 80)!r}: expected 'act'")
    features: dict[str, dict[str, Any]] = config["input_features"]
    images = [name for name, feature in features.items() if feature["type"] == "VISUAL"]
    states = {name: int(feature["shape"][0]) for name, feature in features.items() if feature["type"] != "VISUAL"}
    if not states.keys() <= {"observation.state", "observation.environment_state"}:
        raise ValueError(
            f"{where}/config.json has the features {', '.join(map(plain, states))}: expected images, observation.state "
            "and observation.environment_state"
        )
    if "action" not in config["output_features"]:
        raise ValueError(f"{where}/config.json has no output feature 'action'")
    action = int(config["output_features"]["action"]["shape"][0])
    sizes = ActSizes(
        action=action,
        chunk=config["chunk_size"],
        state=states.get("observation.state", 0),
        environment=states.get("observation.environment_state", 0),
        width=config["dim_model"],
        heads=config["n_heads"],
        feedforward=config["dim_feedforward"],
        encoder_layers=config["n_encoder_layers"],
        decoder_layers=config["n_decoder_layers"],
        latent=config["latent_dim"],
        pre_norm=config["pre_norm"],
        activation=_one_of(config["feedforward_activation"], ("relu", "gelu"), f"{where}: feedforward_activation"),
        dropout=0.0,
    )
    if config.get("replace_final_stride_with_dilation"):
        raise ValueError(f"{where}: replace_final_stride_with_dilation is set, which no backbone known here has")
    if config.get("use_peft"):
        raise ValueError(f"{where} holds an adapter (use_peft): expected whole weights; merge them with LeRobot")
    executed = sizes.chunk if config.get("temporal_ensemble_coeff") is not None else config["n_action_steps"]
    if not 0 <= horizon <= sizes.chunk:
        raise ValueError(f"horizon = {horizon}: expected 1 to {sizes.chunk}, the policy's chunk_size, or 0")
    net = ActNetwork(sizes, resnet(config["vision_backbone"]) if images else None)
    weights = load_file(where / "model.safetensors")
    modes: dict[str, str] = config["normalization_mapping"]
    renamed: dict[str, str] = {}
    if (where / "policy_preprocessor.json").exists():
        before, eps, renamed = _pipeline(where, "policy_preprocessor", "normalizer_processor")
        after, _, _ = _pipeline(where, "policy_postprocessor", "unnormalizer_processor")
    else:
        before, after, eps = _within(weights, "normalize_inputs"), _within(weights, "unnormalize_outputs"), _EPS
    _load(net, weights, where)
    scales = {
        name: _Scale(where, name, modes.get(feature["type"], "IDENTITY"), before.get(name, {}), eps)
        for name, feature in features.items()
    }
    unscale = _Scale(where, "action", modes.get("ACTION", "IDENTITY"), after.get("action", {}), eps)
    theirs = {new: old for old, new in renamed.items()}
    inputs = {
        theirs.get(name, name): TensorSpec("uint8", _height_width_3(where, name, feature["shape"]))
        if name in images
        else TensorSpec("float32", (states[name],))
        for name, feature in features.items()
    }
    horizon = horizon or executed
    module = _Served(net.eval(), list(features), images, scales, unscale, horizon)
    return ServedModel(module, inputs, {"actions": TensorSpec("float32", (horizon, action), finite=True)})


class _Served(nn.Module):
    """Computes actions from observations: normalisation, network, denormalisation."""

    def __init__(
        self,
        net: ActNetwork,
        names: list[str],
        images: list[str],
        scales: Mapping[str, _Scale],
        unscale: _Scale,
        horizon: int,
    ) -> None:
        super().__init__()
        self.net, self._names, self._images, self._horizon = net, names, images, horizon
        self.scales = nn.ModuleList(scales[name] for name in names)
        self.unscale = unscale

    def forward(self, *rows: Tensor) -> Tensor:
        given: dict[str, Tensor] = {}
        for name, scale, row in zip(self._names, self.scales, rows, strict=True):
            given[name] = scale(row.permute(0, 3, 1, 2).float() / 255 if name in self._images else row)
        chunk = self.net(
            given.get("observation.state"),
            given.get("observation.environment_state"),
            [given[name] for name in self._images],
        )
        actions: Tensor = self.unscale.inverse(chunk)[:, : self._horizon]
        return actions


class _Scale(nn.Module):
    """The normalisation of one feature. Raises ValueError if its statistics are missing."""

    low: Tensor
    high: Tensor

    def __init__(self, where: Path, name: str, mode: str, statistics: Mapping[str, Tensor], eps: float) -> None:
        super().__init__()
        _one_of(mode, tuple(_STATISTICS), f"{where}: normalization of {name}")
        wanted = _STATISTICS[mode]
        if missing := [kind for kind in wanted if kind not in statistics]:
            raise ValueError(f"{where} has no {', '.join(missing)} of {plain(name, 80)}, which {mode} needs")
        self._mode, self._eps = mode, eps
        for kind, value in zip(("low", "high"), (statistics[kind].float() for kind in wanted), strict=False):
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{where}: the statistics of {plain(name, 80)} are no finite numbers: never trained?")
            self.register_buffer(kind, value.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self._mode == "IDENTITY":
            return x
        if self._mode == "MEAN_STD":
            return (x - self.low) / (self.high + self._eps)
        return 2 * (x - self.low) / self._span() - 1

    def inverse(self, x: Tensor) -> Tensor:
        """Undo the normalisation."""
        if self._mode == "IDENTITY":
            return x
        if self._mode == "MEAN_STD":
            return x * self.high + self.low
        return (x + 1) / 2 * self._span() + self.low

    def _span(self) -> Tensor:
        span = self.high - self.low
        return torch.where(span == 0, torch.full_like(span, self._eps), span)


def _pipeline(where: Path, name: str, wanted: str) -> tuple[dict[str, dict[str, Tensor]], float, dict[str, str]]:
    """Return a saved pipeline's statistics by feature, their epsilon, and its renamed keys (from, to)."""
    statistics: dict[str, dict[str, Tensor]] = {}
    eps, renamed = _EPS, dict[str, str]()
    for step in _object(where / f"{name}.json")["steps"]:
        kind, settings = step.get("registry_name"), step.get("config", {})
        if kind == "rename_observations_processor":
            renamed = dict(settings.get("rename_map", {}))
        elif kind == wanted:
            if settings.get("normalize_observation_keys"):
                raise ValueError(f"{where}/{name}.json: normalize_observation_keys are not known here")
            eps = float(settings.get("eps", _EPS))
            if file := step.get("state_file"):
                if Path(file).name != file:
                    raise ValueError(f"{where}/{name}.json: state_file {plain(file, 80)!r}: expected a file beside it")
                for key, value in load_file(where / file).items():
                    feature, _, statistic = key.rpartition(".")
                    statistics.setdefault(feature, {})[statistic] = value
        elif kind not in _HARMLESS:
            raise ValueError(
                f"{where}/{name}.json has a step {plain(kind, 80)!r}: expected {wanted}, "
                f"rename_observations_processor, {', '.join(_HARMLESS)}; without it the actions would be wrong"
            )
    return statistics, eps, renamed


def _within(weights: dict[str, Tensor], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Remove and return the statistics among the weights, where LeRobot stored them before version 0.4."""
    statistics: dict[str, dict[str, Tensor]] = {}
    for key in [key for key in weights if key.startswith(f"{prefix}.buffer_")]:
        feature, _, statistic = key.removeprefix(f"{prefix}.buffer_").rpartition(".")
        name = feature.replace("observation_images_", "observation.images.", 1)
        name = {"observation_state": "observation.state", "observation_image": "observation.image",
                "observation_environment_state": "observation.environment_state"}.get(name, name)  # fmt: skip
        statistics.setdefault(name, {})[statistic] = weights.pop(key)
    for key in [key for key in weights if key.startswith(("normalize_targets.", "unnormalize_targets."))]:
        del weights[key]  # only the training's loss uses it
    return statistics


def _load(net: ActNetwork, weights: Mapping[str, Tensor], where: Path) -> None:
    """Load the network's weights. Raises ValueError if one is missing, unknown or of another shape."""
    mine = {
        key.removeprefix("model."): value
        for key, value in weights.items()
        if key.startswith("model.") and not key.removeprefix("model.").startswith(_TRAINING)
    }
    strange = [key for key in weights if not key.startswith("model.")]
    wanted = net.state_dict()
    strange += [f"model.{key}" for key in mine if key not in wanted]
    problems = [f"model.{key} is missing" for key in wanted if key not in mine]
    problems += [f"{key} is not the network's" for key in strange]
    problems += [
        f"model.{key} has shape {list(mine[key].shape)}, expected {list(value.shape)}"
        for key, value in wanted.items()
        if key in mine and mine[key].shape != value.shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        shown = "; ".join(plain(problem, 200) for problem in problems[:5])
        raise ValueError(f"{where}/model.safetensors does not fit config.json: {shown}{more}")
    net.load_state_dict(mine)


class _JsonObject(dict[str, Any]):
    """A JSON object of a file. Raises ValueError for a missing key."""

    where = ""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.where} has no {key!r}: expected what LeRobot's save_pretrained writes")


def _object(path: Path) -> _JsonObject:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}: expected a JSON object")
    named = _JsonObject(found)
    named.where = str(path)
    return named


def _one_of(value: Any, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        raise ValueError(f"{what} is {plain(value, 80)!r}: expected one of {', '.join(known)}")
    return str(value)


def _height_width_3(where: Path, name: str, shape: list[int]) -> tuple[int, int, int]:
    if len(shape) != 3 or shape[0] != 3:
        raise ValueError(f"{where}: {plain(name, 80)} has shape {shape}: expected [3, height, width]")
    return shape[1], shape[2], 3
