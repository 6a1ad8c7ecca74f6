// A replay ring over the heap, for the tests.
#pragma once
#include <cstdint>
#include <vector>

#include "replay/ring.hpp"

namespace jurybox::replay {

// Rows of `fields` float32 vectors.
struct HeapRing {
    Ring ring;
    std::vector<std::uint64_t> control_words = std::vector<std::uint64_t>(sizeof(Control) / 8 + 8);
    std::vector<std::uint64_t> memory, links, tree;

    HeapRing(std::uint64_t capacity, std::size_t fields, std::size_t elements, bool linked, bool prioritized) {
        auto address = reinterpret_cast<std::uintptr_t>(control_words.data());
        ring.control = reinterpret_cast<Control*>((address + 63) / 64 * 64);
        std::size_t offset = 8;
        for (std::size_t f = 0; f < fields; ++f) {
            ring.fields.push_back(Field{offset, elements * 4, elements * 4, elements, Codec::raw, 1.0, 0});
            offset += elements * 4;
        }
        ring.slot_bytes = (offset + 7) / 8 * 8;
        ring.capacity = capacity;
        memory.resize(capacity * ring.slot_bytes / 8);
        ring.slots = reinterpret_cast<std::byte*>(memory.data());
        if (linked) {
            links.resize(capacity * 2);
            ring.links = reinterpret_cast<Link*>(links.data());
        }
        if (prioritized) {
            tree.resize(SumTree::words(capacity));
            ring.tree = SumTree(reinterpret_cast<SumTree::Word*>(tree.data()), capacity);
        }
    }
};

}  // namespace jurybox::replay
