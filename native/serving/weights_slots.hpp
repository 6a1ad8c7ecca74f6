// One or two slots of weights with sequence counters: a sequence lock (Boehm, "Can seqlocks get along with programming
// language memory models?", MSPC 2012) over memory that outlives any of the processes that map it.
//
// The writer makes a slot's counter odd, writes the slot, makes the counter even, and then announces the slot as the newest.
// With two slots it writes the one that is not the newest, so a reader of the newest is only disturbed by a writer that
// publishes twice during its copy. The counter shows that, and the reader starts again with the newest slot. Neither side
// waits, and a writer that is killed at any instruction leaves the newest slot intact.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/bytes.hpp"
#include "common/wait.hpp"

namespace jurybox {

// From this size on a publication exceeds a core's caches, and streaming stores are faster.
inline constexpr std::size_t kStreamFrom = std::size_t{1} << 20;

// The words that synchronise processes; each group has its own cache line. All zeros: nothing has been published.
struct WeightsControl {
    struct alignas(64) Channel {
        std::atomic<std::uint64_t> newest;  // version * 2 + slot, in one word, so that both change together
        Futex announced;                      // changes with every publication
    } channel;
    struct alignas(64) Slot {
        std::atomic<std::uint64_t> sequence;  // odd while the slot is written, or if its writer died
        std::atomic<std::uint64_t> version;
        std::atomic<std::uint64_t> published_ns;  // CLOCK_MONOTONIC
        std::atomic<std::uint64_t> extra_bytes;
        std::atomic<std::uint64_t> check;  // checksum of the three preceding words and the extra; see check_of
    } slot[2];
};
static_assert(sizeof(WeightsControl) == 192, "the layout is part of the protocol");

// A tensor, or any run of bytes, to copy to or from a slot. NaN and infinities of a floating dtype are the words of `width`
// bytes in which every bit of `mask` is set; width 0: nothing to check.
struct WeightsPart {
    std::uint64_t address;  // in this process
    std::uint64_t offset;   // in the slot, a multiple of 8
    std::uint64_t bytes;
    std::uint64_t width;
    std::uint64_t mask;
};

// A reader's record of the slot that it is about to copy.
struct WeightsClaim {
    std::uint64_t version = 0;  // 0: nothing can be read now
    std::uint64_t sequence = 0;
    std::uint64_t published_ns = 0;
    std::uint64_t extra_bytes = 0;
    unsigned slot = 0;
    bool damaged = false;  // a process that is not a publisher has written to the slot
};

// A checksum, because any process that maps the memory can write to it: damaged words must not look like a publication.
inline std::uint64_t check_of(std::uint64_t version, std::uint64_t published_ns, const std::byte* extra, std::uint64_t extra_bytes) {
    const std::uint64_t words[3] = {version, published_ns, extra_bytes};
    return std::uint64_t{crc32c(words, sizeof words)} << 32 | crc32c(extra, extra_bytes);
}

template <typename Word>
inline bool all_finite(const std::byte* at, std::size_t bytes, Word mask) {
    // Without a branch the compiler vectorises the loop, and the memory traffic of the copy hides its time.
    Word bad = 0;
    for (std::size_t i = 0; i + sizeof(Word) <= bytes; i += sizeof(Word)) {
        Word word;
        std::memcpy(&word, at + i, sizeof word);
        bad = static_cast<Word>(bad | static_cast<Word>((word & mask) == mask));
    }
    return bad == 0;
}

inline bool all_finite(const std::byte* at, std::size_t bytes, std::uint64_t width, std::uint64_t mask) {
    switch (width) {
        case 1: return all_finite(at, bytes, static_cast<std::uint8_t>(mask));
        case 2: return all_finite(at, bytes, static_cast<std::uint16_t>(mask));
        case 4: return all_finite(at, bytes, static_cast<std::uint32_t>(mask));
        case 8: return all_finite(at, bytes, mask);
        default: return true;
    }
}

class WeightsSlots {
public:
    // `slots` slots of `stride` bytes each from `data` on; a slot holds `weights_bytes`, then the extra.
    WeightsSlots(void* control, std::byte* data, std::size_t stride, std::size_t weights_bytes, unsigned slots)
        : weights_bytes_(weights_bytes), slots_(slots), control_(static_cast<WeightsControl*>(control)), data_(data), stride_(stride) {}

    std::uint64_t newest() const { return control_->channel.newest.load(std::memory_order_acquire) / 2; }
    std::size_t extra_room() const { return stride_ - weights_bytes_; }
    std::byte* slot_data(unsigned slot) const { return data_ + slot * stride_; }

