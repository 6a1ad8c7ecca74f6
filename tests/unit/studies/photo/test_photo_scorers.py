from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from jurybox.client import Refused, ServerGone, Timeout
from jurybox.studies.photo.environment import LocalScorer, ScorerError, ServerScorer
from jurybox.studies.photo.environment.photo_edit import PhotoConfig, make_scorer

ROW = (384, 384, 3)


class Lane:
    """A lane whose juror returns the mean of its row; the server's log shows the requests."""

    def __init__(self, server):
        self.server = server
        self.held = True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.held = False
        self.server.log.append("lane given back")

    def rows(self, count):
        assert count == 1 and self.held
        self.server.log.append("rows taken")
        return Rows(self.server)


class Rows:
    def __init__(self, server):
        self.server = server
        self.image = np.zeros((1, *server.shape), dtype=np.uint8)
        self.inputs, self.outputs = {"image": self.image}, {server.output: np.zeros(1, dtype=np.float32)}
        server.row = self.image[0]

    def infer(self, *, timeout):
        self.server.log.append(f"infer {timeout}")
        if self.server.troubles:
            raise self.server.troubles.pop()
        self.outputs["score"][0] = self.image.mean()

    def close(self):
        self.inputs, self.outputs = {}, {}
        self.server.log.append("rows given back")


class Server:
    def __init__(self, shape=ROW, output="score"):
        self.log, self.troubles = [], []
        self.shape, self.output = shape, output
        self.row = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.log.append("disconnected")

    def model(self, name, *, rows):
        self.log.append(f"model {name}, {rows} row")
        return Lane(self)


@pytest.fixture
def connect_to(monkeypatch):
    def install(server):
        def connect(address=None, *, timeout):
            server.log.append(f"connect {address} {timeout}")
            return server

        monkeypatch.setattr("jurybox.client.connect", connect)
        return server

    return install


def test_the_server_is_used_only_with_the_buffers_first_use(connect_to):
    server = connect_to(Server())
    scorer = ServerScorer("judge", "ipc:///here", timeout=3.0)
    assert server.log == []
    scorer.buffer[:] = 10
    assert server.log == ["connect ipc:///here 3.0", "model judge, 1 row", "rows taken"]


def test_the_buffer_is_the_servers_row_itself(connect_to):
    server = connect_to(Server())
    scorer = ServerScorer(timeout=4.0)
    scorer.buffer[:] = 77
    assert (server.row == 77).all()
    assert scorer.score() == pytest.approx(77.0) and server.log[-1] == "infer 4.0"
    assert scorer.buffer is scorer.buffer


def test_closing_releases_everything_once_and_later_use_reconnects(connect_to):
    server = connect_to(Server())
    scorer = ServerScorer()
    scorer.buffer[:] = 1
    server.log.clear()
    scorer.close()
    scorer.close()
    assert server.log == ["rows given back", "lane given back", "disconnected"]
    scorer.buffer[:] = 2
    assert scorer.score() == pytest.approx(2.0)


@pytest.mark.parametrize("trouble", [ServerGone("restarted"), Refused("these rows are no longer yours")], ids=repr)
def test_after_a_restart_the_picture_moves_to_a_row_of_the_new_server(connect_to, trouble):
    server = connect_to(Server())
    scorer = ServerScorer()
    scorer.buffer[:] = 42
    lost = scorer.buffer
    server.troubles.append(trouble)
    assert scorer.score() == pytest.approx(42.0)
    assert scorer.buffer is not lost and (scorer.buffer == 42).all() and np.shares_memory(scorer.buffer, server.row)


def test_a_server_that_stays_away_is_not_waited_for_again_and_again(connect_to):
    server = connect_to(Server())
    scorer = ServerScorer()
    scorer.buffer[:] = 1
    server.troubles += [ServerGone("still"), ServerGone("gone")]
    with pytest.raises(ServerGone, match="still"):
        scorer.score()


