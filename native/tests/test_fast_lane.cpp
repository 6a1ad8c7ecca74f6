// Requests of known forms go to an engine and come back as messages with their own rows, and everything special is returned.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cctype>
#include <memory>
#include <string>
#include <thread>

#include "check.hpp"
#include "gateway/fast_lane.hpp"

using namespace jurybox;

namespace {

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kIncarnation = 41;
constexpr std::uint32_t kLane = 5, kFirst = 2, kRows = 6;  // of an arena of ten rows; three rows a ticket
constexpr std::size_t kIn = 8, kMask = 1, kOut = 16, kValue = 4;

using RequestLane = FastLane<std::string, int>;

std::string field(char tag, const std::string& content) { return InferParts::prefix(tag, content.size()) + content; }
std::string request(const std::string& in, const std::string& mask, const std::string& id = "") {
    return field(0x0A, "model") + (id.empty() ? "" : field(InferParts::kId, id)) + field(0x2A, "input") + field(InferParts::kRawIn, in) +
           field(InferParts::kRawIn, mask);
}

struct Gateway {
    std::unique_ptr<ShmRingsMemory> memory = std::make_unique<ShmRingsMemory>();
    int pipe[2];
    EngineRecord record{};
    std::array<std::byte, 10 * kIn> input{};
    std::array<std::byte, 10 * kMask> mask{};
    std::array<std::byte, 10 * kOut> output{};
    std::array<std::byte, 10 * kValue> value{};
    std::unique_ptr<ShmRingsClient> rings;
    std::unique_ptr<ShmRingsEngine> engine;
    std::unique_ptr<RequestLane> lane;

    explicit Gateway(std::int64_t spin_ns = 0) {
        CHECK(::pipe2(pipe, O_NONBLOCK | O_CLOEXEC) == 0);
        record.incarnation = kIncarnation, record.state = 2;
        rings = std::make_unique<ShmRingsClient>(memory.get(), kLane, 77, pipe[1], spin_ns);
        engine = std::make_unique<ShmRingsEngine>(memory.get(), kIncarnation, 0);
        const auto from = [](auto& rows, std::size_t bytes) { return RowColumn{rows.data() + kFirst * bytes, bytes}; };
        lane = std::make_unique<RequestLane>(kFirst, kRows, 1, std::vector<RowColumn>{from(input, kIn), from(mask, kMask)},
                                             std::vector<RowColumn>{from(output, kOut), from(value, kValue)});
        lane->attach({{rings.get(), &record, kIncarnation}}, 100);
    }
    ~Gateway() { ::close(pipe[0]), ::close(pipe[1]); }

