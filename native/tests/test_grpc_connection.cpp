// gRPC's calls over HTTP/2: whole messages whatever the pieces they come in, bounds held, calls ended once.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "gateway/grpc_connection.hpp"

using namespace jurybox;

namespace {

using Connection = GrpcConnection<std::string>;
const nghttp2::Library& lib = nghttp2::library();
constexpr GrpcLimits kLimits{1 << 20, 4096, 8}, kOurs{1 << 20, 4096, 8, 1000};  // kOurs: without the bounds of the library

constexpr std::size_t kMiB = 1 << 20;
constexpr BudgetLimits kBudget{{4 * kMiB, 4 * kMiB, 1024}, {8 * kMiB, 8 * kMiB, 2048}};

std::shared_ptr<Account> account(std::size_t times = 1000) {
    BudgetLimits limits = kBudget;
    for (auto* each : {&limits.each, &limits.in_all})
        for (std::size_t& one : *each) one *= times;
    return std::make_shared<Account>(std::make_shared<Budget>(limits), Door::kGrpc);
}

nghttp2::Field field(const char* name, const char* value) {
    return {reinterpret_cast<std::uint8_t*>(const_cast<char*>(name)), reinterpret_cast<std::uint8_t*>(const_cast<char*>(value)), std::strlen(name), std::strlen(value),
            nghttp2::kNoFlags};
}

std::string framed(const std::string& message, char compressed = 0) {
    const auto size = static_cast<std::uint32_t>(message.size());
    std::string made{compressed, static_cast<char>(size >> 24), static_cast<char>(size >> 16), static_cast<char>(size >> 8), static_cast<char>(size)};
    return made + message;
}

// A client of nghttp2's own.
struct Client {
    nghttp2::Session* session = nullptr;
    std::string body, to_send, trailers;
    std::size_t sent = 0;
    std::int32_t closed = 0;
    std::uint32_t why = 0;

    Client() {
        nghttp2::Callbacks* callbacks = nullptr;
        CHECK(lib.session_callbacks_new(&callbacks) == 0);
        lib.session_callbacks_set_on_data_chunk_recv_callback(callbacks, [](nghttp2::Session*, std::uint8_t, std::int32_t, const std::uint8_t* data, std::size_t size, void* user) {
            static_cast<Client*>(user)->body.append(reinterpret_cast<const char*>(data), size);
            return 0;
        });
        lib.session_callbacks_set_on_header_callback(callbacks, [](nghttp2::Session*, const nghttp2::FrameHead*, const std::uint8_t* name, std::size_t name_size, const std::uint8_t* value, std::size_t size, std::uint8_t, void* user) {
            auto& all = static_cast<Client*>(user)->trailers;
            all.append(reinterpret_cast<const char*>(name), name_size).append("=").append(reinterpret_cast<const char*>(value), size).append(";");
            return 0;
        });
        lib.session_callbacks_set_on_stream_close_callback(callbacks, [](nghttp2::Session*, std::int32_t id, std::uint32_t why, void* user) {
            static_cast<Client*>(user)->closed = id, static_cast<Client*>(user)->why = why;
            return 0;
        });
        CHECK(lib.session_client_new(&session, callbacks, this) == 0);
        lib.session_callbacks_del(callbacks);
        CHECK(lib.submit_settings(session, nghttp2::kNoFlags, nullptr, 0) == 0);
    }
    ~Client() { lib.session_del(session); }

