"""Values of settings: the kinds that several tables have, each with what is expected of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jurybox.protocol.parameters import RESERVED
from jurybox.protocol.wire import MAX_NAME
from jurybox.server.settings.endpoints import check_listen


class Strict(BaseModel):
    """A table: of unknown settings, and values of other kinds, an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def text(pattern: str, expected: str, most: int = 1 << 20) -> AfterValidator:
    """Return a validator of text that matches `pattern` and has at most `most` characters.

    The error text is `expected`.
    """

    def check(text: str) -> str:
        if len(text) > most or not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def check_absolute(text: str) -> str:
    if not Path(text).is_absolute():
        raise ValueError("expected an absolute path of a file or of a folder")
    return text


Seconds = Annotated[float, Field(gt=0, le=86400)]
Listen = Annotated[str, AfterValidator(check_listen)]
_NAMED = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
Factory = Annotated[str, text(_NAMED, '"module:callable" such as "jurybox.server.jurors:panel"')]
FactoryPattern = Annotated[
    str, text(rf"{_NAMED}|[A-Za-z_][\w.]*:\*", '"module:callable", or "module:*" for all that the module defines')
]
ParameterName = Annotated[
    str,
    text(
        rf"(?!(?:{'|'.join(sorted(RESERVED))})$)[A-Za-z_][\w.-]{{0,63}}",
        f"a name of letters, digits, '_', '.' and '-' that is none of {', '.join(sorted(RESERVED))}",
    ),
]
ModelName = Annotated[
    str,
    text(
        r"(?a)(?!.+/versions/[^/]+$)[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*",
        f'a name of letters, digits and "_.-", in parts divided by "/", at most {MAX_NAME} in all, and not one that '
        'ends in "/versions/..." (over HTTP that names a version of another model)',
        MAX_NAME,
    ),
]
DialectName = Annotated[str, text(r"(?a)[A-Za-z0-9][\w.-]{0,99}", 'a name of letters, digits and "_.-"')]
