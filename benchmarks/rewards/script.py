"""The usual script: FastAPI, one picture, one forward, no batching. ``script.py PORT THREADS``."""

from __future__ import annotations

import io
import sys

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from PIL import Image

from benchmarks.rewards.jurors import Convolutions

app = FastAPI()
model = Convolutions().eval()


def judged(data: bytes) -> float:
    """The score of a JPEG."""
    image = torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))
    with torch.inference_mode():
        return float(model(image[None]))


@app.post("/")
async def score(request: Request) -> dict[str, float]:
    """A JPEG for its score."""
    from starlette.concurrency import run_in_threadpool

    return {"score": await run_in_threadpool(judged, await request.body())}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
