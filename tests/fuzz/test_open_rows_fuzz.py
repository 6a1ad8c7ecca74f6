"""Extents, session records and bytes of a hostile client of the same user: other clients are not affected."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from tests.serving import serving

from jurybox.client import Error

MODELS = {
    name: {"factory": f"tests.open_models:{name}", "max_batch": 8, "rows": 64}
    for name in ("brightness", "shout", "threshold", "running_sum")
}
COUNT = [pytest.param(300, id="short"), pytest.param(100_000, id="long", marks=pytest.mark.slow)]
NUMBERS = np.array([0, 1, -1, 2, 3, 31, 32, 1 << 31, 1 << 32, 1 << 62, -(1 << 63), (1 << 63) - 1], np.int64)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNT)
def test_lies_about_rows_and_sessions_harm_their_teller_alone(tmp_path, count):
    rng = np.random.default_rng(0)
    with serving(tmp_path, MODELS) as server, server.connect() as bad, server.connect() as good:
        engine = server.pids()["engine-0"]
        sums = good.model("running_sum", rows=1).sessions(4)
        bright = good.model("brightness", rows=4)
        pictures = [rng.integers(0, 256, (h, 3, 3), np.uint8) for h in (1, 9, 4)]
        means = [picture.mean() / 255 for picture in pictures]
        liars = [bad.model(name, rows=8) for name in ("brightness", "shout", "threshold")]
        liar_sums = bad.model("running_sum", rows=1).sessions(8)
        steps = 0
        for turn in range(count):
            model = liars[turn % 3]
            with model.rows(4) as rows:
                columns = rows._lane.columns
                for name, extents in columns.input_extents.items():
                    extents[rows.first : rows.first + 4] = rng.choice(NUMBERS, extents[:4].shape)
                    rows.inputs[name][:, :64] = rng.integers(0, 256, (4, 64), np.uint8)
                with contextlib.suppress(Error):
                    rows.infer()
            lane = liar_sums._requests.lane
            records = lane.columns.sessions
            run = lane.take(4)
            if run is not None:
                first = run.first
                raw = records[first : first + 4].view(np.uint8)
                raw[:] = rng.choice(np.array([0, 0, 0, 1, 2, 7, 255], np.uint8), raw.shape)
                with contextlib.suppress(Error):
                    answer = lane.ask(first, 4, 10)
                    assert answer is not None
            if turn % 20 == 0:
                np.testing.assert_allclose(bright.infer(pictures), means, rtol=1e-5)
                steps += 1
                np.testing.assert_array_equal(sums.infer(np.ones((4, 1), np.float32)), [steps] * 4)
        assert server.pids()["engine-0"] == engine
