// The shm rings between threads: nothing lost, nothing answered twice, nobody left asleep.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/eventfd.h>

#include "check.hpp"
#include "serving/shm_rings.hpp"

using namespace jurybox;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kIncarnation = 41;

struct Pipe {
    int ends[2];
    Pipe() { CHECK(::pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0); }
    ~Pipe() {
        ::close(ends[0]);
        ::close(ends[1]);
    }
};

std::unique_ptr<ShmRingsMemory> memory() { return std::make_unique<ShmRingsMemory>(); }

Ticket ticket(std::uint64_t sequence) {
    Ticket t{};
    t.sequence = sequence;
    t.rows = 1;
    t.incarnation = kIncarnation;
    return t;
}

// Clients in closed loop, each with several tickets in flight; spin and sleep are both exercised.
void every_ticket_is_answered_once(std::int64_t spin_ns) {
    auto rings = memory();
    Pipe pipe;
    constexpr int kClients = 6, kTickets = 3000, kDepth = 3;
    std::atomic<bool> stop{false};
    std::thread engine([&] {
        ShmRingsEngine side(rings.get(), kIncarnation, spin_ns);
        pollfd fds[] = {{pipe.ends[0], POLLIN, 0}};
        Ticket taken[16];  // fewer than can be in flight: what does not fit must stay
        while (!stop) {
            const std::size_t n = side.collect(taken, 16);
            if (n == 0) {
                if (side.wait(fds, 1, kSecond / 20)) side.pause(fds, kSecond / 5000, 3);
                continue;
            }
            CHECK(side.reply(taken, n, kOk, 2, "", 0) == 0);
        }
    });
    std::vector<std::thread> clients;
    for (int c = 0; c < kClients; ++c)
        clients.emplace_back([&, c] {
            // Some share the word they sleep on, others do not.
            ShmRingsClient side(rings.get(), static_cast<std::uint32_t>(c * 13), 7 + c, pipe.ends[1], spin_ns);
            std::uint64_t sent = 0, received = 0;
            Answer answers[kRing];
            while (received < kTickets) {
                while (sent < kTickets && sent - received < kDepth) CHECK(side.submit(ticket(++sent)));
                CHECK(side.wait(30 * kSecond));  // a lost wake-up would show here
                const std::size_t n = side.receive(answers, kRing);
                for (std::size_t i = 0; i < n; ++i) {
                    CHECK(answers[i].sequence == ++received);
                    CHECK(answers[i].version == 2);
                }
            }
        });
    for (auto& client : clients) client.join();
    stop = true;
    engine.join();
}

void a_pausing_engine_is_woken_by_as_many_tickets_as_it_waits_for() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    pollfd fds[] = {{pipe.ends[0], POLLIN, 0}};
    ShmRingsClient one(rings.get(), 1, 1, pipe.ends[1], 0), two(rings.get(), 70, 2, pipe.ends[1], 0), three(rings.get(), 71, 3, pipe.ends[1], 0);
    CHECK(one.submit(ticket(1)));
    engine.pause(fds, kSecond / 50, 2);  // one does not end it: time does
    std::thread others([&] {
        while (!rings->sleeping.load()) std::this_thread::yield();
        CHECK(two.submit(ticket(1)));
        CHECK(three.submit(ticket(1)));
    });
    engine.pause(fds, 30 * kSecond, 3);  // the one from before counts
    others.join();
    engine.pause(fds, 30 * kSecond, 2);  // they are all there
    Ticket taken[4];
    CHECK(engine.collect(taken, 4) == 3);
}

void a_full_ring_refuses_and_loses_nothing() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient client(rings.get(), 5, 1, pipe.ends[1], 0);
    for (std::uint32_t i = 0; i < kRing; ++i) CHECK(client.submit(ticket(i + 1)));
    CHECK(!client.submit(ticket(99)));
    Ticket taken[kRing * 2];
    CHECK(engine.collect(taken, kRing * 2) == kRing);
    CHECK(!client.submit(ticket(99)));  // unanswered ones count as well
    CHECK(engine.reply(taken, kRing, kOk, 1, "", 0) == 0);
    Answer answers[kRing];
    CHECK(client.receive(answers, kRing) == kRing);
    CHECK(client.submit(ticket(99)));
}

