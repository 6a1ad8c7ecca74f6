"""Rows, counts, versions and values as callers give them: what does not fit is refused on every way in."""

from __future__ import annotations

import asyncio
import time
import warnings

import numpy as np
import psutil
import pytest
from tests.serving import serving, wait_until

from jurybox.client import Busy, ModelFailed, Refused, ServerGone, SpecMismatch, Timeout, connect
from jurybox.protocol.errors import Code

OPEN = {"factory": "tests.open_models:shout", "max_batch": 8, "rows": 64}
SUM = {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 64}
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
    "learnt": {"factory": "tests.models:affine", "max_batch": 4, "rows": 64, "publish": "double_buffer"},
    "shout": OPEN,
    "sum": SUM,
    "waves": {"factory": "tests.open_models:waves", "max_batch": 8, "rows": 64},
    "two": {"factory": "tests.models:two", "max_batch": 8, "rows": 64},
}
X = np.arange(256, dtype=np.float32).reshape(64, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, tcp="127.0.0.1:0", grpc="127.0.0.1:0") as running:
        yield running


@pytest.fixture(params=["shm", "zmq", pytest.param("libzmq", marks=pytest.mark.runs), "tcp", "grpc"])
def client(request, server, monkeypatch):
    way = request.param.removeprefix("lib")
    if way != request.param:
        monkeypatch.setattr("jurybox.client.transports.engine_link.can_dial", lambda address: False)
    local = way in ("shm", "zmq")
    where = server.address if local else f"{way}://{server.listening(way)}"
    with connect(where, transport=way if local else "auto", timeout=60) as connection:
        yield connection


@pytest.mark.parametrize("n", [-1, 0, 1.5, "2"])
def test_a_count_of_rows_that_is_no_whole_number_above_zero_is_refused_before_any_row_is_taken(client, n):
    model = client.model("affine", rows=4)
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        model.rows(n)
    with pytest.raises(ValueError, match="expected a whole number from 1 to"):
        client.device_rows("affine", n)
    if n != 0:  # the server's default
        with pytest.raises(ValueError, match="expected a whole number from 0 to"):
            client.model("affine", rows=n)
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        client.model("sum", rows=1).sessions(n)
    with model.rows(4) as rows:
        with pytest.raises(ValueError, match="expected a whole number from 1 to 4"):
            rows.infer(n)
        rows.inputs["observation"][:] = X[:4]
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * X[:4] + 1)
    np.testing.assert_array_equal(model.infer(X[:4]), 2 * X[:4] + 1)


def test_a_version_that_no_ticket_can_carry_is_refused_and_leaves_model_and_sessions_as_they_were(client):
    model = client.model("affine", rows=4)
    with client.model("sum", rows=1).sessions(2) as sessions, model.rows(2) as rows:
        x = np.ones((2, 1), np.float32)
        sessions.infer(x)
        for version in (-1, 2**64, 1.5, "1"):
            for ask in (
                lambda version: model.infer(X[:2], version=version),
                lambda version: model.infer_reply(X[:32], version=version),
                lambda version: at_once(model.infer_async(X[:2], version=version)),
                lambda version: model.submit(X[:2], version=version),
                lambda version: rows.infer(version=version),
                lambda version: sessions.infer(x, version=version),
                lambda version: at_once(sessions.infer_async(x, version=version)),
                lambda version: sessions.submit(x, version=version),
            ):
                with pytest.raises(ValueError, match="version=.*: expected a whole number from 0 to"):
                    ask(version)
        np.testing.assert_array_equal(model.infer(X[:8]), 2 * X[:8] + 1)
        assert sessions.infer(x).tolist() == [2, 2]


