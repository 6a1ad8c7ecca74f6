// The fast path of a remote client's lane, for ordinary requests: rows of fixed shapes, an engine that serves, answers that are
// outputs, and a client that reads them. It passes tickets with their rows from the client's connection to an engine's ring, and
// the outputs back, in the relay's only thread. The relay handles everything else and then takes over the tickets in flight
// (`hand_over`), so that each ticket has exactly one owner.
#pragma once
#include <poll.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "serving/engine_rings.hpp"
#include "serving/zmtp.hpp"

namespace jurybox {

class RelayLane {
  public:
    // A ticket in flight: the client's number, the engine's number, and the client's ticket.
    struct Sent {
        std::uint64_t sequence, number, version, incarnation;
        std::int64_t submitted, deadline;
        std::uint32_t first, rows;
        std::size_t engine;  // index
    };

    // `lease` is the client's number for the lane, which has `rows` rows of the arena from `first` on. `prefix` begins each message.
    // Nothing happens before `take_over`.
    RelayLane(Zmtp& link, std::vector<EngineRings> engines, std::uint64_t lease, std::uint32_t first, std::uint32_t rows,
              std::vector<RowColumn> inputs, std::vector<RowColumn> outputs, std::string prefix)
        : link_(link), lease_(lease), first_(first), rows_(rows), inputs_(std::move(inputs)), outputs_(std::move(outputs)),
          prefix_(std::move(prefix)), engines_(std::move(engines)) {
        sent_.reserve(kRing);
        parts_.resize(1 + outputs_.size());
    }

    // Start to handle the lane's tickets, with numbers above this one. None may be in flight.
    void take_over(std::uint64_t number) {
        number_ = looked_ = number;
        mine_ = true;
    }
    // Stop to handle the lane's tickets and return those in flight. The last number used is `number`.
    std::vector<Sent> hand_over() {
        mine_ = false;
        std::vector<Sent> sent;
        sent.swap(sent_);
        sent_.reserve(kRing);
        for (EngineRings& engine : engines_) engine.tickets = 0;
        return sent;
    }
    bool mine() const { return mine_; }
    std::uint64_t number() const { return number_; }
    std::size_t in_flight() const { return sent_.size(); }

    // Pass on tickets that have arrived; return their number. The first special one stays in the link, with all after it.
    std::size_t take_in() {
        std::size_t taken = 0;
        for (const Zmtp::Message* message; mine_ && (message = link_.oldest()) != nullptr && submit(*message); ++taken)
            link_.drop_oldest();
        return taken;
    }

    // Send the answers that have arrived. Return false if the relay must send them: all, or the next one, which is special.
    bool answer() {
        for (std::size_t engine = 0; mine_ && engine < engines_.size(); ++engine)
            if (!answer(engine)) return false;
        return mine_;
    }

    // Serve a lone client for `ns`. It ends early with any other event, or if neither the client nor the engine sends anything
    // for `pause_ns`. The first descriptor is readable if there are messages, also of this client; it is not polled while the
    // engine computes.
    void stay(pollfd* fds, std::size_t n_fds, std::int64_t pause_ns, std::int64_t ns) {
        const std::int64_t until = monotonic_ns() + ns;
        const timespec pause = timespec_of(pause_ns);
        while (mine_ && sent_.empty() && monotonic_ns() < until) {
            if (::ppoll(fds, n_fds, &pause, nullptr) <= 0) return;
            for (std::size_t i = 1; i < n_fds; ++i)
                if (fds[i].revents != 0) return;
            if (!link_.receive(0) || take_in() == 0 || link_.oldest() != nullptr) return;
            if (!engines_[sent_.front().engine].rings->wait(pause_ns) || !answer()) return;
        }
    }

    // Return whether a ticket is in flight that was in flight at the last call.
    bool overdue() {
        const bool found = std::any_of(sent_.begin(), sent_.end(), [this](const Sent& one) { return one.number <= looked_; });
        looked_ = number_;
        return found;
    }

