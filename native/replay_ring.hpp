// The ring: rows in shared memory, written by many processes and read by many, without a lock.
//
// A writer takes tickets 0, 1, 2, ... with one atomic add; ticket t belongs into slot t modulo capacity. Every slot
// has a sequence word: 2 t + 1 while ticket t is written there, 2 t + 2 once it is whole, 0 when nothing is. The
// writer moves it to odd by compare-and-swap, so two writers that meet in one slot after a full lap can not mix their
// rows: the one who finds the slot taken, by a living writer or by one who was killed there, takes a new ticket. So a
// killed writer costs its slot. A reader copies and then looks whether the word is still the same (Boehm 2012, see
// replay_copy.hpp); if not, it draws another row. All is borrowed memory: shared, mapped from a file, or the heap.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay_field.hpp"
#include "replay_wait.hpp"
#include "sum_tree.hpp"

namespace jurybox::replay {

using Ticket = std::uint64_t;
using Sequence = std::atomic<std::uint64_t>;

constexpr std::uint64_t kMagic = 0x31594C5052424A4AULL;  // "JJBRPLY1"
constexpr std::uint32_t kVersion = 1;

enum class Full : std::uint32_t { overwrite = 0, block = 1, drop_newest = 2 };

// What all processes share beside the rows. Each word that writers or readers hammer has a cache line of its own.
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
    alignas(64) std::atomic<std::uint64_t> tail;      // tickets below it are given up by the readers
    alignas(64) std::atomic<std::uint64_t> retried;   // tickets given back because their slot was taken
    std::atomic<std::uint64_t> dropped;               // rows refused by a full ring
    std::atomic<std::uint64_t> stale;                 // priorities that came after their row was overwritten
    std::atomic<std::uint64_t> top_priority;          // what a new row gets
    alignas(64) std::atomic<std::uint64_t> sampled;   // rows handed out
    std::atomic<std::uint64_t> redrawn;               // draws thrown away
    alignas(64) Signal room;                          // moves when a writer may go on
    alignas(64) Signal rows;                          // moves when a sampler may go on
};

// How a row hangs together with the rows before and after it in its episode.
struct Link {
    static constexpr std::uint64_t kFinal = 1;       // of `before`: no transition, only the last observation
    static constexpr std::uint64_t kTerminated = 2;  // of `before`: the episode is over for good after this row
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
    Link* links = nullptr;  // null: rows are on their own
    SumTree tree;           // not present: uniform sampling only
    std::size_t slot_bytes = 0;
    std::uint64_t capacity = 0;
    std::vector<Field> fields;
    bool verify = true;  // off only in the test that proves that the tests would notice

    std::byte* slot(std::size_t i) const { return slots + i * slot_bytes; }
    Sequence& sequence(std::size_t i) const { return *reinterpret_cast<Sequence*>(slot(i)); }
    std::size_t slot_of(Ticket t) const { return t % capacity; }

    std::uint64_t reserved() const { return control->reserved.load(std::memory_order_acquire); }
    std::uint64_t tail() const { return control->tail.load(std::memory_order_acquire); }
    std::uint64_t added() const { return reserved() - control->retried.load(std::memory_order_relaxed); }

    // The oldest ticket that may still be there.
    Ticket oldest() const {
        const std::uint64_t now = reserved();
        const std::uint64_t lap = now > capacity ? now - capacity : 0;
        const std::uint64_t given_up = tail();
        return lap > given_up ? lap : given_up;
    }
    std::uint64_t size() const {
        const Ticket low = oldest();  // before reserved: the difference must not be negative
        const std::uint64_t n = reserved() - low;
        return n < capacity ? n : capacity;
    }

    // ---- writing

    Ticket reserve(std::uint64_t n) const { return control->reserved.fetch_add(n, std::memory_order_relaxed); }

    // Only as many as fit in front of the tail; the number taken is the return value.
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
            // Acquire: the former writer's stores come before ours.
        } while (!word.compare_exchange_weak(seen, writing(t), std::memory_order_acquire, std::memory_order_relaxed));
        fence_release();  // a reader that sees any byte of ours then also sees the odd word
        return true;
    }

    // Claim the slot of `t`, or of a new ticket while that is taken. False: every slot is taken.
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

    bool holds(Ticket t) const { return sequence(slot_of(t)).load(std::memory_order_acquire) == whole(t); }

    // After copying: whether what was copied is the row whose word was `seen`.
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

}  // namespace jurybox::replay
