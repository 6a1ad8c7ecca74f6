// Rows of an engine that are more than fixed shapes: which step of which session each is, and how much of its slot it fills.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "serving/tickets.hpp"

namespace jurybox {

// The same 16 bytes as SESSION in arena.py.
struct SessionRecord {
    std::uint32_t slot;
    std::uint32_t step;
    std::uint32_t flags;
    std::uint32_t pad;
};
static_assert(sizeof(SessionRecord) == 16);

// What a batch holds beside rows that simply follow what was computed before.
enum Found : std::uint32_t { kBegins = 1, kFlags = 2, kAgain = 4, kWrong = 8 };
// Why a ticket is not computed, by row.
enum Verdict : std::uint8_t { kFits = 0, kLost = 1, kTwice = 2 };

// The book of a model's sessions: whose each is, and the step it expects. A session's place is the row of the arena of its
// number in its lane, so there are as many as rows. Its state is used by the lease it was made for, in its order, or not at
// all. One batch is read, and then some of its rows are stepped; records are read once, and only the copy is used.
class SessionBook {
  public:
    explicit SessionBook(std::size_t sessions) : kept_(sessions) {}

    // Sessions that have begun and whose lease has not been forgotten.
    std::size_t in_use() const { return in_use_; }

    // Take the records of the tickets' rows from the column, whose bounds were checked. Fills records, places and verdicts, a
    // row each, and says what was Found. A ticket with one row that does not fit is not computed, so a later one of its
    // sessions in this batch still expects what this one did.
    std::uint32_t read(const Ticket* tickets, std::size_t n, const SessionRecord* column, const Lane* lanes, std::size_t n_lanes,
                       SessionRecord* records, std::int64_t* places, std::uint8_t* verdicts) {
        ++batch_;
        rows_.clear();
        std::uint32_t found = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const Ticket& ticket = tickets[i];
            std::uint64_t first = 0, size = 0;
            if (ticket.lane < n_lanes && ticket.lease != 0 &&
                lease_of(lanes[ticket.lane]).load(std::memory_order_acquire) == ticket.lease) {
                first = lanes[ticket.lane].first;
                size = lanes[ticket.lane].rows;
            }
            ++ticket_;
            std::memcpy(records, column + ticket.first, ticket.rows * sizeof(SessionRecord));
            std::uint8_t worst = kFits;
            for (std::uint32_t j = 0; j < ticket.rows; ++j) {
                const SessionRecord& record = records[j];
                const std::uint64_t place = first + record.slot;
                const bool inside = record.slot < size && place < kept_.size();
                places[j] = inside ? static_cast<std::int64_t>(place) : 0;
                verdicts[j] = kLost;
                if (inside) {
                    Session& session = kept_[place];
                    const Step& expected = session.batch == batch_ ? session.ahead : session.done;
                    if (session.ticket == ticket_)
                        verdicts[j] = kTwice;
                    else if (follows(record.step, ticket.lease, expected))
                        verdicts[j] = kFits;
                    session.ticket = ticket_;
                    found |= session.batch == batch_ ? kAgain : 0u;
                }
                worst = std::max(worst, verdicts[j]);
                found |= (record.step == 0 ? kBegins : 0u) | (record.flags != 0 ? kFlags : 0u);
                rows_.push_back({inside ? place : kept_.size(), {ticket.lease, record.step}});
            }
            if (worst == kFits) {
                for (std::uint32_t j = 0; j < ticket.rows; ++j) {
                    Session& session = kept_[static_cast<std::size_t>(places[j])];
                    session.batch = batch_;
                    session.ahead = {ticket.lease, records[j].step + 1};
                }
            } else {
                found |= kWrong;
            }
            records += ticket.rows;
            places += ticket.rows;
            verdicts += ticket.rows;
        }
        return found;
    }

    std::size_t rows() const { return rows_.size(); }

    // Copy the states of the batch's rows out of a table of all sessions, whose size was checked, or back into it.
    void load(const std::byte* table, std::size_t row_bytes, std::byte* out) const {
        for (const Row& row : rows_) {
            if (row.place < kept_.size()) std::memcpy(out, table + row.place * row_bytes, row_bytes);
            out += row_bytes;
        }
    }
    void save(std::byte* table, std::size_t row_bytes, const std::byte* in) const {
        for (const Row& row : rows_) {
            if (row.place < kept_.size()) std::memcpy(table + row.place * row_bytes, in, row_bytes);
            in += row_bytes;
        }
    }

    std::size_t sessions() const { return kept_.size(); }

    // Whether a row of the batch still is the next step of its session: an earlier ticket of it may have failed since.
    bool fits(std::size_t row) const {
        const Row& asked = rows_[row];
        return asked.place < kept_.size() && follows(asked.step.number, asked.step.lease, kept_[asked.place].done);
    }

    // A row of the batch was computed, and what it leaves behind is kept.
    void step(std::size_t row) {
        const Row& asked = rows_[row];
        if (asked.place >= kept_.size()) return;
        Step& done = kept_[asked.place].done;
        in_use_ += done.lease == 0;
        done = {asked.step.lease, asked.step.number + 1};
    }

