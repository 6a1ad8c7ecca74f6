"""Fields of a panel of judgements: a dialect that is spoken in JSON has its own fields also with such a panel."""

from __future__ import annotations

import pytest

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.dialect_fields import JUDGED
from jurybox.server.supervisor.dialect_fit import require_answerable

PICTURE = TensorSpec("uint8", (-1, -1, 3), capacity=30_000)
TEXT = TensorSpec("bytes", capacity=100)
SCORE = {"score": TensorSpec("float32")}


def check(speaks: str, members: list[str], takes: dict[str, TensorSpec], **dialect: object) -> None:
    panel = {"members": {name: {"weight": 1.0, "model": "juror"} for name in members}}
    settings = Configuration.model_validate(
        {
            "models": {"juror": {"factory": "a:b"}},
            "panels": {"judges": panel},
            "dialects": {"d": {"speaks": speaks, "model": "judges", **dialect}},
        }
    )
    require_answerable(settings, ModelSpec("juror", takes, SCORE))


@pytest.mark.parametrize(("speaks", "fits"), [("flow_grpo", True), ("cosmos", False)])
def test_only_requests_with_pickles_have_genevals_metadata(speaks: str, fits: bool) -> None:
    inputs = {"image": PICTURE, "metadata": TEXT}
    if fits:
        check(speaks, list(JUDGED), inputs)
        return
    with pytest.raises(SpecMismatch, match=r"^\[dialects.d\] can never be answered: .*'metadata', which is no field"):
        check(speaks, list(JUDGED), inputs)


def test_a_panel_with_more_than_the_judgements_has_their_fields_and_one_with_fewer_has_not() -> None:
    inputs = {"image": PICTURE, "metadata": TEXT}
    check("flow_grpo", [*JUDGED, "style"], inputs)
    with pytest.raises(SpecMismatch, match="'metadata', which is no field of flow_grpo"):
        check("flow_grpo", list(JUDGED)[:1], inputs)


def test_inputs_of_a_panels_dialect_may_be_those_of_its_other_members() -> None:
    check("cosmos", ["style"], {"image": PICTURE}, inputs={"caption": "prompt"})
