"""The plot of docs/reward_hygiene.md: one picture, as JPEG of every quality, and the score that a juror gives it.

``python -m benchmarks.rewards.encodings [--out docs/images/jpeg-quality.svg]``. The pictures are scikit-image's, the
juror is jurybox.server.jurors:panel.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import skimage.data
import torch
from PIL import Image

from jurybox.server.jurors import panel

PICTURES = ("astronaut", "coffee", "chelsea")
QUALITIES = (*range(10, 95, 5), 95)


def encoded(image: Image.Image, quality: int) -> Image.Image:
    """Return a picture after JPEG compression."""
    sink = io.BytesIO()
    image.save(sink, "JPEG", quality=quality)
    return Image.open(sink).convert("RGB")


def scores(name: str) -> tuple[list[float], float]:
    """Of each quality, and of the picture itself."""
    whole = Image.fromarray(getattr(skimage.data, name)()).resize((384, 384), Image.Resampling.BICUBIC)
    pictures = [*(encoded(whole, quality) for quality in QUALITIES), whole]
    rows = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    with torch.inference_mode():
        *found, itself = panel().module(rows)["score"].tolist()
    return found, itself


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards.encodings")
    parser.add_argument("--out", type=Path, default=Path("docs/images/jpeg-quality.svg"))
    out = parser.parse_args().out
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jurybox"  # the same file from the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for number, name in enumerate(PICTURES):
        found, itself = scores(name)
        axes.plot(QUALITIES, [score - itself for score in found], f"C{number}.-", linewidth=0.9, label=name)
        told = (f"{quality}:{score:.4f}" for quality, score in zip(QUALITIES, found, strict=True))
        print(name, f"{itself:.4f}", *told)
    axes.axhline(0, color="grey", linestyle=":", label="the picture as PNG")
    axes.axvline(75, color="grey", linewidth=0.5)
    axes.set(xlabel="quality of the JPEG (Pillow; its default is 75)", ylabel="score - score as PNG")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
