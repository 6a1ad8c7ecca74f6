"""Chats in the forms of reward models, and a panel's reward that was summed in single precision."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.unit.server.test_reward_forms import ask
from tests.unit.server.test_trainers_bodies import Intake, row, said, verified

from jurybox.protocol.errors import ModelFailed
from jurybox.server.gateway.dialects.nemo_gym import answers


@pytest.mark.parametrize("path", ["/classify", "/v1/classify", "/pooling", "/v1/embeddings"])
def test_a_chat_is_one_row_of_every_form_that_takes_texts(path):
    messages = [
        {"role": "user", "content": "why?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "image_url", "image_url": {"url": "data:image;base64,AAAA"}},
            ],
        },
    ]
    rows, answer = ask(path, messages=messages)
    assert (rows["text"], rows["prompt"], rows["image"]) == (["so"], ["why?"], ["data:image;base64,AAAA"])
    assert json.loads(rows["chat"][0])[0] == messages[0] and len(answer["data"]) == 1


def test_a_panels_parts_add_up_to_its_score_as_precisely_as_it_is():
    parts, weights = {"fine": [1234.567], "short": [0.1]}, {"fine": 3.0, "short": 1.0}
    whole = 3.0 * 1234.567 + 0.1
    rounded = float(np.float32(whole))
    assert rounded != whole
    answer = json.loads(verified(Intake(rounded, parts=parts, weights=weights), row([said("a")])).body)
    assert answer["reward"] == pytest.approx(whole, rel=1e-12) == sum(answer["reward_components"].values())
    with pytest.raises(ModelFailed):
        verified(Intake(whole * 1.0001, parts=parts, weights=weights), row())
    tiny = {"fine": [1e-7], "short": [-1e-7]}
    even = {"fine": 1.0, "short": 1.0}
    assert json.loads(verified(Intake(5e-8, parts=tiny, weights=even), row()).body)["reward"] == 0.0
    assert set(answers(Intake(), print)) == {"/verify", "/seed_session"}
