"""The model behind Triton's Python backend; copied into the model repository by contenders/triton.py."""

from __future__ import annotations

import os

import numpy as np
import torch
import triton_python_backend_utils as backend

from benchmarks.serving.cases import CASES
from benchmarks.serving.models import build, forward


class TritonPythonModel:
    """Gathers the requests of a batch into a buffer that is kept, one forward, cuts the outputs apart."""

    def initialize(self, args: dict[str, str]) -> None:
        self._case = CASES[os.environ["BENCH_CASE"]]
        self._module = build(self._case.model)
        self._staging = np.zeros((self._case.max_batch, *self._case.shape), self._case.dtype)
        self._batch = torch.from_numpy(self._staging)
        forward(self._module, self._batch)

    def execute(self, requests):  # type: ignore[no-untyped-def]
        ends, at = [], 0
        for request in requests:
            rows = backend.get_input_tensor_by_name(request, "input").as_numpy()
            self._staging[at : at + len(rows)] = rows
            at += len(rows)
            ends.append(at)
        outputs = [output.numpy().reshape(at, -1) for output in forward(self._module, self._batch[:at])]
        names = [name for name, _ in self._case.outputs]
        responses, start = [], 0
        for end in ends:
            tensors = [
                backend.Tensor(name, np.ascontiguousarray(output[start:end]))
                for name, output in zip(names, outputs, strict=True)
            ]
            responses.append(backend.InferenceResponse(tensors))
            start = end
        return responses
