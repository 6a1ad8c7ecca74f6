#include <algorithm>
#include <stdexcept>

#include "bindings.hpp"
#include "serving/tickets.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// Bounds are checked here, so that the loops need not.
void check(const Borrowed& table, const Borrowed& tickets, const Borrowed& packed) {
    const Ticket* each = tickets.records<Ticket>();
    std::size_t total = 0;
    for (std::size_t i = 0; i < tickets.rows(); ++i) {
        if (std::size_t{each[i].first} + each[i].rows > table.rows())
            throw std::out_of_range("a ticket's rows end behind the table");
        total += each[i].rows;
    }
    if (total > packed.rows()) throw std::out_of_range("the packed array holds fewer rows than the tickets");
    if (total && table.row_bytes() != packed.row_bytes())
        throw std::invalid_argument("rows of table and packed array differ in size");
}

// One record of an array of them.
template <class T>
T& one_of(const Write& all, std::size_t at) {
    if (at >= all.rows()) throw std::out_of_range("there is no such record");
    return all.records<T>()[at];
}

}  // namespace

void bind_tickets(nb::module_& m) {
    m.def(
        "grant_lane",
        [](nb::handle lanes, std::size_t lane, std::uint32_t model, std::uint32_t first, std::uint32_t rows,
           std::uint32_t arena, std::uint64_t lease) {
            const Write all(lanes);
            grant(one_of<Lane>(all, lane), model, first, rows, arena, lease);
        },
        nb::arg("lanes"), nb::arg("lane"), nb::arg("model"), nb::arg("first"), nb::arg("rows"), nb::arg("arena"),
        nb::arg("lease"), "Show on the scoreboard's lanes (scoreboard.LANE) that one is leased; the lease is stored last, with release.");
    m.def(
        "take_back_lane",
        [](nb::handle lanes, std::size_t lane) {
            const Write all(lanes);
            take_back(one_of<Lane>(all, lane));
        },
        nb::arg("lanes"), nb::arg("lane"), "Show that a lane is leased no longer: engines refuse its tickets from now on.");
    m.def(
        "any_expired",
        [](nb::handle tickets, std::int64_t now) {
            const Read these(tickets);
            return any_expired(these.records<const Ticket>(), these.rows(), now);
        },
        nb::arg("tickets"), nb::arg("now"), "Whether a ticket's deadline has passed, ns of CLOCK_MONOTONIC.");
    m.def(
        "gather",
        [](nb::handle table, nb::handle tickets, nb::handle packed) {
            const Read from(table), these(tickets);
            const Write to(packed);
            check(from, these, to);
            gather(from.bytes(), from.row_bytes(), these.records<const Ticket>(), these.rows(), to.bytes());
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("packed"),
        "Copy the rows of table (rows, ...) that the tickets name to packed, one after another.");
    m.def(
        "gather_padded",
        [](nb::handle table, nb::handle tickets, nb::handle lengths, nb::handle packed) {
            const Read from(table), these(tickets), sizes(lengths);
            const Write to(packed);
            const Ticket* each = these.records<const Ticket>();
            const std::int64_t* used = sizes.records<const std::int64_t>();
            std::size_t total = 0;
            for (std::size_t i = 0; i < these.rows(); ++i) {
                if (std::size_t{each[i].first} + each[i].rows > from.rows())
                    throw std::out_of_range("a ticket's rows end behind the table");
                total += each[i].rows;
            }
            if (total > to.rows() || total > sizes.rows())
                throw std::out_of_range("the packed array or the lengths hold fewer rows than the tickets");
            const auto most = static_cast<std::int64_t>(std::min(to.row_bytes(), from.row_bytes()));
            for (std::size_t i = 0; i < total; ++i)
                if (used[i] < 0 || used[i] > most) throw std::out_of_range("a length is beyond its row");
            gather_padded(from.bytes(), from.row_bytes(), each, these.rows(), used, to.bytes(), to.row_bytes());
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("lengths"), nb::arg("packed"),
        "As gather, of each row its first bytes, as many as lengths (int64) says, with zeros behind them in packed.");
    m.def(
        "scatter",
        [](nb::handle table, nb::handle tickets, nb::handle packed) {
            const Write to(table);
            const Read these(tickets), from(packed);
            check(to, these, from);
            scatter(to.bytes(), to.row_bytes(), these.records<const Ticket>(), these.rows(), from.bytes());
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("packed"),
        "Spread the rows of packed over the rows of table (rows, ...) that the tickets name.");
    m.def(
        "count_batch",
        [](nb::handle record, nb::handle shown, nb::handle tickets, std::size_t rows, std::int64_t began,
           std::int64_t ended) {
            const Write counters(record), scoreboard(shown);
            const Read these(tickets);
            count_batch(*counters.records<Counters>(), these.records<const Ticket>(), these.rows(), rows, began, ended);
            show(*counters.records<const Counters>(), *scoreboard.records<Counters>());
        },
        nb::arg("record"), nb::arg("shown"), nb::arg("tickets"), nb::arg("rows"), nb::arg("began"), nb::arg("ended"),
        "Count an answered batch into one record of scoreboard.COUNTERS and copy it to another; times are ns of CLOCK_MONOTONIC.");

    nb::class_<Admission>(m, "Admission", "The check of tickets on arrival, and the book of the rows let in, by lane.")
        .def(nb::init<std::size_t>(), nb::arg("lanes"))
        .def(
            "admit",
            [](Admission& self, nb::handle tickets, std::uint32_t transport, nb::handle lanes, nb::handle limits,
               nb::handle arenas) {
                const Write these(tickets);
                const Read held(lanes), most(limits), numbers(arenas);
                if (numbers.rows() != most.rows()) throw std::invalid_argument("limits and arenas differ in length");
                const Admitted result = self.admit(these.records<Ticket>(), these.rows(), transport, held.records<const Lane>(),
                                                   held.rows(), most.records<const std::uint32_t>(),
                                                   numbers.records<const std::uint32_t>(), most.rows());
                return nb::make_tuple(result.refused, result.rows, result.pinned);
            },
            nb::arg("tickets"), nb::arg("transport"), nb::arg("lanes"), nb::arg("limits"), nb::arg("arenas"),
            "Set transport, model and code of tickets (records of wire.TICKET) against the lanes (scoreboard.LANE), the largest "
            "ticket of each model (models,) uint32, and the number of the arena it computes in (models,) uint32; returns "
            "how many were refused, the rows of the others, and whether one asks for a weights version.")
        .def(
            "leave",
            [](Admission& self, nb::handle tickets) {
                const Read these(tickets);
                return self.leave(these.records<Ticket>(), these.rows());
            },
            nb::arg("tickets"), "Tickets leave, answered; returns the transport all of them came through, -1 for several.");

    nb::class_<ArrivalTracker>(m, "ArrivalTracker", "Which clients are about to come back; engine/batches.py says what for.")
        .def(nb::init<std::size_t>(), nb::arg("lanes"))
        .def_prop_ro("away", &ArrivalTracker::away, "Quick clients that have been answered and not asked again yet.")
        .def(
            "came",
            [](ArrivalTracker& self, nb::handle tickets, std::int64_t now, std::int64_t quick_ns) {
                const Read these(tickets);
                self.came(these.records<const Ticket>(), these.rows(), now, quick_ns);
            },
            nb::arg("tickets"), nb::arg("now"), nb::arg("quick_ns"),
            "Tickets have arrived; a client is quick that is back within quick_ns of its last answer.")
        .def(
            "answered",
            [](ArrivalTracker& self, nb::handle tickets, std::int64_t now) {
                const Read these(tickets);
                self.answered(these.records<const Ticket>(), these.rows(), now);
            },
            nb::arg("tickets"), nb::arg("now"), "Tickets have been answered.")
        .def("stays_away", &ArrivalTracker::stays_away, "Nobody came in the time that one more ticket was worth.");
}

}  // namespace jurybox
