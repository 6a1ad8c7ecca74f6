#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "serving/relay_lane.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// Does nothing after `close`. The objects that it points to are kept until then.
struct Held {
    nb::object link;
    std::vector<GivenEngine> engines;
    Columns inputs, outputs;
    std::optional<RelayLane> lane;

    void close() {
        lane.reset();
        inputs.clear(), outputs.clear();
        engines.clear();
        link.reset();
    }
};

}  // namespace

// It belongs to the relay's thread, like its connection and its rings' client.
void bind_relay_lane(nb::module_& m) {
    nb::class_<Held>(m, "RelayLane", "The fast path of a remote client's lane for ordinary requests: from its connection to an engine's rings and back.")
        .def(
            "__init__",
            [](Held* self, nb::object link, std::vector<GivenEngine> engines, std::uint64_t lease, std::uint32_t first, std::uint32_t rows,
               Columns inputs, Columns outputs, nb::bytes prefix) {
                std::vector<EngineRings> of = engines_of(engines);
                std::vector<RowColumn> in = columns_of(inputs, first, rows), out = columns_of(outputs, first, rows);
                Held* held = new (self) Held{link, std::move(engines), std::move(inputs), std::move(outputs), std::nullopt};
                held->lane.emplace(zmtp_of(link), std::move(of), lease, first, rows, std::move(in), std::move(out), std::string(prefix.c_str(), prefix.size()));
            },
            nb::arg("link"), nb::arg("engines"), nb::arg("lease"), nb::arg("first"), nb::arg("rows"), nb::arg("inputs"), nb::arg("outputs"),
            nb::arg("prefix"),
            "`link` is its connection; `engines` are those that may compute its tickets, the preferred one first: its side of the rings of "
            "an engine's incarnation, the engine's record of scoreboard.ENGINE, and the incarnation; `lease` is the client's name for the "
            "lane; `first` and `rows` are its rows in the arena, `inputs` and `outputs` each tensor's memory, uint8, and the bytes of a row; `prefix` is wire.PREFIX.")
        .def("take_over", [](Held& self, std::uint64_t number) { if (self.lane) self.lane->take_over(number); }, nb::arg("number"),
             nb::lock_self(), "Start to handle tickets, with numbers above this one. None may be in flight.")
        .def(
            "hand_over",
            [](Held& self) {
                nb::list sent;
                if (!self.lane) return sent;
                for (const RelayLane::Sent& one : self.lane->hand_over())
                    sent.append(nb::make_tuple(one.engine, one.number, one.sequence, one.first, one.rows, one.version, one.incarnation,
                                               one.submitted, one.deadline));
                return sent;
            },
            nb::lock_self(),
            "See to nothing any more until `take_over`. Gives the tickets in flight: index of the engine, number, its client's sequence, first row and "
            "rows, version, its client's incarnation, submitted and deadline in ns.")
        .def_prop_ro("mine", [](const Held& self) { return self.lane && self.lane->mine(); }, "Whether it handles the lane's tickets.")
        .def_prop_ro("number", [](const Held& self) { return self.lane ? self.lane->number() : 0; }, "The last number used for a ticket.")
        .def_prop_ro("in_flight", [](const Held& self) { return self.lane ? self.lane->in_flight() : 0; }, "Tickets without an answer.")
        .def("take_in", [](Held& self) { return self.lane ? self.lane->take_in() : 0; }, nb::lock_self(),
             "Pass on tickets that have arrived; returns their number. Special ones stay in the link, with all after them.")
        .def("answer", [](Held& self) { return self.lane && self.lane->answer(); }, nb::lock_self(),
             "Send answers that have arrived; False if it does not handle them, or the next one is special.")
        .def(
            "stay",
            [](Held& self, const std::vector<int>& descriptors, double pause, double seconds) {
                if (!self.lane) return;
                std::vector<pollfd> fds;
                for (int descriptor : descriptors) fds.push_back({descriptor, POLLIN, 0});
                const Unlocked release;
                self.lane->stay(fds.data(), fds.size(), static_cast<std::int64_t>(pause * 1e9), static_cast<std::int64_t>(seconds * 1e9));
            },
            nb::arg("descriptors"), nb::arg("pause"), nb::arg("seconds"), nb::lock_self(),
            "Take in and answer for so many seconds, for a client that is alone. Ends where another descriptor than the first is readable, "
            "or that one by somebody else's messages; after a pause of so many seconds, its own or the engine's; and with what is special.")
        .def("overdue", [](Held& self) { return self.lane && self.lane->overdue(); }, nb::lock_self(),
             "Whether a ticket is in flight that was in flight at the last call.")
        .def("close", [](Held& self) { self.close(); }, nb::lock_self(), "Release everything; later calls do nothing.");
}

}  // namespace jurybox
