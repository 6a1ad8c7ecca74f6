// The ring: rows in shared memory, written and read by many processes without a lock.
//
// Writers take tickets 0, 1, 2, ... with one atomic add; ticket t belongs to slot t modulo capacity. Every slot has a
// sequence word: 2 t + 1 while ticket t is being written, 2 t + 2 when it is complete, 0 if nothing was written. The
// writer makes it odd by compare-and-swap, so two writers that meet in one slot after a full lap cannot mix their rows: a
// writer that finds the slot taken, by a living or a killed writer, takes a new ticket. So a killed writer costs its slot.
// A reader copies a row and then checks that the word is unchanged (Boehm 2012, see common/bytes.hpp); otherwise it draws
// another row. The memory is borrowed: shared, mapped from a file, or on the heap.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/wait.hpp"
#include "replay/draw.hpp"
#include "replay/field.hpp"

namespace jurybox::replay {

using Ticket = std::uint64_t;
using Sequence = std::atomic<std::uint64_t>;

constexpr std::uint64_t kMagic = 0x31594C5052424A4AULL;  // "JJBRPLY1"
constexpr std::uint32_t kVersion = 1;

enum class Full : std::uint32_t { overwrite = 0, block = 1, drop_newest = 2 };

// The data that all processes share besides the rows. Frequently written words have their own cache lines.
struct Control {
    std::uint64_t magic;
    std::uint32_t version;
    Full full;
    std::uint64_t capacity;
    std::uint64_t slot_bytes;
    double samples_per_insert;  // 0: no limiter
    double least_difference;
    double most_difference;
    std::uint64_t least_rows;

    alignas(64) std::atomic<std::uint64_t> reserved;  // tickets handed out
    alignas(64) std::atomic<std::uint64_t> tail;      // tickets below it are no longer read
    alignas(64) std::atomic<std::uint64_t> retried;   // tickets that were replaced because their slot was taken
    std::atomic<std::uint64_t> dropped;               // rows refused by a full ring
    std::atomic<std::uint64_t> stale;                 // priority updates for overwritten rows
    std::atomic<std::uint64_t> top_priority;          // the priority of a new row
    alignas(64) std::atomic<std::uint64_t> sampled;   // rows handed out
    std::atomic<std::uint64_t> redrawn;               // draws that were discarded
    alignas(64) Signal room;                          // changes when a writer may continue
    alignas(64) Signal rows;                          // changes when a sampler may continue
};

// The rows before and after a row in its episode.
struct Link {
    static constexpr std::uint64_t kFinal = 1;       // of `before`: no transition, only the last observation
    static constexpr std::uint64_t kTerminated = 2;  // of `before`: the episode terminated after this row
    static constexpr std::uint64_t kEnded = ~std::uint64_t{0};

    std::atomic<std::uint64_t> before;  // (ticket + 1) * 4 + flags; ticket + 1 = 0: the first of its episode
    std::atomic<std::uint64_t> after;   // ticket + 1; 0: not written yet; kEnded: the last of its episode
};

constexpr std::uint64_t writing(Ticket t) { return 2 * t + 1; }
constexpr std::uint64_t whole(Ticket t) { return 2 * t + 2; }
constexpr bool is_whole(std::uint64_t sequence) { return sequence != 0 && (sequence & 1) == 0; }
constexpr Ticket ticket_of(std::uint64_t sequence) { return sequence / 2 - 1; }

struct Ring {
    Control* control = nullptr;
    std::byte* slots = nullptr;
    Link* links = nullptr;  // null: rows are independent
    SumTree tree;           // not present: uniform sampling only
    std::size_t slot_bytes = 0;
    std::uint64_t capacity = 0;
    std::vector<Field> fields;
    bool verify = true;  // false only in the test that shows that tests would detect torn rows

    std::byte* slot(std::size_t i) const { return slots + i * slot_bytes; }
    Sequence& sequence(std::size_t i) const { return *reinterpret_cast<Sequence*>(slot(i)); }
    std::size_t slot_of(Ticket t) const { return t % capacity; }

    std::uint64_t reserved() const { return control->reserved.load(std::memory_order_acquire); }
    std::uint64_t tail() const { return control->tail.load(std::memory_order_acquire); }
    std::uint64_t added() const { return reserved() - control->retried.load(std::memory_order_relaxed); }

    // The oldest ticket whose row may still exist.
    Ticket oldest() const {
        const std::uint64_t now = reserved();
        const std::uint64_t lap = now > capacity ? now - capacity : 0;
        const std::uint64_t given_up = tail();
        return lap > given_up ? lap : given_up;
    }
    std::uint64_t size() const {
        const Ticket low = oldest();  // read before `reserved`, so that the difference is not negative
        const std::uint64_t n = reserved() - low;
        return n < capacity ? n : capacity;
    }

    // ---- writing

    Ticket reserve(std::uint64_t n) const { return control->reserved.fetch_add(n, std::memory_order_relaxed); }

