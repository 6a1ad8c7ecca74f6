// A gRPC client's end of one HTTP/2 connection for unary calls, without sockets: its input are received bytes, its output are
// results and bytes to send.
//
// libnghttp2 implements HTTP/2, this class gRPC's framing of one request and one response
// (github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md). Not thread-safe.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gateway/grpc_framing.hpp"
#include "gateway/nghttp2.hpp"

namespace jurybox {

enum class GrpcEnd {
    kClosed = 0,      // both sides are done; the fields tell whether the call has succeeded
    kReset = 1,       // the server, or a violation of the protocol, ended the call
    kUnseen = 2,      // as kReset, and the server has not looked at the call: it may be made again
    kTooLarge = 3,    // the response exceeds the limit; with its length
    kUnreadable = 4,  // the response is compressed, incomplete or not the only one
};

// Message is a container for the bytes of a message, with Message(), resize(size), data() and size().
template <class Message>
class GrpcClient {
  public:
    using Fields = std::vector<std::pair<std::string, std::string>>;
    struct Result {
        std::int32_t stream;
        GrpcEnd end;
        std::uint64_t detail;  // kReset, kUnseen: HTTP/2's error code; kTooLarge: bytes
        Fields fields;         // header and trailer, in this order, also `:status`
        Message message;       // empty if it is incomplete
        bool ok;               // grpc-status is 0, and the message is complete
    };

    // head: the fields that begin every call, pseudo fields first; most: bytes of a response. Throws std::runtime_error if the
    // system has no libnghttp2.
    GrpcClient(Fields head, std::size_t most) : head_(std::move(head)), most_(most) {
        if (!lib_.missing.empty()) throw std::runtime_error(lib_.missing);
        nghttp2::Callbacks* callbacks = nullptr;
        if (lib_.session_callbacks_new(&callbacks)) throw std::bad_alloc();
        const std::unique_ptr<nghttp2::Callbacks, void (*)(nghttp2::Callbacks*)> held(callbacks, lib_.session_callbacks_del);
        lib_.session_callbacks_set_on_header_callback(callbacks, header);
        lib_.session_callbacks_set_on_frame_recv_callback(callbacks, frame_came);
        lib_.session_callbacks_set_on_data_chunk_recv_callback(callbacks, data_came);
        lib_.session_callbacks_set_send_data_callback(callbacks, send_data);
        lib_.session_callbacks_set_on_stream_close_callback(callbacks, stream_closed);
        if (lib_.session_client_new(&session_, callbacks, this)) throw std::bad_alloc();
        const nghttp2::Setting settings[] = {{nghttp2::kEnablePush, 0}, {nghttp2::kInitialWindow, kStreamWindow}, {nghttp2::kMaxFrame, kFrame}};
        lib_.submit_settings(session_, nghttp2::kNoFlags, settings, sizeof settings / sizeof *settings);
        lib_.session_set_local_window_size(session_, nghttp2::kNoFlags, 0, kConnectionWindow);
    }
    ~GrpcClient() { lib_.session_del(session_); }
    GrpcClient(const GrpcClient&) = delete;
    GrpcClient& operator=(const GrpcClient&) = delete;

    // Begin a call; return its number, or 0 if this connection takes no more. timeout: as grpc-timeout has it. Throws
    // std::length_error if the message is longer than gRPC's prefix can say.
    std::int32_t call(Message message, const std::string& timeout) {
        if (!open()) return 0;
        if (message.size() > UINT32_MAX) throw std::length_error("a message of gRPC has less than 4 GiB");
        auto made = std::make_unique<Call>();
        made->request = std::move(message);
        made->prefix = prefix_of(made->request.size());
        fields_.clear();
        for (const auto& [name, value] : head_) fields_.push_back(field_of(name, value));
        fields_.push_back(field_of("grpc-timeout", timeout, nghttp2::kNoIndex));  // it is another one each time
        nghttp2::Provider provider{};
        provider.read = read;
        const std::int32_t id = lib_.submit_request(session_, nullptr, fields_.data(), fields_.size(), &provider, nullptr);
        if (id == nghttp2::kNoMemory) throw std::bad_alloc();
        if (id <= 0) {  // the numbers are used up
            leaving_ = true;
            return 0;
        }
        calls_[id] = std::move(made);
        return id;
    }

    // End a call whose result nobody wants.
    void cancel(std::int32_t id) {
        if (calls_.erase(id)) lib_.submit_rst_stream(session_, nghttp2::kNoFlags, id, nghttp2::kCancel);
    }

    // Process bytes from the server and append to `results`. Return false if the connection is over.
    bool feed(const std::uint8_t* data, std::size_t size) {
        if (broken_) return false;
        const ssize_t read = lib_.session_mem_recv(session_, data, size);
        if (read == nghttp2::kNoMemory) throw std::bad_alloc();
        if (read < 0) broken_ = true;
        // The library ends a call or a connection that violates the protocol only when it says so to the server.
        collect(ahead_, kAhead);
        return !over();
    }

