// A remote client's plain tickets go to an engine and come back as its own rows, and all that is special is left alone.
#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "check.hpp"
#include "serving/relay_lane.hpp"

using namespace jurybox;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kLife = 41, kLease = 0x1234567890, kClient = 3;
constexpr std::uint32_t kLane = 5, kFirst = 2, kRows = 4;  // of an arena of eight rows
constexpr std::size_t kIn = 8, kMask = 1, kOut = 16;      // bytes of a row, two inputs and an output

// A client's connection, its lane at the relay and the engine behind it.
struct Relayed {
    std::unique_ptr<ShmRingsMemory> memory = std::make_unique<ShmRingsMemory>();
    int pipe[2], ends[2];
    EngineRecord record{};
    std::array<std::byte, 8 * kIn> input{};
    std::array<std::byte, 8 * kMask> mask{};
    std::array<std::byte, 8 * kOut> output{};
    std::unique_ptr<Zmtp> client, link;
    std::unique_ptr<ShmRingsClient> rings;
    std::unique_ptr<ShmRingsEngine> engine;
    std::unique_ptr<RelayLane> lane;

    explicit Relayed(std::int64_t spin_ns = 0, int buffer = 0) {
        CHECK(::pipe2(pipe, O_NONBLOCK | O_CLOEXEC) == 0);
        CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
        if (buffer) CHECK(::setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer) == 0);
        client = std::make_unique<Zmtp>(ends[0], "", 1 << 20, kSecond);
        link = std::make_unique<Zmtp>(ends[1], "", 1 << 20, 0, true);
        link->watched(true);
        link->receive(0), client->receive(0), link->receive(0);
        CHECK(link->ready() && client->ready());
        record.incarnation = kLife, record.state = 2;
        rings = std::make_unique<ShmRingsClient>(memory.get(), kLane, 77, pipe[1], spin_ns);
        engine = std::make_unique<ShmRingsEngine>(memory.get(), kLife, 0);
        lane = std::make_unique<RelayLane>(*link, std::vector<EngineRings>{{rings.get(), &record, kLife}}, kLease, kFirst, kRows,
                                           std::vector<RowColumn>{{input.data() + kFirst * kIn, kIn}, {mask.data() + kFirst * kMask, kMask}},
                                           std::vector<RowColumn>{{output.data() + kFirst * kOut, kOut}}, "J\2");
        lane->take_over(100);
    }
    ~Relayed() { ::close(pipe[0]), ::close(pipe[1]); }

    static std::string head(std::uint64_t sequence, std::uint32_t first, std::uint32_t rows, std::uint64_t lease = kLease) {
        const Ticket ticket{sequence, lease, kSecond, 0, 0, first, rows, 0, 9, {kClient}};
        return std::string("J\2", 2) + std::string(reinterpret_cast<const char*>(&ticket), sizeof ticket);
    }
    void ask(const std::vector<std::string>& frames) {
        std::vector<Zmtp::Part> parts;
        for (const std::string& frame : frames) parts.push_back({frame.data(), frame.size()});
        CHECK(client->post(parts.data(), parts.size()));
    }
    void ask(std::uint64_t sequence, std::uint32_t first, std::uint32_t rows, char filled = 'x') {
        ask({head(sequence, first, rows), std::string(rows * kIn, filled), std::string(rows * kMask, 'm')});
    }
    std::size_t take_in() {
        std::size_t taken = 0;
        while (link->receive(0)) {
            const std::size_t some = lane->take_in();
            if (some == 0) break;
            taken += some;
        }
        return taken;
    }
    // What the engine has; it fills the rows of what it computes with a letter.
    std::vector<Ticket> collect() {
        std::vector<Ticket> tickets(64);
        tickets.resize(engine->collect(tickets.data(), tickets.size()));
        return tickets;
    }
    void reply(const Ticket& ticket, char filled, std::uint32_t code = kOk) {
        std::memset(output.data() + ticket.first * kOut, filled, ticket.rows * kOut);
        CHECK(engine->reply(&ticket, 1, code, 7, "why", 3) == 0);
    }
    // The client's next answer: its sequence and incarnation are in the head, and nothing of anybody else's.
    bool answered(std::uint64_t sequence, std::uint32_t rows, char filled) {
        Zmtp::Message message;
        client->receive(kSecond / 50);
        if (!client->take(message)) return false;
        const std::uint64_t fields[] = {sequence, 7, kClient};
        std::string expected = std::string("J\2", 2) + std::string(reinterpret_cast<const char*>(fields), sizeof fields) + std::string(4, '\0');
        CHECK(message.size() == 2 && message[0] == expected && message[1] == std::string(rows * kOut, filled));
        return true;
    }
};

