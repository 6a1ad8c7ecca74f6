#include <nanobind/ndarray.h>

#include <stdexcept>

#include "bindings.hpp"
#include "memory.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// C-contiguous, any dtype: rows are bytes here. Shape (rows, row_bytes) of uint8; Python makes the view once.
using Table = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Runs = nb::ndarray<const std::uint32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

// Bounds are checked here once a call, so that the loops need not.
std::size_t checked_rows(const Table& table, const Runs& runs, const Table& packed) {
    std::size_t total = 0;
    const auto* run = reinterpret_cast<const Run*>(runs.data());
    for (std::size_t i = 0; i < runs.shape(0); ++i) {
        if (std::size_t{run[i].first} + run[i].rows > table.shape(0)) throw std::out_of_range("a run ends behind the table");
        total += run[i].rows;
    }
    if (table.shape(1) != packed.shape(1)) throw std::invalid_argument("rows of table and packed array differ in size");
    if (total > packed.shape(0)) throw std::out_of_range("the packed array holds fewer rows than the runs");
    return total;
}

}  // namespace

void bind_memory(nb::module_& m) {
    m.def(
        "gather",
        [](Table table, Runs runs, Table out) {
            const std::size_t total = checked_rows(table, runs, out);
            gather(reinterpret_cast<const std::byte*>(table.data()), table.shape(1),
                   reinterpret_cast<const Run*>(runs.data()), runs.shape(0), reinterpret_cast<std::byte*>(out.data()));
            return total;
        },
        nb::arg("table"), nb::arg("runs"), nb::arg("out"),
        "Copy runs (n, 2) uint32 (first, rows) of table (rows, row_bytes) uint8 to out, packed; gives the rows copied.");
    m.def(
        "scatter",
        [](Table table, Runs runs, Table packed) {
            const std::size_t total = checked_rows(table, runs, packed);
            scatter(reinterpret_cast<std::byte*>(table.data()), table.shape(1),
                    reinterpret_cast<const Run*>(runs.data()), runs.shape(0),
                    reinterpret_cast<const std::byte*>(packed.data()));
            return total;
        },
        nb::arg("table"), nb::arg("runs"), nb::arg("packed"),
        "Spread the rows of packed over runs (n, 2) uint32 (first, rows) of table; gives the rows copied.");
}

}  // namespace jurybox
