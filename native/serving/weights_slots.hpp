// One or two slots of weights under sequence counters: a sequence lock (Boehm, "Can seqlocks get along with programming
// language memory models?", MSPC 2012) over memory that outlives any of the processes that map it.
//
// The writer marks a slot's counter odd, writes, marks it even, and only then says that this slot is the newest. With
// two slots it writes the one that is not the newest, so a reader of the newest is disturbed only by a writer that
// publishes twice while it copies; the counter shows that, and the reader starts again with what is then the newest.
// Nobody waits, and a writer killed at any instruction leaves the newest slot whole.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/bytes.hpp"
#include "common/wait.hpp"

namespace jurybox {

// From this size on a publication is larger than what a core's own caches hold, and streaming wins.
inline constexpr std::size_t kStreamFrom = std::size_t{1} << 20;

// The words that processes agree by; each group has its cache line. All zero means: nothing published yet.
struct WeightsControl {
    struct alignas(64) Channel {
        std::atomic<std::uint64_t> newest;  // version * 2 + slot; one word, so that nobody sees half of the pair
        Futex announced;                      // changes with every publication
    } channel;
    struct alignas(64) Slot {
        std::atomic<std::uint64_t> sequence;  // odd while the slot is written, or was when its writer died
        std::atomic<std::uint64_t> version;
        std::atomic<std::uint64_t> published_ns;  // CLOCK_MONOTONIC
        std::atomic<std::uint64_t> extra_bytes;
        std::atomic<std::uint64_t> check;  // of the three words before and of the extra, see check_of
    } slot[2];
};
static_assert(sizeof(WeightsControl) == 192, "the layout is part of the protocol");

// A tensor, or any run of bytes, on its way in or out. NaN and infinities of a floating dtype are the words, `width`
// bytes wide, in which every bit of `mask` is set; width 0: nothing to check.
struct WeightsPart {
    std::uint64_t address;  // in this process
    std::uint64_t offset;   // in the slot, a multiple of 8
    std::uint64_t bytes;
    std::uint64_t width;
    std::uint64_t mask;
};

// What a reader knows of the slot it is about to copy.
struct WeightsClaim {
    std::uint64_t version = 0;  // 0: there is nothing to read now
    std::uint64_t sequence = 0;
    std::uint64_t published_ns = 0;
    std::uint64_t extra_bytes = 0;
    unsigned slot = 0;
    bool damaged = false;  // somebody else than a publisher has written there
};

// Words that a stray or hostile write changed must not pass for a publication: who has the memory mapped can write to it.
inline std::uint64_t check_of(std::uint64_t version, std::uint64_t published_ns, const std::byte* extra, std::uint64_t extra_bytes) {
    const std::uint64_t words[3] = {version, published_ns, extra_bytes};
    return std::uint64_t{crc32c(words, sizeof words)} << 32 | crc32c(extra, extra_bytes);
}

template <typename Word>
inline bool all_finite(const std::byte* at, std::size_t bytes, Word mask) {
    // Without a branch in the loop the compiler vectorises it, and the check hides behind the copy's memory traffic.
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
    // `slots` runs of `stride` bytes from `data` on; a slot is `weights_bytes`, then room for the extra.
    WeightsSlots(void* control, std::byte* data, std::size_t stride, std::size_t weights_bytes, unsigned slots)
        : control_(static_cast<WeightsControl*>(control)), data_(data), stride_(stride), weights_bytes_(weights_bytes),
          slots_(slots) {}

    std::uint64_t newest() const { return control_->channel.newest.load(std::memory_order_acquire) / 2; }
    std::size_t extra_room() const { return stride_ - weights_bytes_; }
    std::byte* slot_data(unsigned slot) const { return data_ + slot * stride_; }

    // ---- the publisher; there is one at a time, which a file lock sees to -------------------------------------------

    // Announce what a dead publisher finished but did not announce. What it left half written stays marked, and is the next
    // slot to be written. Returns the newest version.
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

    // Marks the slot to write and returns its number. Until `commit` readers see the version before it (with two slots)
    // or wait (with one).
    unsigned begin() {
        const unsigned slot = next_slot();
        auto& sequence = control_->slot[slot].sequence;
        sequence.store(sequence.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
        // A release fence is what the model asks for; the full one also keeps streaming stores behind the mark.
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

    // A whole publication. Returns -1, or the number of the first part that holds NaN or infinity when `check` asks for
    // that; nothing is published then. One pass over the source: blocks are checked while they are in the cache anyway.
    std::int64_t publish(const WeightsPart* parts, std::size_t n, const std::byte* extra, std::size_t extra_bytes,
                         std::uint64_t version, bool check) {
        // With one slot a publication that is given up half-way would take the last whole version with it.
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

    // ---- readers, as many as there are ------------------------------------------------------------------------------

    // The newest slot, if it can be read now. What is copied from it is whole if `holds` says so afterwards.
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
        // A slot rewritten since `newest` was read may hold a version not announced yet: going back from that to the
        // announced one would let versions run backwards under this reader. Its announcement is the next thing to come.
        if (!holds(claim) || version != newest / 2) return claim;
        claim.version = version;
        return claim;
    }

    bool holds(const WeightsClaim& claim) const {
        fence_acquire();
        return control_->slot[claim.slot].sequence.load(std::memory_order_relaxed) == claim.sequence;
    }

    // One try at a whole read; parts' addresses are targets. False: nothing to read now, or overtaken by the writer.
    // The counter is looked at every megabyte, so that a copy that can't be whole any more stops early and the next
    // try has the writer's full round to itself. `verify` is off only in the test that shows what the counter is for.
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
        stream_fence();  // the bytes may go to another thread next
        if (!verify) return true;
        if (!holds(claim)) return false;
        claim.damaged = check != check_of(claim.version, claim.published_ns, extra, claim.extra_bytes);
        return !claim.damaged;
    }

    // Tries until one read is whole or `deadline_ns` (monotonic) has passed: version 0 then. Or until it finds damage.
    WeightsClaim read(const WeightsPart* parts, std::size_t n, std::byte* extra, std::int64_t deadline_ns, bool verify,
                      std::uint64_t& tries) const {
        const Futex& announced = control_->channel.announced;
        WeightsClaim claim;
        for (tries = 1;; ++tries) {
            const std::uint32_t seen = announced.load(std::memory_order_acquire);
            if (try_read(parts, n, extra, claim, verify) || claim.damaged) return claim;
            const std::int64_t now = monotonic_ns();
            if (now >= deadline_ns) return {};
            // Overtaken means that there is a newer version to read at once. Only a single slot under its writer, or a
            // channel without a publication, leaves nothing to do but to wait for the next announcement.
            if (claim.version == 0 && (slots_ == 1 || newest() == 0)) futex_wait(announced, seen, deadline_ns);
            // No writer overtakes this often: somebody wrote nonsense there, which the next publication corrects.
            else if (tries % kOvertaken == 0)
                futex_wait(announced, seen, std::min<std::int64_t>(deadline_ns, now + 50'000'000));
        }
    }

    // Waits until a version newer than `seen` is announced, or `deadline_ns` (monotonic) has passed.
    bool wait_newer(std::uint64_t seen, std::int64_t deadline_ns) const {
        for (;;) {
            const std::uint32_t before = control_->channel.announced.load(std::memory_order_acquire);
            if (newest() > seen) return true;
            if (monotonic_ns() >= deadline_ns) return false;
            futex_wait(control_->channel.announced, before, deadline_ns);
        }
    }

private:
    static constexpr std::size_t kBlock = std::size_t{1} << 15;  // fits the first cache
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
    std::size_t weights_bytes_;
    unsigned slots_;
};

}  // namespace jurybox
