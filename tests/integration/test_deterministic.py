"""`deterministic` models give the same row the same answer to the byte, in any batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until

from jurybox.client import SessionLost
from tests import open_models

MODELS = {
    "mlp": {"factory": "tests.open_models:mlp", "max_batch": 16, "deterministic": True},
    "lstm": {"factory": "tests.open_models:lstm", "max_batch": 16, "deterministic": True},
}
KILLS = int(os.environ.get("CHAOS_KILLS", "200"))
ROWS = [pytest.param(4_000, id="short"), pytest.param(1_000_000, id="million", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS) as running:
        yield running


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", ROWS)
def test_the_bytes_of_an_answer_do_not_depend_on_the_batch(server, count):
    """Threads send rows of one pool in requests of any size, so that every batch is a different mixture."""
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


def test_a_session_steps_the_same_in_any_batch(server):
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


@pytest.mark.parametrize("steps", [pytest.param(300, id="short"), pytest.param(10_000, marks=pytest.mark.slow)])
def test_an_lstm_in_sessions_answers_to_the_bit_as_a_local_one_through_random_resets(server, steps):
    policy = open_models.lstm()
    rng = np.random.default_rng(4)
    # A batch of the largest size, of which the first eight rows are played: which other sizes compute the same bytes,
    # and so are used by the server, depends on the machine.
    observation, state = torch.zeros(16, 4), {name: torch.zeros(16, 16) for name in ("hidden", "cell")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # like the engine: the number of threads determines how sums are split
    try:
        with server.connect() as client, client.model("lstm").sessions(8) as sessions, torch.inference_mode():
            for _ in range(steps):
                x = rng.standard_normal((8, 4)).astype(np.float32)
                reset = rng.random(8) < 0.05
                answers = sessions.infer(x, reset=reset)
                observation[:8] = torch.from_numpy(x)
                for value in state.values():
                    value[:8][torch.from_numpy(reset)] = 0
                logits, state["hidden"], state["cell"] = policy.module(observation, **state)
                assert answers.tobytes() == logits[:8].numpy().tobytes()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_state_is_mixed_up_or_left_over_after_hundreds_of_kills(tmp_path):
    """Engines and clients are killed at random: a surviving session is lost with an error, or has the expected state.

    CHAOS_KILLS sets how many clients are killed (200); for every five of them an engine is killed, too.
    """
    models = {"running_sum": {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 64}}
    code = (
        "import sys, numpy as np\nfrom jurybox.client import connect\n"
        "client = connect(sys.argv[1], timeout=60)\n"
        "with client.model('running_sum', rows=1).sessions(8) as sessions:\n"
        "    print('there', flush=True)\n"
        "    while True:\n        sessions.infer(np.full((8, 1), 1000.0, np.float32), timeout=60, reset=None)\n"
    )
    rng = np.random.default_rng(5)
    # Engines are killed within their first second, which would count towards the restart limit.
    with serving(tmp_path, models, max_restarts=1_000_000) as server, server.connect() as client:
        ones, expected, losses = np.ones((8, 1), np.float32), np.zeros(8), 0
        sessions = client.model("running_sum", rows=1).sessions(8)
        for _ in range(KILLS):
            other = subprocess.Popen([sys.executable, "-c", code, server.address], stdout=subprocess.PIPE, text=True)
            assert other.stdout.readline() == "there\n"
            for _ in range(int(rng.integers(1, 20))):
                try:
                    expected += 1
                    np.testing.assert_array_equal(sessions.infer(ones, timeout=60), expected)
                except SessionLost:
                    losses += 1
                    expected[:] = 1
                    np.testing.assert_array_equal(sessions.infer(ones, reset=[True] * 8, timeout=60), expected)
            if rng.random() < 0.2:
                wait_until(lambda: server.pids().get("engine-0"), 60, "an engine")
                os.kill(server.pids()["engine-0"], signal.SIGKILL)
            other.kill()
            other.communicate()
        sessions.close()
        wait_until(lambda: client.status()["lanes"]["rows"] == 0, 60, "the return of all rows")
        wait_until(lambda: client.status()["models"][0]["sessions"] == 0, 60, "the end of all sessions")
    assert losses
