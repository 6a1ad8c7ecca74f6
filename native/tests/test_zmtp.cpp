// A connection carries whole messages, whatever pieces their bytes come in, and ends where a peer sends what is none.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>

#include "check.hpp"
#include "serving/zmtp.hpp"

using jurybox::Zmtp;

// The largest allocation, of any thread.
static std::atomic<std::size_t> largest{0};
__attribute__((noinline)) void* operator new(std::size_t size) {
    if (size > largest) largest = size;
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

constexpr std::size_t kMost = 8 << 20;
constexpr std::int64_t kSecond = 1'000'000'000;

struct Pair {
    int ends[2];
    Pair() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0); }
};

// A ticket's first frame: the prefix and its sequence.
std::string ticket(std::uint64_t sequence) {
    std::string frame("J\2", 2);
    frame.append(reinterpret_cast<const char*>(&sequence), sizeof sequence);
    return frame + std::string(20, '\0');
}

bool send(Zmtp& link, std::uint64_t sequence, const std::vector<std::string>& frames) {
    std::vector<Zmtp::Part> parts;
    for (const std::string& frame : frames) parts.push_back({frame.data(), frame.size()});
    return sequence ? link.send(sequence, parts.data(), parts.size()) : link.post(parts.data(), parts.size());
}

void test_messages_go_to_and_fro_and_are_in_flight_until_answered() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "Lme", kMost, kSecond), router(pair.ends[1], "", kMost, 0, true);
    CHECK(send(dealer, 7, {ticket(7), "rows"}));  // kept until hands are shaken
    CHECK(dealer.holds(7) && !dealer.ready());
    router.receive(0);
    dealer.receive(0);
    CHECK(router.receive(kSecond) && dealer.ready() && router.peer() == "Lme");
    Zmtp::Message message;
    CHECK(router.take(message) && message.size() == 2 && message[1] == "rows");
    CHECK(send(router, 0, {ticket(7), "", std::string(300, 'x')}));
    CHECK(dealer.await(7, kSecond, message) && message.size() == 3 && message[2].size() == 300 && message[1].empty());
    CHECK(!dealer.holds(7));
}

void test_an_answer_to_another_stays_for_who_takes_all() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "", kMost, kSecond), router(pair.ends[1], "", kMost, 0, true);
    router.receive(0), dealer.receive(0), router.receive(0);
    send(dealer, 1, {ticket(1)}), send(dealer, 2, {ticket(2)});
    send(router, 0, {ticket(1)}), send(router, 0, {ticket(2)});
    Zmtp::Message message;
    CHECK(dealer.await(2, kSecond, message) && dealer.holds(1) && !dealer.holds(2));
    CHECK(dealer.take(message) && message[0] == ticket(1) && !dealer.holds(1) && !dealer.take(message));
}

void test_large_messages_are_kept_until_there_is_room() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "", kMost, 0), router(pair.ends[1], "", kMost, 0, true);
    router.receive(0), dealer.receive(0), router.receive(0);
    const std::string large(3 << 20, 'y');
    CHECK(send(dealer, 5, {ticket(5), large, "behind"}) && dealer.pending() > 0);
    Zmtp::Message message;
    for (int turn = 0; turn < 10'000 && !router.take(message); ++turn) router.receive(0), dealer.receive(0);
    CHECK(message.size() == 3 && message[1] == large && message[2] == "behind" && dealer.pending() == 0);
}

