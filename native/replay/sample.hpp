// Reads rows of a ring into columns: drawing, following episodes' links, copying, verifying, redrawing.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "common/thread_pool.hpp"
#include "replay/ring.hpp"

namespace jurybox::replay {

// An array of the output: `count` rows of one field, starting `from` rows after the drawn one (or with `ahead`, after the row
// that follows the n steps); `stride` bytes between positions.
struct Column {
    Field field;  // a copy: the ring that it was read from may be gone
    std::byte* out;
    std::size_t stride;
    std::int32_t from = 0;
    std::uint32_t count = 1;
    bool ahead = false;  // of a sequence: last observations are rows, too
    std::uint8_t* valid = nullptr;  // (n, count): whether the row exists
};

// The requirements for the rows around a drawn one.
struct Window {
    bool linked = false;        // whether any of the following is used
    std::uint32_t back = 0;     // rows before the first
    std::uint32_t steps = 0;    // transitions to follow (n-step returns, next observations); 0: none
    std::uint32_t length = 0;   // rows of a sequence from the drawn one on; 0: none
    bool full_length = false;   // redraw if the episode ends within a sequence
    bool next_needed = false;   // a non-terminal end without its last observation is no transition
    std::optional<Field> reward;
    bool reward_is_double = false;
    double gamma = 1.0;
    float* returns = nullptr;   // (n,): discounted sum of the rewards of the steps
    float* discount = nullptr;  // (n,): gamma to the power of the steps, 0 after a terminal one
};

struct Request {
    std::size_t n = 0;
    std::size_t first = 0;  // position of the first of them in the outputs
    bool replacement = true;
    bool prioritized = false;
    double beta = 0.0;
    std::uint64_t key = 0;
    std::uint64_t mark = 0;  // added to every returned index, to identify its part
    std::vector<Column> columns;
    Window window;
    std::int64_t* indices = nullptr;
    float* weights = nullptr;
};

enum class Sampled { yes, empty, exhausted, unreadable };

class Sampler {
  public:
    Sampler(const Ring& ring, Request& request)
        : ring_(ring),
          request_(request),
          tail_(ring.tail()),
          oldest_(ring.oldest()),
          count_(ring.size()),
          base_(oldest_ % ring.capacity),
          order_(count_ == 0 ? 1 : count_, request.key) {}

    Sampled run(ThreadPool* threads) {
        const std::size_t n = request_.n;
        if (n == 0) return Sampled::yes;
        if (count_ == 0) return Sampled::empty;
        if (!request_.replacement && n > count_) return Sampled::exhausted;
        spare_.store(n, std::memory_order_relaxed);
        if (request_.prioritized) {
            total_ = ring_.tree.total();
            if (total_ == 0) return Sampled::empty;
            draw_by_priority();
            chances_.resize(n);
        }
        std::size_t bytes = 0;
        for (const Column& c : request_.columns) bytes += c.field.bytes * c.count;
        // A part is at least a quarter of a megabyte, so that waking a thread pays.
        const std::size_t rows_a_part = std::max<std::size_t>(4, (std::size_t{1} << 18) / (bytes == 0 ? 1 : bytes));
        const std::size_t parts = (n + rows_a_part - 1) / rows_a_part;
        if (threads != nullptr && parts > 1)
            threads->run(parts, [&](std::size_t part) { copy(part * rows_a_part, std::min(n, (part + 1) * rows_a_part)); });
        else
            copy(0, n);
        ring_.control->sampled.fetch_add(n, std::memory_order_acq_rel);
        if (const auto redrawn = redrawn_.load(std::memory_order_relaxed)) ring_.control->redrawn.fetch_add(redrawn, std::memory_order_relaxed);
        if (exhausted_.load(std::memory_order_relaxed)) return Sampled::exhausted;
        if (unreadable_.load(std::memory_order_relaxed)) return Sampled::unreadable;
        if (request_.prioritized) weigh();
        return Sampled::yes;
    }

  private:
    static constexpr std::size_t kAhead = 8;
    static constexpr std::uint64_t kTries = 20000;

    std::size_t slot_at(std::uint64_t offset) const {
        const std::uint64_t s = base_ + offset;
        return s >= ring_.capacity ? s - ring_.capacity : s;
    }

    // Stratified draws, as in the paper: position i draws from the i-th of n equal parts of the sum.
    void draw_by_priority() {
        std::vector<std::uint64_t> targets(request_.n);
        const auto n = request_.n;
        for (std::size_t i = 0; i < n; ++i) {
            const auto low = static_cast<std::uint64_t>(static_cast<Wide>(total_) * i / n);
            const auto high = static_cast<std::uint64_t>(static_cast<Wide>(total_) * (i + 1) / n);
            targets[i] = low + below(mixed(request_.key, i), high > low ? high - low : 1);
        }
        drawn_.resize(n);
        ring_.tree.find(targets.data(), n, drawn_.data());
    }