void answers_to_an_earlier_lease_are_skipped() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    Ticket taken[4];
    {
        ShmRingsClient dead(rings.get(), 3, 1, pipe.ends[1], 0);
        CHECK(dead.submit(ticket(1)));
        CHECK(engine.collect(taken, 4) == 1);
    }
    ShmRingsClient heir(rings.get(), 3, 2, pipe.ends[1], 0);
    CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0);
    CHECK(heir.submit(ticket(1)));
    CHECK(engine.collect(taken, 4) == 1);
    CHECK(engine.reply(taken, 1, 10, 5, "the model raised", 16) == 0);
    Answer answers[kRing];
    CHECK(heir.wait(kSecond));
    CHECK(heir.receive(answers, kRing) == 1);
    CHECK(answers[0].version == 5 && answers[0].code == 10);
    CHECK(std::strcmp(heir.message(), "the model raised") == 0);
}

void failures_of_one_lane_have_each_their_own_message() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient client(rings.get(), 3, 1, pipe.ends[1], 0);
    for (std::uint64_t n = 0; n < 5; ++n) CHECK(client.submit(ticket(n)));
    Ticket taken[5];
    CHECK(engine.collect(taken, 5) == 5);
    for (std::size_t n = 0; n < 5; ++n) {
        const std::string why = "reason " + std::to_string(n);
        CHECK(engine.reply(taken + n, 1, n == 3 ? std::uint32_t{kOk} : 10U, 1, why.data(), why.size()) == 0);
    }
    Answer answer;
    std::vector<std::string> others;
    CHECK(client.answer_to(2, kSecond, answer, [&](const Answer& other) { others.push_back(std::to_string(other.sequence) + client.message()); }));
    CHECK(others == std::vector<std::string>({"0reason 0", "1reason 1"}) && std::string(client.message()) == "reason 2");
    CHECK(client.receive(&answer, 1) == 1 && answer.code == kOk);
    CHECK(client.receive(&answer, 1) == 1 && std::string(client.message()) == "reason 4");
}

void a_long_message_is_cut_between_two_characters() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient client(rings.get(), 3, 1, pipe.ends[1], 0);
    const std::string two = "\xc3\xa9", four = "\xf0\x9f\x98\x80";
    for (std::size_t at = kMessage - 8; at < kMessage + 4; ++at) {
        for (const std::string& character : {two, four}) {
            std::string text(at, 'a');
            for (int i = 0; i < 9; ++i) text += character;
            CHECK(client.submit(ticket(1)));
            Ticket taken[1];
            CHECK(engine.collect(taken, 1) == 1);
            CHECK(engine.reply(taken, 1, 10, 1, text.data(), text.size()) == 0);
            Answer answer;
            CHECK(client.receive(&answer, 1) == 1);
            const std::string came = client.message();
            CHECK(text.compare(0, came.size(), came) == 0 && came.size() < kMessage && came.size() + 4 >= kMessage);
            CHECK(came.size() <= at || (came.size() - at) % character.size() == 0);
        }
    }
}

void positions_that_are_nonsense_harm_only_their_lane() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient good(rings.get(), 1, 1, pipe.ends[1], 0), bad(rings.get(), 2, 2, pipe.ends[1], 0);
    CHECK(bad.submit(ticket(1)));
    rings->lanes[2].submitted.store(0xdeadbeef);
    CHECK(good.submit(ticket(4)));
    std::vector<Ticket> taken(200);
    const std::size_t n = engine.collect(taken.data(), taken.size());
    CHECK(n <= kRing + 1);
    CHECK(taken[0].sequence == 4 && taken[0].lane == 1);
}

void bits_of_no_lane_are_ignored() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    pollfd fds[] = {{pipe.ends[0], POLLIN, 0}};
    constexpr std::uint64_t kWrong = std::uint64_t{1} << 40 | std::uint64_t{1} << 63;
    rings->sleep_words[1].moved.store(0xFF);  // where the array of pending lanes would have its word 40
    rings->summary.store(kWrong);
    const std::int64_t before = monotonic_ns();
    engine.pause(fds, kSecond / 50, 3);  // no lane has posted: time ends it
    CHECK(monotonic_ns() - before >= kSecond / 50);
    ShmRingsClient client(rings.get(), 1, 1, pipe.ends[1], 0);
    CHECK(client.submit(ticket(1)));
    Ticket taken[1];
    CHECK(engine.collect(taken, 0) == 0 && rings->summary.load() == 1);  // what did not fit is there again, and nothing else
    CHECK(engine.collect(taken, 1) == 1 && rings->sleep_words[1].moved.load() == 0xFF);
}

