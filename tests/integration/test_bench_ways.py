"""`benchmarks.serving.ways`: each way asks and checks its answer, and the price is that of pairs of windows."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from benchmarks.serving import ways, ways_client
from tests.serving import serving

from jurybox.client.transports.direct import can_dial

MODELS = {
    name: {"factory": f"benchmarks.serving.ways_models:{name}", "rows": 64} for name in ("vector", "picture", "length")
}
DIALECT = {"openrlhf": {"model": "length", "inputs": {"text": "query"}}}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    ports = dict.fromkeys(("http", "grpc", "tcp"), "127.0.0.1:0")
    with serving(tmp_path_factory.mktemp("ways"), MODELS, dialects=DIALECT, **ports) as server:
        yield {
            "ipc": server.address,
            "http": server.listening("http"),
            "tcp": f"tcp://{server.listening('tcp')}",
            "grpc": f"grpc://{server.listening('grpc')}",
        }


@pytest.fixture
def own_connections(monkeypatch):
    """What a way turns off in its own process is on again after a test."""
    for module in ("transports.engine_link", "remote.tcp_link"):
        monkeypatch.setattr(f"jurybox.client.{module}.can_dial", can_dial)


@pytest.mark.usefixtures("own_connections")
@pytest.mark.parametrize("way", ways_client.WAYS)
def test_every_way_is_answered_rightly(addresses, way):
    if way.startswith("triton") and find_spec("tritonclient") is None:
        pytest.skip("tritonclient is not installed here")
    ask = ways_client.WAYS[way](addresses)
    for _ in range(3):
        ask()


def test_a_wrong_answer_ends_the_measurement():
    with pytest.raises(AssertionError, match=r"expected \[2\], came \[3\]"):
        ways_client._equal([3], [2])


class Side:
    """One that costs the same in every window, but for a slow pair."""

    def __init__(self, costs, told):
        self._costs, self._told = iter([(0.0, 0.0, 1.0), *costs]), told

    def begin(self, way, clients):
        self._told.append((way, clients))

    def window(self, requests):
        self._told.append(requests)
        return next(self._costs)

    def finish(self):
        self._told.append("finished")


def test_the_price_is_the_median_over_pairs_of_windows_and_one_slow_pair_does_not_change_it():
    told = [], []
    old = Side([(100.0, 50.0, 200.0), (900.0, 50.0, 900.0), (100.0, 50.0, 200.0)], told[0])
    new = Side([(130.0, 50.0, 400.0), (990.0, 50.0, 900.0), (130.0, 50.0, 400.0)], told[1])
    price = ways.measured(old, new, "shm", 4, 3, 100)
    assert price.ratio == pytest.approx(180 / 150)
    assert price.server == (100.0, 130.0) and price.client == (50.0, 50.0)
    assert price.rates == pytest.approx([0.5, 1.0, 0.5])
    for side in told:
        assert side == [("shm", 4), ways._WARM, 100, 100, 100, "finished"]
    assert ways.row_of("shm", 4, price).startswith("| shm | 4 | 100, 130 | 50, 50 | 1.200 (")
