// Writers and readers of one ring in one process: what a reader hands out is never mixed, lost or older than asked.
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "heap_ring.hpp"
#include "replay/sample.hpp"

using namespace jurybox::replay;

namespace {

void write_stamped(Ring& ring, float stamp, std::size_t elements, Stream* stream = nullptr, unsigned ends = 0) {
    std::vector<float> row(elements, stamp);
    std::vector<Source> sources(ring.fields.size());
    for (auto& s : sources) s.data = reinterpret_cast<const std::byte*>(row.data());
    Writer writer(ring);
    Ticket t = 0;
    Written outcome = Written::taken;
    while (outcome == Written::taken) {
        t = ring.reserve(1);
        outcome = writer.write(t, sources.data(), 0, stream, ends, false);
        if (outcome == Written::taken) ring.control->retried.fetch_add(1, std::memory_order_relaxed);
    }
    CHECK(outcome == Written::yes);
    if (ring.tree.present()) ring.tree.set(ring.slot_of(t), SumTree::quantised(1.0));
}

struct Out {
    std::vector<std::vector<float>> columns;
    std::vector<std::int64_t> indices;
    std::vector<float> weights;
    Request request;
    Out(const Ring& ring, std::size_t n) : indices(n), weights(n) {
        request.n = n;
        for (const Field& f : ring.fields) {
            columns.emplace_back(n * f.elements);
            request.columns.push_back(Column{f, reinterpret_cast<std::byte*>(columns.back().data()), f.bytes});
        }
        request.indices = indices.data();
        request.weights = weights.data();
    }
    std::size_t mixed_rows() const {
        std::size_t bad = 0;
        const std::size_t elements = columns[0].size() / indices.size();
        for (std::size_t i = 0; i < indices.size(); ++i) {
            bool same = true;
            for (const auto& column : columns)
                for (std::size_t e = 0; e < elements; ++e) same = same && column[i * elements + e] == columns[0][i * elements];
            bad += !same;
        }
        return bad;
    }
};

std::size_t run_writers_and_readers(bool prioritized, bool verify) {
    // Few slots, so that writers lap each other and the readers all the time.
    HeapRing heap(8, 3, 33, false, prioritized);
    heap.ring.verify = verify;
    for (int i = 0; i < 8; ++i) write_stamped(heap.ring, static_cast<float>(i), 33);
    std::atomic<bool> stop{false};
    std::atomic<std::size_t> mixed{0};
    std::vector<std::thread> threads;
    for (int w = 0; w < 3; ++w)
        threads.emplace_back([&, w] {
            for (int i = 0; !stop.load(); ++i) write_stamped(heap.ring, static_cast<float>(w * 100000 + i % 100000), 33);
        });
    for (int r = 0; r < 2; ++r)
        threads.emplace_back([&, r] {
            Out out(heap.ring, 16);
            out.request.prioritized = prioritized;
            for (std::uint64_t i = 0; i < 400; ++i) {
                out.request.key = jurybox::replay::mixed(i, static_cast<std::uint64_t>(r));
                Sampler sampler(heap.ring, out.request);
                CHECK(sampler.run(nullptr) == Sampled::yes);
                mixed += out.mixed_rows();
            }
        });
    threads[3].join();
    threads[4].join();
    stop = true;
    for (int w = 0; w < 3; ++w) threads[w].join();
    return mixed;
}

void test_readers_never_see_a_mixed_row() {
    CHECK(run_writers_and_readers(false, true) == 0);
    CHECK(run_writers_and_readers(true, true) == 0);
}

// The test of the test: without the reader's second look the same load hands out mixed rows.
void test_without_verification_rows_are_mixed() {
    std::size_t mixed = 0;
    for (int tries = 0; tries < 50 && mixed == 0; ++tries) mixed = run_writers_and_readers(false, false);
    CHECK(mixed > 0);
}

void test_no_row_is_lost_while_there_is_room() {
    HeapRing heap(4000, 1, 4, false, false);
    std::vector<std::thread> threads;
    for (int w = 0; w < 4; ++w)
        threads.emplace_back([&, w] {
            for (int i = 0; i < 1000; ++i) write_stamped(heap.ring, static_cast<float>(w * 1000 + i), 4);
        });
    for (auto& t : threads) t.join();
    CHECK(heap.ring.added() == 4000 && heap.ring.size() == 4000);
    Out out(heap.ring, 4000);
    out.request.replacement = false;
    Sampler sampler(heap.ring, out.request);
    jurybox::ThreadPool pool(2);
    CHECK(sampler.run(&pool) == Sampled::yes);
    std::vector<int> seen(4000);
    for (std::size_t i = 0; i < 4000; ++i) ++seen[static_cast<std::size_t>(out.columns[0][i * 4])];
    for (int n : seen) CHECK(n == 1);
}

void test_a_killed_writer_costs_its_slot_only() {
    HeapRing heap(4, 1, 2, false, false);
    for (int i = 0; i < 4; ++i) write_stamped(heap.ring, static_cast<float>(i), 2);
    const Ticket dead = heap.ring.reserve(1);
    CHECK(heap.ring.claim(dead));  // and never commits
    for (int i = 10; i < 30; ++i) write_stamped(heap.ring, static_cast<float>(i), 2);
    CHECK(heap.ring.added() == 25);
    Out out(heap.ring, 3);
    out.request.replacement = false;
    Sampler three(heap.ring, out.request);
    CHECK(three.run(nullptr) == Sampled::yes);
    for (std::size_t i = 0; i < 3; ++i) CHECK(out.columns[0][2 * i] >= 26.0F);
    out.request.n = 4;
    Out four(heap.ring, 4);
    four.request.replacement = false;
    Sampler all(heap.ring, four.request);
    CHECK(all.run(nullptr) == Sampled::exhausted);
}

void test_windows_follow_the_episode_under_lapping_writers() {
    HeapRing heap(64, 1, 1, true, false);
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (int w = 0; w < 3; ++w)
        threads.emplace_back([&, w] {
            Stream stream;
            for (int i = 0; !stop.load(); ++i) {
                // stamp = writer * 1e6 + episode * 10 + step; episodes of ten steps
                const float stamp = static_cast<float>(w * 1000000 + i % 900000);
                write_stamped(heap.ring, stamp, 1, &stream, i % 10 == 9 ? 2 : 0);
            }
        });
    while (heap.ring.added() < 1000) std::this_thread::yield();
    std::size_t sequences = 0;
    for (std::uint64_t k = 0; k < 300; ++k) {
        constexpr std::size_t n = 8, length = 4;
        std::vector<float> values(n * length);
        std::vector<std::uint8_t> valid(n * length);
        Request request;
        request.n = n;
        request.key = k;
        request.window.linked = true;
        request.window.length = length;
        Column column{heap.ring.fields[0], reinterpret_cast<std::byte*>(values.data()), length * 4, 0, length, false, valid.data()};
        request.columns.push_back(column);
        Sampler sampler(heap.ring, request);
        const Sampled got = sampler.run(nullptr);
        if (got == Sampled::unreadable) continue;  // lapped faster than it could read
        CHECK(got == Sampled::yes);
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 1; j < length; ++j) {
                if (!valid[i * length + j]) {
                    CHECK(static_cast<int>(values[i * length + j - 1]) % 10 == 9 || !valid[i * length + j - 1]);
                    continue;
                }
                CHECK(values[i * length + j] == values[i * length + j - 1] + 1);
                CHECK(static_cast<int>(values[i * length + j]) % 10 != 0);
                ++sequences;
            }
        }
    }
    CHECK(sequences > 0);
    stop = true;
    for (auto& t : threads) t.join();
}

