// Tickets on arrival: only rows that the sender holds, no more of them than it holds, and a lease seen whole or not at all.
// Outputs: only tensors that can be copied as bytes. Returning clients: counted until they send again, whatever a ticket says.
#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"
#include "serving/tickets.hpp"

using namespace jurybox;

namespace {

constexpr std::uint32_t kModels = 3;
constexpr std::uint32_t kLimits[kModels] = {8, 4, 0}, kArenas[kModels] = {5, 6, 7};

Ticket ticket(std::uint32_t lane, std::uint64_t lease, std::uint32_t first, std::uint32_t rows) {
    Ticket t{};
    t.lane = lane;
    t.lease = lease;
    t.first = first;
    t.rows = rows;
    return t;
}

struct World {
    std::vector<LaneRecord> lanes = std::vector<LaneRecord>(4);
    Admission admission{4};

    std::uint32_t admit(Ticket& t) {
        admission.admit(&t, 1, 1, lanes.data(), lanes.size(), kLimits, kArenas, kModels);
        return t.state.code;
    }
};

void a_lane_never_has_more_rows_inside_than_it_leases() {
    World world;
    grant(world.lanes[1], 0, 10, 4, 5, 77);
    grant(world.lanes[2], 0, 14, 4, 5, 78);
    std::vector<Ticket> inside;
    std::size_t refused = 0;
    for (int i = 0; i < 1000; ++i) {
        Ticket t = ticket(1, 77, 10, 1 + static_cast<std::uint32_t>(i) % 2);
        if (world.admit(t) == kOk)
            inside.push_back(t);
        else
            refused += t.state.code == kBusy;
    }
    CHECK(inside.size() == 3 && refused == 997);  // 1 + 2 + 1 rows
    Ticket other = ticket(2, 78, 14, 4);
    CHECK(world.admit(other) == kOk);
    CHECK(world.admission.leave(inside.data(), inside.size()) == 1);
    Ticket again = ticket(1, 77, 10, 4);
    CHECK(world.admit(again) == kOk);
}

void who_was_refused_gives_nothing_back() {
    World world;
    grant(world.lanes[1], 0, 0, 2, 5, 77);
    Ticket good = ticket(1, 77, 0, 2), bad = ticket(1, 77, 0, 2);
    CHECK(world.admit(good) == kOk);
    for (int i = 0; i < 10; ++i) {
        CHECK(world.admit(bad) == kBusy);
        world.admission.leave(&bad, 1);
    }
    world.admission.leave(&good, 1);
    world.admission.leave(&good, 1);  // answered twice by mistake: the book does not go below nothing
    CHECK(world.admit(bad) == kOk);
    CHECK(world.admit(good) == kBusy);
}

void a_lane_of_another_arena_is_not_computed() {
    World world;
    grant(world.lanes[0], 1, 0, 4, 5, 9);
    Ticket t = ticket(0, 9, 0, 1);
    CHECK(world.admit(t) == kModelNotFound);
    grant(world.lanes[0], 1, 0, 4, 6, 9);
    CHECK(world.admit(t) == kOk);
    grant(world.lanes[0], 2, 0, 4, 7, 9);
    CHECK(world.admit(t) == kModelNotFound);  // not served
    take_back(world.lanes[0]);
    CHECK(world.admit(t) == kStaleLease);
}

void a_ticket_has_the_priority_of_its_lane_and_no_other_value() {
    World world;
    for (const std::uint16_t given : std::vector<std::uint16_t>{0, 1, 2, 3, 4, 65535}) {
        grant(world.lanes[0], 0, 0, 64, 5, 9, given);
        Ticket t = ticket(0, 9, 0, 1);
        const std::uint16_t expected = given >= kFirst && given <= kLast ? given : std::uint16_t{kNormal};
        const Admitted result = world.admission.admit(&t, 1, 1, world.lanes.data(), world.lanes.size(), kLimits, kArenas, kModels);
        CHECK(t.state.code == kOk && t.state.priority == expected);
        CHECK(result.ranked == (t.state.priority != kNormal));
    }
}

// Under the thread sanitizer a lease stored without release, or read without acquire, is a race on the other fields.
void who_sees_a_lease_sees_its_rows() {
    World world;
    constexpr std::uint64_t kRounds = 2000;
    std::atomic<std::uint64_t> seen{0};
    std::thread supervisor([&] {
        for (std::uint64_t round = 1; round <= kRounds; ++round) {
            const auto first = static_cast<std::uint32_t>(round % 100);
            grant(world.lanes[3], 0, first, 1 + first % 8, 5, round);
            while (seen.load(std::memory_order_acquire) != round) std::this_thread::yield();
            take_back(world.lanes[3]);
        }
    });
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
        const auto first = static_cast<std::uint32_t>(round % 100);
        Ticket t = ticket(3, round, first, 1 + first % 8);
        while (world.admit(t) == kStaleLease) std::this_thread::yield();
        CHECK(t.state.code == kOk);
        CHECK(world.admission.leave(&t, 1) == 1);
        seen.store(round, std::memory_order_release);
    }
    supervisor.join();
}

