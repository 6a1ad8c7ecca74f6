"""A dialect that no request can be answered in is refused when its model is loaded, with the setting that mends it."""

from __future__ import annotations

import pytest
from tests.serving import launch, serving

from jurybox.client import ModelFailed
from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.gateway.dialects import chat, json_dialects, pickle_dialects, reward_model
from jurybox.server.gateway.dialects.router import _DIALECTS
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.dialect_fields import FIELDS, FRAMES, GENEVAL, IF_NAMED, PICTURE, TEXT
from jurybox.server.supervisor.dialect_fit import require_answerable

SPECS = {
    TEXT: TensorSpec("bytes", capacity=100),
    PICTURE: TensorSpec("uint8", (-1, -1, 3), capacity=30_000),
    FRAMES: TensorSpec("uint8", (-1, 20, 30, 3), capacity=30_000),
}
SCORE = {"score": TensorSpec("float32")}
JUDGES = {name: {"weight": 1, "model": "juror"} for name in ("rewards", "strict_rewards")}


def check(dialect, inputs, outputs=SCORE, panels=None):
    dialects = {"d": {"model": "juror", **dialect}}
    models = {"juror": {"factory": "a:b"}, "other": {"factory": "a:b"}}
    settings = Configuration.model_validate({"models": models, "dialects": dialects, "panels": panels or {}})
    require_answerable(settings, ModelSpec("juror", inputs, outputs))


def test_every_dialect_has_its_fields():
    assert FIELDS.keys() == _DIALECTS.keys()


@pytest.mark.parametrize("speaks", FIELDS)
def test_each_field_of_a_dialect_may_be_an_input_of_its_kind_and_no_other(speaks):
    """Under its own name, and under another that `inputs` map to it; for fields of edits only so."""
    for field, kind in FIELDS[speaks].items():
        check({"speaks": speaks}, {field: SPECS[kind]})
    for field, kind in (FIELDS[speaks] | IF_NAMED.get(speaks, {})).items():
        check({"speaks": speaks, "inputs": {"mine": field}}, {"mine": SPECS[kind]})
        for other in SPECS.keys() - {kind}:
            with pytest.raises(
                SpecMismatch, match=rf"\[dialects.d\] can never be answered: .*{field!r}, which is {kind}"
            ):
                check({"speaks": speaks, "inputs": {"mine": field}}, {"mine": SPECS[other]})
    for field, kind in IF_NAMED.get(speaks, {}).items():
        with pytest.raises(SpecMismatch, match=f"which is no field of {speaks}; it could take .*{field}"):
            check({"speaks": speaks}, {field: SPECS[kind]})


class Naming:
    rewards = ("score",)

    def takes(self, name):
        return False


@pytest.mark.parametrize(
    ("speaks", "request_"),
    [
        ("openrlhf", lambda: json_dialects._openrlhf(b'{"query": ["q"], "prompts": ["p"], "labels": ["l"]}')),
        ("slime", lambda: json_dialects._slime(b'{"prompt": "p", "response": "r", "label": "l"}')),
        ("flow_factory", lambda: json_dialects._flow_factory(Naming(), b'{"prompt": ["p"], "image": ["i"]}')),
        (
            "unirl",
            lambda: json_dialects._unirl(
                Naming(),
                b'{"requests": [{"history": [{"text": "t", "image_b64": "i"}], "required_rewards": ["score"]}]}',
            ),
        ),
        (
            "unifiedreward",
            lambda: chat._asked(
                b'{"messages": [{"content": [{"type": "text", "text": "t"}, '
                b'{"type": "image_url", "image_url": {"url": "data:image"}}]}]}'
            ),
        ),
        *(
            (speaks, lambda: pickle_dialects._asked(Naming(), {"images": [b"i"], "prompts": ["p"]}, None))
            for speaks in ("flow_grpo", "verl_omni")
        ),
    ],
)
def test_the_fields_are_those_that_a_full_request_has(speaks, request_):
    request = request_()
    found = dict.fromkeys(request.columns, TEXT) | dict.fromkeys(request.pictures, PICTURE)
    assert found == FIELDS[speaks]


