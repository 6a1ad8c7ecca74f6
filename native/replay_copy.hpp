// Copies of memory that another process may be writing: the data half of a sequence lock.
//
// H.-J. Boehm, "Can seqlocks get along with programming language memory models?" (MSPC 2012): the data of a sequence
// lock must be read and written by relaxed atomics with fences around, because the reader's copy races with a writer
// and is only thrown away afterwards. A memcpy between the same fences gives the same instructions at the memory's
// full speed on every compiler that knows fences, but is a race by the letter of the standard. Builds under the thread
// sanitizer therefore copy word by word with relaxed atomics, so that what the sanitizer proves is the protocol.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
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

namespace jurybox::replay {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared memory needs address-free atomics");

#if JURYBOX_TSAN

// GCC's sanitizer does not model fences; every access around them is an atomic call here, which no compiler reorders.
inline void fence_acquire() {}
inline void fence_release() {}

inline void copy_in(std::byte* shared, const std::byte* own, std::size_t bytes, bool = false) {
    for (std::size_t i = 0; i < bytes; ++i)
        reinterpret_cast<std::atomic<std::byte>*>(shared + i)->store(own[i], std::memory_order_relaxed);
}
inline void copy_out(std::byte* own, const std::byte* shared, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i)
        own[i] = reinterpret_cast<const std::atomic<std::byte>*>(shared + i)->load(std::memory_order_relaxed);
}

#else

inline void fence_acquire() { std::atomic_thread_fence(std::memory_order_acquire); }
inline void fence_release() { std::atomic_thread_fence(std::memory_order_release); }

// A call of memcpy costs more than copying a small field: those go inline, in blocks of 16 whose last one overlaps.
inline void copy_field(std::byte* to, const std::byte* from, std::size_t bytes) {
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

// Past the caches: a plain store first reads the line that it is about to overwrite, which halves the speed of writing
// a large row into a ring that no cache holds.
inline void stream_in(std::byte* shared, const std::byte* own, std::size_t bytes) {
#if defined(__x86_64__)
    if (reinterpret_cast<std::uintptr_t>(shared) % 16 == 0) {
        std::size_t at = 0;
        for (; at + 64 <= bytes; at += 64) {
            for (std::size_t part = at; part < at + 64; part += 16)
                _mm_stream_si128(reinterpret_cast<__m128i*>(shared + part), _mm_loadu_si128(reinterpret_cast<const __m128i*>(own + part)));
        }
        std::memcpy(shared + at, own + at, bytes - at);
        _mm_sfence();  // such stores are ordered by nothing else, the commit's release included
        return;
    }
#endif
    std::memcpy(shared, own, bytes);
}

inline void copy_in(std::byte* shared, const std::byte* own, std::size_t bytes, bool past_caches = false) {
    if (past_caches && bytes >= 2048)
        stream_in(shared, own, bytes);
    else
        copy_field(shared, own, bytes);
}
inline void copy_out(std::byte* own, const std::byte* shared, std::size_t bytes) { copy_field(own, shared, bytes); }

#endif

}  // namespace jurybox::replay