void only_tensors_of_the_promised_form_are_taken() {
    float values[24] = {};
    std::int64_t shape[] = {4, 2, 3}, strides[] = {6, 3, 1};
    const DlTensor plain{values, kDlCpu, 0, 3, 2, 32, 1, shape, strides, 0};
    const RowForm form(plain);
    CHECK(form.bytes() == 24);
    const auto* memory = reinterpret_cast<const std::byte*>(values);
    CHECK(form.rows_of(plain, 4) == memory);
    CHECK(form.rows_of(plain, 3) == nullptr && form.rows_of(plain, 5) == nullptr);
    DlTensor t = plain;
    t.offset = 8;
    CHECK(form.rows_of(t, 4) == memory + 8);
    t = plain, t.data = nullptr;
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.device = 2;
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.kind = 4;  // bfloat16
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.bits = 64;
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.lanes = 2;
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.dimensions = 2;
    CHECK(form.rows_of(t, 4) == nullptr);
    std::int64_t other_shape[] = {4, 3, 2}, other_strides[] = {6, 2, 1}, gaps[] = {12, 3, 1}, turned[] = {6, 1, 2};
    t = plain, t.shape = other_shape, t.strides = other_strides;
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.strides = gaps;
    CHECK(form.rows_of(t, 4) == nullptr);
    t = plain, t.strides = turned;
    CHECK(form.rows_of(t, 4) == nullptr);
    std::int64_t one[] = {1, 2, 3};
    t = plain, t.shape = one, t.strides = gaps;  // the step between rows does not matter if there is one
    CHECK(form.rows_of(t, 1) == memory);
    std::int64_t four[] = {4}, step[] = {1};
    const DlTensor numbers{values, kDlCpu, 0, 1, 2, 32, 1, four, step, 0};
    CHECK(RowForm(numbers).bytes() == 4 && RowForm(numbers).rows_of(numbers, 4) == memory);
    CHECK(RowForm(numbers).rows_of(plain, 4) == nullptr && form.rows_of(numbers, 4) == nullptr);
}

void a_client_is_away_from_its_answer_until_it_sends_again() {
    ArrivalTracker tracker(4);
    const Ticket two[] = {ticket(1, 77, 0, 1), ticket(2, 78, 1, 1)}, other = ticket(3, 79, 2, 1);
    tracker.came(two, 2, 1000, 5000);
    tracker.came(&other, 1, 1000, 0);  // not quick: nobody waits for it
    CHECK(tracker.away() == 0 && tracker.overdue() == 0);
    tracker.answered(two, 2, 2000);
    tracker.answered(&other, 1, 3000);
    CHECK(tracker.away() == 2 && tracker.overdue() == 2);
    tracker.came(two, 1, 4000, 5000);
    CHECK(tracker.away() == 1 && tracker.overdue() == 1);
    tracker.came(two, 1, 4000, 5000);  // a second ticket of the same client
    CHECK(tracker.away() == 1 && tracker.overdue() == 1);
    tracker.answered(two, 1, 5000);
    CHECK(tracker.away() == 2 && tracker.overdue() == 1);
    tracker.came(two, 1, 6000, 5000);  // it was answered by the last batch, so it was not overdue
    CHECK(tracker.away() == 1 && tracker.overdue() == 1);
    tracker.stays_away();
    CHECK(tracker.away() == 0 && tracker.overdue() == 0);
}

Ticket sent(std::uint32_t lane, std::int64_t at) {
    Ticket one = ticket(lane, 77, lane, 1);
    one.submitted = at;
    return one;
}

void a_client_is_prompt_by_when_it_sent_not_by_when_its_ticket_was_seen() {
    ArrivalTracker tracker(4);
    const Ticket three[] = {sent(0, 10), sent(1, 10), sent(2, 10)};
    tracker.came(three, 3, 100, 1'000'000, 500);
    tracker.answered(three, 3, 1000);
    CHECK(tracker.away() == 3 && tracker.prompt() == 3);
    const Ticket again[] = {sent(0, 1400), sent(1, 1600), sent(2, std::int64_t{1} << 62)};
    tracker.came(again, 3, 5000, 1'000'000, 500);
    CHECK(tracker.away() == 0 && tracker.prompt() == 0);
    tracker.answered(again, 3, 6000);
    CHECK(tracker.away() == 3 && tracker.prompt() == 1);  // 400 after its answer; 600; and a lie: not later than it was seen
    tracker.answered(again, 1, 7000);                     // a second ticket of the same client
    CHECK(tracker.away() == 3 && tracker.prompt() == 1 && tracker.overdue() == 2);
    tracker.not_prompt();
    CHECK(tracker.away() == 2 && tracker.prompt() == 0 && tracker.overdue() == 2);
    tracker.came(again, 3, 7100, 1'000'000, 0);  // nobody is prompt if nobody is to be waited for
    tracker.answered(again, 3, 8000);
    CHECK(tracker.away() == 3 && tracker.prompt() == 0);
    Ticket old = sent(3, -(std::int64_t{1} << 62));
    tracker.came(&old, 1, 9000, 1'000'000, 500);  // sent before its last answer, as in a pipeline
    tracker.answered(&old, 1, 9500);
    CHECK(tracker.prompt() == 1);
    tracker.stays_away();
    CHECK(tracker.away() == 1 && tracker.prompt() == 1);
}

void a_ticket_of_a_lane_that_does_not_exist_is_not_tracked() {
    ArrivalTracker tracker(4);
    const Ticket beyond[] = {ticket(4, 77, 0, 1), ticket(~std::uint32_t{0}, 77, 0, 1)};  // any process can write such ones
    tracker.came(beyond, 2, 1000, 5000);
    tracker.answered(beyond, 2, 2000);
    CHECK(tracker.away() == 0 && tracker.overdue() == 0);
}

}  // namespace

int main() {
    a_lane_never_has_more_rows_inside_than_it_leases();
    who_was_refused_gives_nothing_back();
    a_lane_of_another_arena_is_not_computed();
    a_ticket_has_the_priority_of_its_lane_and_no_other_value();
    who_sees_a_lease_sees_its_rows();
    only_tensors_of_the_promised_form_are_taken();
    a_client_is_away_from_its_answer_until_it_sends_again();
    a_client_is_prompt_by_when_it_sent_not_by_when_its_ticket_was_seen();
    a_ticket_of_a_lane_that_does_not_exist_is_not_tracked();
    std::puts("ok");
}