    // The calls that have ended. `send` may append to them, too.
    std::vector<Result>& results() { return results_; }

    // Append the bytes that may be sent now to `bytes`: at least `most`, if there are so many.
    void send(std::string& bytes, std::size_t most = SIZE_MAX) {
        bytes.append(ahead_);
        ahead_.clear();
        collect(bytes, most);
    }

    // Return whether nothing will be received any more: calls that have not ended will have no result.
    bool over() const { return broken_ || !lib_.session_want_read(session_); }

    // Return whether calls may begin: the connection is not over, and the server has not said that it goes away.
    bool open() const { return !leaving_ && !over(); }

    std::size_t calls() const { return calls_.size(); }

  private:
    static constexpr std::uint32_t kStreamWindow = 16u << 20, kFrame = 1u << 20;
    static constexpr std::int32_t kConnectionWindow = 64 << 20;
    static constexpr std::size_t kMostFields = 64u << 10;  // bytes of a response's fields
    static constexpr std::size_t kAtOnce = 1u << 20;       // bytes of a response that are allocated before they arrive
    static constexpr std::size_t kFrameHead = 9;           // bytes
    static constexpr std::size_t kAhead = 256u << 10;      // bytes that are made before they are asked for

    struct Call {
        Message request;
        std::array<std::uint8_t, kPrefix> prefix{};
        std::size_t sent = 0;  // of prefix and request
        Fields fields;
        std::size_t fields_bytes = 0;
        std::uint8_t came[kPrefix] = {};
        std::size_t prefix_have = 0, have = 0, want = 0;
        Message response;
        bool status_ok = false, answered = false;  // answered: the server has said everything

        bool complete() const { return prefix_have == kPrefix && have == want; }
        std::size_t left() const { return kPrefix + request.size() - sent; }
    };

    void collect(std::string& bytes, std::size_t most) {
        const std::uint8_t* data = nullptr;
        to_ = &bytes, most_now_ = most;
        while (bytes.size() < most) {
            const ssize_t size = lib_.session_mem_send(session_, &data);
            if (size == nghttp2::kNoMemory) throw std::bad_alloc();
            if (size < 0) broken_ = true;
            if (size <= 0) return;
            bytes.append(reinterpret_cast<const char*>(data), static_cast<std::size_t>(size));
        }
    }

    Call* find(std::int32_t id) {
        const auto found = calls_.find(id);
        return found == calls_.end() ? nullptr : found->second.get();
    }

    // Run a callback, which must not throw exceptions through the C library.
    template <class Action>
    static int safely(void* user, Action action) {
        auto& me = *static_cast<GrpcClient*>(user);
        return guarded(me, me.broken_, action);
    }

    void give_up(std::int32_t id, Call& call, GrpcEnd why) {
        lib_.submit_rst_stream(session_, nghttp2::kNoFlags, id, nghttp2::kCancel);
        finish(id, why, call.want);
    }

    void finish(std::int32_t id, GrpcEnd end, std::uint64_t detail) {
        const auto found = calls_.find(id);
        if (found == calls_.end()) return;
        Call& call = *found->second;
        if (end == GrpcEnd::kClosed && call.prefix_have && !call.complete()) end = GrpcEnd::kUnreadable;
        const bool ok = end == GrpcEnd::kClosed && call.status_ok && call.complete();
        results_.push_back({id, end, detail, std::move(call.fields), call.complete() ? std::move(call.response) : Message(), ok});
        calls_.erase(found);
    }

    static int header(nghttp2::Session*, const nghttp2::FrameHead* frame, const std::uint8_t* name, std::size_t name_size, const std::uint8_t* value,
                      std::size_t value_size, std::uint8_t, void* user) {
        return safely(user, [&](GrpcClient& me) {
            Call* call = me.find(frame->stream);
            if (!call) return;
            const std::string_view key(reinterpret_cast<const char*>(name), name_size), text(reinterpret_cast<const char*>(value), value_size);
            if ((call->fields_bytes += name_size + value_size + 32) > kMostFields) return me.give_up(frame->stream, *call, GrpcEnd::kUnreadable);
            if (key == ":status") call->fields.clear(), call->status_ok = false;  // what came before was an informational head
            if (key == "grpc-status") call->status_ok = text == "0";
            call->fields.emplace_back(key, text);
        });
    }

    static int data_came(nghttp2::Session*, std::uint8_t, std::int32_t id, const std::uint8_t* data, std::size_t size, void* user) {
        return safely(user, [&](GrpcClient& me) {
            if (Call* call = me.find(id)) me.take_in(id, *call, data, size);
        });
    }