void test_tickets_are_answered_with_their_own_rows() {
    Relayed to;
    to.ask(1, 0, 1, 'a'), to.ask(2, 1, 3, 'b');
    CHECK(to.take_in() == 2 && to.lane->in_flight() == 2 && to.lane->number() == 102);
    const auto tickets = to.collect();
    CHECK(tickets.size() == 2 && tickets[0].first == kFirst && tickets[1].first == kFirst + 1 && tickets[1].rows == 3);
    CHECK(tickets[0].version == 9 && tickets[0].deadline - tickets[0].submitted == kSecond);
    CHECK(static_cast<char>(to.input[kFirst * kIn]) == 'a' && static_cast<char>(to.input[(kFirst + 3) * kIn]) == 'b');
    CHECK(static_cast<char>(to.mask[kFirst + 3]) == 'm' && to.mask[kFirst + 4] == std::byte{0} && to.mask[kFirst - 1] == std::byte{0});
    CHECK(to.lane->answer() && !to.client->receive(0));  // none is there yet
    to.reply(tickets[1], 'B'), to.reply(tickets[0], 'A');
    CHECK(to.lane->answer() && to.lane->in_flight() == 0);
    CHECK(to.answered(2, 3, 'B') && to.answered(1, 1, 'A'));
}

void test_what_is_special_stays_in_the_link_and_nothing_is_done() {
    const std::string one(kIn, 'x'), mask(kMask, 'm');
    const std::vector<std::vector<std::string>> special = {
        {Relayed::head(2, 0, 1, kLease + 1), one, mask},              // another lane's
        {Relayed::head(2, 0, 0), "", ""},                             // no rows
        {Relayed::head(2, 0, kRows + 1), std::string(5 * kIn, 'x'), std::string(5, 'm')},
        {Relayed::head(2, kRows, 1), one, mask},                      // beyond the lane
        {Relayed::head(2, 0xFFFFFFFF, 1), one, mask},
        {Relayed::head(2, 1, 0xFFFFFFFF), one, mask},
        {Relayed::head(2, 0, 1), one + "x", mask},                    // too many bytes, too few
        {Relayed::head(2, 0, 1), one, ""},
        {Relayed::head(2, 0, 1), one},                                // too few frames, too many
        {Relayed::head(2, 0, 1), one, mask, ""},
        {Relayed::head(2, 0, 1) + "x", one, mask},                    // no ticket
        {"J\3" + Relayed::head(2, 0, 1).substr(2), one, mask},        // of another version
        {std::string("J\2", 2), "12345678", "a call"},
        {""},
        {Relayed::head(1, 0, 1), one, mask},                          // a number that is in flight
        {Relayed::head(2, 3, 1), one, mask},                          // rows that are
    };
    for (const auto& frames : special) {
        Relayed to;
        to.ask(1, 2, 2, 'k');
        CHECK(to.take_in() == 1);
        to.ask(frames), to.ask(3, 0, 1);
        CHECK(to.take_in() == 0 && to.link->oldest()->size() == frames.size() && to.lane->number() == 101);
        CHECK(to.collect().size() == 1 && static_cast<char>(to.input[(kFirst + 3) * kIn]) == 'k' && to.input[kFirst * kIn] == std::byte{0});
        to.link->drop_oldest();
        CHECK(to.take_in() == 1);  // what was behind it
    }
}

void test_an_engine_of_another_life_gets_nothing() {
    for (const auto& [life, state] : {std::pair<std::uint64_t, std::uint32_t>{kLife + 1, 2}, {kLife, 1}}) {
        Relayed to;
        to.record.incarnation = life, to.record.state = state;
        to.ask(1, 0, 1);
        CHECK(to.take_in() == 0 && to.link->oldest() != nullptr && to.collect().empty());
    }
}

