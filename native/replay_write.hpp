// Writing rows into a ring: from columns of memory, strided or not, as one row or as many.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "replay_ring.hpp"

namespace jurybox::replay {

// Where the values of one field come from: `rows` lie row_stride apart; inside a row the elements are contiguous, or
// `dims` and `strides` say where they are.
struct Source {
    static constexpr int kMaxDims = 16;
    const std::byte* data = nullptr;
    std::ptrdiff_t row_stride = 0;
    int dims = 0;  // 0: contiguous inside a row
    std::size_t item = 0;
    std::size_t shape[kMaxDims] = {};
    std::ptrdiff_t strides[kMaxDims] = {};
};

// The elements of a strided row, in order, in runs as long as the strides allow.
template <class Copy>
inline void walk(const Source& s, const std::byte* row, Copy&& copy) {
    std::size_t run = s.item;
    int outer = s.dims;
    while (outer > 0 && s.strides[outer - 1] == static_cast<std::ptrdiff_t>(run)) run *= s.shape[--outer];
    std::size_t index[Source::kMaxDims] = {};
    std::size_t written = 0;
    while (true) {
        copy(written, row, run);
        written += run;
        int d = outer - 1;
        for (; d >= 0; --d) {
            row += s.strides[d];
            if (++index[d] < s.shape[d]) break;
            row -= s.strides[d] * static_cast<std::ptrdiff_t>(s.shape[d]);
            index[d] = 0;
        }
        if (d < 0) return;
    }
}

inline bool put_row(const Field& f, const Source& s, std::size_t row, std::byte* slot, bool past_caches) {
    const std::byte* from = s.data + static_cast<std::ptrdiff_t>(row) * s.row_stride;
    if (s.dims == 0) return put(f, from, slot, past_caches);
    if (f.codec == Codec::raw) {
        walk(s, from, [&](std::size_t at, const std::byte* in, std::size_t n) { copy_in(slot + f.offset + at, in, n); });
        return true;
    }
    thread_local std::vector<std::byte> packed;  // an encoder wants its row in one piece
    packed.resize(f.bytes);
    walk(s, from, [&](std::size_t at, const std::byte* in, std::size_t n) { std::memcpy(packed.data() + at, in, n); });
    return put(f, packed.data(), slot, past_caches);
}

// One writer's place in its episode. Belongs to one process; not for two threads at once.
struct Stream {
    std::uint64_t last = 0;  // ticket + 1 of the newest row; 0: none
    bool ended = true;       // whether the next row begins an episode
};

constexpr std::size_t kCached = std::size_t{32} << 20;  // a smaller ring may stay in a last-level cache

enum class Written { yes, taken, no_slot, too_dense };

class Writer {
  public:
    explicit Writer(Ring& ring) : ring_(ring) {}

    // Write row `row` of `sources` at ticket `t`; taken: another writer is in its slot, or one was killed there.
    // ends: 0 goes on, 1 truncated, 2 terminated.
    Written write(Ticket t, const Source* sources, std::size_t row, Stream* stream, unsigned ends, bool final_row) {
        if (!ring_.claim(t)) return Written::taken;
        const std::size_t at = ring_.slot_of(t);
        std::byte* slot = ring_.slot(at);
        const std::size_t n = ring_.fields.size();
        const bool past_caches = ring_.capacity * ring_.slot_bytes > kCached;
        for (std::size_t i = 0; i < n; ++i) {
            if (!put_row(ring_.fields[i], sources[i], row, slot, past_caches)) {
                ring_.abandon(t);
                failed_field = i;
                return Written::too_dense;
            }
        }
        finish(t, at, stream, ends, final_row);
        return Written::yes;
    }

    // Link a filled slot into its episode and make it visible.
    void finish(Ticket t, std::size_t at, Stream* stream, unsigned ends, bool final_row) {
        if (ring_.links == nullptr || stream == nullptr) {
            if (ring_.links != nullptr) {
                ring_.links[at].before.store(0, std::memory_order_relaxed);
                ring_.links[at].after.store(Link::kEnded, std::memory_order_relaxed);
            }
            ring_.commit(t);
        } else {
            const bool follows = stream->last != 0 && (!stream->ended || final_row);
            const std::uint64_t flags = (final_row ? Link::kFinal : 0) | (ends == 2 ? Link::kTerminated : 0);
            ring_.links[at].before.store((follows ? stream->last * 4 : 0) | flags, std::memory_order_relaxed);
            ring_.links[at].after.store(ends != 0 || final_row ? Link::kEnded : 0, std::memory_order_relaxed);
            ring_.commit(t);
            // The row before may be overwritten by now, then this is a stray mark: readers follow it only to a row that
            // points back to where they come from.
            if (follows && ring_.holds(stream->last - 1))
                ring_.links[ring_.slot_of(stream->last - 1)].after.store(t + 1, std::memory_order_release);
            stream->last = final_row ? 0 : t + 1;
            stream->ended = ends != 0 || final_row;
        }
        last_ticket = t;
    }

    // The newest row of `stream` was the last of its episode.
    void end(Stream& stream) {
        if (stream.last != 0 && !stream.ended && ring_.holds(stream.last - 1))
            ring_.links[ring_.slot_of(stream.last - 1)].after.store(Link::kEnded, std::memory_order_release);
        stream.ended = true;
    }

    std::size_t failed_field = 0;
    Ticket last_ticket = 0;

  private:
    Ring& ring_;
};

}  // namespace jurybox::replay
