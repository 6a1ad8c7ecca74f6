// Pictures on their way into rows: base64 of a request's text, and pixels of four bytes, as decoders keep them, to three.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jurybox {

// Copy the first three of every four bytes.
inline void drop_fourth(std::uint8_t* to, const std::uint8_t* from, std::size_t pixels) {
    std::size_t i = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    // Two pixels a step, stored as eight bytes, of which the last two are the next pixel's.
    for (; i + 3 <= pixels; i += 2) {
        std::uint64_t two;
        std::memcpy(&two, from + 4 * i, sizeof two);
        two = (two & 0xFFFFFF) | (two >> 8 & 0xFFFFFF000000);
        std::memcpy(to + 3 * i, &two, sizeof two);
    }
#endif
    for (; i < pixels; ++i) std::memcpy(to + 3 * i, from + 4 * i, 3);
}

namespace base64 {

constexpr std::uint8_t kNone = 0x80;  // of a byte that is no digit

inline constexpr auto kDigits = [] {
    std::array<std::uint8_t, 256> digits{};
    for (auto& digit : digits) digit = kNone;
    constexpr char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (std::uint8_t i = 0; i < 64; ++i) digits[static_cast<unsigned char>(alphabet[i])] = i;
    return digits;
}();

// The number of bytes that a text stands for, where it is padded base64.
inline std::size_t decoded_size(const std::uint8_t* text, std::size_t n) {
    return n < 4 ? 0 : n / 4 * 3 - (text[n - 1] == '=') - (text[n - 1] == '=' && text[n - 2] == '=');
}

// Decode padded base64 (RFC 4648, section 4) without a single byte that is none of it. Gives whether it was such; `to` has
// decoded_size bytes.
inline bool decode(std::uint8_t* to, const std::uint8_t* text, std::size_t n) {
    if (n % 4) return false;
    const std::size_t padding = n / 4 * 3 - decoded_size(text, n), whole = padding ? n - 4 : n;
    std::uint32_t wrong = 0;
    for (std::size_t i = 0; i < whole; i += 4, to += 3) {
        const std::uint32_t a = kDigits[text[i]], b = kDigits[text[i + 1]], c = kDigits[text[i + 2]], d = kDigits[text[i + 3]];
        wrong |= a | b | c | d;
        const std::uint32_t three = a << 18 | b << 12 | c << 6 | d;
        to[0] = static_cast<std::uint8_t>(three >> 16);
        to[1] = static_cast<std::uint8_t>(three >> 8);
        to[2] = static_cast<std::uint8_t>(three);
    }
    if (padding) {
        const std::uint32_t a = kDigits[text[whole]], b = kDigits[text[whole + 1]];
        const std::uint32_t c = padding == 1 ? kDigits[text[whole + 2]] : 0;
        wrong |= a | b | c;
        to[0] = static_cast<std::uint8_t>(a << 2 | b >> 4);
        if (padding == 1) to[1] = static_cast<std::uint8_t>(b << 4 | c >> 2);
    }
    return (wrong & kNone) == 0;
}

}  // namespace base64
}  // namespace jurybox
