"""Events for the live page and `jurybox top`: failed requests as events, and all events as sentences.

The supervisor's events are its log lines, which the status document contains. Failed requests are not among them: the
scoreboard counts them, and the supervisor does not see them.
"""

from __future__ import annotations

import signal
from collections import deque

from jurybox.server.watch.sample import FAILURES, Document, Snapshot, growth, sample

_KEPT = 32
_TOGETHER = 5.0  # seconds within which failures of one model and kind are one event
_KINDS = {
    "failed": "the model failed",
    "expired": "requests expired while they waited",
    "refused": "requests refused",
    "not_held": "requests named a version that is not held",
}
_SENTENCES = {
    "serving": "The server serves: {models}",
    "child died": "{role} {end}",
    "child hangs, killing it": "{role} hangs and is killed: {why}",
    "gave up on a child": "{role} failed {failures} times; the server gives up",
    "cannot start a child yet": "{role} cannot be started yet: {error}",
    "client gone, rows taken back": "A client is gone: its {rows} rows are free again (lane {lane})",
    "model ready": "{model} is ready on {role}",
    "model failed": "{model} failed to load on {role}: {reason}",
    "weights restored": "{model} continues with saved weights, version {version}",
    "draining; a second signal stops at once": "The server drains",
    "draining took too long, stopping": "Draining took too long; the server stops",
    "removed shared memory of dead owners": "Shared memory of dead processes was removed: {segments} segments",
    "the model failed": "{model}: {requests} requests failed",
    "requests expired while they waited": "{model}: {requests} requests expired while they waited",
    "requests refused": "{model}: {requests} requests were refused",
    "requests named a version that is not held": "{model}: {requests} requests named a version that is not held",
}


def sentence(event: Document) -> str:
    """Return an event as a sentence; for an unknown event its name and fields."""
    fields = dict(event["fields"])
    if "role" in fields:
        fields["role"] = str(fields["role"]).replace("engine-", "engine ")
    if isinstance(status := fields.get("status"), int):
        fields["end"] = f"was killed by {_signal(-status)}" if status < 0 else f"ended with exit status {status}"
    try:
        text = _SENTENCES[event["event"]].format(**fields)
    except KeyError:
        details = ", ".join(f"{key} {value}" for key, value in fields.items() if key != "end")
        text = f"{event['event']}: {details}" if details else str(event["event"])
    return text[:1].upper() + text[1:] if text.startswith(("engine ", "gateway", "relay")) else text


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Failures:
    """The last failures; those of one model and kind within a short time are one event."""

    def __init__(self) -> None:
        self._events: deque[Document] = deque(maxlen=_KEPT)

    def between(self, earlier: Snapshot | None, later: Snapshot) -> list[Document]:
        """Record the failures between two snapshots; return all kept ones, in the form of the status document."""
        if earlier is not None and earlier.server_id == later.server_id:
            grown = growth(earlier, later)
            for at, model in enumerate(later.models):
                for kind in FAILURES:
                    if count := int(grown[kind][:, at].sum()):
                        self._note(model["name"], kind, count, later.at)
        return list(self._events)

    def _note(self, model: str, kind: str, count: int, at: float) -> None:
        text = _KINDS[kind]
        for event in self._events:
            if event["event"] == text and event["fields"]["model"] == model and at - event["at"] < _TOGETHER:
                event["fields"]["requests"] += count
                return
        fields = {"model": model, "requests": count}
        self._events.append({"at": at, "level": "error", "event": text, "fields": fields})


_SHOWN = 30  # events in the document


class History:
    """Snapshots of the last `window` seconds, and the changes within them.

    Percentiles over a fraction of a second fluctuate; over two seconds they are stable and still follow changes.
    """

    def __init__(self, window: float = 2.0) -> None:
        self._window_ns = int(window * 1e9)
        self._snapshots: deque[Snapshot] = deque()
        self._failures = Failures()

    def add(self, snapshot: Snapshot) -> Document:
        """Add the newest snapshot, and return the document of jurybox.server.watch.sample."""
        kept = self._snapshots
        if kept and kept[-1].server_id != snapshot.server_id:
            kept.clear()
        previous = kept[-1] if kept else None
        kept.append(snapshot)
        while len(kept) > 2 and snapshot.taken - kept[1].taken >= self._window_ns:
            kept.popleft()
        failures = self._failures.between(previous, snapshot)
        events = sorted([*snapshot.document["events"], *failures], key=lambda event: float(event["at"]))
        shown = [{**event, "text": sentence(event)} for event in events[-_SHOWN:]]
        return sample(kept[0] if len(kept) > 1 else None, snapshot, shown)
