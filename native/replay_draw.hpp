// Which slots to read: numbers that depend on a key and a position only, so that any number of threads draws the same.
#pragma once
#include <cstddef>
#include <cstdint>

namespace jurybox::replay {

__extension__ using Wide = unsigned __int128;

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at place `n` of the sequence that `key` begins.
inline std::uint64_t mixed(std::uint64_t key, std::uint64_t n) {
    std::uint64_t z = key + (n + 1) * 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

// A number below `bound`; the bias of a bound of 2^32 is 2^-32.
inline std::uint64_t below(std::uint64_t random, std::uint64_t bound) {
    return static_cast<std::uint64_t>((static_cast<Wide>(random) * bound) >> 64);
}

// A permutation of [0, size) without a table: a balanced Feistel network over the next even power of two, walked until
// it falls inside (J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
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

}  // namespace jurybox::replay
