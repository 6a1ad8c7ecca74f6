// A ZeroMQ connection over a stream socket, without libzmq: ZMTP 3.1, mechanism NULL, as a DEALER or as one connection of a
// ROUTER (rfc.zeromq.org/spec/37). The caller's thread reads and writes the socket itself, so that messages wake no other thread.
//
// It sends Jurybox's tickets (docs/protocol.md): a message's first frame contains a sequence number, and a number that was sent
// and not answered is in flight. An interrupted caller, for example by KeyboardInterrupt, leaves no partial message: bytes that
// the kernel did not accept are kept, and the next call sends them.
#pragma once
#include <poll.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/budget.hpp"
#include "common/wait.hpp"

namespace jurybox {

class Zmtp {
  public:
    using Message = std::vector<std::string>;
    struct Part {
        const void* data;
        std::size_t size;
    };

    // fd: a connected stream socket, which this object owns from now on, unless the constructor throws. identity: the routing id;
    // empty: the peer chooses it. most: bytes of the longest frame that the peer may send. patience_ns: the maximum time of a send
    // if the kernel does not accept all bytes at once. router: whether this is a ROUTER's connection, whose peer sends its own
    // routing id. account: counts the messages that have not been taken, also those that are incomplete; null: none does.
    Zmtp(int fd, std::string_view identity, std::size_t most, std::int64_t patience_ns, bool router = false, std::shared_ptr<Account> account = nullptr)
        : fd_(fd), most_(most), patience_ns_(patience_ns), account_(std::move(account)), heard_(monotonic_ns()) {
        out_.append("\xFF\0\0\0\0\0\0\0\1\x7F\3\1NULL", 16).append(48, '\0');
        std::string ready("\5READY", 6);
        property(ready, "Socket-Type", router ? "ROUTER" : "DEALER");
        property(ready, "Identity", identity);
        put(out_, kCommand, {ready.data(), ready.size()});
        epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
        epoll_event interest{};
        interest.events = EPOLLIN;
        if (epoll_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd_, &interest) != 0) {
            const int why = errno;
            if (epoll_ >= 0) ::close(epoll_);
            throw std::system_error(why, std::generic_category(), "epoll");
        }
        flush();
    }
    ~Zmtp() {
        close();
        give(charged_);
        for (const std::size_t size : sizes_) give(size);
    }
    Zmtp(const Zmtp&) = delete;
    Zmtp& operator=(const Zmtp&) = delete;

    // Send a message whose answer will have this sequence number. Unsent bytes are kept: `flush` or any other call sends them.
    // Return false if the connection is broken; then nothing of the message is kept.
    bool send(std::uint64_t sequence, const Part* parts, std::size_t n) {
        if (broken()) return false;
        unanswered_.push_back(sequence);
        return post(parts, n);
    }

    // Send a message without an answer, or an answer.
    bool post(const Part* parts, std::size_t n) {
        if (broken()) return false;
        whole_or_broken([&] {
            if (ready_ && out_.empty()) {
                write(parts, n);
            } else {
                append(ready_ ? out_ : held_, parts, n);
                flush();
            }
        });
        // Unless the descriptor is watched, nothing would be sent until the next call.
        if (unsent() > 0 && ready_ && !watched_) wait_for(POLLOUT, patience_ns_, [this] { return unsent() == 0; });
        return !broken();
    }

    // Read and write as much as possible; wait at most `ns` for a message. Return whether there is one.
    bool receive(std::int64_t ns) {
        if (!arrived_.empty()) return true;
        if (ns <= 0) {
            read();
            flush();
            return !arrived_.empty();
        }
        return wait_for(POLLIN, ns, [this] { return !arrived_.empty(); });
    }

    // Wait at most `ns` for the message that `take` returns for a sequence number.
    bool await(std::uint64_t sequence, std::int64_t ns, Message& message) {
        if (take(sequence, message)) return true;
        wait_for(POLLIN, ns, [&] { return take(sequence, message); });
        return !message.empty();
    }

    // Remove the answer to a sequence number, or an error about an invalid ticket (sequence 0); others stay. The number is no
    // longer in flight.
    bool take(std::uint64_t sequence, Message& message) {
        for (auto at = arrived_.begin(); at != arrived_.end(); ++at) {
            const std::uint64_t named = sequence_of(*at);
            if (named != sequence && named != 0) continue;
            message = std::move(*at);
            const auto size = sizes_.begin() + (at - arrived_.begin());
            give(*size);
            sizes_.erase(size);
            arrived_.erase(at);
            answered(named);
            return true;
        }
        return false;
    }

