// Every stored form gives back what its precision allows, at every length.
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "check.hpp"
#include "replay/field.hpp"

using namespace jurybox::replay::codec;

namespace {

void test_bits_come_back() {
    for (std::size_t n = 1; n < 70; ++n) {
        std::vector<float> in(n), out(n, 9.0F);
        std::vector<std::uint8_t> bytes(n), back(n, 9), kept((n + 7) / 8);
        for (std::size_t i = 0; i < n; ++i) in[i] = static_cast<float>(bytes[i] = static_cast<std::uint8_t>(i * 7 % 3 == 0));
        encode_bits(in.data(), n, kept.data());
        decode_bits(kept.data(), n, out.data());
        CHECK(in == out);
        std::vector<std::uint8_t> kept_too((n + 7) / 8);
        encode_bits(bytes.data(), n, kept_too.data());
        CHECK(kept == kept_too);
        decode_bits(kept.data(), n, back.data());
        CHECK(bytes == back);
    }
}

void test_bytes_round_and_saturate() {
    const float in[] = {-3.0F, 0.0F, 0.4F, 0.6F, 254.6F, 300.0F, std::numeric_limits<float>::quiet_NaN()};
    std::uint8_t kept[7];
    encode_bytes(in, 7, 1.0F, kept);
    const std::uint8_t want[] = {0, 0, 0, 1, 255, 255, 0};
    for (int i = 0; i < 7; ++i) CHECK(kept[i] == want[i]);
    // Longer rows go sixteen at a time, with the same outcome.
    std::vector<float> many(100);
    std::vector<std::uint8_t> all(100);
    for (std::size_t i = 0; i < 100; ++i) many[i] = in[i % 7];
    encode_bytes(many.data(), 100, 1.0F, all.data());
    for (std::size_t i = 0; i < 100; ++i) CHECK(all[i] == want[i % 7]);
}

void test_halves_match_by_instruction_and_by_arithmetic() {
    for (std::uint32_t h = 0; h < 0x10000; ++h) {
        const auto half = static_cast<std::uint16_t>(h);
        const float value = float_of(half);
        if (std::isnan(value)) {
            CHECK(std::isnan(float_of(half_of(value))));
            continue;
        }
        CHECK(half_of(value) == half);
        // Eight at once go through the instruction, where there is one.
        std::uint16_t halves[8] = {half, half, half, half, half, half, half, half};
        float eight[8];
        decode_half(halves, 8, eight);
        CHECK(eight[3] == value);
        for (float& x : eight) x *= 1.0003F;
        encode_half(eight, 8, halves);
        CHECK(halves[3] == half_of(eight[3]));
    }
}

void test_sparse_refuses_what_does_not_fit_and_survives_torn_bytes() {
    std::vector<float> in(100), out(100, 5.0F);
    in[0] = 1.0F, in[17] = -2.0F, in[99] = 3.0F;
    std::vector<std::byte> kept(sparse_bytes(3));
    CHECK(encode_sparse(in.data(), 100, 3, kept.data()));
    decode_sparse(kept.data(), 100, 3, out.data());
    CHECK(in == out);
    in[50] = 1.0F;
    CHECK(!encode_sparse(in.data(), 100, 3, kept.data()));
    for (auto& byte : kept) byte = std::byte{0xFF};
    decode_sparse(kept.data(), 100, 3, out.data());  // under the address sanitizer: nothing out of bounds
}

}  // namespace

int main() {
    test_bits_come_back();
    test_bytes_round_and_saturate();
    test_halves_match_by_instruction_and_by_arithmetic();
    test_sparse_refuses_what_does_not_fit_and_survives_torn_bytes();
    std::puts("ok");
}
