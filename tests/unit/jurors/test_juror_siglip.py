"""The aesthetic predictor: clear errors without its weights, and the right wiring with (tiny) ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.revision import install_command
from jurybox.server.jurors import siglip
from jurybox.server.jurors.aesthetic import AestheticHead, AestheticPredictor, normalised
from jurybox.server.jurors.panels import example_images

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


class ChannelMeans(nn.Module):
    """A substitute for the encoder: embeds an image as the means of its channels, or as given."""

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(pooler_output=pixel_values.mean(dim=(2, 3)))


def test_without_weights_the_error_says_what_is_expected() -> None:
    with pytest.raises(FileNotFoundError, match=r"argument weights; expected a folder .* docs/jurors\.md"):
        siglip()


def test_with_weights_that_are_not_there_the_error_names_the_place(tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "no.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"{missing}: expected a folder .* Nothing is downloaded"):
            siglip(weights=str(missing))


def test_without_transformers_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"scoring_head.0.weight": torch.zeros(1)}, tmp_path / "some.safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("siglip"))):
        siglip(weights=str(tmp_path))


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'int8': expected one of float32, bfloat16, float16"):
        siglip(dtype="int8")


def test_the_head_has_the_published_parameters() -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in AestheticHead(1152).state_dict().items()}
    sizes = [1152, 1024, 128, 64, 16, 1]
    expected: dict[str, tuple[int, ...]] = {}
    for layer in range(5):
        expected[f"scoring_head.{2 * layer}.weight"] = (sizes[layer + 1], sizes[layer])
        expected[f"scoring_head.{2 * layer}.bias"] = (sizes[layer + 1],)
    assert shapes == expected


def test_pixels_reach_the_encoder_between_minus_one_and_one_channels_first() -> None:
    image = torch.zeros(1, 4, 5, 3, dtype=torch.uint8)
    image[..., 0] = 255
    image[..., 2] = 51
    prepared = normalised(image)
    assert prepared.shape == (1, 3, 4, 5)
    torch.testing.assert_close(prepared.amax(dim=(2, 3)), torch.tensor([[1.0, -1.0, -0.6]]))


def test_the_rating_depends_on_the_direction_of_the_embedding_alone() -> None:
    head = AestheticHead(8)
    embedding = torch.randn(3, 8)
    torch.testing.assert_close(head(embedding), head(7 * embedding))
    assert head(embedding).shape == (3,)


def test_the_score_is_the_rating_brought_to_0_to_1() -> None:
    predictor = AestheticPredictor(ChannelMeans(), AestheticHead(3))
    last = predictor.head.scoring_head[-1]
    assert isinstance(last, nn.Linear)
    images = example_images(2, 28)
    nn.init.zeros_(last.weight)
    for rating, score in ((1.0, 0.0), (5.5, 0.5), (10.0, 1.0), (12.0, 1.0), (-3.0, 0.0)):
        nn.init.constant_(last.bias, rating)
        outputs = predictor(images)
        torch.testing.assert_close(outputs["rating"], torch.full((2,), rating))
        torch.testing.assert_close(outputs["score"], torch.full((2,), score))


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, dict[str, Tensor], Any]:
    """A folder as a user would lay it out, its tensors, and the encoder that wrote them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    encoder = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**TINY)).eval()
    head = AestheticHead(32)
    stored = {
        f"vision_model.{name.removeprefix('vision_model.')}": value for name, value in encoder.state_dict().items()
    }
    stored["text_model.embeddings.token_embedding.weight"] = torch.zeros(4, 4)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "vision_config": TINY}))
    save_file(stored, tmp_path / "model.safetensors")
    save_file({f"layers.{name}": value for name, value in head.state_dict().items()}, tmp_path / "head.safetensors")
    return tmp_path, head.state_dict(), encoder


def test_encoder_and_head_are_loaded_and_joined(tiny: tuple[Path, dict[str, Tensor], Any]) -> None:
    folder, head_tensors, encoder = tiny
    served = siglip(weights=str(folder))
    assert dict(served.inputs) == {"image": TensorSpec("uint8", (28, 28, 3))}
    assert list(served.outputs) == ["score", "rating"]
    assert served.example is not None
    images = served.example(3)["image"]
    head = AestheticHead(32)
    head.load_state_dict(head_tensors)
    with torch.inference_mode():
        expected = head(encoder(pixel_values=normalised(images)).pooler_output)
        outputs = served.module(images)
    torch.testing.assert_close(outputs["rating"], expected)


def test_half_precision_still_hands_out_float32(tiny: tuple[Path, dict[str, Tensor], Any]) -> None:
    served = siglip(weights=str(tiny[0]), dtype="bfloat16")
    outputs = served.module(example_images(2, 28))
    assert all(output.dtype == torch.float32 for output in outputs.values())


def test_weights_of_another_model_are_refused_with_the_difference(tiny: tuple[Path, dict[str, Tensor], Any]) -> None:
    folder, head_tensors, _ = tiny
    del head_tensors["scoring_head.8.bias"]
    save_file(head_tensors, folder / "head.safetensors")
    with pytest.raises(ValueError, match=r"scoring_head\.8\.bias: expected \(1,\), found nothing"):
        siglip(weights=str(folder))
