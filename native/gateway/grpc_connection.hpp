// A gRPC server's end of one HTTP/2 connection, without sockets: its input are received bytes, its output are events and bytes
// to send.
//
// libnghttp2 implements HTTP/2 (frames, HPACK, flow control). This class implements gRPC on top of it: calls, message framing
// and trailers (github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md). Not thread-safe.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/wait.hpp"
#include "gateway/nghttp2.hpp"

namespace jurybox {

struct GrpcLimits {
    std::uint32_t message;   // bytes of one message
    std::uint32_t metadata;  // bytes of a call's metadata
    std::uint32_t streams;   // calls in progress
    std::uint32_t looser = 1;  // factor for the library's own limits on the same quantities
};

enum class GrpcEvent {
    kCall = 0,        // a call began; with its path and time-out
    kMessage = 1,     // a complete message
    kCompressed = 2,  // a complete message in the call's encoding
    kEnd = 3,         // the last message has arrived
    kGone = 4,        // the peer cancelled the call, or violated the protocol
    kTooLarge = 5,    // a message exceeds the limit
};

// Message is a container for the bytes of a message, with Message(), resize(size), data() and size().
template <class Message>
class GrpcConnection {
  public:
    struct Event {
        GrpcEvent kind;
        std::int32_t stream;
        std::string path;       // of a call
        std::int64_t timeout;   // of a call, ns; -1: none
        Message message;
    };

    // Throws std::runtime_error if the system has no libnghttp2.
    explicit GrpcConnection(const GrpcLimits& limits) : limits_(limits) {
        if (!lib_.missing.empty()) throw std::runtime_error(lib_.missing);
        nghttp2::Callbacks* callbacks = nullptr;
        nghttp2::Option* option = nullptr;
        if (lib_.session_callbacks_new(&callbacks) || lib_.option_new(&option)) throw std::bad_alloc();
        const std::unique_ptr<nghttp2::Callbacks, void (*)(nghttp2::Callbacks*)> held(callbacks, lib_.session_callbacks_del);
        const std::unique_ptr<nghttp2::Option, void (*)(nghttp2::Option*)> kept(option, lib_.option_del);
        lib_.session_callbacks_set_on_begin_headers_callback(callbacks, begin_headers);
        lib_.session_callbacks_set_on_header_callback(callbacks, header);
        lib_.session_callbacks_set_on_frame_recv_callback(callbacks, frame_came);
        lib_.session_callbacks_set_on_data_chunk_recv_callback(callbacks, data_came);
        lib_.session_callbacks_set_on_frame_send_callback(callbacks, frame_went);
        lib_.session_callbacks_set_on_stream_close_callback(callbacks, stream_closed);
        lib_.option_set_no_auto_window_update(option, 1);
        lib_.option_set_no_closed_streams(option, 1);
        lib_.option_set_stream_reset_rate_limit(option, 2 * limits.looser * kResets, 2 * limits.looser * kResetsASecond);
        lib_.option_set_max_continuations(option, limits.looser * kContinuations);
        if (lib_.session_server_new2(&session_, callbacks, this, option)) throw std::bad_alloc();
        const nghttp2::Setting settings[] = {
            {nghttp2::kMaxStreams, limits.streams},
            {nghttp2::kInitialWindow, kStreamWindow},
            {nghttp2::kMaxFrame, kFrame},
            {nghttp2::kMaxHeaders, limits.metadata},
        };
        lib_.submit_settings(session_, nghttp2::kNoFlags, settings, sizeof settings / sizeof *settings);
        lib_.session_set_local_window_size(session_, nghttp2::kNoFlags, 0, kConnectionWindow);
    }
    ~GrpcConnection() { lib_.session_del(session_); }
    GrpcConnection(const GrpcConnection&) = delete;
    GrpcConnection& operator=(const GrpcConnection&) = delete;

    // Process bytes from the peer and append to `events`. Return false if the connection is over; the bytes left to send tell
    // the peer why.
    bool feed(const std::uint8_t* data, std::size_t size) {
        const bool inside = in_head_;
        const std::uint64_t before = heads_;
        const ssize_t read = lib_.session_mem_recv(session_, data, size);
        if (read == nghttp2::kNoMemory) throw std::bad_alloc();
        endless_ = inside && in_head_ && before == heads_ ? endless_ + size : 0;
        if (endless_ > kMostHead) calm();
        return read >= 0 && !broken_;
    }