void lanes_take_turns_if_they_do_not_fit_into_one_batch() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    constexpr std::uint32_t kLanes[] = {0, 1, 40, 63, 64, 2047};
    constexpr std::size_t kN = std::size(kLanes);
    std::vector<std::unique_ptr<ShmRingsClient>> clients;
    for (const std::uint32_t lane : kLanes) {
        clients.push_back(std::make_unique<ShmRingsClient>(rings.get(), lane, 1, pipe.ends[1], 0));
        CHECK(clients.back()->submit(ticket(1)) && clients.back()->submit(ticket(2)));
    }
    std::size_t served[kN] = {};
    for (std::size_t i = 0; i < 20 * kN; ++i) {
        Ticket taken;
        CHECK(engine.collect(&taken, 1) == 1 && engine.reply(&taken, 1, kOk, 1, "", 0) == 0);
        const std::size_t which = std::find(kLanes, kLanes + kN, taken.lane) - kLanes;
        ++served[which];
        Answer answer;
        CHECK(clients[which]->receive(&answer, 1) == 1 && clients[which]->submit(ticket(taken.sequence + 2)));  // always two
        CHECK(*std::max_element(served, served + kN) - *std::min_element(served, served + kN) <= 1);
    }
}

void one_call_wakes_a_words_clients_in_any_order_of_tickets() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    std::vector<std::unique_ptr<ShmRingsClient>> clients;
    std::vector<Ticket> taken;
    for (const std::uint32_t lane : {5u, 40u, 6u, 2047u, 41u}) {
        clients.push_back(std::make_unique<ShmRingsClient>(rings.get(), lane, 1, pipe.ends[1], 0));
        CHECK(clients.back()->submit(ticket(1)) && !clients.back()->arm());
        CHECK(engine.collect(&taken.emplace_back(), 1) == 1);
    }
    CHECK(engine.reply(taken.data(), taken.size(), kOk, 1, "", 0) == 0);
    for (const auto& client : clients) CHECK(client->arm());
    CHECK(rings->sleep_words[0].moved.load() == 1 && rings->sleep_words[1].moved.load() == 1 && rings->sleep_words[63].moved.load() == 1);
}

void a_client_that_never_reads_does_not_stop_the_engine() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    Ticket taken[1];
    std::size_t dropped = 0;
    ShmRingsClient client(rings.get(), 9, 1, pipe.ends[1], 0);
    CHECK(client.submit(ticket(1)));
    CHECK(engine.collect(taken, 1) == 1);
    for (std::uint32_t i = 0; i < kRing + 3; ++i) dropped += engine.reply(taken, 1, kOk, 1, "", 0);
    CHECK(dropped == 3);
}

void tickets_for_an_earlier_life_of_the_engine_are_dropped() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient client(rings.get(), 0, 1, pipe.ends[1], 0);
    Ticket old = ticket(1);
    old.incarnation = kIncarnation - 1;
    CHECK(client.submit(old));
    CHECK(client.submit(ticket(2)));
    Ticket taken[4];
    CHECK(engine.collect(taken, 4) == 1);
    CHECK(taken[0].sequence == 2);
}

void a_client_is_told_whether_it_is_alone() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient one(rings.get(), 1, 1, pipe.ends[1], 0), other(rings.get(), 2, 2, pipe.ends[1], 0);
    Ticket taken[1];
    const auto told = [&](ShmRingsClient& client) {
        CHECK(client.submit(ticket(1)));
        CHECK(engine.collect(taken, 1) == 1);
        CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0);
        Answer answer;
        CHECK(client.receive(&answer, 1) == 1);
        return answer.alone;
    };
    CHECK(told(one) == 0);  // who is new may be the first of many
    for (int i = 0; i < 16; ++i) told(one);
    CHECK(told(one) == 1);
    CHECK(told(other) == 0);
    CHECK(told(one) == 0);
}

// A thread that watches for an event loop waits on the lane whose owner waits, too.
void a_watcher_that_gives_up_takes_nobodys_wake_up() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    ShmRingsClient client(rings.get(), 4, 1, pipe.ends[1], 0);
    CHECK(client.submit(ticket(1)));
    Ticket taken[1];
    CHECK(engine.collect(taken, 1) == 1);
    std::int64_t took = 0;
    std::thread owner([&] {
        const std::int64_t began = monotonic_ns();
        Answer answer;
        CHECK(client.answer_to(1, 60 * kSecond, answer, [](const Answer&) {}));
        took = monotonic_ns() - began;
    });
    while (!rings->lanes[4].waiting.load()) std::this_thread::yield();
    CHECK(!client.wait(kSecond / 50));
    CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0);
    owner.join();
    CHECK(took < 30 * kSecond);
}

