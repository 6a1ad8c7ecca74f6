// Any bytes, in any pieces, with answers in between: bounds hold, every call ends, and nothing stays counted.
#include <memory>
#include <string>

#include "gateway/grpc_connection.hpp"
#include "input.hpp"

using namespace jurybox;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (!nghttp2::library().missing.empty()) return 0;
    constexpr std::size_t kMessage = 4096, kShare = 16 << 10;
    const auto budget = std::make_shared<Budget>(BudgetLimits{{kShare, kShare, 8}, {2 * kShare, 2 * kShare, 12}});
    const auto account = std::make_shared<Account>(budget, Door::kGrpc);
    Input input(data, size);
    {
        GrpcConnection<std::string> server({kMessage, 512, 4}, account);
        std::string back;
        bool goes_on = true;
        if (input.byte() % 2) {  // most inputs should get behind the preface
            const std::string preface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
            goes_on = server.feed(reinterpret_cast<const std::uint8_t*>(preface.data()), preface.size());
        }
        while (goes_on && (!input.over() || server.more())) {
            const std::uint8_t order = input.byte();
            const std::string_view part = input.take(1 + order % 64 * 16);
            const std::string copy(part);
            goes_on = server.feed(reinterpret_cast<const std::uint8_t*>(copy.data()), copy.size());
            CHECK(server.events().size() <= 600);
            for (auto& event : server.events()) {
                CHECK(event.message.size() <= kMessage);
                if (order & 64) server.taken(event.stream, event.message.size());
                if (order & 128 || event.kind == GrpcEvent::kEnd || event.kind == GrpcEvent::kRefused) {
                    const Sent sent = server.answer(event.stream, std::string(order * 40u, 'a'));
                    server.finish(event.stream, sent == Sent::kQueued ? 0 : 8, "why \x01%", {{"x", "y"}});
                }
            }
            server.events().clear();
            server.send(back, 256 << 10);
            back.clear();
            CHECK(account->held(Resource::kAnswers) <= kShare && account->held(Resource::kCalls) <= 8);
        }
    }
    for (const Resource kind : {Resource::kReceived, Resource::kAnswers, Resource::kCalls}) CHECK(account->held(kind) == 0);
    return 0;
}
