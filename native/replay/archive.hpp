// Saved replays: slots are copied from a ring and compressed into records, and records are read back to their places. No
// Python is involved, so that one thread per core can work.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/bytes.hpp"
#include "replay/ring.hpp"

namespace jurybox::replay {

// LZ4 blocks (github.com/lz4/lz4, doc/lz4_Block_format.md), written and read directly in their places. The Python package
// allocates memory for every block, and its page faults take longer than the compression.
namespace lz4 {

constexpr std::size_t kShortest = 4;     // bytes of a match
constexpr std::size_t kLastLiterals = 5;  // a block ends with this many literals,
constexpr std::size_t kLastMatch = 12;    // and no match begins in its last bytes
constexpr std::size_t kFarthest = 65535;
constexpr unsigned kHashBits = 12;
// If this many bytes were compressed to nearly as many, the rest is assumed to be as incompressible.
constexpr std::size_t kTrial = std::size_t{1} << 16;

template <class T>
inline T read(const std::uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// The number of equal bytes from `a` and `b` on, up to `end` of `a`.
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

// Return the size of the block; 0 if it exceeds `room`, or is likely to.
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
        // The longer it finds no match, the larger its steps.
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

// Return whether `in` is a valid block of exactly m bytes. It does not trust the input, and never writes past out + m.
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
        // A match may overlap itself: then the copied bytes are copied again, twice as many each time.
        for (std::size_t copied = 0; copied < length;) {
            const std::size_t part = offset + copied < length - copied ? offset + copied : length - copied;
            std::memcpy(to + copied, to - offset, part);
            copied += part;
        }
    }
    return false;
}

}  // namespace lz4

// The head of a record; see training/jurybox/training/replay/archive.py.
struct RecordHead {
    char magic[4] = {'J', 'B', 'R', 'C'};
    std::uint32_t kind = 0, part = 0, codec = 0;
    std::uint64_t first = 0, rows = 0, raw_bytes = 0, stored_bytes = 0;
    std::uint32_t checksum = 0;
    std::uint32_t own_checksum = 0;  // of the preceding bytes
};
static_assert(sizeof(RecordHead) == 56);

constexpr std::uint32_t kRows = 1, kAsIs = 0, kLz4 = 1;

// Copy slots with their sequence words. Slots that are incomplete, newer than `newest`, or keep changing are zeros. With
// `links`, copy the rows' links, too, of sixteen bytes each. Return the number of rows.
inline std::size_t snapshot(const Ring& ring, std::uint64_t first, std::size_t n, std::uint64_t newest, std::byte* out, std::byte* links) {
    std::size_t rows = 0;
    for (std::size_t i = 0; i < n; ++i) {
        std::byte* to = out + i * ring.slot_bytes;
        const std::size_t at = first + i;
        std::uint64_t kept = 0;
        const std::uint64_t seen = ring.sequence(at).load(std::memory_order_acquire);
        if (is_whole(seen) && ticket_of(seen) < newest) {
            copy_out(to + 8, ring.slot(at) + 8, ring.slot_bytes - 8);
            if (links != nullptr) {
                const std::uint64_t words[2] = {ring.links[at].before.load(std::memory_order_relaxed), ring.links[at].after.load(std::memory_order_relaxed)};
                std::memcpy(links + 16 * i, words, 16);
            }
            if (ring.still(at, seen)) kept = seen;
        }
        // An absent row is all zeros, so that no part of a torn row gets into a file.
        if (kept == 0) std::memset(to, 0, ring.slot_bytes);
        std::memcpy(to, &kept, 8);
        rows += kept != 0;
    }
    return rows;
}

struct Packed {
    std::size_t bytes = 0, rows = 0;
};

