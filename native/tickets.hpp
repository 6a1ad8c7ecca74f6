// Tickets inside an engine: the record, and the check that a ticket asks only for rows its sender holds.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jurybox {

// The same 64 bytes as wire.py's TICKET.
struct Ticket {
    std::uint64_t sequence;
    std::uint64_t lease;
    std::int64_t deadline;   // ns of CLOCK_MONOTONIC, 0: none
    std::int64_t submitted;  // ns of CLOCK_MONOTONIC
    std::uint32_t lane;
    std::uint32_t first;
    std::uint32_t rows;
    std::uint32_t model;
    std::uint64_t version;
    union {
        std::uint64_t epoch;  // on its way to an engine: which life of it is meant
        struct {              // in the engine
            std::uint32_t door;
            std::uint32_t code;
        } state;
    };
};
static_assert(sizeof(Ticket) == 64);

// The same 32 bytes as board.py's LANE. The supervisor writes `lease` last when it grants, first when it takes back.
struct Lane {
    std::uint64_t lease;
    std::uint32_t model;
    std::uint32_t first;
    std::uint32_t rows;
    std::uint32_t pid;
    std::uint64_t pad;
};
static_assert(sizeof(Lane) == 32);

// errors.py's codes that are given here.
enum : std::uint32_t { kOk = 0, kModelNotFound = 3, kRefused = 7, kStaleLease = 14 };

struct Admitted {
    std::size_t refused;
    std::size_t rows;  // of those that were not
    bool pinned;       // whether one asks for a weights version
};

// Fill in each ticket's door, model and code; `limits[m]` is the largest ticket of model m, 0 where none is served.
inline Admitted admit(Ticket* tickets, std::size_t n, std::uint32_t door, const Lane* lanes, std::size_t n_lanes,
                      const std::uint32_t* limits, std::size_t n_models) {
    Admitted result{0, 0, false};
    for (std::size_t i = 0; i < n; ++i) {
        Ticket& ticket = tickets[i];
        ticket.state.door = door;
        ticket.state.code = kStaleLease;
        if (ticket.lane < n_lanes && ticket.lease != 0) {
            const Lane& lane = lanes[ticket.lane];
            const auto* lease = reinterpret_cast<const std::atomic<std::uint64_t>*>(&lane.lease);
            if (lease->load(std::memory_order_acquire) == ticket.lease) {
                const std::uint64_t end = std::uint64_t{ticket.first} + ticket.rows;
                ticket.model = lane.model;
                if (lane.model >= n_models || limits[lane.model] == 0)
                    ticket.state.code = kModelNotFound;
                else if (ticket.rows == 0 || ticket.rows > limits[lane.model] || ticket.first < lane.first ||
                         end > std::uint64_t{lane.first} + lane.rows)
                    ticket.state.code = kRefused;
                else
                    ticket.state.code = kOk;
            }
        }
        result.pinned |= ticket.version != 0;
        if (ticket.state.code == kOk)
            result.rows += ticket.rows;
        else
            ++result.refused;
    }
    return result;
}

// Whether a ticket's deadline has passed.
inline bool any_expired(const Ticket* tickets, std::size_t n, std::int64_t now) {
    for (std::size_t i = 0; i < n; ++i)
        if (tickets[i].deadline != 0 && tickets[i].deadline < now) return true;
    return false;
}

// The door that all tickets came through; -1 where there are several.
inline std::int64_t only_door(const Ticket* tickets, std::size_t n) {
    for (std::size_t i = 1; i < n; ++i)
        if (tickets[i].state.door != tickets[0].state.door) return -1;
    return n ? std::int64_t{tickets[0].state.door} : -1;
}

// Copy the rows of a table that the tickets name, one after another, to `out`. Rows are `row_bytes` long.
inline void gather(const std::byte* table, std::size_t row_bytes, const Ticket* tickets, std::size_t n, std::byte* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t bytes = tickets[i].rows * row_bytes;
        std::memcpy(out, table + tickets[i].first * row_bytes, bytes);
        out += bytes;
    }
}

// The other way: spread consecutive rows of `in` over the tickets' rows of the table.
inline void scatter(std::byte* table, std::size_t row_bytes, const Ticket* tickets, std::size_t n, const std::byte* in) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t bytes = tickets[i].rows * row_bytes;
        std::memcpy(table + tickets[i].first * row_bytes, in, bytes);
        in += bytes;
    }
}

}  // namespace jurybox
