"""Rows bound to device memory: whose answer settles what."""

import pytest

from jurybox.protocol.control_pb2 import BindRequest, RegionPlace
from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, Refused
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


def places(names, size=HANDLE):
    return [RegionPlace(tensor=name, handle=name.encode() * size, offset=8) for name in names]


VECTOR = TensorSpec("float32", (4,))


@pytest.fixture
def held():
    held = HeldModel(0, "m", ModelSettings.model_validate({"factory": "tests.models:affine"}))
    held.spec = ModelSpec("m", {"x": VECTOR, "w": TensorSpec("uint8")}, {"y": VECTOR, "z": VECTOR})
    return held


@pytest.fixture
def ask(bindings, held):
    """Bind the lane's rows, or unbind them; return (settled, reason)."""

    def ask(*, end, first=0, living=ENGINES, **other):
        given = {"inputs": places("xw"), "outputs": places("yz"), "rows": 4, **other}
        request = BindRequest(lane=0, lease=7, first=first, end=end, **({} if end else given))
        reply = bindings.handle(request, LANE, held, living)
        return reply.settled, reply.reason

    return ask


@pytest.mark.parametrize("reasons", [("", "no such memory"), ("no such memory", "")])
def test_a_binding_settles_when_every_engine_has_answered_and_so_does_its_end(bindings, ask, sent, reasons):
    assert ask(end=False) == (False, "")
    for engine, reason in zip(ENGINES, reasons, strict=True):
        bindings.answered(engine, 7, 0, ends=False, reason=reason)
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


REFUSED = {
    "no rows": ({"rows": 0}, "cannot bind rows 0 to 0, expected some of 0 to 4"),
    "a row behind the lane": ({"first": 1}, "cannot bind rows 1 to 5, expected some of 0 to 4"),
    "bytes of an event": ({"event": bytes(HANDLE - 1)}, f"an event's handle has {HANDLE} bytes, {HANDLE - 1} came"),
    "bytes of a handle": ({"outputs": places("yz", 3)}, f"output 'y': a handle has {HANDLE} bytes, 3 came"),
    "no input": ({"inputs": []}, "inputs none were bound, expected each of 'x', 'w' once"),
    "not all inputs": ({"inputs": places("x")}, "inputs 'x' were bound, expected each of 'x', 'w' once"),
    "an input twice": ({"inputs": places("xwx")}, "inputs 'x', 'w', 'x' were bound, expected each of 'x', 'w' once"),
    "no output": ({"outputs": []}, "outputs none were bound, expected each of 'y', 'z' once"),
    "an unknown output": ({"outputs": places("ya")}, "outputs 'y', 'a' were bound, expected each of 'y', 'z' once"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_binding_that_does_not_fit_the_lane_or_the_model_is_refused_and_no_engine_hears_of_it(
    bindings, ask, sent, what
):
    given, message = REFUSED[what]
    with pytest.raises(Refused) as refused:
        ask(end=False, **given)
    assert message in str(refused.value) and sent == [] and bindings.of([0]) == []
    assert ask(end=False, event=bytes(HANDLE)) == (False, "")


def test_an_engine_hears_where_every_input_is_and_the_outputs_that_are_wanted(bindings, ask):
    ask(end=False, first=1, rows=2, inputs=places("wx"), outputs=places("z"), event=b"e" * HANDLE)
    x, w, z, event = ((name * HANDLE).encode().hex() for name in "xwze")
    assert bindings.of([0]) == [
        {
            "lease": 7,
            "first": 1,
            "rows": 2,
            "inputs": [["x", "float32", [4], x, 8], ["w", "uint8", [], w, 8]],
            "outputs": [["z", "float32", [4], z, 8]],
            "event": event,
        }
    ]


@pytest.mark.parametrize("why", ["open", "group", "deterministic"])
def test_a_model_that_reads_rows_one_by_one_takes_no_device_memory(ask, held, why):
    if why == "open":
        held.spec = ModelSpec("m", {"x": TensorSpec("float32", (-1,), capacity=4)}, {"y": VECTOR})
    else:
        held.settings = held.settings.model_copy(update={why: "g" if why == "group" else True})
    with pytest.raises(Refused, match="'m' takes no device memory"):
        ask(end=False)


def test_without_a_living_engine_nothing_is_waited_for(bindings, ask):
    assert ask(end=False, living=()) == ask(end=True, living=()) == (True, "")
    assert ask(end=False, living=()) == (True, "") and len(bindings.of([0])) == 1


def test_rows_are_bound_once_and_again_only_after_their_end(bindings, ask, sent):
    ask(end=False, first=1, rows=2)
    for first, rows, bound in ((0, 2, 1), (2, 2, 2)):
        with pytest.raises(Refused, match=f"row {bound} is already bound: unbind it first"):
            ask(end=False, first=first, rows=rows)
    for first in (0, 3):  # those beside it
        assert ask(end=False, first=first, rows=1) == (False, "")
    assert ask(end=True, first=1) == (False, "")
    with pytest.raises(Refused, match="row 1 is being unbound: try again") as refused:
        ask(end=False, first=1, rows=2)
    assert refused.value.code is Code.BUSY
    for engine in ENGINES:
        bindings.answered(engine, 7, 1, ends=True, reason="")
    sent.clear()
    assert ask(end=False, first=1, rows=2) == (False, "")
    assert sent == [(engine, "bind") for engine in ENGINES]


def test_an_engine_that_died_is_waited_for_no_more_and_its_successor_gets_the_bindings_of_its_models(bindings, ask):
    ask(end=False, first=0, rows=1)
    ask(end=False, first=1, rows=1)
    bindings.answered(0, 7, 0, ends=False, reason="")
    bindings.engine_died(1)
    assert ask(end=False, first=0, rows=1) == (True, "") and ask(end=False, first=1, rows=1) == (False, "")
    assert [order["first"] for order in bindings.of([0, 3])] == [0, 1] and bindings.of([3]) == []
    ask(end=True, first=1)
    assert [order["first"] for order in bindings.of([0])] == [0], "what is being unbound is bound by nobody anew"
    for engine in ENGINES:
        bindings.engine_died(engine)
    assert ask(end=True, first=1) == (True, "")


def test_the_bindings_of_a_lease_end_with_it(bindings, ask):
    ask(end=False)
    bindings.forget(8)
    assert bindings.of([0])
    bindings.forget(7)
    assert bindings.of([0]) == [] and ask(end=True) == (True, "")