    std::vector<Event>& events() { return events_; }

    // Append all bytes that may be sent now to `bytes`.
    void send(std::string& bytes) {
        const std::uint8_t* data = nullptr;
        for (;;) {
            const ssize_t size = lib_.session_mem_send(session_, &data);
            if (size == nghttp2::kNoMemory) throw std::bad_alloc();
            if (size <= 0) return;
            bytes.append(reinterpret_cast<const char*>(data), static_cast<std::size_t>(size));
        }
    }

    // Return whether nothing will be received or sent any more.
    bool over() const { return !lib_.session_want_read(session_) && !lib_.session_want_write(session_); }

    // Return the metadata of a call, with names in lower case; null if the call is over.
    const std::vector<std::pair<std::string, std::string>>* metadata(std::int32_t id) const {
        const auto found = streams_.find(id);
        return found == streams_.end() ? nullptr : &found->second->metadata;
    }

    // Record that the program has processed so many messages of `size` bytes in all, so that the peer may send as many more.
    void taken(std::int32_t id, std::size_t size, std::size_t messages = 1) {
        Stream* stream = find(id);
        if (!stream) return;
        stream->unread -= std::min(stream->unread, size + messages * kEach);
        if (stream->unread < kUnread && stream->owed) {
            lib_.session_consume_stream(session_, id, std::exchange(stream->owed, 0));
        }
    }

    // Queue one message of an answer. Return false if the call is over.
    bool answer(std::int32_t id, Message message) {
        Stream* stream = find(id);
        if (!stream || stream->finished) return false;
        stream->queued += message.size() + 5;
        stream->out.push_back(std::move(message));
        begin(*stream);
        return true;
    }

    // End a call with grpc-status, grpc-message (percent-encoded here) and trailing metadata.
    void finish(std::int32_t id, int status, std::string_view message, const std::vector<std::pair<std::string, std::string>>& trailing) {
        Stream* stream = find(id);
        if (!stream || stream->finished) return;
        stream->finished = true;
        stream->trailers.emplace_back("grpc-status", std::to_string(status));
        if (!message.empty()) stream->trailers.emplace_back("grpc-message", percent(message));
        stream->trailers.insert(stream->trailers.end(), trailing.begin(), trailing.end());
        if (stream->began) {
            begin(*stream);  // queued messages are sent before
            return;
        }
        std::vector<nghttp2::Field> fields = {nv(":status", "200"), nv("content-type", "application/grpc")};
        for (const auto& [name, value] : stream->trailers) fields.push_back(nv(name, value));
        stream->began = true;
        lib_.submit_response(session_, id, fields.data(), fields.size(), nullptr);
    }

    // Return the bytes of answers that are queued for the peer.
    std::size_t queued(std::int32_t id) const {
        const auto found = streams_.find(id);
        return found == streams_.end() ? 0 : found->second->queued;
    }

    // Accept no new calls; those in progress continue.
    void drain() {
        lib_.submit_goaway(session_, nghttp2::kNoFlags, lib_.session_get_last_proc_stream_id(session_), nghttp2::kNoError, nullptr, 0);
    }

    void ping() { lib_.submit_ping(session_, nghttp2::kNoFlags, nullptr); }

    std::size_t calls() const { return streams_.size(); }

  private:
    static constexpr std::uint32_t kStreamWindow = 4u << 20, kFrame = 1u << 20;
    static constexpr std::int32_t kConnectionWindow = 16 << 20;
    static constexpr std::size_t kUnread = 4u << 20;  // bytes of messages that the program has not processed
    static constexpr std::size_t kEach = 256;         // bytes that a message costs beside its own, so that empty ones count
    static constexpr std::int64_t kResets = 1000, kResetsASecond = 100;  // calls that a peer may begin and cancel
    static constexpr std::size_t kMostHead = 64u << 10, kContinuations = 32;  // bytes and frames of a head on the wire
    static constexpr int kFailed = -902;  // result of a callback that ends the connection