def with_versions(opened):
    """Each kind of request that takes a version, by name; each takes the version."""
    model, sessions, rows = opened

    def awaited(ask, given, version):
        async def awaiting():
            return await ask(given, version=version)

        return asyncio.run(awaiting())

    x = np.ones((2, 1), np.float32)
    return {
        "infer": lambda version: model.infer(X[:2], version=version),
        "infer_reply": lambda version: model.infer_reply(X[:32], version=version),
        "infer_async": lambda version: awaited(model.infer_async, X[:2], version),
        "infer_reply_async": lambda version: awaited(model.infer_reply_async, X[:2], version),
        "submit": lambda version: model.submit(X[:2], version=version).result(),
        "rows": lambda version: rows.infer(version=version),
        "sessions": lambda version: sessions.infer(x, version=version),
        "sessions, reply": lambda version: sessions.infer_reply(x, version=version),
        "sessions, async": lambda version: awaited(sessions.infer_async, x, version),
        "sessions, reply, async": lambda version: awaited(sessions.infer_reply_async, x, version),
        "sessions, submit": lambda version: sessions.submit(x, version=version).result(),
    }


def test_the_newest_version_is_none_and_zero_still_is_with_a_warning_at_the_callers_line(client):
    model = client.model("affine", rows=4)
    with client.model("sum", rows=1).sessions(2) as sessions, model.rows(2) as rows:
        for way, ask in with_versions((model, sessions, rows)).items():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                ask(None)
            with pytest.warns(DeprecationWarning, match="version=0 means the newest") as told:
                ask(0)
            assert [one.filename for one in told] == [__file__], way


def test_a_reply_has_its_outputs_by_name_and_as_the_only_array_whatever_the_model_has(client):
    one, two = client.model("affine", rows=8), client.model("two", rows=8)
    name, given = "action", {"image": np.ones((2, 64, 64, 3), np.uint8), "scale": X[:2, 0].copy()}
    step, total = np.ones((2, 1), np.float32), client.model("sum", rows=1)
    with total.sessions(2) as sessions:
        asked = {
            "infer_reply": (one.infer_reply(X[:2]), name),
            "pieces": (one.infer_reply(X[:32]), name),
            "infer_reply_async": (at_once(one.infer_reply_async(X[:2])), name),
            "pieces, async": (at_once(one.infer_reply_async(X[:32])), name),
            "call_reply": (one.call_reply(X[0]), name),
            "row_reply": (one.row_reply(X[0], 10.0), name),
            "submit": (one.submit(X[:2]).result(), name),
            "sessions": (sessions.infer_reply(step), *total.spec.outputs),
            "sessions, async": (at_once(sessions.infer_reply_async(step)), *total.spec.outputs),
            "sessions, submit": (sessions.submit(step).result(), *total.spec.outputs),
        }
        for way, (reply, named) in asked.items():
            assert list(reply.named) == [named], way
            assert reply.named[named] is reply.array is reply.outputs, way
    several = two.infer_reply(given)
    assert several.named is several.outputs
    assert several.named.keys() == two.spec.outputs.keys()
    with pytest.raises(SpecMismatch, match=r"has the outputs .*: expected a single one.*reply.named\['"):
        several.array  # noqa: B018


def test_an_output_that_is_named_is_always_that_array_and_a_wrong_name_makes_no_step(client):
    step, total = np.ones((2, 1), np.float32), client.model("sum", rows=1)
    (name,) = total.spec.outputs
    with total.sessions(2) as sessions:
        assert sessions.infer(step, output=name).tolist() == [1, 1]
        assert at_once(sessions.infer_async(step, output=name)).tolist() == [2, 2]
        for ask in (
            lambda: sessions.infer(step, output="none"),
            lambda: at_once(sessions.infer_async(step, output="none")),
        ):
            with pytest.raises(SpecMismatch, match=f"has the outputs {name}: none is 'none'"):
                ask()
        assert sessions.infer(step).tolist() == [3, 3]


def test_raw_memory_of_rows_is_a_plain_array_of_the_rows_that_are_sent(client):
    with client.model("affine", rows=4).rows(2) as rows:
        raw = rows.raw("observation")
        assert type(raw) is np.ndarray
        np.multiply(X[:2], 2.0, out=raw)
        raw[0] = X[0].astype(np.float64)  # cast, as NumPy does
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * np.stack([X[0], 2 * X[1]]) + 1)
        with pytest.raises(SpecMismatch, match=r"rows of 'affine' have \['observation'\] here, 'observe' came"):
            rows.raw("observe")
    with pytest.raises(Refused, match="were released"):
        rows.raw("observation")


