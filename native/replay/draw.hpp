// The choice of slots to read: by position, by a permutation, or by priority.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace jurybox::replay {

// ---- random numbers that depend only on a key and a position, so that any number of threads draws the same

__extension__ using Wide = unsigned __int128;

// Element `n` of the SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014) that starts with `key`.
inline std::uint64_t mixed(std::uint64_t key, std::uint64_t n) {
    std::uint64_t z = key + (n + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

// A number below `bound`; for a bound of 2^32 the bias is 2^-32.
inline std::uint64_t below(std::uint64_t random, std::uint64_t bound) {
    return static_cast<std::uint64_t>((static_cast<Wide>(random) * bound) >> 64);
}

// A permutation of [0, size) without a table: a balanced Feistel network over the next even power of two, applied until the
// result is in the range (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
class Permutation {
  public:
    Permutation(std::uint64_t size, std::uint64_t key) : size_(size), key_(key) {
        while (half_bits_ < 31 && (std::uint64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
        mask_ = (std::uint64_t{1} << half_bits_) - 1;
    }
    std::uint64_t operator()(std::uint64_t i) const {
        do i = once(i);
        while (i >= size_);
        return i;
    }

  private:
    std::uint64_t once(std::uint64_t x) const {
        std::uint64_t left = x >> half_bits_, right = x & mask_;
        for (unsigned round = 0; round < 6; ++round) {
            const std::uint64_t next = left ^ (mixed(key_ + round * 0xD1B54A32D192ED03ULL, right) & mask_);
            left = right;
            right = next;
        }
        return left << half_bits_ | right;
    }
    std::uint64_t size_, key_, mask_ = 0;
    unsigned half_bits_ = 1;
};

// ---- by priority

// A sum tree in shared memory, which any number of processes update and draw from without a lock.
//
// Priorities are integers (units of 2^-24). An update adds the difference to every sum above the leaf, and such additions
// commute: after any interleaving of updates the sums are exact, and do not drift like floating-point sums. Nodes have
// sixteen children, so a million leaves take five levels. Except for that and the arithmetic, the tree is that of T. Schaul
// et al., "Prioritized experience replay" (ICLR 2016, arXiv:1511.05952), appendix B.2.1.
class SumTree {
  public:
    static constexpr std::size_t kFan = 16;
    static constexpr std::size_t kMaxLevels = 16;
    static constexpr double kUnit = 1.0 / (1 << 24);
    static constexpr std::uint64_t kMost = std::uint64_t{1} << 38;  // 16384.0; 2^24 such leaves still fit a sum

    using Word = std::atomic<std::uint64_t>;

    SumTree() = default;

    // Create a tree over words(leaves) words, zeroed or with an existing tree.
    SumTree(Word* words, std::size_t leaves) {
        std::size_t n = leaves;
        while (true) {
            level_[levels_] = words;
            size_[levels_] = n;
            words += padded(n);
            ++levels_;
            if (n == 1) break;
            n = (n + kFan - 1) / kFan;
        }
    }

    static std::size_t words(std::size_t leaves) {
        std::size_t total = 0;
        for (std::size_t n = leaves;; n = (n + kFan - 1) / kFan) {
            total += padded(n);
            if (n == 1) return total;
        }
    }

    // Return a priority in the tree's units, never zero, so that every row can be drawn.
    static std::uint64_t quantised(double priority) {
        const double units = priority * (1 << 24);
        if (!(units >= 1.0)) return 1;
        if (units >= static_cast<double>(kMost)) return kMost;
        return static_cast<std::uint64_t>(units);
    }

    bool present() const { return levels_ != 0; }
    std::uint64_t total() const { return level_[levels_ - 1][0].load(std::memory_order_relaxed); }
    std::uint64_t leaf(std::size_t i) const { return level_[0][i].load(std::memory_order_relaxed); }

    // Combines updates of neighbouring leaves, and writes each node once instead of once per leaf.
    class Update {
      public:
        explicit Update(SumTree& tree) : tree_(tree) {}
        Update(const Update&) = delete;
        Update& operator=(const Update&) = delete;
        ~Update() { finish(); }
        // Bring all sums up to date.
        void finish() {
            for (std::size_t l = 1; l < tree_.levels_; ++l) flush(l);
        }
        void set(std::size_t leaf, std::uint64_t priority) {
            const std::uint64_t before = tree_.level_[0][leaf].exchange(priority, std::memory_order_relaxed);
            if (before == priority) return;
            carry(1, leaf / kFan, priority - before);  // modulo 2^64, like every sum
        }

      private:
        void carry(std::size_t l, std::size_t node, std::uint64_t difference) {
            for (; l < tree_.levels_; ++l, node /= kFan) {
                if (node_[l] == node && pending_[l] != 0) {
                    pending_[l] += difference;
                    return;
                }
                const std::uint64_t old = pending_[l];
                const std::size_t old_node = node_[l];
                node_[l] = node;
                pending_[l] = difference;
                if (old == 0) return;
                tree_.level_[l][old_node].fetch_add(old, std::memory_order_relaxed);
                node = old_node;
                difference = old;
            }
        }
        void flush(std::size_t l) {
            if (pending_[l] == 0) return;
            const std::uint64_t difference = pending_[l];
            pending_[l] = 0;
            tree_.level_[l][node_[l]].fetch_add(difference, std::memory_order_relaxed);
            if (l + 1 < tree_.levels_) carry(l + 1, node_[l] / kFan, difference);
        }

        SumTree& tree_;
        std::size_t node_[kMaxLevels] = {};
        std::uint64_t pending_[kMaxLevels] = {};
    };

    void set(std::size_t leaf, std::uint64_t priority) { Update(*this).set(leaf, priority); }

    // Find the leaves of n targets in [0, total), level by level for all, so that cache misses of different targets overlap.
    // A target that is past the end because of a concurrent update gets the last child.
    void find(const std::uint64_t* targets, std::size_t n, std::size_t* leaves) const {
        constexpr std::size_t kBlock = 64;
        std::uint64_t rest[kBlock];
        for (std::size_t from = 0; from < n; from += kBlock) {
            const std::size_t block = n - from < kBlock ? n - from : kBlock;
            for (std::size_t i = 0; i < block; ++i) {
                rest[i] = targets[from + i];
                leaves[from + i] = 0;
            }
            for (std::size_t l = levels_ - 1; l-- > 0;) {
                for (std::size_t i = 0; i < block; ++i) {
                    std::size_t child = leaves[from + i] * kFan;
                    const std::size_t end = child + kFan < size_[l] ? child + kFan : size_[l];
                    std::size_t last = child;
                    for (; child < end; ++child) {
                        const std::uint64_t sum = level_[l][child].load(std::memory_order_relaxed);
                        if (rest[i] < sum) break;
                        if (sum != 0) last = child;
                        rest[i] -= sum;
                    }
                    if (child == end) {
                        child = last;
                        rest[i] = 0;
                    }
                    leaves[from + i] = child;
                    if (l != 0) __builtin_prefetch(&level_[l - 1][child * kFan]);
                }
            }
        }
    }

    // Recompute all sums, after a process was killed between updating a leaf and its sums. No updates may be in progress.
    void rebuild() {
        for (std::size_t l = 1; l < levels_; ++l) {
            for (std::size_t node = 0; node < size_[l]; ++node) {
                std::uint64_t sum = 0;
                for (std::size_t c = node * kFan; c < (node + 1) * kFan && c < size_[l - 1]; ++c)
                    sum += level_[l - 1][c].load(std::memory_order_relaxed);
                level_[l][node].store(sum, std::memory_order_relaxed);
            }
        }
    }

  private:
    static std::size_t padded(std::size_t n) { return (n + kFan - 1) / kFan * kFan; }

    std::size_t levels_ = 0;
    Word* level_[kMaxLevels] = {};
    std::size_t size_[kMaxLevels] = {};
};

}  // namespace jurybox::replay
