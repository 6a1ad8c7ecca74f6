"""The same row, the same answer: `deterministic` models in random company, to the byte."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.serving import serving

MODELS = {
    "mlp": {"factory": "tests.open_models:mlp", "max_batch": 16, "deterministic": True},
    "lstm": {"factory": "tests.open_models:lstm", "max_batch": 16, "deterministic": True},
}
ROWS = [pytest.param(4_000, id="short"), pytest.param(1_000_000, id="million", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS) as running:
        yield running


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", ROWS)
def test_a_rows_bytes_do_not_depend_on_its_company(server, count):
    """Threads ask for rows of one pool in batches of any size, so that every batch is another mixture."""
    pool = np.random.default_rng(0).standard_normal((256, 52)).astype(np.float32)
    with server.connect() as client:
        model = client.model("mlp")
        first = np.concatenate([model.infer(pool[i : i + 1]) for i in range(len(pool))])
        wrong: list[int] = []

        def ask(seed):
            rng = np.random.default_rng(seed)
            own = client.model("mlp")
            for _ in range(count // 4 // 6):
                chosen = rng.integers(0, len(pool), rng.integers(1, 12))
                answers = own.infer(pool[chosen])
                wrong.extend(chosen[(answers.view(np.uint32) != first[chosen].view(np.uint32)).any(axis=1)])

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_session_steps_the_same_whoever_shares_its_batch(server):
    x = np.random.default_rng(1).standard_normal((30, 1, 4)).astype(np.float32)

    def play(sessions, company):
        noise = np.random.default_rng(company).standard_normal((30, 3, 4)).astype(np.float32)
        rows = 1 + company
        answers = [sessions.infer(np.concatenate([x[t], noise[t][:company]]), session=range(rows)) for t in range(30)]
        return np.stack([answer[0] for answer in answers])

    with server.connect() as client:
        model = client.model("lstm")
        games = []
        for company in range(4):
            with model.sessions(4) as sessions:
                games.append(play(sessions, company))
    for game in games[1:]:
        assert game.tobytes() == games[0].tobytes()
