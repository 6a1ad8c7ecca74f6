"""No reader ever sees two versions mixed, whatever the size; and the test would see it if one did."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.faults.weights_roles import layout
from tests.serving import wait_until

from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import Mode, WeightsChannel

KB, MB = 1000, 1000_000
READERS = 4


def race(nbytes: int, seconds: float, *, mode: Mode = "double_buffer", pause: float = 0.0, verify: bool = True) -> dict:
    """One publisher and four readers, each a process, for `seconds`; the readers' counts added up."""
    script = str(Path(__file__).with_name("weights_roles.py"))
    name = segment_name(f"torn{uuid.uuid4().hex[:8]}", "weights")
    with WeightsChannel.create(name, layout(nbytes), mode):
        roles = [["write", name, seconds, pause]]
        roles += [["read", name, seconds, verify, not verify] for _ in range(READERS)]
        runs = [
            subprocess.Popen(
                [sys.executable, script, role, name, *(json.dumps(value) for value in values)], stdout=subprocess.PIPE
            )
            for role, name, *values in roles
        ]
        try:
            if not verify:  # one torn read is enough; the reader that found it ends
                ended = lambda: [run for run in runs[1:] if run.poll() is not None]  # noqa: E731
                wait_until(ended, seconds + 60, "a tear")
                return json.loads(ended()[0].communicate()[0])
            outputs = [run.communicate(timeout=seconds + 60)[0] for run in runs]
        finally:
            for run in runs:
                run.kill()
                run.wait()
        assert [run.returncode for run in runs] == [0] * len(runs)
    written, *read = (json.loads(output) for output in outputs)
    return written | {key: sum(counts[key] for counts in read) for key in read[0]}


def assert_whole(counts: dict) -> None:
    assert counts["torn"] == 0 and counts["backwards"] == 0 and counts["extra"] == 0, counts
    assert counts["reads"] > READERS and counts["published"] > 2, counts


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(1 * KB, 0.5), *(pytest.param(*each, marks=pytest.mark.runs) for each in ((4 * MB, 1.0), (100 * MB, 2.0)))],
)
def test_no_read_is_torn_while_a_publisher_runs_at_full_speed(nbytes, seconds):
    assert_whole(race(nbytes, seconds))


def test_no_read_of_a_single_slot_is_torn():
    # Readers of a single slot live in the publisher's pauses.
    assert_whole(race(1 * MB, 1.0, mode="snapshot", pause=0.005))


def test_without_the_sequence_check_torn_reads_are_seen():
    """The test of the test: the same race, the same pattern, the counters not looked at."""
    assert race(16 * MB, 30.0, verify=False)["torn"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("nbytes", [1 * KB, 16 * KB, 256 * KB, 4 * MB, 32 * MB, 100 * MB])
def test_no_read_is_torn_in_ten_minutes(nbytes):
    assert_whole(race(nbytes, 100.0))