// Whether an engine still spins a while after `lanes` clients asked it in turns.
bool spins_on(std::uint32_t lanes) {
    constexpr std::int64_t kSpin = kSecond / 5000, kLook = 4 * kSpin;
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, kSpin);
    pollfd fds[] = {{pipe.ends[0], POLLIN, 0}};
    std::vector<std::unique_ptr<ShmRingsClient>> clients;
    for (std::uint32_t lane = 0; lane < lanes; ++lane)
        clients.push_back(std::make_unique<ShmRingsClient>(rings.get(), lane, 1, pipe.ends[1], 0));
    Ticket taken;
    Answer answer;
    for (std::uint64_t n = 1; n <= 40; ++n) {
        CHECK(clients[n % lanes]->submit(ticket(n)));
        CHECK(engine.collect(&taken, 1) == 1);
        CHECK(engine.reply(&taken, 1, kOk, 1, "", 0) == 0);
        CHECK(clients[n % lanes]->receive(&answer, 1) == 1);
    }
    std::atomic<bool> waiting{false};
    std::thread waiter([&] {
        waiting = true;
        CHECK(engine.wait(fds, 1, 30 * kSecond));
    });
    while (!waiting) std::this_thread::yield();
    const std::int64_t until = monotonic_ns() + kLook;
    while (monotonic_ns() < until) std::this_thread::sleep_for(std::chrono::microseconds(50));
    const bool spun = rings->sleeping.load() == 0;
    CHECK(clients[0]->submit(ticket(41)));
    waiter.join();
    return spun;
}

void an_engine_spins_longer_for_a_client_that_is_alone() {
    bool once = false;
    const std::int64_t until = monotonic_ns() + 60 * kSecond;  // others may take the core, and end a spin
    while (!once && monotonic_ns() < until) once = spins_on(1);
    CHECK(once);
    CHECK(!spins_on(2) || !spins_on(2) || !spins_on(2));  // where the thread had no core yet, it does not sleep yet
}

// Whether the last of 40 answers says that its client is alone: tickets of `lanes` clients in turns, of 1 to `most_rows` rows.
bool is_alone(std::uint32_t lanes, std::uint32_t most_rows) {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    std::vector<std::unique_ptr<ShmRingsClient>> clients;
    for (std::uint32_t lane = 0; lane < lanes; ++lane)
        clients.push_back(std::make_unique<ShmRingsClient>(rings.get(), lane, 1, pipe.ends[1], 0));
    Ticket taken;
    Answer answer{};
    for (std::uint64_t n = 1; n <= 40; ++n) {
        Ticket next = ticket(n);
        next.rows = 1 + static_cast<std::uint32_t>(n) % most_rows;
        CHECK(clients[n % lanes]->submit(next) && engine.collect(&taken, 1) == 1);
        CHECK(engine.reply(&taken, 1, kOk, 1, "", 0) == 0 && clients[n % lanes]->receive(&answer, 1) == 1);
    }
    return answer.alone;
}

void a_lane_with_tickets_of_several_sizes_is_not_that_of_one_client() {
    CHECK(is_alone(1, 1) && !is_alone(2, 1) && !is_alone(1, 3));
}

// One thread owns a client; any other may wait for answers and ask how many tickets are in flight.
void a_watcher_looks_on_while_the_owner_asks(std::int64_t spin_ns) {
    auto rings = memory();
    Pipe pipe;
    std::atomic<bool> stop{false};
    std::thread serving([&] {
        ShmRingsEngine side(rings.get(), kIncarnation, spin_ns);
        pollfd fds[] = {{pipe.ends[0], POLLIN, 0}};
        Ticket taken[4];
        while (!stop) {
            const std::size_t n = side.collect(taken, 4);
            if (n == 0)
                side.wait(fds, 1, kSecond / 20);
            else
                CHECK(side.reply(taken, n, kOk, 2, "", 0) == 0);
        }
    });
    ShmRingsClient client(rings.get(), 7, 1, pipe.ends[1], spin_ns);
    std::vector<std::thread> watchers;
    for (int i = 0; i < 2; ++i)
        watchers.emplace_back([&] {
            while (!stop) {
                CHECK(client.in_flight() <= 1);
                client.wait(kSecond / 1000);
            }
        });
    Answer answer;
    for (std::uint64_t sequence = 1; sequence <= 2000; ++sequence) {
        CHECK(client.submit(ticket(sequence)));
        CHECK(client.answer_to(sequence, 30 * kSecond, answer, [](const Answer&) {}));
    }
    stop = true;
    for (auto& watcher : watchers) watcher.join();
    serving.join();
}

