// Threads that take turns at copying: never more than there are places, and each as often as the others.
#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"
#include "replay/copy_turns.hpp"

using namespace jurybox;
using namespace jurybox::replay;

namespace {

void spin_for(std::int64_t ns) {
    for (const std::int64_t until = monotonic_ns() + ns; monotonic_ns() < until;) jurybox::pause();
}

void threads_beyond_the_places_get_as_many_turns_and_never_more_at_a_time(std::size_t places, std::size_t threads) {
    CopyTurns turns(places, 200'000);
    std::atomic<int> copying{0}, most{0};
    std::atomic<bool> stop{false};
    std::vector<std::atomic<std::size_t>> copies(threads);
    std::vector<std::thread> running;
    for (std::size_t i = 0; i < threads; ++i)
        running.emplace_back([&, i] {
            while (!stop.load()) {
                const CopyTurns::Turn turn(turns);
                CHECK(turn.granted());
                const int now = copying.fetch_add(1) + 1;
                for (int seen = most.load(); now > seen && !most.compare_exchange_weak(seen, now);) {
                }
                spin_for(5'000);
                copying.fetch_sub(1);
                ++copies[i];
            }
        });
    // From when all of them run, until each has had many slices, however long that takes on a loaded machine.
    const auto wait_for = [&](std::size_t i, std::size_t n) {
        while (copies[i].load() < n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    for (std::size_t i = 0; i < threads; ++i) wait_for(i, 1);
    std::vector<std::size_t> before(threads);
    for (std::size_t i = 0; i < threads; ++i) before[i] = copies[i].load();
    for (std::size_t i = 0; i < threads; ++i) wait_for(i, before[i] + 4'000);
    stop.store(true);
    for (auto& thread : running) thread.join();
    CHECK(most.load() <= static_cast<int>(places));
    std::size_t fewest = ~std::size_t{0}, all = 0;
    for (std::size_t i = 0; i < threads; ++i) {
        const std::size_t n = copies[i].load() - before[i];
        fewest = std::min(fewest, n), all += n;
    }
    CHECK(fewest * threads * 4 >= all);  // a quarter of an equal share at least
}

// The owner of the only place is away, in the midst of its slice: others need not wait until it ends.
void a_place_whose_thread_is_away_is_given_on() {
    CopyTurns turns(1, 3'600'000'000'000);
    { const CopyTurns::Turn turn(turns); }
    for (int i = 0; i < 3; ++i)
        std::thread([&] {
            const CopyTurns::Turn turn(turns);
            CHECK(turn.granted());
        }).join();
}

// A thread that is stopped while it copies holds up nobody for ever.
void after_a_while_a_thread_copies_without_a_turn() {
    CopyTurns turns(1);
    const CopyTurns::Turn turn(turns);
    std::thread([&] {
        const CopyTurns::Turn second(turns);
        CHECK(!second.granted());
    }).join();
}

}  // namespace

int main() {
    threads_beyond_the_places_get_as_many_turns_and_never_more_at_a_time(1, 4);
    threads_beyond_the_places_get_as_many_turns_and_never_more_at_a_time(2, 8);
    a_place_whose_thread_is_away_is_given_on();
    after_a_while_a_thread_copies_without_a_turn();
}