    // A form whose answers have the outputs in the order of the request: value, output.
    static std::shared_ptr<RequestLane::Form> form(std::uint32_t rows) {
        auto made = std::make_shared<RequestLane::Form>();
        made->rows = rows, made->inputs = {0, 1}, made->outputs = {1, 0}, made->version = 7;
        made->heads = {"<value>", "<output>"};
        return made;
    }
    bool ask(int caller, std::uint32_t rows, char filled, const std::string& id = "", std::int64_t deadline = 60 * kSecond) {
        std::string message = request(std::string(rows * kIn, filled), std::string(rows * kMask, 'm'), id);
        InferParts parts;
        CHECK(parts.cut(message) && parts.head == field(0x0A, "model") + field(0x2A, "input") && parts.id == id);
        return lane->accept(form(rows), parts, std::move(caller), caller, deadline, message);
    }
    bool send() {
        EngineRings* const next = lane->next();
        return next != nullptr && lane->send(*next);
    }
    Ticket collect() {
        Ticket tickets[4];
        CHECK(engine->collect(tickets, 4) == 1);
        return tickets[0];
    }
    // Answer a ticket: every output row is that letter of the input row, in upper case.
    void reply(const Ticket& ticket, std::uint32_t code = kOk) {
        for (std::uint32_t row = ticket.first; row < ticket.first + ticket.rows; ++row) {
            const int filled = std::toupper(static_cast<int>(input[row * kIn]));
            std::memset(output.data() + row * kOut, filled, kOut);
            std::memset(value.data() + row * kValue, filled, kValue);
        }
        CHECK(engine->reply(&ticket, 1, code, 7, "why", 3) == 0);
    }
    static std::string expected(std::uint32_t rows, char filled, const std::string& id = "") {
        return "<value>" + std::string(rows * kValue, filled) + "<output>" + std::string(rows * kOut, filled) + (id.empty() ? "" : field(InferParts::kId, id));
    }
    std::vector<std::pair<int, std::string>> answers() {
        std::vector<std::pair<int, std::string>> made;
        for (const auto& one : lane->answered()) {
            std::string message;
            lane->answer(one, message);
            made.emplace_back(one.caller, message);
        }
        lane->answered().clear();
        return made;
    }
};

using Answers = std::vector<std::pair<int, std::string>>;

void test_a_message_is_split_at_its_top_level() {
    InferParts parts;
    const std::string raw(300, '\x80');
    const std::string whole = field(0x0A, "model") + field(InferParts::kRawIn, raw) + field(InferParts::kId, "some id") + field(InferParts::kRawIn, "");
    CHECK(parts.cut(whole) && parts.head == field(0x0A, "model") && parts.id == "some id");
    CHECK(parts.raw.size() == 2 && parts.raw[0] == raw && parts.raw[1].empty());
    for (std::size_t size = 0; size < whole.size(); ++size) {  // it ends between two fields, or it is refused
        const bool between = size == 0 || size == 7 || size == 7 + 303 || size == 7 + 303 + 9;
        CHECK(parts.cut(std::string_view(whole).substr(0, size)) == between);
    }
    CHECK(!parts.cut(field(InferParts::kId, "\xC3\xA4")));           // protobuf checks UTF-8
    CHECK(!parts.cut(std::string("\x08\x01", 2)));                   // not a field with a length
    CHECK(!parts.cut(std::string("\x82\x01\x00", 3)));               // a field's number above 15
    CHECK(!parts.cut(std::string("\x0A\xFF\xFF\xFF\xFF\xFF\xFF", 7)));  // an endless size
    CHECK(parts.cut(field(0x0A, std::string(InferParts::kMostHead - 3, 'x'))) && !parts.cut(field(0x0A, std::string(InferParts::kMostHead - 2, 'x'))));
    std::string many;
    for (std::size_t i = 0; i < InferParts::kMostRaw; ++i) many += field(InferParts::kRawIn, "");
    CHECK(parts.cut(many) && !parts.cut(many + field(InferParts::kRawIn, "")));
}

void test_requests_of_one_ticket_get_their_own_rows() {
    Gateway to;
    CHECK(to.ask(1, 1, 'a', "first") && to.ask(2, 2, 'b') && !to.ask(3, 1, 'c'));  // three rows, and no more
    CHECK(to.send() && to.lane->in_flight() && to.lane->waiting() == 0);
    const Ticket ticket = to.collect();
    CHECK(ticket.sequence == 101 && ticket.first == kFirst && ticket.rows == 3 && ticket.lane == kLane && ticket.deadline == 60 * kSecond);
    CHECK(static_cast<char>(to.mask[kFirst + 2]) == 'm' && to.mask[kFirst + 3] == std::byte{0} && to.mask[kFirst - 1] == std::byte{0});
    CHECK(!to.lane->receive());
    to.reply(ticket);
    CHECK(to.lane->receive() && to.lane->code() == kOk && to.lane->version() == 7 && to.lane->rows() == 3);
    CHECK((to.answers() == Answers{{1, Gateway::expected(1, 'A', "first")}, {2, Gateway::expected(2, 'B')}}));
    CHECK(!to.lane->in_flight() && !to.send());
}

void test_requests_that_arrive_meanwhile_are_written_elsewhere() {
    Gateway to;
    CHECK(to.ask(1, 3, 'a') && to.send() && to.ask(2, 2, 'b') && !to.send());
    const Ticket first = to.collect();
    CHECK(static_cast<char>(to.input[kFirst * kIn]) == 'a' && static_cast<char>(to.input[(kFirst + 3) * kIn]) == 'b');
    to.reply(first);
    CHECK(to.lane->receive() && to.lane->code() == kOk);
    CHECK((to.answers() == Answers{{1, Gateway::expected(3, 'A')}}));
    CHECK(to.send());
    const Ticket second = to.collect();
    CHECK(second.first == kFirst + 3 && second.rows == 2 && second.sequence == 102);
    to.reply(second);
    CHECK(to.lane->receive() && to.lane->code() == kOk);
    CHECK((to.answers() == Answers{{2, Gateway::expected(2, 'B')}}));
}

void test_rows_that_do_not_fit_are_refused() {
    Gateway to;
    InferParts parts;
    std::string wrong[] = {request(std::string(kIn + 1, 'x'), "m"), request(std::string(kIn, 'x'), ""), field(0x0A, "model") + field(InferParts::kRawIn, std::string(kIn, 'x'))};
    for (std::string& message : wrong) {
        const std::string before = message;
        CHECK(parts.cut(message) && !to.lane->accept(Gateway::form(1), parts, 1, 1, kSecond, message) && message == before);
    }
    CHECK(to.lane->waiting() == 0 && !to.send());
}

void test_requests_are_returned() {
    Gateway to;
    CHECK(to.ask(1, 1, 'a', "", 5) && to.ask(2, 1, 'b', "", 20) && to.send() && to.ask(3, 1, 'c', "", 10) && to.ask(4, 1, 'd', "", 30));
    auto back = to.lane->take_back(15);
    CHECK(back.size() == 2 && back[0].caller == 1 && back[1].caller == 3 && back[1].message == request(std::string(kIn, 'c'), "m"));
    to.reply(to.collect());
    CHECK(to.lane->receive() && to.lane->code() == kOk);
    CHECK((to.answers() == Answers{{2, Gateway::expected(1, 'B')}}));
    CHECK(to.send());
    to.reply(to.collect(), 9);
    CHECK(to.lane->receive() && to.lane->code() == 9);
    back = to.lane->take_back(INT64_MAX);
    CHECK(back.size() == 1 && back[0].caller == 4 && to.lane->answered().empty());
}

void test_rows_of_an_engine_that_does_not_serve_stay_in_use_until_it_is_replaced() {
    Gateway to;
    CHECK(to.ask(1, 1, 'a') && to.send());
    const Ticket ticket = to.collect();
    to.record.state = 1;
    CHECK(!to.lane->serves() && !to.ask(2, 1, 'b') && to.lane->take_back(INT64_MAX).size() == 1 && to.lane->in_flight());
    to.record.state = 2;  // it serves again
    CHECK(to.ask(3, 1, 'c') && !to.send());
    to.reply(ticket);  // an answer without requests
    CHECK(to.lane->receive() && to.lane->code() == kOk && to.answers().empty());
    CHECK(to.send() && to.collect().first == kFirst + 3);
    to.record.incarnation = kIncarnation + 1;  // another engine, which knows nothing of the ticket
    CHECK(!to.lane->serves() && to.lane->take_back(INT64_MAX).size() == 1 && to.lane->in_flight());
    to.engine->renew(kIncarnation + 1);
    to.lane->attach({{to.rings.get(), &to.record, kIncarnation + 1}}, 0);
    CHECK(!to.lane->in_flight() && to.ask(4, 1, 'd') && to.send());
    const Ticket next = to.collect();
    CHECK(next.sequence == 103 && next.incarnation == kIncarnation + 1);
    to.reply(next);
    CHECK(to.lane->receive() && to.lane->code() == kOk);
    CHECK((to.answers() == Answers{{4, Gateway::expected(1, 'D')}}));
    to.lane->detach();
    CHECK(!to.ask(5, 1, 'e') && !to.send() && !to.lane->receive());
}

// Another engine, which shares the gateway's memory of rows.
struct Second {
    std::unique_ptr<ShmRingsMemory> memory = std::make_unique<ShmRingsMemory>();
    EngineRecord record{};
    std::unique_ptr<ShmRingsClient> rings;
    std::unique_ptr<ShmRingsEngine> engine;

