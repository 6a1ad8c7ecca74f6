// Rows with sessions or of variable size: the session and step of each row, and the used part of its slot.
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

// Flags of a batch with other rows than next steps of sessions.
enum Found : std::uint32_t { kBegins = 1, kFlags = 2, kAgain = 4, kWrong = 8 };
// Whether a row can be computed, or the reason why its ticket is refused.
enum Verdict : std::uint8_t { kFits = 0, kLost = 1, kTwice = 2 };

// The lease and the next step of each of a model's sessions. The index of a session is the arena row of its number in its
// lane, so there are as many indices as rows. A state is used only for the lease that it was created for, and in the order
// of the steps. `read` reads a batch, then `step` is called for some of its rows. Records are read once, and only the copy
// is used.
class SessionBook {
  public:
    explicit SessionBook(std::size_t sessions) : kept_(sessions) {}

    // The number of sessions that have begun and whose lease was not forgotten.
    std::size_t in_use() const { return in_use_; }

    // Read the records of the tickets' rows from the column, whose bounds were checked. Fills records, places and verdicts,
    // one per row, and returns flags of `Found`. A ticket with an invalid row is not computed, so a later ticket of its
    // sessions in this batch is checked against the same step.
    std::uint32_t read(const Ticket* tickets, std::size_t n, const SessionRecord* column, const LaneRecord* lanes, std::size_t n_lanes,
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

    // Copy the states of the batch's rows from a table of all sessions, whose size was checked, or back to it.
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

    // Return whether a row is still the next step of its session: an earlier ticket of the session may have failed.
    bool fits(std::size_t row) const {
        const Row& asked = rows_[row];
        return asked.place < kept_.size() && follows(asked.step.number, asked.step.lease, kept_[asked.place].done);
    }

    // Record that a row of the batch was computed and its state stored.
    void step(std::size_t row) {
        const Row& asked = rows_[row];
        if (asked.place >= kept_.size()) return;
        Step& done = kept_[asked.place].done;
        in_use_ += done.lease == 0;
        done = {asked.step.lease, asked.step.number + 1};
    }

    // Drop the sessions of a lease that has ended.
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
        Step done;   // the expected lease and step
        Step ahead;  // the same after the rows of this batch that were read
        std::uint64_t batch = 0, ticket = 0;  // the last ones with this session
    };
    struct Row {
        std::uint64_t place;
        Step step;
    };

    // The largest number has no successor: it would be 0, which restarts the session.
    static bool follows(std::uint32_t number, std::uint64_t lease, const Step& expected) {
        return number == 0 || (lease == expected.lease && number == expected.number && number != UINT32_MAX);
    }

    std::vector<Session> kept_;
    std::vector<Row> rows_;
    std::uint64_t batch_ = 0, ticket_ = 0;
    std::size_t in_use_ = 0;
};

// The layout of one variable input's rows in their slots, and the limits of a batch.
struct VariableRows {
    std::size_t extents;        // numbers of a row's size
    std::size_t unit;           // elements of a row whose sizes are all 1
    std::size_t capacity;       // elements of a slot
    std::size_t item;           // bytes of an element
    bool pads;                  // whether padding is only appended to rows
    double max_padding;         // the maximum share of a batch
    std::size_t max_elements;   // of a batch; 0: any number
    bool direct;                // whether rows in consecutive slots are used in place
};

// The result of gather_variable: the elements of each row with padding, 0 if rows must be handled one by one; the first slot
// of rows used in place, -1 if they were copied.
struct Gathered {
    std::size_t elements;
    std::int64_t first;
};

// The elements of a row of these sizes; -1 if a size is negative or the capacity is exceeded. Sizes beside a size of 0 are
// checked, too, since all rows may be padded to the largest of each size.
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

// Copy the tickets' rows to `out`, padded with zeros to the largest, and their extents, which are read once, to `sizes`. If
// `out` is too small, nothing is copied: the caller allocates rows x Gathered.elements and calls again.
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
