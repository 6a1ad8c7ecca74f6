"""The client against a real server: the same tests over every transport."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.client import (
    Busy,
    ModelFailed,
    ModelNotFound,
    Refused,
    ServerGone,
    SpecMismatch,
    Timeout,
)

RNG = np.random.default_rng(7)


def rows(n):
    return RNG.standard_normal((n, 4)).astype(np.float32)


def test_a_model_shows_its_spec(client):
    assert repr(client.model("affine")).startswith("<Model 'affine' (observation: float32[4]) -> (")


def test_one_row_in_one_row_out(client):
    x = rows(1)[0]
    answer = client.model("affine")(x)
    assert answer.shape == (4,)
    np.testing.assert_array_equal(answer, 2 * x + 1)


def test_many_rows_in_many_rows_out(client):
    x = rows(10)
    np.testing.assert_array_equal(client.model("affine").infer(x), 2 * x + 1)


def test_more_rows_than_lane_and_batch_are_split_and_return_in_order(client):
    model = client.model("affine", rows=24)
    x = rows(1000)
    np.testing.assert_array_equal(model.infer(x), 2 * x + 1)


def test_a_client_that_sends_more_rows_than_its_lane_has_gets_a_larger_one(leased, client):
    model = client.model("affine")
    small = model.requests.lane.rows
    x = rows(16)
    np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
    assert small < model.requests.lane.rows == 16
    with client.model("affine", rows=4) as fixed:
        np.testing.assert_array_equal(fixed.infer(x), 2 * x + 1)
        assert fixed.requests.lane.rows == 4  # its size was given


def test_a_client_that_cannot_get_more_rows_splits_requests(leased, client):
    with client.model("moody", rows=60), client.model("moody") as model:
        x = rows(8)
        np.testing.assert_array_equal(model.infer(x), x + 1)
        assert model.requests.lane.rows == 1


def test_requests_are_split_if_the_server_is_too_busy_to_lease_more_rows(leased, client, monkeypatch):
    def silent(rows, patient):
        raise ServerGone("no answer within 0.1 s")

    model, x = client.model("affine"), rows(16)
    with monkeypatch.context() as busy:
        busy.setattr(model.requests, "_lease", silent)
        np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
    np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
    assert model.requests.lane.rows == 16


def test_no_rows_in_no_rows_out(client):
    assert client.model("affine").infer(rows(0)).shape == (0, 4)


def test_several_inputs_and_outputs_go_by_name(client):
    model = client.model("two")
    images = RNG.integers(0, 255, (5, 64, 64, 3), dtype=np.uint8)
    scale = np.arange(5, dtype=np.float32)
    outputs = model.infer({"image": images, "scale": scale})
    np.testing.assert_allclose(outputs["brightness"], images.mean((1, 2, 3)) * scale, rtol=1e-5)
    np.testing.assert_array_equal(outputs["corner"], images[:, 0, 0, 0])


def test_a_call_takes_its_inputs_by_name(client):
    image, scale = RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8), np.float32(2.5)
    two, affine, x = client.model("two"), client.model("affine"), rows(1)[0]
    outputs, as_dict = two(image=image, scale=scale, timeout=20.0), two({"image": image, "scale": scale})
    np.testing.assert_allclose(outputs["brightness"], image.mean() * scale, rtol=1e-5)
    assert {name: value.tolist() for name, value in outputs.items()} == {n: v.tolist() for n, v in as_dict.items()}
    np.testing.assert_array_equal(affine(observation=x), 2 * x + 1)


def test_a_call_whose_names_are_not_the_models_names_the_nearest_and_computes_nothing(client):
    image, scale = np.zeros((64, 64, 3), np.uint8), np.float32(1.0)
    two, affine, x = client.model("two"), client.model("affine"), rows(1)[0]
    for call, message in {
        lambda: two(image=image, scal=scale): r"\['image', 'scal'\] came; did you mean 'scale'\?",
        lambda: two(image=image): r"\['image', 'scale'\], \['image'\] came$",
        lambda: two(image=image, scale=scale, more=scale): r"'more', 'scale'\] came; there are: image, scale",
        lambda: two.infer({"imag": image[None], "scale": scale[None]}): "did you mean 'image'",
        lambda: two(image, scale=scale): "one row or inputs by name, came a row and scale",
        lambda: affine(x, observation=x): "one row or inputs by name, came a row and observation",
        lambda: affine(x, observatio=x): "one row or inputs by name, came a row and observatio",
        lambda: affine(observatio=x): "did you mean 'observation'",
        affine: r"takes inputs \['observation'\], \[\] came",
    }.items():
        with pytest.raises(SpecMismatch, match=message):
            call()
    with two.rows() as held:
        with pytest.raises(SpecMismatch, match="did you mean 'scale'"):
            held.inputs["scal"] = scale
        with pytest.raises(SpecMismatch, match="did you mean 'image'"):
            held.place("imag", 0, (64, 64, 3))
        with pytest.raises(SpecMismatch, match="did you mean 'corner'"):
            held.row("corne", 0)


def test_several_tickets_are_in_flight_and_each_gets_its_own_answer(client):
    model = client.model("affine", rows=40)
    inputs = [rows(n) for n in (1, 5, 2, 16, 3)]
    tickets = [model.submit(x) for x in inputs]
    for x, ticket in reversed(list(zip(inputs, tickets, strict=True))):
        np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)
    assert model.submit(rows(16)).rows == 16  # every row was returned


def test_more_tickets_than_a_ring_holds_are_all_answered(client):
    model = client.model("affine", rows=100)
    inputs = [rows(1) for _ in range(100)]
    tickets = [model.submit(x) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        np.testing.assert_array_equal(ticket.result().outputs, 2 * x + 1)


def test_rows_are_the_servers_memory(client):
    model = client.model("two", rows=6)
    with model.rows(4) as held:
        assert held.inputs["image"].shape == (4, 64, 64, 3)
        for i in range(4):
            held.inputs["image"][i] = i * 10
        held.inputs["scale"][:] = 2
        held.infer()
        np.testing.assert_allclose(held.outputs["brightness"], [0, 20, 40, 60])
        np.testing.assert_array_equal(held.outputs["corner"], [0, 10, 20, 30])
        held.inputs["image"][0] = 7
        held.infer(1)
        assert held.outputs["brightness"][0] == 14
    with model.rows(6):  # given back
        pass


def test_rows_beyond_the_batch_limit_are_cut(client):
    model = client.model("moody", rows=20)
    with model.rows(20) as held:
        held.inputs["observation"][:] = np.arange(80, dtype=np.float32).reshape(20, 4)
        held.infer()
        np.testing.assert_array_equal(held.outputs["action"], held.inputs["observation"] + 1)


async def test_many_tasks_share_a_model_in_an_event_loop(client):
    model = client.model("affine", rows=8)

    async def ask(n):
        x = rows(n)
        np.testing.assert_array_equal(await model.infer_async(x), 2 * x + 1)

    await asyncio.gather(*(ask(1 + i % 4) for i in range(60)))


def test_a_client_outlives_the_event_loops_it_was_used_in(client):
    model, x = client.model("affine", rows=8), rows(2)
    for _ in range(2):
        np.testing.assert_array_equal(asyncio.run(model.infer_async(x)), 2 * x + 1)
        np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
        np.testing.assert_array_equal(model.submit(x).result().outputs, 2 * x + 1)


def test_an_event_loop_gets_its_answers_without_a_thread_that_waits_for_them(client, monkeypatch):
    """A process may have as many threads as it may; the tasks look themselves then."""
    model, x, start = client.model("affine", rows=8), rows(2), threading.Thread.start

    def start_others(thread):
        if thread.name == "jurybox-answers":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    for _ in range(2):
        np.testing.assert_array_equal(asyncio.run(model.infer_async(x)), 2 * x + 1)


def test_threads_share_a_model(client):
    model, wrong = client.model("affine", rows=16), []

    def ask():
        for _ in range(30):
            x = rows(3)
            if not np.array_equal(model.infer(x), 2 * x + 1):
                wrong.append(x)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_error_of_an_unknown_model_lists_the_others(client):
    with pytest.raises(ModelNotFound, match="'phot'.*affine.*moody.*two"):
        client.model("phot")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 4)), r"expected float32 of shape \(n, 4\), came float64 of shape \(2, 4\).*astype"),
        (np.zeros((2, 5), np.float32), r"came float32 of shape \(2, 5\)"),
        (np.zeros(4, np.float32), r"came float32 of shape \(4,\).*array\[None\]"),
        ({"x": np.zeros((2, 4), np.float32)}, r"takes inputs \['observation'\], \['x'\] came"),
    ],
)
def test_the_error_of_inputs_that_do_not_fit_says_what_was_expected(client, given, message):
    with pytest.raises(SpecMismatch, match=message):
        client.model("affine").infer(given)


def test_an_array_for_a_model_of_several_inputs_is_refused(client):
    with pytest.raises(SpecMismatch, match="give a dict"):
        client.model("two").infer(np.zeros((1, 64, 64, 3), np.uint8))


def test_a_ticket_larger_than_a_batch_is_refused(client):
    with pytest.raises(SpecMismatch, match="max_batch"):
        client.model("affine", rows=64).submit(rows(17))


def test_a_full_lane_is_busy_until_results_are_collected(client):
    model = client.model("affine", rows=4)
    ticket = model.submit(rows(3))
    with pytest.raises(Busy, match="2 neighbouring rows were asked for, 1 of this lane's 4"):
        model.submit(rows(2))
    ticket.result()
    model.submit(rows(4)).result()


def test_a_full_arena_is_busy(leased, client):
    with client.model("moody", rows=60), pytest.raises(Busy, match=r"60 of the arena's 64 rows|leased"):
        client.model("moody", rows=10, timeout=1.0)


def test_more_rows_than_the_arena_has_are_refused(leased, client):
    with pytest.raises(Refused, match=r"models\.moody\.rows"):
        client.model("moody", rows=65)


def check_busy_after_timeout(request, again):
    """Let `request(timeout)` time out while an engine computes it: `again` must raise Busy, and its error is returned.

    On a busy machine an engine may take the request only after its deadline. It answers at once then, the rows are
    free, and this tries again with more time.
    """
    with pytest.raises(Timeout, match="did not answer in time"):
        request(0.05)
    for attempt in range(2, 12):
        try:
            with contextlib.suppress(Timeout):  # then an engine may compute this one, and the next is busy
                again()
            with pytest.raises(Timeout, match="did not answer in time"):
                request(0.05 * attempt)
        except Busy as error:
            return str(error)
    return pytest.fail("the rows of ten requests were free as soon as the requests had timed out")


def test_a_late_answer_is_dropped_and_its_rows_are_returned(leased, client):
    model = client.model("moody", rows=2)
    slow = np.full((2, 4), 800_000, np.float32)
    # The engine may still write to the rows.
    check_busy_after_timeout(lambda timeout: model.infer(slow, timeout=timeout), lambda: model.submit(rows(1)).result())
    x = rows(2)

    def answered():
        try:
            np.testing.assert_array_equal(model.infer(x, timeout=20.0), x + 1)
        except Busy:
            return False
        return True

    wait_until(answered, 30, "the return of the rows")


def test_who_does_not_wait_for_rows_is_told_at_once_that_none_are_free(leased, client):
    with client.model("moody", rows=60) as all_but_a_few:
        began = time.monotonic()
        with pytest.raises(Busy):
            client.model("moody", rows=60, wait=False)
        assert time.monotonic() - began < 30  # of 60 that the connection waits for an answer
        all_but_a_few.infer(np.ones((1, 4), np.float32))
    client.model("moody", rows=60, timeout=30).close()


def test_rows_of_a_timed_out_request_are_not_reused_before_its_answer(leased, client):
    model = client.model("moody", rows=4)
    earlier = model.submit(np.full((2, 4), 800_000, np.float32), timeout=30)
    with pytest.raises(Timeout):
        model.infer(np.full((2, 4), 7, np.float32), timeout=0.05)
    run = model.requests.lane.take(2)
    assert run is None or not model.requests.lane.asked(run.first, 2)
    del run
    # This waits for rows instead of sending more than the lane has.
    np.testing.assert_array_equal(model.infer(np.full((2, 4), 9, np.float32), timeout=30), np.full((2, 4), 10))
    np.testing.assert_array_equal(earlier.result(timeout=30).outputs, np.full((2, 4), 800_001))


def test_rows_of_a_timed_out_request_stay_with_their_holder(leased, client):
    model = client.model("moody", rows=3)
    with model.rows(2) as held:
        held.inputs["observation"][:] = 2_500_000
        error = check_busy_after_timeout(lambda timeout: held.infer(timeout=timeout), lambda: held.infer(timeout=0.05))
        assert "still has an earlier request" in error
    model.submit(rows(1)).result()


def test_a_model_that_raises_reports_it_and_goes_on(client):
    model = client.model("moody")
    with pytest.raises(ModelFailed, match="RuntimeError: this row breaks the model"):
        model.infer(np.full((1, 4), 666, np.float32))
    x = rows(3)
    np.testing.assert_array_equal(model.infer(x), x + 1)


def test_a_model_that_returns_too_few_rows_is_an_error(client):
    model = client.model("moody", rows=4)
    with pytest.raises(ModelFailed, match=r"shape \[2, 4\], the spec promises \[3, 4\]"):
        model.infer(np.full((3, 4), 667, np.float32))


def test_the_error_of_a_model_that_could_not_be_loaded_has_the_reason(client):
    with pytest.raises(ModelFailed, match=r"broken.*this factory never works"):
        client.model("broken")
    with pytest.raises(ModelFailed, match=r"shape \[1, 4\], the spec promises \[1, 5\]"):
        client.model("liar")


def test_a_closed_model_and_a_closed_connection_raise_errors(connecting):
    connection = connecting()
    model = connection.model("affine")
    model.close()
    with pytest.raises(Refused, match="was closed"):
        model.infer(rows(1))
    connection.close()
    with pytest.raises(Refused, match="connect again"):
        connection.model("affine")