// A process that sleeps on one eventfd for lanes of one word, added while its thread already sleeps.
void a_word_tells_of_every_armed_lane() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    const int told = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    CHECK(told >= 0);
    jurybox::ShmRingsWord word(rings.get(), 33);
    std::atomic<bool> stop{false};
    std::thread watcher([&] {
        while (!stop.load()) word.watch(told, kSecond / 10);
    });
    Ticket taken[1];
    Answer answer;
    for (std::uint32_t lane = 33; lane < 43; ++lane) {
        ShmRingsClient client(rings.get(), lane, lane, pipe.ends[1], 0);
        word.add(lane);
        for (std::uint64_t sequence = 1; sequence <= 50; ++sequence) {
            CHECK(client.submit(ticket(sequence)));
            CHECK(engine.collect(taken, 1) == 1);
            CHECK(!client.arm());
            std::uint64_t times = 0;
            [[maybe_unused]] const ssize_t before = ::read(told, &times, sizeof times);  // of what was added
            CHECK(!client.arm());
            CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0);
            while (!client.arm()) {
            }
            pollfd fd{told, POLLIN, 0};
            CHECK(::poll(&fd, 1, 30'000) == 1);  // a lost wake-up would show here
            CHECK(::read(told, &times, sizeof times) == sizeof times);
            CHECK(client.receive(&answer, 1) == 1 && answer.sequence == sequence);
        }
    }
    for (std::uint32_t lane = 33; lane < 43; ++lane) CHECK((word.remove(lane) == 0) == (lane == 42));
    stop.store(true);
    watcher.join();
    ::close(told);
}

// While a word is paused its only lane's client sleeps on the ring itself, and the watching thread is not woken for it.
void a_paused_word_tells_of_nothing_until_its_lane_is_added_again() {
    auto rings = memory();
    Pipe pipe;
    ShmRingsEngine engine(rings.get(), kIncarnation, 0);
    const int told = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    jurybox::ShmRingsWord word(rings.get(), 33);
    std::atomic<bool> stop{false};
    std::thread watcher([&] {
        while (!stop.load()) word.watch(told, kSecond);
    });
    ShmRingsClient client(rings.get(), 33, 7, pipe.ends[1], 0);
    Ticket taken[1];
    Answer answer;
    std::uint64_t times = 0;
    const std::int64_t began = monotonic_ns();
    for (std::uint64_t sequence = 1; sequence <= 200; ++sequence) {
        word.add(33);
        CHECK(client.submit(ticket(sequence)) && engine.collect(taken, 1) == 1 && !client.arm());
        CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0);
        pollfd fd{told, POLLIN, 0};
        CHECK(::poll(&fd, 1, 30'000) == 1 && client.receive(&answer, 1) == 1);
        word.pause(33);
        CHECK(client.submit(ticket(1000 + sequence)) && engine.collect(taken, 1) == 1 && !client.arm());
        std::thread replies([&] { CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0); });
        CHECK(client.wait(30 * kSecond) && client.receive(&answer, 1) == 1 && answer.sequence == 1000 + sequence);
        replies.join();
        [[maybe_unused]] const ssize_t earlier = ::read(told, &times, sizeof times);
    }
    CHECK(monotonic_ns() - began < 40 * kSecond);  // a lost wake-up would cost a second each time
    // The thread has found its lane paused once: from then on nothing wakes it.
    for (int quiet = 0; quiet < 3;) {
        pollfd fd{told, POLLIN, 0};
        quiet = ::poll(&fd, 1, 20) == 0 ? quiet + 1 : 0;
        [[maybe_unused]] const ssize_t last = ::read(told, &times, sizeof times);
    }
    for (std::uint64_t sequence = 2000; sequence < 2050; ++sequence) {
        CHECK(client.submit(ticket(sequence)) && engine.collect(taken, 1) == 1 && !client.arm());
        CHECK(engine.reply(taken, 1, kOk, 1, "", 0) == 0 && client.receive(&answer, 1) == 1);
        CHECK(::read(told, &times, sizeof times) < 0);
    }
    stop.store(true);
    word.add(33);
    watcher.join();
    ::close(told);
}

