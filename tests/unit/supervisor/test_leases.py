import pytest

from jurybox.protocol.errors import Busy
from jurybox.protocol.scoreboard import MAX_LANES, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.server.supervisor.leases import GRACE, Leases


@pytest.fixture
def scoreboard():
    scoreboard = Scoreboard.create(segment_name("leasetest", "scoreboard"), 1, 0.0)
    yield scoreboard
    scoreboard.close()


@pytest.fixture
def world(scoreboard):
    class World:
        now = 0.0
        locked: set[int] = set()

    world = World()
    world.locked = set()
    world.leases = Leases(scoreboard, lambda lane: lane in world.locked, lambda: world.now)
    return world


def test_a_death_is_shown_in_the_lanes_of_the_model_that_it_is_charged_to_and_survives_a_restoration(world, scoreboard):
    first, other, second = (world.leases.grant(model, 1, 10) for model in (0, 1, 0))
    world.leases.charge(0)
    assert [scoreboard.lanes["deaths"][lane.lane] for lane in (first, other, second)] == [1, 0, 1]
    assert not scoreboard.restore(), "the supervisor's own copy has it, too"


def test_lanes_never_overlap(world):
    lanes = [world.leases.grant(0, 3, 10) for _ in range(3)]
    rows = [row for lane in lanes for row in range(lane.first, lane.first + lane.rows)]
    assert len(set(rows)) == 9


def test_a_full_arena_says_how_full_it_is(world):
    world.leases.grant(0, 8, 10)
    with pytest.raises(Busy, match="8 of the arena's 10 rows"):
        world.leases.grant(0, 3, 10)


def test_models_have_their_own_arenas(world):
    assert world.leases.grant(0, 8, 8).first == world.leases.grant(1, 8, 8).first == 0


def test_each_lane_gets_the_engine_with_the_fewest_lanes_of_its_model(world):
    def grant(model=0):
        return world.leases.grant(model, 1, 10, engines=(1, 2, 4))

    lanes = [grant() for _ in range(6)]
    assert [lane.engine for lane in lanes] == [1, 2, 4, 1, 2, 4]
    assert [grant(1).engine for _ in range(2)] == [1, 2], "another model has its own turns"
    for lane in (lanes[1], lanes[4]):
        world.leases.release(lane.lane, lane.lease, [])
    assert [grant().engine for _ in range(3)] == [2, 2, 4]
    # A client that exchanges its lane for a larger one leases that first.
    larger, smaller = grant(), lanes[0]
    world.leases.release(smaller.lane, smaller.lease, [])
    assert (larger.engine, grant().engine) == (1, 2)


def test_a_dead_clients_rows_come_back_once_every_engine_has_forgotten_them(world, scoreboard):
    lane = world.leases.grant(0, 10, 10)
    world.locked.add(lane.lane)
    assert world.leases.reclaim([0, 1]) == []
    world.locked.clear()  # the kernel dropped the lock of a dead client
    assert [dead.lane for dead in world.leases.reclaim([0, 1])] == [lane.lane]
    assert scoreboard.lanes["lease"][lane.lane] == 0  # engines refuse its tickets from now on
    world.leases.confirmed(lane.lane, lane.lease, 0)
    with pytest.raises(Busy):
        world.leases.grant(0, 1, 10)
    world.leases.confirmed(lane.lane, lane.lease, 1)
    assert world.leases.grant(0, 10, 10).first == 0


def test_an_engine_that_dies_need_not_confirm(world):
    lane = world.leases.grant(0, 10, 10)
    world.leases.release(lane.lane, lane.lease, [0])
    world.leases.engine_died(0)
    assert world.leases.in_use() == []


def test_an_unused_grant_expires(world):
    world.now = 5.0
    world.leases.grant(0, 10, 10)
    world.now = 5.0 + GRACE
    assert world.leases.reclaim([]) == []
    world.now = 5.0 + GRACE + 0.1
    assert len(world.leases.reclaim([])) == 1
    assert world.leases.grant(0, 10, 10)