def test_rows_begin_as_zeros_and_never_as_another_requests(client):
    affine, shout = client.model("affine", rows=2), client.model("shout", rows=2)
    affine.infer(X[4:6])
    with affine.rows(2) as rows:
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], np.ones((2, 4)))
    shout.infer(["abc", "def"])
    with shout.rows(2) as rows:
        rows.infer()
        assert [bytes(rows.row("text", row)) for row in range(2)] == [b"", b""]


@pytest.mark.parametrize("row", [-1, 2, 1.0])
def test_a_row_that_rows_do_not_have_is_refused(client, row):
    with client.model("shout", rows=4).rows(2) as rows:
        for i in range(2):
            rows.place("text", i, 2)[:] = np.frombuffer(b"ab", np.uint8)
        rows.infer()
        assert bytes(rows.row("text", 1)) == b"AB"
        for ask in (lambda: rows.row("text", row), lambda: rows.place("text", row, 2)):
            with pytest.raises(ValueError, match="expected a whole number from 0 to 1"):
                ask()


def within(model, write):
    with model.rows(2) as rows:
        write(rows)
        rows.infer()


def at_once(asked):
    return asyncio.run(asked)


def ways_in(client):
    """Each way in which rows of one float32 input of shape (2, n) are given, by name; each takes such an array."""
    affine, total, free = client.model("affine", rows=16), client.model("sum", rows=1), client.model("waves", rows=4)
    x = "observation"

    def sessions(ask):
        def given(values):
            with total.sessions(2) as opened:
                ask(opened, values[:, :1])

        return given

    return {
        "call": lambda values: affine(values[0]),
        "infer": affine.infer,
        "infer_reply": lambda values: affine.infer_reply({x: values}),
        "infer_async": lambda values: at_once(affine.infer_async(values)),
        "submit": lambda values: affine.submit(values).result(),
        "rows[name] =": lambda values: within(affine, lambda rows: rows.inputs.__setitem__(x, values)),
        "rows[name][:] =": lambda values: within(affine, lambda rows: rows.inputs[x].__setitem__(slice(None), values)),
        "rows[name][i] =": lambda values: within(affine, lambda rows: rows.inputs[x].__setitem__(1, values[1])),
        "place": lambda values: within(free, lambda rows: rows.place("x", 1, 4).__setitem__(slice(None), values[1])),
        "variable rows": lambda values: free.infer([values[0], values[1]]),
        "a row of variable size": lambda values: free(values[0]),
        "sessions": sessions(lambda opened, values: opened.infer(values)),
        "some sessions": sessions(lambda opened, values: opened.infer(values, session=[1, 0])),
        "sessions, async": sessions(lambda opened, values: at_once(opened.infer_async(values))),
        "sessions, submit": sessions(lambda opened, values: opened.submit(values).result()),
        "set_state": sessions(lambda opened, values: opened.set_state({"total": values[:, 0]})),
    }


def test_values_of_another_dtype_are_refused_on_every_way_in_and_never_cast(client):
    for way, give in ways_in(client).items():
        give(X[:2])
        for other in (np.float64, np.float16, np.int32, np.complex64, ">f4"):
            with pytest.raises(SpecMismatch, match="float32.*came"):
                give(X[:2].astype(other))
                pytest.fail(f"{way} took {other}")


def test_torch_tensors_are_taken_on_every_way_in_or_refused_with_how_to_convert_them(client):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X[:2].copy())
    for give in ways_in(client).values():
        give(x)
        with pytest.raises(SpecMismatch, match=r"torch.bfloat16 tensor: .*tensor.detach\(\).to\(torch.float32\).numpy"):
            give(x.bfloat16())
        with pytest.raises(SpecMismatch, match=r"requires grad, .*: convert it on purpose: tensor.detach\(\).numpy"):
            give(x.clone().requires_grad_())
        with pytest.raises(SpecMismatch, match=r"tensor.detach\(\).resolve_neg\(\).numpy"):
            give(torch._neg_view(x))
        with pytest.raises(SpecMismatch, match="float32"):
            give(x.double())


