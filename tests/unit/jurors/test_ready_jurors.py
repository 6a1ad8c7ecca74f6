"""Reward models that trainers use: real loading code on tiny weights, and the numbers of the reference's own code."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


def seen_of(picture: np.ndarray, **prepare: Any) -> np.ndarray:
    """One picture's pixels for a model, from 0 to 1."""
    seen, wrong = Preprocessing(mean=(0.0,) * 3, std=(1.0,) * 3, **prepare)(tensors([picture]))
    assert not wrong
    return seen[0].permute(1, 2, 0).numpy()


def steps(height: int, width: int) -> np.ndarray:
    """A picture in which every pixel says where it is."""
    down, across = np.mgrid[:height, :width].astype(np.uint8)
    return np.stack([down, across, np.zeros_like(down)], axis=-1)


@pytest.mark.parametrize(("half", "offset"), [("down", 1), ("even", 2)])
@pytest.mark.parametrize("filter", ["pillow", "tensor"])
def test_the_middle_between_two_pixels_is_rounded_as_each_library_does(filter: str, half: str, offset: int) -> None:
    for shape, begin in (((4, 7), (0, offset)), ((7, 4), (offset, 0))):
        seen = seen_of(steps(*shape), size=4, filter=filter, half=half)
        np.testing.assert_array_equal(np.rint(255 * seen[0, 0, :2]), begin)
        assert seen.shape == (4, 4, 3)


@pytest.mark.parametrize("size", [8, 5])
@pytest.mark.parametrize("antialias", [True, False])
def test_pictures_are_resized_as_torch_does_it_where_the_model_was_trained_so(size: int, antialias: bool) -> None:
    picture = np.random.default_rng(5).integers(0, 256, (8, 8, 3), np.uint8)
    whole = tensors([picture])[0].permute(2, 0, 1)[None].float() / 255
    resized = nn.functional.interpolate(whole, (size, size), mode="bicubic", antialias=antialias)
    seen = seen_of(picture, size=size, filter="tensor" if antialias else "tensor-aliased")
    np.testing.assert_array_equal(seen, resized[0].permute(1, 2, 0).numpy())


def test_a_picture_is_squashed_to_the_size_whatever_its_sides() -> None:
    seen = seen_of(np.full((3, 9, 3), 51, np.uint8), size=4, fit="squash")
    np.testing.assert_allclose(seen, np.full((4, 4, 3), 0.2), rtol=1e-6)


@pytest.mark.parametrize("sides", [(1, 32), (32, 1)])
def test_a_picture_may_be_32_times_as_long_as_wide_and_no_longer(sides: tuple[int, int]) -> None:
    fits = torch.zeros(*sides, 3, dtype=torch.uint8)
    long = torch.full((*(side + (side > 1) for side in sides), 3), 255, dtype=torch.uint8)
    seen, wrong = Preprocessing(4, mean=(0.5,) * 3, std=(0.25,) * 3)([fits, long])
    assert list(wrong) == [1] and f"{long.shape[1]} x {long.shape[0]} pixels" in wrong[1]
    assert (seen == -2).all() and seen.shape == (2, 3, 4, 4), "nothing is computed of a picture that is too long"


# ----
# With stand-ins for the packages, which need not be installed: what is read, sent and made of it.


class Eye(nn.Module):
    """It sees of a picture the first two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(1))
        self.seen: list[torch.Tensor] = []

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        self.seen.append(pixel_values)
        return SimpleNamespace(pooler_output=pixel_values[:, :2, 0, 0])


class TinyClip(nn.Module):
    """Its embedding of a picture is what its eye sees, and that of a prompt its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.config = SimpleNamespace(text_config=SimpleNamespace(max_position_embeddings=24), projection_dim=2)
        self.vision_model = Eye()
        self.visual_projection = nn.Identity()

    @property
    def seen(self) -> list[torch.Tensor]:
        return self.vision_model.seen

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor) -> SimpleNamespace:
        image = self.vision_model(pixel_values).pooler_output
        return SimpleNamespace(image_embeds=image, text_embeds=input_ids.float())


