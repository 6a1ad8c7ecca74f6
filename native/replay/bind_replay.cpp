#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "common/memory_pool.hpp"
#include "replay/bind_ring.hpp"

namespace jurybox {
namespace {

using namespace replay;

using Indices = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Errors = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WordsOut = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A method that gets its keywords in the interpreter's form, a tuple of names and an array of values: collecting them in a
// dict would take as long as writing a small row.
template <class Call>
PyObject* guarded(Call&& call) {
    try {
        return call();
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyObject* ring_add(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return guarded([&] {
        auto& ring = *nb::inst_ptr<PyRing>(self);
        return ring.add(args, n, names, 0, &ring.stream, 0, false);
    });
}
PyObject* ring_extend(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return guarded([&] {
        auto& ring = *nb::inst_ptr<PyRing>(self);
        return ring.add(args, n, names, 1, &ring.stream, 0, false);
    });
}
PyObject* streams_add(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return guarded([&] {
        auto& s = *nb::inst_ptr<PyStreams>(self);
        return s.ring->add(args, n, names, s.group ? 1 : 0, s.streams.data(), s.group ? s.streams.size() : 0, false);
    });
}
PyObject* streams_extend(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return guarded([&]() -> PyObject* {
        auto& s = *nb::inst_ptr<PyStreams>(self);
        if (s.group) raise_protocol_error("SpecMismatch", "a group of streams takes one row for each with add(); extend() is for a single stream");
        return s.ring->add(args, n, names, 1, s.streams.data(), 0, false);
    });
}
PyObject* streams_final(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
    return guarded([&]() -> PyObject* {
        auto& s = *nb::inst_ptr<PyStreams>(self);
        if (n < 1) raise_protocol_error("SpecMismatch", "expected the stream's number, then the fields by name");
        const std::size_t which = PyLong_AsSize_t(args[0]);
        if (which >= s.streams.size()) raise_protocol_error("SpecMismatch", "there are " + std::to_string(s.streams.size()) + " streams, counted from 0");
        return s.ring->add(args + 1, n - 1, names, 0, &s.streams[which], 0, true);
    });
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)>
void add_fast_method(nb::handle type, const char* name, const char* doc) {
    static PyMethodDef definition;
    definition.ml_name = name;
    definition.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
    definition.ml_flags = METH_FASTCALL | METH_KEYWORDS;
    definition.ml_doc = doc;
    nb::object descriptor = nb::steal<nb::object>(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
    if (!descriptor.is_valid()) throw nb::python_error();
    nb::setattr(type, name, descriptor);
}

void format_control(Bytes memory, std::uint64_t capacity, std::uint64_t slot_bytes, std::uint32_t full, double samples_per_insert, double least_difference,
                    double most_difference, std::uint64_t least_rows) {
    if (memory.shape(0) < sizeof(Control)) throw std::invalid_argument("the control block is too short");
    auto* control = reinterpret_cast<Control*>(memory.data());
    control->version = kVersion;
    control->full = static_cast<Full>(full);
    control->capacity = capacity;
    control->slot_bytes = slot_bytes;
    control->samples_per_insert = samples_per_insert;
    control->least_difference = least_difference;
    control->most_difference = most_difference;
    control->least_rows = least_rows;
    control->top_priority.store(SumTree::quantised(1.0), std::memory_order_relaxed);
    control->magic = kMagic;
}

struct Released {
    std::atomic<bool>& busy;
    ~Released() { busy.store(false, std::memory_order_release); }
};

// Statuses other than 0 are reported by Python code, which can say more about them.
int sample(PyRing& self, PyColumns& columns, std::size_t n, std::size_t first, bool replacement, bool prioritized, double beta, std::uint64_t mark, double timeout) {
    if (first + n > columns.capacity) throw std::out_of_range("the output arrays are shorter than the sample");
    if (columns.busy.exchange(true, std::memory_order_acquire))
        raise_protocol_error("Busy", "a sample is being drawn into this batch, by another thread or by the call that this one is inside of: give each a batch of its own");
    const Released released{columns.busy};
    Request& request = columns.request;
    request.n = n;
    request.first = first;
    request.replacement = replacement;
    request.prioritized = prioritized;
    request.beta = beta;
    request.mark = mark;
    Sampled outcome;
    bool in_time = true, interrupted = false;
    {
        Unlocked without;
        if (self.ring.limited())
            in_time = wait_until(self.ring.control->rows, monotonic_seconds() + (timeout < 0 ? self.timeout : timeout), [&] { return self.ring.may_sample(n); },
                                 [&] { return interrupted = without.interrupted(); });
        if (in_time) {
            request.key = self.next_key();  // not for a sample that is not drawn, so that waiting in parts changes nothing
            Sampler sampler(self.ring, request);
            outcome = sampler.run(self.threads.get());
            if (self.ring.limited()) announce(self.ring.control->room);
        }
    }
    if (interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!in_time) return -1;
    return static_cast<int>(outcome);
}

std::size_t update_priorities(PyRing& self, Indices indices, Errors errors, std::uint64_t mark) {
    if (indices.shape(0) != errors.shape(0)) throw std::invalid_argument("indices and errors differ in length");
    if (!self.ring.tree.present()) throw std::invalid_argument("this replay is not prioritized");
    Ring& ring = self.ring;
    const std::size_t n = indices.shape(0);
    constexpr std::uint64_t kMarks = std::uint64_t{1} << 62;
    std::size_t fresh = 0, stale = 0;
    const Unlocked without;
    std::uint64_t top = 0;
    {
        SumTree::Update update(ring.tree);
        for (std::size_t i = 0; i < n; ++i) {
            const auto index = static_cast<std::uint64_t>(indices.data()[i]);
            if ((index & kMarks) != mark) continue;
            const Ticket t = index & ~kMarks;
            const double error = std::fabs(static_cast<double>(errors.data()[i])) + self.epsilon;
            const std::uint64_t priority = SumTree::quantised(self.alpha == 1.0 ? error : std::pow(error, self.alpha));
            if (!ring.holds(t)) {
                ++stale;
                continue;
            }
            update.set(ring.slot_of(t), priority);
            top = std::max(top, priority);
            ++fresh;
        }
    }
    std::uint64_t before = ring.control->top_priority.load(std::memory_order_relaxed);
    while (before < top && !ring.control->top_priority.compare_exchange_weak(before, top, std::memory_order_relaxed)) {
    }
    if (stale != 0) ring.control->stale.fetch_add(stale, std::memory_order_relaxed);
    return fresh;
}

// Reserve n consecutive slots for writing in place; return the first ticket, or none if there is no such run.
std::optional<std::uint64_t> reserve_run(PyRing& self, std::uint64_t n) {
    Ring& ring = self.ring;
    for (std::uint64_t tries = 0; tries < ring.capacity + 2; ++tries) {
        const Ticket first = ring.reserve(n);
        std::uint64_t claimed = 0;
        if (ring.slot_of(first) + n <= ring.capacity)
            while (claimed < n && ring.claim(first + claimed)) ++claimed;
        if (claimed == n) return first;
        for (std::uint64_t i = 0; i < claimed; ++i) ring.abandon(first + i);
        ring.control->retried.fetch_add(n, std::memory_order_relaxed);
        // The next tries begin n slots further on, which for all slots is the same place.
        if (const std::uint64_t slot = ring.slot_of(first); n == ring.capacity && slot != 0) {
            ring.reserve(ring.capacity - slot);
            ring.control->retried.fetch_add(ring.capacity - slot, std::memory_order_relaxed);
        }
    }
    return std::nullopt;
}

void finish_run(PyRing& self, std::uint64_t first, std::uint64_t n, bool commit) {
    Ring& ring = self.ring;
    Writer writer(ring);
    for (std::uint64_t i = 0; i < n; ++i) {
        if (!commit) {
            ring.abandon(first + i);
            continue;
        }
        unsigned ends = 0;
        if (ring.links != nullptr) {
            Source sources[64];
            for (const int f : {self.terminated, self.truncated})
                if (f >= 0) sources[f].data = ring.slot(ring.slot_of(first + i)) + ring.fields[static_cast<std::size_t>(f)].offset;
            ends = self.ends(sources, 0);
        }
        writer.finish(first + i, ring.slot_of(first + i), &self.stream, ends, false);
        if (ring.tree.present()) ring.tree.set(ring.slot_of(first + i), ring.first_priority());
    }
    if (!commit) ring.control->retried.fetch_add(n, std::memory_order_relaxed);
    if (ring.limited()) announce(ring.control->rows);
}

// Remove the oldest rows: the reading side of the modes `block` and `drop_newest`.
std::uint64_t discard(PyRing& self, std::uint64_t n) {
    Ring& ring = self.ring;
    std::uint64_t tail = ring.tail();
    std::uint64_t take = 0;
    do {
        const std::uint64_t oldest = std::max(tail, ring.oldest());
        const std::uint64_t there = ring.reserved() - oldest;
        take = std::min(n, there);
        if (take == 0) break;
        if (ring.control->tail.compare_exchange_weak(tail, oldest + take, std::memory_order_acq_rel)) break;
    } while (true);
    announce(ring.control->room);
    return take;
}

// Add rows of a snapshot of another ring with the same layout, with the same links. `within`: the index of the previous row
// among these; if it is -1, `before` is that row's ticket in this ring plus one (0: the row is the first of its episode).
// `tickets` receives the rows' tickets.
void import_rows(PyRing& self, Flags slots, Indices within, Words before, Flags flags, Flags ended, WordsOut tickets) {
    Ring& ring = self.ring;
    const std::size_t n = tickets.shape(0);
    if (slots.shape(0) != n * ring.slot_bytes || within.shape(0) != n || before.shape(0) != n || flags.shape(0) != n || ended.shape(0) != n)
        throw std::invalid_argument("slots, links and tickets are not of so many rows");
    if (ring.control->full != Full::overwrite || ring.limited()) throw std::invalid_argument("rows are imported into a ring that overwrites and has no limiter");
    for (std::size_t i = 0; i < n; ++i)
        if (within.data()[i] >= static_cast<std::int64_t>(i)) throw std::invalid_argument("a row comes before the one it follows");
    bool taken = false;
    {
        const Unlocked without;
        std::optional<SumTree::Update> update;
        if (ring.tree.present()) update.emplace(ring.tree);
        const std::uint64_t top = ring.tree.present() ? ring.first_priority() : 0;
        for (std::size_t i = 0; i < n; ++i) {
            Ticket t = ring.reserve(1);
            if (!ring.claim_any(t)) {
                taken = true;
                break;
            }
            const std::size_t at = ring.slot_of(t);
            const auto* from = reinterpret_cast<const std::byte*>(slots.data()) + i * ring.slot_bytes;
            copy_in(ring.slot(at) + 8, from + 8, ring.slot_bytes - 8);
            const std::uint64_t last = within.data()[i] >= 0 ? tickets.data()[within.data()[i]] + 1 : before.data()[i];
            if (ring.links != nullptr) {
                ring.links[at].before.store(last * 4 + flags.data()[i], std::memory_order_relaxed);
                ring.links[at].after.store(ended.data()[i] != 0 ? Link::kEnded : 0, std::memory_order_relaxed);
            }
            ring.commit(t);
            if (ring.links != nullptr && last != 0 && ring.holds(last - 1)) ring.links[ring.slot_of(last - 1)].after.store(t + 1, std::memory_order_release);
            if (update) update->set(at, (flags.data()[i] & Link::kFinal) != 0 ? 0 : top);
            tickets.data()[i] = t;
        }
    }
    if (taken) raise_protocol_error("Busy", "every slot of the ring is being written or was left by a killed writer; make the replay anew");
}

// Mark these rows, if they still exist, as the last of their episodes.
void close_episodes(PyRing& self, Words tickets) {
    Ring& ring = self.ring;
    if (ring.links == nullptr) return;
    for (std::size_t i = 0; i < tickets.shape(0); ++i) {
        const Ticket t = tickets.data()[i];
        if (ring.holds(t)) ring.links[ring.slot_of(t)].after.store(Link::kEnded, std::memory_order_release);
    }
}

// The memory of batches. It is never destroyed, since arrays may outlive the module.
MemoryPool& batch_memory() {
    constexpr std::size_t keep = std::size_t{128} << 20;
    static auto* pool = new MemoryPool(keep);
    return *pool;
}

// Return an array over memory of the pool, to which it returns with the last array or view.
nb::object batch_array(std::size_t bytes) {
    struct Holder {
        std::byte* memory;
        std::size_t bytes;
        ~Holder() { batch_memory().give(memory, bytes); }
    };
    std::byte* memory = batch_memory().take(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    auto* holder = new Holder{memory, bytes};
    const nb::capsule owner(holder, [](void* held) noexcept { delete static_cast<Holder*>(held); });
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(memory, {bytes}, owner));
}

}  // namespace

void bind_replay(nb::module_& m) {
    m.def("replay_control_bytes", [] { return sizeof(Control); });
    m.def("replay_batch_array", &batch_array, nb::arg("bytes"),
          "Return a (bytes,) uint8 array with arbitrary contents, for a large column; its memory is reused when it is dropped.");
    m.def("replay_tree_words", &SumTree::words, nb::arg("leaves"));
    m.def("replay_format", &format_control, nb::arg("control"), nb::arg("capacity"), nb::arg("slot_bytes"), nb::arg("full"), nb::arg("samples_per_insert"),
          nb::arg("least_difference"), nb::arg("most_difference"), nb::arg("least_rows"), "Make zeroed memory the control block of an empty ring.");

    nb::class_<PyColumns>(m, "ReplayColumns")
        .def(nb::init<>())
        .def("add", [](PyColumns& self, PyRing& ring, std::size_t field, AnyArray out, std::int32_t from, std::uint32_t count, bool ahead,
                       std::optional<nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>> valid) {
            const Field& f = ring.ring.fields.at(field);
            const std::size_t rows = out.shape(0);
            if (out.nbytes() != rows * f.bytes * count) throw std::invalid_argument("an output array has the wrong size");
            if (valid && (valid->shape(0) != rows || valid->shape(1) != count)) throw std::invalid_argument("a mask has the wrong shape");
            self.capacity = self.request.columns.empty() ? rows : std::min(self.capacity, rows);
            self.request.columns.push_back(Column{f, static_cast<std::byte*>(out.data()), f.bytes * count, from, count, ahead, valid ? valid->data() : nullptr});
            self.memory.push_back(nb::cast(out));
            if (valid) self.memory.push_back(nb::cast(*valid));
        }, nb::arg("ring"), nb::arg("field"), nb::arg("out"), nb::arg("from_") = 0, nb::arg("count") = 1, nb::arg("ahead") = false, nb::arg("valid") = nb::none())
        .def("indices", [](PyColumns& self, nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> indices,
                           std::optional<nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>> weights) {
            self.capacity = std::min(self.capacity, indices.shape(0));
            if (weights) self.capacity = std::min(self.capacity, weights->shape(0));
            self.request.indices = indices.data();
            self.request.weights = weights ? weights->data() : nullptr;
            self.memory.push_back(nb::cast(indices));
            if (weights) self.memory.push_back(nb::cast(*weights));
        }, nb::arg("indices"), nb::arg("weights").none())
        .def("window", [](PyColumns& self, PyRing& ring, std::uint32_t back, std::uint32_t steps, std::uint32_t length, bool full_length, bool next_needed) {
            if (ring.ring.links == nullptr) throw std::invalid_argument("this replay does not link its rows");
            Window& w = self.request.window;
            w.linked = true;
            w.back = back;
            w.steps = steps;
            w.length = length;
            w.full_length = full_length;
            w.next_needed = next_needed;
        }, nb::arg("ring"), nb::arg("back"), nb::arg("steps"), nb::arg("length"), nb::arg("full_length"), nb::arg("next_needed"))
        .def("returns", [](PyColumns& self, PyRing& ring, std::size_t reward, double gamma,
                           nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> returns,
                           nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> discount) {
            const Field& f = ring.ring.fields.at(reward);
            if (f.codec != Codec::raw || f.elements != 1 || ring.inputs[reward].kind != 'f' || f.bytes < 4)
                throw std::invalid_argument("the reward must be one float32 or float64 a row");
            self.capacity = std::min({self.capacity, returns.shape(0), discount.shape(0)});
            Window& w = self.request.window;
            w.reward = f;
            w.reward_is_double = f.bytes == 8;
            w.gamma = gamma;
            w.returns = returns.data();
            w.discount = discount.data();
            self.memory.push_back(nb::cast(returns));
            self.memory.push_back(nb::cast(discount));
        }, nb::arg("ring"), nb::arg("reward"), nb::arg("gamma"), nb::arg("returns"), nb::arg("discount"));

    auto ring = nb::class_<PyRing>(m, "ReplayRing");
    ring.def(nb::init<Bytes, Bytes, std::optional<Bytes>, std::optional<Bytes>, const std::vector<FieldTuple>&, std::size_t, std::uint64_t>(), nb::arg("control"),
             nb::arg("slots"), nb::arg("links").none(), nb::arg("tree").none(), nb::arg("fields"), nb::arg("threads"), nb::arg("seed"))
        .def_rw("terminated", &PyRing::terminated)
        .def_rw("truncated", &PyRing::truncated)
        .def_rw("timeout", &PyRing::timeout)
        .def_rw("alpha", &PyRing::alpha)
        .def_rw("epsilon", &PyRing::epsilon)
        .def_prop_rw("verify", [](const PyRing& r) { return r.ring.verify; }, [](PyRing& r, bool verify) { r.ring.verify = verify; })
        .def_prop_ro("size", [](const PyRing& r) { return r.ring.size(); })
        .def_prop_ro("added", [](const PyRing& r) { return r.ring.added(); })
        .def_prop_ro("reserved", [](const PyRing& r) { return r.ring.reserved(); })
        .def_prop_ro("tail", [](const PyRing& r) { return r.ring.tail(); })
        .def("counters", [](const PyRing& r) {
            const Control& c = *r.ring.control;
            const auto of = [](const std::atomic<std::uint64_t>& word) { return word.load(std::memory_order_relaxed); };
            return std::make_tuple(of(c.reserved), of(c.retried), of(c.dropped), of(c.stale), of(c.sampled), of(c.redrawn));
        })
        .def("seed", [](PyRing& r, std::uint64_t seed) {
            r.reseed(seed);
        }, nb::arg("seed"))
        .def("sample", &sample, nb::arg("columns"), nb::arg("n"), nb::arg("first"), nb::arg("replacement"), nb::arg("prioritized"), nb::arg("beta"), nb::arg("mark"), nb::arg("timeout") = -1.0)
        .def("update_priorities", &update_priorities, nb::arg("indices"), nb::arg("errors"), nb::arg("mark"))
        .def("reserve_run", &reserve_run, nb::arg("rows"))
        .def("finish_run", &finish_run, nb::arg("first"), nb::arg("rows"), nb::arg("commit"))
        .def("import_rows", &import_rows, nb::arg("slots"), nb::arg("within"), nb::arg("before"), nb::arg("flags"), nb::arg("ended"), nb::arg("tickets"))
        .def("close_episodes", &close_episodes, nb::arg("tickets"))
        .def("discard", &discard, nb::arg("rows"))
        .def("end_episode", [](PyRing& r) {
            if (r.ring.links != nullptr) Writer(r.ring).end(r.stream);
        })
        .def_prop_ro("priority_sum", [](const PyRing& r) { return r.ring.tree.present() ? r.ring.tree.total() : 0; })
        .def("rebuild_sums", [](PyRing& r) { r.ring.tree.rebuild(); })
        .def("after_fork", &PyRing::after_fork, nb::arg("seed"), "Start with new writers, random draws and threads in a forked child.")
        .def("adopt", [](PyRing& r, std::uint64_t reserved, std::uint64_t tail, std::uint64_t top, std::uint64_t retried, std::uint64_t sampled) {
            // A loaded ring continues the saved ring's counters.
            r.ring.control->retried.store(std::min(retried, reserved), std::memory_order_relaxed);
            r.ring.control->sampled.store(sampled, std::memory_order_relaxed);
            r.ring.control->reserved.store(reserved, std::memory_order_release);
            r.ring.control->tail.store(tail, std::memory_order_release);
            if (top != 0) r.ring.control->top_priority.store(top, std::memory_order_relaxed);
        }, nb::arg("reserved"), nb::arg("tail"), nb::arg("top_priority"), nb::arg("retried"), nb::arg("sampled"))
        .def_prop_ro("top_priority", [](const PyRing& r) { return r.ring.control->top_priority.load(std::memory_order_relaxed); })
        .def_prop_ro("total_priority", [](const PyRing& r) { return r.ring.tree.present() ? r.ring.tree.total() : 0; });
    add_fast_method<ring_add>(ring, "add", "add(**fields): one row; returns the rows written (0 when full and dropping).");
    add_fast_method<ring_extend>(ring, "extend", "extend(**fields): n rows, in order; returns the rows written.");

    auto streams = nb::class_<PyStreams>(m, "ReplayStreams");
    streams
        .def("__init__", [](PyStreams* self, nb::handle_t<PyRing> ring, std::size_t n, bool group) {
            new (self) PyStreams{nb::inst_ptr<PyRing>(ring), nb::borrow(ring), std::vector<Stream>(n), group};
        }, nb::arg("ring"), nb::arg("n"), nb::arg("group"))
        .def("end", [](PyStreams& s, std::size_t which) {
            if (s.ring->ring.links != nullptr) Writer(s.ring->ring).end(s.streams.at(which));
        }, nb::arg("which"))
        .def("after_fork", [](PyStreams& s) { s.streams.assign(s.streams.size(), Stream{}); }, "Begin new episodes in a forked child.")
        .def("__len__", [](const PyStreams& s) { return s.streams.size(); });
    add_fast_method<streams_add>(streams, "add", "add(**fields): one row for each stream.");
    add_fast_method<streams_extend>(streams, "extend", "extend(**fields): n rows of one stream, in order.");
    add_fast_method<streams_final>(streams, "final", "final(which, **fields): the last observation of a stream's episode.");
}

}  // namespace jurybox
