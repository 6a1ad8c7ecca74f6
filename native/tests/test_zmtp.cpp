// A connection carries whole messages, whatever pieces their bytes come in, and ends where a peer sends what is none.
#include <sys/socket.h>

#include <memory>
#include <random>
#include <string>

#include "check.hpp"
#include "serving/zmtp.hpp"

using jurybox::Zmtp;

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

}  // namespace

int main() {
    test_messages_go_to_and_fro_and_are_in_flight_until_answered();
    test_an_answer_to_another_stays_for_who_takes_all();
    test_large_messages_are_kept_until_there_is_room();
    test_a_peer_that_ends_leaves_nothing_held_but_known();
    test_a_sign_of_life_is_answered();
    test_a_message_that_is_too_long_ends_the_connection_before_it_is_there();
    test_any_bytes_in_any_pieces_are_messages_or_an_end();
}
