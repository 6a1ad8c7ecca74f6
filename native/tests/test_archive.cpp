// Blocks and records come back as they were, and no damaged one is taken for whole or leads out of its buffer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "heap_ring.hpp"
#include "replay/archive.hpp"

using namespace jurybox;
using namespace jurybox::replay;

namespace {

using Block = std::vector<std::uint8_t>;

// Bytes as replays have them: runs, repetitions, stray values, noise.
Block bytes_of(std::size_t n, std::uint64_t seed) {
    Block block(n);
    for (std::size_t i = 0; i < n;) {
        const std::uint64_t random = mixed(seed, i);
        const std::size_t run = std::min<std::size_t>(n - i, 1 + (random >> 8) % (seed % 3 == 0 ? 5 : 400));
        for (std::size_t k = 0; k < run; ++k)
            block[i + k] = static_cast<std::uint8_t>(random % 4 == 0 ? mixed(seed, i + k) : random % 4 == 1 && i >= 7 ? block[i + k - 7] : random >> 4 & 1);
        i += run;
    }
    return block;
}

// Every buffer is as long as it must be and no longer, so that the address sanitizer sees a step too far.
void test_blocks_come_back() {
    for (std::size_t n = 1; n < 700; ++n) {
        for (std::uint64_t seed = 0; seed < 12; ++seed) {
            const Block in = bytes_of(n, seed * 1000 + n);
            Block out(n + n / 255 + 16), back(n);
            const std::size_t bytes = lz4::compress(in.data(), n, out.data(), out.size());
            CHECK(bytes != 0);
            const Block exact(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(bytes));
            CHECK(lz4::decompress(exact.data(), bytes, back.data(), n));
            CHECK(back == in);
            Block longer(n + 1);
            CHECK(!lz4::decompress(exact.data(), bytes, longer.data(), n + 1));
            CHECK(!lz4::decompress(exact.data(), bytes - 1, back.data(), n));
            for (std::size_t room = 0; room < bytes; room += 1 + bytes / 7) {
                Block tight(room);
                CHECK(lz4::compress(in.data(), n, tight.data(), room) == 0);
            }
        }
    }
    const Block large = bytes_of(300'000, 5);
    Block out(large.size()), back(large.size());
    const std::size_t bytes = lz4::compress(large.data(), large.size(), out.data(), out.size());
    CHECK(bytes != 0 && bytes < large.size());
    CHECK(lz4::decompress(out.data(), bytes, back.data(), back.size()) && back == large);
}

void test_noise_is_given_up() {
    Block noise(200'000), out(noise.size());
    for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<std::uint8_t>(mixed(1, i));
    CHECK(lz4::compress(noise.data(), noise.size(), out.data(), out.size()) == 0);
}

void test_garbage_stays_inside_its_buffers() {
    for (std::uint64_t seed = 0; seed < 20'000; ++seed) {
        Block in = bytes_of(40 + seed % 300, seed);
        Block block(in.size() + 16 + in.size() / 255);
        block.resize(lz4::compress(in.data(), in.size(), block.data(), block.size()));
        for (std::uint64_t k = 0; k < 1 + seed % 4; ++k) block[mixed(seed, k) % block.size()] ^= static_cast<std::uint8_t>(1 + mixed(seed, 100 + k) % 255);
        if (seed % 5 == 0)
            for (auto& byte : block) byte = static_cast<std::uint8_t>(mixed(seed, static_cast<std::uint64_t>(byte) + 7));
        Block exact(block), back(in.size());
        (void)lz4::decompress(exact.data(), exact.size(), back.data(), back.size());
    }
}

constexpr std::size_t kElements = 30;

void write(Ring& ring, float stamp) {
    const std::vector<float> row(kElements, stamp);
    Source source;
    source.data = reinterpret_cast<const std::byte*>(row.data());
    CHECK(Writer(ring).write(ring.reserve(1), &source, 0, nullptr, 0, false) == Written::yes);
}

// The pieces of packed records, as the reader of a file finds them.
std::vector<Piece> pieces_of(const Block& file, std::size_t slot_bytes) {
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < file.size();) {
        RecordHead head;
        std::memcpy(&head, file.data() + at, sizeof head);
        CHECK(head.own_checksum == crc32c(&head, offsetof(RecordHead, own_checksum)));
        pieces.push_back(Piece{head.codec, at + sizeof head, head.stored_bytes, head.raw_bytes, head.checksum, head.first * slot_bytes});
        at += sizeof head + head.stored_bytes;
    }
    return pieces;
}

void test_records_come_back_beside_a_writer(bool compressed) {
    constexpr std::uint64_t kSlots = 64;
    HeapRing from(kSlots, 1, kElements, false, false), to(kSlots, 1, kElements, false, false);
    for (std::uint64_t i = 0; i < kSlots; ++i) write(from.ring, static_cast<float>(i));
    const std::uint64_t newest = from.ring.reserved();
    std::thread writer([&] {
        for (int i = 0; i < 20; ++i) write(from.ring, static_cast<float>(1000 + i));
    });
    const std::uint64_t runs[] = {20, 44, 0, 13, 13, 7};
    Block file(3 * sizeof(RecordHead) + kSlots * from.ring.slot_bytes);
    std::vector<std::uint64_t> sequences(kSlots);
    const Packed packed = pack(from.ring, runs, 3, 0, newest, compressed, reinterpret_cast<std::byte*>(file.data()), sequences.data());
    writer.join();
    file.resize(packed.bytes);
    CHECK(packed.rows >= kSlots - 20 && packed.rows <= kSlots);

    std::FILE* kept = std::tmpfile();
    CHECK(kept != nullptr && std::fwrite(file.data(), 1, file.size(), kept) == file.size() && std::fflush(kept) == 0);
    const std::vector<Piece> pieces = pieces_of(file, from.ring.slot_bytes);
    CHECK(pieces.size() == 3);
    for (const Piece& piece : pieces) CHECK(bring(fileno(kept), file.data(), piece, to.ring.slots + piece.target, false) == Brought::whole);
    std::size_t rows = 0;
    for (std::uint64_t i = 0; i < kSlots; ++i) {
        const std::uint64_t word = to.ring.sequence(i).load();
        CHECK(word == sequences[i]);
        if (word == 0) continue;
        CHECK(word == whole(i));
        float values[kElements];
        std::memcpy(values, to.ring.slot(i) + 8, sizeof values);
        for (float value : values) CHECK(value == static_cast<float>(i));
        ++rows;
    }
    CHECK(rows == packed.rows);

    // One wrong byte: noticed, and with `keep` what was there stays.
    Block broken = file;
    broken[pieces[1].offset + pieces[1].stored_bytes / 2] ^= 4;
    std::rewind(kept);
    CHECK(std::fwrite(broken.data(), 1, broken.size(), kept) == broken.size() && std::fflush(kept) == 0);
    const std::vector<std::uint64_t> before = to.memory;
    CHECK(bring(fileno(kept), broken.data(), pieces[1], to.ring.slots + pieces[1].target, true) == Brought::damaged);
    CHECK(to.memory == before);
    CHECK(bring(fileno(kept), broken.data(), pieces[1], to.ring.slots + pieces[1].target, false) == Brought::damaged);
    std::fclose(kept);
}

void test_a_new_memory_is_filled_through_its_file() {
    std::FILE *kept = std::tmpfile(), *fresh = std::tmpfile();
    CHECK(kept != nullptr && fresh != nullptr && ftruncate(fileno(fresh), 1 << 20) == 0);
    std::vector<std::uint8_t> bytes(300'000);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 999);
    CHECK(std::fwrite(bytes.data(), 1, bytes.size(), kept) == bytes.size() && std::fflush(kept) == 0);
    void* memory = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(fresh), 0);
    CHECK(memory != MAP_FAILED);
    const auto* at = static_cast<const std::uint8_t*>(memory);
    // Two pieces share a page; neither begins with one.
    const Piece first{kAsIs, 0, 100'001, 100'001, crc32c(bytes.data(), 100'001), 5000};
    const Piece second{kAsIs, 100'001, 199'999, 199'999, crc32c(bytes.data() + 100'001, 199'999), 105'001};
    Piece wrong = second;
    wrong.checksum ^= 1;
    CHECK(bring_fresh(fileno(kept), bytes.data(), wrong, fileno(fresh)) == Brought::damaged);
    CHECK(at[105'001] == 0);  // nothing of it is there
    CHECK(bring_fresh(fileno(kept), bytes.data(), second, fileno(fresh)) == Brought::whole);
    CHECK(bring_fresh(fileno(kept), bytes.data(), first, fileno(fresh)) == Brought::whole);
    CHECK(std::memcmp(at + 5000, bytes.data(), bytes.size()) == 0);
    CHECK(at[4999] == 0 && at[305'000] == 0);
    // Full: of a file that may not be written, here.
    CHECK(bring_fresh(fileno(kept), bytes.data(), first, -1) == Brought::no_room);
    munmap(memory, 1 << 20);
    std::fclose(kept);
    std::fclose(fresh);
}

}  // namespace

int main() {
    test_blocks_come_back();
    test_noise_is_given_up();
    test_garbage_stays_inside_its_buffers();
    test_records_come_back_beside_a_writer(true);
    test_records_come_back_beside_a_writer(false);
    test_a_new_memory_is_filled_through_its_file();
    std::puts("replay pieces: ok");
    return 0;
}
