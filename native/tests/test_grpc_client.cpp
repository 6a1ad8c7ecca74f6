// A client's calls over HTTP/2, with our server's end and with frames by hand: whole whatever the pieces, bounded, ended once.
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "gateway/grpc_client.hpp"
#include "gateway/grpc_connection.hpp"

using namespace jurybox;

namespace {

using Client = GrpcClient<std::string>;
using Server = GrpcConnection<std::string>;
using Event = Server::Event;
const nghttp2::Library& lib = nghttp2::library();
constexpr std::size_t kMiB = 1 << 20, kMost = 32 * kMiB;
constexpr GrpcLimits kLimits{kMost, 4096, 8};
constexpr std::size_t kPieces[] = {1, 7, kMiB};

std::shared_ptr<Account> account() {
    return std::make_shared<Account>(std::make_shared<Budget>(BudgetLimits{{1 << 30, 1 << 30, 1024}, {1 << 30, 1 << 30, 1024}}), Door::kGrpc);
}

Client::Fields head(const std::string& note = "b") {
    return {{":method", "POST"}, {":scheme", "http"}, {":path", "/a.B/C"}, {":authority", "here"},
            {"te", "trailers"}, {"content-type", "application/grpc"}, {"x-a", note}};
}

std::string framed(const std::string& message, char compressed = 0) {
    const auto size = static_cast<std::uint32_t>(message.size());
    std::string made{compressed, static_cast<char>(size >> 24), static_cast<char>(size >> 16), static_cast<char>(size >> 8), static_cast<char>(size)};
    return made + message;
}

// Bytes without a pattern, so that one that is lost or moved shows.
std::string bytes_of(std::size_t size, std::uint64_t state = 1) {
    std::string made(size, '\0');
    for (char& each : made) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        each = static_cast<char>(state >> 56);
    }
    return made;
}

template <class End>
bool fed(End& end, const std::string& bytes, std::size_t piece = kMiB) {
    bool goes_on = true;
    for (std::size_t at = 0; goes_on && at < bytes.size(); at += piece) {
        const std::string part = bytes.substr(at, piece);  // a copy, so that a sanitizer sees what is read beyond it
        goes_on = end.feed(reinterpret_cast<const std::uint8_t*>(part.data()), part.size());
    }
    return goes_on;
}

template <class End>
std::string sent(End& end) {
    std::string made;
    end.send(made);
    return made;
}

// Everything either side has to say, in pieces of so many bytes. `heard` is told each event of the server.
template <class Message>
void talk(GrpcClient<Message>& client, Server& server, const std::function<void(Event&)>& heard, std::size_t piece = kMiB) {
    for (;;) {
        const std::string there = sent(client);
        CHECK(fed(server, there, piece));
        while (server.more()) CHECK(server.feed(nullptr, 0));
        for (auto& event : std::exchange(server.events(), {})) {
            if (event.kind == GrpcEvent::kMessage) server.taken(event.stream, event.message.size());
            heard(event);
        }
        const std::string back = sent(server);
        fed(client, back, piece);
        if (there.empty() && back.empty()) return;
    }
}

const std::string& value(const Client::Fields& fields, std::string_view name) {
    static const std::string none = "(none)";
    for (const auto& field : fields)
        if (field.first == name) return field.second;
    return none;
}

// ---- our server's end

void a_request_and_its_answer_are_whole_whatever_the_pieces() {
    for (const std::size_t piece : kPieces) {
        Client client(head(), kMost);
        Server server(kLimits, account());
        for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{300}, std::size_t{16'380}, std::size_t{70'000}}) {
            const std::string request = bytes_of(size, 1), answer = bytes_of(2 * size, 2);
            const std::int32_t call = client.call(request, "20S");
            CHECK(call > 0 && client.calls() == 1 && client.open());
            std::string kinds;
            talk(client, server, [&](Event& event) {
                kinds += std::to_string(static_cast<int>(event.kind));
                CHECK(event.stream == call);
                if (event.kind == GrpcEvent::kCall) {
                    CHECK(event.path == "/a.B/C" && event.timeout == 20'000'000'000);
                    const auto& given = *server.metadata(call);
                    CHECK(given.size() == 1 && given[0].first == "x-a" && given[0].second == "b");
                }
                if (event.kind == GrpcEvent::kMessage) CHECK(event.message == request);
                if (event.kind != GrpcEvent::kEnd) return;
                CHECK(server.answer(call, answer) == Sent::kQueued);
                server.finish(call, 0, {}, {{"x-t", "1"}});
            }, piece);
            CHECK(kinds == "013");  // a call, a message, its end
            CHECK(client.results().size() == 1 && client.calls() == 0);
            const auto& result = client.results()[0];
            CHECK(result.stream == call && result.ok && result.end == GrpcEnd::kClosed && result.message == answer);
            const Client::Fields fields = {{":status", "200"}, {"content-type", "application/grpc"}, {"grpc-status", "0"}, {"x-t", "1"}};
            CHECK(result.fields == fields);
            client.results().clear();
        }
    }
}