  private:
    static constexpr std::int64_t kLongest = 3'600'000'000'000;  // ns; an hour, the limit of all time-outs

    // Send the answers of an engine; return false if the next one is special.
    bool answer(std::size_t engine) {
        ShmRingsClient& rings = *engines_[engine].rings;
        Answer answer, same;
        while (rings.next(answer)) {
            const auto sent = std::find_if(sent_.begin(), sent_.end(), [&](const Sent& one) { return one.number == answer.sequence; });
            const bool known = sent != sent_.end() && sent->engine == engine;
            // The relay enforces the limit on bytes that a client has not read.
            if (known && (answer.code != kOk || link_.pending() > 0)) return false;
            rings.receive(&same, 1);
            if (!known) continue;
            post(*sent, answer.version);
            --engines_[engine].tickets;
            *sent = sent_.back();
            sent_.pop_back();
        }
        return true;
    }

    // Copy a ticket's rows to the lane and post it; return false, without doing anything, if it is special.
    bool submit(const Zmtp::Message& message) {
        if (message.size() != 1 + inputs_.size() || message[0].size() != prefix_.size() + sizeof(Ticket) ||
            message[0].compare(0, prefix_.size(), prefix_) != 0)
            return false;
        Ticket came;
        std::memcpy(&came, message[0].data() + prefix_.size(), sizeof came);
        if (came.lease != lease_ || came.rows == 0 || came.rows > rows_ || came.first > rows_ - came.rows) return false;
        for (const Sent& one : sent_) {
            const bool apart = one.first + one.rows <= came.first || came.first + came.rows <= one.first;
            if (one.sequence == came.sequence || !apart) return false;
        }
        for (std::size_t i = 0; i < inputs_.size(); ++i)
            if (message[1 + i].size() != came.rows * inputs_[i].row_bytes) return false;
        EngineRings* const engine = choose_engine(engines_);
        if (sent_.size() == kRing || engine == nullptr) return false;
        for (std::size_t i = 0; i < inputs_.size(); ++i)
            std::memcpy(inputs_[i].first + came.first * inputs_[i].row_bytes, message[1 + i].data(), message[1 + i].size());
        const std::int64_t now = monotonic_ns(), left = std::clamp<std::int64_t>(came.deadline, 1, kLongest);
        const Ticket ticket{number_ + 1, 0, now + left, now, 0, first_ + came.first, came.rows, 0, came.version, {engine->incarnation}};
        if (!engine->rings->submit(ticket)) return false;
        ++engine->tickets;
        const auto index = static_cast<std::size_t>(engine - engines_.data());
        sent_.push_back({came.sequence, ++number_, came.version, came.incarnation, now, now + left, came.first, came.rows, index});
        return true;
    }

    void post(const Sent& sent, std::uint64_t version) {
        const std::uint64_t fields[] = {sent.sequence, version, sent.incarnation};  // PACK_REPLY of wire.py, with the code 0
        head_.assign(prefix_).append(reinterpret_cast<const char*>(fields), sizeof fields).append(sizeof kOk, '\0');
        parts_[0] = {head_.data(), head_.size()};
        for (std::size_t i = 0; i < outputs_.size(); ++i)
            parts_[1 + i] = {outputs_[i].first + sent.first * outputs_[i].row_bytes, sent.rows * outputs_[i].row_bytes};
        link_.post(parts_.data(), parts_.size());  // failure is ignored: the client is gone
    }

    Zmtp& link_;
    const std::uint64_t lease_;
    const std::uint32_t first_, rows_;
    const std::vector<RowColumn> inputs_, outputs_;
    const std::string prefix_;
    std::string head_;  // of an answer
    std::vector<EngineRings> engines_;
    bool mine_ = false;
    std::uint64_t number_ = 0, looked_ = 0;
    std::vector<Sent> sent_;
    std::vector<Zmtp::Part> parts_;
};

}  // namespace jurybox
