"""Robometer's reward server: videos of robots as .npy files in a multipart form, answered by their progress.

    POST /evaluate_batch_npy   multipart/form-data, for each sample i
        sample_i             {"sample_type": "progress", "trajectory": {"frames": {"__numpy_file__": KEY}, "task": str}}
        KEY                  a .npy file: uint8 (frames, height, width, 3)
        -> {"outputs_progress": {"progress_pred": [[float], ...]}, "outputs_preference": null, "outputs_success": null}

The client takes the last value of each list, reads a missing one as 0, and moves others to the nearest of 0 and 1: so
a video without a score fails the request, and one with a score outside `score_range`, 0 to 1 by default. A juror scores
a whole video, so values for each frame (`use_frame_steps`) are refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, ProtocolMismatch, Refused, SpecMismatch, plain
from jurybox.server.gateway.dialects.cosmos import npy_array
from jurybox.server.gateway.dialects.intake import Intake, Request, RequestScores
from jurybox.server.gateway.dialects.json_dialects import read, versioned
from jurybox.server.gateway.known_paths import HttpReply

_VIDEO = "expected a .npy file of uint8 (frames, height, width, 3)"
_MOST_HEAD = 4096  # bytes of a part's head


async def robometer(intake: Intake, body: bytes) -> HttpReply:
    """Answer a batch of videos. Raises ProtocolMismatch, SpecMismatch, Refused, Error."""
    return await intake.answered(_asked, lambda _, scores: _answer(intake, scores), body)


def about(_intake: Intake) -> dict[str, Any]:
    """Return the response to GET /health."""
    return {"/health": {"status": "healthy", "available_gpus": 1, "total_gpus": 1}}


def _answer(intake: Intake, scores: RequestScores) -> HttpReply:
    for score in scores.values:
        intake.form.require_in_range(score, 1.0)
    progress = {"progress_pred": [[score] for score in scores.values]}
    answer = {"outputs_preference": None, "outputs_progress": progress, "outputs_success": None}
    return versioned(answer, scores.version)


def _asked(body: bytes) -> Request:
    parts = _parts(body)
    if bytes(parts.get("use_frame_steps", b"")).strip().lower() == b"true":
        raise Refused("expected use_frame_steps = false: the juror scores a whole video", Code.UNSUPPORTED)
    tasks: list[str] = []
    videos: list[list[NDArray[np.uint8]]] = []
    while (sample := parts.get(f"sample_{len(tasks)}")) is not None:
        given = read(bytes(sample))
        trajectory = given.get("trajectory")
        if given.get("sample_type") != "progress" or type(trajectory) is not dict:
            came = plain(given.get("sample_type"), 50)
            raise Refused(f"expected sample_type 'progress' with a trajectory, came {came}", Code.UNSUPPORTED)
        frames, task = trajectory.get("frames"), trajectory.get("task")
        key = frames.get("__numpy_file__") if type(frames) is dict else None
        if type(key) is not str or key not in parts or type(task) is not str:
            raise ProtocolMismatch(
                f"sample_{len(tasks)}: expected a task, and frames with the __numpy_file__ of another part",
                Code.MALFORMED,
            )
        tasks.append(task)
        videos.append(_video(parts[key]))
    samples = sum(name.removeprefix("sample_").isdigit() for name in parts)
    if not tasks or samples != len(tasks):  # a list that is missing would be read as 0
        raise ProtocolMismatch("expected parts sample_0, sample_1, ... of a multipart form", Code.MALFORMED)
    return Request({"prompt": tasks, "text": tasks}, len(tasks), {"video": videos})


def _video(file: memoryview) -> list[NDArray[np.uint8]]:
    video = npy_array(file, 0, _VIDEO)
    if video.ndim != 4 or video.shape[3] != 3 or not math.prod(video.shape):
        raise SpecMismatch(f"{_VIDEO}, came uint8 {plain(video.shape, 100)}")
    return list(video)


def _parts(body: bytes) -> dict[str, memoryview]:
    """Return the contents of a form's parts by name (RFC 7578). The boundary is what the body begins with."""
    end = body.find(b"\r\n", 0, 200)
    boundary = body[:end]
    if end < 3 or not boundary.startswith(b"--"):
        raise ProtocolMismatch("expected multipart/form-data", Code.MALFORMED)
    found: dict[str, memoryview] = {}
    at, whole = end, memoryview(body)
    while body[at : at + 2] == b"\r\n":
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEAD)
        stop = body.find(b"\r\n" + boundary, head_end)
        if head_end < 0 or stop < 0:
            break
        found[_name(body[at:head_end])] = whole[head_end + 4 : stop]
        at = stop + 2 + len(boundary)
    if body[at : at + 2] != b"--":
        raise ProtocolMismatch("the multipart form is not complete", Code.MALFORMED)
    return found


def _name(head: bytes) -> str:
    for line in head.decode("latin-1").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            for item in value.split(";")[1:]:
                key, _, name = item.strip().partition("=")
                if key == "name":
                    return name.strip('"')
    raise ProtocolMismatch("a part of the multipart form has no name", Code.MALFORMED)
