"""Records of tickets, as engines read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.wire import TICKET


def records(fields: Sequence[str], *each: Sequence[int], begin: int = 1, **more: Any) -> NDArray[Any]:
    """Return tickets with these values of `fields`, and of `more`; they are numbered from `begin` on."""
    made = np.zeros(len(each), TICKET)
    made["sequence"] = np.arange(begin, begin + len(each))
    for name, values in zip(fields, zip(*each, strict=True), strict=bool(each)):
        made[name] = values
    for name, value in more.items():
        made[name] = value
    return made
