#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "serving/batch_cost.hpp"
#include "serving/open_rows.hpp"
#include "serving/tickets.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// Checks bounds, so that the loops need not. Returns the rows of all tickets.
std::size_t check(const Borrowed& table, const Borrowed& tickets, std::size_t packed_rows) {
    const Ticket* each = tickets.records<Ticket>();
    std::size_t total = 0;
    for (std::size_t i = 0; i < tickets.rows(); ++i) {
        if (std::size_t{each[i].first} + each[i].rows > table.rows())
            throw std::out_of_range("a ticket's rows end behind the table");
        total += each[i].rows;
    }
    if (total > packed_rows) throw std::out_of_range("the packed array holds fewer rows than the tickets");
    return total;
}

void check(const Borrowed& table, const Borrowed& tickets, const Borrowed& packed) {
    const std::size_t total = check(table, tickets, packed.rows());
    if (total && table.row_bytes() != packed.row_bytes())
        throw std::invalid_argument("rows of table and packed array differ in size");
}

void check(const SessionBook& book, const Borrowed& table, const Borrowed& batch) {
    if (table.rows() < book.sessions() || batch.rows() < book.rows())
        throw std::out_of_range("a table or a batch of states has fewer rows than the book");
    if (book.rows() && table.row_bytes() != batch.row_bytes())
        throw std::invalid_argument("states of table and batch differ in size");
}

// Returns a record of an array.
template <class T>
T& one_of(const Write& all, std::size_t at) {
    if (at >= all.rows()) throw std::out_of_range("there is no such record");
    return all.records<T>()[at];
}

// An engine's admission, with the arrays that it reads for every ticket.
struct EngineAdmission {
    Read lanes, limits, arenas;
    Admission admission;

    EngineAdmission(nb::handle lanes_of, nb::handle limits_of, nb::handle arenas_of)
        : lanes(lanes_of), limits(limits_of), arenas(arenas_of), admission(lanes.rows()) {
        if (arenas.rows() != limits.rows()) throw std::invalid_argument("limits and arenas differ in length");
    }
    EngineAdmission(const EngineAdmission&) = delete;
    EngineAdmission& operator=(const EngineAdmission&) = delete;

    Admitted admit(const Write& tickets, std::uint16_t transport) {
        return admission.admit(tickets.records<Ticket>(), tickets.rows(), transport, lanes.records<const LaneRecord>(), lanes.rows(),
                               limits.records<const std::uint32_t>(), arenas.records<const std::uint32_t>(), limits.rows());
    }
};

// Copies the tickets' rows of all inputs of a model in one call.
class PlainInputs {
  public:
    explicit PlainInputs(const nb::sequence& inputs) {
        for (nb::handle input : inputs)
            inputs_.push_back({std::make_unique<Read>(nb::object(input[0])), std::make_unique<Write>(nb::object(input[1]))});
    }
    PlainInputs(const PlainInputs&) = delete;
    PlainInputs& operator=(const PlainInputs&) = delete;

    void gather(nb::handle tickets) const {
        const Read these(tickets);
        for (const auto& [table, packed] : inputs_) {
            check(*table, these, *packed);
            jurybox::gather(table->bytes(), table->row_bytes(), these.records<const Ticket>(), these.rows(), packed->bytes());
        }
    }

  private:
    std::vector<std::pair<std::unique_ptr<Read>, std::unique_ptr<Write>>> inputs_;
};

// Copies a model's outputs to the tickets' rows in one call, if they are plain tensors of the promised form. A tensor's
// `numpy` takes ten times as long as the function by which torch describes its tensors to others (DLPack's exchange API,
// since torch 2.10).
class PlainOutputs {
  public:
    explicit PlainOutputs(const nb::sequence& outputs) {
        for (nb::handle output : outputs) {
            const nb::object like = output[2];
            DlTensor form;
            if (!(describe_ = described_by(like.type())) || describe_(like.ptr(), &form) != 0 || form.kind == kDlComplex) {
                PyErr_Clear();
                describe_ = nullptr;
                return;
            }
            type_ = nb::borrow(like.type());
            outputs_.push_back({output[0], std::make_unique<Write>(output[1]), RowForm(form)});
            if (outputs_.back().table->row_bytes() != outputs_.back().form.bytes())
                throw std::invalid_argument("rows of table and tensor differ in size");
        }
    }

    PlainOutputs(const PlainOutputs&) = delete;
    PlainOutputs& operator=(const PlainOutputs&) = delete;