    explicit Second(Gateway& to) {
        record.incarnation = kIncarnation, record.state = 2;
        rings = std::make_unique<ShmRingsClient>(memory.get(), kLane, 77, to.pipe[1], 0);
        engine = std::make_unique<ShmRingsEngine>(memory.get(), kIncarnation, 0);
        const auto from = [](auto& rows, std::size_t bytes) { return RowColumn{rows.data() + kFirst * bytes, bytes}; };
        to.lane = std::make_unique<RequestLane>(kFirst, kRows, 2, std::vector<RowColumn>{from(to.input, kIn), from(to.mask, kMask)},
                                                std::vector<RowColumn>{from(to.output, kOut), from(to.value, kValue)});
        attach(to);
    }
    void attach(Gateway& to) {
        to.lane->attach({{to.rings.get(), &to.record, to.record.incarnation}, {rings.get(), &record, record.incarnation}}, 100);
    }
    // Let it answer in the place of the gateway's first engine.
    void swap(Gateway& to) { to.engine.swap(engine); }
};

void test_each_engine_gets_a_ticket_before_requests_wait() {
    Gateway to;
    Second second(to);
    CHECK(to.ask(1, 2, 'a') && to.send() && to.ask(2, 1, 'b') && to.send() && to.ask(3, 2, 'c') && !to.send());
    CHECK(to.lane->in_flight() == 2 && to.lane->waiting() == 1 && to.lane->pending() == 3);
    const Ticket one = to.collect();
    second.swap(to);
    const Ticket two = to.collect();
    CHECK(one.sequence == 101 && two.sequence == 102 && one.first != two.first && one.rows == 2 && two.rows == 1);
    to.reply(two);  // the second engine answers first
    CHECK(to.lane->receive() && to.lane->rows() == 1 && to.lane->took() > 0);
    CHECK(!to.lane->receive());  // its requests are not answered yet
    CHECK((to.answers() == Answers{{2, Gateway::expected(1, 'B')}}));
    CHECK(to.send() && to.collect().sequence == 103);
    second.swap(to);
    to.reply(one);
    CHECK(to.lane->receive() && to.lane->rows() == 2);
    CHECK((to.answers() == Answers{{1, Gateway::expected(2, 'A')}}));
}

void test_a_ticket_goes_to_no_engine_that_is_much_slower() {
    Gateway to;
    Second second(to);
    to.record.expected_wait = 1000, second.record.expected_wait = 600;
    CHECK(to.ask(1, 1, 'a') && to.send() && to.ask(2, 1, 'b') && !to.send());
    second.record.expected_wait = 700;  // now the first one is not half as slow again
    CHECK(to.send() && to.collect().sequence == 102);
    second.swap(to);
    CHECK(to.collect().sequence == 101);
}

void test_requests_of_an_engine_that_has_ended_are_returned_and_those_of_others_stay() {
    Gateway to;
    Second second(to);
    CHECK(to.ask(1, 1, 'a') && to.send() && to.ask(2, 1, 'b') && to.send() && to.ask(3, 1, 'c'));
    to.record.incarnation = kIncarnation + 1, to.record.state = 1;
    auto back = to.lane->take_back(0);
    CHECK(back.size() == 1 && back[0].caller == 1 && to.lane->serves() && to.lane->waiting() == 1 && to.lane->in_flight() == 2);
    to.engine->renew(kIncarnation + 1);
    to.record.state = 2;
    second.attach(to);
    CHECK(to.lane->in_flight() == 1 && to.send());
    const Ticket next = to.collect();
    CHECK(next.sequence == 103 && next.incarnation == kIncarnation + 1);
    second.swap(to);
    to.reply(to.collect());
    CHECK(to.lane->receive());
    CHECK((to.answers() == Answers{{2, Gateway::expected(1, 'B')}}));
    to.record.state = second.record.state = 1;
    back = to.lane->take_back(0);
    CHECK(back.size() == 1 && back[0].caller == 3 && !to.lane->serves() && !to.ask(4, 1, 'd'));
}

void test_an_engine_in_another_thread() {
    Gateway to(20'000);
    std::atomic<bool> stop{false};
    std::thread computing([&] {
        Ticket tickets[4];
        while (!stop.load()) {
            for (std::size_t n = to.engine->collect(tickets, 4); n--;) to.reply(tickets[n]);
            std::this_thread::yield();
        }
    });
    for (int i = 0; i < 2000; ++i) {
        const char one = static_cast<char>('a' + i % 26), two = static_cast<char>('a' + (i + 7) % 26);
        CHECK(to.ask(1, 1, one) && to.ask(2, 2, two) && to.send() && to.rings->wait(10 * kSecond));
        CHECK(to.lane->receive() && to.lane->code() == kOk);
        CHECK((to.answers() == Answers{{1, Gateway::expected(1, static_cast<char>(std::toupper(one)))}, {2, Gateway::expected(2, static_cast<char>(std::toupper(two)))}}));
    }
    stop.store(true);
    computing.join();
}

void test_requests_whose_caller_is_gone_are_dropped() {
    Gateway gateway;
    CHECK(gateway.ask(1, 1, 'a') && gateway.ask(2, 1, 'b') && gateway.send());
    const Ticket ticket = gateway.collect();
    CHECK(gateway.ask(3, 1, 'c') && gateway.ask(4, 1, 'd'));
    const auto gone = [](int of) { return [of](int caller, std::int32_t call) { return caller == of && call == of; }; };
    gateway.lane->cancel(gone(1)), gateway.lane->cancel(gone(4)), gateway.lane->cancel(gone(9));
    CHECK(gateway.lane->pending() == 2 && gateway.lane->waiting() == 1);
    gateway.reply(ticket);
    CHECK(gateway.lane->receive());
    CHECK(gateway.lane->answered().size() == 1 && gateway.lane->answered()[0].caller == 2);
    gateway.lane->cancel(gone(2)), gateway.lane->cancel(gone(3));
    CHECK(gateway.lane->pending() == 0 && !gateway.send());
    CHECK(gateway.ask(5, 3, 'e') && gateway.send());  // all rows of a part are free again
}

}  // namespace

int main() {
    test_a_message_is_split_at_its_top_level();
    test_requests_of_one_ticket_get_their_own_rows();
    test_requests_that_arrive_meanwhile_are_written_elsewhere();
    test_rows_that_do_not_fit_are_refused();
    test_requests_are_returned();
    test_rows_of_an_engine_that_does_not_serve_stay_in_use_until_it_is_replaced();
    test_each_engine_gets_a_ticket_before_requests_wait();
    test_a_ticket_goes_to_no_engine_that_is_much_slower();
    test_requests_of_an_engine_that_has_ended_are_returned_and_those_of_others_stay();
    test_requests_whose_caller_is_gone_are_dropped();
    test_an_engine_in_another_thread();
    return 0;
}