void test_an_answer_that_is_no_outputs_stays_for_who_has_its_message() {
    Relayed to;
    to.ask(1, 0, 1), to.ask(2, 1, 1);
    CHECK(to.take_in() == 2);
    const auto tickets = to.collect();
    to.reply(tickets[0], 'A'), to.reply(tickets[1], 'B', kRefused);
    CHECK(!to.lane->answer() && to.lane->in_flight() == 1);
    CHECK(to.answered(1, 1, 'A') && !to.answered(2, 1, 'B'));
    const auto sent = to.lane->hand_over();
    CHECK(sent.size() == 1 && sent[0].sequence == 2 && sent[0].number == 102 && sent[0].first == 1 && sent[0].version == 9 && sent[0].incarnation == kClient);
    Answer answer;
    CHECK(to.rings->receive(&answer, 1) == 1 && answer.sequence == 102 && answer.code == kRefused);
}

void test_who_hands_over_does_nothing_until_it_takes_over() {
    Relayed to;
    to.ask(1, 0, 1);
    CHECK(to.take_in() == 1);
    const auto first = to.collect();
    CHECK(to.lane->hand_over().size() == 1 && !to.lane->mine() && to.lane->in_flight() == 0);
    to.ask(2, 1, 1);
    to.reply(first[0], 'A');
    CHECK(to.take_in() == 0 && !to.lane->answer() && !to.answered(1, 1, 'A'));
    Answer answer;
    CHECK(to.rings->receive(&answer, 1) == 1 && answer.sequence == 101);
    to.lane->take_over(110);
    CHECK(to.take_in() == 1 && to.lane->number() == 111);
    to.reply(to.collect().at(0), 'B');
    CHECK(to.lane->answer() && to.answered(2, 1, 'B'));
}

void test_a_late_answer_to_an_earlier_ticket_is_nobodys() {
    Relayed to;
    to.ask(1, 0, 1);
    CHECK(to.take_in() == 1);
    const auto late = to.collect();
    to.lane->hand_over();
    to.lane->take_over(101);  // it was given up
    to.ask(2, 0, 1);
    CHECK(to.take_in() == 1);
    to.reply(late[0], 'A');
    CHECK(to.lane->answer() && to.lane->in_flight() == 1 && !to.answered(1, 1, 'A'));
    to.reply(to.collect().at(0), 'B');
    CHECK(to.lane->answer() && to.answered(2, 1, 'B'));
}

void test_tickets_are_spread_over_engines_that_serve() {
    Relayed to, other;  // of the second only the engine
    to.lane = std::make_unique<RelayLane>(*to.link, std::vector<EngineRings>{{to.rings.get(), &to.record, kLife}, {other.rings.get(), &other.record, kLife}},
                                          kLease, kFirst, kRows,
                                          std::vector<RowColumn>{{to.input.data() + kFirst * kIn, kIn}, {to.mask.data() + kFirst * kMask, kMask}},
                                          std::vector<RowColumn>{{to.output.data() + kFirst * kOut, kOut}}, "J\2");
    to.lane->take_over(100);
    to.ask(1, 0, 1), to.ask(2, 1, 1), to.ask(3, 2, 1);
    CHECK(to.take_in() == 3);
    const auto here = to.collect(), there = other.collect();
    CHECK(here.size() == 2 && here[0].sequence == 101 && here[1].sequence == 103 && there.size() == 1 && there[0].sequence == 102);
    std::memset(to.output.data() + there[0].first * kOut, 'B', kOut);
    CHECK(other.engine->reply(&there[0], 1, kOk, 7, "", 0) == 0 && to.lane->answer() && to.answered(2, 1, 'B'));
    to.ask(4, 1, 1);
    CHECK(to.take_in() == 1 && other.collect().at(0).sequence == 104);  // it has none now
    const auto sent = to.lane->hand_over();
    CHECK(sent.size() == 3 && sent[0].engine == 0 && sent[2].engine == 1 && sent[2].number == 104);
    other.record.state = 1;
    to.lane->take_over(104);
    to.ask(5, 0, 1), to.ask(6, 3, 1);
    CHECK(to.take_in() == 2 && to.collect().size() == 2 && other.collect().empty());
}

