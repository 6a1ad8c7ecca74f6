"""Reward models that trainers of image and language models use, from weights on disk.

CLIP score, PickScore, HPSv2, LAION's aesthetic predictors, and sequence-classification reward models. Nothing is
downloaded at run time, and weights are safetensors. Images are preprocessed (filter, crop and normalisation) as in each
model's own code; docs/jurors.md has a comparison.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.revision import install_command
from jurybox.server.models import RowErrors, ServedModel

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_TEXT = 8192  # bytes of the longest prompt
_PIXELS = 1024 * 1024  # number of pixels of the largest image
_LONGEST = 32  # limit of the ratio of an image's sides: a resized image takes memory in proportion to this ratio
SCORE = {"score": TensorSpec("float32", finite=True)}


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The preprocessing of images for a CLIP-like model.

    Attributes:
        size: side of the model's square input in pixels.
        filter: "pillow": Pillow's bicubic filter on bytes; "tensor": torch's on floating point, without rounding to
            bytes; "tensor-aliased": the same without antialiasing.
        fit: "crop": resize the shorter side to `size` and crop the center; "squash": resize both sides to `size`.
        half: rounding of the crop's offset if an odd number of pixels is cut off: "down" as in transformers, "even" as
            in torchvision.
        mean, std: mean and standard deviation of each channel, for values from 0 to 1.
    """

    size: int = 224
    filter: str = "pillow"
    fit: str = "crop"
    half: str = "down"
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD

    def __call__(self, images: Sequence[Tensor]) -> tuple[Tensor, dict[int, str]]:
        """Preprocess images.

        Args:
            images: uint8 (height, width, 3) each.

        Returns:
            float32 (n, 3, size, size) on the CPU, and the reasons of the images that cannot be processed, by index.
        """
        expected = f"expected one at most {_LONGEST} times as long as wide"
        wrong = {
            i: f"a picture of {image.shape[1]} x {image.shape[0]} pixels, {expected}"
            for i, image in enumerate(images)
            if max(image.shape[:2]) > _LONGEST * min(image.shape[:2])
        }
        blank = torch.zeros(3, self.size, self.size)
        planes = torch.stack([blank if i in wrong else self._one(image) for i, image in enumerate(images)])
        mean, std = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (self.mean, self.std))
        return (planes - mean) / std, wrong

    def _one(self, image: Tensor) -> Tensor:
        height, width = image.shape[:2]
        shorter = min(height, width)
        if self.fit == "squash":
            to = (self.size, self.size)
        else:  # both libraries round the longer side down
            to = (int(self.size * height / shorter), int(self.size * width / shorter))
        if self.filter == "pillow":
            whole = Image.fromarray(image.cpu().numpy())
            if to != (height, width):
                whole = whole.resize(to[::-1], Image.Resampling.BICUBIC)
            planes = torch.from_numpy(np.array(whole)).permute(2, 0, 1).float() / 255
        else:
            planes = image.cpu().permute(2, 0, 1).float() / 255
            if to != (height, width):
                sharp = self.filter == "tensor"
                planes = F.interpolate(planes[None], to, mode="bicubic", align_corners=False, antialias=sharp)[0]
        down, across = (self._begin(side - self.size) for side in to)
        return planes[:, down : down + self.size, across : across + self.size]

    def _begin(self, over: int) -> int:
        return over // 2 if self.half == "down" else round(over / 2)


def _preprocessing(folder: Path) -> Preprocessing:
    """Return the preprocessing described by the folder's preprocessor_config.json; without the file, CLIP's.

    Raises:
        ValueError: it describes something that is not supported.
    """
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        return Preprocessing()
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    size, crop = config.get("size", 224), config.get("crop_size", 224)
    shortest = size.get("shortest_edge") if isinstance(size, dict) else size
    height, width = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    square = height if height == width else None
    if not square or shortest != square or config.get("resample", 3) != 3 or not config.get("do_center_crop", True):
        raise ValueError(
            f"{file}: expected a bicubic filter (resample 3), and shortest_edge equal to crop_size, a square, with "
            f"do_center_crop, as CLIP's models have it; came {json.dumps({'size': size, 'crop_size': crop})[:200]}"
        )
    return Preprocessing(square, mean=tuple(config["image_mean"]), std=tuple(config["image_std"]))