void many_calls_at_once_are_answered_in_another_order() {
    for (const std::size_t piece : kPieces) {
        Client client(head(), kMost);
        Server server(kLimits, account());
        constexpr int kCalls = 30;  // more than the server takes at once
        std::map<std::int32_t, std::string> asked;
        const auto ask = [&] {
            const std::string request = bytes_of(1000 + 10 * asked.size(), asked.size());
            asked[client.call(request, "1S")] = request;
        };
        for (int i = 0; i < kCalls / 2; ++i) ask();
        std::vector<std::int32_t> ready;
        std::size_t most = 0, answered = 0, refused = 0;
        for (int round = 0; round < 100 && answered < kCalls; ++round) {
            while (asked.size() < kCalls && round > 0) ask();
            talk(client, server, [&](Event& event) {
                if (event.kind == GrpcEvent::kMessage) CHECK(event.message == asked[event.stream]);
                if (event.kind == GrpcEvent::kEnd) ready.push_back(event.stream);
            }, piece);
            most = std::max(most, server.calls());
            for (int i = 0; i < 3 && !ready.empty(); ++i) {  // the latest first
                CHECK(server.answer(ready.back(), asked[ready.back()] + "!") == Sent::kQueued);
                server.finish(ready.back(), 0, {}, {});
                ready.pop_back();
            }
            talk(client, server, [&](Event& event) {
                if (event.kind == GrpcEvent::kEnd) ready.push_back(event.stream);
            }, piece);
            for (const auto& result : std::exchange(client.results(), {})) {
                if (round == 0 && result.end == GrpcEnd::kUnseen) {  // it was sent before the server's limit was known
                    refused += asked.erase(result.stream);
                    continue;
                }
                CHECK(result.ok && result.message == asked[result.stream] + "!");
                ++answered;
            }
        }
        CHECK(answered == kCalls && most == 8 && refused == kCalls / 2 - 8 && client.calls() == 0 && client.open());
    }
}

void messages_are_larger_than_the_windows() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    const std::string request = bytes_of(20 * kMiB, 1), answer = bytes_of(20 * kMiB, 2);
    for (int turn = 0; turn < 4; ++turn) {  // 80 MiB each way: more than the connection's window, too
        const std::int32_t call = client.call(request, "20S");
        talk(client, server, [&](Event& event) {
            if (event.kind == GrpcEvent::kMessage) CHECK(event.message == request);
            if (event.kind != GrpcEvent::kEnd) return;
            CHECK(server.answer(call, answer) == Sent::kQueued);
            server.finish(call, 0, {}, {});
        }, 50'000);
        CHECK(client.results().size() == 1 && client.results()[0].ok && client.results()[0].message == answer);
        client.results().clear();
    }
}

void a_large_answer_needs_no_permission_on_its_way() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    const std::int32_t call = client.call("q", "1S");
    CHECK(fed(server, sent(client)) && server.answer(call, std::string(15 * kMiB, 'a')) == Sent::kQueued);
    CHECK(sent(server).size() > 15 * kMiB);  // at once
}

void a_status_other_than_0_comes_with_its_fields() {
    for (const bool with_message : {false, true}) {  // without one it is trailers only: a single head
        for (const std::size_t piece : kPieces) {
            Client client(head(), kMost);
            Server server(kLimits, account());
            const std::int32_t call = client.call("q", "1S");
            talk(client, server, [&](Event& event) {
                if (event.kind != GrpcEvent::kEnd) return;
                if (with_message) server.answer(call, "half a truth");
                server.finish(call, 8, "100% busy", {{"retry-after-bin", "AA"}});
            }, piece);
            CHECK(client.results().size() == 1);
            const auto& result = client.results()[0];
            CHECK(result.stream == call && !result.ok && result.end == GrpcEnd::kClosed && client.open());
            CHECK(value(result.fields, "grpc-status") == "8" && value(result.fields, "grpc-message") == "100%25 busy");
            CHECK(value(result.fields, "retry-after-bin") == "AA" && value(result.fields, ":status") == "200");
        }
    }
}

void an_answer_without_a_message_is_no_success() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    const std::int32_t call = client.call("q", "1S");
    talk(client, server, [&](Event& event) {
        if (event.kind == GrpcEvent::kEnd) server.finish(call, 0, {}, {});
    });
    CHECK(client.results().size() == 1 && client.results()[0].end == GrpcEnd::kClosed && !client.results()[0].ok);
}

void an_answer_may_come_before_the_request_is_sent() {
    for (const bool with_message : {false, true}) {
        Client client(head(), kMost);
        Server server(kLimits, account());
        const std::int32_t call = client.call(std::string(20 * kMiB, 'm'), "1S");
        talk(client, server, [&](Event& event) {
            if (event.kind != GrpcEvent::kCall) return;
            if (with_message) server.answer(call, "enough");
            server.finish(call, with_message ? 0 : 8, {}, {});
        });
        CHECK(client.results().size() == 1 && client.results()[0].end == GrpcEnd::kClosed && client.calls() == 0 && client.open());
        CHECK(client.results()[0].ok == with_message && client.results()[0].message == (with_message ? "enough" : ""));
        CHECK(value(client.results()[0].fields, "grpc-status") == (with_message ? "0" : "8"));
    }
}

