// The sums are exact after any interleaving of updates, and draws follow the priorities.
#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

#include "check.hpp"
#include "replay/draw.hpp"

using jurybox::replay::SumTree;

namespace {

struct HeapTree {
    std::vector<std::uint64_t> words;
    SumTree tree;
    explicit HeapTree(std::size_t leaves)
        : words(SumTree::words(leaves)), tree(reinterpret_cast<SumTree::Word*>(words.data()), leaves) {}
};

void test_the_total_is_the_sum_of_the_leaves_after_concurrent_updates() {
    for (std::size_t leaves : {1UL, 2UL, 16UL, 17UL, 300UL, 5000UL}) {
        HeapTree heap(leaves);
        std::vector<std::thread> threads;
        for (std::uint64_t w = 0; w < 4; ++w)
            threads.emplace_back([&, w] {
                for (std::uint64_t round = 0; round < 20; ++round) {
                    SumTree::Update update(heap.tree);
                    for (std::uint64_t i = 0; i < 50; ++i) {
                        const auto random = jurybox::replay::mixed(w * 1000 + round, i);
                        update.set(random % leaves, 1 + (random >> 40));
                    }
                }
            });
        for (auto& t : threads) t.join();
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < leaves; ++i) sum += heap.tree.leaf(i);
        CHECK(sum == heap.tree.total());
        const auto before = heap.words;
        heap.tree.rebuild();
        CHECK(before == heap.words);
    }
}

void test_every_target_finds_its_leaf() {
    constexpr std::size_t leaves = 700;
    HeapTree heap(leaves);
    for (std::size_t i = 0; i < leaves; ++i) heap.tree.set(i, i % 3);  // every third has no chance
    std::vector<std::uint64_t> targets;
    for (std::uint64_t t = 0; t < heap.tree.total(); ++t) targets.push_back(t);
    std::vector<std::size_t> found(targets.size());
    heap.tree.find(targets.data(), targets.size(), found.data());
    std::vector<std::uint64_t> hits(leaves);
    for (std::size_t leaf : found) ++hits[leaf];
    for (std::size_t i = 0; i < leaves; ++i) CHECK(hits[i] == i % 3);
    const std::uint64_t beyond = heap.tree.total() + 5;
    std::size_t leaf = 0;
    heap.tree.find(&beyond, 1, &leaf);

    CHECK(heap.tree.leaf(leaf) != 0);
}

void test_priorities_are_quantised_within_their_bounds() {
    CHECK(SumTree::quantised(0.0) == 1);
    CHECK(SumTree::quantised(std::nan("")) == 1);
    CHECK(SumTree::quantised(1.0) == std::uint64_t{1} << 24);
    CHECK(SumTree::quantised(1e30) == SumTree::kMost);
}

}  // namespace

int main() {
    test_the_total_is_the_sum_of_the_leaves_after_concurrent_updates();
    test_every_target_finds_its_leaf();
    test_priorities_are_quantised_within_their_bounds();
    std::puts("ok");
}
