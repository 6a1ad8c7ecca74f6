// Any bytes in any pieces to a ROUTER's end: messages, refused messages or an end, and nothing stays counted.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "input.hpp"
#include "serving/zmtp.hpp"

using namespace jurybox;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    constexpr std::size_t kMost = 256 << 10;
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    const auto budget = std::make_shared<Budget>(BudgetLimits{{kMost, kMost, 9}, {kMost, kMost, 9}});
    const auto account = std::make_shared<Account>(budget, Door::kTcp);
    Input input(data, size);
    {
        Zmtp router(ends[1], "", kMost, 0, true, account);
        router.watched(true);
        std::string to_send;
        if (input.byte() % 2) {  // most inputs should get behind the handshake
            to_send.assign("\xFF\0\0\0\0\0\0\0\1\x7F\3\1NULL", 16).append(48, '\0');
            to_send.append("\4\x1A\5READY\xBSocket-Type\0\0\0\6DEALER", 28);
        }
        while (!router.broken() && (!input.over() || !to_send.empty())) {
            to_send += input.take(1 + input.byte());
            const ssize_t went = ::send(ends[0], to_send.data(), to_send.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (went > 0) to_send.erase(0, static_cast<std::size_t>(went));
            router.receive(0);
            CHECK(account->held(Resource::kReceived) <= kMost);
            Zmtp::Message message;
            while (router.take(message)) {
                std::size_t bytes = 0;
                for (const std::string& frame : message) bytes += frame.size();
                CHECK(!message.empty() && message.size() <= 4096 && bytes <= kMost);
            }
            for (const std::string& first : router.refused()) CHECK(first.size() <= 4096);
            char sink[4096];
            while (::recv(ends[0], sink, sizeof sink, MSG_DONTWAIT) > 0) {
            }
        }
    }
    CHECK(account->held(Resource::kReceived) == 0);
    ::close(ends[0]);
    return 0;
}
