// The weights slots in plain C++: small enough to run under every sanitizer.
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "serving/weights_slots.hpp"

namespace {

using namespace jurybox;

constexpr std::size_t kExtra = 64;

struct Channel {
    Channel(std::size_t weights_bytes, unsigned count)
        : bytes(weights_bytes), control(new WeightsControl{}), memory((weights_bytes + kExtra) * count / 64 + 1),
          slots(control.get(), reinterpret_cast<std::byte*>(memory.data()), weights_bytes + kExtra, weights_bytes, count) {}

    struct alignas(64) Line {
        std::byte bytes[64];
    };
    std::size_t bytes;
    std::unique_ptr<WeightsControl> control;
    std::vector<Line> memory;
    WeightsSlots slots;
};

WeightsPart part(void* at, std::size_t bytes, std::uint64_t offset = 0, std::uint64_t width = 0, std::uint64_t mask = 0) {
    return {reinterpret_cast<std::uint64_t>(at), offset, bytes, width, mask};
}

constexpr std::uint64_t kFloat = 0x7f800000u;
constexpr std::int64_t kSoon = 1'000'000'000u;

// Every word of version v is v, extra included; a reader that finds two different words has seen a tear.
void readers_see_whole_versions(std::size_t words, unsigned count, std::uint64_t versions) {
    Channel channel(words * 8, count);
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> torn{0}, whole{0};
    std::vector<std::thread> readers;
    for (int r = 0; r < 3; ++r)
        readers.emplace_back([&] {
            std::vector<std::uint64_t> got(words);
            std::uint64_t extra[kExtra / 8] = {}, last = 0, tries = 0;
            const WeightsPart out = part(got.data(), words * 8);
            while (!done.load()) {
                const WeightsClaim claim = channel.slots.read(&out, 1, reinterpret_cast<std::byte*>(extra), monotonic_ns() + kSoon, true, tries);
                if (claim.version == 0) continue;
                if (claim.version < last || extra[0] != claim.version || claim.extra_bytes != 8) ++torn;
                for (const std::uint64_t word : got) torn += word != claim.version;
                last = claim.version;
                ++whole;
            }
        });
    std::vector<std::uint64_t> source(words);
    const WeightsPart in = part(source.data(), words * 8);
    // On a machine with few cores the writer could be through before a reader has begun.
    for (std::uint64_t v = 1; v <= versions || (whole.load() < 50 && v < versions * 1000); ++v) {
        std::fill(source.begin(), source.end(), v);
        CHECK((channel.slots.publish(&in, 1, reinterpret_cast<const std::byte*>(&v), 8, v, false) == -1) && "publication is accepted");
        if (count == 1) std::this_thread::yield();
    }
    // A channel with one slot may be under its writer all the time; what it holds at the end must be readable.
    while (whole.load() == 0) std::this_thread::yield();
    done = true;
    for (auto& reader : readers) reader.join();
    CHECK((torn == 0) && "no reader saw a torn version, or versions running backwards");
}

void the_tail_and_odd_sizes_arrive() {
    for (const std::size_t bytes : {1u, 7u, 63u, 64u, 65u, 4097u, (2u << 20) + 13u}) {
        Channel channel((bytes + 63) / 64 * 64, 2);
        std::vector<std::byte> in(bytes + 1), out(bytes + 1);
        for (std::size_t i = 0; i <= bytes; ++i) in[i] = static_cast<std::byte>(i * 7 + 1);
        for (const std::size_t shift : {0u, 1u}) {  // sources and targets on no boundary at all
            const WeightsPart from = part(in.data() + shift, bytes), to = part(out.data() + shift, bytes);
            std::byte extra[kExtra];
            std::uint64_t tries = 0;
            channel.slots.publish(&from, 1, nullptr, 0, channel.slots.newest() + 1, false);
            CHECK((channel.slots.read(&to, 1, extra, 0, true, tries).version == channel.slots.newest()) && "a version is there");
            CHECK((std::equal(in.begin() + shift, in.begin() + shift + bytes, out.begin() + shift)) && "every byte arrived");
        }
    }
}

void a_half_written_slot_is_never_read_and_is_taken_over() {
    Channel channel(64, 2);
    std::uint64_t value[8], got[8], tries = 0;
    std::byte extra[kExtra];
    const WeightsPart in = part(value, 64), out = part(got, 64);
    std::fill(value, value + 8, 1);
    channel.slots.publish(&in, 1, nullptr, 0, 1, false);
    const unsigned slot = channel.slots.begin();  // and here its writer dies
    std::memset(channel.slots.slot_data(slot), 0xff, 40);
    CHECK((channel.slots.read(&out, 1, extra, 0, true, tries).version == 1 && got[7] == 1) && "the last whole version is read");
    CHECK((channel.slots.take_over() == 1) && "nothing half-written is announced");
    std::fill(value, value + 8, 2);
    channel.slots.publish(&in, 1, nullptr, 0, 2, false);
    CHECK((channel.slots.read(&out, 1, extra, 0, true, tries).version == 2 && got[0] == 2) && "the successor's version is read");
    CHECK((channel.control->slot[slot].sequence % 2 == 0) && "it took over the half-written slot");
}

void a_finished_version_is_announced_by_the_successor() {
    for (const unsigned count : {1u, 2u}) {
        Channel channel(64, count);
        const unsigned slot = channel.slots.begin();
        auto& head = channel.control->slot[slot];
        head.version = 5;
        head.check = check_of(5, 0, nullptr, 0);
        head.sequence = head.sequence + 1;  // committed; its writer dies before it announces
        CHECK((channel.slots.newest() == 0 && channel.slots.take_over() == 5) && "version 5 is announced");
        CHECK((channel.slots.claim().version == 5) && "version 5 can be read");
    }
}

void words_that_no_publisher_wrote_are_no_version() {
    for (const unsigned count : {1u, 2u}) {
        for (int which = 0; which < 5; ++which) {
            Channel channel(64, count);
            std::uint64_t value[8] = {}, got[8], extra[kExtra / 8] = {7}, into[kExtra / 8], tries = 0;
            const WeightsPart in = part(value, 64), out = part(got, 64);
            channel.slots.publish(&in, 1, reinterpret_cast<const std::byte*>(extra), 8, 1, false);
            const unsigned slot = channel.slots.claim().slot;
            auto& head = channel.control->slot[slot];
            switch (which) {
                case 0: head.version = 9; break;
                case 1: head.published_ns = 9; break;
                case 2: head.extra_bytes = 1 << 20; break;
                case 3: head.extra_bytes = 9; break;
                default: channel.slots.slot_data(slot)[64] = std::byte{8};
            }
            const WeightsClaim claim = channel.slots.read(&out, 1, reinterpret_cast<std::byte*>(into), monotonic_ns() + 1'000'000, true, tries);
            CHECK((claim.version == 0 || claim.damaged) && "it is told");
            auto& other = channel.control->slot[count == 2 ? slot ^ 1 : slot];
            other.version = 1 << 20;
            CHECK((channel.slots.take_over() == 1) && "and no successor announces it");
        }
    }
}

void nan_is_found_wherever_it_is_and_publishes_nothing() {
    for (const unsigned count : {1u, 2u}) {
        const std::size_t words = 20000;
        Channel channel(words * 8, count);
        std::vector<float> clean(words, 1.0f), dirty(words, 2.0f);
        for (const std::size_t at : {std::size_t{0}, words / 2, words - 1}) {
            for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
                std::fill(dirty.begin(), dirty.end(), 2.0f);
                WeightsPart parts[] = {part(clean.data(), words * 4, 0, 4, kFloat), part(dirty.data(), words * 4, words * 4, 4, kFloat)};
                const std::uint64_t before = channel.slots.newest();
                CHECK((channel.slots.publish(parts, 2, nullptr, 0, before + 1, true) == -1) && "finite weights pass");
                dirty[at] = bad;
                CHECK((channel.slots.publish(parts, 2, nullptr, 0, before + 2, true) == 1) && "the bad part is named");
                CHECK((channel.slots.newest() == before + 1 && channel.slots.claim().version == before + 1) && "the last version stands");
            }
        }
    }
}