    // A lease has ended: its sessions are nobody's.
    void forget(std::uint64_t lease) {
        for (Session& session : kept_) {
            if (lease != 0 && session.done.lease == lease) {
                session.done = {};
                --in_use_;
            }
        }
    }

  private:
    struct Step {
        std::uint64_t lease = 0;
        std::uint32_t number = 0;
    };
    struct Session {
        Step done;   // the next step's number, and whose it must be
        Step ahead;  // the same after what was read of this batch
        std::uint64_t batch = 0, ticket = 0;  // that it stood in last
    };
    struct Row {
        std::uint64_t place;
        Step step;
    };

    // Numbers do not come round: behind the last one is 0, which would begin the session anew.
    static bool follows(std::uint32_t number, std::uint64_t lease, const Step& expected) {
        return number == 0 || (lease == expected.lease && number == expected.number && number != UINT32_MAX);
    }

    std::vector<Session> kept_;
    std::vector<Row> rows_;
    std::uint64_t batch_ = 0, ticket_ = 0;
    std::size_t in_use_ = 0;
};

// How rows of one variable input lie in their slots, and what a batch of them may be.
struct VariableRows {
    std::size_t extents;        // numbers that say a row's size
    std::size_t unit;           // elements of a row whose sizes are all 1
    std::size_t capacity;       // elements of a slot
    std::size_t item;           // bytes of an element
    bool pads;                  // whether a row of unlike size is padded behind its end
    double max_padding;         // share of a batch
    std::size_t max_elements;   // of a batch, 0: any number
    bool direct;                // rows that fill one run of slots stay where they are
};

// What gather_variable did: elements of each row, padding included, 0: rows must be looked at one by one; the slot from which
// on they were left where they lie, -1: they were copied.
struct Gathered {
    std::size_t elements;
    std::int64_t first;
};

// Elements of a row of these sizes, -1: one is negative, or they are more than the capacity. A size of 0 excuses no other:
// where rows are padded to the largest, it would be everybody's.
inline std::int64_t elements(const VariableRows& spec, const std::int64_t* sizes) {
    std::uint64_t most = spec.unit;
    bool empty = false;
    for (std::size_t i = 0; i < spec.extents; ++i) {
        if (sizes[i] < 0) return -1;
        empty |= sizes[i] == 0;
        const std::uint64_t size = sizes[i] ? static_cast<std::uint64_t>(sizes[i]) : 1;
        if (size > spec.capacity / most) return -1;
        most *= size;
    }
    return empty ? 0 : static_cast<std::int64_t>(most);
}

// Copy the rows of the tickets to `out`, padded with zeros to the largest; `sizes` gets their extents, read once. Nothing is
// copied where `out` is too small: its caller makes room for rows x Gathered.elements and asks again.
inline Gathered gather_variable(const VariableRows& spec, const std::byte* slots, const std::int64_t* extents,
                                const Ticket* tickets, std::size_t n, std::int64_t* sizes, std::byte* out, std::size_t room) {
    std::size_t rows = 0, most = 0, total = 0;
    const std::size_t k = spec.extents;
    bool alike = true, one_run = true;
    for (std::size_t i = 0; i < n; ++i) {
        std::memcpy(sizes + rows * k, extents + tickets[i].first * k, tickets[i].rows * k * sizeof(std::int64_t));
        one_run &= i == 0 || tickets[i].first == tickets[i - 1].first + tickets[i - 1].rows;
        for (std::uint32_t j = 0; j < tickets[i].rows; ++j, ++rows) {
            const std::int64_t* own = sizes + rows * k;
            const std::int64_t count = elements(spec, own);
            if (count < 0) return {0, -1};
            alike &= std::equal(own, own + k, sizes);
            most = std::max(most, static_cast<std::size_t>(count));
            total += static_cast<std::size_t>(count);
        }
    }
    if (most == 0 || (!alike && !spec.pads)) return {0, -1};
    const std::size_t bound = most * rows;
    if (spec.max_elements && bound > spec.max_elements) return {0, -1};
    if (static_cast<double>(bound - total) > spec.max_padding * static_cast<double>(bound)) return {0, -1};
    if (spec.direct && alike && one_run && (rows == 1 || most == spec.capacity)) return {most, tickets[0].first};
    const std::size_t stride = most * spec.item;
    if (rows * stride > room) return {most, -1};
    const std::int64_t* own = sizes;
    for (std::size_t i = 0; i < n; ++i) {
        const std::byte* row = slots + tickets[i].first * spec.capacity * spec.item;
        for (std::uint32_t j = 0; j < tickets[i].rows; ++j, own += k, row += spec.capacity * spec.item, out += stride) {
            const std::size_t used = alike ? stride : static_cast<std::size_t>(elements(spec, own)) * spec.item;
            std::memcpy(out, row, used);
            std::memset(out + used, 0, stride - used);
        }
    }
    return {most, -1};
}

}  // namespace jurybox