    struct Stream {
        std::int32_t id;
        std::string path;
        std::int64_t timeout = -1;
        std::vector<std::pair<std::string, std::string>> metadata;
        std::size_t metadata_bytes = 0;
        const char* refusal = nullptr;  // HTTP status if it is not a gRPC call
        bool called = false;            // whether its event was reported
        std::uint8_t prefix[5] = {};
        std::size_t prefix_have = 0, have = 0, want = 0;
        Message message;
        bool ignored = false;  // whether further data is ignored
        std::size_t unread = 0, owed = 0;
        std::deque<Message> out;
        std::size_t at = 0, queued = 0;  // `at` includes the prefix of the first message
        bool began = false, finished = false, deferred = false, trailed = false;
        std::vector<std::pair<std::string, std::string>> trailers;
    };

    // Answer a request that is not a gRPC call with an HTTP status.
    void refuse(Stream& stream) {
        stream.began = stream.finished = true;
        const nghttp2::Field fields[] = {nv(":status", stream.refusal)};
        lib_.submit_response(session_, stream.id, fields, 1, nullptr);
    }

    void reset(Stream& stream) {
        stream.finished = true;
        lib_.submit_rst_stream(session_, nghttp2::kNoFlags, stream.id, nghttp2::kCancel);
    }

    Stream* find(std::int32_t id) {
        const auto found = streams_.find(id);
        return found == streams_.end() ? nullptr : found->second.get();
    }

    static nghttp2::Field nv(std::string_view name, std::string_view value) {
        // nghttp2 copies both, and changes neither.
        return {reinterpret_cast<std::uint8_t*>(const_cast<char*>(name.data())), reinterpret_cast<std::uint8_t*>(const_cast<char*>(value.data())),
                name.size(), value.size(), nghttp2::kNoFlags};
    }

    static std::string percent(std::string_view text) {
        std::string made;
        for (const char c : text) {
            const auto byte = static_cast<unsigned char>(c);
            if (byte < 0x20 || byte > 0x7E || byte == '%') {
                char code[4];
                std::snprintf(code, sizeof code, "%%%02X", byte);
                made += code;
            } else {
                made += c;
            }
        }
        return made;
    }

    static std::int64_t timeout_of(std::string_view text) {
        if (text.size() < 2 || text.size() > 9) return -1;
        std::int64_t value = 0;
        for (const char c : text.substr(0, text.size() - 1)) {
            if (c < '0' || c > '9') return -1;
            value = 10 * value + (c - '0');
        }
        std::int64_t unit = 0;
        switch (text.back()) {
            case 'H': unit = 3'600'000'000'000; break;
            case 'M': unit = 60'000'000'000; break;
            case 'S': unit = 1'000'000'000; break;
            case 'm': unit = 1'000'000; break;
            case 'u': unit = 1'000; break;
            case 'n': unit = 1; break;
            default: return -1;
        }
        return value > INT64_MAX / unit ? INT64_MAX : value * unit;
    }

    // Run a callback, which must not throw exceptions through the C library.
    template <class Action>
    static int safely(void* user, Action action) {
        auto& me = *static_cast<GrpcConnection*>(user);
        try {
            action(me);
            return 0;
        } catch (...) {
            me.broken_ = true;
            return kFailed;
        }
    }

    // End the connection, because the peer exceeds a limit.
    void calm() {
        broken_ = true;
        lib_.session_terminate_session(session_, nghttp2::kCalm);
    }

    // Count a call that the peer cancelled; the rate is limited.
    void count_reset() {
        const std::int64_t now = monotonic_ns(), each = 1'000'000'000 / kResetsASecond;
        const std::int64_t gone = (now - counted_) / each;
        counted_ += gone * each;
        resets_ = std::max<std::int64_t>(0, resets_ - gone) + 1;
        if (resets_ > kResets) calm();
    }

    static int begin_headers(nghttp2::Session*, const nghttp2::FrameHead* frame, void* user) {
        return safely(user, [&](GrpcConnection& me) {
            me.in_head_ = true, ++me.heads_;
            auto& stream = me.streams_[frame->stream];
            if (stream) return;  // trailers
            stream = std::make_unique<Stream>();
            stream->id = frame->stream;
        });
    }

