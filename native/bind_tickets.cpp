#include <nanobind/ndarray.h>

#include <stdexcept>

#include "bindings.hpp"
#include "tickets.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// Structured arrays cross as (n, bytes of a record) of uint8: Python makes that view once.
using Records = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Limits = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Ticket* tickets_of(const Records& records, std::size_t n) {
    if (records.shape(1) != sizeof(Ticket)) throw std::invalid_argument("tickets are records of 64 bytes");
    if (n > records.shape(0)) throw std::out_of_range("fewer tickets than asked for");
    return reinterpret_cast<Ticket*>(records.data());
}

// Bounds are checked here, so that the loops need not.
void check(const Records& table, const Ticket* tickets, std::size_t n, const Records& packed) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (std::size_t{tickets[i].first} + tickets[i].rows > table.shape(0))
            throw std::out_of_range("a ticket's rows end behind the table");
        total += tickets[i].rows;
    }
    if (table.shape(1) != packed.shape(1)) throw std::invalid_argument("rows of table and packed array differ in size");
    if (total > packed.shape(0)) throw std::out_of_range("the packed array holds fewer rows than the tickets");
}

}  // namespace

void bind_tickets(nb::module_& m) {
    m.def(
        "admit",
        [](Records tickets, std::size_t n, std::uint32_t door, Records lanes, Limits limits) {
            if (lanes.shape(1) != sizeof(Lane)) throw std::invalid_argument("lanes are records of 32 bytes");
            const Admitted result = admit(tickets_of(tickets, n), n, door, reinterpret_cast<const Lane*>(lanes.data()),
                                          lanes.shape(0), limits.data(), limits.shape(0));
            return nb::make_tuple(result.refused, result.rows, result.pinned);
        },
        nb::arg("tickets"), nb::arg("n"), nb::arg("door"), nb::arg("lanes"), nb::arg("limits"),
        "Set door, model and code of the first n tickets (n, 64) uint8 against the lanes (lanes, 32) uint8 and the "
        "largest ticket of each model (models,) uint32; gives how many were refused, the rows of the others, and whether one asks for a weights version.");
    m.def(
        "any_expired",
        [](Records tickets, std::size_t start, std::size_t end, std::int64_t now) {
            if (start > end) throw std::out_of_range("start lies behind end");
            return any_expired(tickets_of(tickets, end) + start, end - start, now);
        },
        nb::arg("tickets"), nb::arg("start"), nb::arg("end"), nb::arg("now"),
        "Whether the deadline of a ticket in [start, end) has passed, ns of CLOCK_MONOTONIC.");
    m.def(
        "gather",
        [](Records table, Records tickets, std::size_t n, Records out) {
            const Ticket* t = tickets_of(tickets, n);
            check(table, t, n, out);
            gather(reinterpret_cast<const std::byte*>(table.data()), table.shape(1), t, n,
                   reinterpret_cast<std::byte*>(out.data()));
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("n"), nb::arg("out"),
        "Copy the rows of table (rows, row_bytes) uint8 that the first n tickets name to out, packed.");
    m.def(
        "scatter",
        [](Records table, Records tickets, std::size_t n, Records packed) {
            const Ticket* t = tickets_of(tickets, n);
            check(table, t, n, packed);
            scatter(reinterpret_cast<std::byte*>(table.data()), table.shape(1), t, n,
                    reinterpret_cast<const std::byte*>(packed.data()));
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("n"), nb::arg("packed"),
        "Spread the rows of packed over the rows of table that the first n tickets name.");
}

}  // namespace jurybox
