"""The turns of the relay's loop: whom it waits for, how long it stays with them, and when others get a turn."""

from __future__ import annotations

import os
import select
from types import SimpleNamespace

import pytest
from tests.clocks import Clock, given
from tests.unit.server.test_relay_messages import MINE, OTHERS, Front, World, record

from jurybox.protocol.control_pb2 import Done, ReleaseRequest, StatusRequest
from jurybox.server.relay import relay as module
from jurybox.server.relay.zmtp_listener import ZmtpListener


class Listener(Front, ZmtpListener):
    """Clients whose connections the relay reads itself."""

    unsent = False

    def __init__(self):
        super().__init__()
        os.set_blocking(self.fileno(), False)
        self.first, self.again, self.linked = {}, [], True

    def link(self, client):
        return "link" if self.linked else None

    def give_first(self, client, take_in):
        self.first[client] = take_in

    def look_again(self, client):
        self.again.append(client)


class Held:
    """A client's lane, whose tickets are answered as soon as somebody looks if it is `ready`."""

    made: list[Held] = []

    def __init__(self, lane, owner, call, granted, first, rows):
        self.lane, self.owner, self.call, self.granted, self.sender = lane, owner, call, granted, b"of " + owner
        self.ready, self.waits, self.owes = True, False, False
        self.spins = self.arms = self.looks = 0
        self.stays, self.on_spin, self.armed, self.other, self.native = [], lambda: False, [], False, False
        self.in_native, self.arrived = 0, None
        Held.made.append(self)

    def watch(self, loop, words, arrived):
        self.arrived = arrived

    def submit(self, ticket, frames):
        self.waits = True

    def connect(self, sender, link):
        return self.native

    def take_in(self):
        self.waits = self.waits or self.in_native > 0
        return self.in_native

    def answer(self):
        return False

    def answers(self, has_room):
        self.looks += 1
        if self.waits and self.ready:
            self.waits = False
            yield [self.owner, b"answer"]

    def arm(self):
        self.arms += 1
        return bool(self.armed) and self.armed.pop(0)

    def spin(self):
        self.spins += 1
        return self.on_spin()

    def stay(self, *given):
        self.stays.append(given)
        return self.other

    def close(self):
        pass


class Poller:
    """What becomes readable, one look after another; the last look finds nothing."""

    def __init__(self):
        self.registered, self.looks, self.found = {}, [], []

    def register(self, descriptor, events):
        self.registered[descriptor] = events

    def poll(self, milliseconds):
        self.looks.append(milliseconds)
        return [(descriptor, select.POLLIN) for descriptor in (self.found.pop(0)() if self.found else ())]


class Standing(Clock):
    """A clock that stands still, for more looks than a loop takes that ends."""

    looks = 0

    def monotonic(self):
        self.looks += 1
        assert self.looks < 20_000
        return super().monotonic()


@pytest.fixture
def clock(monkeypatch):
    return given(Standing(), monkeypatch, module)


@pytest.fixture
def poller(monkeypatch):
    made = Poller()
    monkeypatch.setattr(module, "select", SimpleNamespace(poll=lambda: made, POLLIN=select.POLLIN))
    return made


@pytest.fixture
def world(monkeypatch, clock, poller):
    monkeypatch.setattr(module, "RelayedTickets", Held)
    monkeypatch.setattr(Held, "made", [])
    made = World(front=Listener())
    made.sent_tickets = []
    yield made
    made.close()


def leased(world, sender=MINE):
    """A client's lane, and a function that sends a ticket of it."""
    lease = world.lease(sender, number=sender[:1] * 8)

    def ask():
        world.sent_tickets.append([sender, record(lease.lease)])
        world.say(record(lease.lease), sender=sender)

    return Held.made[-1], ask


def descriptors(world):
    return tuple(world.relay._descriptors)


def test_a_client_that_was_alone_for_some_turns_is_served_alone_for_the_rest_of_its_time(world, clock):
    mine, ask = leased(world)
    for _ in range(16):
        ask()
        assert mine.stays == []
    ask()
    ((watched, pause, seconds),) = mine.stays
    assert (watched, pause) == (descriptors(world), 0.001)
    assert seconds == pytest.approx(0.005)
    assert [answer for _, answer in world.front.sent] == [b"answer"] * 17
    assert mine.spins == mine.arms == 0, "nothing was awaited"


def test_who_is_not_alone_all_the_time_is_not_served_alone(world):
    (mine, ask), (others, ask_too) = leased(world), leased(world, OTHERS)
    for _ in range(40):
        ask()
        ask_too()
    for _ in range(16):
        ask()
    assert mine.stays == others.stays == []
    ask()
    assert len(mine.stays) == 1 and others.stays == []


def test_who_waits_for_an_answer_is_not_served_alone_and_neither_is_one_whose_time_is_over(world, clock):
    mine, ask = leased(world)
    mine.ready = False
    for _ in range(40):
        ask()
    assert mine.stays == []

    def late():
        clock.now += 1
        mine.ready = True
        return True

    mine.on_spin = late
    ask()
    assert not mine.waits and mine.stays == []