    static int header(nghttp2::Session*, const nghttp2::FrameHead* frame, const std::uint8_t* name, std::size_t name_size, const std::uint8_t* value,
                      std::size_t value_size, std::uint8_t, void* user) {
        return safely(user, [&](GrpcConnection& me) {
            Stream* stream = me.find(frame->stream);
            if (!stream || stream->called) return;
            const std::string_view key(reinterpret_cast<const char*>(name), name_size), text(reinterpret_cast<const char*>(value), value_size);
            if ((stream->metadata_bytes += name_size + value_size + 32) > me.limits_.metadata) {
                stream->refusal = "431";
                stream->metadata.clear();
                return;
            }
            if (key == ":path") stream->path = text;
            else if (key == ":method") stream->refusal = text == "POST" ? stream->refusal : "405";
            else if (key == "content-type") stream->refusal = text.substr(0, 16) == "application/grpc" ? stream->refusal : "415";
            else if (key == "grpc-timeout") stream->timeout = timeout_of(text);
            else if (key[0] != ':' && key != "te") stream->metadata.emplace_back(key, text);
        });
    }

    static int frame_came(nghttp2::Session*, const nghttp2::FrameHead* frame, void* user) {
        return safely(user, [&](GrpcConnection& me) {
            me.in_head_ = false;
            if (frame->type == nghttp2::kReset) me.count_reset();
            Stream* stream = frame->type == nghttp2::kHeaders || frame->type == nghttp2::kData ? me.find(frame->stream) : nullptr;
            if (!stream) return;
            if (frame->type == nghttp2::kHeaders && !stream->called) {
                stream->called = true;
                if (stream->refusal) {
                    stream->ignored = true;
                    me.refuse(*stream);
                    return;
                }
                me.events_.push_back({GrpcEvent::kCall, stream->id, stream->path, stream->timeout, Message()});
            }
            if (!(frame->flags & nghttp2::kEndStream) || stream->finished) return;
            if (stream->prefix_have && !stream->ignored) {  // it ends within a message
                me.reset(*stream);
                me.events_.push_back({GrpcEvent::kGone, stream->id, {}, 0, Message()});
            } else {
                me.events_.push_back({GrpcEvent::kEnd, stream->id, {}, 0, Message()});
            }
        });
    }

    static int data_came(nghttp2::Session* session, std::uint8_t, std::int32_t id, const std::uint8_t* data, std::size_t size, void* user) {
        return safely(user, [&](GrpcConnection& me) {
            me.in_head_ = false;
            me.lib_.session_consume_connection(session, size);
            Stream* stream = me.find(id);
            if (!stream) return;
            me.take_in(*stream, data, size);
            if (stream->unread < kUnread) {
                me.lib_.session_consume_stream(session, id, size);
            } else {
                stream->owed += size;
            }
        });
    }

    void take_in(Stream& stream, const std::uint8_t* data, std::size_t size) {
        while (size && !stream.ignored && !stream.finished) {
            if (stream.prefix_have < 5) {
                const std::size_t part = std::min(size, 5 - stream.prefix_have);
                std::memcpy(stream.prefix + stream.prefix_have, data, part);
                stream.prefix_have += part, data += part, size -= part;
                if (stream.prefix_have < 5) return;
                const std::uint8_t* p = stream.prefix;
                stream.want = (static_cast<std::size_t>(p[1]) << 24) | (static_cast<std::size_t>(p[2]) << 16) | (static_cast<std::size_t>(p[3]) << 8) | p[4];
                stream.have = 0;
                if (stream.want > limits_.message) {
                    stream.ignored = true;
                    events_.push_back({GrpcEvent::kTooLarge, stream.id, {}, static_cast<std::int64_t>(stream.want), Message()});
                    return;
                }
                stream.message = Message();
            }
            const std::size_t part = std::min(size, stream.want - stream.have);
            make_room(stream, part);
            if (part) std::memcpy(stream.message.data() + stream.have, data, part);
            stream.have += part, data += part, size -= part, ahead_ -= part;
            if (stream.have < stream.want) return;
            stream.unread += stream.want + kEach;
            stream.prefix_have = 0;
            const GrpcEvent kind = stream.prefix[0] ? GrpcEvent::kCompressed : GrpcEvent::kMessage;
            events_.push_back({kind, stream.id, {}, 0, std::move(stream.message)});
            stream.message = Message();
            stream.have = 0;
        }
    }

    // Make room for `part` more bytes of a message: for all of it, so that it is never copied, unless more than the largest message
    // would be allocated on this connection before it arrives. Then for as much again as has arrived.
    void make_room(Stream& stream, std::size_t part) {
        const std::size_t size = stream.message.size(), needed = stream.have + part;
        if (needed <= size && stream.want) return;  // an empty one is made, too
        const std::size_t wanted = ahead_ + stream.want - size <= limits_.message ? stream.want : std::min(stream.want, 2 * needed);
        stream.message.resize(wanted);
        ahead_ += wanted - size;
    }

