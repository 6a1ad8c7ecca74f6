"""The models as a Jurybox config names them."""

from __future__ import annotations

from benchmarks.serving.cases import case_named
from benchmarks.serving.models import build
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel


def model(case: str) -> ServedModel:
    """The model of a case."""
    asked = case_named(case)
    return ServedModel(
        module=build(asked.model),
        inputs={"image" if asked.model == "image" else "observation": TensorSpec(asked.dtype, asked.shape)},
        outputs={name: TensorSpec("float32", shape) for name, shape in asked.outputs},
    )