// Two episodes of one number a row: 0, 1, 2, 3 terminates, and 10, 11 is cut off without a last observation.
HeapRing two_episodes() {
    HeapRing heap(16, 1, 1, true, false);
    Stream stream;
    for (const float stamp : {0.0F, 1.0F, 2.0F, 3.0F}) write_stamped(heap.ring, stamp, 1, &stream, stamp == 3.0F ? 2 : 0);
    for (const float stamp : {10.0F, 11.0F}) write_stamped(heap.ring, stamp, 1, &stream, stamp == 11.0F ? 1 : 0);
    return heap;
}

void test_sequences_of_full_length_end_with_no_episode() {
    HeapRing heap = two_episodes();
    for (const bool full : {true, false}) {
        constexpr std::size_t n = 64, length = 3;
        std::vector<float> values(n * length);
        std::vector<std::uint8_t> valid(n * length);
        Request request;
        request.n = n;
        request.key = 5;
        request.window.linked = true;
        request.window.length = length;
        request.window.full_length = full;
        request.columns.push_back(Column{heap.ring.fields[0], reinterpret_cast<std::byte*>(values.data()), length * 4, 0, length, false, valid.data()});
        Sampler sampler(heap.ring, request);
        CHECK(sampler.run(nullptr) == Sampled::yes);
        std::size_t cut = 0, longest = 0;
        for (std::size_t i = 0; i < n; ++i) {
            cut += !valid[i * length + length - 1];
            longest += values[i * length] == 1.0F;  // of as many transitions as asked for, and no more
        }
        CHECK(full ? cut == 0 : cut > 0);
        CHECK(longest > 0);
    }
}

