#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "serving/engine_rings.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

ShmRingsMemory* rings_of(const Bytes& memory) {
    if (memory.shape(0) < sizeof(ShmRingsMemory)) throw std::invalid_argument("the memory is smaller than a ring segment");
    if (reinterpret_cast<std::uintptr_t>(memory.data()) % alignof(ShmRingsMemory)) throw std::invalid_argument("the memory is not aligned");
    return reinterpret_cast<ShmRingsMemory*>(memory.data());
}

// Any process of the user can write to the memory, so the text may be no UTF-8.
nb::str text_of(const std::string& message) {
    PyObject* text = PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace");
    if (text == nullptr) throw nb::python_error();
    return nb::steal<nb::str>(text);
}

// These objects' state belongs to one thread at a time: the engine's, or the one that has the model's lock. In a Python
// without the global lock, lock_self() protects calls that do not wait. Any thread may call a client's `wait`.
//
// The array is kept to keep its memory mapped.
struct Engine {
    Bytes memory;
    ShmRingsEngine rings;
    std::vector<pollfd> fds;
};
struct Client {
    struct Kept {
        Answer answer;
        std::string message;
    };
    Bytes memory;
    ShmRingsClient rings;
    std::vector<Kept> unsettled;  // received from the ring, and not settled by the lane

    std::string message(const Answer& answer) const { return answer.code == kOk ? std::string() : std::string(rings.message()); }
    void keep(const Answer& answer) { unsettled.push_back({answer, message(answer)}); }

    // Receive what has arrived; wait for it if nothing is there and `timeout` is above 0.
    void receive(double timeout) {
        Answer answer;
        while (rings.receive(&answer, 1) == 1) keep(answer);
        if (!unsettled.empty() || timeout <= 0) return;
        {
            Unlocked release;
            if (!rings.wait(static_cast<std::int64_t>(timeout * 1e9))) return;
        }
        while (rings.receive(&answer, 1) == 1) keep(answer);
    }

    // Wait for the answer to a ticket, which is settled then; others are kept.
    bool answer_to(std::uint64_t sequence, std::int64_t ns, Answer& answer) {
        return rings.answer_to(sequence, ns, answer, [this](const Answer& other) { keep(other); });
    }

    void settled(std::uint64_t sequence) {
        const auto gone = [&](const Kept& kept) { return kept.answer.sequence == sequence; };
        unsettled.erase(std::remove_if(unsettled.begin(), unsettled.end(), gone), unsettled.end());
    }

    bool holds(std::uint64_t sequence) const {
        const auto found = [&](const Kept& kept) { return kept.answer.sequence == sequence; };
        return rings.holds(sequence) || std::any_of(unsettled.begin(), unsettled.end(), found);
    }
};
struct Word {
    Bytes memory;
    ShmRingsWord word;
};
// Repeated calls on the same rows of the arena.
struct Caller {
    nb::object client, place, engine, outputs, extents;  // kept, since the pointers below point to their memory
    nb::object kind;  // what a row is: the type `bytes`, or an array of this dtype
    Client* rings;
    std::byte* input;  // null: the inputs are written already
    std::size_t bytes;
    const EngineRecord* record;
    std::uint32_t first, rows;
    std::uint64_t incarnation;
    std::int64_t most_ns;
    std::int64_t* sizes;  // the variable sizes of a row; null: its shape is fixed
    std::vector<std::int64_t> shape;
    std::size_t item;
    nb::object array = nb::module_::import_("numpy").attr("ndarray");
    std::uint64_t version = 0;
    std::int64_t deadline = 0;  // of the last ticket
    std::string message = {};   // of the last failure

    nb::object call(nb::handle row, std::uint64_t sequence, double seconds) {
        const int code = ask(row, sequence, seconds);
        return code == 0 ? copied() : nb::int_(code);
    }

