"""Reward models that trainers use: real loading code on tiny weights, and the numbers of the reference's own code."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from jurybox.protocol.revision import install_command
from jurybox.server import jurors
from jurybox.server.jurors.aesthetic import _AnySize
from jurybox.server.jurors.measures import match, wanted
from jurybox.server.jurors.ready import Preprocessing
from jurybox.server.models import RowErrors

PROMPTS = ["a cat", "the bat sat on a mat, and then it sat on a cat"]
FACTORIES = ("clip_score", "pick_score", "hpsv2", "aesthetic_v1", "aesthetic_v2_5", "text_reward", "image_reward")


def smooth_pictures() -> list[np.ndarray]:
    """Sizes whose middle is between two pixels, one smaller and one of the model's own size."""
    generator = np.random.default_rng(7)
    smooth = [generator.integers(0, 256, (9, 9, 3), np.uint8) for _ in range(4)]
    sizes = [(301, 227), (64, 95), (31, 20), (32, 32)]
    return [
        np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BICUBIC))
        for one, size in zip(smooth, sizes, strict=True)
    ]


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    return smooth_pictures()


def scored(served: Any, *inputs: Any) -> Any:
    with torch.inference_mode():
        return served.module.eval()(*inputs)


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array.copy()) for array in arrays]


@pytest.mark.parametrize("name", FACTORIES)
def test_without_weights_the_error_says_what_is_expected(name: str, tmp_path: Path) -> None:
    for given in ("", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(FileNotFoundError, match=r"expected a folder with .* Nothing is downloaded"):
            getattr(jurors, name)(weights=given)


@pytest.mark.parametrize("name", ["clip_score", "pick_score", "hpsv2", "aesthetic_v1", "text_reward"])
def test_without_its_package_the_error_says_how_to_get_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "head").mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors", "head/head.safetensors"):
        (tmp_path / file).write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    monkeypatch.setitem(__import__("sys").modules, "open_clip", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(install_command("jurors"))):
        getattr(jurors, name)(weights=str(tmp_path))


@pytest.mark.parametrize("shape", [(301, 227), (64, 95), (31, 20), (32, 32), (33, 32)])
def test_pictures_are_prepared_as_pillow_does_it(shape: tuple[int, int]) -> None:
    """By hand: the shorter side to 32, the longer one rounded down, the middle cut out, rounded down."""
    image = np.random.default_rng(3).integers(0, 256, (*shape, 3), np.uint8)
    seen, wrong = Preprocessing(32, mean=(0.0,) * 3, std=(1.0,) * 3)(tensors([image]))
    height, width = (int(32 * side / min(shape)) for side in shape)
    by_hand = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - 32) // 2, (width - 32) // 2
    expected = by_hand[top : top + 32, left : left + 32].transpose(2, 0, 1).astype(np.float32) / 255
    assert not wrong
    np.testing.assert_array_equal(seen[0].numpy(), expected)


def test_a_picture_that_would_fill_the_memory_fails_alone() -> None:
    long, usual = torch.zeros(1, 100_000, 3, dtype=torch.uint8), torch.zeros(40, 50, 3, dtype=torch.uint8)
    seen, wrong = Preprocessing(32)([usual, long])
    assert seen.shape == (2, 3, 32, 32) and list(wrong) == [1] and "100000 x 1" in wrong[1]


# ----
# Against transformers.


