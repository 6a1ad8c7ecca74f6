"""The picture of a run's timeline: a lane for each role, filled where it worked, open where it waited."""

from __future__ import annotations

from jurybox.training.report import svg
from jurybox.training.runtime.progress import Timeline

_ROW, _TOP, _THICK = 34.0, 10.0, 18.0
_MOST = 400  # marks in a lane; more would be narrower than a pixel


def timeline(run: Timeline, title: str, seconds: float = 5.0) -> str:
    """The last seconds in which everybody was at work, as SVG; beside each lane its busy share of the whole run.

    Args:
        title: what it shows, for whoever cannot see it.
        seconds: how much of the end.
    """
    high = _end(run)
    low = max(0.0, high - seconds)
    bottom = _TOP + _ROW * len(run.lanes)
    left = svg.margin(lane.role for lane in run.lanes)

    def draw(width: float) -> tuple[float, list[str]]:
        x = svg.Scale(low, high, left, width - 64)
        marks = []
        for value in svg.ticks(low, high, 5 if width == svg.WIDTH else 3):
            marks.append(svg.line(x(value), _TOP, x(value), bottom, "grid"))
            marks.append(svg.text(x(value), bottom + 18, svg.number(value), anchor="middle", style="axis"))
        marks.append(svg.text((x.start + x.end) / 2, bottom + 38, "seconds", anchor="middle", style="axis"))
        for row, lane in enumerate(run.lanes):
            middle = _TOP + _ROW * (row + 0.5)
            marks.append(svg.text(left - 12, middle + 4, lane.role, anchor="end", style="label"))
            marks.append(svg.line(left, middle, x.end, middle, "base"))
            shown = [each for each in lane.intervals if each[1] > low and each[0] < high and not each[2]]
            for start, end, _ in _joined(shown, (high - low) / _MOST):
                began, ended = x(max(start, low)), x(min(end, high))
                told = f"{lane.role}: {end - start:.3f} s of work"
                marks.append(svg.box(began, middle - _THICK / 2, ended - began, _THICK, "fill learned", told))
            marks.append(svg.text(width - 4, middle + 5, f"{lane.busy:.0%}", anchor="end", style="value"))
        return bottom + 44, marks

    return svg.figure(draw, title)


def _end(run: Timeline) -> float:
    """Where those who mostly worked stopped: a last evaluation, say, that all others wait for tells nothing."""
    worked = [
        max((end for _, end, what in lane.intervals if not what), default=0.0) for lane in run.lanes if lane.busy > 0.5
    ]
    return min(worked or [lane.intervals[-1][1] for lane in run.lanes if lane.intervals], default=1.0)


def _joined(intervals: list[tuple[float, float, str]], gap: float) -> list[tuple[float, float, str]]:
    """Neighbours that the eye could not tell apart, as one."""
    joined: list[tuple[float, float, str]] = []
    for start, end, what in intervals:
        if joined and start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], end, what)
        else:
            joined.append((start, end, what))
    return joined
