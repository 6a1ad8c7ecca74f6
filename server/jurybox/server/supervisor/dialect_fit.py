"""Whether the dialects of a model can ever be answered with it: its inputs are fields of their requests, and it scores.

A dialect that cannot would start, and fail at the first step of a training.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jurybox.client.juror import score_output
from jurybox.client.juror_rows import column_names
from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.dialect_fields import (
    FIELDS,
    FRAMES,
    GENEVAL,
    IF_NAMED,
    JUDGED,
    OTHERS,
    PICKLED,
    PICTURE,
    TEXT,
)
from jurybox.server.settings.door_settings import DialectSettings, PanelSettings

_AXES = {PICTURE: 3, FRAMES: 4}
_CHANNELS = 3


def require_answerable(settings: Configuration, spec: ModelSpec) -> None:
    """Check a loaded model for each dialect that uses it.

    Raises:
        SpecMismatch: a dialect can never be answered; the message names it, and what to set.
    """
    for name, dialect in settings.dialects.items():
        panel = settings.panels.get(dialect.model)
        for output in _outputs(spec.name, dialect, panel):
            try:
                _require_fields(dialect.speaks or name, dialect, panel, spec)
                score_output(spec.name, output, spec.outputs)
            except SpecMismatch as error:
                raise SpecMismatch(f"[dialects.{name}] can never be answered: {error}") from None


def _outputs(model: str, dialect: DialectSettings, panel: PanelSettings | None) -> Iterator[str | None]:
    """Yield the output that is the score, each time that the dialect uses the model."""
    if panel is not None:
        yield from (one.output for name, one in panel.members.items() if (one.model or name) == model)
    elif dialect.model == model:
        yield dialect.output


def _require_fields(speaks: str, dialect: DialectSettings, panel: PanelSettings | None, spec: ModelSpec) -> None:
    # A panel's `inputs` may name inputs of its other members.
    if panel is None and (unknown := dialect.inputs.keys() - spec.inputs.keys()):
        raise SpecMismatch(
            f"its inputs name {', '.join(map(repr, unknown))}, model {spec.name!r} takes {', '.join(spec.inputs)}"
        )
    fields, if_named = FIELDS[speaks], IF_NAMED.get(speaks, {})
    if speaks in PICKLED and panel is not None and set(JUDGED) <= panel.members.keys():
        fields = GENEVAL
    for name, tensor in spec.required.items():
        source = dialect.inputs.get(name)
        field = next((one for one in column_names(name, source) if one in fields), source)
        kind = fields.get(field or "") or if_named.get(source or "") or (OTHERS.get(speaks, "") if source else "")
        if kind and _may_fit(tensor, kind, dialect.resize):
            continue
        given = f"the field {field!r}, which is {kind}" if kind else f"{field or name!r}, which is no field of {speaks}"
        others = {key: of for key, of in {**fields, **if_named}.items() if _may_fit(tensor, of, dialect.resize)}
        remedy = (
            f"it could take {', '.join(others)}: set inputs = {{{name} = NAME}}"
            if others
            else (
                f"no field of {speaks} fits it: expected text, or pictures as uint8 (height, width, 3)"
                + (f" of resize = {dialect.resize}" if dialect.resize else "")
            )
        )
        raise SpecMismatch(f"input {name!r} of model {spec.name!r}, {tensor}, would come from {given}; {remedy}")


def _may_fit(spec: TensorSpec, kind: str, size: list[int]) -> bool:
    """Return whether some value of a field fits an input; pictures are resized to `size`, if it is not empty."""
    if kind == TEXT or spec.dtype == BYTES:
        return (kind == TEXT) is (spec.dtype == BYTES)
    if len(spec.shape) != _AXES[kind] or not np.can_cast(np.uint8, spec.numpy_dtype, "same_kind"):
        return False
    some = [max(1, one) for one in spec.shape]  # the smallest that fits
    return spec.extents_of([*some[:-3], *(size or some[-3:-1]), _CHANNELS]) is not None