    std::size_t candidate(std::size_t i) const {
        if (request_.prioritized) return drawn_[i];
        if (!request_.replacement) return slot_at(order_(i));
        return slot_at(below(mixed(request_.key, i), count_));
    }

    // Replace a failed draw; return false if there is no further one.
    bool another(std::size_t i, std::uint64_t attempt, std::size_t& slot) {
        redrawn_.fetch_add(1, std::memory_order_relaxed);
        if (!request_.replacement) {
            const std::uint64_t next = spare_.fetch_add(1, std::memory_order_relaxed);
            if (next >= count_) {
                exhausted_.store(true, std::memory_order_relaxed);
                return false;
            }
            slot = slot_at(order_(next));
            return true;
        }
        if (attempt >= kTries) {
            unreadable_.store(true, std::memory_order_relaxed);
            return false;
        }
        const std::uint64_t random = mixed(mixed(request_.key ^ 0xA0761D6478BD642FULL, i), attempt);
        if (!request_.prioritized) {
            slot = slot_at(below(random, count_));
            return true;
        }
        const std::uint64_t target = below(random, total_);
        ring_.tree.find(&target, 1, &slot);
        return true;
    }

    void copy(std::size_t from, std::size_t to) {
        const Window& w = request_.window;
        std::vector<Ticket> rows(w.linked ? w.back + 1 + std::max(w.steps, w.length) : 0);
        // Rows are prefetched some positions before they are copied, so that cache misses overlap.
        std::size_t slots[kAhead];
        const std::size_t fetched = std::min<std::size_t>(ring_.slot_bytes, 320);
        const auto draw = [&](std::size_t i) {
            const std::size_t slot = candidate(i);
            slots[i % kAhead] = slot;
            const std::byte* line = ring_.slot(slot);
            for (std::size_t at = 0; at < fetched; at += 64) __builtin_prefetch(line + at);
            if (ring_.links != nullptr) __builtin_prefetch(ring_.links + slot);
        };
        for (std::size_t i = from; i < std::min(from + kAhead, to); ++i) draw(i);
        for (std::size_t i = from; i < to; ++i) {
            std::size_t slot = slots[i % kAhead];
            if (i + kAhead < to) draw(i + kAhead);
            std::uint64_t attempt = 0;
            while (!(request_.window.linked ? copy_window(i, slot, rows.data()) : copy_row(i, slot)))
                if (!another(i, attempt++, slot)) return;
        }
    }

    bool copy_row(std::size_t i, std::size_t slot) {
        const std::size_t position = request_.first + i;
        const std::uint64_t seen = ring_.sequence(slot).load(std::memory_order_acquire);
        if (!is_whole(seen)) {
            if (ring_.verify || seen == 0) return false;
        } else if (ticket_of(seen) < tail_) {
            return false;  // no longer read
        }
        if (ring_.links != nullptr && (ring_.links[slot].before.load(std::memory_order_relaxed) & Link::kFinal) != 0) return false;
        const std::byte* from = ring_.slot(slot);
        for (const Column& c : request_.columns) take(c.field, from, c.out + position * c.stride);
        if (ring_.verify && !ring_.still(slot, seen)) return false;
        note(i, slot, is_whole(seen) ? ticket_of(seen) : seen / 2);
        return true;
    }

    void note(std::size_t i, std::size_t slot, Ticket t) {
        if (request_.indices != nullptr) request_.indices[request_.first + i] = static_cast<std::int64_t>(t | request_.mark);
        if (request_.prioritized) chances_[i] = ring_.tree.leaf(slot);
    }

    // ---- windows

    // The rows around a drawn one: self[-before] .. self[after].
    struct Neighbours {
        Ticket* self;
        std::uint32_t before, after;
        std::uint32_t transitions;  // from self[0] on, without a final observation
        bool ended;                 // whether the end of the episode was reached
    };

    const Link& link(Ticket t) const { return ring_.links[ring_.slot_of(t)]; }

    bool terminates(Ticket t) const { return (link(t).before.load(std::memory_order_relaxed) & Link::kTerminated) != 0; }

