"""Asks the juror as a trainer would, from the host: a score for each text, or the reason why it has none."""

import os

from jurybox.client.rewards import Juror

TEXTS = ['{"name": "Ada", "age": 36}', '{"name": "Ada"}', "Ada is 36.", ""]

juror = Juror("fields", address=os.environ.get("JURYBOX_ADDRESS", "grpc://127.0.0.1:8001"))
for text, score in zip(TEXTS, juror.scores({"text": TEXTS}, len(TEXTS)), strict=True):
    print(f"{text or '(nothing)':28}{score}")
juror.close()