def clip_folder(folder: Path) -> Any:
    """A tiny CLIP with tokenizer and preprocessor, saved as users have theirs."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    letters = [chr(i) for i in range(97, 123)] + [","]
    vocabulary = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": len(vocabulary) - 2, "eos_token_id": len(vocabulary) - 1, "pad_token_id": 0}
    text = {**common, **ends, "vocab_size": len(vocabulary), "max_position_embeddings": 24}
    vision = {**common, "image_size": 32, "patch_size": 8}
    torch.manual_seed(1)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    model.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    means = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    told = {**sizes, **means, "resample": 3, "do_center_crop": True, "image_processor_type": "CLIPImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    return transformers, model, tokenizer


def reference_pixels(transformers: Any, folder: Path, pictures: list[np.ndarray]) -> torch.Tensor:
    """By transformers' own processor that works with Pillow, which is what these models' own code had."""
    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    processor = kind.from_pretrained(folder)
    return torch.cat([processor(images=Image.fromarray(one), return_tensors="pt")["pixel_values"] for one in pictures])


def test_clip_score_and_pick_score_are_the_references_numbers(tmp_path: Path, pictures: list[np.ndarray]) -> None:
    transformers, model, tokenizer = clip_folder(tmp_path)
    prompts = (PROMPTS * 2)[: len(pictures)]
    given = tokenizer(prompts, padding=True, truncation=True, max_length=24, return_tensors="pt")
    with torch.inference_mode():
        seen = reference_pixels(transformers, tmp_path, pictures)
        logits = model(pixel_values=seen, **given).logits_per_image.diagonal()
    rows = (tensors(pictures), [prompt.encode() for prompt in prompts])
    picked = scored(jurors.pick_score(str(tmp_path)), *rows)["score"]
    torch.testing.assert_close(picked, logits, rtol=1e-5, atol=1e-5)
    divided = scored(jurors.pick_score(str(tmp_path), divide_by=26), *rows)["score"]
    torch.testing.assert_close(divided, logits / 26, rtol=1e-5, atol=1e-6)
    cosine = scored(jurors.clip_score(str(tmp_path)), *rows)["score"]
    torch.testing.assert_close(cosine, logits / model.logit_scale.detach().exp(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "improved"])
def test_aesthetic_v1_is_a_head_on_clips_embedding(tmp_path: Path, pictures: list[np.ndarray], kind: str) -> None:
    transformers, model, _ = clip_folder(tmp_path)
    if kind == "linear":
        head: nn.Module = nn.Linear(16, 1)
        stored = dict(head.state_dict())
    else:
        layers = [nn.Linear(16, 12), nn.Dropout(0.2), nn.Linear(12, 6), nn.Dropout(0.1), nn.Linear(6, 1)]
        head = nn.Sequential(*layers).eval()
        stored = {f"layers.{name}": value for name, value in head.state_dict().items()}
    (tmp_path / "head").mkdir()
    save_file(stored, tmp_path / "head" / "head.safetensors")
    with torch.inference_mode():
        features = model.visual_projection(
            model.vision_model(reference_pixels(transformers, tmp_path, pictures)).pooler_output
        )
        expected = head(features / features.norm(dim=-1, keepdim=True)).squeeze(-1)
    got = scored(jurors.aesthetic_v1(str(tmp_path)), tensors(pictures))["score"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_bad_picture_has_no_score_and_its_neighbours_do(tmp_path: Path) -> None:
    clip_folder(tmp_path)
    long, usual = torch.zeros(1, 50_000, 3, dtype=torch.uint8), torch.zeros(40, 50, 3, dtype=torch.uint8)
    given = scored(jurors.clip_score(str(tmp_path)), [usual, long], [b"a", b"b"])
    assert isinstance(given, RowErrors) and list(given.errors) == [1]
    assert torch.isfinite(given.outputs["score"][0])


class Sees(nn.Module):
    """A predictor that keeps the images it is given; their means are its ratings."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(1))
        self.seen: list[torch.Tensor] = []

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(image)
        return {"rating": image.float().mean((1, 2, 3)), "score": image.float().mean((1, 2, 3))}


def squashing(predictor: Sees) -> SimpleNamespace:
    """`aesthetic_v2_5` with this predictor."""
    return SimpleNamespace(module=_AnySize(predictor, Preprocessing(28, fit="squash", mean=(0.0,) * 3, std=(1.0,) * 3)))


def test_aesthetic_v2_5_rates_no_picture_that_is_too_long() -> None:
    long = torch.full((1, 50_000, 3), 200, dtype=torch.uint8)
    usual = torch.full((40, 50, 3), 100, dtype=torch.uint8)
    given = scored(squashing(Sees()), [usual, long])
    assert isinstance(given, RowErrors) and list(given.errors) == [1] and "50000 x 1" in given.errors[1]
    assert given.outputs["score"][0] == given.outputs["mark"][0] == 100