void an_answer_over_the_limit_is_told_and_the_connection_goes_on() {
    for (const std::size_t piece : kPieces) {
        Client client(head(), 1000);
        Server server(kLimits, account());
        for (const std::size_t size : {std::size_t{1001}, std::size_t{1000}, 2 * kMiB, std::size_t{0}}) {
            if (size > kMiB && piece < kMiB) continue;
            const std::int32_t call = client.call("q", "1S");
            talk(client, server, [&](Event& event) {
                if (event.kind != GrpcEvent::kEnd) return;
                server.answer(call, std::string(size, 'a'));
                server.finish(call, 0, {}, {});
            }, piece);
            CHECK(client.results().size() == 1 && client.calls() == 0 && server.calls() == 0 && client.open());
            const auto& result = client.results()[0];
            if (size > 1000) CHECK(!result.ok && result.end == GrpcEnd::kTooLarge && result.detail == size && result.message.empty());
            else CHECK(result.ok && result.message == std::string(size, 'a'));
            client.results().clear();
        }
    }
}

void a_second_message_cannot_be_read_and_the_connection_goes_on() {
    for (const std::size_t piece : kPieces) {
        Client client(head(), kMost);
        Server server(kLimits, account());
        for (const int messages : {2, 1}) {
            const std::int32_t call = client.call("q", "1S");
            talk(client, server, [&](Event& event) {
                if (event.kind != GrpcEvent::kEnd) return;
                for (int i = 0; i < messages; ++i) server.answer(call, "answer");
                server.finish(call, 0, {}, {});
            }, piece);
            CHECK(client.results().size() == 1 && client.results()[0].ok == (messages == 1) && client.open() && client.calls() == 0);
            CHECK(client.results()[0].end == (messages == 1 ? GrpcEnd::kClosed : GrpcEnd::kUnreadable));
            client.results().clear();
        }
    }
}

void a_server_that_leaves_answers_what_it_has_seen() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    std::vector<std::int32_t> seen;
    for (int i = 0; i < 2; ++i) seen.push_back(client.call("seen", "1S"));
    talk(client, server, [](Event&) {});
    server.drain();
    const std::string goodbye = sent(server);
    const std::int32_t late = client.call("late", "1S");  // GOAWAY has not been read
    CHECK(late > 0);
    const std::string there = sent(client);
    CHECK(client.open() && fed(client, goodbye) && !client.open() && !client.over());
    CHECK(client.call("later", "1S") == 0);
    CHECK(client.results().size() == 1 && client.results()[0].stream == late && client.results()[0].end == GrpcEnd::kUnseen);
    client.results().clear();
    CHECK(fed(server, there));  // which ignores the late call
    for (const std::int32_t call : seen) {
        CHECK(!client.over());
        server.answer(call, "answer");
        server.finish(call, 0, {}, {});
        fed(client, sent(server));
    }
    CHECK(client.results().size() == 2 && client.results()[0].ok && client.results()[1].ok);
    CHECK(client.calls() == 0 && client.over() && !client.open() && !fed(client, "more"));
}

void calls_that_wait_for_their_turn_need_not_wait_when_the_server_leaves() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    talk(client, server, [](Event&) {});  // its limit is known
    std::vector<std::int32_t> all;
    for (int i = 0; i < 12; ++i) all.push_back(client.call("q", "1S"));
    std::size_t heard = 0;
    talk(client, server, [&](Event& event) { heard += event.kind == GrpcEvent::kEnd; });
    CHECK(heard == 8);
    server.drain();
    talk(client, server, [](Event&) {});
    CHECK(client.results().size() == 4 && client.calls() == 8);
    for (const auto& result : std::exchange(client.results(), {})) CHECK(result.end == GrpcEnd::kUnseen && result.stream > all[7]);
    for (std::size_t i = 0; i < 8; ++i) server.answer(all[i], "a"), server.finish(all[i], 0, {}, {});
    talk(client, server, [](Event& event) { CHECK(event.kind != GrpcEvent::kCall); });
    CHECK(client.results().size() == 8 && client.calls() == 0 && client.over());
    for (const auto& result : client.results()) CHECK(result.ok);
}

void a_cancelled_call_is_told_to_the_server_and_has_no_result() {
    for (const std::size_t size : {std::size_t{1}, 20 * kMiB}) {  // sent, and with the rest to be sent
        Client client(head(), kMost);
        Server server(kLimits, account());
        const std::int32_t call = client.call(std::string(size, 'm'), "1S"), other = client.call("other", "1S");
        if (size == 1) talk(client, server, [](Event&) {});
        else CHECK(fed(server, sent(client)));
        server.events().clear();
        CHECK(server.calls() == 2);
        if (size == 1) server.answer(call, std::string(kMiB, 'a'));
        const std::string late = sent(server);  // under way while the client gives up
        client.cancel(call);
        client.cancel(call);
        client.cancel(99);
        CHECK(client.calls() == 1 && fed(client, late));
        std::size_t gone = 0;
        talk(client, server, [&](Event& event) {
            gone += event.kind == GrpcEvent::kGone && event.stream == call;
            if (event.kind == GrpcEvent::kEnd && event.stream == call) CHECK(false);
        });
        CHECK(gone == 1 && server.calls() == 1 && client.results().empty());
        server.answer(other, "answer");
        server.finish(other, 0, {}, {});
        talk(client, server, [](Event&) {});
        CHECK(client.results().size() == 1 && client.results()[0].stream == other && client.results()[0].ok && client.open());
    }
}