void test_a_step_without_its_next_observation_is_drawn_only_where_it_is_not_needed() {
    HeapRing heap = two_episodes();
    for (const bool needed : {true, false}) {
        constexpr std::size_t n = 64;
        std::vector<float> values(n), next(n), discount(n);
        Request request;
        request.n = n;
        request.key = 5;
        request.window.linked = true;
        request.window.steps = 1;
        request.window.next_needed = needed;
        request.window.discount = discount.data();
        request.columns.push_back(Column{heap.ring.fields[0], reinterpret_cast<std::byte*>(values.data()), 4});
        request.columns.push_back(Column{heap.ring.fields[0], reinterpret_cast<std::byte*>(next.data()), 4, 0, 1, true});
        Sampler sampler(heap.ring, request);
        CHECK(sampler.run(nullptr) == Sampled::yes);
        std::size_t terminal = 0, cut = 0;
        for (std::size_t i = 0; i < n; ++i) {
            terminal += values[i] == 3.0F;
            cut += values[i] == 11.0F;
            CHECK(discount[i] == (values[i] == 3.0F ? 0.0F : 1.0F));
            CHECK(values[i] == 3.0F || values[i] == 11.0F || next[i] == values[i] + 1);
        }
        CHECK(terminal > 0);  // its next observation has no weight
        CHECK(needed ? cut == 0 : cut > 0);
    }
}

void test_the_likeliest_draws_weigh_least() {
    HeapRing heap(3, 1, 1, false, true);
    const double priorities[] = {1.0, 2.0, 4.0};
    for (int i = 0; i < 3; ++i) write_stamped(heap.ring, static_cast<float>(i), 1);
    for (std::size_t i = 0; i < 3; ++i) heap.ring.tree.set(i, SumTree::quantised(priorities[i]));
    Out out(heap.ring, 64);
    out.request.prioritized = true;
    out.request.beta = 1.0;
    Sampler sampler(heap.ring, out.request);
    CHECK(sampler.run(nullptr) == Sampled::yes);
    std::size_t drawn[3] = {};
    for (std::size_t i = 0; i < 64; ++i) {
        const auto row = static_cast<std::size_t>(out.columns[0][i]);
        ++drawn[row];
        CHECK(out.weights[i] == static_cast<float>(1.0 / priorities[row]));
    }
    CHECK(drawn[0] > 0 && drawn[0] < drawn[1] && drawn[1] < drawn[2]);
}

void test_a_permutation_hits_every_number_once() {
    for (std::uint64_t size : {1ULL, 2ULL, 7ULL, 64ULL, 1000ULL}) {
        Permutation order(size, 99);
        std::vector<int> seen(size);
        for (std::uint64_t i = 0; i < size; ++i) ++seen[order(i)];
        for (int n : seen) CHECK(n == 1);
    }
}

}  // namespace

int main() {
    test_a_permutation_hits_every_number_once();
    test_sequences_of_full_length_end_with_no_episode();
    test_a_step_without_its_next_observation_is_drawn_only_where_it_is_not_needed();
    test_the_likeliest_draws_weigh_least();
    test_no_row_is_lost_while_there_is_room();
    test_a_killed_writer_costs_its_slot_only();
    test_readers_never_see_a_mixed_row();
    test_without_verification_rows_are_mixed();
    test_windows_follow_the_episode_under_lapping_writers();
    std::puts("ok");
}
