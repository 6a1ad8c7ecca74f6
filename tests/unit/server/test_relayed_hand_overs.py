"""What a relayed lane keeps while its tickets change hands, and how an answer is measured before it is sent."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.server.test_relayed_native_lane import Native, connected, in_native, natively  # noqa: F401
from tests.unit.server.test_relayed_tickets import Judging, Lane, frames, sent_of_any_size, ticket

from jurybox.protocol.control_pb2 import Lease
from jurybox.protocol.errors import Code, Error
from jurybox.server.relay.relayed_tickets import _MOST_HEAD, InlineTicket, RelayedTickets


def submit(held, sequence, first, rows=1):
    held.submit(InlineTicket(b"sender", sequence, 10**9, first, rows, 0, 1), [np.ones(rows, np.float32).tobytes()])


def relayed(lane, first=3, rows=5):
    return RelayedTickets(lane, b"owner", b"the call", Lease(), first, rows)


def test_one_native_ticket_is_enough_to_wait():
    _, _, held, made = connected()
    assert not held.waits
    made.tickets = [in_native(5, 0, 1)]
    assert held.waits


@pytest.mark.parametrize("done", [False, True])
def test_python_answers_what_the_native_lane_could_not(done):
    _, _, held, made = connected()
    made.answer = lambda: done
    assert held.answer() is done


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rows_of_all_tickets_that_were_handed_over_are_busy_and_no_others(order):
    _, _, held, made = connected()
    tickets = [in_native(5, 0, 1), in_native(6, 2, 2)]
    made.tickets = [tickets[at] for at in order]
    held.take_no_more()
    for first in (0, 2, 3):
        with pytest.raises(Error, match="not answered yet"):
            submit(held, 7, first)
    submit(held, 7, 1)
    assert len(list(held.answers())) == 3 and not held.waits
    submit(held, 8, 0, 4)


def test_a_ticket_that_was_handed_over_belongs_to_its_lane_here():
    lane, _, held, made = connected()
    made.tickets = [in_native(5, 0, 1)]
    held.take_no_more()
    (one,) = lane.in_flight.values()
    assert one.owner() is held


def test_what_was_handed_over_once_is_not_asked_for_again():
    _, _, held, made = connected()
    submit(held, 5, 0)
    assert not made.mine
    made.hand_over = lambda: pytest.fail("it has nothing")
    submit(held, 6, 1)
    held.take_no_more()
    assert held.waits


def test_the_native_lane_gets_nothing_back_while_an_answer_is_not_sent_or_a_ticket_not_answered():
    lane, _, held, made = connected()
    submit(held, 5, 0)
    assert list(held.answers(lambda *_: False)) == [] and lane.in_flight == {}
    with pytest.raises(Error, match="rows"):
        submit(held, 6, 0, 9)
    assert made.taken_over == []
    lane.in_flight[77] = "a ticket of the lane that is not known here"
    lane.receive_now = lambda: None
    assert len(list(held.answers())) == 1
    assert made.taken_over == []


def test_an_idle_native_lane_keeps_the_tickets_to_come():
    _, _, held, made = connected()
    assert list(held.answers()) == []
    assert made.mine


def test_a_ticket_that_comes_again_is_known_by_its_rows_of_the_lane():
    held = relayed(Lane())
    held.submit(ticket(5, 1, 2), frames(2))
    held.submit(ticket(5, 1, 2)._replace(sender=b"again"), frames(2))
    assert len(held.lane.sent) == 1
    ((sender, *_),) = held.answers()
    assert sender == b"again", "its newest connection"


def test_an_answer_that_does_not_fit_keeps_no_smaller_one_waiting():
    held = relayed(Lane())
    held.submit(ticket(5, 0, 4), frames(4))
    held.submit(ticket(6, 4, 1), frames(1))
    sizes = []
    list(held.answers(lambda client, size: sizes.append(size)))
    assert sizes[0] - sizes[1] == 3 * 4
    sent = list(held.answers(lambda client, size: size <= sizes[1]))
    assert len(sent) == 1 and held.owes
    held.submit(ticket(7, 4, 1), frames(1))


@pytest.mark.parametrize(
    ("code", "asked"), [(Code.OK, 1), (Code.MODEL_FAILED, 1), (Code.ROW_FAILED, 2), (Code.SESSION_LOST, 2)]
)
def test_an_answer_of_fixed_size_is_measured_once_more_only_if_it_has_reasons(code, asked):
    held, sizes = relayed(Judging(code)), []
    held.submit(ticket(5, 1, 2), frames(2))
    found = list(held.answers(lambda client, size: sizes.append(size) or len(sizes) < 2))
    assert len(sizes) == asked and len(found) == (asked == 1)
    assert held.owes == (asked == 2)
    ((*_,),) = found or held.answers()
    assert not held.waits


def test_an_answer_of_any_size_is_measured_before_and_after_it_is_made():
    sizes = []
    held, found, _ = sent_of_any_size(Code.OK, lambda client, size: sizes.append(size) or len(sizes) < 2)
    assert found == [] and held.owes and len(sizes) == 2
    (answer,) = held.answers()
    assert sizes == [_MOST_HEAD + 4, sum(len(frame) for frame in answer)], "two rows of two bytes, and any head"


def test_a_lane_that_is_closed_refers_to_no_memory_of_the_arena():
    _, _, held, _ = connected()
    held.lane.close = lambda: None
    held.close()
    assert not held._inputs and not held._outputs
    made = len(Native.made)
    assert not held.connect(b"another", object()) and len(Native.made) == made
