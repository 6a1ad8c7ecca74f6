// What both ends of a gRPC connection share: the prefix of a message, fields for libnghttp2, and callbacks from it.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gateway/nghttp2.hpp"

namespace jurybox {

constexpr std::size_t kPrefix = 5;  // bytes: whether the message is compressed, and its length

inline std::array<std::uint8_t, kPrefix> prefix_of(std::size_t size) {
    return {0, static_cast<std::uint8_t>(size >> 24), static_cast<std::uint8_t>(size >> 16), static_cast<std::uint8_t>(size >> 8), static_cast<std::uint8_t>(size)};
}

inline std::size_t length_in(const std::uint8_t* prefix) {
    return (static_cast<std::size_t>(prefix[1]) << 24) | (static_cast<std::size_t>(prefix[2]) << 16) | (static_cast<std::size_t>(prefix[3]) << 8) | prefix[4];
}

// nghttp2 copies both texts, and changes neither.
inline nghttp2::Field field_of(std::string_view name, std::string_view value, std::uint8_t flags = nghttp2::kNoFlags) {
    const auto bytes = [](std::string_view text) { return reinterpret_cast<std::uint8_t*>(const_cast<char*>(text.data())); };
    return {bytes(name), bytes(value), name.size(), value.size(), flags};
}

constexpr int kCallbackFailed = -902;  // result of a callback that ends the connection

// Run the action of a callback for a connection. It must not throw exceptions through the C library: they set `broken`.
template <class Connection, class Action>
int guarded(Connection& connection, bool& broken, Action action) {
    try {
        action(connection);
        return 0;
    } catch (...) {
        broken = true;
        return kCallbackFailed;
    }
}

}  // namespace jurybox