// Owners that sleep on their eventfds alone, as event loops do, each with another watcher whose telling nobody reads.
void a_watcher_tells_of_every_answer() {
    auto rings = memory();
    Pipe pipe;
    constexpr std::int64_t kWatched = 4 * kSecond;  // one watch: none that begins anew may tell of what was lost
    const std::int64_t until = monotonic_ns() + kSecond * 3 / 2;
    std::atomic<bool> stop{false};
    std::thread engine([&] {
        ShmRingsEngine side(rings.get(), kIncarnation, 0);
        pollfd fds[] = {{pipe.ends[0], POLLIN, 0}};
        Ticket taken[16];
        while (!stop) {
            const std::size_t n = side.collect(taken, 16);
            if (n == 0) side.wait(fds, 1, kSecond / 20);
            else CHECK(side.reply(taken, n, kOk, 2, "", 0) == 0);
        }
    });
    std::vector<std::thread> owners;
    for (int c = 0; c < 3; ++c)
        owners.emplace_back([&, c] {
            ShmRingsClient side(rings.get(), static_cast<std::uint32_t>(c), 7 + c, pipe.ends[1], 0);
            const int told = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), unread = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
            CHECK(told >= 0 && unread >= 0);
            std::thread watcher([&] { side.watch(told, kWatched); }), other([&] { side.watch(unread, kWatched); });
            std::uint64_t sent = 0, received = 0;
            Answer answers[kRing];
            while (monotonic_ns() < until) {
                side.set_watched(true);
                while (sent - received <= sent % 3) CHECK(side.submit(ticket(++sent)));
                pollfd fd{told, POLLIN, 0};
                CHECK(::poll(&fd, 1, 30'000) == 1);  // a lost wake-up would show here
                std::uint64_t times = 0;
                CHECK(::read(told, &times, sizeof times) == sizeof times);
                for (std::size_t n; (n = side.receive(answers, 2)) != 0; received += n) {
                }
                if (sent % 7 == 0) side.wait(100'000);  // the owner may wait, too, and takes nobody's wake-up
                if (sent % 3 == 0 && sent == received) {  // or alone
                    Answer answer;
                    side.set_watched(false);
                    CHECK(side.submit(ticket(++sent)));
                    const bool came = side.answer_to(sent, sent % 2 ? 50'000 : 2'000'000, answer, [](const Answer&) {});
                    received += came;
                    if (!came || sent % 5 == 0) side.set_watched(true);
                }
            }
            CHECK(received > 0);
            watcher.join(), other.join();
            ::close(told), ::close(unread);
        });
    for (auto& owner : owners) owner.join();
    stop = true;
    engine.join();
}

}  // namespace

int main() {
    every_ticket_is_answered_once(0);
    every_ticket_is_answered_once(20'000);
    a_pausing_engine_is_woken_by_as_many_tickets_as_it_waits_for();
    a_full_ring_refuses_and_loses_nothing();
    answers_to_an_earlier_lease_are_skipped();
    failures_of_one_lane_have_each_their_own_message();
    a_long_message_is_cut_between_two_characters();
    positions_that_are_nonsense_harm_only_their_lane();
    bits_of_no_lane_are_ignored();
    lanes_take_turns_if_they_do_not_fit_into_one_batch();
    one_call_wakes_a_words_clients_in_any_order_of_tickets();
    a_client_that_never_reads_does_not_stop_the_engine();
    a_client_is_told_whether_it_is_alone();
    an_engine_spins_longer_for_a_client_that_is_alone();
    a_lane_with_tickets_of_several_sizes_is_not_that_of_one_client();
    tickets_for_an_earlier_life_of_the_engine_are_dropped();
    a_watcher_that_gives_up_takes_nobodys_wake_up();
    a_watcher_looks_on_while_the_owner_asks(0);
    a_watcher_looks_on_while_the_owner_asks(20'000);
    a_watcher_tells_of_every_answer();
    a_word_tells_of_every_armed_lane();
    a_paused_word_tells_of_nothing_until_its_lane_is_added_again();
    std::puts("ok");
}
