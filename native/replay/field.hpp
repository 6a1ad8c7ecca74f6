// One field of a row: its place in a slot, its storage format, and its encoder and decoder.
//
// Decoders run on bytes that may be torn (the row is verified afterwards), so they do not trust their input.
#pragma once
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "common/bytes.hpp"

namespace jurybox::replay {

enum class Codec : std::uint32_t {
    raw = 0,        // the same bytes
    bits = 1,       // float32, stored as one bit per element: zero or not
    bits_byte = 2,  // uint8 or bool, stored as one bit per element
    bytes = 3,      // float32, stored as uint8: round(x / scale), 0..255
    half = 4,       // float32, stored as IEEE binary16
    sparse = 5,     // float32, stored as a count and (index, value) pairs
};

namespace codec {

// bits: element 8 i + j is bit j of byte i (little end first, as in numpy.packbits(bitorder="little")).

#if defined(__x86_64__)
// Return sixteen elements' bits.
inline std::uint16_t sixteen_bits(const float* in) {
    const auto four = [in](std::size_t at) { return _mm_movemask_ps(_mm_cmpneq_ps(_mm_loadu_ps(in + at), _mm_setzero_ps())); };
    return static_cast<std::uint16_t>(four(0) | four(4) << 4 | four(8) << 8 | four(12) << 12);
}
inline std::uint16_t sixteen_bits(const std::uint8_t* in) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
    return static_cast<std::uint16_t>(~_mm_movemask_epi8(_mm_cmpeq_epi8(x, _mm_setzero_si128())));
}
#endif

template <class T>
inline void encode_bits(const T* in, std::size_t n, std::uint8_t* out) {
    std::size_t i = 0;
#if defined(__x86_64__)
    for (; i + 16 <= n; i += 16) {
        const std::uint16_t word = sixteen_bits(in + i);
        std::memcpy(out + i / 8, &word, 2);
    }
#endif
    for (; i < n; i += 8) {
        unsigned byte = 0;
        for (std::size_t j = 0; j < 8 && i + j < n; ++j) byte |= static_cast<unsigned>(in[i + j] != T{}) << j;
        out[i / 8] = static_cast<std::uint8_t>(byte);
    }
}

// The eight elements of every byte value, so that one look-up and one copy expand a byte.
template <class T>
inline constexpr std::array<std::array<T, 8>, 256> kExpanded = [] {
    std::array<std::array<T, 8>, 256> table{};
    for (unsigned byte = 0; byte < 256; ++byte)
        for (unsigned j = 0; j < 8; ++j) table[byte][j] = static_cast<T>(byte >> j & 1U);
    return table;
}();

template <class T>
inline void decode_bits(const std::uint8_t* in, std::size_t n, T* out) {
    const std::size_t whole = n / 8;
    for (std::size_t i = 0; i < whole; ++i) std::memcpy(out + 8 * i, kExpanded<T>[in[i]].data(), 8 * sizeof(T));
    for (std::size_t i = 8 * whole; i < n; ++i) out[i] = static_cast<T>(in[i / 8] >> (i % 8) & 1U);
}

inline void encode_bytes(const float* in, std::size_t n, float per_unit, std::uint8_t* out) {
    std::size_t i = 0;
#if defined(__x86_64__)
    const __m128 factor = _mm_set1_ps(per_unit), half = _mm_set1_ps(0.5F), most = _mm_set1_ps(255.0F), zero = _mm_setzero_ps();
    const auto four = [&](std::size_t at) {
        const __m128 x = _mm_add_ps(_mm_mul_ps(_mm_loadu_ps(in + at), factor), half);
        return _mm_cvttps_epi32(_mm_min_ps(_mm_max_ps(x, zero), most));  // max returns its second argument for a NaN
    };
    for (; i + 16 <= n; i += 16) {
        const __m128i low = _mm_packs_epi32(four(i), four(i + 4)), high = _mm_packs_epi32(four(i + 8), four(i + 12));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm_packus_epi16(low, high));
    }
#endif
    for (; i < n; ++i) {
        float x = in[i] * per_unit + 0.5F;
        x = x > 0.0F ? x : 0.0F;  // NaN becomes 0, too
        x = x < 255.0F ? x : 255.0F;
        out[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(x));
    }
}

inline void decode_bytes(const std::uint8_t* in, std::size_t n, float unit, float* out) {
    for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]) * unit;
}

// binary16 by integer arithmetic, round to nearest even, for CPUs without a conversion instruction.
inline std::uint16_t half_of(float value) {
    std::uint32_t x;
    std::memcpy(&x, &value, 4);
    const std::uint32_t sign = x >> 16 & 0x8000U;
    x &= 0x7FFFFFFFU;
    if (x >= 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7C00U | (x > 0x7F800000U ? 0x0200U | (x >> 13 & 0x3FFU) : 0U));
    if (x >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
    if (x < 0x38800000U) {  // subnormal in binary16: let the float adder do the rounding
        float magnitude;
        std::memcpy(&magnitude, &x, 4);
        magnitude += 0.5F;
        std::memcpy(&x, &magnitude, 4);
        return static_cast<std::uint16_t>(sign | (x - 0x3F000000U));
    }
    return static_cast<std::uint16_t>(sign | ((x + 0xC8000FFFU + (x >> 13 & 1U)) >> 13));
}

inline float float_of(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
    std::uint32_t x = static_cast<std::uint32_t>(half & 0x7FFFU) << 13;
    float value;
    if ((half & 0x7C00U) == 0x7C00U) {
        x |= 0x7F800000U;
    } else if ((half & 0x7C00U) != 0) {
        x += 0x38000000U;
    } else {
        value = static_cast<float>(half & 0x3FFU) * 5.9604644775390625e-8F;  // 2^-24
        std::memcpy(&x, &value, 4);
    }
    x |= sign;
    std::memcpy(&value, &x, 4);
    return value;
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) inline std::size_t encode_half_f16c(const float* in, std::size_t n, std::uint16_t* out) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
    return i;
}
__attribute__((target("avx,f16c"))) inline std::size_t decode_half_f16c(const std::uint16_t* in, std::size_t n, float* out) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
    return i;
}
// The processor is asked itself: Clang 14's __builtin_cpu_supports does not know f16c. AVX needs the kernel, too, which that asks.
inline bool has_f16c() {
    static const bool has = [] {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        return __builtin_cpu_supports("avx") != 0 && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    }();
    return has;
}
#endif