@pytest.fixture
def clip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TinyClip:
    """The CLIP that a stand-in for transformers reads from `tmp_path`."""
    made = TinyClip()

    def read(folder: Path, *, local_files_only: bool, use_safetensors: bool) -> TinyClip:
        assert (folder, local_files_only, use_safetensors) == (tmp_path, True, True)
        return made

    def tokens(prompts: list[str], **options: Any) -> dict[str, torch.Tensor]:
        assert options == {"padding": True, "truncation": True, "max_length": 24, "return_tensors": "pt"}
        return {"input_ids": torch.tensor([[len(prompt), 1] for prompt in prompts])}

    def tokenizer(folder: Path, *, local_files_only: bool) -> Any:
        assert (folder, local_files_only) == (tmp_path, True)
        return tokens

    transformers: Any = ModuleType("transformers")
    transformers.CLIPModel = SimpleNamespace(from_pretrained=read)
    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    tell(tmp_path)
    return made


def tell(folder: Path, **changes: Any) -> None:
    """Write a preprocessor_config.json for pictures of 4 x 4 whose values stay as they are."""
    config = {"size": 4, "crop_size": 4, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))


def painted(*colours: tuple[int, int, int]) -> list[torch.Tensor]:
    return [torch.tensor(colour, dtype=torch.uint8).expand(4, 4, 3).contiguous() for colour in colours]


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        ("clip_score", {}, 1.0),
        ("clip_score", {"scale": 100.0}, 100.0),
        ("clip_score", {"scale": 0.0}, math.exp(2)),
        ("pick_score", {}, math.exp(2)),
        ("pick_score", {"divide_by": 26.0}, math.exp(2) / 26),
    ],
)
def test_a_score_of_clip_is_the_scaled_cosine(
    clip: TinyClip, tmp_path: Path, name: str, options: dict[str, float], factor: float
) -> None:
    served = getattr(jurors, name)(str(tmp_path), pixels=100, **options)
    found = scored(served, painted((30, 40, 0), (40, 0, 9)), [b"abc", b"\xff"])["score"]
    cosines = [(0.6 * 3 + 0.8) / math.sqrt(10), 1 / math.sqrt(2)]
    assert found.tolist() == pytest.approx([factor * cosine for cosine in cosines], rel=1e-5)
    assert found.dtype == torch.float32 and clip.seen[0].shape == (2, 3, 4, 4)
    assert (served.inputs["image"].capacity, served.inputs["prompt"].capacity) == (300, 8192)


def test_a_score_may_not_be_divided_by_zero(clip: TinyClip, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="divide_by is 0"):
        jurors.pick_score(str(tmp_path), divide_by=0)