def package(name: str, juror: str, extra: str) -> Any:
    """Import an optional package. Raises ModuleNotFoundError with instructions for its installation."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"the {juror} juror needs {name}, which is not installed: {install_command(extra)}"
        ) from error


def precision(dtype: str) -> torch.dtype:
    """Return the torch dtype of this name. Raises ValueError if it is not supported."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(known)}")
    return known[dtype]


def folder_of(weights: str, juror: str, *files: str) -> Path:
    """Return the folder of weights. Raises FileNotFoundError, listing the expected files, if one is missing."""
    expected = ", ".join(files)
    how = f"expected a folder with {expected}: docs/jurors.md shows how to get it. Nothing is downloaded at run time"
    if not weights:
        raise FileNotFoundError(f"the {juror} juror was given no weights: set its argument weights; {how}")
    folder = Path(weights)
    missing = [name for name in files if not list(folder.glob(name))]
    if missing:
        raise FileNotFoundError(f"no {', '.join(missing)} in {weights}: {how}")
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Read every safetensors file of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def answer(score: Tensor, wrong: dict[int, str]) -> dict[str, Tensor] | RowErrors:
    """Return a module's answer: the scores, and the errors of the rows that have none."""
    outputs = {"score": score.float()}
    return RowErrors(wrong, outputs) if wrong else outputs


def image_input(pixels: int) -> TensorSpec:
    """Return the spec of images of any size up to this number of pixels."""
    return TensorSpec("uint8", (-1, -1, 3), capacity=3 * pixels)


# ----
# CLIP, from transformers: CLIP score and PickScore are the same cosine, scaled differently.


class Similarity(nn.Module):
    """The scaled cosine similarity of the CLIP embeddings of images and their prompts."""

    def __init__(
        self,
        clip: Any,
        tokens: Callable[[list[str]], Any],
        prepare: Preprocessing,
        scale: float,
        divide_by: float = 1.0,
    ) -> None:
        super().__init__()
        self.clip = clip
        self._tokens, self._prepare, self._scale, self._divide_by = tokens, prepare, scale, divide_by

    def forward(self, image: list[Tensor], prompt: list[bytes]) -> dict[str, Tensor] | RowErrors:
        """Map images, uint8 (height, width, 3) each, and UTF-8 prompts to ``score`` (n,)."""
        given = self._tokens([text.decode("utf-8", "replace") for text in prompt])
        device = next(self.clip.parameters()).device
        seen, wrong = self._prepare(image)
        output = self.clip(pixel_values=seen.to(device), **{name: value.to(device) for name, value in given.items()})
        cosine = (F.normalize(output.image_embeds, dim=-1) * F.normalize(output.text_embeds, dim=-1)).sum(-1)
        scale = self.clip.logit_scale.exp() if self._scale == 0 else self._scale
        return answer(cosine * scale / self._divide_by, wrong)


def _similarity(juror: str, weights: str, scale: float, divide_by: float, pixels: int) -> ServedModel:
    folder = folder_of(weights, juror, "config.json", "*.safetensors", "tokenizer*.json")
    transformers = package("transformers", juror, "jurors")
    clip = transformers.CLIPModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    longest = int(clip.config.text_config.max_position_embeddings)

    def tokens(prompts: list[str]) -> Any:
        # Longer prompts are truncated: CLIP has no more positions, and its own code does the same.
        return tokenizer(prompts, padding=True, truncation=True, max_length=longest, return_tensors="pt")

    module = Similarity(clip.float().eval(), tokens, _preprocessing(folder), scale, divide_by)
    inputs = {"image": image_input(pixels), "prompt": TensorSpec("bytes", capacity=_TEXT)}
    return ServedModel(module, inputs, SCORE)


def clip_score(weights: str = "", scale: float = 1.0, pixels: int = _PIXELS) -> ServedModel:
    """CLIP score: the cosine similarity of the embeddings of an image and its prompt.

    Args:
        weights: a folder with a CLIP model in transformers' format, such as openai/clip-vit-large-patch14.
        scale: factor of the cosine: 100 gives the numbers of torchmetrics; 0 means the model's own factor.
        pixels: number of pixels of the largest image.

    Returns:
        Inputs ``image`` uint8 (-1, -1, 3) RGB and ``prompt`` text; output ``score`` float32 ().

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: transformers is not installed.
    """
    return _similarity("clip_score", weights, scale, 1.0, pixels)


