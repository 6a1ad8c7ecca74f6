"""A worker that scores pictures, as an example: replace it by your own."""

import time

import numpy as np

from jurybox.client import connect

with connect(timeout=300.0) as server:
    juror = server.model("photo")
    while True:
        picture = np.random.default_rng().integers(0, 256, (384, 384, 3), np.uint8)
        print(float(juror(picture)["score"]), flush=True)
        time.sleep(1.0)
