// Tickets in an engine: the record, the check on arrival, the copies of rows, the form of a model's outputs, the counters of
// answered batches, and the prediction of clients' next tickets.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace jurybox {

// What an engine notes in a ticket.
struct TicketState {
    std::uint16_t transport;
    std::uint16_t priority;  // of its lane: kFirst, kNormal or kLast
    std::uint32_t code;
};

// The levels of scoreboard.py. A lane's tickets all have one.
enum : std::uint16_t { kFirst = 1, kNormal = 2, kLast = 3 };

// The same 64 bytes as TICKET in wire.py.
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
        std::uint64_t incarnation;  // in a ticket to an engine: the engine's incarnation
        TicketState state;          // in the engine
    };
};
static_assert(sizeof(Ticket) == 64);

// The same 32 bytes as LANE in scoreboard.py. The supervisor writes it with `grant` and `take_back`.
struct LaneRecord {
    std::uint64_t lease;
    std::uint32_t model;
    std::uint32_t first;
    std::uint32_t rows;
    std::uint32_t pid;
    std::uint32_t arena;  // number of the arena whose rows these are
    std::uint16_t deaths;
    std::uint16_t priority;
};
static_assert(sizeof(LaneRecord) == 32);

// A tensor's rows in a lane: the address of the lane's first row, and the bytes of each row.
struct RowColumn {
    std::byte* first;
    std::size_t row_bytes;
};

inline std::atomic<std::uint64_t>& lease_of(LaneRecord& lane) { return reinterpret_cast<std::atomic<std::uint64_t>&>(lane.lease); }
inline const std::atomic<std::uint64_t>& lease_of(const LaneRecord& lane) {
    return reinterpret_cast<const std::atomic<std::uint64_t>&>(lane.lease);
}

// Lease a lane; called by the supervisor. The lease is stored last with release semantics: a reader that loads it with
// acquire semantics sees the rows that belong to it.
inline void grant(LaneRecord& lane, std::uint32_t model, std::uint32_t first, std::uint32_t rows, std::uint32_t arena,
                  std::uint64_t lease, std::uint16_t priority = kNormal) {
    lane.model = model;
    lane.first = first;
    lane.rows = rows;
    lane.arena = arena;
    lane.priority = priority;
    lease_of(lane).store(lease, std::memory_order_release);
}

// Revoke a lane; called by the supervisor. Its tickets are refused from now on. The other fields stay until the next grant,
// which happens after every engine has confirmed that it no longer uses this lease.
inline void take_back(LaneRecord& lane) { lease_of(lane).store(0, std::memory_order_release); }

// The codes of errors.py that are used here.
enum : std::uint32_t { kOk = 0, kBusy = 2, kModelNotFound = 3, kRefused = 7, kStaleLease = 14 };

struct Admitted {
    std::size_t refused;
    std::size_t rows;  // of the tickets that were admitted
    bool pinned;       // whether one requests a weights version
    bool ranked;       // whether one has another priority than kNormal
};

// The check on arrival, and the count of admitted rows: no lane has more rows in the engine than its lease, whatever its
// client sends. So a client cannot make the engine's memory grow.
class Admission {
  public:
    explicit Admission(std::size_t lanes) : inside_(lanes) {}

    // Set each ticket's transport, priority, model and code. `limits[m]` is the largest ticket of model m, 0 if it is not served;
    // `arenas[m]` is the number of its arena: tickets of lanes in other arenas are refused.
    Admitted admit(Ticket* tickets, std::size_t n, std::uint16_t transport, const LaneRecord* lanes, std::size_t n_lanes,
                   const std::uint32_t* limits, const std::uint32_t* arenas, std::size_t n_models) {
        Admitted result{0, 0, false, false};
        if (n_lanes > inside_.size()) n_lanes = inside_.size();
        for (std::size_t i = 0; i < n; ++i) {
            Ticket& ticket = tickets[i];
            ticket.state.transport = transport;
            ticket.state.priority = kNormal;
            ticket.state.code = kStaleLease;
            if (ticket.lane < n_lanes && ticket.lease != 0) {
                const LaneRecord& lane = lanes[ticket.lane];
                if (lease_of(lane).load(std::memory_order_acquire) == ticket.lease) {
                    const std::uint32_t model = ticket.model = lane.model, rows = lane.rows;
                    const std::uint16_t priority = lane.priority;  // read once: any process can write to the scoreboard
                    if (priority == kFirst || priority == kLast) ticket.state.priority = priority;
                    const std::uint64_t end = std::uint64_t{ticket.first} + ticket.rows;
                    if (model >= n_models || limits[model] == 0 || arenas[model] != lane.arena)
                        ticket.state.code = kModelNotFound;
                    else if (ticket.rows == 0 || ticket.rows > limits[model] || ticket.first < lane.first ||
                             end > std::uint64_t{lane.first} + rows)
                        ticket.state.code = kRefused;
                    else if (inside_[ticket.lane] + ticket.rows > rows)
                        ticket.state.code = kBusy;
                    else
                        ticket.state.code = kOk;
                }
            }
            result.pinned |= ticket.version != 0;
            result.ranked |= ticket.state.priority != kNormal;
            if (ticket.state.code == kOk) {
                inside_[ticket.lane] += ticket.rows;
                result.rows += ticket.rows;
            } else {
                ++result.refused;
            }
        }
        return result;
    }

