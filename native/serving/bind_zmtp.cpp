#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "serving/zmtp.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// Frames borrowed for one call.
class Frames {
  public:
    explicit Frames(nb::handle frames) {
        for (nb::handle frame : frames) {
            const Read& kept = kept_.emplace_back(frame);
            parts_.push_back({kept.bytes(), kept.size()});
        }
        if (parts_.empty()) throw std::invalid_argument("a message has a frame at least");
    }
    const Zmtp::Part* data() const { return parts_.data(); }
    std::size_t size() const { return parts_.size(); }

  private:
    std::deque<Read> kept_;
    std::vector<Zmtp::Part> parts_;
};

using Shared = std::shared_ptr<Zmtp::Message>;

Shared shared(Zmtp::Message& message) { return std::make_shared<Zmtp::Message>(std::move(message)); }

// Returns large frames without a copy, as uint8 arrays that own the message.
nb::list frames_of(const Shared& message) {
    constexpr std::size_t kLarge = 64 << 10;
    nb::list frames;
    for (std::string& frame : *message) {
        if (frame.size() < kLarge) {
            frames.append(nb::bytes(frame.data(), frame.size()));
            continue;
        }
        nb::capsule owner(new Shared(message), [](void* pointer) noexcept { delete static_cast<Shared*>(pointer); });
        frames.append(nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(frame.data(), {frame.size()}, owner)));
    }
    return frames;
}

// With the answers that its user has seen and not settled. An interrupted or a nested call loses none of them.
struct Link : Zmtp {
    using Zmtp::Zmtp;
    std::vector<std::pair<std::uint64_t, Shared>> unsettled;

    std::vector<std::pair<std::uint64_t, Shared>> answers(std::int64_t ns) {
        const auto keep = [this] {
            Message message;
            for (std::uint64_t sequence = 0; take(message, sequence);) unsettled.emplace_back(sequence, shared(message));
        };
        keep();
        {
            const Unlocked release;
            receive(unsettled.empty() ? ns : 0);
        }
        keep();
        return unsettled;
    }

    bool answered(std::uint64_t sequence) const {
        return std::any_of(unsettled.begin(), unsettled.end(), [&](const auto& one) { return one.first == sequence; });
    }

    void settled(std::uint64_t sequence) {
        const auto gone = [&](const auto& one) { return one.first == sequence; };
        unsettled.erase(std::remove_if(unsettled.begin(), unsettled.end(), gone), unsettled.end());
    }
};

}  // namespace

Zmtp& zmtp_of(nb::handle link) { return nb::cast<Link&>(link); }