def test_a_lane_that_was_locked_late_is_not_granted_again(world):
    lane = world.leases.grant(0, 1, 10)
    world.now = GRACE + 0.1
    world.leases.reclaim([])
    world.locked.add(lane.lane)
    assert world.leases.grant(0, 1, 10).lane != lane.lane


def test_only_the_holder_can_release(world):
    lane = world.leases.grant(0, 1, 10)
    assert not world.leases.release(lane.lane, lane.lease + 1, [])
    assert world.leases.release(lane.lane, lane.lease, [])
    assert not world.leases.release(lane.lane, lane.lease, [])


def test_a_lease_number_is_never_used_again(world):
    numbers = set()
    for _ in range(5):
        lane = world.leases.grant(0, 1, 1)
        numbers.add(lane.lease)
        world.leases.release(lane.lane, lane.lease, [])
    assert len(numbers) == 5


def test_gaps_between_lanes_are_used(world):
    a, b, c = (world.leases.grant(0, 2, 6) for _ in range(3))
    world.leases.release(b.lane, b.lease, [])
    assert world.leases.grant(0, 2, 6).first == b.first


def test_returned_rows_leave_no_unusable_gap(world):
    probe = world.leases.grant(0, 1, 64)
    for _ in range(3):
        world.leases.grant(0, 16, 64)
    world.leases.grant(0, 8, 64)
    world.leases.release(probe.lane, probe.lease, [])
    assert world.leases.grant(0, 8, 64).rows == 8


def test_a_single_row_is_the_last_of_its_gap(world):
    single = world.leases.grant(0, 1, 10)
    assert (single.first, single.engine, world.leases.grant(0, 9, 10).first) == (9, 0, 0)


def test_rows_are_taken_from_the_smallest_gap_that_fits(world):
    lanes = [world.leases.grant(0, rows, 11) for rows in (4, 2, 2, 3)]
    for lane in (lanes[0], lanes[2]):
        world.leases.release(lane.lane, lane.lease, [])
    assert world.leases.grant(0, 2, 11).first == lanes[2].first
    assert world.leases.grant(0, 3, 11).first == lanes[0].first


def test_the_last_lane_is_granted_and_one_more_is_refused_with_the_numbers(world):
    for _ in range(MAX_LANES):
        world.leases.grant(0, 1, 2 * MAX_LANES)
    with pytest.raises(Busy, match=f"no 2 .* {MAX_LANES} of the arena's {2 * MAX_LANES} .* {MAX_LANES} of {MAX_LANES}"):
        world.leases.grant(0, 2, 2 * MAX_LANES)


def test_a_retiring_lane_is_held_by_nobody_and_retires_once(world):
    lane = world.leases.grant(0, 1, 10)
    assert world.leases.held(lane.lane, lane.lease) is lane and world.leases.held(lane.lane, lane.lease + 1) is None
    assert world.leases.release(lane.lane, lane.lease, [0]) is lane
    world.now = GRACE + 0.1
    assert world.leases.held(lane.lane, lane.lease) is None
    assert world.leases.release(lane.lane, lane.lease, [0]) is None
    assert world.leases.reclaim([0]) == world.leases.revoke(0, [0]) == []
    assert world.leases.in_use() == [lane]


def test_the_lanes_of_a_removed_arena_are_revoked_and_no_others(world, scoreboard):
    first, other, second = (world.leases.grant(model, 1, 10) for model in (0, 1, 0))
    assert world.leases.revoke(0, [3]) == [first, second]
    assert [bool(scoreboard.lanes["lease"][lane.lane]) for lane in (first, other, second)] == [False, True, False]
    world.leases.confirmed(first.lane, first.lease + 1, 3)  # of the lease before it
    world.leases.confirmed(other.lane, other.lease, 3)  # it is not retiring
    world.leases.engine_died(2)  # it was not asked
    assert world.leases.in_use() == [first, other, second]
    world.leases.engine_died(3)
    assert world.leases.in_use() == [other]


def test_a_retiring_lane_counts_no_more_for_its_engine(world):
    def grant():
        return world.leases.grant(0, 1, 10, engines=(0, 1))

    first, second = grant(), grant()
    world.leases.release(second.lane, second.lease, [1])
    assert (first.engine, second.engine, grant().engine) == (0, 1, 1)