    // Reserve at most as many tickets as fit before the tail; return their number.
    std::uint64_t reserve_within(std::uint64_t n, Ticket& first) const {
        std::uint64_t now = control->reserved.load(std::memory_order_relaxed);
        while (true) {
            const std::uint64_t used = now - tail();
            const std::uint64_t room = used < capacity ? capacity - used : 0;
            const std::uint64_t take = n < room ? n : room;
            if (take == 0) return 0;
            if (control->reserved.compare_exchange_weak(now, now + take, std::memory_order_relaxed)) {
                first = now;
                return take;
            }
        }
    }

    bool claim(Ticket t) const {
        Sequence& word = sequence(slot_of(t));
        std::uint64_t seen = word.load(std::memory_order_relaxed);
        do {
            if ((seen & 1) != 0 || seen >= writing(t)) return false;
            // Acquire: the previous writer's stores precede ours.
        } while (!word.compare_exchange_weak(seen, writing(t), std::memory_order_acquire, std::memory_order_relaxed));
        fence_release();  // a reader that sees any of our bytes also sees the odd word
        return true;
    }

    // Claim the slot of `t`, or of new tickets while slots are taken. Return false if every slot is taken.
    bool claim_any(Ticket& t) const {
        for (std::uint64_t tries = 0; !claim(t); ++tries) {
            if (tries >= capacity) return false;
            control->retried.fetch_add(1, std::memory_order_relaxed);
            t = reserve(1);
        }
        return true;
    }

    void commit(Ticket t) const { sequence(slot_of(t)).store(whole(t), std::memory_order_release); }
    void abandon(Ticket t) const { sequence(slot_of(t)).store(0, std::memory_order_release); }

    // ---- reading

    // The priority of a new row, in the tree's units: the highest so far, but at most kMostOfMean times the mean. Otherwise the
    // rows after a single outlier would take nearly all draws.
    std::uint64_t first_priority() const {
        constexpr std::uint64_t kMostOfMean = 100;
        const std::uint64_t top = control->top_priority.load(std::memory_order_relaxed);
        const std::uint64_t rows = std::min<std::uint64_t>(reserved(), capacity), total = tree.total();
        return rows == 0 || total < rows ? top : std::min(top, total / rows * kMostOfMean);
    }

    bool holds(Ticket t) const { return sequence(slot_of(t)).load(std::memory_order_acquire) == whole(t); }

    // Return, after a copy, whether it is the row whose word was `seen`.
    bool still(std::size_t i, std::uint64_t seen) const {
        fence_acquire();
        return sequence(i).load(std::memory_order_relaxed) == seen;
    }

    // ---- the limiter: samples per insert, after Reverb's SampleToInsertRatio (Cassirer et al. 2021, arXiv:2102.04736)

    bool limited() const { return control->samples_per_insert > 0; }

    bool may_insert(std::uint64_t n) const {
        const std::uint64_t rows = added() + n;
        if (rows <= control->least_rows) return true;
        return static_cast<double>(rows) * control->samples_per_insert -
                   static_cast<double>(control->sampled.load(std::memory_order_acquire)) <=
               control->most_difference;
    }
    bool may_sample(std::uint64_t n) const {
        if (size() < control->least_rows) return false;
        return static_cast<double>(added()) * control->samples_per_insert -
                   static_cast<double>(control->sampled.load(std::memory_order_acquire) + n) >=
               control->least_difference;
    }
};

// ---- writing rows: from columns of memory, strided or not

// The values of one field: rows are row_stride apart; the elements of a row are contiguous, or placed by `dims` and `strides`.
struct Source {
    static constexpr int kMaxDims = 16;
    const std::byte* data = nullptr;
    std::ptrdiff_t row_stride = 0;
    int dims = 0;  // 0: rows are contiguous
    std::size_t item = 0;
    std::size_t shape[kMaxDims] = {};
    std::ptrdiff_t strides[kMaxDims] = {};
};

// Copies the elements of a strided row in order, in runs as long as the strides allow: copy(at, from, run, n, stride) copies n
// runs, which are `stride` bytes apart, to the bytes from `at` on.
template <class Copy>
inline void walk(const Source& s, const std::byte* row, std::size_t run, int outer, Copy&& copy) {
    std::size_t n = outer > 0 ? s.shape[--outer] : 1;
    const std::ptrdiff_t stride = s.strides[outer];
    while (outer > 0 && s.strides[outer - 1] == stride * static_cast<std::ptrdiff_t>(n)) n *= s.shape[--outer];
    std::size_t index[Source::kMaxDims] = {};
    std::size_t written = 0;
    while (true) {
        copy(written, row, run, n, stride);
        written += run * n;
        int d = outer - 1;
        for (; d >= 0; --d) {
            row += s.strides[d];
            if (++index[d] < s.shape[d]) break;
            row -= s.strides[d] * static_cast<std::ptrdiff_t>(s.shape[d]);
            index[d] = 0;
        }
        if (d < 0) return;
    }
}

// Copies n runs of a size that the compiler knows.
template <std::size_t Run>
inline void pack_runs(std::byte* to, const std::byte* from, std::size_t n, std::ptrdiff_t stride) {
#pragma GCC unroll 8
    for (std::size_t i = 0; i < n; ++i, from += stride) std::memcpy(to + Run * i, from, Run);
}

inline bool put_row(const Field& f, const Source& s, std::size_t row, std::byte* slot, bool past_caches) {
    const std::byte* from = s.data + static_cast<std::ptrdiff_t>(row) * s.row_stride;
    if (s.dims == 0) return put(f, from, slot, past_caches);
    std::size_t run = s.item;
    int outer = s.dims;
    while (outer > 0 && s.strides[outer - 1] == static_cast<std::ptrdiff_t>(run)) run *= s.shape[--outer];
    if (f.codec == Codec::raw && run != 1 && run != 2 && run != 4 && run != 8) {
        walk(s, from, run, outer, [&](std::size_t at, const std::byte* in, std::size_t bytes, std::size_t n, std::ptrdiff_t stride) {
            for (std::size_t i = 0; i < n; ++i, at += bytes, in += stride) copy_in(slot + f.offset + at, in, bytes);
        });
        return true;
    }
    // Encoders need contiguous rows. Single elements are packed, too: copied one by one to the slot they take five times as long.
    thread_local std::vector<std::byte> packed;
    packed.resize(f.bytes);
    walk(s, from, run, outer, [&](std::size_t at, const std::byte* in, std::size_t bytes, std::size_t n, std::ptrdiff_t stride) {
        std::byte* to = packed.data() + at;
        switch (bytes) {
            case 1: return pack_runs<1>(to, in, n, stride);
            case 2: return pack_runs<2>(to, in, n, stride);
            case 4: return pack_runs<4>(to, in, n, stride);
            case 8: return pack_runs<8>(to, in, n, stride);
            default:
                for (; n > 0; --n, to += bytes, in += stride) std::memcpy(to, in, bytes);
        }
    });
    return put(f, packed.data(), slot, past_caches);
}

// A writer's position in its episode. It belongs to one process and is not thread-safe.
struct Stream {
    std::uint64_t last = 0;  // ticket + 1 of the newest row; 0: none
    bool ended = true;       // whether the next row begins an episode
    bool adding = false;     // whether a call that may wait, and run Python's signal handlers meanwhile, adds rows to it
};

constexpr std::size_t kCached = std::size_t{32} << 20;  // a smaller ring may fit into a last-level cache

enum class Written { yes, taken, no_slot, too_dense };

class Writer {
  public:
    explicit Writer(Ring& ring) : ring_(ring) {}

