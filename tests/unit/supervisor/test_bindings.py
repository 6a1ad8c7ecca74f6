"""Rows bound to device memory: whose answer settles what."""

import pytest

from jurybox.protocol.control_pb2 import BindRequest, RegionPlace
from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.settings.config import ModelSettings
from jurybox.server.supervisor.bindings import Bindings
from jurybox.server.supervisor.leases import GrantedLease
from jurybox.server.supervisor.models import HeldModel

LANE = GrantedLease(lane=0, lease=7, model=0, first=0, rows=4, granted=0.0)
ENGINES = (0, 1)


@pytest.fixture
def sent():
    return []


@pytest.fixture
def bindings(sent):
    return Bindings(lambda engine, kind, **fields: sent.append((engine, kind)))


@pytest.fixture
def ask(bindings):
    """Bind the lane's rows, or unbind them; return (settled, reason)."""
    held = HeldModel(0, "m", ModelSettings.model_validate({"factory": "tests.models:affine"}))
    held.spec = ModelSpec("m", {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,))})
    inputs, outputs = ([RegionPlace(tensor=name, handle=bytes(HANDLE))] for name in "xy")
    places = {"inputs": inputs, "outputs": outputs, "rows": 4}

    def ask(*, end):
        request = BindRequest(lane=0, lease=7, first=0, end=end, **({} if end else places))
        reply = bindings.handle(request, LANE, held, ENGINES)
        return reply.settled, reply.reason

    return ask


def test_a_binding_settles_when_every_engine_has_answered_and_so_does_its_end(bindings, ask, sent):
    assert ask(end=False) == (False, "")
    bindings.answered(0, 7, 0, ends=False, reason="")
    bindings.answered(1, 7, 0, ends=False, reason="no such memory")
    assert ask(end=False) == (True, "no such memory")
    assert ask(end=True) == (False, "")
    for engine in ENGINES:
        bindings.answered(engine, 7, 0, ends=True, reason="")
    assert ask(end=True) == (True, "")
    assert sent == [(engine, kind) for kind in ("bind", "unbind") for engine in ENGINES]


def test_a_late_answer_to_the_binding_does_not_settle_its_end(bindings, ask):
    """An engine that has not carried out the unbinding still has the memory open."""
    ask(end=False)
    ask(end=True)  # the client did not wait
    for engine in ENGINES:
        bindings.answered(engine, 7, 0, ends=False, reason="")
    assert ask(end=True) == (False, "")
    for engine in ENGINES:
        bindings.answered(engine, 7, 0, ends=True, reason="")
    assert ask(end=True) == (True, "")
