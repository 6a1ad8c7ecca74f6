"""A reward server like those of image trainers: Flask, pickles, gunicorn with a synchronous worker for each device.

``python -m gunicorn -w 1 -b 127.0.0.1:PORT benchmarks.rewards.pickled:app``. It answers one request after the other,
and unpickles any body: only for a benchmark on loopback.
"""

from __future__ import annotations

import io
import os
import pickle

import numpy as np
import torch
from flask import Flask, request
from PIL import Image

from benchmarks.rewards.jurors import Convolutions

torch.set_num_threads(int(os.environ["JURYBOX_BENCHMARK_THREADS"]))
app = Flask(__name__)
model = Convolutions().eval()


@app.post("/")
def scores() -> tuple[bytes, int]:
    """Pictures for their scores, those of a request in one batch."""
    pictures = [np.array(Image.open(io.BytesIO(data)).convert("RGB")) for data in pickle.loads(request.data)["images"]]
    with torch.inference_mode():
        return pickle.dumps({"scores": model(torch.from_numpy(np.stack(pictures))).tolist()}), 200