    // Return false if the draw cannot be used: it is no transition, or rows around it are overwritten or not written yet.
    bool resolve(Neighbours& near) const {
        const Window& w = request_.window;
        std::uint64_t before = link(*near.self).before.load(std::memory_order_relaxed);
        if ((before & Link::kFinal) != 0) return false;
        for (near.before = 0; near.before < w.back && before / 4 != 0; ++near.before) {
            const Ticket earlier = before / 4 - 1;
            if (!ring_.holds(earlier)) return false;
            *(near.self - near.before - 1) = earlier;
            before = link(earlier).before.load(std::memory_order_relaxed);
        }
        const std::uint32_t want = std::max(w.steps, w.length == 0 ? 0 : w.length - (w.next_needed ? 0 : 1));
        near.transitions = 1;
        near.ended = false;
        for (near.after = 0; near.after < want && !near.ended;) {
            const Ticket here = near.self[near.after];
            const std::uint64_t after = link(here).after.load(std::memory_order_acquire);
            if (after == 0) return false;
            if (after == Link::kEnded) {
                near.ended = true;
                break;
            }
            const Ticket next = after - 1;
            if (!ring_.holds(next)) return false;
            const std::uint64_t flags = link(next).before.load(std::memory_order_relaxed);
            if (flags / 4 != here + 1) return false;  // a wrong link
            near.self[++near.after] = next;
            near.ended = (flags & Link::kFinal) != 0;
            if (!near.ended) ++near.transitions;
        }
        const bool left_none = near.ended && near.transitions > near.after;  // no last observation
        if (w.length != 0 && w.next_needed && left_none && !terminates(near.self[near.after])) --near.transitions;
        return near.transitions != 0;
    }

    bool copy_window(std::size_t i, std::size_t slot, Ticket* rows) {
        const Window& w = request_.window;
        const std::uint64_t seen = ring_.sequence(slot).load(std::memory_order_acquire);
        if (!is_whole(seen) || ticket_of(seen) < tail_) return false;
        Neighbours near{rows + w.back, 0, 0, 0, false};
        *near.self = ticket_of(seen);
        if (!resolve(near)) return false;
        if (w.full_length && near.transitions < w.length) return false;

        const std::uint32_t steps = std::min(w.steps, near.transitions);
        std::int64_t next = steps;
        bool terminated = false;
        if (w.steps != 0) {
            terminated = terminates(near.self[steps - 1]);
            if (steps > near.after) {  // the episode ended without a last observation
                if (w.next_needed && !terminated) return false;
                next = near.after;  // any row will do, since its discount is 0
            }
        }
        const std::size_t position = request_.first + i;
        for (const Column& c : request_.columns) {
            std::byte* out = c.out + position * c.stride;
            const std::int64_t begin = (c.ahead ? next : 0) + c.from;
            const std::int64_t end = !c.ahead ? near.transitions : w.length != 0 ? near.after + 1 : next + 1;
            for (std::uint32_t k = 0; k < c.count; ++k, out += c.field.bytes) {
                const std::int64_t at = begin + k;
                const bool there = at >= -static_cast<std::int64_t>(near.before) && at < end;
                if (there)
                    take(c.field, ring_.slot(ring_.slot_of(near.self[at])), out);
                else
                    std::memset(out, 0, c.field.bytes);
                if (c.valid != nullptr) c.valid[position * c.count + k] = there;
            }
        }
        if (w.reward) {
            double sum = 0.0, factor = 1.0;
            for (std::uint32_t k = 0; k < steps; ++k, factor *= w.gamma) sum += factor * reward(near.self[k]);
            w.returns[position] = static_cast<float>(sum);
        }
        if (w.discount != nullptr)
            w.discount[position] = terminated ? 0.0F : static_cast<float>(std::pow(w.gamma, static_cast<double>(steps)));

        if (ring_.verify) {
            for (const Ticket* t = near.self - near.before; t <= near.self + near.after; ++t)
                if (!ring_.still(ring_.slot_of(*t), whole(*t))) return false;
        }
        note(i, slot, *near.self);
        return true;
    }

    double reward(Ticket t) const {
        const std::byte* kept = ring_.slot(ring_.slot_of(t)) + request_.window.reward->offset;
        if (request_.window.reward_is_double) {
            double value;
            copy_out(reinterpret_cast<std::byte*>(&value), kept, sizeof value);
            return value;
        }
        float value;
        copy_out(reinterpret_cast<std::byte*>(&value), kept, sizeof value);
        return static_cast<double>(value);
    }

    // Importance-sampling weights (N P(i))^-beta, divided by the largest of the batch, so that N and the sum cancel.
    void weigh() {
        std::uint64_t least = ~std::uint64_t{0};
        for (auto& chance : chances_) {
            if (chance == 0) chance = 1;
            least = std::min(least, chance);
        }
        if (request_.weights == nullptr) return;
        for (std::size_t i = 0; i < request_.n; ++i)
            request_.weights[request_.first + i] = std::pow(static_cast<float>(least) / static_cast<float>(chances_[i]), static_cast<float>(request_.beta));
    }

    const Ring& ring_;
    Request& request_;
    const Ticket tail_;
    const Ticket oldest_;
    const std::uint64_t count_;
    const std::uint64_t base_;
    const Permutation order_;
    std::uint64_t total_ = 0;
    std::vector<std::size_t> drawn_;
    std::vector<std::uint64_t> chances_;
    std::atomic<std::uint64_t> spare_{0}, redrawn_{0};
    std::atomic<bool> exhausted_{false}, unreadable_{false};
};

}  // namespace jurybox::replay
