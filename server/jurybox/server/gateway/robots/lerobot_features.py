"""From a LeRobot robot's observation to the inputs of a policy, by the features that the robot names at its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import SpecMismatch, plain
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec
from jurybox.server.gateway.robots.lerobot_messages import Setup

STATE, IMAGES, TASK = "observation.state", "observation.images.", "task"
_MOST_SIDE = 1 << 14  # pixels


class RobotFeatures:
    """The features of one robot, as inputs of one model.

    Raises:
        SpecMismatch: the robot cannot be answered with the model; the message says what is missing.
    """

    def __init__(self, setup: Setup, spec: ModelSpec) -> None:
        self.spec = spec
        own = {setup.renamed.get(name, name): name for name in setup.features}
        # Also where the model takes no state: it says whether the robot has moved.
        self._motors = _names(setup.features[STATE]) if STATE in setup.features else []
        self._cameras: dict[str, str] = {}  # names in observations, by input
        for name, tensor in spec.required.items():
            if tensor.dtype == BYTES:
                if name != TASK:
                    raise SpecMismatch(f"input {name!r} of model {spec.name!r} is text: a robot's only text is 'task'")
            elif (source := own.get(name)) is None:
                there = ", ".join(plain(one, 80) for one in sorted(own)[:20]) or "nothing"
                raise SpecMismatch(f"model {spec.name!r} needs {name!r}: this robot has {there}")
            elif source == STATE:
                if tensor.shape != (len(self._motors),):
                    count = len(self._motors)
                    raise SpecMismatch(f"{name!r} of this robot has {count} motors: the model expects {tensor}")
            else:
                self._cameras[name] = source.removeprefix(IMAGES)
        self._state = next((name for name in spec.inputs if own.get(name) == STATE), "")

    def state(self, values: Mapping[str, Any]) -> NDArray[np.float32]:
        """Return the positions of the motors, empty if the robot names none. Raises SpecMismatch."""
        found = np.empty(len(self._motors), np.float32)
        for i, name in enumerate(self._motors):
            value = values.get(name)
            if isinstance(value, np.ndarray) and value.size == 1:
                value = value.item()
            if type(value) not in (int, float):
                raise SpecMismatch(f"motor {plain(name, 80)!r} of the observation: expected a number")
            found[i] = value
        return found

    def inputs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model's inputs. Raises SpecMismatch."""
        found: dict[str, Any] = {}
        for name, tensor in self.spec.required.items():
            if name == self._state:
                found[name] = self.state(values)
            elif name in self._cameras:
                found[name] = _picture(self._cameras[name], tensor, values)
            else:
                found[name] = values.get(TASK, "")
        if TASK in self.spec.inputs and TASK in values:
            found[TASK] = values[TASK]  # also where it is a parameter, whose default is for robots without a task
        return found


def _names(feature: Any) -> list[str]:
    names = feature.get("names") if type(feature) is dict else None
    if type(names) is not list or not all(type(one) is str for one in names):
        raise SpecMismatch(f"{STATE!r} of this robot: expected the names of its motors")
    return names


def _picture(camera: str, spec: TensorSpec, values: Mapping[str, Any]) -> Any:
    picture = values.get(camera)
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise SpecMismatch(f"camera {plain(camera, 80)!r} of the observation: expected a picture (height, width, 3)")
    if len(spec.shape) == 3 and picture.shape[2] != spec.shape[2] == picture.shape[0]:
        picture = np.moveaxis(picture, 0, 2)  # torch has the channels first
    if len(spec.shape) != 3 or spec.extents_of(picture.shape) is not None or min(spec.shape[:2]) < 1:
        return picture
    return bilinear(picture, spec.shape[0], spec.shape[1])


def bilinear(picture: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return a picture of another size, interpolated between the centres of its pixels, without smoothing.

    LeRobot resizes pictures so, with torch's `interpolate(mode="bilinear")`; uint8 is rounded.

    Args:
        picture: (height, width, channels).
    """
    if not 0 < min(picture.shape) <= max(picture.shape) <= _MOST_SIDE:
        raise SpecMismatch(f"a picture of {list(picture.shape)}: expected at most {_MOST_SIDE} pixels on a side")
    above, below, down = _between(picture.shape[0], height)
    left, right, across = _between(picture.shape[1], width)
    rows = picture[above] * (1 - down[:, None, None]) + picture[below] * down[:, None, None]
    found: NDArray[Any] = rows[:, left] * (1 - across[:, None]) + rows[:, right] * across[:, None]
    return np.rint(found).astype(picture.dtype) if picture.dtype.kind in "ui" else found.astype(picture.dtype)


def _between(size: int, wanted: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Return, for each new pixel, the two between which it lies, and how near it is to the second."""
    at = np.clip((np.arange(wanted) + 0.5) * (size / wanted) - 0.5, 0, None)
    first = np.minimum(at.astype(np.intp), size - 1)
    return first, np.minimum(first + 1, size - 1), (at - first).astype(np.float32)
