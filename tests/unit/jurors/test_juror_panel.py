"""What a configuration gets from the factories."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from jurybox.protocol import TensorSpec
from jurybox.server.jurors import colour, exposure, naturalness, panel, sharpness
from jurybox.server.jurors.criteria import PUBLISHED
from jurybox.server.jurors.panels import example_images
from jurybox.server.models import ServedModel

CRITERIA = ["naturalness", "exposure", "colour", "sharpness"]


def test_the_panel_gives_its_score_first_and_then_every_mark() -> None:
    served = panel()
    assert dict(served.inputs) == {"image": TensorSpec("uint8", (384, 384, 3))}
    assert list(served.outputs) == ["score", *CRITERIA]
    assert set(served.outputs.values()) == {TensorSpec("float32")}
    outputs = served.module(example_images(3, 384))
    assert list(outputs) == list(served.outputs)
    assert all(output.shape == (3,) and output.dtype == torch.float32 for output in outputs.values())


def test_the_score_is_the_mean_weighted_by_proportion() -> None:
    images = example_images(2, 64)
    outputs = panel(size=64, naturalness=1, exposure=2, colour=0, sharpness=5).module(images)
    expected = (outputs["naturalness"] + 2 * outputs["exposure"] + 5 * outputs["sharpness"]) / 8
    torch.testing.assert_close(outputs["score"], expected)
    doubled = panel(size=64, naturalness=2, exposure=4, colour=0, sharpness=10).module(images)
    torch.testing.assert_close(doubled["score"], outputs["score"])


@pytest.mark.parametrize("weights", [{"colour": -1.0}, {"colour": float("nan")}, dict.fromkeys(CRITERIA, 0.0)], ids=str)
def test_weights_that_weigh_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected finite numbers, none negative, at least one above 0"):
        panel(**weights)  # type: ignore[arg-type]


def test_an_image_too_small_for_the_statistics_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="size is 16: expected at least 32"):
        panel(size=16)


@pytest.mark.parametrize("factory", [naturalness, exposure, colour, sharpness])
def test_a_criterion_served_alone_marks_as_in_the_panel(factory: object) -> None:
    assert callable(factory)
    served: ServedModel = factory(size=96)
    assert dict(served.inputs) == {"image": TensorSpec("uint8", (96, 96, 3))}
    assert dict(served.outputs) == {"score": TensorSpec("float32")}
    images = example_images(2, 96)
    torch.testing.assert_close(served.module(images), panel(size=96).module(images)[factory.__name__])  # type: ignore[attr-defined]


def test_the_example_is_a_batch_of_its_own_input() -> None:
    served = panel(size=48)
    assert served.example is not None
    rows = served.example(5)["image"]
    assert rows.dtype == torch.uint8
    assert tuple(rows.shape) == (5, 48, 48, 3)


def test_examples_have_the_spectrum_of_photographs() -> None:
    luma = example_images(4, 256).float().mean(dim=-1)
    power = torch.fft.rfft2(luma - luma.mean(dim=(1, 2), keepdim=True)).abs().square().mean(dim=0)
    frequency = torch.hypot(torch.fft.fftfreq(256)[:, None], torch.fft.rfftfreq(256)[None])
    octaves = [power[(frequency >= low) & (frequency < 2 * low)].sum() for low in (1 / 64, 1 / 32, 1 / 16, 1 / 8)]
    assert max(octaves) / min(octaves) < 1.5, "1/f amplitude means equal power in every octave"
    assert luma.mean() == pytest.approx(118, abs=15)


MEASURE_FAULTS = """
import resource, threading, torch
from jurybox.server.jurors import panel

served = panel()
rows = torch.zeros(4, 384, 384, 3, dtype=torch.uint8)
faults = []

def serve():
    torch.set_num_threads(1)
    with torch.inference_mode():
        for _ in range(6):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            served.module(rows)
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

thread = threading.Thread(target=serve)
thread.start()
thread.join()
print(min(faults[3:]))  # what is allocated anew is so in every batch; another process may take pages once
"""


@pytest.mark.runs
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_warm_panel_pays_for_no_page_faults_on_a_cpu() -> None:
    # In its own process: whatever other tests allocated has moved this one's thresholds.
    done = subprocess.run([sys.executable, "-c", MEASURE_FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2000, "one batch of four has some 10,000 pages of intermediates"


def test_the_regressor_names_its_source_and_licence() -> None:
    with safe_open(PUBLISHED, framework="pt") as file:
        metadata = file.metadata()
        assert file.get_tensor("support_vectors").shape == (770, 36)
    assert metadata["licence"] == "Apache-2.0"
    assert "brisque 0.2.0" in metadata["source"]
