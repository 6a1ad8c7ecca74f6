#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <stdexcept>
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

// Returns large frames without a copy, as uint8 arrays that own them.
nb::list frames_of(Zmtp::Message& message) {
    constexpr std::size_t kLarge = 64 << 10;
    nb::list frames;
    for (std::string& frame : message) {
        if (frame.size() < kLarge) {
            frames.append(nb::bytes(frame.data(), frame.size()));
            continue;
        }
        auto* kept = new std::string(std::move(frame));
        nb::capsule owner(kept, [](void* pointer) noexcept { delete static_cast<std::string*>(pointer); });
        frames.append(nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner)));
    }
    return frames;
}

}  // namespace

// It belongs to one thread at a time, like a ring's client.
void bind_zmtp(nb::module_& m) {
    nb::class_<Zmtp>(m, "Zmtp", "A DEALER's connection to a ROUTER, or a ROUTER's to a DEALER, over a connected stream socket, which it closes.")
        .def(
            "__init__",
            [](Zmtp* self, int fd, nb::bytes identity, std::size_t most, double patience, bool router) {
                new (self) Zmtp(fd, {identity.c_str(), identity.size()}, most, static_cast<std::int64_t>(patience * 1e9), router);
            },
            nb::arg("fd"), nb::arg("identity"), nb::arg("most"), nb::arg("patience"), nb::arg("router") = false,
            "`identity`: the routing id, empty for the peer's choice; `most`: bytes of a frame that comes; `patience`: seconds that "
            "a send may wait for room, where nobody watches for it.")
        .def(
            "send",
            [](Zmtp& self, std::uint64_t sequence, nb::handle frames) {
                const Frames message(frames);
                const Unlocked release;
                return self.send(sequence, message.data(), message.size());
            },
            nb::arg("sequence"), nb::arg("frames"), nb::lock_self(),
            "Send a message whose answer will have this sequence number; False if the connection is broken.")
        .def(
            "post",
            [](Zmtp& self, nb::handle frames) {
                const Frames message(frames);
                const Unlocked release;
                return self.post(message.data(), message.size());
            },
            nb::arg("frames"), nb::lock_self(), "Send a message without an answer, or an answer; False if the connection is broken.")
        .def_prop_ro("pending", &Zmtp::pending, "Bytes that the kernel has not accepted yet.")
        .def_prop_ro("peer", [](const Zmtp& self) { return nb::bytes(self.peer().data(), self.peer().size()); },
                     "The peer's routing id, if it sent one.")
        .def(
            "exchange",
            [](Zmtp& self, std::uint64_t sequence, nb::handle frames, double timeout) -> nb::object {
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
                return frames_of(answer);
            },
            nb::arg("sequence"), nb::arg("frames"), nb::arg("timeout"), nb::lock_self(),
            "Send a message and wait for its answer, or a complaint that names no sequence; None where none came in time: "
            "`holds` tells. Other answers stay for receive.")
        .def(
            "receive",
            [](Zmtp& self, double timeout, std::size_t most) {
                {
                    const Unlocked release;
                    self.receive(static_cast<std::int64_t>(timeout * 1e9));
                }
                nb::list messages;
                for (Zmtp::Message message; messages.size() < most && self.take(message);) messages.append(frames_of(message));
                return messages;
            },
            nb::arg("timeout"), nb::arg("most") = SIZE_MAX, nb::lock_self(),
            "Messages that came within so many seconds, `most` of them, each a list of frames: bytes, or arrays of uint8 where they are "
            "large.")
        .def(
            "look", [](Zmtp& self) { return self.receive(0); }, nb::lock_self(),
            "Continue the handshake and send kept bytes; returns whether there are messages, which stay for receive.")
        .def_prop_ro("arrived", [](const Zmtp& self) { return self.oldest() != nullptr; }, "Whether there are messages for receive.")
        .def("holds", &Zmtp::holds, nb::arg("sequence"), nb::lock_self(), "Whether a message was sent and its answer not received.")
        .def_prop_ro("unanswered", [](const Zmtp& self) { return self.unanswered(); }, "Sequence numbers in flight, or those in flight when the connection broke.")
        .def_prop_ro("ready", &Zmtp::ready, "Whether messages can be exchanged: the handshake is complete.")
        .def_prop_ro("broken", &Zmtp::broken, "Whether the connection is broken.")
        .def_prop_ro("descriptor", &Zmtp::descriptor, "A descriptor that is readable if `receive` would read or send something.")
        .def_prop_ro("silence", [](const Zmtp& self) { return static_cast<double>(self.silence_ns()) * 1e-9; }, "Seconds since the last bytes arrived.")
        .def("ping", &Zmtp::ping, nb::lock_self(), "Send a PING, whose answer ends the silence.")
        .def("watched", &Zmtp::watched, nb::arg("on"), nb::lock_self(), "Set whether the caller waits on the descriptor, so that sends need not wait.")
        .def("close", &Zmtp::close, nb::lock_self(), "Close the socket; unsent bytes are dropped.");
}

}  // namespace jurybox