    // Write row `row` of `sources` at ticket `t`; `taken`: another writer is using its slot, or was killed there. ends: 0:
    // the episode continues, 1: truncated, 2: terminated.
    Written write(Ticket t, const Source* sources, std::size_t row, Stream* stream, unsigned ends, bool final_row) {
        if (!ring_.claim(t)) return Written::taken;
        const std::size_t at = ring_.slot_of(t);
        std::byte* slot = ring_.slot(at);
        const std::size_t n = ring_.fields.size();
        const bool past_caches = ring_.capacity * ring_.slot_bytes > kCached;
        for (std::size_t i = 0; i < n; ++i) {
            if (!put_row(ring_.fields[i], sources[i], row, slot, past_caches)) {
                ring_.abandon(t);
                failed_field = i;
                return Written::too_dense;
            }
        }
        if (past_caches) stream_fence();
        finish(t, at, stream, ends, final_row);
        return Written::yes;
    }

    // Link a filled slot to its episode and make it visible.
    void finish(Ticket t, std::size_t at, Stream* stream, unsigned ends, bool final_row) {
        if (ring_.links == nullptr || stream == nullptr) {
            if (ring_.links != nullptr) {
                ring_.links[at].before.store(0, std::memory_order_relaxed);
                ring_.links[at].after.store(Link::kEnded, std::memory_order_relaxed);
            }
            ring_.commit(t);
        } else {
            const bool follows = stream->last != 0 && (!stream->ended || final_row);
            const std::uint64_t flags = (final_row ? Link::kFinal : 0) | (ends == 2 ? Link::kTerminated : 0);
            ring_.links[at].before.store((follows ? stream->last * 4 : 0) | flags, std::memory_order_relaxed);
            ring_.links[at].after.store(ends != 0 || final_row ? Link::kEnded : 0, std::memory_order_relaxed);
            ring_.commit(t);
            // The previous row may be overwritten by now, and then this link is wrong: readers follow it only to a row that
            // points back.
            if (follows && ring_.holds(stream->last - 1))
                ring_.links[ring_.slot_of(stream->last - 1)].after.store(t + 1, std::memory_order_release);
            stream->last = final_row ? 0 : t + 1;
            stream->ended = ends != 0 || final_row;
        }
    }

    // Mark the newest row of `stream` as the last of its episode.
    void end(Stream& stream) {
        if (stream.last != 0 && !stream.ended && ring_.holds(stream.last - 1))
            ring_.links[ring_.slot_of(stream.last - 1)].after.store(Link::kEnded, std::memory_order_release);
        stream.ended = true;
    }

    std::size_t failed_field = 0;

  private:
    Ring& ring_;
};

}  // namespace jurybox::replay