    // Return false if that is for the caller to do, or to refuse; some outputs may be copied then.
    bool scatter(nb::handle tickets, nb::handle results, std::size_t rows) const {
        if (describe_ == nullptr) return false;
        // Attributes first: from the first description on, no Python code runs that could change a tensor.
        for (std::size_t i = 0; i < outputs_.size(); ++i) {
            PyObject* tensor = result(results.ptr(), i);
            if (tensor == nullptr || !is_plain(nb::borrow(tensor))) return false;
        }
        const Read these(tickets);
        for (std::size_t i = 0; i < outputs_.size(); ++i) {
            const Output& output = outputs_[i];
            PyObject* tensor = result(results.ptr(), i);
            DlTensor found;
            if (tensor == nullptr || !nb::handle(tensor).type().is(type_)) return false;
            if (describe_(tensor, &found) != 0) {
                PyErr_Clear();
                return false;
            }
            const std::byte* from = output.form.rows_of(found, rows);
            if (from == nullptr) return false;
            check(*output.table, these, rows);
            jurybox::scatter(output.table->bytes(), output.form.bytes(), these.records<const Ticket>(), these.rows(), from);
        }
        return !outputs_.empty();
    }

  private:
    using Describe = int (*)(void* object, DlTensor* out);
    struct Output {
        nb::object name;
        std::unique_ptr<Write> table;
        RowForm form;
    };

    // DLPackExchangeAPI, of which the last function is not used.
    struct Exchange {
        std::uint32_t version, minor;
        const Exchange* older;
        void* others[3];
        Describe describe;
    };

    // Return null if a type's library does not describe its tensors, or in another version.
    static Describe described_by(nb::handle type) {
        const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
        if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
        auto api = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (api != nullptr && api->version != 1) api = api->older;
        return api == nullptr ? nullptr : api->describe;
    }

    // Return a borrowed reference to an output among the results; null if they are neither a tuple of all nor a dict.
    PyObject* result(PyObject* results, std::size_t at) const {
        if (PyTuple_CheckExact(results))
            return static_cast<std::size_t>(PyTuple_Size(results)) == outputs_.size()
                       ? PyTuple_GetItem(results, static_cast<Py_ssize_t>(at))
                       : nullptr;
        if (PyDict_CheckExact(results)) return PyDict_GetItem(results, outputs_[at].name.ptr());
        return outputs_.size() == 1 ? results : nullptr;
    }

    // Return whether a tensor's memory holds its values, and `numpy` would give them out.
    bool is_plain(const nb::object& tensor) const {
        if (!tensor.type().is(type_)) return false;
        const auto is_false = [](PyObject* answer) {
            if (answer == nullptr) PyErr_Clear();
            return nb::steal(answer).ptr() == Py_False;
        };
        return is_false(PyObject_GetAttr(tensor.ptr(), requires_grad_.ptr())) &&
               is_false(PyObject_CallMethodObjArgs(tensor.ptr(), is_neg_.ptr(), nullptr));
    }

    std::vector<Output> outputs_;
    Describe describe_ = nullptr;
    nb::object type_;  // torch.Tensor itself: a subclass may compute its values, or wrap another tensor
    nb::str requires_grad_{"requires_grad"}, is_neg_{"is_neg"};
};

}  // namespace

std::vector<RowColumn> columns_of(const Columns& given, std::uint32_t first, std::uint32_t rows) {
    std::vector<RowColumn> columns;
    for (const auto& [memory, row_bytes] : given) {
        if (row_bytes == 0 || memory.shape(0) / row_bytes < std::size_t{first} + rows)
            throw std::invalid_argument("a column is smaller than the lane's rows");
        columns.push_back({reinterpret_cast<std::byte*>(memory.data()) + first * row_bytes, row_bytes});
    }
    return columns;
}

