"""An LSTM behind Triton's sequence batcher, for its Python backend; open_rows.py puts it into the repository."""

from __future__ import annotations

import numpy as np
import torch
import triton_python_backend_utils as backend
from torch import nn

SESSIONS = 1024


class TritonPythonModel:
    """One forward for the requests of a batch, whose states lie in one tensor, as our engine has it."""

    def initialize(self, args: dict[str, str]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._cell, self._head = nn.LSTMCell(52, 256), nn.Linear(256, 145)
        self._hidden, self._memory = torch.zeros(SESSIONS, 256), torch.zeros(SESSIONS, 256)
        self._slots: dict[int, int] = {}

    def execute(self, requests):  # type: ignore[no-untyped-def]
        rows, slots, starts = [], [], []
        for request in requests:
            rows.append(backend.get_input_tensor_by_name(request, "x").as_numpy())
            # Not by control inputs: with 128 sequences over streams this build ends at them with signal 11.
            slots.append(self._slots.setdefault(request.correlation_id(), len(self._slots) % SESSIONS))
            starts.append(bool(request.flags() & backend.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START))
        index = torch.tensor(slots)
        fresh = index[torch.tensor(starts)]
        self._hidden[fresh] = self._memory[fresh] = 0.0
        with torch.inference_mode():
            hidden, memory = self._cell(
                torch.from_numpy(np.concatenate(rows)), (self._hidden[index], self._memory[index])
            )
            self._hidden[index], self._memory[index] = hidden, memory
            out = self._head(hidden).numpy()
        return [backend.InferenceResponse([backend.Tensor("y", out[i : i + 1])]) for i in range(len(requests))]