void a_call_is_cancelled_while_a_frame_of_it_waits_for_room() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    talk(client, server, [](Event&) {});
    const std::int32_t call = client.call(bytes_of(200'000), "1S"), other = client.call("other", "1S");
    std::string begun;
    client.send(begun, 20'000);
    CHECK(begun.size() >= 20'000 && begun.size() < 20'000 + 2 * 16'400 && fed(server, begun));
    client.cancel(call);
    std::size_t gone = 0;
    talk(client, server, [&](Event& event) {
        gone += event.kind == GrpcEvent::kGone && event.stream == call;
        CHECK(event.stream == other || event.kind == GrpcEvent::kCall || event.kind == GrpcEvent::kGone);
        if (event.kind != GrpcEvent::kEnd) return;
        server.answer(other, "answer");
        server.finish(other, 0, {}, {});
    });
    CHECK(gone == 1 && client.results().size() == 1 && client.results()[0].stream == other && client.results()[0].message == "answer" && client.open());
}

void a_call_that_is_cancelled_before_its_turn_is_never_seen() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    talk(client, server, [](Event&) {});
    std::vector<std::int32_t> all;
    for (int i = 0; i < 10; ++i) all.push_back(client.call("q", "1S"));
    talk(client, server, [](Event&) {});
    client.cancel(all[8]);
    for (std::size_t i = 0; i < 8; ++i) server.answer(all[i], "a"), server.finish(all[i], 0, {}, {});
    talk(client, server, [&](Event& event) {
        CHECK(event.stream == all[9]);
        if (event.kind == GrpcEvent::kEnd) server.answer(all[9], "a"), server.finish(all[9], 0, {}, {});
    });
    CHECK(client.results().size() == 9 && client.calls() == 0);
    for (const auto& result : client.results()) CHECK(result.ok && result.stream != all[8]);
}

void no_timeout_is_lost() {
    Client client(head(), kMost);
    Server server(kLimits, account());
    const std::pair<const char*, std::int64_t> units[] = {{"n", 1}, {"u", 1'000}, {"m", 1'000'000}, {"S", 1'000'000'000}, {"M", 60'000'000'000}};
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{20}, std::int64_t{20}, std::int64_t{12'345}, std::int64_t{99'999'999}})
        for (const auto& [unit, ns] : units) {
            const std::int32_t call = client.call("q", std::to_string(count) + unit);
            std::int64_t told = -2;
            talk(client, server, [&, ns = ns](Event& event) {
                if (event.kind == GrpcEvent::kCall) told = event.timeout;
                if (event.kind == GrpcEvent::kEnd) server.answer(call, "a"), server.finish(call, 0, {}, {});
            });
            CHECK(told == count * ns && client.results().size() == 1 && client.results()[0].ok);
            client.results().clear();
        }
}

void a_head_that_is_too_long_to_be_sent_ends_its_call() {
    Client client(head(std::string(70'000, 'x')), kMost);
    Server server(kLimits, account());
    const std::int32_t call = client.call("q", "1S");
    CHECK(call > 0);
    talk(client, server, [](Event&) { CHECK(false); });
    CHECK(client.calls() == 0 && client.results().size() == 1 && client.results()[0].stream == call && client.results()[0].end == GrpcEnd::kUnseen);
}

// ---- frames by hand (RFC 9113, 4.1)

std::string frame(std::uint8_t type, std::uint8_t flags, std::int32_t stream, const std::string& payload) {
    const std::size_t size = payload.size();
    const std::uint8_t head[9] = {static_cast<std::uint8_t>(size >> 16), static_cast<std::uint8_t>(size >> 8), static_cast<std::uint8_t>(size), type, flags,
                                  static_cast<std::uint8_t>(stream >> 24), static_cast<std::uint8_t>(stream >> 16), static_cast<std::uint8_t>(stream >> 8),
                                  static_cast<std::uint8_t>(stream)};
    return std::string(reinterpret_cast<const char*>(head), sizeof head) + payload;
}

constexpr std::uint8_t kSettings = 4, kPush = 5, kPing = 6, kWindow = 8, kContinuation = 9, kAck = 1, kEndHeaders = 4, kEnd = nghttp2::kEndStream;

// A head of short fields, in literals of HPACK (RFC 7541).
std::string fields(std::int32_t call, const Client::Fields& given, std::uint8_t flags = 0) {
    std::string made;
    for (const auto& [name, value] : given) made += std::string(1, '\0') + static_cast<char>(name.size()) + name + static_cast<char>(value.size()) + value;
    return frame(nghttp2::kHeaders, kEndHeaders | flags, call, made);
}
const Client::Fields kBegin = {{":status", "200"}, {"content-type", "application/grpc"}};
std::string data(std::int32_t call, const std::string& bytes, std::uint8_t flags = 0) { return frame(nghttp2::kData, flags, call, bytes); }
std::string status(std::int32_t call, const char* number = "0") { return fields(call, {{"grpc-status", number}}, kEnd); }
std::string reset(std::int32_t call, char why) { return frame(nghttp2::kReset, 0, call, std::string("\0\0\0", 3) + why); }

// A client with a call under way whose request is sent, or as much of it as a server permits that grants no window.
template <class Message = std::string>
struct Asked {
    GrpcClient<Message> client;
    std::int32_t call;
    explicit Asked(std::size_t most = kMost, std::size_t size = 3) : client(head(), most) {
        sent(client);
        CHECK(fed(client, frame(kSettings, 0, 0, {}) + frame(kSettings, kAck, 0, {})));
        Message request;
        request.resize(size);
        call = client.call(std::move(request), "1S");
        sent(client);
    }
    bool hears(const std::string& bytes, std::size_t piece = kMiB) { return fed(client, bytes, piece); }

    // The only result.
    const typename GrpcClient<Message>::Result& result() {
        CHECK(client.results().size() == 1 && client.calls() == 0 && client.results()[0].stream == call);
        return client.results()[0];
    }
    void goes_on() {
        client.results().clear();
        call = client.call(Message(), "1S");
        CHECK(call > 0 && hears(frame(kWindow, 0, 0, std::string("\0\1\0\0", 4))));
        sent(client);
        CHECK(hears(fields(call, kBegin) + data(call, framed("yes")) + status(call)) && result().ok);
    }
};

void an_answer_by_hand_is_read_in_any_pieces() {
    for (const std::size_t piece : kPieces) {
        Asked<> asked;
        const std::string message = bytes_of(5000);
        std::string answer = fields(asked.call, kBegin), bytes = framed(message);
        for (const std::size_t size : {std::size_t{0}, std::size_t{2}, std::size_t{1}, std::size_t{3}, std::size_t{0}, std::size_t{1000}, bytes.size()}) {
            answer += data(asked.call, bytes.substr(0, size));
            bytes.erase(0, size);
        }
        CHECK(asked.hears(answer + status(asked.call), piece) && asked.result().ok && asked.result().message == message);
        asked.goes_on();
    }
}

void a_message_that_cannot_be_read_ends_its_call_alone() {
    const std::string whole = framed("message");
    const std::pair<std::string, bool> wrong[] = {
        {framed("message", 1), true},       // compressed
        {whole + framed("more"), true},     // a second one
        {whole + "x", true},                // or what may become one
        {whole.substr(0, 9), false},        // cut in the midst,
        {whole.substr(0, 5), false},        // after its length,
        {whole.substr(0, 3), false},        // within that
    };
    for (const auto& [bytes, at_once] : wrong)
        for (const std::size_t piece : kPieces) {
            Asked<> asked;
            CHECK(asked.hears(fields(asked.call, kBegin) + data(asked.call, bytes), piece));
            CHECK(asked.client.results().size() == at_once);
            CHECK((sent(asked.client).find(reset(asked.call, '\x08')) != std::string::npos) == at_once);  // the server need not go on
            CHECK(asked.hears(status(asked.call), piece));
            CHECK(!asked.result().ok && asked.result().end == GrpcEnd::kUnreadable);
            asked.goes_on();
        }
}

void a_reset_ends_a_call_with_its_code() {
    const std::string begun = fields(1, kBegin);
    for (const std::string& before : {std::string(), begun, begun + data(1, framed("whole")), begun + data(1, framed("half").substr(0, 7))})
        for (const char why : {'\0', '\x02', '\x07', '\x08', '\x0b', '\x63'}) {
            Asked<> asked;
            CHECK(asked.hears(before + reset(1, why)) && !asked.result().ok && asked.result().detail == static_cast<std::uint64_t>(why));
            CHECK(asked.result().end == (why == 7 ? GrpcEnd::kUnseen : GrpcEnd::kReset));
            CHECK(value(asked.result().fields, ":status") == (before.empty() ? "(none)" : "200"));
            CHECK(asked.result().message == (before.find("whole") != std::string::npos ? "whole" : ""));  // nothing of a half
            asked.goes_on();
        }
}

void a_reset_after_the_answer_takes_nothing_away() {
    for (const char why : {'\0', '\x08', '\x07'}) {
        Asked<> asked(kMost, kMiB);  // not all of which is sent
        CHECK(asked.hears(fields(1, kBegin) + data(1, framed("yes")) + status(1)) && asked.client.results().empty());
        CHECK(asked.hears(reset(1, why)) && asked.result().ok && asked.result().message == "yes" && asked.result().end == GrpcEnd::kClosed);
        asked.goes_on();
        Asked<> refused(kMost, kMiB);  // by HTTP, before our server: no status of gRPC
        CHECK(refused.hears(fields(1, {{":status", "503"}}, kEnd) + reset(1, why)) && !refused.result().ok && refused.result().end == GrpcEnd::kClosed);
        CHECK(value(refused.result().fields, ":status") == "503");
        refused.goes_on();
    }
}

void an_informational_head_is_no_part_of_the_answer() {
    Asked<> asked;
    const std::string early = fields(1, {{":status", "103"}, {"x-early", "1"}, {"grpc-status", "0"}});
    CHECK(asked.hears(early + early + fields(1, kBegin) + data(1, framed("no")) + status(1, "5")) && !asked.result().ok);
    const Client::Fields expected = {{":status", "200"}, {"content-type", "application/grpc"}, {"grpc-status", "5"}};
    CHECK(asked.result().fields == expected);
    asked.goes_on();
    Asked<> other;
    CHECK(other.hears(early + fields(1, kBegin) + data(1, framed("no"), kEnd)) && !other.result().ok);  // no status at all
}

void a_pushed_head_is_no_part_of_the_answer() {
    Client client(head(), kMost);
    CHECK(fed(client, frame(kSettings, 0, 0, {})));  // it has not yet heard that nothing may be pushed
    const std::int32_t call = client.call("q", "1S");
    sent(client);
    const std::string promise = frame(kPush, kEndHeaders, call, std::string("\0\0\0\2\x82\x84\x86\x01\1x\0\x0bgrpc-status\0010", 25));
    CHECK(fed(client, fields(call, kBegin) + promise + data(call, framed("yes"), kEnd)));
    CHECK(client.results().size() == 1 && client.results()[0].fields == kBegin && !client.results()[0].ok);
}

void fields_without_end_are_bounded() {
    const std::pair<std::string, std::string> field{"x-many", std::string(100, 'x')};
    for (const bool informational : {false, true}) {
        Asked<> asked;
        std::string bytes;
        if (informational) {  // many heads
            Client::Fields each(90, field);
            each.insert(each.begin(), {":status", "103"});
            for (int i = 0; i < 20; ++i) bytes += fields(1, each);
        } else {  // a long one, in as many frames as the library takes
            for (int i = 0; i < 8; ++i) {
                std::string part = fields(1, Client::Fields(i ? 140 : 1, field), kEnd);
                if (!i) part = fields(1, kBegin, kEnd);
                part[3] = static_cast<char>(i ? kContinuation : nghttp2::kHeaders);
                part[4] = static_cast<char>(i == 7 ? kEndHeaders : i ? 0 : kEnd);
                bytes += part;
            }
        }
        CHECK(asked.hears(bytes) && asked.result().end == GrpcEnd::kUnreadable && !asked.result().ok);
        std::size_t kept = 0;
        for (const auto& [name, value] : asked.result().fields) kept += name.size() + value.size();
        CHECK(kept <= 64 << 10);
        asked.goes_on();
    }
}

void a_violation_of_the_protocol_ends_its_call_when_it_is_read() {
    const std::string wrong[] = {
        fields(1, {{":status", "200"}, {"content-length", "9"}}) + data(1, framed("x"), kEnd),   // of another length
        fields(1, {{":status", "200"}, {"Upper", "x"}}, kEnd),
        fields(1, {{"x-no", "status"}}, kEnd),
        fields(1, kBegin) + fields(1, {{"grpc-status", "0"}}),  // trailers that are not the end
        fields(1, kBegin) + frame(kWindow, 0, 1, "\x7f\xff\xff\xff"),  // a window beyond 2^31
    };
    for (const std::string& bytes : wrong) {
        Asked<> asked;
        CHECK(asked.hears(bytes) && asked.result().end == GrpcEnd::kReset && asked.result().detail != 0 && !asked.result().ok);
        CHECK(sent(asked.client).size() >= 13);  // which says so
        asked.goes_on();
    }
}

void a_violation_for_all_calls_ends_the_connection() {
    const std::string wrong[] = {
        "HTTP/1.1 400 Bad Request\r\n\r\n",
        std::string(100, '\0'),
        std::string(100, '\xff'),
        frame(nghttp2::kData, 0, 0, "x"),
        frame(nghttp2::kData, 0, 99, "x"),               // of a call that never was
        frame(nghttp2::kHeaders, kEndHeaders, 1, "\xff\xff\xff\xff\xff\xff\xff"),
        frame(kSettings, 0, 0, "short"),
        frame(kWindow, 0, 1, std::string(4, '\0')),
        frame(kPush, kEndHeaders, 1, std::string("\0\0\0\2\x83", 5)),
        frame(nghttp2::kGoAway, 0, 0, std::string(8, '\0')) + frame(kPing, 0, 0, "short"),
    };
    for (const std::string& bytes : wrong)
        for (const std::size_t piece : kPieces) {
            Asked<> asked;
            CHECK(!asked.hears(bytes, piece) && asked.client.over() && !asked.client.open() && asked.client.call("q", "1S") == 0);
            sent(asked.client);
            CHECK(!asked.hears(fields(1, kBegin)) && asked.client.over());
            asked.client.cancel(1);
            CHECK(asked.client.calls() == 0);
        }
    Client early(head(), kMost);  // before anything was sent
    CHECK(!fed(early, "HTTP/1.1 400 Bad Request\r\n\r\n") && early.over() && !early.open());
}

void a_server_that_leaves_twice_ends_what_it_will_not_look_at() {
    Asked<> asked;
    const std::int32_t second = asked.client.call("q", "1S");
    sent(asked.client);
    const auto goodbye = [](const char* last) { return frame(nghttp2::kGoAway, 0, 0, std::string(last, 4) + std::string(4, '\0')); };
    CHECK(asked.hears(goodbye("\x7f\xff\xff\xff")) && !asked.client.open() && asked.client.results().empty() && asked.client.calls() == 2);
    CHECK(asked.hears(goodbye("\0\0\0\1")) && asked.client.calls() == 1);
    CHECK(asked.client.results()[0].stream == second && asked.client.results()[0].end == GrpcEnd::kUnseen);
    asked.client.results().clear();
    CHECK(!asked.hears(fields(1, kBegin) + data(1, framed("yes")) + status(1)) && asked.result().ok && asked.client.over());
}

void pings_that_are_not_answered_end_the_connection() {
    Asked<> asked;
    const std::string ping = frame(kPing, 0, 0, std::string(8, 'p'));
    std::size_t pings = 0;
    while (pings < 100'000 && asked.hears(ping)) ++pings;  // and nothing is sent
    CHECK(pings > 1000 && pings < 20'000 && asked.client.over() && sent(asked.client).size() < 20'000 * ping.size());
    CHECK(!asked.hears(ping) && !asked.client.open());
}

void what_is_sent_is_appended_in_the_asked_amount() {
    Client client(head(), kMost);
    CHECK(fed(client, frame(kSettings, 0, 0, {}) + frame(kWindow, 0, 0, std::string("\0\x80\0\0", 4))));
    std::string bytes = "before";
    client.send(bytes);
    CHECK(bytes.substr(0, 9) == "beforePRI");
    for (int i = 0; i < 100; ++i) CHECK(client.call(std::string(50'000, 'm'), "1S") > 0);
    std::size_t all = 0;
    for (int turn = 0; turn < 100; ++turn) {
        CHECK(client.feed(nullptr, 0));  // may make some of it
        std::string some;
        client.send(some, 100'000);
        CHECK((turn > 1 || some.size() >= 100'000) && some.size() < 300'000);
        all += some.size();
    }
    CHECK(all > 5'000'000 && all < 5'100'000);
}

void cancelled_calls_leave_room_for_others() {
    // What still comes for a call that nobody waits for uses the window of all; it is given back.
    Asked<> asked;
    const std::string much(kMiB / 100, 'a');
    for (int turn = 0; turn < 80; ++turn) {
        const std::int32_t call = turn ? asked.client.call("q", "1S") : asked.call;
        sent(asked.client);
        CHECK(asked.hears(fields(call, kBegin) + data(call, framed(std::string(2 * kMiB, 'a')).substr(0, 1000))));
        asked.client.cancel(call);
        for (int i = 0; i < 100; ++i) CHECK(asked.hears(data(call, much)));  // 1 MiB
    }
    CHECK(asked.client.results().empty() && asked.client.calls() == 0);
    asked.goes_on();
}

// Counts the bytes that it allocates.
struct Counted : std::string {
    static inline std::size_t allocated = 0;
    static inline bool fails = false;
    using std::string::string;
    void resize(std::size_t size) {
        if (fails) throw std::bad_alloc();
        allocated += size;
        std::string::resize(size);
    }
};

void a_length_alone_allocates_little() {
    Asked<Counted> asked;
    Counted::allocated = 0;
    const std::string bytes = framed(std::string(20 * kMiB, 'a'));
    CHECK(asked.hears(fields(1, kBegin) + data(1, bytes.substr(0, 5))) && Counted::allocated == 0);
    CHECK(asked.hears(data(1, bytes.substr(5, 1000))) && Counted::allocated <= kMiB);
    for (std::size_t at = 1005; at < bytes.size(); at += 10'000) CHECK(asked.hears(data(1, bytes.substr(at, 10'000))));
    CHECK(asked.hears(status(1)) && asked.result().ok && asked.result().message.size() == 20 * kMiB && Counted::allocated < 60 * kMiB);
    asked.goes_on();
    Counted::allocated = 0;  // a short one at once, and never more than it needs
    const std::int32_t call = asked.client.call({}, "1S");
    sent(asked.client);
    const std::string brief = framed(std::string(100'000, 'a'));
    CHECK(asked.hears(fields(call, kBegin)));
    for (std::size_t at = 0; at < brief.size(); at += 10'000) CHECK(asked.hears(data(call, brief.substr(at, 10'000))));
    CHECK(Counted::allocated == 100'000);
}

void a_failure_to_allocate_ends_the_connection_and_not_the_program() {
    Asked<Counted> asked;
    Counted::fails = true;
    CHECK(!asked.hears(fields(1, kBegin) + data(1, framed("yes"))) && asked.client.over() && !asked.client.open());
    CHECK(!asked.hears(status(1)) && asked.client.results().empty() && asked.client.calls() == 1);
    Counted::fails = false;
}

struct Long : std::string {
    std::size_t size() const { return std::size_t{1} << 32; }
};

void a_request_of_4_GiB_is_no_message() {
    GrpcClient<Long> client(head(), kMost);
    bool refused = false;
    try {
        client.call(Long(), "1S");
    } catch (const std::length_error&) {
        refused = true;
    }
    CHECK(refused && client.calls() == 0 && client.open());
}

// Bytes of a rightful server, bent: whatever they say, every call ends at most once, bounds hold, and others' answers are not mixed up.
void bent_bytes_end_a_connection_or_are_read() {
    std::uint64_t state = 25;
    const auto chance = [&](std::uint64_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) % below;
    };
    constexpr int kCancelled = 100;
    std::size_t good = 0, failed = 0, over = 0;
    for (int turn = 0; turn < 10'000; ++turn) {
        Client client(head(), 1024);
        std::map<std::int32_t, int> ended;
        for (int i = 0; i < 3; ++i) ended[client.call(std::string(chance(300), 'm'), "1S")] = 0;
        std::string bytes = frame(kSettings, 0, 0, {});
        for (std::int32_t call = 1; call < 7; call += 2) {
            bytes += fields(call, kBegin);
            if (chance(4)) bytes += data(call, framed(std::string(chance(300), 'a'), chance(8) == 0) + (chance(8) ? "" : framed("x")));
            bytes += chance(8) ? status(call, chance(4) ? "0" : "13") : reset(call, static_cast<char>(chance(14)));
        }
        for (std::uint64_t bends = chance(4); bends; --bends) {
            const std::size_t at = chance(bytes.size());
            switch (chance(4)) {
                case 0: bytes[at] = static_cast<char>(chance(256)); break;
                case 1: bytes.erase(at, 1 + chance(20)); break;
                case 2: bytes.insert(at, bytes.substr(chance(bytes.size()), chance(40))); break;
                default:
                    bytes.insert(at, frame(static_cast<std::uint8_t>(chance(11)), static_cast<std::uint8_t>(chance(256)), static_cast<std::int32_t>(chance(8)),
                                           bytes.substr(chance(bytes.size()), chance(30))));
            }
        }
        const std::size_t piece = 1 + chance(100);
        if (chance(20)) sent(client);  // else the server answers what it was not asked
        bool goes_on = true;
        for (std::size_t at = 0; goes_on && at < bytes.size(); at += piece) {
            if (chance(3)) sent(client);
            if (chance(40) == 0) {
                const std::int32_t given_up = 1 + 2 * static_cast<std::int32_t>(chance(3));
                client.cancel(given_up);
                if (!ended[given_up]) ended[given_up] = kCancelled;
            }
            goes_on = fed(client, bytes.substr(at, piece));
            for (const auto& result : std::exchange(client.results(), {})) {
                CHECK(ended[result.stream]++ == 0 && result.message.size() <= 1024);
                good += result.ok, failed += !result.ok;
            }
        }
        over += !goes_on;
        CHECK(client.over() == !goes_on && client.calls() <= 3);
        CHECK(ended.size() == 3);  // no other call
    }
    CHECK(good > 2000 && failed > 2000 && over > 2000 && over < 9000);
}

}  // namespace

int main() {
    if (!lib.missing.empty()) {
        std::printf("grpc client: skipped, %s\n", lib.missing.c_str());
        return 0;
    }
    a_request_and_its_answer_are_whole_whatever_the_pieces();
    many_calls_at_once_are_answered_in_another_order();
    messages_are_larger_than_the_windows();
    a_large_answer_needs_no_permission_on_its_way();
    a_status_other_than_0_comes_with_its_fields();
    an_answer_without_a_message_is_no_success();
    an_answer_may_come_before_the_request_is_sent();
    an_answer_over_the_limit_is_told_and_the_connection_goes_on();
    a_second_message_cannot_be_read_and_the_connection_goes_on();
    a_server_that_leaves_answers_what_it_has_seen();
    calls_that_wait_for_their_turn_need_not_wait_when_the_server_leaves();
    a_cancelled_call_is_told_to_the_server_and_has_no_result();
    a_call_is_cancelled_while_a_frame_of_it_waits_for_room();
    a_call_that_is_cancelled_before_its_turn_is_never_seen();
    no_timeout_is_lost();
    a_head_that_is_too_long_to_be_sent_ends_its_call();
    an_answer_by_hand_is_read_in_any_pieces();
    a_message_that_cannot_be_read_ends_its_call_alone();
    a_reset_ends_a_call_with_its_code();
    a_reset_after_the_answer_takes_nothing_away();
    an_informational_head_is_no_part_of_the_answer();
    a_pushed_head_is_no_part_of_the_answer();
    fields_without_end_are_bounded();
    a_violation_of_the_protocol_ends_its_call_when_it_is_read();
    a_violation_for_all_calls_ends_the_connection();
    a_server_that_leaves_twice_ends_what_it_will_not_look_at();
    pings_that_are_not_answered_end_the_connection();
    what_is_sent_is_appended_in_the_asked_amount();
    cancelled_calls_leave_room_for_others();
    a_length_alone_allocates_little();
    a_failure_to_allocate_ends_the_connection_and_not_the_program();
    a_request_of_4_GiB_is_no_message();
    bent_bytes_end_a_connection_or_are_read();
    std::puts("grpc client: ok");
    return 0;
}