def test_aesthetic_v2_5_squashes_a_picture_as_siglips_processor_does(pictures: list[np.ndarray]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    predictor = Sees()
    scored(squashing(predictor), tensors(pictures))
    (seen,) = predictor.seen
    kind = getattr(transformers, "SiglipImageProcessorPil", None) or transformers.SiglipImageProcessor
    processor = kind(size={"height": 28, "width": 28}, do_rescale=False, do_normalize=False)
    for image, ours in zip(pictures, seen, strict=True):
        theirs = processor(images=Image.fromarray(image), return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(ours.numpy(), np.asarray(theirs).transpose(1, 2, 0))


# ----
# Against open_clip and hpsv2.


def test_hpsv2_is_the_references_number(tmp_path: Path, pictures: list[np.ndarray]) -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed")
    transforms = pytest.importorskip("torchvision.transforms", reason="torchvision is not installed")
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    torch.manual_seed(2)
    model = open_clip.model.CLIP(**config).eval()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, tmp_path / "hps.safetensors")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    prompts = (PROMPTS * 2)[: len(pictures)]
    for antialias in (True, False):
        # The steps of hpsv2/src/open_clip/transform.py, in its order.
        prepare = transforms.Compose(
            [
                transforms.ToTensor(),
                transforms.Resize(32, interpolation=transforms.InterpolationMode.BICUBIC, antialias=antialias),
                transforms.CenterCrop(32),
                transforms.Normalize(mean, std),
            ]
        )
        with torch.inference_mode():
            images = torch.stack([prepare(Image.fromarray(one)) for one in pictures])
            texts = open_clip.get_tokenizer("ViT-H-14")(prompts)
            seen = model.encode_image(images, normalize=True) @ model.encode_text(texts, normalize=True).T
        got = scored(jurors.hpsv2(str(tmp_path), antialias), tensors(pictures), [one.encode() for one in prompts])
        torch.testing.assert_close(got["score"], seen.diagonal(), rtol=1e-5, atol=1e-6)


# ----
# Text.

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def text_folder(folder: Path, template: str | None = TEMPLATE) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = ["<pad>", "</s>", "<user>", "<assistant>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.add_special_tokens(["<user>", "<assistant>", "</s>", "<pad>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=0, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return tokenizer, model


def test_text_reward_is_the_models_first_logit_of_the_whole_chat(tmp_path: Path) -> None:
    tokenizer, model = text_folder(tmp_path)
    pairs = [("hello", "a long answer of many letters"), ("why", "no")]
    expected = []
    for prompt, response in pairs:  # one by one, without padding
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            expected.append(model(torch.tensor([ids])).logits[0, 0])
    rows = ([prompt.encode() for prompt, _ in pairs], [response.encode() for _, response in pairs])
    got = scored(jurors.text_reward(str(tmp_path)), *rows)["score"]
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=1e-5)
    short = scored(jurors.text_reward(str(tmp_path), max_length=12), *rows)
    assert isinstance(short, RowErrors) and list(short.errors) == [0] and "at most 12" in short.errors[0]
    torch.testing.assert_close(short.outputs["score"][1], expected[1], rtol=1e-5, atol=1e-5)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    text_folder(tmp_path, None)
    with pytest.raises(ValueError, match="has no chat template"):
        jurors.text_reward(str(tmp_path))


# ----
# Without weights.


def test_jpeg_size_is_that_of_pillows_file(pictures: list[np.ndarray]) -> None:
    given = scored(jurors.jpeg_size(), tensors(pictures))
    for image, kilobytes, score in zip(pictures, given["kilobytes"], given["score"], strict=True):
        sink = io.BytesIO()
        Image.fromarray(image).save(sink, "JPEG", quality=95)
        assert kilobytes.item() == pytest.approx(len(sink.getvalue()) / 1000)
        assert score.item() == pytest.approx(-len(sink.getvalue()) / 1000 / 500)
    with pytest.raises(ValueError, match="expected 1 to 95"):
        jurors.jpeg_size(quality=100)


def reads_its_height(image: np.ndarray) -> str:
    if image.shape[0] == 1:
        raise ValueError("nothing can be read")
    return "o p e n" if image.shape[0] == 2 else "OPAN"


def test_ocr_match_counts_letters_and_fails_rows_without_a_wish() -> None:
    served = jurors.ocr_match("tests.unit.jurors.test_ready_jurors:reads_its_height")
    images = [torch.zeros(n, 4, 3, dtype=torch.uint8) for n in (2, 3, 1, 2)]
    given = scored(served, images, [b'says "Open"', b'says "open"', b'says "open"', b"says open"])
    assert isinstance(given, RowErrors) and set(given.errors) == {2, 3}
    assert given.errors[2] == "nothing can be read" and "quotation marks" in given.errors[3]
    assert given.outputs["score"][:2].tolist() == [1.0, 0.75]
    assert match("abc", "") == 0.0 and match("abc", "xxabcxx") == 1.0 and match("kitten", "sitting") == 0.5
    assert wanted('a "b c" and "d"') == "b c"


def test_without_tesseract_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="apt install tesseract-ocr"):
        jurors.ocr_match()
    with pytest.raises(ValueError, match="module:function"):
        jurors.ocr_match("easyocr")