    // Record that tickets were answered. Return the transport of all of them; -1 if there are several.
    std::int64_t leave(const Ticket* tickets, std::size_t n) {
        bool one = n != 0;
        for (std::size_t i = 0; i < n; ++i) {
            const Ticket& ticket = tickets[i];
            if (ticket.state.code == kOk && ticket.lane < inside_.size()) {
                std::uint64_t& rows = inside_[ticket.lane];
                rows -= ticket.rows < rows ? ticket.rows : rows;
            }
            one &= ticket.state.transport == tickets[0].state.transport;
        }
        return one ? std::int64_t{tickets[0].state.transport} : -1;
    }

  private:
    std::vector<std::uint64_t> inside_;  // rows admitted and not answered, by lane
};

// Return whether the deadline of any ticket has passed.
inline bool any_expired(const Ticket* tickets, std::size_t n, std::int64_t now) {
    for (std::size_t i = 0; i < n; ++i)
        if (tickets[i].deadline != 0 && tickets[i].deadline < now) return true;
    return false;
}

// Copy the tickets' rows of a table to consecutive rows of `out`.
inline void gather(const std::byte* table, std::size_t row_bytes, const Ticket* tickets, std::size_t n, std::byte* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t bytes = tickets[i].rows * row_bytes;
        std::memcpy(out, table + tickets[i].first * row_bytes, bytes);
        out += bytes;
    }
}

// Copy consecutive rows of `in` to the tickets' rows of the table.
inline void scatter(std::byte* table, std::size_t row_bytes, const Ticket* tickets, std::size_t n, const std::byte* in) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t bytes = tickets[i].rows * row_bytes;
        std::memcpy(table + tickets[i].first * row_bytes, in, bytes);
        in += bytes;
    }
}

// ---- a model's outputs

// A tensor as its library describes it: DLTensor of DLPack 1.
struct DlTensor {
    void* data;
    std::int32_t device, device_number;
    std::int32_t dimensions;
    std::uint8_t kind, bits;  // of an element
    std::uint16_t lanes;
    const std::int64_t* shape;
    const std::int64_t* strides;  // in elements
    std::uint64_t offset;         // in bytes
};
static_assert(sizeof(DlTensor) == 48);

constexpr std::int32_t kDlCpu = 1;
constexpr std::uint8_t kDlComplex = 5;

// What one row of a tensor is.
struct RowForm {
    std::uint8_t kind, bits;
    std::vector<std::int64_t> shape;

    explicit RowForm(const DlTensor& like)
        : kind(like.kind), bits(like.bits), shape(like.shape + (like.dimensions > 0), like.shape + like.dimensions) {}

    std::size_t bytes() const {
        std::size_t elements = 1;
        for (const std::int64_t size : shape) elements *= static_cast<std::size_t>(size);
        return elements * bits / 8;
    }

    // Return the memory of a tensor of exactly `rows` such rows; null if it is another one, is not on the CPU, or has gaps.
    const std::byte* rows_of(const DlTensor& tensor, std::size_t rows) const {
        if (tensor.device != kDlCpu || tensor.kind != kind || tensor.bits != bits || tensor.lanes != 1 ||
            tensor.dimensions != static_cast<std::int32_t>(shape.size()) + 1 || tensor.data == nullptr)
            return nullptr;
        std::int64_t step = 1;
        for (std::size_t i = shape.size() + 1; i-- > 0;) {
            const std::int64_t size = i == 0 ? static_cast<std::int64_t>(rows) : shape[i - 1];
            if (tensor.shape[i] != size || (size != 1 && tensor.strides[i] != step)) return nullptr;
            step *= size;
        }
        return static_cast<const std::byte*>(tensor.data) + tensor.offset;
    }
};

// ---- counters: an engine's part of the scoreboard

constexpr std::size_t kBatchBuckets = 20;
constexpr std::size_t kTimeBuckets = 40;

// The same as COUNTERS in scoreboard.py. Histograms count powers of two: bucket i holds values in [2^(i-1), 2^i).
struct Counters {
    std::uint64_t requests, rows, batches, failed, expired, refused, not_held, cache_hits, cache_misses, version, newest, updates;
    std::int64_t adopted;
    std::uint64_t waiting, sessions;
    std::uint64_t queue_total_ns, forward_total_ns, request_total_ns, adopt_total_ns;
    std::uint64_t batch_rows[kBatchBuckets];
    std::uint64_t queue_ns[kTimeBuckets], forward_ns[kTimeBuckets], request_ns[kTimeBuckets], adopt_ns[kTimeBuckets];
};

inline std::size_t bucket(std::uint64_t value, std::size_t buckets) {
    const std::size_t bits = value ? 64 - static_cast<std::size_t>(__builtin_clzll(value)) : 0;
    return bits < buckets ? bits : buckets - 1;
}