void test_bytes_that_were_sent_take_no_memory_while_others_wait() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "", kMost, 0), router(pair.ends[1], "", kMost, 0, true);
    router.receive(0), dealer.receive(0), router.receive(0);
    const std::string large(500'000, 'z');
    for (int i = 0; i < 4; ++i) CHECK(send(router, 0, {large}));
    largest = 0;
    for (int i = 0; i < 60; ++i) {
        CHECK(send(router, 0, {large}));
        Zmtp::Message message;  // the peer reads as much as is sent, but always leaves something
        for (int turn = 0; turn < 10'000 && !dealer.take(message); ++turn) dealer.receive(0), router.receive(0);
        CHECK(message.size() == 1 && message[0] == large && router.pending() > 0);
    }
    CHECK(largest <= 16 * large.size());
}

void test_a_peer_that_ends_leaves_nothing_held_but_known() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "", kMost, 0);
    {
        Zmtp router(pair.ends[1], "", kMost, 0, true);
        router.receive(0), dealer.receive(0);
        send(dealer, 3, {ticket(3)});
    }
    CHECK(!dealer.receive(kSecond) && dealer.broken() && !dealer.holds(3));
    CHECK(dealer.unanswered().size() == 1 && !send(dealer, 4, {ticket(4)}) && dealer.unanswered().size() == 1);
}

void test_a_sign_of_life_is_answered() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "", kMost, 0), router(pair.ends[1], "", kMost, 0, true);
    router.receive(0), dealer.receive(0), router.receive(0);
    ::usleep(20'000);
    const std::int64_t before = router.silence_ns();
    router.ping();
    dealer.receive(0), router.receive(0);
    CHECK(before >= 20'000'000 && router.silence_ns() < before && !router.broken());
}

std::string greeting() {
    std::string bytes("\xFF\0\0\0\0\0\0\0\1\x7F\3\1NULL", 16);
    return bytes + std::string(48, '\0') + std::string("\4\6\5READY", 8);
}