void bind_tickets(nb::module_& m) {
    m.def(
        "grant_lane",
        [](nb::handle lanes, std::size_t lane, std::uint32_t model, std::uint32_t first, std::uint32_t rows,
           std::uint32_t arena, std::uint64_t lease, std::uint16_t priority) {
            const Write all(lanes);
            grant(one_of<LaneRecord>(all, lane), model, first, rows, arena, lease, priority);
        },
        nb::arg("lanes"), nb::arg("lane"), nb::arg("model"), nb::arg("first"), nb::arg("rows"), nb::arg("arena"),
        nb::arg("lease"), nb::arg("priority"),
        "Lease a lane in the scoreboard's lanes (scoreboard.LANE); the lease is stored last, with release semantics.");
    m.def(
        "take_back_lane",
        [](nb::handle lanes, std::size_t lane) {
            const Write all(lanes);
            take_back(one_of<LaneRecord>(all, lane));
        },
        nb::arg("lanes"), nb::arg("lane"), "Revoke a lane: engines refuse its tickets from now on.");
    m.def(
        "any_expired",
        [](nb::handle tickets, std::size_t first, std::size_t end, std::int64_t now) {
            const Read these(tickets);
            if (first > end || end > these.rows()) throw std::out_of_range("there are fewer tickets");
            return any_expired(these.records<const Ticket>() + first, end - first, now);
        },
        nb::arg("tickets"), nb::arg("first"), nb::arg("end"), nb::arg("now"),
        "Whether the deadline of any of tickets[first:end] has passed; now is in ns of CLOCK_MONOTONIC.");
    m.def(
        "copy_tickets",
        [](nb::handle tickets, nb::handle out, std::size_t at) {
            const Read these(tickets);
            const Write to(out);
            if (at > to.rows() || these.rows() > to.rows() - at) throw std::out_of_range("the tickets do not fit");
            std::copy_n(these.records<const Ticket>(), these.rows(), to.records<Ticket>() + at);
        },
        nb::arg("tickets"), nb::arg("out"), nb::arg("at"), "Copy tickets to out[at:], both records of wire.TICKET.");
    m.def(
        "gather",
        [](nb::handle table, nb::handle tickets, nb::handle packed) {
            const Read from(table), these(tickets);
            const Write to(packed);
            check(from, these, to);
            gather(from.bytes(), from.row_bytes(), these.records<const Ticket>(), these.rows(), to.bytes());
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("packed"),
        "Copy the tickets' rows of table (rows, ...) to consecutive rows of packed.");
    m.def(
        "gather_variable",
        [](nb::handle slots, nb::handle extents, nb::handle tickets, std::size_t unit, bool pads, double max_padding,
           std::size_t max_elements, bool direct, nb::handle sizes, nb::handle packed) {
            const Read from(slots), says(extents), these(tickets);
            const Write read(sizes), to(packed);
            const Ticket* each = these.records<const Ticket>();
            std::size_t total = 0;
            for (std::size_t i = 0; i < these.rows(); ++i) {
                if (std::size_t{each[i].first} + each[i].rows > std::min(from.rows(), says.rows()))
                    throw std::out_of_range("a ticket's rows end behind the table");
                total += each[i].rows;
            }
            if (total > read.rows() || read.row_bytes() != says.row_bytes())
                throw std::out_of_range("sizes hold fewer rows than the tickets, or other ones");
            const VariableRows spec{says.row_bytes() / sizeof(std::int64_t), unit, from.row_bytes() / from.item_bytes(),
                                    from.item_bytes(), pads, max_padding, max_elements, direct};
            if (unit == 0) throw std::invalid_argument("unit = 0: expected the elements of a row whose sizes are 1");
            const Gathered done = gather_variable(spec, from.bytes(), says.records<const std::int64_t>(), each, these.rows(),
                                                  read.records<std::int64_t>(), to.bytes(), to.size());
            return nb::make_tuple(done.elements, done.first);
        },
        nb::arg("slots"), nb::arg("extents"), nb::arg("tickets"), nb::arg("unit"), nb::arg("pads"), nb::arg("max_padding"),
        nb::arg("max_elements"), nb::arg("direct"), nb::arg("sizes"), nb::arg("packed"),
        "Copy rows of variable size from their slots (rows, capacity) to packed, padded with zeros to the largest, and their "
        "extents, read once, to sizes (rows, k) int64. Returns the elements of each, 0 where they must be looked at one by one, "
        "and the slot from which on they were left where they lie, which only `direct` allows, or -1. Nothing is copied where "
        "packed is too small.");
    m.def(
        "scatter",
        [](nb::handle table, nb::handle tickets, nb::handle packed) {
            const Write to(table);
            const Read these(tickets), from(packed);
            check(to, these, from);
            scatter(to.bytes(), to.row_bytes(), these.records<const Ticket>(), these.rows(), from.bytes());
        },
        nb::arg("table"), nb::arg("tickets"), nb::arg("packed"),
        "Copy consecutive rows of packed to the tickets' rows of table (rows, ...).");
    nb::class_<PlainInputs>(m, "PlainInputs", "A model's inputs, whose rows are gathered in one call.")
        .def(nb::init<const nb::sequence&>(), nb::arg("inputs"),
             "For each input: its table (rows, ...), and the array to whose first rows it is gathered.")
        .def("gather", &PlainInputs::gather, nb::arg("tickets"), "Copy the tickets' rows of all inputs to consecutive rows.");
    nb::class_<PlainOutputs>(m, "PlainOutputs", "A model's outputs, which are copied to tickets' rows in one call.")
        .def(nb::init<const nb::sequence&>(), nb::arg("outputs"),
             "For each output in order: its name, its table (rows, ...), and an empty tensor of the promised dtype and shape.")
        .def("scatter", &PlainOutputs::scatter, nb::arg("tickets"), nb::arg("results"), nb::arg("rows"),
             "Copy a batch's outputs, a tensor of (rows, ...) each, to the tickets' rows. Results are a tuple, a dict by name, "
             "or the only tensor. Returns False if they must be looked at one by one.");
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

    nb::class_<EngineAdmission>(m, "Admission", "The check of tickets on arrival, and the count of admitted rows by lane.")
        .def(nb::init<nb::handle, nb::handle, nb::handle>(), nb::arg("lanes"), nb::arg("limits"), nb::arg("arenas"),
             "Tickets are checked against the lanes (scoreboard.LANE), the largest ticket of each model (models,) uint32, and the "
             "number of the arena it computes in (models,) uint32.")
        .def(
            "admit",
            [](EngineAdmission& self, nb::handle tickets, std::uint16_t transport) {
                const Write these(tickets);
                const Admitted result = self.admit(these, transport);
                return nb::make_tuple(result.refused, result.rows, result.pinned, result.ranked);
            },
            nb::arg("tickets"), nb::arg("transport"), nb::lock_self(),
            "Set transport, priority, model and code of tickets (records of wire.TICKET); returns how many were refused, the rows of "
            "the others, whether one asks for a weights version, and whether one has another priority than NORMAL.")
        .def(
            "leave",
            [](EngineAdmission& self, nb::handle tickets) {
                const Read these(tickets);
                return self.admission.leave(these.records<Ticket>(), these.rows());
            },
            nb::arg("tickets"), nb::lock_self(), "Record that tickets were answered; returns the transport of all of them, -1 for several.");

    nb::class_<SessionBook>(m, "SessionBook", "The lease and the next step of each of a model's sessions.")
        .def(nb::init<std::size_t>(), nb::arg("sessions"))
        .def_prop_ro("in_use", &SessionBook::in_use, nb::lock_self(), "Sessions that have begun and whose lease was not forgotten.")
        .def(
            "read",
            [](SessionBook& self, nb::handle tickets, nb::handle column, nb::handle lanes, nb::handle records,
               nb::handle places, nb::handle verdicts) {
                const Read these(tickets), from(column), held(lanes);
                const Write to(records), at(places), out_verdicts(verdicts);
                check(from, these, to);
                if (at.rows() < to.rows() || out_verdicts.rows() < to.rows())
                    throw std::out_of_range("places or verdicts hold fewer rows than the records");
                return self.read(these.records<const Ticket>(), these.rows(), from.records<const SessionRecord>(),
                                 held.records<const LaneRecord>(), held.rows(), to.records<SessionRecord>(),
                                 at.records<std::int64_t>(), out_verdicts.records<std::uint8_t>());
            },
            nb::arg("tickets"), nb::arg("column"), nb::arg("lanes"), nb::arg("records"), nb::arg("places"), nb::arg("verdicts"),
            nb::lock_self(),
            "Begin a batch: take the records (arena.SESSION) of the tickets' rows from the column, the places of their states, "
            "int64, and why rows do not fit, uint8 (SESSION_LOST, SESSION_TWICE). Returns what is among them: SESSION_BEGINS, "
            "SESSION_FLAGS, SESSION_AGAIN (in two tickets), SESSION_WRONG.")
        .def(
            "load",
            [](const SessionBook& self, nb::handle table, nb::handle out) {
                const Read from(table);
                const Write to(out);
                check(self, from, to);
                self.load(from.bytes(), from.row_bytes(), to.bytes());
            },
            nb::arg("table"), nb::arg("out"), nb::lock_self(), "Copy the states of the batch's rows from a table (sessions, ...) to out (rows, ...).")
        .def(
            "save",
            [](const SessionBook& self, nb::handle table, nb::handle values) {
                const Write to(table);
                const Read from(values);
                check(self, to, from);
                self.save(to.bytes(), to.row_bytes(), from.bytes());
            },
            nb::arg("table"), nb::arg("values"), nb::lock_self(), "Copy the states of the batch's rows, values (rows, ...), to a table (sessions, ...).")
        .def(
            "fits",
            [](const SessionBook& self, std::size_t row) {
                if (row >= self.rows()) throw std::out_of_range("the batch has no such row");
                return self.fits(row);
            },
            nb::arg("row"), nb::lock_self(), "Whether a row of the batch is still the next step of its session.")
        .def(
            "step",
            [](SessionBook& self, nb::handle rows) {
                if (rows.is_none()) {
                    for (std::size_t row = 0; row < self.rows(); ++row) self.step(row);
                    return;
                }
                const Read these(rows);
                const std::int64_t* each = these.records<const std::int64_t>();
                for (std::size_t i = 0; i < these.rows(); ++i) {
                    if (each[i] < 0 || static_cast<std::size_t>(each[i]) >= self.rows())
                        throw std::out_of_range("the batch has no such row");
                    self.step(static_cast<std::size_t>(each[i]));
                }
            },
            nb::arg("rows").none() = nb::none(), nb::lock_self(), "Record that rows of the batch were computed; rows are int64 numbers, None for all.")
        .def("forget", &SessionBook::forget, nb::arg("lease"), nb::lock_self(), "Drop the sessions of a lease that has ended.");
    m.attr("SESSION_BEGINS") = static_cast<std::uint32_t>(kBegins);
    m.attr("SESSION_FLAGS") = static_cast<std::uint32_t>(kFlags);
    m.attr("SESSION_AGAIN") = static_cast<std::uint32_t>(kAgain);
    m.attr("SESSION_WRONG") = static_cast<std::uint32_t>(kWrong);
    m.attr("SESSION_LOST") = static_cast<std::uint32_t>(kLost);
    m.attr("SESSION_TWICE") = static_cast<std::uint32_t>(kTwice);

    m.attr("LARGE_NS") = kLargeNs;
    nb::class_<BatchCost>(m, "BatchCost", "A linear model of a batch's duration as a function of its rows; see serving/batch_cost.hpp.")
        .def(nb::init<>())
        .def("observe", &BatchCost::observe, nb::arg("rows"), nb::arg("ns"), nb::lock_self(),
             "Record a batch; return what one of a single row would have taken, ns by the estimate so far.")
        .def_prop_ro("fixed", &BatchCost::fixed, nb::lock_self(), "The cost in ns that is independent of the number of rows.")
        .def_prop_ro("possible", &BatchCost::possible, nb::lock_self(),
                     "The same; while equal batches do not show which part that is, all of the shortest.")
        .def("prompt", &BatchCost::prompt, nb::arg("share"), nb::lock_self(),
             "The time in ns within which clients return promptly, a share of `possible`; 0 if that is below LARGE_NS.");

    nb::class_<ArrivalTracker>(m, "ArrivalTracker", "Predicts which clients are about to send again; see engine/batches.py.")
        .def(nb::init<std::size_t>(), nb::arg("lanes"))
        .def_prop_ro("away", &ArrivalTracker::away, nb::lock_self(), "Quick clients that were answered and have not sent again.")
        .def_prop_ro("overdue", &ArrivalTracker::overdue, nb::lock_self(), "Those of them that were answered before the last batch.")
        .def(
            "came",
            [](ArrivalTracker& self, nb::handle tickets, std::int64_t now, double quick_ns, std::int64_t prompt_ns) {
                const Read these(tickets);
                self.came(these.records<const Ticket>(), these.rows(), now, static_cast<std::int64_t>(quick_ns), prompt_ns);
            },
            nb::arg("tickets"), nb::arg("now"), nb::arg("quick_ns"), nb::arg("prompt_ns") = 0, nb::lock_self(),
            "Record tickets that arrived; a client is quick if its ticket arrives within quick_ns of its last answer, and prompt "
            "if it was sent within prompt_ns.")
        .def(
            "answered",
            [](ArrivalTracker& self, nb::handle tickets, std::int64_t now) {
                const Read these(tickets);
                self.answered(these.records<const Ticket>(), these.rows(), now);
            },
            nb::arg("tickets"), nb::arg("now"), nb::lock_self(), "Record tickets that were answered, as the last batch.")
        .def_prop_ro("prompt", &ArrivalTracker::prompt, nb::lock_self(), "Those that are away and were prompt the last time.")
        .def("stays_away", &ArrivalTracker::stays_away, nb::lock_self(), "Stop waiting for the overdue clients, until they are quick again.")
        .def("not_prompt", &ArrivalTracker::not_prompt, nb::lock_self(), "Stop waiting for the prompt clients, until they are prompt again.");
}

}  // namespace jurybox