def test_rows_take_numbers_that_their_dtype_holds_and_results_in_place_are_not_cast_either(client):
    with client.model("affine", rows=4).rows(2) as rows:
        inputs = rows.inputs["observation"]
        inputs[:], inputs[0], inputs[1, 2] = 1, True, 0.1
        rows.inputs["observation"] += np.float32(1)
        rows.inputs["observation"] /= 2
        np.stack([X[0], X[1]], out=inputs)
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * X[:2] + 1)
        for write in (
            lambda: inputs.__setitem__(0, 1e39),
            lambda: inputs.__setitem__(0, 10**400),
            lambda: inputs.fill(np.float64(1)),
            lambda: inputs[:1].reshape(-1).__setitem__(0, np.float64(1)),
            lambda: inputs.__iadd__(np.ones(4)),
            lambda: np.multiply(X[:2], np.ones(4), out=inputs),
            lambda: np.copyto(inputs, np.ones(4)),
            lambda: np.stack([np.ones(4)] * 2, out=inputs),
        ):
            with pytest.raises(SpecMismatch, match="'observation' of 'affine': expected float32, came"):
                write()
        np.testing.assert_array_equal(inputs, X[:2])
        copy = inputs.copy()
        copy[:] = np.ones(4)  # it is no rows' memory
        with pytest.raises(SpecMismatch, match=r"have \['observation'\] here, 'observations' came"):
            rows.inputs["observations"] = X[:2]
        with pytest.raises(SpecMismatch, match="cannot be replaced"):
            rows.outputs["action"] = X[:2]
        with pytest.raises(AttributeError):
            rows.inputs = {"observation": X[:2]}
    with pytest.raises(Refused, match="released"):
        rows.inputs["observation"] = X[:2]


def test_released_rows_are_not_written_to_by_who_has_kept_their_arrays(client):
    model = client.model("affine", rows=2)
    with model.rows(2) as rows:
        kept = rows.inputs["observation"]
        view = kept[1:].reshape(-1)
        kept[:] = X[:2]
        rows.infer()
    with model.rows(2) as rows:  # the same memory
        rows.inputs["observation"][:] = X[4:6]
        for write in (
            lambda: kept.__setitem__(0, X[9]),
            lambda: view.__setitem__(0, 9),
            lambda: kept.fill(9),
            lambda: np.add(X[:2], 1, out=kept),
            lambda: kept.__iadd__(1),
            lambda: np.copyto(kept, X[:2]),
            lambda: np.stack([X[0], X[1]], out=kept),
        ):
            with pytest.raises(Refused, match="'observation' of 'affine': these rows were released"):
                write()
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * X[4:6] + 1)
        np.testing.assert_array_equal(kept + 0, X[4:6])  # they may be read


@pytest.mark.parametrize("name", ["affine", "shout", "sum"])
def test_tickets_for_rows_of_others_are_refused_by_the_server(client, request, name):
    """As a client with a fault would send them: past its own checks."""
    if request.node.callspec.params["client"] == "grpc":
        pytest.skip("over gRPC a client leases no rows: a message brings its own")
    held = [client.model(name, rows=4).requests.of_sessions(4) if name == "sum" else client.model(name, rows=4).requests
            for _ in range(3)]  # fmt: skip
    lane = held[1].lane
    before = {key: array.copy() for key, array in lane.columns.outputs.items()}
    first = lane.runs.first
    for at, n in [(first + 4, 1), (first + 3, 2), (first, 5), (first + 4, 2**31), *([(first - 1, 1)] if first else [])]:
        if at + n > len(next(iter(lane.columns.inputs.values()))) and type(lane.columns.inputs) is dict:
            continue  # this process has no such rows that it could send
        answer = lane.ask(at, n, 20)
        assert answer.code in (Code.REFUSED, Code.MALFORMED, Code.BUSY, Code.SPEC_MISMATCH), answer
    for key, array in lane.columns.outputs.items():
        np.testing.assert_array_equal(array, before[key])