def test_others_messages_come_before_a_client_is_served_alone(world):
    (mine, ask), (others, _) = leased(world), leased(world, OTHERS)
    for _ in range(16):
        ask()
    answers, waiting = mine.answers, []

    def answering(has_room):
        yield from answers(has_room)
        if mine.looks == 17:
            world.front.came.append([MINE, b"another message"])

    mine.answers, mine.stay = answering, lambda *given: waiting.append(len(world.front.came))
    ask()
    assert waiting == [0], "after the other message"
    assert len(world.front.sent) == 18 and others.spins == 0


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_left_when_a_client_is_no_longer_served_alone_is_read_and_answered(world, other, waits):
    mine, ask = leased(world)
    for _ in range(16):
        ask()
    mine.other = other
    stay = mine.stay

    def staying(*given):
        mine.waits = waits and not mine.stays
        return stay(*given)

    mine.stay, mine.looks = staying, 0
    ask()
    assert world.front.again == [b"of " + MINE] * other * (1 + waits)
    assert len(mine.stays) == 1 + waits, "what waited was answered in the next turn, and then it was alone again"
    assert len(world.front.sent) == 17 + waits


def test_a_lone_client_is_spun_for_and_one_of_two_is_not(world):
    mine, ask = leased(world)
    others, ask_too = leased(world, OTHERS)
    mine.ready = others.ready = False

    def come():
        mine.ready = True
        return True

    mine.on_spin = come
    ask()
    assert (mine.spins, mine.waits, len(world.front.sent)) == (1, False, 1)
    mine.ready = False
    mine.on_spin = lambda: False
    ask()
    assert (mine.spins, mine.arms, mine.waits) == (2, 1, True)
    ask_too()
    ask()
    assert (mine.spins, others.spins) == (2, 0)
    assert others.arms == 2, "it is told of its answers"


def test_answers_that_arrive_while_it_arms_are_sent_before_it_sleeps(world, poller):
    mine, ask = leased(world)
    mine.ready = False

    def come(*_):
        mine.ready = True
        return True

    mine.arm, before = come, len(poller.looks)
    ask()
    assert not mine.waits and len(world.front.sent) == 1
    assert len(poller.looks) == before + 1, "once there is nothing more to do"


def test_between_messages_in_quick_succession_it_waits_here_and_not_in_the_event_loop(world, poller):
    mine, ask = leased(world)
    front, _, words = descriptors(world)
    ask()
    (ticket,) = world.sent_tickets
    del poller.looks[:]

    def more():
        world.front.came.append(ticket)
        return (front,)

    mine.ready = False

    def answered():
        os.eventfd_write(words, 1)
        mine.ready = True
        return (words,)

    poller.found = [more, more, answered]
    ask()
    assert poller.looks == [1] * 4, "milliseconds; the last found nothing"
    assert len(world.front.sent) == 2 and not mine.waits
    with pytest.raises(BlockingIOError):
        os.eventfd_read(words)
    assert poller.registered == dict.fromkeys(descriptors(world), select.POLLIN)


def test_nobody_is_spun_for_while_more_messages_wait(world):
    mine, ask = leased(world)
    mine.ready, spun = False, []
    mine.on_spin = lambda: spun.append(len(world.front.came))
    ask()
    world.front.came += world.sent_tickets * 200
    world.relay.pump()
    assert spun == [0, 0], "once all of them were read"


def test_the_event_loop_tells_of_clients_messages_and_the_servers(world):
    mine, ask = leased(world)
    ask()
    world.call(status=StatusRequest())
    ((number, _),) = world.asked()
    world.turns(3)
    mine.ready = False
    world.front.came += world.sent_tickets
    os.eventfd_write(world.front.fileno(), 1)
    world.turns(6000, until=lambda: mine.waits)
    assert mine.waits
    os.eventfd_read(world.front.fileno())
    world.turns(3)
    world.server.send_multipart((module.PREFIX, number, module.ControlReply(done=Done()).SerializeToString()))
    world.turns(6000, until=lambda: len(world.front.sent) > 1)
    assert world.replies() == [module.ControlReply(done=Done())]


def test_two_clients_may_be_the_first_that_wait_together(world):
    (mine, _), (others, _) = leased(world), leased(world, OTHERS)
    world.front.came += [[held.owner, record(number)] for number, held in world.relay._lanes.items()]
    mine.ready = others.ready = False
    world.relay.pump()
    assert mine.waits and others.waits and mine.spins == others.spins == 0
    mine.ready = others.ready = True
    world.relay.pump()
    assert len(world.front.sent) == 2


def test_an_event_that_another_look_has_read_stops_nothing(world, poller):
    _, ask = leased(world)
    words = descriptors(world)[2]
    poller.found = [lambda: (words,)]
    ask()
    os.eventfd_write(words, 1)
    world.turns(3)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(words)
    world.relay._on_word()
    ask()
    assert len(world.front.sent) == 2