    int ask(nb::handle row, std::uint64_t sequence, double seconds) {
        if (!record->serves(incarnation)) return kNotSent;
        if (row.is_none()) return asked(nullptr, 0, sequence, seconds);
        if (input == nullptr || !is_plain(row)) return kNotFit;
        std::optional<Read> given;
        try {
            given.emplace(row);
        } catch (const nb::python_error&) {  // it is not C-contiguous
            return kNotFit;
        }
        if (!fits(*given)) return kNotFit;
        if (sizes != nullptr) {
            std::int64_t* to = sizes;
            for (std::size_t i = 0; i < shape.size(); ++i)
                if (shape[i] < 0) *to++ = given->shape()[i];
        }
        return asked(given->bytes(), given->size(), sequence, seconds);
    }

    // Other threads run during the copy of large rows, too.
    int asked(const std::byte* from, std::size_t size, std::uint64_t sequence, double seconds) {
        Unlocked release;
        if (size > 0) std::memcpy(input, from, size);
        const std::int64_t now = monotonic_ns(), ns = static_cast<std::int64_t>(seconds * 1e9);
        deadline = now + ns;
        if (!rings->rings.submit(Ticket{sequence, 0, deadline, now, 0, first, rows, 0, 0, {incarnation}})) return kNotSent;
        Answer answer;
        if (!rings->answer_to(sequence, ns < most_ns ? ns : most_ns, answer)) return kNotAnswered;
        version = answer.version;
        if (answer.code != kOk) message = rings->rings.message();
        return static_cast<int>(answer.code);
    }

    // No subclass of arrays: it may mask values, or compute them.
    bool is_plain(nb::handle row) const {
        if (PyType_Check(kind.ptr())) return PyBytes_CheckExact(row.ptr());
        if (!row.type().is(array)) return false;
        static const nb::object& name = *new nb::object(nb::str("dtype"));  // as `copy` below
        const nb::object dtype = row.attr(name);
        return dtype.is(kind) || dtype.equal(kind);
    }

    // The same as TensorSpec.extents_of: sizes beside a size of 0 are checked, too.
    bool fits(const Read& given) const {
        if (given.dimensions() != shape.size() || given.size() > bytes) return false;
        std::size_t room = bytes / item;
        for (std::size_t i = 0; i < shape.size(); ++i) {
            const auto size = static_cast<std::size_t>(given.shape()[i]);
            if (shape[i] >= 0 && static_cast<std::size_t>(shape[i]) != size) return false;
            if (size > 1) room /= size;
        }
        return room > 0 || sizes == nullptr;
    }

    // The only output, or a dict of outputs; none if the caller reads them itself.
    nb::object copied() const {
        if (outputs.is_none()) return outputs;
        // Never freed, since Python ends before. Its creation runs no Python code, so it cannot cause a deadlock of locks.
        static const nb::object& copy = *new nb::object(nb::str("copy"));
        if (!PyDict_CheckExact(outputs.ptr())) return outputs.attr(copy)();
        nb::dict all;
        for (auto [name, array] : nb::borrow<nb::dict>(outputs)) all[name] = array.attr(copy)();
        return std::move(all);
    }
};

}  // namespace

ShmRingsClient& rings_client(nb::handle client) { return nb::cast<Client&>(client).rings; }

std::vector<EngineRings> engines_of(const std::vector<GivenEngine>& given) {
    if (given.empty()) throw std::invalid_argument("one engine at least was expected");
    std::vector<EngineRings> engines;
    for (const auto& [client, engine, incarnation] : given) {
        const Write record(engine);
        engines.push_back({&rings_client(client), record.records<const EngineRecord>(), incarnation});
    }
    return engines;
}