def test_tickets_of_one_lane_that_fail_have_each_their_own_reason(client):
    model = client.model("moody", rows=8)
    bad = [np.full((1, 4), 700 + i, np.float32) for i in range(4)]
    tickets = [model.submit(x) for x in bad]
    for i, ticket in enumerate(tickets):
        with pytest.raises(ModelFailed, match=rf"RuntimeError: x{{{i}}}\u20ac"):
            ticket.result()


async def test_requests_in_flight_outlive_the_growth_of_their_lane(client):
    for _ in range(10):
        model = client.model("affine")
        asked = [model.infer_async(X[:n]) for n in (64, 2, 2, 16, 3)]
        for n, answer in zip((64, 2, 2, 16, 3), await asyncio.gather(*asked), strict=True):
            np.testing.assert_array_equal(answer, 2 * X[:n] + 1)
        model.close()


def test_a_lane_grows_for_tickets_and_rows_as_for_infer_and_keeps_what_is_in_use(client):
    model = client.model("affine")
    with model.rows(1) as rows:
        rows.inputs["observation"][:] = X[1]
        larger = model.submit(X[:8])
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * X[1:2] + 1)
    np.testing.assert_array_equal(larger.result().outputs, 2 * X[:8] + 1)
    model.close()
    model = client.model("affine")
    earlier = model.submit(X[:1])
    with model.rows(15) as rows:
        rows.inputs["observation"][:] = X[:15]
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * X[:15] + 1)
    np.testing.assert_array_equal(earlier.result().outputs, 2 * X[:1] + 1)
    model.close()
    fixed = client.model("affine", rows=2)
    with pytest.raises(Busy):
        fixed.submit(X[:3])
    with pytest.raises(Busy):
        fixed.rows(3)


def test_an_outgrown_lane_is_released_with_the_last_that_uses_it(server):
    with connect(server.address, timeout=60) as client:
        model = client.model("affine")
        earlier = model.submit(X[:1])
        outgrown = model.requests.lane
        scoreboard, number = client._link.scoreboard, outgrown.leased
        model.infer(X[:16])
        assert model.requests.lane is not outgrown and int(scoreboard.lanes["lease"][number[0]]) == number[1]
        np.testing.assert_array_equal(earlier.result().outputs, 2 * X[:1] + 1)
        del earlier, outgrown
        wait_until(lambda: int(scoreboard.lanes["lease"][number[0]]) != number[1], 30, "the release of its lease")

        model = client.model("affine")
        ticket = model.submit(X[:1])
        model.infer(X[:16])
        model.close()
        with pytest.raises(Refused, match="closed"):
            ticket.result()


def test_the_version_of_several_pieces_is_the_oldest_for_every_object(server):
    """The rule of `Reply.version`; the newest would promise weights that some rows were not computed with."""
    with (
        connect(server.address, timeout=60) as client,
        client.publisher("learnt") as publisher,
        client.model("learnt", rows=9) as model,
        model.rows(8) as rows,
    ):
        state = {"scale": np.float32(2), "offset": np.float32(0)}
        version = publisher.publish(state)
        wait_until(lambda: model.infer_reply(X[:1]).version == version, 30, "the first version")
        answers = iter(range(100))
        lane = model.requests.lane
        wait = lane.wait

        def between(ticket, deadline):  # a publication between the answers to two pieces
            answer = wait(ticket, deadline)
            return answer._replace(version=answer.version + next(answers))

        lane.wait = between
        rows.infer()
        assert rows.version == version
        del lane.wait


def test_the_version_of_sessions_is_that_of_their_last_answer_also_of_a_ticket(server):
    with connect(server.address, timeout=60) as client, client.model("sum", rows=1).sessions(2) as sessions:
        lane = sessions._requests.lane
        ticket = sessions.submit(np.ones((2, 1), np.float32))
        wait_until(ticket.done, 30)
        ticket._sent.answer = ticket._sent.answer._replace(version=7)
        assert ticket.result().version == sessions.version == 7
        assert lane.gone is None


