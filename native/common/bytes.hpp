// Bytes in shared memory: copies that another process may disturb, and a checksum that detects damage.
//
// These copies are the data half of a sequence lock. H.-J. Boehm, "Can seqlocks get along with programming language
// memory models?" (MSPC 2012): the data must be read and written by relaxed atomics between fences, because the reader's
// copy may race with a writer and is then discarded. A memcpy between the same fences compiles to equivalent instructions
// at full memory speed (word-wise atomics take three times as long) on every compiler that supports fences, but the
// standard calls it a data race. So only builds with the thread sanitizer copy by relaxed atomics, which lets the
// sanitizer check the protocol.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define JURYBOX_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define JURYBOX_TSAN 1
#endif
#endif
#ifndef JURYBOX_TSAN
#define JURYBOX_TSAN 0
#endif

namespace jurybox {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared memory needs address-free atomics");

#if JURYBOX_TSAN

// GCC's sanitizer does not model fences. In this build all accesses around them are atomic calls, which compilers do not
// reorder.
inline void fence_acquire() {}
inline void fence_release() {}
inline void fence_full() {}
inline void stream_fence() {}

// Copies whole words where the shared side is aligned, and single bytes elsewhere.
template <bool SharedTarget>
inline void relaxed_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    const auto move = [&](auto word) {
        if constexpr (SharedTarget) {
            std::memcpy(&word, from, sizeof word);
            __atomic_store_n(reinterpret_cast<decltype(word)*>(to), word, __ATOMIC_RELAXED);
        } else {
            word = __atomic_load_n(reinterpret_cast<const decltype(word)*>(from), __ATOMIC_RELAXED);
            std::memcpy(to, &word, sizeof word);
        }
        to += sizeof word, from += sizeof word, bytes -= sizeof word;
    };
    const auto shared = reinterpret_cast<std::uintptr_t>(SharedTarget ? to : from);
    if (shared % sizeof(std::uint64_t) == 0)
        while (bytes >= sizeof(std::uint64_t)) move(std::uint64_t{});
    while (bytes > 0) move(std::uint8_t{});
}

inline void copy_in(std::byte* shared, const std::byte* own, std::size_t bytes, bool = false) { relaxed_copy<true>(shared, own, bytes); }
inline void copy_out(std::byte* own, const std::byte* shared, std::size_t bytes, bool = false) { relaxed_copy<false>(own, shared, bytes); }

#else

inline void fence_acquire() { std::atomic_thread_fence(std::memory_order_acquire); }
inline void fence_release() { std::atomic_thread_fence(std::memory_order_release); }
inline void fence_full() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Orders streaming stores, which a release store does not (Intel SDM vol. 1, 10.4.6.2). Call it after a copy past the
// caches, before the bytes are published or another thread uses them.
inline void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// An inline copy in blocks of 16 bytes, of which the last may overlap: for few bytes a call of memcpy costs more.
inline void copy_small(std::byte* to, const std::byte* from, std::size_t bytes) {
    struct Block {
        std::uint64_t low, high;
    };
    const auto move = [&](auto type, std::size_t at) {
        std::memcpy(&type, from + at, sizeof type);
        std::memcpy(to + at, &type, sizeof type);
    };
    if (bytes > 512) {
        std::memcpy(to, from, bytes);
    } else if (bytes >= 16) {
        for (std::size_t at = 0; at + 16 < bytes; at += 16) move(Block{}, at);
        move(Block{}, bytes - 16);
    } else if (bytes >= 8) {
        move(std::uint64_t{}, 0);
        move(std::uint64_t{}, bytes - 8);
    } else if (bytes >= 4) {
        move(std::uint32_t{}, 0);
        move(std::uint32_t{}, bytes - 4);
    } else {
        for (std::size_t at = 0; at < bytes; ++at) to[at] = from[at];
    }
}

// Copies past the caches (x86-64). A plain store first reads the line that it overwrites, a third of the traffic of a
// memory-bound copy. Also, a large copy does not evict the caller's data from the caches.
inline void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
    constexpr std::size_t line = 64, ahead = 2048;
    const std::size_t head = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
    copy_small(to, from, head);
    to += head, from += head, bytes -= head;
    const std::size_t lines = bytes / line;
    for (std::size_t i = 0; i < lines; ++i, to += line, from += line) {
        const auto* source = reinterpret_cast<const __m128i*>(from);
        auto* target = reinterpret_cast<__m128i*>(to);
        // A prefetch never faults, so it may be past the end. Computed as an integer, since such a pointer is undefined.
        _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + ahead), _MM_HINT_NTA);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    copy_small(to, from, bytes % line);
#else
    std::memcpy(to, from, bytes);
#endif
}

constexpr std::size_t kPastCachesFrom = 2048;  // bytes; for fewer, the partial lines at both ends cost as much as it saves

inline void copy_in(std::byte* shared, const std::byte* own, std::size_t bytes, bool past_caches = false) {
    if (past_caches && bytes >= kPastCachesFrom)
        copy_past_caches(shared, own, bytes);
    else
        copy_small(shared, own, bytes);
}
inline void copy_out(std::byte* own, const std::byte* shared, std::size_t bytes, bool past_caches = false) {
    copy_in(own, shared, bytes, past_caches);
}

#endif

// ---- CRC-32C (Castagnoli, RFC 3720 appendix B.4): on x86-64 with the CPU's instruction if it has one, otherwise with a table

inline std::uint32_t crc32c_by_table(std::uint32_t crc, const std::uint8_t* data, std::size_t n) {
    static constexpr auto table = [] {
        std::array<std::uint32_t, 256> t{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t c = i;
            for (int k = 0; k < 8; ++k) c = (c & 1U) != 0 ? 0x82F63B78U ^ (c >> 1) : c >> 1;
            t[i] = c;
        }
        return t;
    }();
    for (std::size_t i = 0; i < n; ++i) crc = table[(crc ^ data[i]) & 0xFFU] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline std::uint32_t crc32c_by_instruction(std::uint32_t crc, const std::uint8_t* data, std::size_t n) {
    std::uint64_t wide = crc;
    for (; n >= 8; n -= 8, data += 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = static_cast<std::uint32_t>(wide);
    for (; n > 0; --n) crc = _mm_crc32_u8(crc, *data++);
    return crc;
}
#endif

inline std::uint32_t crc32c(const void* bytes, std::size_t n) {
    const auto* data = static_cast<const std::uint8_t*>(bytes);
#if defined(__x86_64__)
    static const bool has = __builtin_cpu_supports("sse4.2") != 0;
    if (has) return ~crc32c_by_instruction(~0U, data, n);
#endif
    return ~crc32c_by_table(~0U, data, n);
}

}  // namespace jurybox
