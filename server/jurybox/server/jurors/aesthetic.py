"""Aesthetic Predictor V2.5 (discus0434, 2024): a SigLIP vision encoder and a small head that rates aesthetics."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.jurors.panels import example_images
from jurybox.server.jurors.ready import SCORE, Preprocessing, image_input, package, precision
from jurybox.server.models import RowErrors, ServedModel

_SHOWN = 5
_HEAD, _ENCODER = "scoring_head.", "vision_model."
# The range of the ratings that the head was trained to predict.
_WORST, _BEST = 1.0, 10.0
# google/siglip-so400m-patch14-384 (X. Zhai et al., "Sigmoid Loss for Language Image Pre-Training", ICCV 2023).
_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}

_HOW = (
    "expected a folder with the vision encoder of google/siglip-so400m-patch14-384 (model.safetensors) and the head of "
    "Aesthetic Predictor V2.5 converted to safetensors, or one safetensors file with both: docs/jurors.md shows the "
    "commands. Nothing is downloaded at run time"
)


class AestheticHead(nn.Module):
    """The predictor's head. Parameter names are as published; dropout is omitted, since it acts only in training."""

    def __init__(self, features: int) -> None:
        super().__init__()
        sizes = (features, 1024, 128, 64, 16, 1)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            # The published numbering counts a dropout layer after every layer but the last.
            layers += [nn.Linear(before, after), nn.Identity()]
        self.scoring_head = nn.Sequential(*layers[:-1])

    def forward(self, embedding: Tensor) -> Tensor:
        """Map embeddings (n, features), of any length, to ratings (n,), about 1 to 10."""
        rating: Tensor = self.scoring_head(F.normalize(embedding, dim=-1)).squeeze(-1)
        return rating


class AestheticPredictor(nn.Module):
    """Encoder and head.

    Args:
        encoder: a ``transformers.SiglipVisionModel``; it is called with ``pixel_values``, and its ``pooler_output`` is
            used.
        head: maps the pooled embedding to a rating.
    """

    def __init__(self, encoder: nn.Module, head: AestheticHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Rate images.

        Args:
            image: (n, size, size, 3) RGB, 0..255, uint8 or floating point.

        Returns:
            ``score`` (0 to 1) and ``rating`` (about 1 to 10), (n,) each.
        """
        dtype = next(self.head.parameters()).dtype
        embedding = self.encoder(pixel_values=normalised(image).to(dtype)).pooler_output
        rating = self.head(embedding).float()
        score = ((rating - _WORST) / (_BEST - _WORST)).clamp(0, 1)
        return {"score": score, "rating": rating}


def normalised(image: Tensor) -> Tensor:
    """Normalize images (n, size, size, 3), 0..255, to float32 (n, 3, size, size), -1..1, as SigLIP expects.

    This is its processor's mean and standard deviation of 0.5.
    """
    return image.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def siglip(weights: str = "", dtype: str = "float32") -> ServedModel:
    """Aesthetic Predictor V2.5, from weights on disk.

    Args:
        weights: a safetensors file or a folder of such files, which contain ``vision_model.*`` and ``scoring_head.*``
            (or ``layers.scoring_head.*``). A ``config.json`` in the folder, of SigLIP or its vision part, may describe
            another encoder size.
        dtype: "float32", "bfloat16" or "float16".

    Returns:
        Input ``image`` uint8 (384, 384, 3) RGB; outputs ``score`` float32 (), the rating mapped from 1..10 to 0..1 and
        clipped, and ``rating`` float32 (), the head's output.

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: transformers is not installed.
        ValueError: the weights belong to another model, or the dtype is unknown.
    """
    computed = precision(dtype)
    files = _weight_files(weights)
    transformers = package("transformers", "siglip", "siglip")
    config = transformers.SiglipVisionConfig(**_encoder_config(Path(weights)))
    tensors = _read(files)
    encoder = transformers.SiglipVisionModel(config)
    # Older releases of transformers name the encoder's parameters with the prefix, newer ones without.
    prefixed = any(name.startswith(_ENCODER) for name in encoder.state_dict())
    _load(encoder, tensors, _ENCODER, keep_prefix=prefixed, where=weights)
    head = AestheticHead(config.hidden_size)
    _load(head, tensors, _HEAD, keep_prefix=True, where=weights)
    size = int(config.image_size)
    return ServedModel(
        module=AestheticPredictor(encoder, head).to(computed).eval(),
        inputs={"image": TensorSpec("uint8", (size, size, 3))},
        outputs={"score": TensorSpec("float32"), "rating": TensorSpec("float32")},
        example=lambda rows: {"image": example_images(rows, size)},
    )


class _AnySize(nn.Module):
    """Resizes images to the predictor's size as SigLIP's processor does: both sides, with Pillow's bicubic filter."""

    def __init__(self, predictor: nn.Module, prepare: Preprocessing) -> None:
        super().__init__()
        self.predictor, self._prepare = predictor, prepare

    def forward(self, image: list[Tensor]) -> dict[str, Tensor] | RowErrors:
        """Rate images, uint8 (height, width, 3) each; ``score`` is the rating, and ``mark`` is the rating in 0..1."""
        seen, wrong = self._prepare(image)
        device = next(self.predictor.parameters()).device
        rated: dict[str, Tensor] = self.predictor((seen * 255).round().to(torch.uint8).permute(0, 2, 3, 1).to(device))
        outputs = {"score": rated["rating"], "mark": rated["score"]}
        return RowErrors(wrong, outputs) if wrong else outputs


def aesthetic_v2_5(weights: str = "", dtype: str = "float32", pixels: int = 1024 * 1024) -> ServedModel:
    """Aesthetic Predictor V2.5 for images of any size; `siglip` is the same for images of the encoder's size.

    Args:
        weights: as in `siglip`.
        dtype: as in `siglip`.
        pixels: number of pixels of the largest image.

    Returns:
        Input ``image`` uint8 (-1, -1, 3) RGB; outputs ``score`` float32 (), the predictor's rating, about 1 to 10, and
        ``mark`` float32 (), the rating mapped to 0..1 and clipped.

    Raises:
        As in `siglip`.
    """
    served = siglip(weights, dtype)
    size = served.inputs["image"].shape[0]
    prepare = Preprocessing(size, fit="squash", mean=(0.0,) * 3, std=(1.0,) * 3)
    outputs = {**SCORE, "mark": TensorSpec("float32")}
    return ServedModel(_AnySize(served.module, prepare), {"image": image_input(pixels)}, outputs)


def _weight_files(weights: str) -> list[Path]:
    if not weights:
        raise FileNotFoundError(f"the siglip juror was given no weights: set its argument weights; {_HOW}")
    path = Path(weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no safetensors file at {weights}: {_HOW}")
    return files


def _encoder_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        return dict(_SO400M)
    described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {**_SO400M, **described.get("vision_config", described)}


def _read(files: list[Path]) -> dict[str, Tensor]:
    """Read encoder and head from the files; SigLIP's text encoder is skipped."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                name = stored.removeprefix("layers.")
                if name.startswith((_ENCODER, _HEAD)):
                    tensors[name] = file.get_tensor(stored)
    return tensors


def _load(module: nn.Module, tensors: dict[str, Tensor], prefix: str, *, keep_prefix: bool, where: str) -> None:
    own = {
        name if keep_prefix else name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in own.items()}
    wrong = [
        f"{name}: expected {expected.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(f"weights at {where} do not fit {prefix}*: {'; '.join(wrong[:_SHOWN])}{more}; {_HOW}")
    module.load_state_dict(own)
