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

#include "common/budget.hpp"
#include "common/wait.hpp"
#include "gateway/grpc_framing.hpp"
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
    kRefused = 6,     // the call, or a message of it, exceeds the budget; with the Refusal
};

enum class Sent { kQueued, kOver, kRefused };  // kOver: the call is over; kRefused: the budget has no room for the answer

// Message is a container for the bytes of a message, with Message(), resize(size), data() and size().
template <class Message>
class GrpcConnection {
  public:
    struct Event {
        GrpcEvent kind;
        std::int32_t stream;
        std::string path;       // of a call
        std::int64_t timeout;   // of a call, ns; -1: none. Else: a size, or a Refusal
        Message message;
    };

    // Throws std::runtime_error if the system has no libnghttp2.
    GrpcConnection(const GrpcLimits& limits, std::shared_ptr<Account> account) : limits_(limits), account_(std::move(account)) {
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
        lib_.option_set_stream_reset_rate_limit(option, limits.looser * 20 * kResets, limits.looser * 20 * kResetsASecond);
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
    ~GrpcConnection() {
        lib_.session_del(session_);
        for (auto& [id, stream] : streams_) release(*stream);
        account_->give(Resource::kReceived, left_.size() + rest_.size());
    }
    GrpcConnection(const GrpcConnection&) = delete;
    GrpcConnection& operator=(const GrpcConnection&) = delete;

    // Process bytes from the peer and append to `events`. Return false if the connection is over; the bytes left to send tell
    // the peer why. A call of this function reports at most kTurn calls and messages, so that a peer gets only its share of the
    // program's time: if `more` is true afterwards, call it again, with no bytes, when others have had their turn.
    bool feed(const std::uint8_t* data, std::size_t size) {
        turn_ = 0;
        if (left_.empty()) {
            const std::size_t used = process(data, size);
            if (used < size) keep(data + used, size - used);
        } else {
            if (size) keep(data, size);
            const auto* kept = reinterpret_cast<const std::uint8_t*>(left_.data());
            at_ += process(kept + at_, left_.size() - at_);
            if (at_ == left_.size()) {
                account_->give(Resource::kReceived, left_.size());
                std::string().swap(left_);
                at_ = 0;
            }
        }
        return !failed_ && !broken_;
    }

    // Return whether bytes were received that are not processed yet.
    bool more() const { return !failed_ && !broken_ && (paused_ || !left_.empty()); }

    std::vector<Event>& events() { return events_; }

    // Append bytes that may be sent now to `bytes`: at least `most`, if there are so many.
    void send(std::string& bytes, std::size_t most = SIZE_MAX) {
        const std::uint8_t* data = nullptr;
        while (bytes.size() < most) {
            const ssize_t size = lib_.session_mem_send(session_, &data);
            if (size == nghttp2::kNoMemory) throw std::bad_alloc();
            if (size <= 0) return;
            bytes.append(reinterpret_cast<const char*>(data), static_cast<std::size_t>(size));
        }
    }

    // Return whether nothing will be received or sent any more.
    bool over() const { return (broken_ || !lib_.session_want_read(session_)) && !lib_.session_want_write(session_); }

    // Return the metadata of a call, with names in lower case; null if the call is over.
    const std::vector<std::pair<std::string, std::string>>* metadata(std::int32_t id) const {
        const auto found = streams_.find(id);
        return found == streams_.end() ? nullptr : &found->second->metadata;
    }

    // Record that the program has processed so many messages of `size` bytes in all, so that the peer may send as many more.
    void taken(std::int32_t id, std::size_t size, std::size_t messages = 1) {
        Stream* stream = find(id);
        if (!stream) return;
        const std::size_t less = std::min(stream->unread, size + messages * kEach);
        stream->unread -= less;
        give(*stream, less);
        if (stream->unread < kUnread && stream->owed) {
            lib_.session_consume_stream(session_, id, std::exchange(stream->owed, 0));
        }
    }

    // Hold so many more bytes for a call: its message was decompressed, for example.
    Refusal hold(std::int32_t id, std::size_t size, std::size_t whole) {
        Stream* stream = find(id);
        if (!stream) return Refusal::kNone;
        const Refusal refusal = account_->take(Resource::kReceived, size, whole);
        if (refusal == Refusal::kNone) stream->held += size, stream->unread += size;
        return refusal;
    }

    // Queue one message of an answer.
    Sent answer(std::int32_t id, Message message) {
        Stream* stream = find(id);
        if (!stream || stream->finished) return Sent::kOver;
        const std::size_t size = message.size() + kPrefix;
        if (account_->take(Resource::kAnswers, size) != Refusal::kNone) return Sent::kRefused;
        stream->queued += size;
        stream->out.push_back(std::move(message));
        begin(*stream);
        return Sent::kQueued;
    }

    // End a call with grpc-status, grpc-message (percent-encoded here) and trailing metadata.
    void finish(std::int32_t id, int status, std::string_view message, const std::vector<std::pair<std::string, std::string>>& trailing) {
        Stream* stream = find(id);
        if (!stream || stream->finished) return;
        stream->finished = true;
        drop(*stream);
        stream->trailers.emplace_back("grpc-status", std::to_string(status));
        if (!message.empty()) stream->trailers.emplace_back("grpc-message", percent(message));
        stream->trailers.insert(stream->trailers.end(), trailing.begin(), trailing.end());
        if (stream->started) {
            begin(*stream);  // queued messages are sent before
            return;
        }
        std::vector<nghttp2::Field> fields = {field_of(":status", "200"), field_of("content-type", "application/grpc")};
        for (const auto& [name, value] : stream->trailers) fields.push_back(field_of(name, value));
        stream->started = true;
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

    // Return the calls whose message has begun and is not complete, and of which no byte has arrived since `before`, ns of
    // CLOCK_MONOTONIC.
    std::vector<std::int32_t> silent(std::int64_t before) const {
        std::vector<std::int32_t> found;
        for (const auto& [id, stream] : streams_)
            if (stream->prefix_have > 0 && !stream->ignored && !stream->finished && stream->heard < before) found.push_back(id);
        return found;
    }

    Account& account() const { return *account_; }

    // Drop everything: the peer is gone, and this object may be kept for a while.
    void abandon() {
        for (auto& [id, stream] : streams_) {
            release(*stream);
            stream->finished = true;
            stream->out.clear();
        }
        account_->give(Resource::kReceived, left_.size() + rest_.size());
        std::string().swap(left_), std::string().swap(rest_);
        at_ = 0;
        events_.clear();
        broken_ = true;
    }

  private:
    static constexpr std::uint32_t kStreamWindow = 4u << 20, kFrame = 1u << 20;
    static constexpr std::int32_t kConnectionWindow = 16 << 20;
    static constexpr std::size_t kUnread = 4u << 20;  // bytes of messages that the program has not processed
    static constexpr std::size_t kEach = 256;         // bytes that a message costs beside its own, so that empty ones count
    static constexpr std::size_t kTurn = 256;         // calls and messages that one call of `feed` reports
    static constexpr std::int64_t kResets = 1000, kResetsASecond = 100;  // calls of a peer that end without an answer
    static constexpr std::int64_t kDeadline = 10'000'000;  // ns: a call that ends after its time-out counts only if that is shorter
    static constexpr std::size_t kCall = 1024;        // bytes that a call costs beside its metadata
    static constexpr std::size_t kMostHead = 64u << 10, kContinuations = 32;  // bytes and frames of a head on the wire

    struct Stream {
        std::int32_t id;
        std::string path;
        std::int64_t timeout = -1;
        std::vector<std::pair<std::string, std::string>> metadata;
        std::size_t metadata_bytes = 0;
        const char* refusal = nullptr;  // HTTP status if it is not a gRPC call
        bool called = false;            // whether its event was reported
        std::int64_t began = 0, heard = 0;  // ns: its head, and the last byte of its messages
        std::size_t held = 0;           // bytes of kReceived
        std::uint8_t prefix[kPrefix] = {};
        std::size_t prefix_have = 0, have = 0, want = 0;
        Message message;
        bool ignored = false;  // whether further data is ignored
        std::size_t unread = 0, owed = 0;
        std::deque<Message> out;
        std::size_t at = 0, queued = 0;  // `at` includes the prefix of the first message
        bool started = false, finished = false, deferred = false, trailed = false;
        bool counted = false;  // among kCalls
        std::vector<std::pair<std::string, std::string>> trailers;
    };

    // Answer a request that is not a gRPC call with an HTTP status.
    void refuse(Stream& stream) {
        stream.started = stream.finished = true;
        const nghttp2::Field fields[] = {field_of(":status", stream.refusal)};
        lib_.submit_response(session_, stream.id, fields, 1, nullptr);
    }

    // Process bytes as far as this turn permits; return how many.
    std::size_t process(const std::uint8_t* data, std::size_t size) {
        paused_ = false;
        if (!rest_.empty()) {
            const std::string rest = std::exchange(rest_, {});
            account_->give(Resource::kReceived, rest.size());
            if (Stream* stream = find(rest_of_)) {
                take_in(*stream, reinterpret_cast<const std::uint8_t*>(rest.data()), rest.size());
                settle(*stream, 0);
            }
            if (turn_ >= kTurn) {
                paused_ = true;
                return 0;
            }
        }
        const bool inside = in_head_;
        const std::uint64_t before = heads_;
        const ssize_t read = lib_.session_mem_recv(session_, data, size);
        if (read == nghttp2::kNoMemory) throw std::bad_alloc();
        const std::size_t used = read < 0 ? size : static_cast<std::size_t>(read);
        endless_ = inside && in_head_ && before == heads_ ? endless_ + used : 0;
        if (endless_ > kMostHead) calm("a head came that does not end");
        if (read < 0) failed_ = true;
        return used;
    }

    void keep(const std::uint8_t* data, std::size_t size) {
        left_.append(reinterpret_cast<const char*>(data), size);
        account_->owe(Resource::kReceived, size);
    }

    Refusal hold(Stream& stream, std::size_t size, std::size_t whole) {
        const Refusal refusal = account_->take(Resource::kReceived, size, whole);
        if (refusal == Refusal::kNone) stream.held += size;
        return refusal;
    }

    void give(Stream& stream, std::size_t size) {
        size = std::min(size, stream.held);
        stream.held -= size;
        account_->give(Resource::kReceived, size);
    }

    // Return everything that a call holds.
    void release(Stream& stream) {
        drop(stream);
        account_->give(Resource::kAnswers, std::exchange(stream.queued, 0));
        if (std::exchange(stream.counted, false)) account_->give(Resource::kCalls, 1);
    }

    // Forget what was received of a call, and ignore what follows.
    void drop(Stream& stream) {
        stream.ignored = true;
        ahead_ -= stream.message.size() - stream.have;
        stream.have = 0;
        stream.message = Message();
        give(stream, stream.held);
    }

    void refuse_message(Stream& stream, Refusal refusal) {
        drop(stream);
        events_.push_back({GrpcEvent::kRefused, stream.id, {}, static_cast<std::int64_t>(refusal), Message()});
    }

    // Let the peer send more, unless the program has not processed what it has sent: `size` bytes of a call's messages were read.
    void settle(Stream& stream, std::size_t size) {
        stream.owed += size;
        if (stream.unread < kUnread && rest_.empty() && stream.owed) lib_.session_consume_stream(session_, stream.id, std::exchange(stream.owed, 0));
    }

    void reset(Stream& stream) {
        stream.finished = true;
        lib_.submit_rst_stream(session_, nghttp2::kNoFlags, stream.id, nghttp2::kCancel);
    }

    Stream* find(std::int32_t id) {
        const auto found = streams_.find(id);
        return found == streams_.end() ? nullptr : found->second.get();
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
        return guarded(me, me.broken_, action);
    }

    // Run a callback, and let the library stop after it if this turn is over.
    template <class Action>
    static int in_turn(void* user, Action action) {
        if (const int failed = safely(user, action)) return failed;
        auto& me = *static_cast<GrpcConnection*>(user);
        me.paused_ = me.turn_ >= kTurn;
        return me.paused_ ? nghttp2::kPause : 0;
    }

    // End the connection, because the peer exceeds a limit.
    void calm(std::string_view why) {
        if (std::exchange(broken_, true)) return;
        lib_.submit_goaway(session_, nghttp2::kNoFlags, lib_.session_get_last_proc_stream_id(session_), nghttp2::kCalm,
                           reinterpret_cast<const std::uint8_t*>(why.data()), why.size());
    }

    // Count a call that ended without an answer, whoever ended it; the rate is limited.
    void count_unanswered() {
        const std::int64_t now = monotonic_ns(), each = 1'000'000'000 / kResetsASecond;
        const std::int64_t gone = (now - counted_) / each;
        counted_ += gone * each;
        resets_ = std::max<std::int64_t>(0, resets_ - gone) + 1;
        if (resets_ > kResets) calm("1000 calls ended before their answer: wait for answers, or set longer deadlines");
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
        return in_turn(user, [&](GrpcConnection& me) {
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
            if (frame->type == nghttp2::kReset && !me.find(frame->stream)) me.count_unanswered();  // else `stream_closed` counts it
            Stream* stream = frame->type == nghttp2::kHeaders || frame->type == nghttp2::kData ? me.find(frame->stream) : nullptr;
            if (!stream) return;
            if (frame->type == nghttp2::kHeaders && !stream->called) {
                stream->called = true;
                if (stream->refusal) {
                    stream->ignored = true;
                    me.refuse(*stream);
                    return;
                }
                ++me.turn_;
                stream->began = monotonic_ns();
                me.events_.push_back({GrpcEvent::kCall, stream->id, stream->path, stream->timeout, Message()});
                Refusal refusal = me.account_->take(Resource::kCalls, 1);
                stream->counted = refusal == Refusal::kNone;
                if (stream->counted) refusal = me.hold(*stream, kCall + stream->metadata_bytes, 0);
                if (refusal != Refusal::kNone) me.refuse_message(*stream, refusal);
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
        return in_turn(user, [&](GrpcConnection& me) {
            me.in_head_ = false;
            me.lib_.session_consume_connection(session, size);
            Stream* stream = me.find(id);
            if (!stream) return;
            stream->heard = monotonic_ns();
            me.take_in(*stream, data, size);
            me.settle(*stream, size);
        });
    }

    void take_in(Stream& stream, const std::uint8_t* data, std::size_t size) {
        while (size && !stream.ignored && !stream.finished) {
            if (turn_ >= kTurn) {
                rest_.assign(reinterpret_cast<const char*>(data), size), rest_of_ = stream.id;
                account_->owe(Resource::kReceived, size);
                return;
            }
            if (stream.prefix_have < kPrefix) {
                const std::size_t part = std::min(size, kPrefix - stream.prefix_have);
                std::memcpy(stream.prefix + stream.prefix_have, data, part);
                stream.prefix_have += part, data += part, size -= part;
                if (stream.prefix_have < kPrefix) return;
                stream.want = length_in(stream.prefix);
                stream.have = 0;
                if (stream.want > limits_.message) {
                    stream.ignored = true;
                    events_.push_back({GrpcEvent::kTooLarge, stream.id, {}, static_cast<std::int64_t>(stream.want), Message()});
                    return;
                }
                stream.message = Message();
            }
            const std::size_t part = std::min(size, stream.want - stream.have);
            if (!make_room(stream, part)) return;
            if (part) std::memcpy(stream.message.data() + stream.have, data, part);
            stream.have += part, data += part, size -= part, ahead_ -= part;
            if (stream.have < stream.want) return;
            ++turn_;
            stream.unread += stream.want + kEach;
            stream.prefix_have = 0;
            const GrpcEvent kind = stream.prefix[0] ? GrpcEvent::kCompressed : GrpcEvent::kMessage;
            events_.push_back({kind, stream.id, {}, 0, std::move(stream.message)});
            stream.message = Message();
            stream.have = 0;
        }
    }

    // Make room for `part` more bytes of a message: for all of it, so that it is never copied, unless more than the largest message
    // would be allocated on this connection before it arrives. Then for as much again as has arrived. Return false if the budget has
    // none.
    bool make_room(Stream& stream, std::size_t part) {
        const std::size_t size = stream.message.size(), needed = stream.have + part;
        if (needed <= size && stream.want) return true;  // an empty one is made, too
        const std::size_t wanted = ahead_ + stream.want - size <= limits_.message ? stream.want : std::min(stream.want, 2 * needed);
        const Refusal refusal = hold(stream, wanted - size + (size ? 0 : kEach), stream.want);
        if (refusal != Refusal::kNone) {
            refuse_message(stream, refusal);
            return false;
        }
        stream.message.resize(wanted);
        ahead_ += wanted - size;
        return true;
    }

    void begin(Stream& stream) {
        if (!stream.started) {
            stream.started = true;
            const nghttp2::Field fields[] = {field_of(":status", "200"), field_of("content-type", "application/grpc")};
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
                for (const auto& [name, value] : stream.trailers) fields.push_back(field_of(name, value));
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
            const std::size_t size = message.size(), total = kPrefix + size;
            if (stream.at < kPrefix) {
                const auto prefix = prefix_of(size);
                const std::size_t part = std::min(room - written, kPrefix - stream.at);
                std::memcpy(to + written, prefix.data() + stream.at, part);
                stream.at += part, written += part;
                if (stream.at < kPrefix) break;
            }
            const std::size_t part = std::min(room - written, total - stream.at);
            if (part) std::memcpy(to + written, message.data() + (stream.at - kPrefix), part);
            stream.at += part, written += part;
            if (stream.at == total) {
                stream.out.pop_front();
                stream.at = 0;
            }
        }
        stream.queued -= written;
        account_->give(Resource::kAnswers, written);
        return written;
    }

    static int frame_went(nghttp2::Session* session, const nghttp2::FrameHead* frame, void* user) {
        // If a call is answered before it was received completely, the peer need not send the rest.
        return safely(user, [&](GrpcConnection& me) {
            if (frame->type == nghttp2::kHeaders && (frame->flags & nghttp2::kEndStream) && !me.lib_.session_get_stream_remote_close(session, frame->stream))
                me.lib_.submit_rst_stream(session, nghttp2::kNoFlags, frame->stream, nghttp2::kNoError);
        });
    }

    // Return whether a call's own time-out has passed, so that it is no wonder that its peer has given up. One that is next to
    // nothing does not count.
    static bool overdue(const Stream& stream) {
        return stream.called && stream.timeout >= kDeadline && monotonic_ns() - stream.began >= stream.timeout;
    }

    static int stream_closed(nghttp2::Session*, std::int32_t id, std::uint32_t why, void* user) {
        return safely(user, [&](GrpcConnection& me) {
            me.in_head_ = false;
            const auto found = me.streams_.find(id);
            if (found == me.streams_.end()) return;
            Stream& stream = *found->second;
            if ((why != nghttp2::kNoError || !stream.finished) && !overdue(stream)) me.count_unanswered();
            if (stream.called && !stream.finished) me.events_.push_back({GrpcEvent::kGone, id, {}, 0, Message()});
            me.release(stream);
            me.streams_.erase(found);
        });
    }

    const nghttp2::Library& lib_ = nghttp2::library();
    GrpcLimits limits_;
    const std::shared_ptr<Account> account_;
    nghttp2::Session* session_ = nullptr;
    std::unordered_map<std::int32_t, std::unique_ptr<Stream>> streams_;
    std::vector<Event> events_;
    bool broken_ = false, failed_ = false, in_head_ = false;
    bool paused_ = false;     // whether a turn ended before all bytes were processed
    std::size_t turn_ = 0;    // calls and messages reported in this turn
    std::string left_, rest_; // bytes of a later turn: of the connection, from `at_` on, and of a message
    std::size_t at_ = 0;
    std::int32_t rest_of_ = 0;  // the call of `rest_`
    std::uint64_t heads_ = 0;
    std::size_t endless_ = 0;  // bytes of headers that are still incomplete
    std::size_t ahead_ = 0;    // bytes that are allocated for messages and have not arrived
    std::int64_t resets_ = 0, counted_ = monotonic_ns();
};

}  // namespace jurybox