void bind_shm_rings(nb::module_& m) {
    m.attr("RINGS_BYTES") = sizeof(ShmRingsMemory);
    m.attr("RINGS_LANES") = kShmRingsLanes;
    m.attr("RINGS_SLEEPERS") = kSleepers;
    m.attr("NOT_SENT") = kNotSent;
    m.attr("NOT_ANSWERED") = kNotAnswered;
    m.attr("NOT_FIT") = kNotFit;

    m.def(
        "show_state",
        [](nb::handle engine, std::uint32_t state) {
            const Write record(engine);
            if (record.rows() != 1) throw std::invalid_argument("one record of scoreboard.ENGINE was expected");
            record.records<EngineRecord>()->show(state);
        },
        nb::arg("engine"), nb::arg("state"),
        "Store an engine's state in its record (1,) of scoreboard.ENGINE with release semantics.");

    nb::class_<Engine>(m, "ShmRingsEngine", "The engine's side of a ring segment over borrowed memory (RINGS_BYTES of uint8).")
        .def(
            "__init__",
            [](Engine* self, Bytes memory, const std::vector<int>& fds, std::uint64_t incarnation, std::int64_t spin_ns) {
                if (fds.empty()) throw std::invalid_argument("the first descriptor is the pipe clients write to");
                new (self) Engine{memory, ShmRingsEngine(rings_of(memory), incarnation, spin_ns), {}};
                for (int fd : fds) self->fds.push_back({fd, POLLIN, 0});
            },
            nb::arg("memory"), nb::arg("fds"), nb::arg("incarnation"), nb::arg("spin_ns"))
        .def(
            "collect",
            [](Engine& self, nb::handle out) {
                const Write room(out);
                return self.rings.collect(room.records<Ticket>(), room.rows());
            },
            nb::arg("out"), nb::lock_self(), "Collect posted tickets into out, records of wire.TICKET; returns their number.")
        .def(
            "reply",
            [](Engine& self, nb::handle tickets, std::uint32_t code, std::uint64_t version, const std::string& message) {
                const Read these(tickets);
                return self.rings.reply(these.records<const Ticket>(), these.rows(), code, version, message.data(),
                                       message.size());
            },
            nb::arg("tickets"), nb::arg("code"), nb::arg("version"), nb::arg("message"), nb::lock_self(),
            "Answer tickets and wake sleeping clients; returns the number of dropped answers.")
        .def(
            "wait",
            [](Engine& self, double timeout) {
                Unlocked release;
                return self.rings.wait(self.fds.data(), self.fds.size(), static_cast<std::int64_t>(timeout * 1e9));
            },
            nb::arg("timeout"), "Wait for a posting or a readable descriptor, at most this many seconds; True if there may be tickets.")
        .def("mend", [](Engine& self) { return self.rings.mend(); }, nb::lock_self(),
             "Restore the engine's positions that were overwritten; returns the number of lanes.")
        .def("renew", [](Engine& self, std::uint64_t incarnation) { self.rings.renew(incarnation); }, nb::arg("incarnation"), nb::lock_self(),
             "Drop tickets of earlier incarnations from now on.")
        .def(
            "pause",
            [](Engine& self, double timeout, std::uint32_t tickets) {
                Unlocked release;
                self.rings.pause(self.fds.data(), static_cast<std::int64_t>(timeout * 1e9), tickets);
            },
            nb::arg("timeout"), nb::arg("tickets"), "Sleep until this many lanes have posted, at most this many seconds.");

    nb::class_<Client>(m, "ShmRingsClient", "A lane's client on a ring segment over borrowed memory.")
        .def(
            "__init__",
            [](Client* self, Bytes memory, std::uint32_t lane, std::uint64_t lease, int wake, std::int64_t spin_ns) {
                if (lane >= kShmRingsLanes) throw std::out_of_range("the lane's number is beyond the lanes there are");
                new (self) Client{memory, ShmRingsClient(rings_of(memory), lane, lease, wake, spin_ns), {}};
            },
            nb::arg("memory"), nb::arg("lane"), nb::arg("lease"), nb::arg("wake"), nb::arg("spin_ns"))
        .def(
            "submit",
            [](Client& self, std::uint64_t sequence, std::uint32_t first, std::uint32_t rows, std::int64_t submitted,
               std::int64_t deadline, std::uint64_t version, std::uint64_t incarnation) {
                self.rings.set_watched(true);
                return self.rings.submit(Ticket{sequence, 0, deadline, submitted, 0, first, rows, 0, version, {incarnation}});
            },
            nb::arg("sequence"), nb::arg("first"), nb::arg("rows"), nb::arg("submitted"), nb::arg("deadline"),
            nb::arg("version"), nb::arg("incarnation"), nb::lock_self(), "Post a ticket; False if the lane's ring is full.")
        .def(
            "exchange",
            [](Client& self, std::uint64_t sequence, std::uint32_t first, std::uint32_t rows, std::int64_t submitted,
               std::int64_t deadline, std::uint64_t version, std::uint64_t incarnation, double timeout) -> nb::object {
                // Full although nothing is in flight: answers were lost, and the ticket will be sent again.
                self.rings.set_watched(false);
                if (!self.rings.submit(Ticket{sequence, 0, deadline, submitted, 0, first, rows, 0, version, {incarnation}})) {
                    self.rings.set_watched(true);
                    return nb::none();
                }
                Answer answer;
                bool came;
                {
                    Unlocked release;
                    came = self.answer_to(sequence, static_cast<std::int64_t>(timeout * 1e9), answer);
                }
                if (!came) {
                    self.rings.set_watched(true);
                    return nb::none();
                }
                return nb::make_tuple(answer.code, text_of(self.message(answer)), answer.version);
            },
            nb::arg("sequence"), nb::arg("first"), nb::arg("rows"), nb::arg("submitted"), nb::arg("deadline"),
            nb::arg("version"), nb::arg("incarnation"), nb::arg("timeout"), nb::lock_self(),
            "Post a ticket and wait for its answer (code, message, version), which is settled then; None when none came in "
            "time, or the lane's ring is full: `holds` tells. Others stay for receive.")
        .def(
            "receive",
            [](Client& self, double timeout) {
                self.receive(timeout);
                const std::vector<Client::Kept> kept = self.unsettled;  // the garbage collector may run code that settles some
                nb::list result;
                for (const auto& [answer, message] : kept)
                    result.append(nb::make_tuple(answer.sequence, answer.code, text_of(message), answer.version));
                return result;
            },
            nb::arg("timeout"), nb::lock_self(),
            "Answers that are not settled, (sequence, code, message, version) of each; waits for some at most this many seconds.")
        .def("settled", [](Client& self, std::uint64_t sequence) { self.settled(sequence); }, nb::arg("sequence"), nb::lock_self(),
             "Drop an answer that `receive` returned.")
        .def("holds", [](Client& self, std::uint64_t sequence) { return self.holds(sequence); }, nb::arg("sequence"), nb::lock_self(),
             "Whether a ticket was posted and its answer is not settled.")
        .def_prop_ro("in_flight", [](Client& self) { return self.rings.in_flight() + self.unsettled.size(); }, "Tickets that are not settled.")
        .def(
            "wait",
            [](Client& self, double timeout) {
                Unlocked release;
                return self.rings.wait(static_cast<std::int64_t>(timeout * 1e9));
            },
            nb::arg("timeout"), "Whether answers arrive within this many seconds; they stay for receive.")
        .def(
            "watch",
            [](const Client& self, int eventfd, double timeout) {
                Unlocked release;
                self.rings.watch(eventfd, static_cast<std::int64_t>(timeout * 1e9));
            },
            nb::arg("eventfd"), nb::arg("timeout"),
            "Add to the eventfd whenever answers arrive, for this many seconds; called in a separate thread.")
        .def("arm", [](Client& self) { return self.rings.arm(); }, nb::lock_self(),
             "Make the next answer wake the lane's ShmRingsWord; returns whether an answer is there already.")
        .def(
            "spin",
            [](Client& self) {
                Unlocked release;
                return self.rings.spin();
            },
            nb::lock_self(), "Whether answers arrive within microseconds; does not wait if other clients use the engine.");

    nb::class_<Word>(m, "ShmRingsWord", "The word on which a lane and 31 others sleep, for a thread that watches it on their behalf.")
        .def(
            "__init__",
            [](Word* self, Bytes memory, std::uint32_t lane) {
                if (lane >= kShmRingsLanes) throw std::out_of_range("the lane's number is beyond the lanes there are");
                new (self) Word{memory, {rings_of(memory), lane}};
            },
            nb::arg("memory"), nb::arg("lane"))
        .def("add", [](Word& self, std::uint32_t lane) { self.word.add(lane); }, nb::arg("lane"), "Watch for answers of a lane.")
        .def("remove", [](Word& self, std::uint32_t lane) { return self.word.remove(lane); }, nb::arg("lane"),
             "Stop watching for a lane; returns the number of lanes left.")
        .def("pause", [](Word& self, std::uint32_t lane) { self.word.pause(lane); }, nb::arg("lane"),
             "Pause watching for a lane until it is added again, while its client waits for answers itself.")
        .def(
            "watch",
            [](Word& self, int eventfd, double timeout) {
                Unlocked release;
                self.word.watch(eventfd, static_cast<std::int64_t>(timeout * 1e9));
            },
            nb::arg("eventfd"), nb::arg("timeout"),
            "Add to the eventfd whenever armed lanes may have answers, for this many seconds; called in a separate thread.");

    nb::class_<Caller>(m, "ShmRingsCaller", "Whole calls on the same rows of one lane, while nothing else of it is in flight.")
        .def(
            "__init__",
            [](Caller* self, nb::object client, nb::object place, nb::object outputs, nb::object engine, std::uint32_t first,
               std::uint32_t rows, std::uint64_t incarnation, double most, nb::object extents, const std::vector<std::int64_t>& shape,
               nb::object kind, std::size_t item) {
                Client& of = nb::cast<Client&>(client);
                const Write record(engine);
                std::byte* input = nullptr;
                std::size_t bytes = 0;
                if (!place.is_none()) {
                    const Write to(place);
                    input = to.bytes(), bytes = to.size();
                }
                std::int64_t* sizes = nullptr;
                if (!extents.is_none()) {
                    const Write open(extents);
                    const auto count = static_cast<std::size_t>(std::count_if(shape.begin(), shape.end(), [](auto size) { return size < 0; }));
                    if (open.size() != count * sizeof(std::int64_t) || item == 0 || count == 0)
                        throw std::invalid_argument("extents are one int64 for each size that the shape leaves open");
                    sizes = open.records<std::int64_t>();
                }
                new (self) Caller{client, place, engine, outputs, extents, kind, &of, input, bytes, record.records<const EngineRecord>(),
                                  first, rows, incarnation, static_cast<std::int64_t>(most * 1e9), sizes, shape, item};
            },
            nb::arg("client"), nb::arg("place").none(), nb::arg("outputs").none(), nb::arg("engine"), nb::arg("first"), nb::arg("rows"),
            nb::arg("incarnation"), nb::arg("most"), nb::arg("extents").none() = nb::none(),
            nb::arg("shape") = std::vector<std::int64_t>(), nb::arg("kind").none() = nb::none(), nb::arg("item") = 1,
            "`place` is the arena's `rows` rows of the only input from `first` on, None where inputs are written beforehand; "
            "`outputs` its only output rows or a dict of them, None where they are read otherwise; `engine` the record of "
            "scoreboard.ENGINE whose life is `incarnation`; a call waits `most` seconds, then gives the ticket up to its "
            "caller. A row has this `shape` and `kind`: the type `bytes`, or a dtype, of so many bytes an item. With `extents`, "
            "int64 (k,), it may have any size: `shape` has a -1 for each of them, and they are written with the row.")
        .def("__call__", &Caller::call, nb::arg("row").none(), nb::arg("sequence"), nb::arg("seconds"),
             "Copy the row in (None: it is there), post its ticket, due in so many seconds, and wait. Returns a copy of the "
             "outputs, or a failure's code; NOT_FIT where the row is not of this form, C-contiguous; NOT_SENT where the engine serves "
             "no more; NOT_ANSWERED where the ticket is still in flight.")
        .def_prop_ro("version", [](const Caller& self) { return self.version; }, "The weights version of the last answer.")
        .def_prop_ro("deadline", [](const Caller& self) { return self.deadline; }, "The deadline of the last ticket, ns of CLOCK_MONOTONIC.")
        .def("message", [](Caller& self) { return text_of(self.message); }, "The message of the last failure.");
}

}  // namespace jurybox
