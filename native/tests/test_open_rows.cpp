// Sessions in their order, for the lease they are of, once; rows of variable size, as their extents say and no further.
#include <cstring>
#include <vector>

#include "check.hpp"
#include "serving/open_rows.hpp"

using namespace jurybox;

namespace {

struct World {
    std::vector<LaneRecord> lanes = std::vector<LaneRecord>(2);
    std::vector<SessionRecord> column = std::vector<SessionRecord>(8), records = std::vector<SessionRecord>(8);
    std::vector<std::int64_t> places = std::vector<std::int64_t>(8);
    std::vector<std::uint8_t> verdicts = std::vector<std::uint8_t>(8);
    SessionBook book{8};

    World() {
        grant(lanes[0], 0, 0, 4, 5, 77);
        grant(lanes[1], 0, 4, 4, 5, 78);
    }

    Ticket ticket(std::uint32_t lane, std::uint64_t lease, std::uint32_t first, std::vector<std::pair<std::uint32_t, std::uint32_t>> rows) {
        Ticket t{};
        t.lane = lane;
        t.lease = lease;
        t.first = first;
        t.rows = static_cast<std::uint32_t>(rows.size());
        for (std::size_t i = 0; i < rows.size(); ++i) column[first + i] = {rows[i].first, rows[i].second, 0, 0};
        return t;
    }

    std::uint32_t read(const std::vector<Ticket>& tickets) {
        return book.read(tickets.data(), tickets.size(), column.data(), lanes.data(), lanes.size(), records.data(),
                         places.data(), verdicts.data());
    }

    void step_all() {
        for (std::size_t row = 0; row < book.rows(); ++row) book.step(row);
    }
};

void sessions_take_one_step_after_another() {
    World w;
    CHECK(w.read({w.ticket(0, 77, 0, {{0, 0}, {3, 0}}), w.ticket(1, 78, 4, {{1, 0}})}) == kBegins);
    CHECK(w.places[0] == 0 && w.places[1] == 3 && w.places[2] == 5);
    w.step_all();
    CHECK(w.book.in_use() == 3);
    CHECK(w.read({w.ticket(0, 77, 0, {{0, 1}, {3, 1}})}) == 0);
    CHECK(w.read({w.ticket(0, 77, 0, {{0, 2}})}) == kWrong);  // the step before was read, and not computed
    CHECK(w.read({w.ticket(0, 77, 0, {{0, 1}}), w.ticket(0, 77, 1, {{0, 2}})}) == kAgain);
    w.book.step(0);
    CHECK(w.book.fits(1));
    w.book.step(1);
    CHECK(w.read({w.ticket(0, 77, 0, {{0, 3}})}) == 0);
}

void whoever_had_the_place_before_leaves_nothing() {
    World w;
    w.read({w.ticket(0, 77, 0, {{2, 0}})});
    w.step_all();
    grant(w.lanes[0], 0, 0, 4, 5, 79);
    CHECK(w.read({w.ticket(0, 79, 0, {{2, 1}})}) == kWrong && w.verdicts[0] == kLost);
    CHECK(w.read({w.ticket(0, 77, 0, {{2, 1}})}) == kWrong);  // its lease is over
    w.book.forget(77);
    CHECK(w.book.in_use() == 0);
    CHECK(w.read({w.ticket(0, 79, 0, {{0xffffffff, 0}})}) == (kWrong | kBegins));
    CHECK(w.read({w.ticket(9, 79, 0, {{0, 0}})}) == (kWrong | kBegins));
}

void a_ticket_that_is_refused_takes_none_of_its_sessions_further() {
    World w;
    w.read({w.ticket(0, 77, 0, {{0, 0}, {1, 0}, {2, 0}})});
    w.step_all();
    CHECK(w.read({w.ticket(0, 77, 0, {{0, 9}, {1, 1}}), w.ticket(0, 77, 2, {{1, 2}}), w.ticket(0, 77, 3, {{2, 1}})}) == kWrong);
    CHECK(w.verdicts[0] == kLost && w.verdicts[1] == kFits && w.verdicts[2] == kLost && w.verdicts[3] == kFits);
    CHECK(w.read({w.ticket(0, 77, 0, {{2, 1}, {2, 2}})}) == kWrong && w.verdicts[1] == kTwice);
    CHECK(w.read({w.ticket(0, 77, 0, {{2, 0xffffffff}})}) == kWrong);
}

void rows_are_copied_as_far_as_their_extents_say() {
    constexpr std::size_t kRows = 4, kCapacity = 6;
    std::vector<std::uint8_t> slots(kRows * kCapacity);
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::uint8_t>(i + 1);
    std::vector<std::int64_t> extents{3, 1, 6, 0}, sizes(kRows);
    std::vector<std::uint8_t> out(kRows * kCapacity, 99);
    Ticket t{};
    t.first = 0;
    t.rows = 3;
    VariableRows spec{1, 1, kCapacity, 1, true, 0.9, 0, true};
    const auto gather = [&](std::size_t room) {
        return gather_variable(spec, reinterpret_cast<std::byte*>(slots.data()), extents.data(), &t, 1, sizes.data(),
                               reinterpret_cast<std::byte*>(out.data()), room);
    };
    Gathered done = gather(17);
    CHECK(done.elements == 6 && out[0] == 99);  // no room: nothing is copied
    done = gather(18);
    CHECK(done.elements == 6 && done.first == -1 && out[2] == 3 && out[3] == 0 && out[6] == 7 && out[7] == 0 && out[17] == 18);
    spec.max_padding = 0.1;
    CHECK(gather(24).elements == 0);
    spec.max_padding = 0.9;
    spec.max_elements = 17;
    CHECK(gather(24).elements == 0);
    spec.max_elements = 0;
    for (const std::int64_t lie : {std::int64_t{-1}, std::int64_t{7}, INT64_MAX, INT64_MIN}) {
        extents[1] = lie;
        CHECK(gather(24).elements == 0);
    }
    extents.assign(kRows, 6);
    done = gather(0);
    CHECK(done.elements == 6 && done.first == 0);
    spec.pads = false;
    extents[0] = 5;
    CHECK(gather(24).elements == 0);
}

void a_size_of_nothing_does_not_excuse_the_other() {
    const VariableRows spec{2, 3, 3072, 1, false, 0.5, 0, false};
    const std::int64_t lies[][2] = {{std::int64_t{1} << 40, 0}, {0, 1025}, {1, 1025}, {std::int64_t{1} << 62, std::int64_t{1} << 62}};
    for (const auto& lie : lies) CHECK(elements(spec, lie) == -1);
    const std::int64_t fits[] = {32, 32}, empty[] = {0, 7};
    CHECK(elements(spec, fits) == 3072 && elements(spec, empty) == 0);
}

}  // namespace

int main() {
    sessions_take_one_step_after_another();
    whoever_had_the_place_before_leaves_nothing();
    a_ticket_that_is_refused_takes_none_of_its_sessions_further();
    rows_are_copied_as_far_as_their_extents_say();
    a_size_of_nothing_does_not_excuse_the_other();
    return 0;
}