@pytest.mark.parametrize(
    ("told", "side"),
    [
        ({"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "resample": 3}, 8),
        ({"size": 6, "crop_size": {"height": 6, "width": 6}, "do_center_crop": True}, 6),
        ({"size": 224, "crop_size": 224}, 224),
        (None, 224),
    ],
)
def test_pictures_have_the_size_that_the_folder_tells_or_else_clips(
    clip: TinyClip, tmp_path: Path, told: Any, side: int
) -> None:
    if told is None:
        (tmp_path / "preprocessor_config.json").unlink()
    else:
        tell(tmp_path, **told)
    scored(jurors.clip_score(str(tmp_path)), painted((51, 102, 153)), [b"a"])
    mean, std = (0.48145466, 0.26862954) if told is None else (0.0, 1.0)
    assert clip.seen[0].shape == (1, 3, side, side)
    assert clip.seen[0][0, 0, 0, 0].item() == pytest.approx((0.2 - mean) / std, rel=1e-5)


@pytest.mark.parametrize(
    "told",
    [
        {"size": {"shortest_edge": 8}},
        {"size": 8},
        {"crop_size": {"height": 8, "width": 8}},
        {"resample": 2},
        {"do_center_crop": False},
        {"size": 8, "crop_size": {"height": 8, "width": 4}},
        {"size": 8, "crop_size": {"height": 8}},
        {"size": {"height": 8, "width": 8}, "crop_size": {}},
        {"size": {}, "crop_size": 4},
        {"size": 0, "crop_size": 0},
    ],
)
def test_a_folder_that_tells_of_other_preprocessing_is_refused(clip: TinyClip, tmp_path: Path, told: Any) -> None:
    tell(tmp_path, **told)
    with pytest.raises(ValueError, match="shortest_edge equal to crop_size"):
        jurors.clip_score(str(tmp_path))


def test_the_head_of_aesthetic_v1_is_read_whichever_kind_it_is(clip: TinyClip, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    file = tmp_path / "head" / "head.safetensors"
    weight, bias = torch.tensor([[5.0, 10.0]]), torch.tensor([1.0])
    last = {"layers.2.weight": torch.tensor([[1.0, 1.0]]), "layers.2.bias": torch.tensor([0.5])}
    deep = {"layers.0.weight": torch.tensor([[5.0, 0.0], [0.0, 10.0]]), "layers.0.bias": torch.tensor([0.25] * 2)}
    for stored in ({"weight": weight, "bias": bias}, {**deep, **last}):
        save_file(stored, file)
        served = jurors.aesthetic_v1(str(tmp_path), pixels=100)
        assert served.inputs["image"].capacity == 300
        found = scored(served, painted((30, 40, 0), (40, 0, 0)))["score"]
        assert found.tolist() == pytest.approx([5 * 0.6 + 10 * 0.8 + 1, 5 + 1], rel=1e-5)
    for wrong in ({"bias": bias}, {"layers.0.weight": torch.zeros(2)}):
        save_file(wrong, file)
        with pytest.raises(ValueError, match="expected weight and bias, or layers"):
            jurors.aesthetic_v1(str(tmp_path))


class OpenedClip(nn.Module):
    """open_clip's CLIP: it embeds a picture as two of its pixels, and a prompt as its first two tokens."""

    made: dict[str, Any]

    def __init__(self, **config: Any) -> None:
        super().__init__()
        OpenedClip.made = config
        self.one, self.two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def encode_image(self, seen: torch.Tensor, *, normalize: bool) -> torch.Tensor:
        assert normalize and (self.one.item(), self.two.item()) == (1, 2)
        self.seen = seen
        return seen[:, :2, 0, 0]

    def encode_text(self, tokens: torch.Tensor, *, normalize: bool) -> torch.Tensor:
        assert normalize
        return tokens.float()


@pytest.mark.parametrize(("described", "context"), [(True, 20), (True, None), (False, 77)])
@pytest.mark.parametrize("antialias", [True, False])
def test_hpsv2_is_the_model_that_its_folder_describes_or_else_vit_h_14(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, described: bool, context: int | None, antialias: bool
) -> None:
    config = {"vision_cfg": {"image_size": 4}, "text_cfg": {"context_length": context} if context else {}}
    open_clip: Any = ModuleType("open_clip")
    open_clip.model = SimpleNamespace(CLIP=OpenedClip)
    open_clip.get_model_config = lambda name: {"ViT-H-14": config}[name]
    lengths: list[int] = []

    def tokenizer(context_length: int) -> Any:
        lengths.append(context_length)
        return lambda prompts: torch.tensor([[len(prompt), 1] for prompt in prompts])

    open_clip.SimpleTokenizer = tokenizer
    monkeypatch.setitem(sys.modules, "open_clip", open_clip)
    for number, name in enumerate(("one", "two"), 1):
        save_file({name: torch.tensor([float(number)])}, tmp_path / f"part-{number}.safetensors")
    if described:
        (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
        open_clip.get_model_config = None
    served = jurors.hpsv2(str(tmp_path), antialias, pixels=100)
    picture = np.random.default_rng(1).integers(0, 256, (8, 9, 3), np.uint8)
    found = scored(served, tensors([picture]), [b"abc\xff"])["score"]
    (seen,) = served.module.clip.seen
    expected, wrong = Preprocessing(4, "tensor" if antialias else "tensor-aliased", half="even")(tensors([picture]))
    torch.testing.assert_close(seen, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found, (4 * seen[0, 0, 0] + seen[1, 0, 0])[None], rtol=1e-6, atol=0)
    assert not wrong and OpenedClip.made == config and lengths == [context or 77]
    assert (served.inputs["image"].capacity, served.inputs["prompt"].capacity) == (300, 8192)


class Letters:
    """A tokenizer whose tokens are the letters' numbers."""

    chat_template: str | None = "there is one"
    pad_token_id: int | None = 7

    def apply_chat_template(self, chat: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and not add_generation_prompt and [one["role"] for one in chat] == ["user", "assistant"]
        return "|".join(one["content"] for one in chat)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


class Judge(nn.Module):
    """Its logits are the sum of the tokens that the mask leaves, and another number."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(pad_token_id=None)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        self.ids, self.mask, sums = input_ids, attention_mask, (input_ids * attention_mask).sum(1)
        return SimpleNamespace(logits=torch.stack([sums, -sums], 1).to(self.one.dtype))


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Letters:
    """The tokenizer that a stand-in for transformers reads, beside a `Judge`."""
    tokenizer, transformers = Letters(), ModuleType("transformers")

    def read(folder: Path, *, local_files_only: bool, use_safetensors: bool = True) -> Any:
        assert (folder, local_files_only, use_safetensors) == (tmp_path, True, True)
        return Judge()

    def read_tokenizer(folder: Path, *, local_files_only: bool) -> Letters:
        assert (folder, local_files_only) == (tmp_path, True)
        return tokenizer

    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=read_tokenizer)  # type: ignore[attr-defined]
    transformers.AutoModelForSequenceClassification = SimpleNamespace(from_pretrained=read)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    return tokenizer


def test_a_chat_is_scored_whole_beside_longer_ones_or_not_at_all(letters: Letters, tmp_path: Path) -> None:
    served = jurors.text_reward(str(tmp_path), max_length=7, text=99)
    found = scored(served, [b"a", b"abcd", b"ab"], [b"b", b"efg", b"cdef"])
    whole = {"a|b": 0, "ab|cdef": 2}
    assert isinstance(found, RowErrors)
    assert found.errors == {1: "prompt and response have 8 tokens, the model takes at most 7"}
    assert {text: found.outputs["score"][row].item() for text, row in whole.items()} == {
        text: sum(map(ord, text)) for text in whole
    }
    judge = served.module.model
    assert judge.mask.tolist() == [[1] * 3 + [0] * 4, [1] + [0] * 6, [1] * 7]
    assert judge.ids[0].tolist() == [*map(ord, "a|b"), 7, 7, 7, 7] and judge.config.pad_token_id == 7
    assert {name: item.capacity for name, item in served.inputs.items()} == {"prompt": 99, "response": 99}


def test_a_text_reward_has_the_precision_that_was_asked_for(letters: Letters, tmp_path: Path) -> None:
    served = jurors.text_reward(str(tmp_path), dtype="bfloat16")
    assert served.module.model.one.dtype == torch.bfloat16
    assert scored(served, [b"a"], [b"b"])["score"].dtype == torch.float32
    with pytest.raises(ValueError, match="expected one of float32, bfloat16, float16"):
        jurors.text_reward(str(tmp_path), dtype="int8")


@pytest.mark.parametrize(("lacks", "says"), [("chat_template", "no chat template"), ("pad_token_id", "no pad_token")])
def test_a_tokenizer_that_lacks_something_is_refused(letters: Letters, tmp_path: Path, lacks: str, says: str) -> None:
    setattr(letters, lacks, None)
    with pytest.raises(ValueError, match=says):
        jurors.text_reward(str(tmp_path))
    setattr(letters, lacks, "" if lacks == "chat_template" else 0)
    if lacks == "pad_token_id":
        assert jurors.text_reward(str(tmp_path)).module.model.config.pad_token_id == 0


def test_a_package_that_fails_within_is_not_called_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("import there_is_none_of_this_name")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'there_is_none_of_this_name'$"):
        jurors.clip_score(str(tmp_path))


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