def test_every_kind_of_request_has_a_form_that_returns_its_version(client):
    model = client.model("affine", rows=8)
    version = model.infer_reply(X[:2]).version
    replies = [
        (model.call_reply(X[0]), 2 * X[0] + 1),
        (model.call_reply(observation=X[0]), 2 * X[0] + 1),
        (model.submit(X[:2]).result(), 2 * X[:2] + 1),
        (asyncio.run(model.infer_reply_async(X[:2])), 2 * X[:2] + 1),
    ]
    for reply, expected in replies:
        np.testing.assert_array_equal(reply.outputs, expected)
        assert reply.outputs.shape == expected.shape and reply.version == version
    with model.rows(2) as rows:
        rows.inputs["observation"][:] = X[:2]
        assert rows.infer() == rows.version == version
    with client.model("sum", rows=1).sessions(2) as sessions:
        step = X[:2, :1].copy()
        for n, reply in enumerate((sessions.infer_reply(step), asyncio.run(sessions.infer_reply_async(step))), 1):
            np.testing.assert_array_equal(reply.outputs, n * step[:, 0])
            assert reply.version == sessions.version
        np.testing.assert_array_equal(sessions.infer(step), 3 * step[:, 0])


def test_what_a_client_holds_says_what_it_is(client):
    model = client.model("affine", rows=8)
    assert repr(client) == f"<Server {client.address}>"
    ticket = model.submit(X[:3])
    at, specs = client.address, "(observation: float32[4]) -> (action: float32[4])"
    assert repr(model) in [
        f"<Model 'affine' {specs}, 8 rows, {n} in flight, up to 16 rows a batch, {at}>" for n in (0, 1)
    ]
    ticket.result()
    assert repr(ticket) == "<Ticket of 'affine', 3 rows, answered>"
    cancelled = model.submit(X[:2])
    cancelled.cancel()
    assert repr(cancelled) in ("<Ticket of 'affine', 2 rows, cancelled>", "<Ticket of 'affine', 2 rows, answered>")
    with model.rows(2) as rows:
        assert repr(rows) == "<Rows of 'affine', 2 rows>"
    assert repr(rows) == "<Rows of 'affine', 2 rows, released>"
    with client.model("sum", rows=1).sessions(2) as sessions:
        assert repr(sessions) == "<Sessions of 'sum', 2 sessions>"


def test_a_masked_array_is_refused_on_every_way_in_and_never_sent_without_its_mask(client):
    model = client.model("affine", rows=8)
    rows, row = np.ma.masked_greater(X[:2], 3), np.ma.masked_greater(X[0], 1)
    with client.model("sum", rows=1).sessions(2) as sessions, model.rows(2) as reserved:
        ways = [
            lambda: model(row),
            lambda: model.call_reply(row),
            lambda: model.infer(rows),
            lambda: model.submit(rows),
            lambda: asyncio.run(model.infer_async(rows)),
            lambda: reserved.inputs.__setitem__("observation", rows),
            lambda: sessions.infer(rows[:, :1]),
        ]
        for way in ways:
            with pytest.raises(SpecMismatch, match=r"a masked array, and no mask is sent.*filled"):
                way()


def test_a_call_of_one_row_that_fails_or_is_late_says_why_and_the_next_is_answered(client):
    model = client.model("moody", rows=8)
    good, bad, slow = X[0].copy(), X[0].copy(), X[0].copy()
    bad[0], slow[0] = 666.0, 1_500_000.0
    for _ in range(2):
        np.testing.assert_array_equal(model(good), good + 1)
        with pytest.raises(ModelFailed, match="this row breaks the model"):
            model(bad)
        np.testing.assert_array_equal(model(good), good + 1)
    with pytest.raises(SpecMismatch, match="takes one row"):
        model(X[0, :3].copy())
    with pytest.raises(Timeout):
        model(slow, timeout=0.3)
    with pytest.raises(Timeout):
        model(good, timeout=0.0)
    np.testing.assert_array_equal(model(good), good + 1)
    got = model(good)
    got[...] = 0  # an array of the caller's own
    np.testing.assert_array_equal(model(good), good + 1)


