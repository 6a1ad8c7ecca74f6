// Conversions of pictures to rows: finding the long strings in a request's JSON, decoding base64, and converting decoded
// pixels from four bytes to three.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <tmmintrin.h>
#endif

namespace jurybox {

#if defined(__x86_64__)
// Functions for sixteen bytes at a time need SSSE3 (2006). They return how much of the input they have converted; the caller
// converts the rest, which is too short or invalid.
inline bool moves_sixteen() {
    static const bool has = __builtin_cpu_supports("ssse3") != 0;
    return has;
}

__attribute__((target("ssse3"))) inline std::size_t drop_fourth_by_sixteen(std::uint8_t* to, const std::uint8_t* from, std::size_t pixels) {
    const __m128i first_threes = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    const auto load = [](const std::uint8_t* at) __attribute__((target("ssse3"))) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); };
    const auto store = [](std::uint8_t* at, __m128i bytes) __attribute__((target("ssse3"))) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at), bytes);
    };
    std::size_t i = 0;
    for (; i + 16 <= pixels; i += 16, from += 64, to += 48) {  // four times twelve bytes are three times sixteen bytes
        const __m128i a = _mm_shuffle_epi8(load(from), first_threes), b = _mm_shuffle_epi8(load(from + 16), first_threes);
        const __m128i c = _mm_shuffle_epi8(load(from + 32), first_threes), d = _mm_shuffle_epi8(load(from + 48), first_threes);
        store(to, _mm_or_si128(a, _mm_slli_si128(b, 12)));
        store(to + 16, _mm_or_si128(_mm_srli_si128(b, 4), _mm_slli_si128(c, 8)));
        store(to + 32, _mm_or_si128(_mm_srli_si128(c, 8), _mm_slli_si128(d, 4)));
    }
    return i;
}
#endif

// Copy the first three of every four bytes.
inline void drop_fourth(std::uint8_t* to, const std::uint8_t* from, std::size_t pixels) {
    std::size_t i = 0;
#if defined(__x86_64__)
    if (moves_sixteen()) i = drop_fourth_by_sixteen(to, from, pixels);
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    // Two pixels at a time, stored as eight bytes, of which the last two belong to the next pixel.
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

constexpr std::uint8_t kNone = 0x80;  // the value of a byte that is not a digit

inline constexpr auto kDigits = [] {
    std::array<std::uint8_t, 256> digits{};
    for (auto& digit : digits) digit = kNone;
    constexpr char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (std::uint8_t i = 0; i < 64; ++i) digits[static_cast<unsigned char>(alphabet[i])] = i;
    return digits;
}();

// The number of bytes that a padded base64 text decodes to.
inline std::size_t decoded_size(const std::uint8_t* text, std::size_t n) {
    return n < 4 ? 0 : n / 4 * 3 - (text[n - 1] == '=') - (text[n - 1] == '=' && text[n - 2] == '=');
}

#if defined(__x86_64__)
// Decode sixteen digits at a time to twelve bytes, stored as sixteen; `room` is the size of `to`. From W. Mula and D. Lemire,
// Faster Base64 Encoding and Decoding Using AVX2 Instructions (2018). Ends before the first block with an invalid digit.
__attribute__((target("ssse3"))) inline std::size_t decode_by_sixteen(std::uint8_t* to, std::size_t room, const std::uint8_t* text, std::size_t n) {
    // Bits by a byte's upper and lower half; a byte is a digit if the two have no bit in common.
    const __m128i by_upper = _mm_setr_epi8(0x10, 0x10, 0x01, 0x02, 0x04, 0x08, 0x04, 0x08, 0x10, 0x10, 0x10, 0x10, 0x10, 0x10, 0x10, 0x10);
    const __m128i by_lower = _mm_setr_epi8(0x15, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x13, 0x1A, 0x1B, 0x1B, 0x1B, 0x1A);
    // The difference between a digit's value and its byte, by the upper half; one less for '/'.
    const __m128i added = _mm_setr_epi8(0, 16, 19, 4, -65, -65, -71, -71, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i slash = _mm_set1_epi8(0x2F), half = _mm_set1_epi8(0x0F);
    const __m128i order = _mm_setr_epi8(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1);
    std::size_t i = 0;
    for (; i + 16 <= n && i / 4 * 3 + 16 <= room; i += 16, to += 12) {
        const __m128i digits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(text + i));
        const __m128i upper = _mm_and_si128(_mm_srli_epi32(digits, 4), half), lower = _mm_and_si128(digits, half);
        const __m128i wrong = _mm_and_si128(_mm_shuffle_epi8(by_upper, upper), _mm_shuffle_epi8(by_lower, lower));
        if (_mm_movemask_epi8(_mm_cmpeq_epi8(wrong, _mm_setzero_si128())) != 0xFFFF) break;
        const __m128i values = _mm_add_epi8(digits, _mm_shuffle_epi8(added, _mm_add_epi8(_mm_cmpeq_epi8(digits, slash), upper)));
        const __m128i pairs = _mm_maddubs_epi16(values, _mm_set1_epi32(0x01400140));  // twelve bits each
        const __m128i threes = _mm_madd_epi16(pairs, _mm_set1_epi32(0x00011000));     // and twenty-four
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(threes, order));
    }
    return i;
}
#endif

// Decode padded base64 (RFC 4648, section 4) into `to`, which has decoded_size bytes. Return false if any byte is invalid.
inline bool decode(std::uint8_t* to, const std::uint8_t* text, std::size_t n) {
    if (n % 4) return false;
    const std::size_t padding = n / 4 * 3 - decoded_size(text, n), whole = padding ? n - 4 : n;
    std::uint32_t wrong = 0;
    std::size_t i = 0;
#if defined(__x86_64__)
    if (moves_sixteen()) i = decode_by_sixteen(to, decoded_size(text, n), text, whole);
    to += i / 4 * 3;
#endif
    for (; i < whole; i += 4, to += 3) {
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

namespace json {

// A JSON text in which each long string is replaced by `NaN`; `texts` has their positions (start, length).
struct Cut {
    std::string rest;
    std::vector<std::pair<std::size_t, std::size_t>> texts;
};

// Return whether a string is ASCII without escapes and control characters.
inline bool is_plain(const char* text, std::size_t n) {
    std::uint8_t other = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const auto byte = static_cast<std::uint8_t>(text[i]);
        other |= static_cast<std::uint8_t>((byte < 0x20) | (byte >= 0x80) | (byte == '\\'));
    }
    return other == 0;
}

// Replace plain strings of at least `least` bytes in a JSON text in UTF-8. Return false if a string does not end, or if the
// text itself may contain NaN or Infinity.
inline bool cut(const char* text, std::size_t n, std::size_t least, Cut& found) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (text[i] == 'N' || text[i] == 'I') return false;
        if (text[i] != '"') continue;
        const std::size_t start = i + 1;
        for (std::size_t from = start;; from = i + 1) {
            const void* quote = from < n ? std::memchr(text + from, '"', n - from) : nullptr;
            if (quote == nullptr) return false;
            i = static_cast<std::size_t>(static_cast<const char*>(quote) - text);
            std::size_t before = i;
            while (before > start && text[before - 1] == '\\') --before;
            if ((i - before) % 2 == 0) break;  // otherwise the quote is escaped
        }
        if (i - start < least || !is_plain(text + start, i - start)) continue;
        found.rest.append(text + kept, start - 1 - kept).append("NaN");
        found.texts.emplace_back(start, i - start);
        kept = i + 1;
    }
    found.rest.append(text + kept, n - kept);
    return true;
}

}  // namespace json
}  // namespace jurybox