// It belongs to one thread at a time, like a ring's client.
void bind_zmtp(nb::module_& m) {
    nb::class_<Link>(m, "Zmtp", "A DEALER's connection to a ROUTER, or a ROUTER's to a DEALER, over a connected stream socket, which it closes.")
        .def(
            "__init__",
            [](Link* self, int fd, nb::bytes identity, std::size_t most, double patience, bool router, std::shared_ptr<Account> account) {
                new (self) Link(fd, {identity.c_str(), identity.size()}, most, static_cast<std::int64_t>(patience * 1e9), router, std::move(account));
            },
            nb::arg("fd"), nb::arg("identity"), nb::arg("most"), nb::arg("patience"), nb::arg("router") = false, nb::arg("account").none() = nb::none(),
            "`identity`: the routing id, empty for the peer's choice; `most`: bytes of a frame that comes; `patience`: seconds that "
            "a send may wait for room, where nobody watches for it; `account`: counts what has arrived and is not received.")
        .def(
            "send",
            [](Link& self, std::uint64_t sequence, nb::handle frames) {
                const Frames message(frames);
                const Unlocked release;
                return self.send(sequence, message.data(), message.size());
            },
            nb::arg("sequence"), nb::arg("frames"), nb::lock_self(),
            "Send a message whose answer will have this sequence number; False if the connection is broken.")
        .def(
            "post",
            [](Link& self, nb::handle frames) {
                const Frames message(frames);
                const Unlocked release;
                return self.post(message.data(), message.size());
            },
            nb::arg("frames"), nb::lock_self(), "Send a message without an answer, or an answer; False if the connection is broken.")
        .def_prop_ro("pending", &Link::pending, "Bytes that the kernel has not accepted yet.")
        .def_prop_ro("peer", [](const Link& self) { return nb::bytes(self.peer().data(), self.peer().size()); },
                     "The peer's routing id, if it sent one.")
        .def(
            "exchange",
            [](Link& self, std::uint64_t sequence, nb::handle frames, double timeout) -> nb::object {
                const Frames message(frames);
                Zmtp::Message answer;
                bool came = false;
                {
                    const Unlocked release;
                    const std::int64_t until = monotonic_ns() + static_cast<std::int64_t>(timeout * 1e9);
                    if (self.send(sequence, message.data(), message.size())) {
                        const std::int64_t left = until - monotonic_ns();
                        came = self.await(sequence, left, answer);
                    }
                }
                if (!came) return nb::none();
                return frames_of(shared(answer));
            },
            nb::arg("sequence"), nb::arg("frames"), nb::arg("timeout"), nb::lock_self(),
            "Send a message and wait for its answer, or a complaint that names no sequence, which is settled then; None where none came "
            "in time: `holds` tells. Other answers stay.")
        .def(
            "receive",
            [](Link& self, double timeout, std::size_t most) {
                {
                    const Unlocked release;
                    self.receive(static_cast<std::int64_t>(timeout * 1e9));
                }
                nb::list messages;
                for (Zmtp::Message message; messages.size() < most && self.take(message);) messages.append(frames_of(shared(message)));
                return messages;
            },
            nb::arg("timeout"), nb::arg("most") = SIZE_MAX, nb::lock_self(),
            "Messages that came within so many seconds, `most` of them, each a list of frames: bytes, or arrays of uint8 where they are "
            "large.")
        .def(
            "answers",
            [](Link& self, double timeout) {
                nb::list answers;
                for (const auto& [sequence, message] : self.answers(static_cast<std::int64_t>(timeout * 1e9)))
                    answers.append(nb::make_tuple(sequence, frames_of(message)));
                return answers;
            },
            nb::arg("timeout"), nb::lock_self(),
            "Answers that are not settled, each with its sequence number and frames as of `receive`; waits for some at most this many "
            "seconds.")
        .def("settled", &Link::settled, nb::arg("sequence"), nb::lock_self(), "Drop an answer that `answers` returned.")
        .def(
            "look", [](Link& self) { return self.receive(0); }, nb::lock_self(),
            "Continue the handshake and send kept bytes; returns whether there are messages, which stay for receive.")
        .def(
            "refused",
            [](Link& self) {
                nb::list firsts;
                for (const std::string& first : self.refused()) firsts.append(nb::bytes(first.data(), first.size()));
                return firsts;
            },
            nb::lock_self(), "Remove the first frames of messages that the account had no room for; empty where that was none of a ticket.")
        .def_prop_ro("arrived", [](const Link& self) { return self.oldest() != nullptr; }, "Whether there are messages for receive.")
        .def("holds", [](const Link& self, std::uint64_t sequence) { return self.holds(sequence) || self.answered(sequence); },
             nb::arg("sequence"), nb::lock_self(), "Whether a message was sent and its answer is not settled.")
        .def_prop_ro("unanswered", [](const Link& self) { return self.unanswered(); }, "Sequence numbers in flight, or those in flight when the connection broke.")
        .def_prop_ro("ready", &Link::ready, "Whether messages can be exchanged: the handshake is complete.")
        .def_prop_ro("broken", &Link::broken, "Whether the connection is broken.")
        .def_prop_ro("was_ready", &Link::was_ready, "Whether the handshake was completed, also of a connection that has broken since.")
        .def_prop_ro("descriptor", &Link::descriptor, "A descriptor that is readable if `receive` would read or send something.")
        .def_prop_ro("silence", [](const Link& self) { return static_cast<double>(self.silence_ns()) * 1e-9; }, "Seconds since the last bytes arrived.")
        .def("ping", &Link::ping, nb::lock_self(), "Send a PING, whose answer ends the silence.")
        .def("watched", &Link::watched, nb::arg("on"), nb::lock_self(), "Set whether the caller waits on the descriptor, so that sends need not wait.")
        .def("close", &Link::close, nb::lock_self(), "Close the socket; unsent bytes are dropped.");
}

}  // namespace jurybox
