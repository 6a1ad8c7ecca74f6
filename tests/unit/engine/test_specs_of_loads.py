"""What a load tells the supervisor of its model: the specs from which arenas are made, and the digest of its code."""

from __future__ import annotations

from tests.unit.engine.test_model_loader_steps import ROW, Counts, Loads, Plus, loads  # noqa: F401  a fixture

from jurybox.protocol import TensorSpec
from jurybox.protocol.spec import plain_specs
from jurybox.server.models import ServedModel

TEXT = {"prompt": TensorSpec("bytes", capacity=16)}
COUNT = {"h": TensorSpec("int64", (2,))}


def test_a_loaded_model_tells_its_inputs_outputs_and_state_each_under_its_own_name(loads: Loads) -> None:  # noqa: F811
    loads.begin(lambda: ServedModel(Counts(), ROW | TEXT, {"y": ROW["x"]}, state=COUNT))
    loads.idle()
    (told,) = loads.of("loaded")
    assert told["inputs"] == plain_specs(ROW | TEXT) and told["outputs"] == plain_specs({"y": ROW["x"]})
    assert told["state"] == plain_specs(COUNT)
    loads.begin(Plus(), model=1)
    loads.idle()
    assert loads.of("loaded")[1]["state"] == plain_specs({})


def test_a_load_that_fails_tells_the_supervisor_why_and_no_specs(loads: Loads) -> None:  # noqa: F811
    def broken() -> ServedModel:
        raise RuntimeError("no file of weights")

    loads.begin(broken, model=2, load=9)
    loads.idle()
    assert [message["kind"] for message in loads.told] == ["begins", "failed", "ends"]
    (failed,) = loads.of("failed")
    assert (failed["model"], failed["load"]) == (2, 9) and "no file of weights" in failed["reason"]


def test_an_arena_that_could_not_be_made_ends_the_load_of_its_model_with_the_reason(loads: Loads) -> None:  # noqa: F811
    loads.begin(Plus(), model=2, load=9)
    loads.idle()
    loads.loader.abandon(2, 9, "no memory")
    loads.idle()
    assert loads.of("failed") == [{"kind": "failed", "model": 2, "load": 9, "reason": "no memory"}]
