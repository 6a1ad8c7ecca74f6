// Copies between private memory and memory that another process may be writing or reading at the same time.
//
// A large copy streams past the caches where the processor can (x86-64): a store that bypasses them need not first
// read the line it overwrites, which saves a third of the traffic of a memory-bound copy, and a hundred megabytes of
// weights don't throw out what the batch loop keeps warm.
//
// The protocol above these copies (weights_slots.hpp) expects and repairs a racing write. To the C++ memory model the
// racing bytes must then be atomics; wordwise relaxed atomics cost three times a memcpy, so only the thread sanitizer's
// build, which checks the model, uses them. Every compiler this project supports gives the plain copy the same meaning.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#define JURYBOX_STREAMING 1
#include <emmintrin.h>
#endif

namespace jurybox {

// From this size on a publication is larger than what a core's own caches hold, and streaming wins.
inline constexpr std::size_t kStreamFrom = std::size_t{1} << 20;

#ifdef JURYBOX_STREAMING
inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    constexpr std::size_t line = 64, ahead = 2048;
    const std::size_t head = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
    if (bytes < head + line) {
        std::memcpy(to, from, bytes);
        return;
    }
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    const std::size_t lines = bytes / line;
    for (std::size_t i = 0; i < lines; ++i, to += line, from += line) {
        const auto* source = reinterpret_cast<const __m128i*>(from);
        auto* target = reinterpret_cast<__m128i*>(to);
        // A prefetch never faults, so it may run past the end. As an integer: a pointer past the end would be undefined.
        _mm_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(from) + ahead), _MM_HINT_NTA);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to, from, bytes % line);
}
#endif

// Streaming stores are ordered by no release store (Intel SDM vol. 1, 10.4.6.2): call this before publishing them.
inline void stream_fence() {
#ifdef JURYBOX_STREAMING
    _mm_sfence();
#endif
}

#ifdef __SANITIZE_THREAD__
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
    while (bytes >= sizeof(std::uint64_t)) move(std::uint64_t{});
    while (bytes > 0) move(std::uint8_t{});
}
#endif

// Private memory to shared; `to` is aligned to 8 bytes.
inline void copy_in(std::byte* to, const std::byte* from, std::size_t bytes, [[maybe_unused]] bool stream) {
#if defined(__SANITIZE_THREAD__)
    relaxed_copy<true>(to, from, bytes);
#elif defined(JURYBOX_STREAMING)
    stream ? stream_copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
#else
    std::memcpy(to, from, bytes);
#endif
}

// Shared memory to private; `from` is aligned to 8 bytes.
inline void copy_out(std::byte* to, const std::byte* from, std::size_t bytes, [[maybe_unused]] bool stream) {
#if defined(__SANITIZE_THREAD__)
    relaxed_copy<false>(to, from, bytes);
#elif defined(JURYBOX_STREAMING)
    stream ? stream_copy(to, from, bytes) : static_cast<void>(std::memcpy(to, from, bytes));
#else
    std::memcpy(to, from, bytes);
#endif
}

}  // namespace jurybox