def test_a_time_out_is_the_callers_to_judge(connect_to):
    server = connect_to(Server())
    scorer = ServerScorer()
    scorer.buffer[:] = 1
    server.troubles.append(Timeout("late"))
    with pytest.raises(Timeout):
        scorer.score()
    assert server.log.count("rows taken") == 1


def test_a_connected_scorer_pickles_as_a_fresh_one(connect_to):
    server = connect_to(Server())
    scorer = ServerScorer("judge", "ipc:///here", timeout=3.0)
    scorer.buffer[:] = 1
    server.log.clear()
    copy = pickle.loads(pickle.dumps(scorer))
    assert server.log == []
    copy.buffer[:] = 5
    assert server.log == ["connect ipc:///here 3.0", "model judge, 1 row", "rows taken"]
    assert copy.score() == pytest.approx(5.0)


@pytest.mark.parametrize("server", [Server(shape=(224, 224, 3)), Server(output="beauty")])
def test_an_unfit_model_is_named_and_everything_is_given_back(connect_to, server):
    connect_to(server)
    with pytest.raises(ScorerError, match=r"model 'photo' takes image uint8.*expected it to take image"):
        _ = ServerScorer().buffer
    assert server.log[-3:] == ["rows given back", "lane given back", "disconnected"]


def test_scoring_before_anything_was_written_is_refused():
    with pytest.raises(ScorerError, match="nothing to score"):
        ServerScorer().score()


class Mean(torch.nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, image):
        assert image.dtype == torch.uint8 and image.shape == (1, *ROW) and torch.is_inference_mode_enabled()
        return self.wrap(image.float().mean(dim=(1, 2, 3)))


@pytest.fixture
def juror(monkeypatch):
    def install(wrap=lambda mean: {"other": mean * 2, "score": mean}, shape=ROW, outputs=("other", "score")):
        module = ModuleType("jurors_of_this_test")
        module.juror = lambda: SimpleNamespace(
            module=Mean(wrap),
            inputs={"image": SimpleNamespace(dtype="uint8", shape=shape)},
            outputs={name: SimpleNamespace(dtype="float32", shape=()) for name in outputs},
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return "jurors_of_this_test:juror"

    return install


@pytest.mark.parametrize(
    "wrap", [lambda mean: {"other": mean * 2, "score": mean}, lambda mean: (mean * 2, mean)], ids=["dict", "tuple"]
)
def test_a_local_juror_scores_the_buffers_current_content(juror, wrap):
    scorer = LocalScorer(juror(wrap))
    for level in (3, 200):
        scorer.buffer[:] = level
        assert scorer.score() == pytest.approx(level)


def test_a_local_juror_may_have_one_output(juror):
    scorer = LocalScorer(juror(lambda mean: mean, outputs=("score",)))
    scorer.buffer[:] = 9
    assert scorer.score() == pytest.approx(9.0)


def test_an_unfit_local_juror_is_refused(juror):
    with pytest.raises(ScorerError, match="expected it to take image"):
        LocalScorer(juror(shape=(32, 32, 3)))
    with pytest.raises(ScorerError, match="to give score"):
        LocalScorer(juror(outputs=("beauty",)))


@pytest.mark.parametrize("factory", ["nowhere:panel", "json:panel", "no colon", ""])
def test_a_factory_that_is_not_there_is_named(factory):
    with pytest.raises(ScorerError, match=r"expected a factory as 'package\.module:function'"):
        LocalScorer(factory)


def test_settings_choose_the_scorer(juror):
    scorer = make_scorer(PhotoConfig(scorer="server", model="judge", address="ipc:///x", timeout=2.0))
    assert isinstance(scorer, ServerScorer) and (scorer.model, scorer.timeout) == ("judge", 2.0)
    threads = torch.get_num_threads()
    try:
        assert isinstance(make_scorer(PhotoConfig(scorer="local", juror=juror())), LocalScorer)
    finally:
        torch.set_num_threads(threads)