    std::int32_t ask(const std::string& bytes, const char* timeout = nullptr, const char* method = "POST", const char* type = "application/grpc", const char* note = "b") {
        to_send = bytes, sent = 0;
        std::vector<nghttp2::Field> fields = {field(":method", method), field(":scheme", "http"), field(":path", "/a.B/C"), field(":authority", "here"), field("content-type", type), field("te", "trailers"), field("x-a", note)};
        if (timeout) fields.push_back(field("grpc-timeout", timeout));
        nghttp2::Provider provider{};
        provider.read = [](nghttp2::Session*, std::int32_t, std::uint8_t* to, std::size_t room, std::uint32_t* flags, nghttp2::Source*, void* user) -> ssize_t {
            auto& me = *static_cast<Client*>(user);
            const std::size_t part = std::min(room, me.to_send.size() - me.sent);
            std::memcpy(to, me.to_send.data() + me.sent, part);
            if ((me.sent += part) == me.to_send.size()) *flags |= nghttp2::kEof;
            return static_cast<ssize_t>(part);
        };
        return lib.submit_request(session, nullptr, fields.data(), fields.size(), &provider, nullptr);
    }
    std::string outgoing() {
        std::string made;
        const std::uint8_t* data = nullptr;
        for (ssize_t size; (size = lib.session_mem_send(session, &data)) > 0;) made.append(reinterpret_cast<const char*>(data), static_cast<std::size_t>(size));
        return made;
    }
};

// Give a server bytes, for as many turns as it takes; return whether the connection goes on.
template <class Server>
bool fed(Server& server, const std::string& bytes) {
    bool goes_on = server.feed(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    while (goes_on && server.more()) goes_on = server.feed(nullptr, 0);
    return goes_on;
}

// Everything either side has to say, in pieces of so many bytes.
template <class Server>
void talk(Client& client, Server& server, std::size_t piece = 1 << 20) {
    for (;;) {
        const std::string there = client.outgoing();
        for (std::size_t at = 0; at < there.size(); at += piece) {
            const std::string part = there.substr(at, piece);
            if (!fed(server, part)) return;
        }
        std::string back;
        server.send(back);
        if (there.empty() && back.empty()) return;
        CHECK(lib.session_mem_recv(client.session, reinterpret_cast<const std::uint8_t*>(back.data()), back.size()) >= 0);
    }
}

void a_message_is_whole_whatever_the_pieces_it_comes_in() {
    for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{1} << 20}) {
        Client client;
        Connection server(kLimits, account());
        const std::string message(70'000, 'm');
        const std::int32_t call = client.ask(framed(message), "20S");
        talk(client, server, piece);
        auto& events = server.events();
        CHECK(events.size() == 3 && events[0].kind == GrpcEvent::kCall && events[0].path == "/a.B/C");
        CHECK(events[0].timeout == 20'000'000'000 && events[1].kind == GrpcEvent::kMessage);
        CHECK(events[1].message == message && events[2].kind == GrpcEvent::kEnd);
        CHECK(server.metadata(call)->size() == 1);
        CHECK(server.answer(call, std::string(200'000, 'a')) == Sent::kQueued);
        server.finish(call, 0, {}, {{"x-t", "1"}});
        CHECK(server.answer(call, "again") == Sent::kOver);
        talk(client, server, piece);
        CHECK(client.body == framed(std::string(200'000, 'a')) && client.closed == call && client.why == 0);
        CHECK(client.trailers.find("grpc-status=0;x-t=1;") != std::string::npos && server.calls() == 0);
    }
}

void a_message_that_is_too_large_is_told_before_it_has_come() {
    Client client;
    Connection server(kLimits, account());
    const std::int32_t call = client.ask(framed(std::string((1 << 20) + 1, 'm')));
    talk(client, server);
    CHECK(server.events().size() >= 2 && server.events()[1].kind == GrpcEvent::kTooLarge && server.events()[1].timeout == (1 << 20) + 1);
    for (const auto& event : server.events()) CHECK(event.kind != GrpcEvent::kMessage);
    server.finish(call, 8, "100% too \xC3\xA4 large", {});
    talk(client, server);
    CHECK(client.trailers.find("grpc-status=8;grpc-message=100%25 too %C3%A4 large;") != std::string::npos);
}

void a_call_that_ends_in_the_midst_of_a_message_is_gone() {
    Client client;
    Connection server(kLimits, account());
    client.ask(framed("message").substr(0, 9));
    talk(client, server);
    CHECK(server.events().back().kind == GrpcEvent::kGone && server.calls() == 0 && client.why == nghttp2::kCancel);
}

void what_is_no_call_of_grpc_is_answered_by_http() {
    const char* wrong[][3] = {{"GET", "application/grpc", ":status=405;"}, {"POST", "text/html", ":status=415;"}};
    for (const auto& [method, type, told] : wrong) {
        Client client;
        Connection server(kLimits, account());
        client.ask("", nullptr, method, type);
        talk(client, server);
        CHECK(server.events().empty() && client.trailers == told);
    }
}

void messages_that_nobody_takes_hold_up_their_sender() {
    Client client;
    Connection server(kLimits, account());
    std::string many;
    for (int i = 0; i < 40; ++i) many += framed(std::string(1 << 20, 'm'));
    const std::int32_t call = client.ask(many);
    talk(client, server);
    std::size_t came = 0;
    for (const auto& event : server.events()) came += event.kind == GrpcEvent::kMessage;
    CHECK(came >= 4 && came <= 9);  // what may wait, and a window
    while (came < 40) {
        std::size_t more = 0;
        for (const auto& event : server.events()) more += event.kind == GrpcEvent::kMessage;
        server.events().clear();
        for (; more; --more) server.taken(call, 1 << 20);
        talk(client, server);
        for (const auto& event : server.events()) came += event.kind == GrpcEvent::kMessage;
    }
    CHECK(came == 40);
}

void small_messages_that_nobody_takes_hold_up_their_sender() {
    Client client;
    Connection server(kLimits, account());
    constexpr std::size_t kMany = 1'000'000;
    std::string many;
    for (std::size_t i = 0; i < kMany; ++i) many += framed("one");
    const std::int32_t call = client.ask(many);
    talk(client, server);
    std::size_t came = 0, rounds = 0;
    for (const auto& event : server.events()) came += event.kind == GrpcEvent::kMessage;
    CHECK(came <= 550'000);  // a window full, and less than a megabyte that may wait
    const std::size_t before = server.events().size();
    for (int i = 0; i < 20'000; ++i) server.taken(call, 0, 0);  // nothing of a message
    talk(client, server);
    CHECK(server.events().size() == before);
    for (; came < kMany && rounds < 1000; ++rounds) {
        std::size_t more = 0;
        for (const auto& event : server.events()) more += event.kind == GrpcEvent::kMessage;
        server.events().clear();
        server.taken(call, 3 * more, more);
        talk(client, server);
        for (const auto& event : server.events()) came += event.kind == GrpcEvent::kMessage;
    }
    CHECK(came == kMany);
}

void a_client_that_gives_up_is_told_once() {
    Client client;
    Connection server(kLimits, account());
    const std::int32_t call = client.ask(framed("message"));
    talk(client, server);
    server.events().clear();
    lib.submit_rst_stream(client.session, nghttp2::kNoFlags, call, nghttp2::kCancel);
    talk(client, server);
    CHECK(server.events().size() == 1 && server.events()[0].kind == GrpcEvent::kGone);
    CHECK(server.answer(call, "late") == Sent::kOver);
    server.finish(call, 0, {}, {});
    talk(client, server);
    CHECK(client.body.empty());
}

void bytes_that_are_no_http_end_the_connection() {
    Connection server(kLimits, account());
    const std::string page = "GET / HTTP/1.1\r\nHost: here\r\n\r\n";
    CHECK(!server.feed(reinterpret_cast<const std::uint8_t*>(page.data()), page.size()));
}

// A frame of HTTP/2, by hand (RFC 9113, 4.1).
std::string frame(std::uint8_t type, std::uint8_t flags, std::uint32_t stream, const std::string& payload) {
    const std::size_t size = payload.size();
    const std::uint8_t head[9] = {static_cast<std::uint8_t>(size >> 16), static_cast<std::uint8_t>(size >> 8), static_cast<std::uint8_t>(size), type, flags,
                                  static_cast<std::uint8_t>(stream >> 24), static_cast<std::uint8_t>(stream >> 16), static_cast<std::uint8_t>(stream >> 8),
                                  static_cast<std::uint8_t>(stream)};
    return std::string(reinterpret_cast<const char*>(head), sizeof head) + payload;
}

constexpr std::uint8_t kSettings = 4, kContinuation = 9, kGoAway = 7, kAck = 1, kEndHeaders = 4;

// Whether a peer is told, before the end, that it asks too much.
bool told_to_calm_down(Connection& server, std::string back = {}) {
    server.send(back);
    for (std::size_t at = 0; at + 9 <= back.size();) {
        const auto* p = reinterpret_cast<const std::uint8_t*>(back.data()) + at;
        if (p[3] == kGoAway && p[16] == nghttp2::kCalm) return true;
        at += 9 + ((std::size_t{p[0]} << 16) | (std::size_t{p[1]} << 8) | p[2]);
    }
    return false;
}

void calls_that_are_begun_and_given_up_without_end_end_the_connection() {
    Client client;
    Connection server(kOurs, account());
    int given_up = 0;
    for (; given_up < 5000; ++given_up) {
        const std::int32_t call = client.ask(framed("m"));
        CHECK(call > 0);
        std::string there = client.outgoing();
        lib.submit_rst_stream(client.session, nghttp2::kNoFlags, call, nghttp2::kCancel);
        if (!fed(server, there + client.outgoing())) break;
        server.events().clear();
    }
    CHECK(given_up >= 1000 && given_up < 3000 && told_to_calm_down(server) && server.over());
}

void a_head_that_never_ends_ends_the_connection() {
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{16'000}}) {
        Client client;
        Connection server(kOurs, account());
        talk(client, server);
        std::string field(size, '\0');  // literal fields without a name are no good, but a head goes on all the same
        for (std::size_t i = 0; i + 4 <= size; i += 4) field.replace(i, 4, std::string("\x00\x01x\x00", 4));
        field.resize(size / 4 * 4);
        bool goes_on = fed(server, frame(nghttp2::kHeaders, 0, 1, std::string("\x83\x86", 2)));
        int frames = 0;
        for (; goes_on && frames < 20'000; ++frames) goes_on = fed(server, frame(kContinuation, 0, 1, field));
        CHECK(!goes_on && frames < 8000 && server.events().empty());
    }
}

void a_head_in_pieces_beside_long_bodies_is_taken() {
    const std::string note(12'000, 'n');
    for (const std::size_t piece : {std::size_t{100}, std::size_t{20'000}}) {
        Client client;
        Connection server({1 << 20, 64 << 10, 8}, account());
        std::size_t whole = 0;
        for (int i = 0; i < 20; ++i) {
            client.ask(framed(std::string(50'000, 'm')), nullptr, "POST", "application/grpc", note.c_str());
            talk(client, server, piece);
            for (const auto& event : server.events()) {
                whole += event.kind == GrpcEvent::kMessage;
                if (event.kind == GrpcEvent::kMessage) server.taken(event.stream, 50'000);
                if (event.kind == GrpcEvent::kEnd) server.finish(event.stream, 0, {}, {});
            }
            server.events().clear();
            talk(client, server, piece);
        }
        CHECK(whole == 20);
    }
}

// Bytes of a rightful client, bent: whatever they say, bounds hold and every call that began can be ended.
void bent_bytes_end_a_connection_or_are_read() {
    std::uint64_t state = 24;
    const auto chance = [&](std::uint64_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) % below;
    };
    for (int turn = 0; turn < 10'000; ++turn) {
        Client client;
        std::string bytes;
        for (int call = 0; call < 3; ++call) {
            client.ask(framed(std::string(chance(300), 'm'), chance(8) == 0) + (chance(3) ? "" : framed("x")), chance(2) ? "1S" : nullptr);
            bytes += client.outgoing();
        }
        lib.submit_rst_stream(client.session, nghttp2::kNoFlags, 3, nghttp2::kCancel);
        bytes += client.outgoing();
        for (std::uint64_t bends = chance(6); bends; --bends) {
            const std::size_t at = chance(3) ? chance(bytes.size()) : 24 + chance(200);
            if (at >= bytes.size()) continue;
            switch (chance(4)) {
                case 0: bytes[at] = static_cast<char>(chance(256)); break;
                case 1: bytes.erase(at, 1 + chance(20)); break;
                case 2: bytes.insert(at, bytes.substr(chance(bytes.size()), chance(40))); break;
                default: bytes.insert(at, frame(static_cast<std::uint8_t>(chance(11)), static_cast<std::uint8_t>(chance(256)), static_cast<std::uint32_t>(chance(8)), bytes.substr(chance(bytes.size()), chance(30))));
            }
        }
        Connection server({1024, 512, 4}, account());
        std::string back;
        const std::size_t piece = 1 + chance(100);
        for (std::size_t at = 0; at < bytes.size(); at += piece) {
            const bool goes_on = fed(server, bytes.substr(at, piece));
            for (auto& event : server.events()) {
                CHECK(event.message.size() <= 1024);
                if (chance(2)) server.taken(event.stream, event.message.size());
                if (event.kind == GrpcEvent::kEnd || chance(9) == 0) {
                    server.answer(event.stream, std::string(chance(100), 'a'));
                    if (chance(3)) server.finish(event.stream, static_cast<int>(chance(17)), "bent \x01%", {{"x", "y"}});
                }
            }
            server.events().clear();
            server.send(back);
            if (!goes_on) break;
        }
        CHECK(server.calls() <= 8);
    }
}

void too_much_metadata_is_refused() {
    Client client;
    Connection server({1 << 20, 128, 8}, account());
    client.ask(framed("message"));
    talk(client, server);
    CHECK(server.events().empty() && client.trailers == ":status=431;");
}

// The frames of a call, by hand: its head, in indexed and literal fields of HPACK (RFC 7541), and data.
std::string head(std::uint32_t call, const std::string& timeout = {}, bool ends = false) {
    const auto literal = [](const std::string& name, const std::string& value) {
        return std::string(1, '\0') + static_cast<char>(name.size()) + name + static_cast<char>(value.size()) + value;
    };
    std::string fields = "\x83\x86" + literal(":path", "/a.B/C") + literal(":authority", "x") + literal("content-type", "application/grpc");
    if (!timeout.empty()) fields += literal("grpc-timeout", timeout);
    return frame(nghttp2::kHeaders, kEndHeaders | (ends ? nghttp2::kEndStream : 0), call, fields);
}
std::string data(std::uint32_t call, const std::string& bytes, bool ends = false) { return frame(nghttp2::kData, ends ? nghttp2::kEndStream : 0, call, bytes); }

std::size_t count(const Connection& server, GrpcEvent kind) {
    std::size_t found = 0;
    for (const auto& event : const_cast<Connection&>(server).events()) found += event.kind == kind;
    return found;
}

void messages_that_never_end_are_counted_and_refused_beyond_the_share() {
    Client client;
    const auto held = account(1);
    Connection server({kMiB, 4096, 100}, held);
    talk(client, server);
    const std::string announced("\0\0\x10\0\0", 5), part(16'000, 'm');  // 1 MiB
    std::uint32_t call = 1;
    for (; call < 60; call += 2) {
        CHECK(fed(server, head(call) + data(call, announced)));
        for (int i = 0; i < 60; ++i) CHECK(fed(server, data(call, part)));
        CHECK(held->held(Resource::kReceived) <= 4 * kMiB);
        std::string back;
        server.send(back);
    }
    CHECK(count(server, GrpcEvent::kRefused) >= 25 && count(server, GrpcEvent::kMessage) == 0);
    std::size_t before = held->held(Resource::kReceived);
    CHECK(before > 3 * kMiB);
    server.finish(1, 8, "busy", {});  // an answered call holds nothing more
    CHECK(held->held(Resource::kReceived) < before);
    // Another message is accepted again, and the refused calls were answered.
    for (const auto& event : server.events())
        if (event.kind == GrpcEvent::kRefused) server.finish(event.stream, 8, "busy", {});
    server.events().clear();
    CHECK(fed(server, head(call) + data(call, framed("m"), true)) && count(server, GrpcEvent::kMessage) == 1);
}

void all_of_a_call_is_returned_however_it_ends() {
    const auto held = account(1);
    for (int way = 0; way < 6; ++way) {
        Client client;
        {
            Connection server(kLimits, held);
            talk(client, server);
            CHECK(fed(server, head(1) + data(1, framed(std::string(10'000, 'm')) + framed("half").substr(0, 7))));
            CHECK(held->held(Resource::kReceived) > 10'000 && held->held(Resource::kCalls) == 1);
            if (way == 0) CHECK(fed(server, frame(nghttp2::kReset, 0, 1, std::string("\0\0\0\x08", 4))));
            if (way == 1) CHECK(fed(server, data(1, "", true)));  // in the midst of a message
            if (way == 2) CHECK(server.answer(1, std::string(50'000, 'a')) == Sent::kQueued && held->held(Resource::kAnswers) > 50'000);
            if (way == 2 || way == 3) server.finish(1, 0, {}, {});
            std::string back;
            server.send(back);
            if (way == 2) CHECK(fed(server, frame(8, 0, 1, std::string("\0\1\0\0", 4))));  // WINDOW_UPDATE of the call
            server.send(back);
            if (way == 0 || way == 1 || way == 3) CHECK(server.calls() == 0 && held->held(Resource::kReceived) == 0 && held->held(Resource::kCalls) == 0);
            if (way == 5) {
                CHECK(server.answer(1, std::string(50'000, 'a')) == Sent::kQueued);
                server.abandon();
                CHECK(held->held(Resource::kAnswers) == 0 && held->held(Resource::kReceived) == 0 && held->held(Resource::kCalls) == 0);
            }
            if (way == 2) CHECK(held->held(Resource::kAnswers) == 0 && held->held(Resource::kReceived) == 0);
        }
        for (const Resource kind : {Resource::kReceived, Resource::kAnswers, Resource::kCalls}) CHECK(held->held(kind) == 0);
    }
}

void answers_that_nobody_reads_are_refused_beyond_the_share() {
    Client client;
    const auto held = account(1);
    Connection server({1 << 20, 4096, 100}, held);
    talk(client, server);
    std::size_t queued = 0, refused = 0;
    for (std::uint32_t call = 1; call < 60; call += 2) {
        CHECK(fed(server, head(call) + data(call, framed("m"), true)));
        const Sent sent = server.answer(static_cast<std::int32_t>(call), std::string(kMiB - 5, 'a'));
        queued += sent == Sent::kQueued, refused += sent == Sent::kRefused;
        server.finish(static_cast<std::int32_t>(call), sent == Sent::kQueued ? 0 : 8, {}, {});
        std::string back;
        server.send(back);  // as far as the windows permit: 64 KiB
        CHECK(held->held(Resource::kAnswers) <= 4 * kMiB);
    }
    CHECK(queued == 4 && refused == 26 && server.calls() == 4);
}

void calls_that_the_server_must_reset_end_the_connection() {
    // MadeYouReset: the peer breaks a rule for one call after another, so that this side resets them.
    const std::string over("\x7F\xFF\xFF\xFF");
    for (int way = 0; way < 3; ++way) {
        Client client;
        Connection server(kOurs, account());
        talk(client, server);
        std::uint32_t call = 1;
        bool goes_on = true;
        std::string back;
        for (; goes_on && call < 10'000; call += 2) {
            std::string bytes = head(call);
            if (way == 0) bytes += frame(8, 0, call, over);  // a window beyond 2^31
            if (way == 1) bytes += frame(nghttp2::kHeaders, kEndHeaders | nghttp2::kEndStream, call, "\x83");  // :method as a trailer
            if (way == 2) bytes += data(call, framed("half").substr(0, 7), true);
            goes_on = fed(server, bytes);
            server.events().clear();
            back.clear();
            server.send(back);
            goes_on = goes_on && !server.over();
        }
        CHECK(!goes_on && call > 1500 && call < 4000 && told_to_calm_down(server, back) && server.over());
    }
}

void calls_whose_own_deadline_has_passed_do_not_count() {
    Client client;
    Connection server({1 << 20, 4096, 600, 1000}, account());
    talk(client, server);
    for (std::uint32_t first = 1; first < 3600; first += 1200) {
        for (std::uint32_t call = first; call < first + 1200; call += 2) CHECK(fed(server, head(call, "10m")));
        const std::int64_t until = monotonic_ns() + 11'000'000;
        while (monotonic_ns() < until) {
        }
        for (std::uint32_t call = first; call < first + 1200; call += 2) CHECK(fed(server, frame(nghttp2::kReset, 0, call, std::string("\0\0\0\x08", 4))));
        std::string back;
        server.send(back);
        CHECK(server.calls() == 0);
        server.events().clear();
    }
}

void a_turn_reports_a_few_messages_and_the_rest_follows() {
    Client client;
    const auto held = account();
    Connection server(kLimits, held);
    talk(client, server);
    std::string empty;
    for (int i = 0; i < 3000; ++i) empty += framed(i % 2 ? "" : "x");
    std::string bytes = head(1) + data(1, empty, true);
    for (std::uint32_t call = 3; call < 15; call += 2) bytes += head(call, {}, true);
    const std::string all = bytes;
    CHECK(server.feed(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()));
    bytes.assign(bytes.size(), '?');  // its memory is the program's again
    std::size_t messages = 0, calls = 0, ends = 0, turns = 1;
    for (;; ++turns) {
        CHECK(server.events().size() <= 300);
        messages += count(server, GrpcEvent::kMessage), calls += count(server, GrpcEvent::kCall), ends += count(server, GrpcEvent::kEnd);
        server.events().clear();
        if (!server.more()) break;
        CHECK(held->held(Resource::kReceived) > 100 && server.feed(nullptr, 0));
    }
    CHECK(messages == 3000 && calls == 7 && ends == 7 && turns >= 12 && turns < 20);
    // Bytes that arrive meanwhile come after those left.
    Connection other(kLimits, account());
    
    Client fresh;
    talk(fresh, other);
    for (std::size_t at = 0; at < all.size(); at += 100) {
        const std::string part = all.substr(at, 100);
        CHECK(other.feed(reinterpret_cast<const std::uint8_t*>(part.data()), part.size()));
    }
    while (other.more()) CHECK(other.feed(nullptr, 0));
    CHECK(count(other, GrpcEvent::kMessage) == 3000 && count(other, GrpcEvent::kEnd) == 7);
}

void calls_beyond_those_in_flight_are_refused() {
    Client client;
    const auto budget = std::make_shared<Budget>(BudgetLimits{{kMiB, kMiB, 3}, {kMiB, kMiB, 5}});
    Connection server({1 << 20, 4096, 100}, std::make_shared<Account>(budget, Door::kGrpc));
    talk(client, server);
    for (std::uint32_t call = 1; call <= 9; call += 2) CHECK(fed(server, head(call)));
    CHECK(count(server, GrpcEvent::kCall) == 5 && count(server, GrpcEvent::kRefused) == 2 && server.events().back().timeout == static_cast<int>(Refusal::kShare));
    CHECK(budget->held(Resource::kCalls) == 3);
}

void a_message_that_does_not_go_on_is_told() {
    Client client;
    Connection server(kLimits, account());
    talk(client, server);
    CHECK(fed(server, head(1) + data(1, framed("half").substr(0, 7)) + head(3) + data(3, framed("whole"))));
    CHECK(server.silent(monotonic_ns() - 1'000'000'000).empty());
    CHECK(server.silent(monotonic_ns() + 1) == std::vector<std::int32_t>{1});
}

// Counts the bytes that it allocates, and those that it must copy to grow.
struct Counted : std::string {
    static inline std::size_t allocated = 0, copied = 0;
    void resize(std::size_t size) {
        allocated += size, copied += this->size();
        std::string::resize(size);
    }
};
using Counting = GrpcConnection<Counted>;

void a_message_of_any_size_is_never_copied() {
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{100'000}, std::size_t{1} << 20}) {
        Client client;
        Counting server(kLimits, account());
        Counted::allocated = Counted::copied = 0;
        client.ask(framed(std::string(size, 'm')));
        talk(client, server, 10'000);
        CHECK(server.events().size() == 3 && server.events()[1].message.size() == size);
        CHECK(Counted::allocated == size && Counted::copied == 0);
    }
}

// Many calls announce the largest message, send little of it, and are given up: as much is allocated as for one of them.
void what_is_announced_and_never_sent_costs_one_message() {
    Client client;
    Counting server(kLimits, account());
    const auto feed = [&](const std::string& bytes) { return server.feed(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()); };
    std::string settings;
    server.send(settings);
    CHECK(feed(client.outgoing() + frame(kSettings, kAck, 0, {})));
    const std::string most = framed(std::string(kLimits.message, 'm'));
    const std::string head = std::string("\x83\x86\x01\x04here\x04\x06/a.B/C\x0F\x10\x10") + "application/grpc";  // POST, http, host, path, type
    Counted::allocated = 0;
    for (std::uint32_t i = 0; i < kLimits.streams; ++i)
        CHECK(feed(frame(nghttp2::kHeaders, kEndHeaders, 2 * i + 1, head) + frame(nghttp2::kData, 0, 2 * i + 1, most.substr(0, 1000))));
    CHECK(server.calls() == kLimits.streams && Counted::allocated <= kLimits.message + kLimits.streams * 2000);
    for (std::uint32_t i = 0; i < kLimits.streams; ++i) CHECK(feed(frame(nghttp2::kReset, 0, 2 * i + 1, std::string("\0\0\0\x08", 4))));
    CHECK(server.calls() == 0);
    server.events().clear();
    for (const std::uint32_t call : {101, 103}) {  // neither the calls given up nor one that has come count any more
        Counted::allocated = Counted::copied = 0;
        CHECK(feed(frame(nghttp2::kHeaders, kEndHeaders, call, head)));
        for (std::size_t at = 0; at < most.size(); at += 10'000) CHECK(feed(frame(nghttp2::kData, 0, call, most.substr(at, 10'000))));
        CHECK(server.events().size() == 2 && server.events()[1].message == most.substr(5));
        CHECK(Counted::allocated == kLimits.message && Counted::copied == 0);
        CHECK(feed(frame(nghttp2::kReset, 0, call, std::string("\0\0\0\x08", 4))));
        server.events().clear();
    }
}

}  // namespace

int main() {
    if (!lib.missing.empty()) {
        std::printf("grpc connection: skipped, %s\n", lib.missing.c_str());
        return 0;
    }
    a_message_is_whole_whatever_the_pieces_it_comes_in();
    a_message_that_is_too_large_is_told_before_it_has_come();
    a_call_that_ends_in_the_midst_of_a_message_is_gone();
    what_is_no_call_of_grpc_is_answered_by_http();
    messages_that_nobody_takes_hold_up_their_sender();
    small_messages_that_nobody_takes_hold_up_their_sender();
    a_client_that_gives_up_is_told_once();
    bytes_that_are_no_http_end_the_connection();
    too_much_metadata_is_refused();
    calls_that_are_begun_and_given_up_without_end_end_the_connection();
    a_head_that_never_ends_ends_the_connection();
    a_head_in_pieces_beside_long_bodies_is_taken();
    messages_that_never_end_are_counted_and_refused_beyond_the_share();
    all_of_a_call_is_returned_however_it_ends();
    answers_that_nobody_reads_are_refused_beyond_the_share();
    calls_that_the_server_must_reset_end_the_connection();
    calls_whose_own_deadline_has_passed_do_not_count();
    a_turn_reports_a_few_messages_and_the_rest_follows();
    calls_beyond_those_in_flight_are_refused();
    a_message_that_does_not_go_on_is_told();
    bent_bytes_end_a_connection_or_are_read();
    a_message_of_any_size_is_never_copied();
    what_is_announced_and_never_sent_costs_one_message();
    std::puts("grpc connection: ok");
    return 0;
}