void test_a_client_that_does_not_read_has_one_message_kept_and_no_more() {
    Relayed to(0, 1);
    std::uint64_t sequence = 0;
    while (to.link->pending() == 0) {
        to.ask(++sequence, 0, 4);
        CHECK(to.take_in() == 1);
        to.reply(to.collect().at(0), 'z');
        CHECK(to.lane->answer() && sequence < 100'000);
    }
    const std::size_t kept = to.link->pending();
    CHECK(kept < 200);
    to.ask(++sequence, 0, 4);
    CHECK(to.take_in() == 1);
    to.reply(to.collect().at(0), 'z');
    CHECK(!to.lane->answer() && to.lane->in_flight() == 1 && to.link->pending() == kept);
    for (std::uint64_t read = 1; read < sequence; ++read) CHECK((to.link->receive(0), to.answered(read, 4, 'z')));
    CHECK(to.lane->answer() && to.answered(sequence, 4, 'z'));
}

void test_a_client_that_is_gone_costs_its_answer_alone() {
    Relayed to;
    to.ask(1, 0, 1);
    CHECK(to.take_in() == 1);
    to.client->close();
    to.reply(to.collect().at(0), 'A');
    CHECK(to.lane->answer() && to.lane->in_flight() == 0 && to.link->broken());
}

void test_a_ticket_that_stays_is_told_at_the_second_look() {
    Relayed to;
    to.ask(1, 0, 1);
    CHECK(!to.lane->overdue() && to.take_in() == 1 && !to.lane->overdue() && to.lane->overdue());
    to.reply(to.collect().at(0), 'A');
    CHECK(to.lane->answer() && !to.lane->overdue());
}

// A lone client, the engine and the relay each in a thread.
void test_a_lone_client_is_served_until_another_descriptor_is_readable(std::int64_t spin_ns) {
    Relayed to(spin_ns);
    std::atomic<bool> stop{false};
    std::thread engine([&] {
        while (!stop) {
            for (const Ticket& ticket : to.collect()) to.reply(ticket, static_cast<char>(to.input[ticket.first * kIn]));
        }
    });
    int other[2];
    CHECK(::pipe2(other, O_NONBLOCK) == 0);
    constexpr std::uint64_t kTickets = 500;
    std::thread client([&] {
        for (std::uint64_t sequence = 1; sequence <= kTickets; ++sequence) {
            const char filled = static_cast<char>('a' + sequence % 23);
            const std::string record = Relayed::head(sequence, sequence % 4, 1), row(kIn, filled), mask(kMask, 'm');
            const Zmtp::Part parts[] = {{record.data(), record.size()}, {row.data(), row.size()}, {mask.data(), mask.size()}};
            CHECK(to.client->send(sequence, parts, 3));
            Zmtp::Message message;
            CHECK(to.client->await(sequence, 60 * kSecond, message) && message[1] == std::string(kOut, filled));
        }
        CHECK(::write(other[1], "x", 1) == 1);
    });
    pollfd fds[] = {{to.link->descriptor(), POLLIN, 0}, {other[0], POLLIN, 0}};
    for (bool over = false; !over;) {
        to.lane->stay(fds, 2, kSecond / 100, kSecond);  // as the relay does: what it leaves is taken in beside it
        to.link->receive(0);
        to.lane->take_in();
        CHECK(to.link->oldest() == nullptr);
        CHECK(to.lane->answer());
        pollfd only{other[0], POLLIN, 0};
        over = to.lane->in_flight() == 0 && ::poll(&only, 1, 0) == 1;
    }
    const std::int64_t began = monotonic_ns();
    to.lane->stay(fds, 2, kSecond, 100 * kSecond);
    CHECK(monotonic_ns() - began < 50 * kSecond);
    client.join();
    stop = true;
    engine.join();
    ::close(other[0]), ::close(other[1]);
}

}  // namespace

int main() {
    test_tickets_are_answered_with_their_own_rows();
    test_what_is_special_stays_in_the_link_and_nothing_is_done();
    test_an_engine_of_another_life_gets_nothing();
    test_an_answer_that_is_no_outputs_stays_for_who_has_its_message();
    test_who_hands_over_does_nothing_until_it_takes_over();
    test_a_late_answer_to_an_earlier_ticket_is_nobodys();
    test_tickets_are_spread_over_engines_that_serve();
    test_a_client_that_does_not_read_has_one_message_kept_and_no_more();
    test_a_client_that_is_gone_costs_its_answer_alone();
    test_a_ticket_that_stays_is_told_at_the_second_look();
    test_a_lone_client_is_served_until_another_descriptor_is_readable(0);  // it sleeps
    test_a_lone_client_is_served_until_another_descriptor_is_readable(50'000'000);
}