inline void encode_half(const float* in, std::size_t n, std::uint16_t* out) {
    std::size_t i = 0;
#if defined(__x86_64__)
    if (has_f16c()) i = encode_half_f16c(in, n, out);
#endif
    for (; i < n; ++i) out[i] = half_of(in[i]);
}

inline void decode_half(const std::uint16_t* in, std::size_t n, float* out) {
    std::size_t i = 0;
#if defined(__x86_64__)
    if (has_f16c()) i = decode_half_f16c(in, n, out);
#endif
    for (; i < n; ++i) out[i] = float_of(in[i]);
}

// sparse: u32 count, then `most` u32 indices, then `most` float values. Encoding returns false if more than `most` values are
// not zero.
inline std::size_t sparse_bytes(std::size_t most) { return 4 + 8 * most; }

inline bool encode_sparse(const float* in, std::size_t n, std::size_t most, std::byte* out) {
    auto* indices = reinterpret_cast<std::uint32_t*>(out + 4);
    auto* values = reinterpret_cast<float*>(out + 4 + 4 * most);
    std::uint32_t count = 0;
    std::size_t i = 0;
    const auto keep = [&](std::size_t at) {
        if (in[at] == 0.0F) return true;
        if (count == most) return false;
        indices[count] = static_cast<std::uint32_t>(at);
        values[count++] = in[at];
        return true;
    };
    for (; i + 16 <= n; i += 16) {
        std::uint64_t any = 0;
        for (std::size_t j = 0; j < 8; ++j) {
            std::uint64_t pair;
            std::memcpy(&pair, in + i + 2 * j, 8);
            any |= pair;
        }
        if (any == 0) continue;
        for (std::size_t j = 0; j < 16; ++j)
            if (!keep(i + j)) return false;
    }
    for (; i < n; ++i)
        if (!keep(i)) return false;
    std::memcpy(out, &count, 4);
    return true;
}

inline void decode_sparse(const std::byte* in, std::size_t n, std::size_t most, float* out) {
    std::memset(out, 0, n * sizeof(float));
    std::uint32_t count;
    std::memcpy(&count, in, 4);
    if (count > most) count = static_cast<std::uint32_t>(most);
    for (std::uint32_t i = 0; i < count; ++i) {
        std::uint32_t index;
        float value;
        std::memcpy(&index, in + 4 + 4 * std::size_t{i}, 4);
        std::memcpy(&value, in + 4 + 4 * (most + i), 4);
        if (index < n) out[index] = value;
    }
}

}  // namespace codec

struct Field {
    std::size_t offset;        // in the slot
    std::size_t stored_bytes;  // in the slot
    std::size_t bytes;         // in samples
    std::size_t elements;      // of one row
    Codec codec = Codec::raw;
    double scale = 1.0;       // bytes: the value of one unit
    std::size_t most = 0;    // sparse: the maximum number of non-zeros
};

// Encode the value of one row, contiguous in `in`. Return false if it does not fit (sparse only).
inline bool encode(const Field& f, const std::byte* in, std::byte* out) {
    const auto* floats = reinterpret_cast<const float*>(in);
    auto* bytes = reinterpret_cast<std::uint8_t*>(out);
    switch (f.codec) {
        case Codec::raw: std::memcpy(out, in, f.bytes); return true;
        case Codec::bits: codec::encode_bits(floats, f.elements, bytes); return true;
        case Codec::bits_byte: codec::encode_bits(reinterpret_cast<const std::uint8_t*>(in), f.elements, bytes); return true;
        case Codec::bytes: codec::encode_bytes(floats, f.elements, static_cast<float>(1.0 / f.scale), bytes); return true;
        case Codec::half: codec::encode_half(floats, f.elements, reinterpret_cast<std::uint16_t*>(out)); return true;
        case Codec::sparse: return codec::encode_sparse(floats, f.elements, f.most, out);
    }
    return false;
}

inline void decode(const Field& f, const std::byte* in, std::byte* out) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(in);
    auto* floats = reinterpret_cast<float*>(out);
    switch (f.codec) {
        case Codec::raw: std::memcpy(out, in, f.bytes); return;
        case Codec::bits: codec::decode_bits(bytes, f.elements, floats); return;
        case Codec::bits_byte: codec::decode_bits(bytes, f.elements, reinterpret_cast<std::uint8_t*>(out)); return;
        case Codec::bytes: codec::decode_bytes(bytes, f.elements, static_cast<float>(f.scale), floats); return;
        case Codec::half: codec::decode_half(reinterpret_cast<const std::uint16_t*>(in), f.elements, floats); return;
        case Codec::sparse: codec::decode_sparse(in, f.elements, f.most, floats); return;
    }
}

// The same, to a slot that others may be reading or writing.
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
