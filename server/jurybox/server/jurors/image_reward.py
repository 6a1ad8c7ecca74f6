"""ImageReward (J. Xu et al., 2023): BLIP encodes a prompt with cross-attention to an image, and a head scores it.

The layers are those of BLIP in transformers. The weights are as published, with the names of the original BLIP.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.jurors.ready import SCORE, Preprocessing, answer, folder_of, image_input, package, tensors_in
from jurybox.server.models import RowErrors, ServedModel

__all__ = ["image_reward"]

_MEAN, _STD = 0.16717362830052426, 1.0333394966054072  # mean and standard deviation of the head's scores, as published
_TOKENS = 35  # longer prompts are truncated, as upstream
_HEAD_WIDTH = 64  # width of an attention head, in BERT and in all of BLIP's vision transformers
_HEAD = (1024, 128, 64, 16, 1)
_NUMBERS = (0, 2, 4, 6, 7)  # indices of the head's linear layers; the others are dropout, which acts only in training
_PROMPT = 8192  # bytes
# Published parameter name -> name in transformers.
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "blocks": "encoder.layers",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "norm.": "post_layernorm.",
}


class ImageReward(nn.Module):
    """BLIP's vision transformer, its text encoder with cross-attention to the image, and the head."""

    def __init__(self, vision: Any, text: Any, tokenizer: Any, prepare: Preprocessing) -> None:
        super().__init__()
        self.vision, self.text = vision, text
        sizes = (int(text.config.hidden_size), *_HEAD)
        self.head = nn.Sequential(*(nn.Linear(into, out) for into, out in itertools.pairwise(sizes)))
        self._tokenizer, self._prepare = tokenizer, prepare

    def forward(self, image: list[Tensor], prompt: list[bytes]) -> dict[str, Tensor] | RowErrors:
        """Map images, uint8 (height, width, 3) each, and UTF-8 prompts to ``score`` (n,)."""
        texts = [text.decode("utf-8", "replace") for text in prompt]
        given = self._tokenizer(texts, padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt")
        seen, wrong = self._prepare(image)
        device = next(self.head.parameters()).device
        patches = self.vision(pixel_values=seen.to(device)).last_hidden_state
        read = self.text(
            input_ids=given["input_ids"].to(device),
            attention_mask=given["attention_mask"].to(device),
            encoder_hidden_states=patches,
            encoder_attention_mask=torch.ones(patches.shape[:-1], dtype=torch.int64, device=device),
        ).last_hidden_state
        return answer((self.head(read[:, 0]).squeeze(-1) - _MEAN) / _STD, wrong)


def image_reward(weights: str = "", pixels: int = 1024 * 1024) -> ServedModel:
    """ImageReward-v1.0: predicts human preference for an image given its prompt.

    Args:
        weights: a folder with ImageReward.pt converted to safetensors (docs/jurors.md has the command) and the
            tokenizer of google-bert/bert-base-uncased.
        pixels: number of pixels of the largest image.

    Returns:
        Inputs ``image`` uint8 (-1, -1, 3) RGB and ``prompt`` text; output ``score`` float32 (), about -2 to 2.

    Raises:
        FileNotFoundError: the weights were not found.
        ModuleNotFoundError: transformers is not installed.
        ValueError: the weights belong to another model.
    """
    folder = folder_of(weights, "image_reward", "*.safetensors", "vocab.txt")
    transformers = package("transformers", "image_reward", "jurors")
    tensors = tensors_in(folder)
    vision = {name: value.float() for name, value in _part(tensors, "blip.visual_encoder.").items()}
    text = {name: value.float() for name, value in _part(tensors, "blip.text_encoder.").items()}
    head = _part(tensors, "mlp.layers.")
    try:
        image_size = _patches(vision) * vision["patch_embed.proj.weight"].shape[-1]
        tokenizer = transformers.BertTokenizer.from_pretrained(folder, local_files_only=True)
        # As upstream: torchvision's transform on Pillow images.
        module = ImageReward(
            _vision(transformers, vision, image_size),
            _text(transformers, text, vision["cls_token"].shape[-1]),
            tokenizer,
            Preprocessing(image_size, half="even"),
        )
        for number, layer in zip(_NUMBERS, module.head, strict=True):
            layer.load_state_dict({name: head[f"{number}.{name}"].float() for name in ("weight", "bias")})
    except (KeyError, RuntimeError) as error:
        what = f"no tensor {error}" if isinstance(error, KeyError) else str(error)[:500]
        raise ValueError(f"the weights in {weights} are not ImageReward's: {what}") from error
    return ServedModel(
        module.eval(), {"image": image_input(pixels), "prompt": TensorSpec("bytes", capacity=_PROMPT)}, SCORE
    )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _patches(vision: Mapping[str, Tensor]) -> int:
    """Return the number of patches along one side of the image."""
    return int((vision["pos_embed"].shape[1] - 1) ** 0.5)


def _layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).partition(".")[0]) for name in tensors if name.startswith(prefix))


def _vision(transformers: Any, tensors: Mapping[str, Tensor], image_size: int) -> nn.Module:
    width = tensors["cls_token"].shape[-1]
    config = transformers.BlipVisionConfig(
        hidden_size=width,
        intermediate_size=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(tensors, "blocks."),
        num_attention_heads=width // _HEAD_WIDTH,
        image_size=image_size,
        patch_size=tensors["patch_embed.proj.weight"].shape[-1],
        layer_norm_eps=1e-6,
    )
    model: nn.Module = transformers.BlipVisionModel(config)
    renamed = {}
    for published, value in tensors.items():
        name = published
        for theirs, ours in _VISION.items():
            starts = theirs in ("norm.", "blocks")
            name = ours + name[len(theirs) :] if starts and name.startswith(theirs) else name
            name = name if starts else name.replace(theirs, ours)
        renamed[name] = value
    model.load_state_dict(renamed)
    return model


def _text(transformers: Any, tensors: Mapping[str, Tensor], vision_width: int) -> nn.Module:
    vocabulary, width = tensors["embeddings.word_embeddings.weight"].shape
    config = transformers.BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=vision_width,
        intermediate_size=tensors["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(tensors, "encoder.layer."),
        num_attention_heads=width // _HEAD_WIDTH,
        max_position_embeddings=tensors["embeddings.position_embeddings.weight"].shape[0],
        hidden_act="gelu",
        layer_norm_eps=1e-12,
        is_decoder=True,  # adds the cross-attention layers; the model is not used as a decoder
    )
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    model: nn.Module = BlipTextModel(config, add_pooling_layer=False)
    buffers = {name: value for name, value in model.state_dict().items() if name.endswith("position_ids")}
    model.load_state_dict({**buffers, **{n: v for n, v in tensors.items() if not n.endswith("position_ids")}})
    return model
