"""The fields of each dialect's requests, which are what a model's inputs may be; docs/dialects.md has the table."""

from __future__ import annotations

from collections.abc import Mapping

TEXT, PICTURE, FRAMES = "text", "a picture", "a list of frames"  # kinds of values
PICKLED = ("flow_grpo", "verl_omni")  # dialects whose clients send pickles
_PICTURE_AND_PROMPT = {"image": PICTURE, "prompt": TEXT}
_PICTURE_AND_TEXT = {**_PICTURE_AND_PROMPT, "text": TEXT}
FIELDS: Mapping[str, Mapping[str, str]] = {
    "flow_grpo": _PICTURE_AND_PROMPT,
    "verl_omni": _PICTURE_AND_PROMPT,
    "openrlhf": {"query": TEXT, "text": TEXT, "prompt": TEXT, "label": TEXT},
    "slime": {"prompt": TEXT, "response": TEXT, "label": TEXT},
    "unirl": {**_PICTURE_AND_TEXT, "metadata": TEXT},
    "flow_factory": _PICTURE_AND_TEXT,
    "cosmos": _PICTURE_AND_TEXT,
    "unifiedreward": _PICTURE_AND_TEXT,
    # A text alone, a chat, or a pair: the request's path and form say which.
    "reward_model": {
        "text": TEXT, "prompt": TEXT, "chat": TEXT, "query": TEXT, "document": TEXT, "image": PICTURE,
    },
    "nemo_gym": {"text": TEXT, "prompt": TEXT},
    "robometer": {"video": FRAMES, "prompt": TEXT, "text": TEXT},
}  # fmt: skip
# What every other name in `inputs` is: a picture of an edit; a column of the dataset.
OTHERS: Mapping[str, str] = {**dict.fromkeys(PICKLED, PICTURE), "nemo_gym": TEXT}
# Fields that exist only where a dialect's `inputs` name them.
IF_NAMED: Mapping[str, Mapping[str, str]] = {
    "unirl": {"source": PICTURE},
    "flow_factory": {"source": PICTURE, "video": FRAMES},
}
# Fields of GenEval's requests, which a pickled dialect answers with a panel that has the members JUDGED.
GENEVAL = {**_PICTURE_AND_TEXT, "metadata": TEXT}
JUDGED = ("rewards", "strict_rewards")
