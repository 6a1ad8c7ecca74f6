// LZ4 blocks (github.com/lz4/lz4, doc/lz4_Block_format.md), written and read straight where they belong: the Python
// package hands out new memory for every block, whose page faults cost more than the coding does.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jurybox::replay::lz4 {

constexpr std::size_t kShortest = 4;     // bytes of a match
constexpr std::size_t kLastLiterals = 5;  // a block ends with so many literals,
constexpr std::size_t kLastMatch = 12;    // and no match begins in its last bytes
constexpr std::size_t kFarthest = 65535;
constexpr unsigned kHashBits = 12;
// Where so much has been read and nearly as much been written, the rest is taken to be no better.
constexpr std::size_t kTrial = std::size_t{1} << 16;

template <class T>
inline T read(const std::uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// How many bytes are the same from `a` and `b` on; `a` stops at `end`.
inline std::size_t alike(const std::uint8_t* a, const std::uint8_t* b, const std::uint8_t* end) {
    const std::uint8_t* const begin = a;
    for (; a + 8 <= end; a += 8, b += 8)
        if (const std::uint64_t differ = read<std::uint64_t>(a) ^ read<std::uint64_t>(b))
            return static_cast<std::size_t>(a - begin) + static_cast<std::size_t>(__builtin_ctzll(differ)) / 8;
    while (a < end && *a == *b) ++a, ++b;
    return static_cast<std::size_t>(a - begin);
}

inline std::uint8_t* put_length(std::uint8_t* to, std::size_t rest) {
    for (; rest >= 255; rest -= 255) *to++ = 255;
    *to++ = static_cast<std::uint8_t>(rest);
    return to;
}

// The block's bytes; 0 where they would be more than `room`, or look as if they would.
inline std::size_t compress(const std::uint8_t* in, std::size_t n, std::uint8_t* out, std::size_t room) {
    std::uint32_t places[std::size_t{1} << kHashBits] = {};
    const auto place = [&](std::size_t at) -> std::uint32_t& { return places[read<std::uint32_t>(in + at) * 2654435761U >> (32 - kHashBits)]; };
    std::uint8_t* to = out;
    const auto room_for = [&](std::size_t literals, std::size_t match) {
        return literals + literals / 255 + match / 255 + 5 <= room - static_cast<std::size_t>(to - out);
    };
    const auto put_literals = [&](std::size_t from, std::size_t count, std::size_t match) {
        *to++ = static_cast<std::uint8_t>((count < 15 ? count : 15) << 4 | (match < 15 ? match : 15));
        if (count >= 15) to = put_length(to, count - 15);
        std::memcpy(to, in + from, count);
        to += count;
    };
    std::size_t anchor = 0;
    for (std::size_t at = 1; n > kLastMatch;) {
        // Looks more rarely the longer it finds nothing.
        std::size_t from = 0;
        for (std::size_t steps = 64;; at += steps++ >> 6) {
            if (at > n - kLastMatch) goto rest;
            std::uint32_t& known = place(at);
            from = known;
            known = static_cast<std::uint32_t>(at);
            if (from < at && at - from <= kFarthest && read<std::uint32_t>(in + from) == read<std::uint32_t>(in + at)) break;
        }
        while (at > anchor && from > 0 && in[at - 1] == in[from - 1]) --at, --from;
        const std::size_t match = alike(in + at + kShortest, in + from + kShortest, in + n - kLastLiterals);
        if (!room_for(at - anchor, match)) return 0;
        put_literals(anchor, at - anchor, match);
        const auto offset = static_cast<std::uint16_t>(at - from);
        *to++ = static_cast<std::uint8_t>(offset & 255);
        *to++ = static_cast<std::uint8_t>(offset >> 8);
        if (match >= 15) to = put_length(to, match - 15);
        anchor = at += kShortest + match;
        if (at <= n - kLastMatch) place(at - 2) = static_cast<std::uint32_t>(at - 2);
        if (anchor > kTrial && static_cast<std::size_t>(to - out) > anchor - anchor / 16) return 0;
    }
rest:
    if (!room_for(n - anchor, 0)) return 0;
    put_literals(anchor, n - anchor, 0);
    return static_cast<std::size_t>(to - out);
}

// Whether `in` was a block of exactly m bytes; trusts nothing that it reads and writes nothing behind out + m.
inline bool decompress(const std::uint8_t* in, std::size_t n, std::uint8_t* out, std::size_t m) {
    std::size_t at = 0, done = 0;
    const auto longer = [&](std::size_t& length) {
        for (std::uint8_t more = 255; more == 255;) {
            if (at >= n) return false;
            more = in[at++];
            length += more;
        }
        return true;
    };
    while (at < n) {
        const std::uint8_t token = in[at++];
        std::size_t literals = token >> 4;
        if (literals == 15 && !longer(literals)) return false;
        if (literals > n - at || literals > m - done) return false;
        if (literals <= 16 && n - at >= 16 && m - done >= 16)
            std::memcpy(out + done, in + at, 16);
        else
            std::memcpy(out + done, in + at, literals);
        at += literals;
        done += literals;
        if (at == n) return done == m;
        if (n - at < 2) return false;
        const std::size_t offset = read<std::uint16_t>(in + at);
        at += 2;
        std::size_t length = token & 15;
        if (length == 15 && !longer(length)) return false;
        length += kShortest;
        if (offset == 0 || offset > done || length > m - done) return false;
        std::uint8_t* const to = out + done;
        done += length;
        if (offset == 1) {
            std::memset(to, to[-1], length);
            continue;
        }
        // A match may run into itself: what has been copied is then copied again, twice as much every time.
        for (std::size_t copied = 0; copied < length;) {
            const std::size_t part = offset + copied < length - copied ? offset + copied : length - copied;
            std::memcpy(to + copied, to - offset, part);
            copied += part;
        }
    }
    return false;
}

}  // namespace jurybox::replay::lz4