def pick_score(weights: str = "", divide_by: float = 1.0, pixels: int = _PIXELS) -> ServedModel:
    """PickScore (Kirstain et al., "Pick-a-Pic", NeurIPS 2023): CLIP fine-tuned on people's choices between two images.

    Args:
        weights: a folder with yuvalkirstain/PickScore_v1, and the tokenizer and preprocessor_config.json of
            laion/CLIP-ViT-H-14-laion2B-s32B-b79K.
        divide_by: divisor of the score; 26 gives the numbers of Flow-GRPO, about 0 to 1.
        pixels: number of pixels of the largest image.

    Returns:
        Inputs ``image`` uint8 (-1, -1, 3) RGB and ``prompt`` text; output ``score`` float32 (), about 15 to 26.

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: transformers is not installed.
        ValueError: divide_by is 0.
    """
    if not divide_by:
        raise ValueError("divide_by is 0: expected another number, 1 or 26")
    return _similarity("pick_score", weights, 0.0, divide_by, pixels)


# ----
# HPSv2, with open_clip.


class _OpenClip(nn.Module):
    def __init__(self, clip: Any, tokens: Callable[[list[str]], Tensor], prepare: Preprocessing) -> None:
        super().__init__()
        self.clip = clip
        self._tokens, self._prepare = tokens, prepare

    def forward(self, image: list[Tensor], prompt: list[bytes]) -> dict[str, Tensor] | RowErrors:
        texts = self._tokens([text.decode("utf-8", "replace") for text in prompt])
        device = next(self.clip.parameters()).device
        seen, wrong = self._prepare(image)
        images = self.clip.encode_image(seen.to(device), normalize=True)
        return answer((images * self.clip.encode_text(texts.to(device), normalize=True)).sum(-1), wrong)


def hpsv2(weights: str = "", antialias: bool = True, pixels: int = _PIXELS) -> ServedModel:
    """Human Preference Score v2 and v2.1 (Wu et al., 2023): open_clip's ViT-H-14, fine-tuned on people's choices.

    Args:
        weights: a folder with the checkpoint as safetensors (docs/jurors.md has the command). An
            open_clip_config.json in it describes a model other than ViT-H-14.
        antialias: True: resize like hpsv2 with torchvision 0.17 and later; False: as with earlier releases, whose
            filter was not antialiased.
        pixels: number of pixels of the largest image.

    Returns:
        Inputs ``image`` uint8 (-1, -1, 3) RGB and ``prompt`` text; output ``score`` float32 (), about 0.2 to 0.35.

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: open_clip is not installed.
        RuntimeError: the weights belong to another model.
    """
    folder = folder_of(weights, "hpsv2", "*.safetensors")
    open_clip = package("open_clip", "hpsv2", "jurors")
    described = folder / "open_clip_config.json"
    if described.is_file():
        config = json.loads(described.read_text(encoding="utf-8"))["model_cfg"]
    else:
        config = open_clip.get_model_config("ViT-H-14")
    clip = open_clip.model.CLIP(**config)
    clip.load_state_dict(tensors_in(folder))
    size = int(config["vision_cfg"]["image_size"])
    # Unlike open_clip, hpsv2 converts the image to a tensor before it resizes it.
    prepare = Preprocessing(size, "tensor" if antialias else "tensor-aliased", half="even")
    tokenizer = open_clip.SimpleTokenizer(context_length=int(config["text_cfg"].get("context_length", 77)))
    inputs = {"image": image_input(pixels), "prompt": TensorSpec("bytes", capacity=_TEXT)}
    return ServedModel(_OpenClip(clip.eval(), tokenizer, prepare), inputs, SCORE)


# ----
# LAION's aesthetic predictors: a head on CLIP's image embedding.


class _Aesthetic(nn.Module):
    def __init__(self, clip: Any, head: nn.Module, prepare: Preprocessing) -> None:
        super().__init__()
        self.encoder, self.projection, self.head = clip.vision_model, clip.visual_projection, head
        self._prepare = prepare

    def forward(self, image: list[Tensor]) -> dict[str, Tensor] | RowErrors:
        seen, wrong = self._prepare(image)
        device = next(self.encoder.parameters()).device
        pooled = self.encoder(pixel_values=seen.to(device)).pooler_output
        embedding = F.normalize(self.projection(pooled), dim=-1)
        return answer(self.head(embedding).squeeze(-1), wrong)