// Write the records of the runs (first slot, slots) to `out`, which is large enough for uncompressed records; write every
// slot's sequence word to its place in `sequences`.
inline Packed pack(const Ring& ring, const std::uint64_t* runs, std::size_t count, std::uint32_t part, std::uint64_t newest, bool compressed,
                   std::byte* out, std::uint64_t* sequences) {
    thread_local std::vector<std::byte> raw;
    Packed packed;
    for (std::size_t r = 0; r < count; ++r) {
        RecordHead head;
        head.kind = kRows;
        head.part = part;
        head.first = runs[2 * r];
        head.rows = runs[2 * r + 1];
        head.raw_bytes = head.stored_bytes = head.rows * ring.slot_bytes;
        std::byte* const payload = out + packed.bytes + sizeof head;
        std::byte* rows = payload;
        if (compressed) {
            raw.resize(head.raw_bytes);
            rows = raw.data();
        }
        packed.rows += snapshot(ring, head.first, head.rows, newest, rows, nullptr);
        for (std::size_t i = 0; i < head.rows; ++i) std::memcpy(sequences + head.first + i, rows + i * ring.slot_bytes, 8);
        if (compressed) {
            const auto* in = reinterpret_cast<const std::uint8_t*>(rows);
            if (const std::size_t bytes = lz4::compress(in, head.raw_bytes, reinterpret_cast<std::uint8_t*>(payload), head.raw_bytes - head.raw_bytes / 16)) {
                head.codec = kLz4;
                head.stored_bytes = bytes;
            } else {
                std::memcpy(payload, rows, head.raw_bytes);
            }
        }
        head.checksum = crc32c(payload, head.stored_bytes);
        head.own_checksum = crc32c(&head, offsetof(RecordHead, own_checksum));
        std::memcpy(payload - sizeof head, &head, sizeof head);
        packed.bytes += sizeof head + head.stored_bytes;
    }
    return packed;
}

// A record's payload in a file, and its place in memory.
struct Piece {
    std::uint64_t codec, offset, stored_bytes, raw_bytes, checksum, target;
};

enum class Brought : std::int32_t { whole = 0, damaged = 1, no_room = 2, unreadable = 3 };

// Read and check one piece. With `keep`, `to` is unchanged if the piece is damaged. Otherwise uncompressed payloads are read
// directly to their place and checked there, without a copy and without page faults of the file's mapping.
inline Brought bring(int fd, const std::uint8_t* file, const Piece& piece, std::byte* to, bool keep) {
    if (piece.codec == kAsIs && !keep) {
        for (std::size_t done = 0; done < piece.raw_bytes;) {
            const ssize_t got = pread(fd, to + done, piece.raw_bytes - done, static_cast<off_t>(piece.offset + done));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return got == 0 ? Brought::damaged : Brought::unreadable;
            done += static_cast<std::size_t>(got);
        }
        return crc32c(to, piece.raw_bytes) == piece.checksum ? Brought::whole : Brought::damaged;
    }
    const std::uint8_t* payload = file + piece.offset;
    if (crc32c(payload, piece.stored_bytes) != piece.checksum) return Brought::damaged;
    if (piece.codec == kAsIs) {
        std::memcpy(to, payload, piece.raw_bytes);
    } else if (!lz4::decompress(payload, piece.stored_bytes, reinterpret_cast<std::uint8_t*>(to), piece.raw_bytes)) {
        std::memset(to, 0, piece.raw_bytes);  // invalid despite a correct checksum: the writer was faulty
        return Brought::damaged;
    }
    return Brought::whole;
}

// Write one piece to its place in the new file `fresh`, which is the replay's memory, through a buffer that stays in the
// caches. write(2) fills new pages without clearing them first and without a page fault, at half the cost of a page, which
// dominates the time to load a new replay. Pages are mapped at their first use. A damaged piece is not written. Returns
// Brought::no_room if there is no memory; a write to the mapping would raise SIGBUS.
inline Brought bring_fresh(int fd, const std::uint8_t* file, const Piece& piece, int fresh) {
    thread_local std::vector<std::byte> own;
    if (own.size() < piece.raw_bytes) own.resize(piece.raw_bytes);
    const Brought outcome = bring(fd, file, piece, own.data(), false);
    if (outcome != Brought::whole) return outcome;
    for (std::size_t done = 0; done < piece.raw_bytes;) {
        const ssize_t put = pwrite(fresh, own.data() + done, piece.raw_bytes - done, static_cast<off_t>(piece.target + done));
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return Brought::no_room;
        done += static_cast<std::size_t>(put);
    }
    return Brought::whole;
}

}  // namespace jurybox::replay
