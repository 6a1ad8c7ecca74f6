// Pieces of a saved replay: slots copied out of a ring and compressed into records, and records brought back to where
// they belong. No Python inside, so that as many threads as there are cores do it at once.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "replay_checksum.hpp"
#include "replay_lz4.hpp"
#include "replay_ring.hpp"

namespace jurybox::replay {

// The head of a record, as training/jurybox/training/replay/archive.py describes it.
struct RecordHead {
    char magic[4] = {'J', 'B', 'R', 'C'};
    std::uint32_t kind = 0, part = 0, codec = 0;
    std::uint64_t first = 0, rows = 0, raw_bytes = 0, stored_bytes = 0;
    std::uint32_t checksum = 0;
    std::uint32_t own_checksum = 0;  // of the bytes before
};
static_assert(sizeof(RecordHead) == 56);

constexpr std::uint32_t kRows = 1, kAsIs = 0, kLz4 = 1;

// Whole slots with their sequence words: what is not whole, is newer than `newest`, or keeps changing, is zeroes. `links`:
// the rows' links as well, sixteen bytes each. Gives the rows that are there.
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
        // An absent row is zeroes: nothing of a torn one goes into a file.
        if (kept == 0) std::memset(to, 0, ring.slot_bytes);
        std::memcpy(to, &kept, 8);
        rows += kept != 0;
    }
    return rows;
}

struct Packed {
    std::size_t bytes = 0, rows = 0;
};

// Records of the runs (first slot, slots) into `out`, which has room for all of them as they are; `sequences` gets every
// slot's word in its place.
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

// A record's payload in a file, and where in the memory it belongs.
struct Piece {
    std::uint64_t codec, offset, stored_bytes, raw_bytes, checksum, target;
};

enum class Brought : std::int32_t { whole = 0, damaged = 1, no_room = 2, unreadable = 3 };

// Get the pages of memory[at, at + bytes), which maps `fd`, and map them: more than filling them, this is what the
// loading of a new replay costs. Brought::no_room where there are none, which a touch would make a SIGBUS.
// (madvise(2), MADV_POPULATE_WRITE, Linux 5.14; where there is none they are mapped when they are touched.)
inline Brought populate(int fd, std::byte* memory, std::size_t at, std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t begin = at / page * page;
    constexpr int kPopulateWrite = 23;
    while (madvise(memory + begin, at + bytes - begin, kPopulateWrite) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return Brought::no_room;
        return posix_fallocate(fd, static_cast<off_t>(begin), static_cast<off_t>(at + bytes - begin)) == 0 ? Brought::whole : Brought::no_room;
    }
    return Brought::whole;
}

// One piece to `to`, checked. `keep`: where it is damaged, what lies at `to` must stay; otherwise what was stored as it is
// is read straight to its place and checked there: no copy, and no page fault of the file's mapping.
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
        std::memset(to, 0, piece.raw_bytes);  // behind a right checksum that is a faulty writer's: no rows
        return Brought::damaged;
    }
    return Brought::whole;
}

}  // namespace jurybox::replay
