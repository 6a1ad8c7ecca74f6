#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "doorbell.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Records = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

BellMemory* bell_of(const Memory& memory) {
    if (memory.shape(0) < sizeof(BellMemory)) throw std::invalid_argument("the memory is smaller than a bell");
    if (reinterpret_cast<std::uintptr_t>(memory.data()) % alignof(BellMemory)) throw std::invalid_argument("the memory is not aligned");
    return reinterpret_cast<BellMemory*>(memory.data());
}

Ticket* tickets_of(const Records& records, std::size_t n) {
    if (records.shape(1) != sizeof(Ticket) || n > records.shape(0)) throw std::invalid_argument("tickets are (n, 64) bytes");
    return reinterpret_cast<Ticket*>(records.data());
}

// The array is kept, and with it the mapping.
struct Engine {
    Memory memory;
    BellEngine bell;
    std::vector<pollfd> fds;
};
struct Client {
    Memory memory;
    BellClient bell;
};

}  // namespace

void bind_doorbell(nb::module_& m) {
    m.attr("BELL_BYTES") = sizeof(BellMemory);
    m.attr("BELL_LANES") = kBellLanes;
    m.attr("BELL_RING") = kRing;

    nb::class_<Engine>(m, "BellEngine", "The engine's side of a bell over borrowed memory (BELL_BYTES of uint8).")
        .def(
            "__init__",
            [](Engine* self, Memory memory, const std::vector<int>& fds, std::uint64_t epoch, std::int64_t spin_ns) {
                if (fds.empty()) throw std::invalid_argument("the first descriptor is the pipe clients write to");
                new (self) Engine{memory, BellEngine(bell_of(memory), epoch, spin_ns), {}};
                for (int fd : fds) self->fds.push_back({fd, POLLIN, 0});
            },
            nb::arg("memory"), nb::arg("fds"), nb::arg("epoch"), nb::arg("spin_ns"))
        .def(
            "collect",
            [](Engine& self, Records out) { return self.bell.collect(tickets_of(out, 0), out.shape(0)); },
            nb::arg("out"), "Take posted tickets into out (n, 64) uint8; gives how many.")
        .def(
            "reply",
            [](Engine& self, Records tickets, std::size_t n, std::uint32_t code, std::uint64_t version,
               const std::string& message) {
                return self.bell.reply(tickets_of(tickets, n), n, code, version, message.data(), message.size());
            },
            nb::arg("tickets"), nb::arg("n"), nb::arg("code"), nb::arg("version"), nb::arg("message"),
            "Answer the first n tickets and wake who sleeps; gives how many answers found no room.")
        .def(
            "wait",
            [](Engine& self, double timeout) {
                nb::gil_scoped_release release;
                return self.bell.wait(self.fds.data(), self.fds.size(), static_cast<std::int64_t>(timeout * 1e9));
            },
            nb::arg("timeout"), "Wait, seconds at most, for a posting (True) or for a descriptor to be readable.");

    nb::class_<Client>(m, "BellClient", "A lane's client on a bell over borrowed memory.")
        .def(
            "__init__",
            [](Client* self, Memory memory, std::uint32_t lane, std::uint64_t lease, int wake, std::int64_t spin_ns) {
                if (lane >= kBellLanes) throw std::out_of_range("the lane's number is beyond the bell's lanes");
                new (self) Client{memory, BellClient(bell_of(memory), lane, lease, wake, spin_ns)};
            },
            nb::arg("memory"), nb::arg("lane"), nb::arg("lease"), nb::arg("wake"), nb::arg("spin_ns"))
        .def(
            "submit",
            [](Client& self, std::uint64_t sequence, std::uint32_t first, std::uint32_t rows, std::int64_t submitted,
               std::int64_t deadline, std::uint64_t version, std::uint64_t epoch) {
                return self.bell.submit(Ticket{sequence, 0, deadline, submitted, 0, first, rows, 0, version, {epoch}});
            },
            nb::arg("sequence"), nb::arg("first"), nb::arg("rows"), nb::arg("submitted"), nb::arg("deadline"),
            nb::arg("version"), nb::arg("epoch"), "Post a ticket; False when BELL_RING are in flight.")
        .def(
            "exchange",
            [](Client& self, std::uint64_t sequence, std::uint32_t first, std::uint32_t rows, std::int64_t submitted,
               std::int64_t deadline, std::uint64_t version, std::uint64_t epoch, double timeout) -> nb::object {
                if (!self.bell.submit(Ticket{sequence, 0, deadline, submitted, 0, first, rows, 0, version, {epoch}}))
                    throw std::runtime_error("the ring is full");
                Answer answer;
                bool came;
                {
                    nb::gil_scoped_release release;
                    came = self.bell.wait(static_cast<std::int64_t>(timeout * 1e9)) && self.bell.receive(&answer, 1) == 1;
                }
                if (!came) return nb::none();
                return nb::make_tuple(answer.sequence, answer.code, answer.version);
            },
            nb::arg("sequence"), nb::arg("first"), nb::arg("rows"), nb::arg("submitted"), nb::arg("deadline"),
            nb::arg("version"), nb::arg("epoch"), nb::arg("timeout"),
            "Post a ticket and wait for an answer (sequence, code, version); None when none came in time.")
        .def(
            "receive",
            [](Client& self, double timeout) {
                Answer answers[kRing];
                std::size_t n = self.bell.receive(answers, kRing);
                if (n == 0 && timeout > 0) {
                    nb::gil_scoped_release release;
                    if (self.bell.wait(static_cast<std::int64_t>(timeout * 1e9))) n = self.bell.receive(answers, kRing);
                }
                nb::list result;
                for (std::size_t i = 0; i < n; ++i)
                    result.append(nb::make_tuple(answers[i].sequence, answers[i].code, answers[i].version));
                return result;
            },
            nb::arg("timeout"), "Answers (sequence, code, version) that came within so many seconds.")
        .def(
            "wait",
            [](Client& self, double timeout) {
                nb::gil_scoped_release release;
                return self.bell.wait(static_cast<std::int64_t>(timeout * 1e9));
            },
            nb::arg("timeout"), "Whether answers came within so many seconds; they stay for receive.")
        .def("message", [](Client& self) { return std::string(self.bell.message(), strnlen(self.bell.message(), kMessage)); },
             "What the lane's last failure said.");
}

}  // namespace jurybox