def aesthetic_v1(weights: str = "", pixels: int = _PIXELS) -> ServedModel:
    """LAION's aesthetic predictors on CLIP ViT-L/14: V1's linear head, or the "improved" head of five layers.

    Args:
        weights: a folder with CLIP in transformers' format (openai/clip-vit-large-patch14) and head/head.safetensors.
            V1's head has ``weight`` and ``bias`` (sa_0_4_vit_l_14_linear.pth), the improved one ``layers.0.weight`` and
            so on.
        pixels: number of pixels of the largest image.

    Returns:
        Input ``image`` uint8 (-1, -1, 3) RGB; output ``score`` float32 (), about 1 to 10.

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: transformers is not installed.
        ValueError: the head is of another kind.
    """
    folder = folder_of(weights, "aesthetic_v1", "config.json", "*.safetensors", "head/head.safetensors")
    transformers = package("transformers", "aesthetic_v1", "jurors")
    clip = transformers.CLIPModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    tensors = {
        name.removeprefix("layers."): tensor for name, tensor in load_file(folder / "head/head.safetensors").items()
    }
    features = int(clip.config.projection_dim)
    if set(tensors) == {"weight", "bias"}:
        head: nn.Module = nn.Linear(features, 1)
    else:
        sizes = {
            int(name.partition(".")[0]): value.shape for name, value in tensors.items() if name.endswith(".weight")
        }
        if not sizes or not all(len(shape) == 2 for shape in sizes.values()):
            raise ValueError(
                f"head.safetensors has {', '.join(sorted(tensors))}: expected weight and bias, or layers.*"
            )
        layers: list[nn.Module] = [nn.Identity() for _ in range(max(sizes) + 1)]  # dropout acts only in training
        for number, (out, into) in sizes.items():
            layers[number] = nn.Linear(into, out)
        head = nn.Sequential(*layers)
    head.load_state_dict(tensors)
    module = _Aesthetic(clip.float().eval(), head.float().eval(), _preprocessing(folder))
    return ServedModel(module, {"image": image_input(pixels)}, SCORE)


# ----
# Reward models for text.


class _TextReward(nn.Module):
    def __init__(self, model: Any, tokenizer: Any, longest: int) -> None:
        super().__init__()
        self.model = model
        self._tokenizer, self._longest = tokenizer, longest

    def forward(self, prompt: list[bytes], response: list[bytes]) -> dict[str, Tensor] | RowErrors:
        tokens = [
            self._tokens(*(text.decode("utf-8", "replace") for text in pair))
            for pair in zip(prompt, response, strict=True)
        ]
        wrong = {
            i: f"prompt and response have {len(row)} tokens, the model takes at most {self._longest}"
            for i, row in enumerate(tokens)
            if len(row) > self._longest
        }
        kept = [row[: 1 if i in wrong else None] for i, row in enumerate(tokens)]
        most = max(map(len, kept))
        device = next(self.model.parameters()).device
        ids = torch.full((len(kept), most), self._tokenizer.pad_token_id, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(kept):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        return answer(self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, 0], wrong)

    def _tokens(self, prompt: str, response: str) -> list[int]:
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)
        # The template already contains the special tokens.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def text_reward(weights: str = "", dtype: str = "float32", max_length: int = 4096, text: int = 65536) -> ServedModel:
    """A sequence-classification reward model with a chat template, such as Skywork-Reward-V2 or a model trained by TRL.

    Args:
        weights: a folder in transformers' format: config.json, safetensors, a tokenizer with a chat template.
        dtype: "float32", "bfloat16" or "float16".
        max_length: maximum number of tokens. If a conversation is longer, only that row fails; it is not truncated,
            because the score would be that of another text.
        text: bytes of the longest prompt, and of the longest response.

    Returns:
        Inputs ``prompt`` and ``response``, text; output ``score`` float32 (), the model's first logit.

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: transformers is not installed.
        ValueError: the tokenizer has no chat template or no padding token, or the dtype is unknown.
    """
    folder = folder_of(weights, "text_reward", "config.json", "*.safetensors", "tokenizer*.json")
    transformers = package("transformers", "text_reward", "jurors")
    computed = precision(dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer in {weights} has no chat template: expected one (chat_template.jinja)")
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).to(computed).eval()
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer in {weights} has no pad_token: set one in its tokenizer_config.json")
    # The model uses it to find the last token of each row.
    model.config.pad_token_id = tokenizer.pad_token_id
    inputs = {name: TensorSpec("bytes", capacity=text) for name in ("prompt", "response")}
    return ServedModel(_TextReward(model, tokenizer, max_length), inputs, SCORE)