def image_reward_weights() -> dict[str, torch.Tensor]:
    """Tensors of ImageReward's names: two layers each of 128 and 64 wide, pictures of 32 x 32, 40 words."""
    dice = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice) / max(1, shape[-1]) ** 0.5

    def linear(name: str, out: int, into: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": random(out, into), f"{name}.bias": 0.1 * random(out)}

    def norm(name: str, width: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": 1 + 0.1 * random(width), f"{name}.bias": 0.1 * random(width)}

    wide, narrow = 128, 64
    eye = {"cls_token": random(1, 1, wide), "pos_embed": random(1, 5, wide), **norm("norm", wide)}
    eye |= {"patch_embed.proj.weight": 0.1 * random(wide, 3, 16, 16), "patch_embed.proj.bias": random(wide)}
    reader = {f"embeddings.{name}_embeddings.weight": random(n, narrow) for name, n in (("word", 40), ("position", 64))}
    reader |= norm("embeddings.LayerNorm", narrow)
    for i in range(2):
        block, layer = f"blocks.{i}", f"encoder.layer.{i}"
        eye |= norm(f"{block}.norm1", wide) | norm(f"{block}.norm2", wide) | linear(f"{block}.attn.qkv", 3 * wide, wide)
        eye |= linear(f"{block}.attn.proj", wide, wide) | linear(f"{block}.mlp.fc1", 512, wide)
        eye |= linear(f"{block}.mlp.fc2", wide, 512)
        for part, seen in (("attention", narrow), ("crossattention", wide)):
            for name, into in (("query", narrow), ("key", seen), ("value", seen)):
                reader |= linear(f"{layer}.{part}.self.{name}", narrow, into)
            reader |= linear(f"{layer}.{part}.output.dense", narrow, narrow)
            reader |= norm(f"{layer}.{part}.output.LayerNorm", narrow)
        reader |= linear(f"{layer}.intermediate.dense", 96, narrow) | linear(f"{layer}.output.dense", narrow, 96)
        reader |= norm(f"{layer}.output.LayerNorm", narrow)
    sizes = (narrow, 1024, 128, 64, 16, 1)
    head: dict[str, torch.Tensor] = {}
    for number, into, out in zip((0, 2, 4, 6, 7), sizes[:-1], sizes[1:], strict=True):
        head |= linear(f"mlp.layers.{number}", out, into)
    eyes = {f"blip.visual_encoder.{name}": value for name, value in eye.items()}
    return {**eyes, **{f"blip.text_encoder.{name}": value for name, value in reader.items()}, **head}


def write_image_reward(folder: Path) -> None:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["a", "cat", "bat", "sat", "on", "mat", "the", "and", "then", "it", ","],
    ]
    words += [f"[unused{i}]" for i in range(38 - len(words))]
    (folder / "vocab.txt").write_text("\n".join([*words, "[DEC]", "[ENC]"]) + "\n")
    save_file(image_reward_weights(), folder / "model.safetensors")


def test_image_reward_gives_the_scores_of_the_original_package(tmp_path: Path, pictures: list[np.ndarray]) -> None:
    """They were taken with image-reward 1.5 (transformers 4.40) from these weights, pictures and prompts."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    write_image_reward(tmp_path)
    served = jurors.image_reward(weights=str(tmp_path))
    prompts = [prompt.encode() for prompt in PROMPTS * 2]
    found = scored(served, tensors(pictures), prompts)["score"]
    np.testing.assert_allclose(found, [0.0994840, -0.5419887, -1.5908754, -0.1674010], atol=1e-5)
    alone = [scored(served, tensors([one]), [prompt])["score"] for one, prompt in zip(pictures, prompts, strict=True)]
    np.testing.assert_allclose(torch.cat(alone), found, atol=1e-5)
    long = ("a cat " * 40).encode()
    assert (
        scored(served, tensors(pictures[:1]), [long])["score"]
        == scored(served, tensors(pictures[:1]), [long * 2])["score"]
    )


@pytest.mark.parametrize(
    "lost",
    ["mlp.layers.4.bias", "blip.visual_encoder.norm.weight", "blip.text_encoder.encoder.layer.1.output.dense.bias"],
)
def test_weights_that_are_not_image_rewards_are_refused(tmp_path: Path, lost: str) -> None:
    """Left at random, a layer would score all the same."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    write_image_reward(tmp_path)
    save_file({n: v for n, v in image_reward_weights().items() if n != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="are not ImageReward's"):
        jurors.image_reward(weights=str(tmp_path))