// Clients use the same clock, but their values are not trusted: times are limited to the range of the histogram.
inline std::uint64_t elapsed(std::int64_t since, std::int64_t until) {
    constexpr std::int64_t kMost = std::int64_t{1} << (kTimeBuckets - 1);
    if (since >= until) return 0;
    return static_cast<std::uint64_t>(since > until - kMost ? until - since : kMost);
}

// Copy an engine's counters to the scoreboard. It counts in a private record, because any process can write to the
// scoreboard; only `waiting` is set there directly.
inline void show(const Counters& own, Counters& shown) {
    const std::uint64_t waiting = shown.waiting;
    std::memcpy(&shown, &own, sizeof(Counters));
    shown.waiting = waiting;
}

// Count a batch; `began` and `ended` are ns of CLOCK_MONOTONIC. The record has one writer, and readers read single words.
inline void count_batch(Counters& counters, const Ticket* tickets, std::size_t n, std::size_t rows, std::int64_t began,
                        std::int64_t ended) {
    counters.requests += n;
    counters.rows += rows;
    counters.batches += 1;
    counters.batch_rows[bucket(rows, kBatchBuckets)] += 1;
    const std::uint64_t forward = elapsed(began, ended);
    counters.forward_total_ns += forward;
    counters.forward_ns[bucket(forward, kTimeBuckets)] += 1;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t queue = elapsed(tickets[i].submitted, began);
        const std::uint64_t request = elapsed(tickets[i].submitted, ended);
        counters.queue_total_ns += queue;
        counters.request_total_ns += request;
        counters.queue_ns[bucket(queue, kTimeBuckets)] += 1;
        counters.request_ns[bucket(request, kTimeBuckets)] += 1;
    }
}

// ---- arrivals

// Predicts which clients are about to send again; see engine/batches.py.
class ArrivalTracker {
  public:
    explicit ArrivalTracker(std::size_t lanes) : lanes_(lanes) {}

    // The number of quick clients that were answered and have not sent again.
    std::size_t away() const { return away_; }

    // How many of them were answered before the last batch, so that they have had its whole time to send.
    std::size_t overdue() const { return away_ - recent_; }

    // How many of them were prompt the last time.
    std::size_t prompt() const { return prompt_; }

    // Record tickets that have arrived. A client is quick if its ticket arrives within `quick_ns` of its last answer, and
    // prompt if it was sent within `prompt_ns`.
    void came(const Ticket* tickets, std::size_t n, std::int64_t now, std::int64_t quick_ns, std::int64_t prompt_ns = 0) {
        for (std::size_t i = 0; i < n; ++i) {
            if (tickets[i].lane >= lanes_.size()) continue;
            Pace& pace = lanes_[tickets[i].lane];
            away_ -= pace.away;
            recent_ -= pace.away && pace.batch == batch_;
            prompt_ -= pace.away && pace.prompt;
            pace.quick = now - pace.answered <= quick_ns;
            const std::int64_t sent = std::min(tickets[i].submitted, now);  // by the client's own account
            const bool soon = sent <= pace.answered || sent - pace.answered <= prompt_ns;
            pace.prompt = pace.quick && prompt_ns > 0 && soon;
            pace.away = false;
        }
    }

    // Record tickets that were answered, as the last batch.
    void answered(const Ticket* tickets, std::size_t n, std::int64_t now) {
        ++batch_;
        recent_ = 0;
        for (std::size_t i = 0; i < n; ++i) {
            if (tickets[i].lane >= lanes_.size()) continue;
            Pace& pace = lanes_[tickets[i].lane];
            pace.answered = now;
            recent_ += pace.quick && !(pace.away && pace.batch == batch_);  // a lane may have several tickets in a batch
            pace.batch = batch_;
            away_ += std::size_t{pace.quick} - std::size_t{pace.away};
            prompt_ += std::size_t{pace.prompt && !pace.away};
            pace.away = pace.quick;
        }
    }

    // Stop waiting for the clients that are overdue now, until they are quick again.
    void stays_away() {
        for (Pace& pace : lanes_) {
            if (pace.away && pace.batch != batch_) leave(pace);
        }
    }

    // The same for the prompt clients.
    void not_prompt() {
        for (Pace& pace : lanes_) {
            if (pace.away && pace.prompt) leave(pace);
        }
    }

  private:
    struct Pace {
        std::int64_t answered = 0;
        std::uint64_t batch = 0;  // the one that answered it last
        bool quick = false, prompt = false;
        bool away = false;
    };

    void leave(Pace& pace) {
        --away_;
        recent_ -= pace.batch == batch_;
        prompt_ -= pace.prompt;
        pace.quick = pace.prompt = pace.away = false;
    }

    std::vector<Pace> lanes_;
    std::size_t away_ = 0, recent_ = 0, prompt_ = 0;  // `recent_` of `away_` were answered with the last batch
    std::uint64_t batch_ = 0;
};

}  // namespace jurybox