def test_a_call_without_a_row_is_refused_and_never_answered_for_the_row_before(client):
    affine, shout = client.model("affine", rows=8), client.model("shout", rows=8)
    affine(X[0])
    shout("first")
    for model, named in ((affine, "observation"), (shout, "text")):
        for way in (
            model,
            lambda model=model: model(None),
            lambda model=model, named=named: model(**{named: None}),
            lambda model=model: model.call_reply(None),
            lambda model=model: model.row_reply(None, 20.0),
            lambda model=model: model({}),
        ):
            with pytest.raises(SpecMismatch, match=rf"takes inputs \['{named}'\]"):
                way()


def test_a_row_in_any_order_of_memory_is_computed_and_one_of_another_form_is_refused(client):
    affine, waves = client.model("affine", rows=8), client.model("waves", rows=8)
    column, back = np.asfortranarray(X[:4])[1], X[0][::-1]
    table = np.repeat(X[1], 2)[::2]
    assert not column.flags.c_contiguous and not back.flags.c_contiguous and not table.flags.c_contiguous
    for row in (column, back, table, X[0]):
        np.testing.assert_array_equal(affine(row), 2 * row + 1)
        np.testing.assert_array_equal(affine.row_reply(row, 20.0).outputs.reshape(-1), 2 * row + 1)
        np.testing.assert_array_equal(waves(row), waves(row.copy()))
    frozen = X[0].copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(affine(frozen), 2 * frozen + 1)
    for row in (X[:1], X[:2, :2].copy(), X[0, :3].copy(), X[0].view(np.int32), X[0].view(">f4"), b"0" * 16, "text"):
        with pytest.raises(SpecMismatch):
            affine(row)
    shout = client.model("shout", rows=8)
    for row in (np.frombuffer(b"ab", np.uint8).astype(np.int8), X[0], 5):
        with pytest.raises(SpecMismatch):
            shout(row)
    assert shout(b"ab") == shout("ab") == shout(bytearray(b"ab")) == shout(text="ab")
    np.testing.assert_array_equal(affine(X[0]), 2 * X[0] + 1)


def test_one_row_of_a_model_that_keeps_state_is_refused_whatever_it_is(client):
    model = client.model("sum", rows=1)
    for row in (X[0, :1], X[0], "text", None, {"x": X[0, :1]}):
        for way in (model, lambda row, model=model: model.row_reply(row, 20.0)):
            with pytest.raises((Refused, SpecMismatch)):
                way(row)


def test_a_call_of_as_many_rows_as_the_one_before_has_its_rows_and_checks_its_own_array(client):
    model = client.model("affine", rows=8)
    for n in (4, 4, 4, 3, 3, 8, 8, 1, 1, 20, 20, 4, 4):
        for rows in (X[:n], X[9 : 9 + n], np.asfortranarray(X[:n]), X[n - 1 :: -1]):
            got = model.infer(rows)
            np.testing.assert_array_equal(got, 2 * rows + 1)
            got[...] = 0  # an array of the caller's own
    for rows in (X[0], X[:4, :2].copy(), X[:4].view(np.int32), X[:4].view(">f4"), np.float32(1), np.ma.array(X[:4])):
        with pytest.raises(SpecMismatch):
            model.infer(rows)
    first = model.infer_reply(X[:4])
    assert model.infer_reply(X[:4]).version == first.version
    np.testing.assert_array_equal(model.infer(X[:4], output="action"), first.array)
    two = client.model("two", rows=8)
    for n in (3, 3, 2, 2):
        given = {name: np.full((n, *spec.shape), n, spec.numpy_dtype) for name, spec in two.spec.inputs.items()}
        assert {name: len(rows) for name, rows in two.infer(given).items()} == dict.fromkeys(two.spec.outputs, n)
        with pytest.raises(SpecMismatch, match="give a dict"):
            two.infer(X[:n])