    void take_in(std::int32_t id, Call& call, const std::uint8_t* data, std::size_t size) {
        if (call.prefix_have < kPrefix) {
            const std::size_t part = std::min(size, kPrefix - call.prefix_have);
            std::memcpy(call.came + call.prefix_have, data, part);
            call.prefix_have += part, data += part, size -= part;
            if (call.prefix_have < kPrefix) return;
            call.want = length_in(call.came);
            if (call.want > most_) return give_up(id, call, GrpcEnd::kTooLarge);
            if (call.came[0]) return give_up(id, call, GrpcEnd::kUnreadable);
        }
        if (size > call.want - call.have) return give_up(id, call, GrpcEnd::kUnreadable);
        if (!size) return;
        // At once what is short; else twice what has arrived, so that a length alone allocates little.
        const std::size_t room = call.response.size(), needed = call.have + size;
        if (needed > room) call.response.resize(std::min(call.want, std::max(kAtOnce, 2 * needed)));
        std::memcpy(call.response.data() + call.have, data, size);
        call.have += size;
    }

    static int frame_came(nghttp2::Session*, const nghttp2::FrameHead* frame, void* user) {
        return safely(user, [&](GrpcClient& me) {
            if (frame->type == nghttp2::kGoAway) return me.leave();
            if ((frame->type != nghttp2::kHeaders && frame->type != nghttp2::kData) || !(frame->flags & nghttp2::kEndStream)) return;
            if (Call* call = me.find(frame->stream)) call->answered = true;
        });
    }

    // Begin nothing more. Calls whose turn has not come, because the server takes only so many at once, would wait in vain: they have
    // no stream yet. The library itself ends those that the server has not looked at.
    void leave() {
        leaving_ = true;
        std::vector<std::int32_t> waiting;
        for (const auto& [id, call] : calls_)
            if (lib_.session_get_stream_remote_close(session_, id) < 0) waiting.push_back(id);
        for (const std::int32_t id : waiting) finish(id, GrpcEnd::kUnseen, nghttp2::kRefusedStream);
    }

    // Of a call whose head cannot be sent, too: then with REFUSED_STREAM.
    static int stream_closed(nghttp2::Session*, std::int32_t id, std::uint32_t why, void* user) {
        return safely(user, [&](GrpcClient& me) {
            const Call* call = me.find(id);
            if (!call) return;
            // A server that has answered need not receive the rest: it resets the call without an error, or with CANCEL.
            me.finish(id, call->answered ? GrpcEnd::kClosed : why == nghttp2::kRefusedStream ? GrpcEnd::kUnseen : GrpcEnd::kReset, why);
        });
    }

    // Say how much of a request the next frame has. `send_data` copies it, once.
    static ssize_t read(nghttp2::Session*, std::int32_t id, std::uint8_t*, std::size_t room, std::uint32_t* flags, nghttp2::Source*, void* user) {
        const Call* const call = static_cast<GrpcClient*>(user)->find(id);
        if (!call) return nghttp2::kResetThis;
        const std::size_t part = std::min(room, call->left());
        *flags |= nghttp2::kNoCopy | (part == call->left() ? nghttp2::kEof : 0);
        return static_cast<ssize_t>(part);
    }

    static int send_data(nghttp2::Session*, const nghttp2::FrameHead* frame, const std::uint8_t* head, std::size_t size, nghttp2::Source*, void* user) {
        int result = nghttp2::kResetThis;  // the call was cancelled after `read`
        const int failed = safely(user, [&](GrpcClient& me) {
            Call* const call = me.find(frame->stream);
            if (!call) return;
            std::string& to = *me.to_;
            if (to.size() >= me.most_now_) {
                result = nghttp2::kWouldBlock;  // the library asks again with the next bytes that are sent
                return;
            }
            if (to.capacity() - to.size() < kFrameHead + size) to.reserve(to.size() + std::min(call->left() + call->left() / 512, kAtOnce) + kFrameHead);
            to.append(reinterpret_cast<const char*>(head), kFrameHead);
            if (call->sent < kPrefix) {
                const std::size_t part = std::min(size, kPrefix - call->sent);
                to.append(reinterpret_cast<const char*>(call->prefix.data()) + call->sent, part);
                call->sent += part, size -= part;
            }
            if (size) to.append(std::as_const(call->request).data() + (call->sent - kPrefix), size);
            call->sent += size;
            result = 0;
        });
        return failed ? failed : result;
    }

    const nghttp2::Library& lib_ = nghttp2::library();
    const Fields head_;
    const std::size_t most_;
    nghttp2::Session* session_ = nullptr;
    std::unordered_map<std::int32_t, std::unique_ptr<Call>> calls_;
    std::vector<Result> results_;
    std::vector<nghttp2::Field> fields_;
    std::string ahead_;  // bytes to send
    std::string* to_ = &ahead_;  // what `collect` appends to, up to
    std::size_t most_now_ = 0;
    bool broken_ = false, leaving_ = false;
};

}  // namespace jurybox