def test_the_fields_of_reward_models_are_those_of_all_their_requests():
    pair = reward_model._score(Naming(), {"text_1": "a", "text_2": "b"})
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image"}}]}
    talk = chat.conversation([message])
    columns = dict.fromkeys((*pair.columns, *talk.columns), TEXT) | dict.fromkeys(talk.pictures, PICTURE)
    assert columns == FIELDS["reward_model"]


def test_a_column_of_nemo_gyms_dataset_may_be_any_text():
    check({"speaks": "nemo_gym", "inputs": {"mine": "expected_answer"}}, {"mine": SPECS[TEXT]})
    with pytest.raises(SpecMismatch, match="'expected_answer', which is text"):
        check({"speaks": "nemo_gym", "inputs": {"mine": "expected_answer"}}, {"mine": SPECS[PICTURE]})


def test_genevals_fields_need_a_panel_of_its_judgements():
    spec = {"image": SPECS[PICTURE], "metadata": SPECS[TEXT]}
    assert spec.keys() <= GENEVAL.keys()
    with pytest.raises(SpecMismatch, match="'metadata', which is no field of flow_grpo"):
        check({"speaks": "flow_grpo"}, spec)
    check({"speaks": "flow_grpo", "model": "judges"}, spec, panels={"judges": {"members": JUDGES}})


def test_an_edit_may_name_any_picture_of_a_pickled_request_but_no_text():
    check({"speaks": "verl_omni", "inputs": {"before": "sketch"}}, {"image": SPECS[PICTURE], "before": SPECS[PICTURE]})
    with pytest.raises(SpecMismatch, match="'captoin', which is a picture; it could take prompt"):
        check({"speaks": "verl_omni", "inputs": {"text": "captoin"}}, {"text": SPECS[TEXT]})


@pytest.mark.parametrize(
    ("dialect", "inputs", "outputs", "reason"),
    [
        ({}, {"x": TensorSpec("float32", (4,))}, SCORE, "no field of cosmos fits it"),
        ({"inputs": {"imgae": "image"}}, {"image": SPECS[PICTURE]}, SCORE, "its inputs name 'imgae', .* takes image"),
        ({"resize": [20, 20]}, {"image": TensorSpec("uint8", (20, 30, 3))}, SCORE, r"no .*of resize = \[20, 20\]"),
        ({}, {"image": SPECS[PICTURE]}, {**SCORE, "b": TensorSpec("float32")}, "name the one number that is the score"),
        ({"output": "best"}, {"image": SPECS[PICTURE]}, SCORE, "name the one number that is the score"),
        ({}, {"image": SPECS[PICTURE]}, {"score": TensorSpec("float32", (3,))}, "name the one number"),
    ],
)
def test_what_no_request_could_have_is_refused(dialect, inputs, outputs, reason):
    with pytest.raises(SpecMismatch, match=reason):
        check({"speaks": "cosmos", **dialect}, inputs, outputs)


MODELS = {"juror": {"factory": "tests.reward_models:brightness"}, "other": {"factory": "tests.models:affine"}}
WRONG = {"helpful": {"speaks": "openrlhf", "model": "juror", "output": "score"}}


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_a_server_does_not_start_with_a_dialect_that_can_never_be_answered(tmp_path, flags):
    running = launch(tmp_path, MODELS, flags=flags, dialects=WRONG, http="127.0.0.1:0")
    assert running.process.wait(60) == 3
    assert "[dialects.helpful] can never be answered: input 'image' of model 'juror'" in running.text()


def test_a_model_is_not_replaced_by_one_with_which_its_dialect_cannot_be_answered(tmp_path):
    right = {"helpful": WRONG["helpful"] | {"model": "juror", "speaks": "flow_grpo"}}
    with serving(tmp_path, MODELS, dialects=right, http="127.0.0.1:0", factories=["tests.models:*"]) as server:
        with server.connect() as client:
            with pytest.raises(ModelFailed, match=r"\[dialects.helpful\] can never be answered"):
                client.load("juror", {"factory": "tests.models:affine"})
            assert client.describe("juror").state == "ready"
            assert "image" in client.model("juror").spec.inputs