void test_a_message_that_is_too_long_ends_the_connection_before_it_is_there() {
    for (const std::string& bad : {std::string("\2\0\0\0\0\1\0\0\0", 9), std::string("\xF0\1x", 3), std::string("\4\1\5", 3)}) {
        Pair pair;
        Zmtp router(pair.ends[1], "", 1 << 20, 0, true);
        const std::string bytes = greeting() + bad;
        CHECK(::write(pair.ends[0], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        router.receive(0);
        CHECK(router.broken() && !router.why().empty());
        ::close(pair.ends[0]);
    }
}

void test_any_bytes_in_any_pieces_are_messages_or_an_end() {
    std::mt19937 random(3);
    for (int round = 0; round < 300; ++round) {
        Pair pair;
        Zmtp router(pair.ends[1], "", 1 << 16, 0, true);
        std::string bytes = round % 3 ? greeting() : "";
        for (int i = 0; i < 400; ++i) bytes.push_back(static_cast<char>(random() % (round % 2 ? 256 : 4)));
        for (std::size_t at = 0; at < bytes.size() && !router.broken();) {
            const std::size_t size = std::min<std::size_t>(1 + random() % 40, bytes.size() - at);
            CHECK(::write(pair.ends[0], bytes.data() + at, size) == static_cast<ssize_t>(size));
            at += size;
            router.receive(0);
            Zmtp::Message message;
            while (router.take(message)) CHECK(!message.empty());
        }
        ::close(pair.ends[0]);
    }
}

void greet(int end, const std::string& behind = "") {
    const std::string bytes = greeting() + behind;
    CHECK(::write(end, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
}

void test_who_sends_without_end_takes_its_part_of_a_call_and_no_more() {
    for (const std::size_t size : {std::size_t{0}, std::size_t{60'000}, std::size_t{200'000}, kMost}) {
        Pair pair;
        Zmtp router(pair.ends[1], "", kMost, 0, true);
        greet(pair.ends[0]);
        router.receive(0);
        std::thread sender([&] {
            std::string frame(1, size > 255 ? '\2' : '\0');
            for (int shift = size > 255 ? 56 : 0; shift >= 0; shift -= 8) frame.push_back(static_cast<char>(size >> shift & 0xFF));
            frame += std::string(size, 'x');
            std::string many;
            while (many.size() < 1 << 20) many += frame;
            for (std::size_t sent = 0; sent < 100 << 20; sent += many.size())
                if (::send(pair.ends[0], many.data(), many.size(), MSG_NOSIGNAL) < 0) break;
        });
        for (int call = 0; call < 5; ++call) {
            std::size_t messages = 0;
            router.receive(kSecond);
            for (Zmtp::Message message; router.take(message);) ++messages;
            CHECK(!router.broken() && (messages < 2 || messages * size <= 5 << 20) && messages <= 70'000);
        }
        router.close();
        sender.join();
        ::close(pair.ends[0]);
    }
}

void test_every_answer_is_found_however_many_others_nobody_has_taken() {
    Pair pair;
    Zmtp dealer(pair.ends[0], "", kMost, kSecond), router(pair.ends[1], "", kMost, 0, true);
    router.receive(0), dealer.receive(0), router.receive(0);
    Zmtp::Message message;
    for (std::uint64_t n = 1; n <= 300; ++n) {
        send(dealer, n, {ticket(n)});
        send(router, 0, {ticket(n)});
        if (n % 60 == 0) dealer.receive(0);
        while (router.receive(0) && router.take(message)) {
        }
    }
    CHECK(dealer.await(300, 10 * kSecond, message) && message[0] == ticket(300));
    for (std::uint64_t n = 1; n < 300; ++n) CHECK(dealer.receive(kSecond) && dealer.take(message) && message[0] == ticket(n));
}

void test_who_says_how_much_will_come_takes_no_memory_by_it() {
    for (const bool ready : {false, true}) {
        Pair pair;
        Zmtp router(pair.ends[1], "", 1 << 30, 0, true);
        std::string bytes = greeting().substr(0, ready ? std::string::npos : 64);
        bytes += std::string("\6\0\0\0\0\x30\0\0\0", 9);
        CHECK(::write(pair.ends[0], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        router.receive(0);
        CHECK(router.broken());
        ::close(pair.ends[0]);
    }
}

void test_pings_that_nobody_hears_the_answers_of_are_not_kept_without_end() {
    Pair pair;
    Zmtp router(pair.ends[1], "", kMost, 0, true);
    greet(pair.ends[0]);
    router.receive(0);
    std::string pings;
    for (int i = 0; i < 2000; ++i) pings += std::string("\4\27\4PING\0\1", 9) + std::string(16, 'c');
    for (int i = 0; i < 40 && !router.broken(); ++i) {
        for (std::size_t at = 0; at < pings.size();) {
            const ssize_t went = ::send(pair.ends[0], pings.data() + at, pings.size() - at, MSG_DONTWAIT | MSG_NOSIGNAL);
            at += static_cast<std::size_t>(std::max<ssize_t>(went, 0));
            router.receive(0);
        }
    }
    CHECK(!router.broken() && router.pending() < 128 << 10);
    ::close(pair.ends[0]);
}

void test_names_of_properties_have_no_case() {
    Pair pair;
    Zmtp router(pair.ends[1], "", kMost, 0, true);
    const std::string bytes = greeting().substr(0, 64) + std::string("\4\27\5READY\10IDENTITY\0\0\0\4Rone", 25);
    CHECK(::write(pair.ends[0], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    router.receive(0);
    CHECK(router.ready() && router.peer() == "Rone");
    ::close(pair.ends[0]);
}

void test_a_socket_that_was_not_taken_is_still_its_owners() {
    const int file = ::memfd_create("no socket", MFD_CLOEXEC);  // which epoll refuses
    bool failed = false;
    try {
        Zmtp link(file, "", kMost, 0);
    } catch (const std::system_error&) {
        failed = true;
    }
    CHECK(failed && ::fcntl(file, F_GETFD) >= 0);
    ::close(file);
}

// Bytes that were right, bent: cut, repeated, shuffled, with lengths and flags changed, in pieces of any size.
void test_messages_bent_in_any_way_are_messages_or_an_end(int rounds) {
    std::mt19937 random(7);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
    for (int round = 0; round < rounds; ++round) {
        Pair pair;
        const std::size_t most = below(2) ? 1 << 16 : 1 << 19;
        const bool is_dealer = below(2);
        Zmtp link(pair.ends[1], "", most, 0, !is_dealer);
        std::string bytes = greeting();
        const std::size_t whole = bytes.size();
        for (std::size_t i = below(12); i > 0; --i) {
            const std::size_t kind = below(8);
            if (kind == 0) {
                bytes += std::string("\4\27\4PING\0\1", 9) + std::string(16, 'c');
            } else if (kind == 1) {
                bytes += std::string("\4\12\11SUBSCRIBE", 12);
            } else {
                const std::size_t size = kind == 2 ? below(200'000) : kind == 3 ? below(3) : below(300);
                const bool is_long = size > 255 || below(4) == 0;
                bytes.push_back(static_cast<char>((is_long ? 2 : 0) | (below(2) ? 1 : 0)));
                for (int shift = is_long ? 56 : 0; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(size >> shift & 0xFF));
                bytes += std::string(size, static_cast<char>(kind));
            }
        }
        for (std::size_t i = below(4); i > 0; --i) {
            const std::size_t from = below(3) ? whole : 0, at = from + below(bytes.size() - from + 1);
            switch (below(4)) {
                case 0: bytes.insert(at, 1, static_cast<char>(below(256))); break;
                case 1: bytes.erase(at, 1 + below(9)); break;
                case 2: if (at < bytes.size()) bytes[at] = static_cast<char>(below(2) ? below(256) : below(8)); break;
                default: bytes.insert(at, bytes.substr(whole, below(40))); break;
            }
            if (bytes.size() < whole) bytes.resize(whole, '\0');
        }
        ::fcntl(pair.ends[0], F_SETFL, O_NONBLOCK);
        std::size_t taken = 0;
        for (std::size_t at = 0; at < bytes.size() && !link.broken();) {
            const std::size_t size = std::min<std::size_t>(below(2) ? 1 + below(12) : 1 + below(100'000), bytes.size() - at);
            const ssize_t went = ::send(pair.ends[0], bytes.data() + at, size, MSG_NOSIGNAL);
            at += static_cast<std::size_t>(std::max<ssize_t>(went, 0));
            link.receive(0);
            Zmtp::Message message;
            while (below(3) ? link.take(message) : link.take(below(3), message)) {
                CHECK(!message.empty());
                for (const std::string& frame : message) {
                    CHECK(frame.size() <= most);
                    taken += frame.size();
                }
            }
            CHECK(taken <= at && link.pending() < 1 << 20);
        }
        ::close(pair.ends[0]);
    }
}

}  // namespace

// A ROUTER's end with a budget, and a raw peer that has shaken hands.
struct Counted {
    Pair pair;
    std::shared_ptr<jurybox::Budget> budget;
    std::shared_ptr<jurybox::Account> account;
    std::unique_ptr<Zmtp> router;

    explicit Counted(std::size_t each, std::size_t all) : budget(std::make_shared<jurybox::Budget>(jurybox::BudgetLimits{{each, each, 9}, {all, all, 9}})) {
        account = std::make_shared<jurybox::Account>(budget, jurybox::Door::kTcp);
        router = std::make_unique<Zmtp>(pair.ends[1], "", kMost, 0, true, account);
        greet(pair.ends[0]);
        for (int i = 0; i < 100 && !router->ready(); ++i) router->receive(0);
        CHECK(router->ready());
    }
    std::size_t held() const { return account->held(jurybox::Resource::kReceived); }
    static std::string frame(const std::string& content, bool more, std::size_t announced = 0) {
        const std::uint64_t size = announced ? announced : content.size();
        std::string made(1, static_cast<char>(2 | (more ? 1 : 0)));
        for (int shift = 56; shift >= 0; shift -= 8) made.push_back(static_cast<char>(size >> shift & 0xFF));
        return made + content;
    }
    void write(const std::string& bytes) {
        const std::int64_t until = jurybox::monotonic_ns() + 20 * kSecond;
        for (std::size_t at = 0; at < bytes.size();) {
            CHECK(jurybox::monotonic_ns() < until);
            const ssize_t went = ::send(pair.ends[0], bytes.data() + at, std::min<std::size_t>(bytes.size() - at, 64 << 10), MSG_DONTWAIT);
            if (went > 0) at += static_cast<std::size_t>(went);
            CHECK(!router->broken());
            router->receive(0);
        }
        for (int i = 0; i < 20; ++i) router->receive(0);
    }
};

void test_what_has_come_is_counted_until_it_is_taken() {
    Counted counted(8 << 20, 16 << 20);
    counted.write(Counted::frame(ticket(1), true) + Counted::frame(std::string(100'000, 'x'), false));
    CHECK(counted.held() >= 100'000 && counted.held() < 140'000);
    Zmtp::Message message;
    CHECK(counted.router->take(message) && message.size() == 2 && counted.held() == 0);
    counted.write(Counted::frame(ticket(2), true) + Counted::frame(std::string(300'000, 'x'), false, 5 << 20));  // and no more of it
    CHECK(counted.held() >= 300'000 && counted.held() < 660'000 && counted.router->refused().empty());
    counted.router.reset();
    CHECK(counted.held() == 0);
}

void test_a_message_without_room_is_dropped_and_told_and_the_next_one_comes() {
    for (const bool own : {true, false}) {  // the connection has its share, or others hold what there is
        Counted counted(own ? 1 << 20 : 8 << 20, 16 << 20);
        jurybox::Account others(counted.budget, jurybox::Door::kTcp);
        if (!own) others.owe(jurybox::Resource::kReceived, 13 << 20);
        std::string few;
        for (int i = 0; i < 30; ++i) few += Counted::frame(std::string(60'000, 's'), true);
        counted.write(Counted::frame(ticket(1), true) + Counted::frame(std::string(3 << 20, 'x'), true) + Counted::frame("behind", false));
        counted.write(Counted::frame(ticket(2), true) + few + few + Counted::frame("end", false));
        counted.write(Counted::frame(std::string(3 << 20, 'x'), false));  // no first frame is kept
        counted.write(Counted::frame(ticket(3), true) + Counted::frame("rows", false));
        const auto refused = counted.router->refused();
        CHECK(refused.size() == 3 && refused[0] == ticket(1) && refused[1] == ticket(2) && refused[2].empty());
        Zmtp::Message message;
        CHECK(counted.router->take(message) && message.size() == 2 && message[0] == ticket(3) && message[1] == "rows");
        CHECK(!counted.router->take(message) && !counted.router->broken() && counted.held() == 0);
    }
}

int main() {
    test_messages_go_to_and_fro_and_are_in_flight_until_answered();
    test_an_answer_to_another_stays_for_who_takes_all();
    test_large_messages_are_kept_until_there_is_room();
    test_bytes_that_were_sent_take_no_memory_while_others_wait();
    test_a_peer_that_ends_leaves_nothing_held_but_known();
    test_a_sign_of_life_is_answered();
    test_a_message_that_is_too_long_ends_the_connection_before_it_is_there();
    test_any_bytes_in_any_pieces_are_messages_or_an_end();
    test_who_sends_without_end_takes_its_part_of_a_call_and_no_more();
    test_every_answer_is_found_however_many_others_nobody_has_taken();
    test_who_says_how_much_will_come_takes_no_memory_by_it();
    test_pings_that_nobody_hears_the_answers_of_are_not_kept_without_end();
    test_names_of_properties_have_no_case();
    test_a_socket_that_was_not_taken_is_still_its_owners();
    const char* rounds = std::getenv("JURYBOX_FUZZ_ROUNDS");
    test_what_has_come_is_counted_until_it_is_taken();
    test_a_message_without_room_is_dropped_and_told_and_the_next_one_comes();
    test_messages_bent_in_any_way_are_messages_or_an_end(rounds ? std::atoi(rounds) : 2000);
}