    void begin(Stream& stream) {
        if (!stream.began) {
            stream.began = true;
            const nghttp2::Field fields[] = {nv(":status", "200"), nv("content-type", "application/grpc")};
            nghttp2::Provider provider{};
            provider.source.pointer = &stream;
            provider.read = read;
            lib_.submit_response(session_, stream.id, fields, 2, &provider);
        } else if (stream.deferred) {
            stream.deferred = false;
            lib_.session_resume_data(session_, stream.id);
        }
    }

    static ssize_t read(nghttp2::Session* session, std::int32_t id, std::uint8_t* to, std::size_t room, std::uint32_t* flags, nghttp2::Source* source, void* user) {
        auto& stream = *static_cast<Stream*>(source->pointer);
        ssize_t written = 0;
        const int failed = safely(user, [&](GrpcConnection& me) {
            written = static_cast<ssize_t>(me.give_out(stream, to, room));
            if (stream.out.empty() && stream.finished) {
                *flags |= nghttp2::kEof | nghttp2::kNoEndStream;
                if (std::exchange(stream.trailed, true)) return;
                std::vector<nghttp2::Field> fields;
                for (const auto& [name, value] : stream.trailers) fields.push_back(nv(name, value));
                me.lib_.submit_trailer(session, id, fields.data(), fields.size());
            } else if (!written) {
                stream.deferred = true;
                written = nghttp2::kDeferred;
            }
        });
        return failed ? failed : written;
    }

    // Write messages of an answer, each after its prefix, as far as there is room; return the number of bytes.
    std::size_t give_out(Stream& stream, std::uint8_t* to, std::size_t room) {
        std::size_t written = 0;
        while (written < room && !stream.out.empty()) {
            const Message& message = stream.out.front();
            const std::size_t size = message.size(), total = 5 + size;
            if (stream.at < 5) {
                const std::uint8_t prefix[5] = {0, static_cast<std::uint8_t>(size >> 24), static_cast<std::uint8_t>(size >> 16),
                                                static_cast<std::uint8_t>(size >> 8), static_cast<std::uint8_t>(size)};
                const std::size_t part = std::min(room - written, 5 - stream.at);
                std::memcpy(to + written, prefix + stream.at, part);
                stream.at += part, written += part;
                if (stream.at < 5) break;
            }
            const std::size_t part = std::min(room - written, total - stream.at);
            if (part) std::memcpy(to + written, message.data() + (stream.at - 5), part);
            stream.at += part, written += part;
            if (stream.at == total) {
                stream.out.pop_front();
                stream.at = 0;
            }
        }
        stream.queued -= written;
        return written;
    }

    static int frame_went(nghttp2::Session* session, const nghttp2::FrameHead* frame, void* user) {
        // If a call is answered before it was received completely, the peer need not send the rest.
        return safely(user, [&](GrpcConnection& me) {
            if (frame->type == nghttp2::kHeaders && (frame->flags & nghttp2::kEndStream) && !me.lib_.session_get_stream_remote_close(session, frame->stream))
                me.lib_.submit_rst_stream(session, nghttp2::kNoFlags, frame->stream, nghttp2::kNoError);
        });
    }

    static int stream_closed(nghttp2::Session*, std::int32_t id, std::uint32_t, void* user) {
        return safely(user, [&](GrpcConnection& me) {
            me.in_head_ = false;
            const auto found = me.streams_.find(id);
            if (found == me.streams_.end()) return;
            if (found->second->called && !found->second->finished) me.events_.push_back({GrpcEvent::kGone, id, {}, 0, Message()});
            me.ahead_ -= found->second->message.size() - found->second->have;
            me.streams_.erase(found);
        });
    }

    const nghttp2::Library& lib_ = nghttp2::library();
    GrpcLimits limits_;
    nghttp2::Session* session_ = nullptr;
    std::unordered_map<std::int32_t, std::unique_ptr<Stream>> streams_;
    std::vector<Event> events_;
    bool broken_ = false, in_head_ = false;
    std::uint64_t heads_ = 0;
    std::size_t endless_ = 0;  // bytes of headers that are still incomplete
    std::size_t ahead_ = 0;    // bytes that are allocated for messages and have not arrived
    std::int64_t resets_ = 0, counted_ = monotonic_ns();
};

}  // namespace jurybox