def test_rows_kept_for_the_next_call_are_free_for_every_other_request(client):
    model = client.model("affine", rows=4)
    others = [
        lambda: model.submit(X[:4]).result().outputs,
        lambda: asyncio.run(model.infer_async(X[:4])),
        lambda: model.infer(X[:4], version=None),
        lambda: np.array([model(row) for row in X[:4]]),
        lambda: np.concatenate([model.infer(X[:3]), model.infer(X[3:4])]),
    ]
    for ask in others:
        model.infer(X[:4])
        np.testing.assert_array_equal(ask(), 2 * X[:4] + 1)
    model.infer(X[:4])
    with model.rows(4) as rows:
        rows.inputs["observation"][:] = X[:4]
        with pytest.raises(Busy):
            model.infer(X[:4], timeout=0.1)
        rows.infer()
        np.testing.assert_array_equal(rows.outputs["action"], 2 * X[:4] + 1)
    model.infer(X[:4])
    model(X[0])
    assert model.requests.kept, "of one row, not to be taken anew at each call"
    for _ in range(2):
        model.infer(X[:4])
    lost = model.requests.lane
    lost.gone = ServerGone("as after a restart")
    np.testing.assert_array_equal(model.infer(X[:4]), 2 * X[:4] + 1)
    assert model.requests.lane is not lost
    model.close()
    with pytest.raises(Refused, match="closed"):
        model.infer(X[:4])


async def test_rows_for_which_a_task_waits_are_not_kept_for_the_next_call(client):
    model = client.model("affine", rows=4)
    model.infer(X[:4])
    free = model.requests.lane.row_waiter()
    model.infer(X[:4])
    assert free.done(), "it is told"
    async with asyncio.timeout(60):
        np.testing.assert_array_equal(await model.infer_async(X[:4]), 2 * X[:4] + 1)


def test_a_call_that_was_late_gives_its_rows_to_no_later_one(client):
    model = client.model("moody", rows=8)
    good, slow = X[:4].copy(), X[:4].copy()
    slow[0, 0] = 1_500_000.0
    for _ in range(2):
        np.testing.assert_array_equal(model.infer(good), good + 1)
    with pytest.raises(Timeout):
        model.infer(slow, timeout=0.3)
    assert not (model.requests.lane.in_flight and model.requests.kept_many), "the engine may still write to them"
    for n in (4, 4, 2):
        np.testing.assert_array_equal(model.infer(good[:n]), good[:n] + 1)
    with pytest.raises(Timeout):
        model.infer(good, timeout=0.0)
    np.testing.assert_array_equal(model.infer(good), good + 1)


def test_rows_of_several_callers_are_one_ticket_or_none_if_one_does_not_fit(client):
    model, until = client.model("affine", rows=8), time.monotonic_ns() + 10**11
    parts = [({"observation": X[:2]}, 2), ({"observation": X[2:3]}, 1)]
    ticket = model.submit_parts(parts, until, 0)
    np.testing.assert_array_equal(ticket.result().outputs, 2 * X[:3] + 1)
    seen = model.submit_parts(parts, until, 0, 20.0)
    if not isinstance(seen, tuple):  # over a network nothing is waited for
        seen.result()
        seen = seen.seen()
    np.testing.assert_array_equal(seen[0]["action"], 2 * X[:3] + 1)
    del ticket, seen
    for other in (
        [*parts, ({"observation": X[:1].astype(np.float64)}, 1)],
        [*parts, ({"observation": X[:2]}, 1)],
        [*parts, ({"observation": X[0]}, 1)],
        [({"observation": X[:9]}, 9)],
    ):
        assert model.submit_parts(other, until, 0) is None
        assert not model.requests.lane.in_flight and model.requests.lane.free == 8
    np.testing.assert_array_equal(model.submit_parts(parts, until, 0).result().outputs, 2 * X[:3] + 1)


def test_a_server_that_nobody_asks_and_its_clients_leave_the_cores_to_others(client, server):
    def used() -> dict[str, float]:
        each = [own, *supervisor.children(recursive=True)]
        return {f"{one.pid} {one.name()}": sum(one.cpu_times()[:2]) for one in each}

    own, supervisor = psutil.Process(), psutil.Process(server.process.pid)
    client.model("affine").infer(X[:2])
    time.sleep(0.3)  # engines look for a client's return without a pause for a moment
    before = used()
    time.sleep(1.0)
    after = used()
    spent = {name: after[name] - before[name] for name in before}
    assert len(spent) > 3 and max(spent.values()) < 0.3, spent
