// A block is nobody's or one holder's, and what is kept has a bound.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "common/memory_pool.hpp"

using jurybox::MemoryPool;

namespace {

constexpr std::size_t kPage = 4096;

void test_a_block_given_back_is_handed_out_again() {
    MemoryPool pool(16 * kPage);
    std::byte* first = pool.take(3 * kPage - 5);
    std::byte* second = pool.take(3 * kPage);
    CHECK(first != nullptr && second != nullptr && first != second);
    std::memset(first, 1, 3 * kPage);
    pool.give(first, 3 * kPage - 5);
    CHECK(pool.kept() == 3 * kPage);
    CHECK(pool.take(4 * kPage) != first);
    CHECK(pool.take(3 * kPage - 1) == first);
    CHECK(pool.kept() == 0);
}

void test_no_more_than_the_bound_is_kept() {
    MemoryPool pool(4 * kPage);
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(pool.take(2 * kPage));
    for (std::byte* block : blocks) pool.give(block, 2 * kPage);
    CHECK(pool.kept() == 4 * kPage);
    CHECK(pool.take(2 * kPage) == blocks[3]);  // the last one is the warmest
    std::byte* large = pool.take(5 * kPage);
    pool.give(large, 5 * kPage);
    CHECK(pool.kept() == 2 * kPage);  // too large to be kept, and nothing had to go for it
}

void test_two_threads_never_hold_the_same_block() {
    MemoryPool pool(8 * kPage);
    std::atomic<bool> mixed{false};
    std::vector<std::thread> threads;
    for (int own = 1; own <= 4; ++own)
        threads.emplace_back([&, own] {
            for (int round = 0; round < 2000; ++round) {
                std::byte* block = pool.take(kPage);
                std::memset(block, own, kPage);
                for (std::size_t i = 0; i < kPage; i += 64)
                    if (block[i] != std::byte(own)) mixed = true;
                pool.give(block, kPage);
            }
        });
    for (auto& thread : threads) thread.join();
    CHECK(!mixed);
    CHECK(pool.kept() <= 8 * kPage);
}

}  // namespace

int main() {
    test_a_block_given_back_is_handed_out_again();
    test_no_more_than_the_bound_is_kept();
    test_two_threads_never_hold_the_same_block();
    return 0;
}