def test_an_answer_of_the_server_is_read_at_once_and_not_after_the_clients_time(world, clock, poller):
    _, ask = leased(world)
    world.call(status=StatusRequest())
    ((number, _),) = world.asked()
    world.turns(3)
    back = descriptors(world)[1]
    del poller.looks[:]

    def came():
        reply = module.ControlReply(done=Done()).SerializeToString()
        world.server.send_multipart((module.PREFIX, number, reply))
        return (back,)

    def too_late():
        clock.now += 1
        return (back,)

    poller.found = [came, too_late]
    ask()
    assert len(poller.looks) == 1
    world.turns(200, until=lambda: len(world.front.sent) == 2)
    assert world.replies()[-1:] == [module.ControlReply(done=Done())]


def test_clients_who_always_send_more_do_not_keep_others_from_their_turn(world, clock):
    _, ask = leased(world)
    ask()
    (ticket,) = world.sent_tickets
    received = []
    receive = world.front.receive

    def receiving(sizes):
        received.append(1)
        clock.now += 0.001 / 64
        if len(received) < 2000:
            world.front.came.append(ticket)
        return receive(sizes)

    world.front.receive = receiving
    world.relay.pump()
    assert 5 * 64 <= len(received) <= 6 * 64, "5 ms"
    world.turns(400, until=lambda: not world.front.came)
    assert not world.front.came, "it goes on by itself"


def test_clients_who_send_one_message_after_another_do_not_keep_others_from_their_turn(world, clock, poller):
    _, ask = leased(world)
    ask()
    (ticket,) = world.sent_tickets

    def another():
        clock.now += 0.001
        world.front.came.append(ticket)
        return descriptors(world)[:1]

    poller.found, poller.looks = [another] * 100, []
    ask()
    assert 5 <= len(poller.looks) <= 6, "5 ms"
    assert not world.front.came


def test_of_many_messages_of_the_server_only_some_are_read_before_others_get_their_turn(world, monkeypatch):
    monkeypatch.setattr(module, "_TURN", 4)
    read, seen = [], []
    monkeypatch.setattr(world.relay, "_on_reply", read.append)
    for number in range(10):
        world.server.send_multipart((module.PREFIX, bytes(8), b"%d" % number))
    world.relay.pump()
    assert len(read) == 4
    world.loop.call_soon(lambda: seen.append(len(read)))
    world.turns(400, until=lambda: len(read) == 10)
    assert len(read) == 10 and seen == [8]


def test_once_it_has_ended_nothing_is_read_any_more(world):
    mine, ask = leased(world)
    world.turns(3)
    world.relay.end()
    ask()
    mine.arrived()
    world.server.send_multipart((module.PREFIX, bytes(8), b""))
    world.turns(5)
    assert len(world.front.came) == 1 and not mine.waits


def test_a_client_whose_lane_was_released_begins_anew(world):
    mine, ask = leased(world)
    for _ in range(10):
        ask()
    other = world.lease(OTHERS, number=b"other...")
    world.call(OTHERS, release=ReleaseRequest(lease=other.lease))
    for _ in range(10):
        ask()
    assert mine.stays == []
    for _ in range(7):
        ask()
    assert len(mine.stays) == 1


def test_a_lane_that_is_released_is_not_looked_at_any_more(world):
    mine, ask = leased(world)
    mine.ready = False
    ask()
    ((number, _),) = world.relay._lanes.items()
    looks = []
    mine.answers = lambda has_room: looks.append(1) or ()
    world.call(release=ReleaseRequest(lease=number))
    world.relay.pump()
    world.relay.look_after()
    world.turns(3)
    assert looks == [] and world.relay._lanes == {}


def test_tickets_that_the_connections_own_lane_took_in_are_answered(world):
    mine, ask = leased(world)
    ask()
    assert world.front.first == {}
    mine.native = True
    world.front.linked = False
    ask()
    assert world.front.first == {}, "its connection is gone"
    world.front.linked = True
    ask()
    (take_in,) = world.front.first.values()
    assert list(world.front.first) == [MINE]
    before = mine.looks
    take_in()
    world.relay.pump()
    assert mine.looks == before, "it took none"
    mine.in_native = 2
    take_in()
    mine.in_native = 0
    world.relay.pump()
    assert mine.looks == before + 1 and len(world.front.sent) == 4


def test_an_answer_that_does_not_fit_is_tried_again_soon_and_by_one_timer(world, monkeypatch):
    (mine, ask), (others, ask_too) = leased(world), leased(world, OTHERS)
    later = []
    monkeypatch.setattr(world.loop, "call_later", lambda seconds, call: later.append((seconds, call)))
    for held in (mine, others):
        held.ready, held.owes = False, True
    ask()
    ask_too()
    assert [seconds for seconds, _ in later] == [0.01]
    mine.ready = True
    (_, try_again) = later.pop()
    try_again()
    assert not mine.waits and others.waits
    assert [seconds for seconds, _ in later] == [0.01], "for the other"
    before = mine.looks
    others.ready = True
    later.pop()[1]()
    assert not others.waits and later == [] and mine.looks == before
    others.ready = False
    ask_too()
    world.relay.end()
    others.ready = True
    later.pop()[1]()
    assert others.waits, "it has ended"
