// One field of a row: where it lies in a slot, and how it gets in and out.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "replay_codec.hpp"
#include "replay_copy.hpp"

namespace jurybox::replay {

struct Field {
    std::size_t offset;        // in the slot
    std::size_t stored_bytes;  // in the slot
    std::size_t bytes;         // as handed out
    std::size_t elements;      // of one row
    Codec codec = Codec::raw;
    double scale = 1.0;       // bytes: what one unit stands for
    std::size_t most = 0;    // sparse: non-zeros at most
};

// Encode one row's value, contiguous in `in`, to where it is kept. False: it does not fit (sparse only).
inline bool encode(const Field& f, const std::byte* in, std::byte* out) {
    switch (f.codec) {
        case Codec::raw: std::memcpy(out, in, f.bytes); return true;
        case Codec::bits:
            codec::encode_bits(reinterpret_cast<const float*>(in), f.elements, reinterpret_cast<std::uint8_t*>(out));
            return true;
        case Codec::bits_byte:
            codec::encode_bits(reinterpret_cast<const std::uint8_t*>(in), f.elements, reinterpret_cast<std::uint8_t*>(out));
            return true;
        case Codec::bytes:
            codec::encode_bytes(reinterpret_cast<const float*>(in), f.elements, static_cast<float>(1.0 / f.scale), reinterpret_cast<std::uint8_t*>(out));
            return true;
        case Codec::half:
            codec::encode_half(reinterpret_cast<const float*>(in), f.elements, reinterpret_cast<std::uint16_t*>(out));
            return true;
        case Codec::sparse: return codec::encode_sparse(reinterpret_cast<const float*>(in), f.elements, f.most, out);
    }
    return false;
}

inline void decode(const Field& f, const std::byte* in, std::byte* out) {
    switch (f.codec) {
        case Codec::raw: std::memcpy(out, in, f.bytes); return;
        case Codec::bits: codec::decode_bits(reinterpret_cast<const std::uint8_t*>(in), f.elements, reinterpret_cast<float*>(out)); return;
        case Codec::bits_byte:
            codec::decode_bits(reinterpret_cast<const std::uint8_t*>(in), f.elements, reinterpret_cast<std::uint8_t*>(out));
            return;
        case Codec::bytes:
            codec::decode_bytes(reinterpret_cast<const std::uint8_t*>(in), f.elements, static_cast<float>(f.scale), reinterpret_cast<float*>(out));
            return;
        case Codec::half: codec::decode_half(reinterpret_cast<const std::uint16_t*>(in), f.elements, reinterpret_cast<float*>(out)); return;
        case Codec::sparse: codec::decode_sparse(in, f.elements, f.most, reinterpret_cast<float*>(out)); return;
    }
}

// The same with a slot that others may be writing or reading at this moment.
inline bool put(const Field& f, const std::byte* in, std::byte* slot, bool past_caches) {
    if (f.codec == Codec::raw) {
        copy_in(slot + f.offset, in, f.bytes, past_caches);
        return true;
    }
#if JURYBOX_TSAN
    std::vector<std::byte> own(f.stored_bytes + 8);
    const bool fits = encode(f, in, own.data());
    copy_in(slot + f.offset, own.data(), f.stored_bytes);
    return fits;
#else
    return encode(f, in, slot + f.offset);
#endif
}

inline void take(const Field& f, const std::byte* slot, std::byte* out) {
    if (f.codec == Codec::raw) {
        copy_out(out, slot + f.offset, f.bytes);
        return;
    }
#if JURYBOX_TSAN
    std::vector<std::byte> own(f.stored_bytes + 8);
    copy_out(own.data(), slot + f.offset, f.stored_bytes);
    decode(f, own.data(), out);
#else
    decode(f, slot + f.offset, out);
#endif
}

}  // namespace jurybox::replay
