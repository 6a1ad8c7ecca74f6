#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings.hpp"
#include "common/budget.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

Resource kind_of(int kind) {
    if (kind < 0 || kind >= static_cast<int>(kResources)) throw std::invalid_argument("expected RECEIVED, ANSWERS or CALLS: 0, 1 or 2");
    return static_cast<Resource>(kind);
}

Door door_of(int door) {
    if (door < 0 || door >= static_cast<int>(kDoors)) throw std::invalid_argument("expected HTTP, GRPC, ROBOTS or TCP: 0, 1, 2 or 3");
    return static_cast<Door>(door);
}

}  // namespace

// Both may be used by several threads.
void bind_budget(nb::module_& m) {
    using Numbers = std::array<std::size_t, kResources>;
    nb::class_<Budget>(m, "Budget", "What a process may hold for all its clients: bytes received, bytes of answers, calls.")
        .def(
            "__init__", [](Budget* self, const Numbers& each, const Numbers& in_all) { new (self) Budget(BudgetLimits{each, in_all}); },
            nb::arg("each"), nb::arg("in_all"), "The limits of one connection, and of all together.")
        .def_prop_ro("each", [](const Budget& self) { return self.limits().each; })
        .def_prop_ro("in_all", [](const Budget& self) { return self.limits().in_all; })
        .def("held", [](const Budget& self, int kind) { return self.held(kind_of(kind)); }, nb::arg("kind"))
        .def("refused",
             [](const Budget& self, int kind, int reason, int door) {
                 if (reason < 1 || reason > 2) throw std::invalid_argument("expected a refusal of Account.take: 1 or 2");
                 return self.refused(kind_of(kind), static_cast<Refusal>(reason), door_of(door));
             },
             nb::arg("kind"), nb::arg("reason"), nb::arg("door"),
             "How often a request for more was refused at a door, with this result of `Account.take`.");

    nb::class_<Account>(m, "Account", "What one connection holds of a budget; what is left is returned with the object.")
        .def(
            "__init__", [](Account* self, std::shared_ptr<Budget> budget, int door) { new (self) Account(std::move(budget), door_of(door)); },
            nb::arg("budget"), nb::arg("door"), "`door`: where the connection came in, for the count of refusals.")
        .def("take", [](Account& self, int kind, std::size_t size, std::size_t whole) { return static_cast<int>(self.take(kind_of(kind), size, whole)); },
             nb::arg("kind"), nb::arg("size"), nb::arg("whole") = 0,
             "Take more for a request or an answer of `whole` bytes. Return 0, or a refusal: 1 if the connection has its share, 2 if others "
             "hold what there is.")
        .def("owe", [](Account& self, int kind, std::size_t size) { self.owe(kind_of(kind), size); }, nb::arg("kind"), nb::arg("size"),
             "Take more whatever the limits are.")
        .def("give", [](Account& self, int kind, std::size_t size) { self.give(kind_of(kind), size); }, nb::arg("kind"), nb::arg("size"),
             "Return what was taken.")
        .def("held", [](const Account& self, int kind) { return self.held(kind_of(kind)); }, nb::arg("kind"));
}

}  // namespace jurybox
