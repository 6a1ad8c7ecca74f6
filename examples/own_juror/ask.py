"""Send texts to the juror as a trainer does, from the host; print a score for each, or why it has none."""

import os

from jurybox.client.rewards import Juror

TEXTS = ['{"name": "Ada", "age": 36}', '{"name": "Ada"}', "Ada is 36.", ""]

juror = Juror("fields", address=os.environ.get("JURYBOX_ADDRESS", "grpc://127.0.0.1:8001"))
for text, score in zip(TEXTS, juror.scores({"text": TEXTS}, len(TEXTS)), strict=True):
    print(f"{text or '(nothing)':28}{score}")
juror.close()
