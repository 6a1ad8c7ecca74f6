// Any bytes of a server, in any pieces, with calls, cancels and sends in between: bounds hold, and every call ends once at most.
#include <memory>
#include <set>
#include <string>

#include "gateway/grpc_client.hpp"
#include "input.hpp"

using namespace jurybox;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (!nghttp2::library().missing.empty()) return 0;
    constexpr std::size_t kMessage = 1024, kCalls = 6, kFields = 64 << 10;
    Input input(data, size);
    GrpcClient<std::string> client({{":method", "POST"}, {":scheme", "http"}, {":path", "/a.B/C"}, {":authority", "x"}}, kMessage);
    std::set<std::int32_t> under_way;
    std::string there;
    bool goes_on = true;
    const auto call = [&](std::size_t length) {
        const bool open = client.open();
        const std::int32_t id = client.call(std::string(length, 'm'), "1S");
        CHECK((id > 0) == open);
        if (id) CHECK(under_way.insert(id).second);
    };
    const std::uint8_t first = input.byte();
    for (int i = 0; i < first % 4; ++i) call(first * 16u);  // a server answers most often what it was asked
    if (first & 4) client.send(there);
    while (goes_on && !input.over()) {
        const std::uint8_t order = input.byte();
        const std::string copy(input.take(1 + order % 32 * 32));
        goes_on = client.feed(reinterpret_cast<const std::uint8_t*>(copy.data()), copy.size());
        if (order & 32 && under_way.size() < kCalls) call(order * 300u);
        if (order & 64) {
            const std::int32_t id = 1 + 2 * (order % 4);
            client.cancel(id);
            bool ended = false;  // before it was cancelled
            for (const auto& result : client.results()) ended |= result.stream == id;
            if (!ended) under_way.erase(id);
        }
        if (order & 128) client.send(there, 64 << 10);
        there.clear();
        for (const auto& result : client.results()) {
            CHECK(under_way.erase(result.stream) == 1 && result.message.size() <= kMessage && result.end >= GrpcEnd::kClosed && result.end <= GrpcEnd::kUnreadable);
            std::size_t bytes = 0;
            for (const auto& [name, value] : result.fields) bytes += name.size() + value.size();
            CHECK(bytes <= kFields && (!result.ok || result.end == GrpcEnd::kClosed));
            if (result.end == GrpcEnd::kTooLarge) CHECK(result.detail > kMessage);
        }
        client.results().clear();
        CHECK(client.calls() == under_way.size() && (goes_on || client.over()) && !(client.over() && client.open()));
    }
    return 0;
}