    // The oldest message, which stays; null if there is none. For a ROUTER's connection, which gets no answers.
    const Message* oldest() const { return arrived_.empty() ? nullptr : &arrived_.front(); }
    void drop_oldest() {
        arrived_.pop_front();
        give(sizes_.front());
        sizes_.pop_front();
    }

    // Remove the first frames of messages that the budget had no room for, and that were not kept.
    std::vector<std::string> refused() { return std::exchange(refused_, {}); }

    // Remove the oldest message. Its sequence number is no longer in flight.
    bool take(Message& message, std::uint64_t& sequence) {
        if (arrived_.empty()) return false;
        message = std::move(arrived_.front());
        drop_oldest();
        answered(sequence = sequence_of(message));
        return true;
    }
    bool take(Message& message) {
        std::uint64_t sequence;
        return take(message, sequence);
    }

    bool holds(std::uint64_t sequence) const {
        return !broken() && std::find(unanswered_.begin(), unanswered_.end(), sequence) != unanswered_.end();
    }
    // The number of bytes that the kernel has not accepted yet.
    std::size_t pending() const { return out_.size() - sent_ + held_.size(); }

    // The peer's routing id, if it sent one.
    const std::string& peer() const { return peer_; }

    // The sequence numbers in flight, or those in flight when the connection broke.
    const std::vector<std::uint64_t>& unanswered() const { return unanswered_; }

    // Send a PING: `silence` starts anew with the peer's answer.
    void ping() {
        if (!ready_ || broken()) return;
        put(out_, kCommand, {"\4PING\0\0", 7});
        flush();
    }
    std::int64_t silence_ns() const { return monotonic_ns() - heard_; }

    // Return whether messages can be exchanged; false before the handshake and after the connection broke.
    bool ready() const { return ready_ && !broken(); }
    bool was_ready() const { return ready_; }
    bool broken() const { return fd_ < 0 || !why_.empty(); }
    const std::string& why() const { return why_; }
    // A descriptor that is readable if the socket has data, or accepts bytes that were kept.
    int descriptor() const { return epoll_; }
    // Set whether the caller waits on the descriptor, so that sends need not wait until the kernel accepts their bytes.
    void watched(bool on) { watched_ = on; }

    void close() {
        if (fd_ >= 0) ::close(fd_);
        if (epoll_ >= 0) ::close(epoll_);
        fd_ = epoll_ = -1;
    }

  private:
    static constexpr unsigned char kMore = 1, kLong = 2, kCommand = 4;
    static constexpr std::size_t kGreeting = 64, kChunk = 64 << 10, kSmall = 4 << 10, kPiece = 512 << 10, kMostFrames = 4096, kFrames = 8;  // of a message: so many times the longest frame
    // The limits of one call, so that a peer that sends without end gets only its share.
    static constexpr int kTurns = 4;  // reads; more only while a frame is incomplete
    static constexpr std::size_t kMostTaken = 4u << 20, kMostArrived = 64;  // bytes and messages after which nothing more is read
    static constexpr std::size_t kMostCommand = 16u << 10;  // bytes of a command, and of any frame before the end of the handshake
    static constexpr std::size_t kEach = 64;                // bytes that a frame costs beside its own
    static constexpr std::size_t kMostRefused = 64, kFirst = 4u << 10;  // refused messages that are told, and bytes of their first frames
    static constexpr std::size_t kSequence = 2;  // its offset in a reply, after the prefix

    static std::uint64_t sequence_of(const Message& message) {
        std::uint64_t sequence = 0;
        if (!message.empty() && message[0].size() >= kSequence + sizeof sequence)
            std::memcpy(&sequence, message[0].data() + kSequence, sizeof sequence);
        return sequence;
    }

    void answered(std::uint64_t sequence) {
        const auto found = std::find(unanswered_.begin(), unanswered_.end(), sequence);
        if (found == unanswered_.end()) return;
        *found = unanswered_.back();
        unanswered_.pop_back();
    }

    // Count `size` bytes more of the present message; if there is no room, it is discarded, and false returned.
    bool charge(std::size_t size) {
        if (discarding_) return false;
        if (!account_) return true;
        if (account_->take(Resource::kReceived, size, taken_) == Refusal::kNone) {
            charged_ += size;
            return true;
        }
        discarding_ = true;
        first_.clear();
        if (!partial_.empty() && partial_[0].size() <= kFirst && (partial_.size() > 1 || large_ == 0)) first_.swap(partial_[0]);
        Message().swap(partial_);
        give(std::exchange(charged_, 0));
        return false;
    }
    void give(std::size_t size) {
        if (account_) account_->give(Resource::kReceived, size);
    }

