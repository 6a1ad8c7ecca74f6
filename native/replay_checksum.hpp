// CRC-32C (Castagnoli, RFC 3720 appendix B.4): by instruction where the CPU has one, by table elsewhere.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jurybox::replay {

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

}  // namespace jurybox::replay
