// Whatever tickets and records say, a row takes its step in a session of its own lease, or none.
#include <cstring>
#include <vector>

#include "input.hpp"
#include "serving/open_rows.hpp"

using namespace jurybox;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    constexpr std::uint32_t kRows = 8;
    Input input(data, size);
    std::vector<LaneRecord> lanes(2);
    grant(lanes[0], 0, 0, 4, 5, 77);
    grant(lanes[1], 0, 4, 4, 5, 78);
    SessionBook book(8);
    while (!input.over()) {
        std::vector<SessionRecord> column(kRows), records(kRows);
        std::vector<std::int64_t> places(kRows);
        std::vector<std::uint8_t> verdicts(kRows);
        Ticket ticket{};
        ticket.lane = input.byte() % 4;
        ticket.lease = input.byte();
        ticket.first = input.byte() % kRows;
        ticket.rows = 1 + input.byte() % (kRows - ticket.first);
        const std::string_view bytes = input.take(sizeof(SessionRecord) * kRows);
        std::memcpy(column.data(), bytes.data(), bytes.size());
        book.read(&ticket, 1, column.data(), lanes.data(), lanes.size(), records.data(), places.data(), verdicts.data());
        const std::int64_t from = ticket.lease == 78 && ticket.lane == 1 ? 4 : 0;
        const bool ours = (ticket.lane == 0 && ticket.lease == 77) || from == 4;
        for (std::uint32_t i = 0; i < ticket.rows; ++i) {
            CHECK(places[i] >= 0 && places[i] < 8);
            if (verdicts[i] == kFits) CHECK(ours && places[i] >= from && places[i] < from + 4);
        }
        for (std::size_t row = 0; row < book.rows(); ++row) book.step(row);
    }
    return 0;
}
