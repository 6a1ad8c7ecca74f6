"""What tests of the Open Inference Protocol ask with tritonclient, and what they expect."""

from __future__ import annotations

import numpy as np
from google.protobuf.json_format import MessageToDict

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
ANSWER = 2 * ROWS + 1


def observation(module, rows=ROWS):
    tensor = module.InferInput("observation", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    return tensor


def plain(answer):
    """A message as a dict, as the HTTP client gives it."""
    return answer if isinstance(answer, (dict, list)) else MessageToDict(answer, preserving_proto_field_name=True)