void a_claim_is_void_once_its_slot_is_written() {
    Channel channel(64, 2);
    std::uint64_t value[8] = {};
    const WeightsPart in = part(value, 64);
    channel.slots.publish(&in, 1, nullptr, 0, 1, false);
    const WeightsClaim claim = channel.slots.claim();
    channel.slots.publish(&in, 1, nullptr, 0, 2, false);
    CHECK((channel.slots.holds(claim)) && "one publication leaves the slot before it alone");
    channel.slots.begin();
    CHECK((!channel.slots.holds(claim)) && "the next one does not");
}

void a_version_tells_when_it_was_published() {
    for (const unsigned count : {1u, 2u}) {
        Channel channel(64, count);
        std::uint64_t value[8] = {}, got[8], tries = 0, last = 0;
        std::byte extra[kExtra];
        const WeightsPart in = part(value, 64), out = part(got, 64);
        for (std::uint64_t version = 1; version <= 3; ++version) {
            const auto before = static_cast<std::uint64_t>(monotonic_ns());
            channel.slots.publish(&in, 1, nullptr, 0, version, false);
            const auto after = static_cast<std::uint64_t>(monotonic_ns());
            const WeightsClaim claim = channel.slots.read(&out, 1, extra, 0, true, tries);
            CHECK((claim.version == version && !claim.damaged) && "what a publisher wrote is not damaged");
            CHECK((before <= claim.published_ns && claim.published_ns <= after && last <= claim.published_ns) && "published then");
            last = claim.published_ns;
        }
    }
}

void waiting_ends_with_the_publication() {
    Channel channel(64, 2);
    std::uint64_t value[8] = {};
    const WeightsPart in = part(value, 64);
    CHECK((!channel.slots.wait_newer(0, monotonic_ns() + 1'000'000)) && "no publication, no news");
    std::thread writer([&] { channel.slots.publish(&in, 1, nullptr, 0, 1, false); });
    CHECK((channel.slots.wait_newer(0, monotonic_ns() + 60 * kSoon)) && "the publication ends the wait");
    writer.join();
}

}  // namespace

int main() {
    readers_see_whole_versions(16, 2, 20000);
    readers_see_whole_versions(16384, 2, 500);
    readers_see_whole_versions(400000, 2, 20);
    readers_see_whole_versions(1024, 1, 500);
    the_tail_and_odd_sizes_arrive();
    a_half_written_slot_is_never_read_and_is_taken_over();
    a_finished_version_is_announced_by_the_successor();
    words_that_no_publisher_wrote_are_no_version();
    nan_is_found_wherever_it_is_and_publishes_nothing();
    a_claim_is_void_once_its_slot_is_written();
    a_version_tells_when_it_was_published();
    waiting_ends_with_the_publication();
    std::puts("weights slots: all hold");
}
