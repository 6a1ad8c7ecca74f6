"""Scorers of pictures: a juror on a server, or in this process.

An environment renders straight into a scorer's ``buffer``. With :class:`ServerScorer` that buffer is the row of shared
memory that the server reads, so a picture is written once and never copied on its way to the juror.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jurybox.studies.photo.environment.edits import Image
from jurybox.studies.photo.environment.photos import SIDE

if TYPE_CHECKING:
    from jurybox.client import Model, Rows

SHAPE = (SIDE, SIDE, 3)


class ScorerError(RuntimeError):
    """A juror does not fit the environment; the message has the expected and the actual format."""


class Scorer(Protocol):
    """The interface of a scorer."""

    @property
    def buffer(self) -> Image:
        """uint8 (384, 384, 3) RGB: the picture to be scored is written here."""

    def score(self) -> float:
        """The juror's score of what is in ``buffer`` now; higher is better."""

    def close(self) -> None:
        """Release the scorer's resources. May be called again."""


class ServerScorer:
    """A juror on a Jurybox server.

    Connects when the buffer is first asked for, so it can be made in one process, pickled, and used in another. It
    leases a single row. If the server has restarted, the picture moves to a row of the new server and is scored
    there; so read ``buffer`` again after every score.

    Args:
        model: the juror's name on the server; it takes ``image`` (uint8, 384 x 384 x 3) and gives ``score``.
        address: the server's address; ``JURYBOX_ADDRESS`` or the default when None.
        timeout: seconds to wait for the server to appear, and for each score.

    Raises:
        ScorerError: at first use, when the model has another input or output.
        jurybox.client.Error: whatever the client raises (``Timeout``, ``ModelNotFound``, ``ServerGone``, ...).
    """

    def __init__(self, model: str = "photo", address: str | None = None, *, timeout: float = 30.0) -> None:
        self.model = model
        self.address = address
        self.timeout = timeout
        self._held = ExitStack()
        self._lane: Model | None = None
        self._rows: Rows | None = None
        self._buffer: Image | None = None

    @property
    def buffer(self) -> Image:
        """Where to write the next picture, uint8 (side, side, 3): a row of the server's memory."""
        if self._buffer is None:
            self._buffer = self._acquire_row()
        return self._buffer

    def score(self) -> float:
        """The score of the picture in the buffer."""
        from jurybox.client import Refused, ServerGone

        if self._rows is None:
            raise ScorerError("nothing to score yet: write a picture into the buffer first")
        try:
            self._rows.infer(timeout=self.timeout)
        except (ServerGone, Refused):
            picture = self.buffer.copy()
            self._release_row()
            np.copyto(self.buffer, picture)
            self._rows.infer(timeout=self.timeout)
        return float(self._rows.outputs["score"][0])

    def close(self) -> None:
        """Release the row and close the connection."""
        self._release_row()
        self._lane = None
        self._held.close()

    def _acquire_row(self) -> Image:
        if self._lane is None:
            self._lane = self._connect()
        rows = self._lane.rows(1)
        try:
            buffer = _lease_image(self.model, rows.inputs, rows.outputs)
        except ScorerError:
            rows.close()
            self.close()
            raise
        self._rows = rows
        return buffer

    def _release_row(self) -> None:
        # The view is dropped first: shared memory cannot be unmapped while an array still looks into it.
        rows, self._rows, self._buffer = self._rows, None, None
        if rows is not None:
            rows.close()

    def _connect(self) -> Model:
        from jurybox.client import connect

        with ExitStack() as held:
            server = held.enter_context(connect(self.address, timeout=self.timeout))
            lane = held.enter_context(server.model(self.model, rows=1))
            self._held = held.pop_all()
        return lane

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "address": self.address, "timeout": self.timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _lease_image(model: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Image:
    """Check that the model has an ``image`` input and a score, and lease one row."""
    image = inputs.get("image")
    if image is None or image.dtype != np.uint8 or image.shape[1:] != SHAPE or "score" not in outputs:
        took = ", ".join(f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in inputs.items())
        raise ScorerError(
            f"model {model!r} takes {took} and gives {', '.join(outputs)}: expected it to take "
            f"image uint8{list(SHAPE)} and to give score; name another model"
        )
    row: Image = image[0]
    return row


class LocalScorer:
    """A juror in this process, for trainings without a server and for tests; imports torch when it is made.

    Args:
        factory: ``"package.module:function"`` that returns a ``ServedModel``.
        arguments: keyword arguments of the factory.
        threads: torch threads for this process; None leaves them as they are.

    Raises:
        ScorerError: when the factory cannot be found, or its model has another input or output.
    """

    def __init__(
        self,
        factory: str = "jurybox.server.jurors:panel",
        arguments: Mapping[str, Any] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        served = _call(factory, arguments or {})
        image, score = served.inputs.get("image"), served.outputs.get("score")
        if image is None or image.dtype != "uint8" or tuple(image.shape) != SHAPE or score is None:
            raise ScorerError(
                f"{factory} takes {dict(served.inputs)} and gives {dict(served.outputs)}: expected it to take image "
                f"uint8{list(SHAPE)} and to give score"
            )
        self._buffer: Image = np.zeros(SHAPE, dtype=np.uint8)
        self._batch = torch.from_numpy(self._buffer).unsqueeze(0)
        self._module = served.module.eval()
        self._names = list(served.outputs)
        self._inference_mode = torch.inference_mode

    @property
    def buffer(self) -> Image:
        """Where to write the next picture, uint8 (side, side, 3)."""
        return self._buffer

    def score(self) -> float:
        """The score of the picture in the buffer."""
        with self._inference_mode():
            given = self._module(image=self._batch)
        if not isinstance(given, Mapping):
            given = dict(zip(self._names, given if isinstance(given, tuple) else (given,), strict=True))
        return float(given["score"].reshape(-1)[0])

    def close(self) -> None:
        """Does nothing."""


def _call(factory: str, arguments: Mapping[str, Any]) -> Any:
    module, _, name = factory.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScorerError(f"expected a factory as 'package.module:function', got {factory!r}: {error}") from error
    return function(**arguments)