    static void big_endian(std::string& to, std::uint64_t value, int bytes) {
        for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) to.push_back(static_cast<char>(value >> shift & 0xFF));
    }

    static void property(std::string& to, std::string_view name, std::string_view value) {
        big_endian(to, name.size(), 1);
        to.append(name);
        big_endian(to, value.size(), 4);
        to.append(value);
    }

    static void header(std::string& to, unsigned char flags, std::size_t size) {
        const bool is_long = size > 255;
        to.push_back(static_cast<char>(flags | (is_long ? kLong : 0)));
        big_endian(to, size, is_long ? 8 : 1);
    }

    static void put(std::string& to, unsigned char flags, Part part) {
        header(to, flags, part.size);
        to.append(static_cast<const char*>(part.data), part.size);
    }

    static void append(std::string& to, const Part* parts, std::size_t n) {
        for (std::size_t i = 0; i < n; ++i) put(to, i + 1 < n ? kMore : 0, parts[i]);
    }

    std::size_t unsent() const { return out_.size() - sent_; }

    // Write a message; keep the bytes that the kernel does not accept.
    void write(const Part* parts, std::size_t n) {
        std::size_t size = 0;
        for (std::size_t i = 0; i < n; ++i) size += parts[i].size;
        if (size <= kSmall) {
            append(out_, parts, n);
            flush();
            return;
        }
        std::vector<std::string> headers(n);
        std::vector<iovec> all;
        for (std::size_t i = 0; i < n; ++i) {
            header(headers[i], i + 1 < n ? kMore : 0, parts[i].size);
            all.push_back({headers[i].data(), headers[i].size()});
            all.push_back({const_cast<void*>(parts[i].data), parts[i].size});
        }
        msghdr message{};
        message.msg_iov = all.data(), message.msg_iovlen = std::min<std::size_t>(all.size(), 1024);
        ssize_t went;
        do went = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        while (went < 0 && errno == EINTR);
        if (went < 0 && errno != EAGAIN) return fail(std::strerror(errno));
        auto done = static_cast<std::size_t>(went < 0 ? 0 : went);
        for (const iovec& one : all) {
            const std::size_t skip = std::min(done, one.iov_len);
            done -= skip;
            out_.append(static_cast<const char*>(one.iov_base) + skip, one.iov_len - skip);
        }
        wants_room(unsent() > 0);
    }

    void flush() {
        while (unsent() > 0 && !broken()) {
            const ssize_t went = ::send(fd_, out_.data() + sent_, unsent(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (went >= 0) {
                sent_ += static_cast<std::size_t>(went);
            } else if (errno == EAGAIN) {
                break;
            } else if (errno != EINTR) {
                return fail(std::strerror(errno));
            }
        }
        if (unsent() == 0) {
            sent_ = 0;
            if (out_.capacity() > kChunk)
                std::string().swap(out_);
            else
                out_.clear();
        } else if (sent_ > kChunk && sent_ >= out_.size() / 2) {
            // A peer that always leaves something unread would otherwise make this memory grow with all bytes ever sent.
            out_.erase(0, sent_);
            sent_ = 0;
        }
        wants_room(unsent() > 0);
    }

    void wants_room(bool wanted) {
        if (wanted == wants_room_ || broken()) return;
        epoll_event interest{};
        interest.events = EPOLLIN | (wanted ? EPOLLOUT : 0u);
        if (::epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_, &interest) == 0) wants_room_ = wanted;
    }

    // Break the connection if memory runs out within a message: either side would read later bytes as the rest of it.
    template <class Action>
    void whole_or_broken(Action action) {
        try {
            action();
        } catch (...) {
            fail("no memory was left for a message");
            throw;
        }
    }

    // Read the available bytes and handle every complete frame.
    void read() {
        whole_or_broken([this] { read_some(); });
    }

    void read_some() {
        const std::size_t full = arrived_.size() + kMostArrived;
        std::size_t left = kMostTaken;
        for (int turn = 0; !broken() && left > 0 && arrived_.size() < full && (turn < kTurns || wanted_ > 0 || large_ > 0); ++turn) {
            if (large_ > 0) {
                if (!read_large(left)) return;
                continue;
            }
            if (in_.size() - end_ < kSmall || begin_ + wanted_ > in_.size()) in_.resize(std::max(end_ + kChunk, begin_ + wanted_));
            const std::size_t room = in_.size() - end_;
            const ssize_t came = ::recv(fd_, in_.data() + end_, room, MSG_DONTWAIT);
            if (came < 0 && errno == EINTR) continue;
            if (came < 0 && errno == EAGAIN) return;
            if (came <= 0) return fail(came == 0 ? "the peer closed the connection" : std::strerror(errno));
            end_ += static_cast<std::size_t>(came);
            left -= std::min(left, static_cast<std::size_t>(came));
            heard_ = monotonic_ns();
            while (!broken() && frame()) {
            }
            if (begin_ == end_) {
                begin_ = end_ = 0;
                const bool idle = account_ && arrived_.empty() && partial_.empty();  // one of many connections, and only a command came
                if (in_.size() > 16 * kChunk || idle) std::vector<char>().swap(in_);
            } else if (begin_ >= kChunk) {
                std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
                end_ -= begin_, begin_ = 0;
            }
            if (static_cast<std::size_t>(came) < room) return;
        }
    }

    // Read at most `left` available bytes of a large frame directly to its place; return false if it is incomplete. Memory is
    // allocated as bytes arrive, so that announcing a large frame costs no memory.
    bool read_large(std::size_t& left) {
        while (got_ < large_) {
            if (left == 0) {
                at_least(std::min(large_ - got_, kPiece));
                return false;
            }
            if (!discarding_ && got_ == partial_.back().size()) {
                const std::size_t size = std::min(large_, std::max(2 * got_, kChunk));
                if (charge(size - got_)) partial_.back().resize(size);
            }
            if (discarding_ && in_.size() < kChunk) in_.resize(kChunk);
            char* const to = discarding_ ? in_.data() : partial_.back().data() + got_;
            const std::size_t room = discarding_ ? std::min(in_.size(), large_ - got_) : partial_.back().size() - got_;
            const ssize_t came = ::recv(fd_, to, std::min(left, room), MSG_DONTWAIT);
            if (came < 0 && errno == EINTR) continue;
            if (came < 0 && errno == EAGAIN) {
                at_least(std::min(large_ - got_, kPiece));
                return false;
            }
            if (came <= 0) {
                fail(came == 0 ? "the peer closed the connection" : std::strerror(errno));
                return false;
            }
            heard_ = monotonic_ns();
            got_ += static_cast<std::size_t>(came);
            left -= static_cast<std::size_t>(came);
        }
        large_ = 0;
        at_least(1);
        if (!large_more_) whole();
        return true;
    }

    // Make the socket readable only with this many bytes, instead of with each packet of a large frame. The kernel limits the
    // number to its buffer.
    void at_least(std::size_t bytes) {
        if (bytes == at_least_) return;
        const int value = static_cast<int>(bytes);
        if (::setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value) == 0) at_least_ = bytes;
    }

    // Handle a complete message.
    void whole() {
        taken_ = 0;
        if (discarding_) {
            discarding_ = false;
            if (refused_.size() < kMostRefused) refused_.push_back(std::move(first_));
            return;
        }
        arrived_.push_back(std::move(partial_));
        sizes_.push_back(std::exchange(charged_, 0));
        partial_.clear();
    }

    // Handle one frame, or the greeting; return false if it is incomplete.
    bool frame() {
        const char* at = in_.data() + begin_;
        const std::size_t there = end_ - begin_;
        if (!greeted_) {
            if (there > 0 && at[0] != '\xFF') return broke("the peer speaks no ZMTP");
            if (there < kGreeting) return false;
            if (at[9] != '\x7F' || at[10] < 3 || std::memcmp(at + 12, "NULL\0", 5) != 0)
                return broke("the peer speaks another version or security mechanism of ZMTP");
            greeted_ = true;
            begin_ += kGreeting;
            return true;
        }
        if (there < 2) return false;
        const auto flags = static_cast<unsigned char>(at[0]);
        if (flags & ~(kMore | kLong | kCommand)) return broke("a frame came with unknown flags");
        std::size_t head = 2, size = static_cast<unsigned char>(at[1]);
        if (flags & kLong) {
            if (there < 9) return false;
            head = 9, size = 0;
            for (int i = 1; i < 9; ++i) size = size << 8 | static_cast<unsigned char>(at[i]);
        }
        if (size > kMostCommand && (flags & kCommand || !ready_)) return broke("a command came that is longer than allowed");
        if (size > most_ || taken_ + size > kFrames * most_) return broke("a message came that is longer than allowed");
        if (there < head + size) {
            if (size < kChunk || flags & kCommand || !ready_) {
                wanted_ = head + size;
                return false;
            }
            taken_ += size;
            if (charge(there - head + kEach)) partial_.emplace_back(at + head, there - head);
            large_ = size, got_ = there - head;
            large_more_ = (flags & kMore) != 0;
            begin_ = end_;
            return partial_.size() <= kMostFrames ? false : broke("a message of too many frames came");
        }
        wanted_ = 0;
        begin_ += head + size;
        const std::string_view body(at + head, size);
        if (flags & kCommand) return command(body);
        if (!ready_) return broke("a message came before the handshake was over");
        taken_ += size;
        if (charge(size + kEach)) partial_.emplace_back(body);
        if (partial_.size() > kMostFrames) return broke("a message of too many frames came");
        if (!(flags & kMore)) whole();
        return true;
    }

    bool command(std::string_view body) {
        const std::size_t length = body.empty() ? 0 : static_cast<unsigned char>(body[0]);
        if (body.size() < 1 + length) return broke("a command came without its name");
        const std::string_view name = body.substr(1, length);
        if (name == "READY" && !ready_) {
            if (!properties(body.substr(1 + length))) return broke("a handshake came that cannot be read");
            ready_ = true;
            out_.append(held_);
            held_.clear();
            flush();
        } else if (name == "PING" && body.size() >= 7) {
            if (unsent() > kChunk) return true;  // the peer reads nothing, or will receive other bytes
            const std::string answer = "\4PONG" + std::string(body.substr(7, 16));
            put(out_, kCommand, {answer.data(), answer.size()});
            flush();
        } else if (name == "ERROR") {
            return broke("the peer refused the connection");
        }
        return true;
    }

    // Parse the properties of a READY command, and keep the routing id.
    bool properties(std::string_view rest) {
        while (!rest.empty()) {
            const std::size_t name = static_cast<unsigned char>(rest[0]);
            if (rest.size() < 1 + name + 4) return false;
            std::size_t value = 0;
            for (std::size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(rest[1 + name + i]);
            if (rest.size() - (1 + name + 4) < value) return false;
            if (name == 8 && ::strncasecmp(rest.data() + 1, "Identity", 8) == 0) peer_ = rest.substr(1 + name + 4, value);
            rest.remove_prefix(1 + name + 4 + value);
        }
        return peer_.size() <= 255;
    }

    // Read and write until `done`, at most for `ns`. A signal ends the wait, so that Python can run its handlers.
    template <class Done>
    bool wait_for(short event, std::int64_t ns, Done done) {
        const std::int64_t until = monotonic_ns() + ns;
        while (!broken()) {
            const std::int64_t left = until - monotonic_ns();
            if (left <= 0) break;
            pollfd one{fd_, static_cast<short>(POLLIN | (event | (unsent() ? POLLOUT : 0))), 0};
            const timespec timeout = timespec_of(left);
            const int found = ::ppoll(&one, 1, &timeout, nullptr);
            if (found < 0) break;
            if (found == 0) continue;
            if (one.revents & ~POLLOUT) read();
            if (one.revents & POLLOUT) flush();
            if (done()) return true;
        }
        return done();
    }

    bool broke(const char* why) {
        fail(why);
        return false;
    }
    void fail(const char* why) {
        if (why_.empty()) why_ = why;
    }

    int fd_, epoll_ = -1;
    const std::size_t most_;
    const std::int64_t patience_ns_;
    const std::shared_ptr<Account> account_;
    std::int64_t heard_;
    bool greeted_ = false, ready_ = false, watched_ = false, wants_room_ = false;
    std::string why_, peer_;
    std::string out_, held_;  // bytes to send, from `sent_` on; messages that wait for the handshake
    std::size_t sent_ = 0;
    std::vector<char> in_;  // bytes read, from `begin_` to `end_`
    std::size_t begin_ = 0, end_ = 0, wanted_ = 0, taken_ = 0;
    Message partial_;
    std::size_t large_ = 0, got_ = 0;  // bytes of a large frame, the last of `partial_`, and how many have arrived
    std::size_t at_least_ = 1;
    bool large_more_ = false;
    std::deque<Message> arrived_;
    std::deque<std::size_t> sizes_;  // what each of them is charged with
    std::size_t charged_ = 0;        // and the incomplete one
    bool discarding_ = false;        // whether the rest of the present message is dropped
    std::string first_;              // its first frame
    std::vector<std::string> refused_;
    std::vector<std::uint64_t> unanswered_;
};

}  // namespace jurybox