    // ---- the publisher; a file lock ensures that there is only one --------------------------------------------------

    // Announce a version that a dead publisher completed but did not announce. A partly written slot stays marked, and is the
    // next to be written. Return the newest version.
    std::uint64_t take_over() {
        const unsigned slot = next_slot();
        const auto& head = control_->slot[slot];
        const std::uint64_t version = head.version.load(std::memory_order_acquire);
        const std::uint64_t extra = head.extra_bytes.load(std::memory_order_relaxed);
        if (head.sequence.load(std::memory_order_acquire) % 2 == 0 && version > newest() && extra <= extra_room() &&
            head.check.load(std::memory_order_relaxed) ==
                check_of(version, head.published_ns.load(std::memory_order_relaxed), slot_data(slot) + weights_bytes_, extra))
            announce(slot, version);
        return newest();
    }

    // Mark the slot to write and return its number. Until `commit`, readers see the previous version (two slots) or wait (one
    // slot).
    unsigned begin() {
        const unsigned slot = next_slot();
        auto& sequence = control_->slot[slot].sequence;
        sequence.store(sequence.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
        // The memory model requires a release fence; the full one also keeps streaming stores after the mark.
        fence_full();
        return slot;
    }

    void commit(unsigned slot, std::uint64_t version, const std::byte* extra, std::size_t extra_bytes) {
        auto& head = control_->slot[slot];
        if (extra_bytes) copy_in(slot_data(slot) + weights_bytes_, extra, extra_bytes, false);
        const auto now = static_cast<std::uint64_t>(monotonic_ns());
        head.version.store(version, std::memory_order_relaxed);
        head.published_ns.store(now, std::memory_order_relaxed);
        head.extra_bytes.store(extra_bytes, std::memory_order_relaxed);
        head.check.store(check_of(version, now, extra, extra_bytes), std::memory_order_relaxed);
        stream_fence();
        head.sequence.store(head.sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
        announce(slot, version);
    }

    // Publish all parts. Return -1, or with `check` the number of the first part with NaN or infinity, and publish nothing.
    // It takes one pass over the source: blocks are checked while they are in the cache.
    std::int64_t publish(const WeightsPart* parts, std::size_t n, const std::byte* extra, std::size_t extra_bytes,
                         std::uint64_t version, bool check) {
        // With one slot, an abandoned publication would destroy the previous version, so the check comes first.
        if (check && slots_ == 1) {
            if (const std::int64_t bad = first_bad(parts, n); bad >= 0) return bad;
            check = false;
        }
        const bool stream = total(parts, n) >= kStreamFrom;
        const unsigned slot = begin();
        for (std::size_t i = 0; i < n; ++i) {
            const auto* from = reinterpret_cast<const std::byte*>(parts[i].address);
            std::byte* to = slot_data(slot) + parts[i].offset;
            const std::size_t block = check && parts[i].width ? kBlock : parts[i].bytes;
            for (std::size_t at = 0; at < parts[i].bytes; at += block) {
                const std::size_t bytes = std::min<std::size_t>(block, parts[i].bytes - at);
                if (check && !all_finite(from + at, bytes, parts[i].width, parts[i].mask)) return static_cast<std::int64_t>(i);
                copy_in(to + at, from + at, bytes, stream);
            }
        }
        commit(slot, version, extra, extra_bytes);
        return -1;
    }

    static std::int64_t first_bad(const WeightsPart* parts, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) {
            const auto* from = reinterpret_cast<const std::byte*>(parts[i].address);
            if (!all_finite(from, parts[i].bytes, parts[i].width, parts[i].mask)) return static_cast<std::int64_t>(i);
        }
        return -1;
    }

    // ---- readers; there may be any number ---------------------------------------------------------------------------

    // Return the newest slot, if it can be read now. A copy of it is valid if `holds` returns true afterwards.
    WeightsClaim claim() const {
        WeightsClaim claim;
        const std::uint64_t newest = control_->channel.newest.load(std::memory_order_acquire);
        if (newest == 0) return claim;
        claim.slot = slots_ == 1 ? 0 : static_cast<unsigned>(newest % 2);
        const auto& head = control_->slot[claim.slot];
        claim.sequence = head.sequence.load(std::memory_order_acquire);
        if (claim.sequence % 2) return claim;
        claim.published_ns = head.published_ns.load(std::memory_order_relaxed);
        claim.extra_bytes = head.extra_bytes.load(std::memory_order_relaxed);
        const std::uint64_t version = head.version.load(std::memory_order_relaxed);
        // A slot that was rewritten since `newest` was read may hold a version that is not announced yet. Returning to the
        // announced one later would make versions go backwards for this reader. The announcement will follow soon.
        if (!holds(claim) || version != newest / 2) return claim;
        claim.version = version;
        return claim;
    }

    bool holds(const WeightsClaim& claim) const {
        fence_acquire();
        return control_->slot[claim.slot].sequence.load(std::memory_order_relaxed) == claim.sequence;
    }

    // Try to read all parts; their addresses are the targets. Return false if nothing can be read now, or if the writer
    // overtook the copy. The counter is checked every megabyte, so that an overtaken copy stops early and the next attempt has
    // the writer's whole period. `verify` is false only in the test that shows that the counter is needed.
    bool try_read(const WeightsPart* parts, std::size_t n, std::byte* extra, WeightsClaim& claim, bool verify) const {
        claim = this->claim();
        if (claim.version == 0) return false;
        if ((claim.damaged = claim.extra_bytes > extra_room())) return false;
        const std::uint64_t check = control_->slot[claim.slot].check.load(std::memory_order_relaxed);
        const bool stream = total(parts, n) >= kStreamFrom;
        const std::byte* slot = slot_data(claim.slot);
        copy_out(extra, slot + weights_bytes_, claim.extra_bytes, false);
        for (std::size_t i = 0; i < n; ++i) {
            auto* to = reinterpret_cast<std::byte*>(parts[i].address);
            for (std::size_t at = 0; at < parts[i].bytes; at += kChunk) {
                if (verify && at > 0 && !holds(claim)) return false;
                copy_out(to + at, slot + parts[i].offset + at, std::min<std::size_t>(kChunk, parts[i].bytes - at), stream);
            }
        }
        stream_fence();  // another thread may use the bytes next
        if (!verify) return true;
        if (!holds(claim)) return false;
        claim.damaged = check != check_of(claim.version, claim.published_ns, extra, claim.extra_bytes);
        return !claim.damaged;
    }

    // Try until a read is complete, `deadline_ns` (monotonic) has passed (version 0), or damage is found.
    WeightsClaim read(const WeightsPart* parts, std::size_t n, std::byte* extra, std::int64_t deadline_ns, bool verify,
                      std::uint64_t& tries) const {
        const Futex& announced = control_->channel.announced;
        WeightsClaim claim;
        for (tries = 1;; ++tries) {
            const std::uint32_t seen = announced.load(std::memory_order_acquire);
            if (try_read(parts, n, extra, claim, verify) || claim.damaged) return claim;
            const std::int64_t now = monotonic_ns();
            if (now >= deadline_ns) return {};
            // An overtaken reader can read the newer version at once. It must only wait for the next announcement if the
            // single slot is being written, or if nothing has been published.
            if (claim.version == 0 && (slots_ == 1 || newest() == 0)) futex_wait(announced, seen, deadline_ns);
            // No writer overtakes so often: the words were damaged, and the next publication corrects them.
            else if (tries % kOvertaken == 0)
                futex_wait(announced, seen, std::min<std::int64_t>(deadline_ns, now + 50'000'000));
        }
    }

    // Wait until a version newer than `seen` is announced, or `deadline_ns` (monotonic) has passed.
    bool wait_newer(std::uint64_t seen, std::int64_t deadline_ns) const {
        for (;;) {
            const std::uint32_t before = control_->channel.announced.load(std::memory_order_acquire);
            if (newest() > seen) return true;
            if (monotonic_ns() >= deadline_ns) return false;
            futex_wait(control_->channel.announced, before, deadline_ns);
        }
    }

protected:
    std::size_t weights_bytes_;
    unsigned slots_;

private:
    static constexpr std::size_t kBlock = std::size_t{1} << 15;  // fits into the L1 cache
    static constexpr std::uint64_t kOvertaken = 1000;
    static constexpr std::size_t kChunk = std::size_t{1} << 20;

    unsigned next_slot() const {
        const std::uint64_t newest = control_->channel.newest.load(std::memory_order_relaxed);
        return slots_ == 1 ? 0 : static_cast<unsigned>((newest % 2) ^ 1);
    }

    void announce(unsigned slot, std::uint64_t version) {
        control_->channel.newest.store(version * 2 + slot, std::memory_order_release);
        control_->channel.announced.fetch_add(1, std::memory_order_release);
        futex_wake(control_->channel.announced);
    }

    static std::size_t total(const WeightsPart* parts, std::size_t n) {
        std::size_t bytes = 0;
        for (std::size_t i = 0; i < n; ++i) bytes += parts[i].bytes;
        return bytes;
    }

    WeightsControl* control_;
    std::byte* data_;
    std::size_t stride_;
};

}  // namespace jurybox
