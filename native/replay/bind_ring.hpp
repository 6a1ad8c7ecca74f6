// The Python object of a ring: the borrowed memory, its fields' Python types, and this process's writers.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <tuple>

#include "bindings.hpp"
#include "replay/bind_input.hpp"
#include "replay/copy_turns.hpp"
#include "replay/sample.hpp"

namespace jurybox::replay {

using FieldTuple = std::tuple<nb::str, nb::object, std::vector<std::size_t>, std::size_t, std::size_t, std::uint32_t, double, std::size_t>;

constexpr std::size_t kWithoutGil = 4096;  // from this many bytes on, a copy may let other threads run

// The turns of all rings of this process. Further threads than cores would not copy sooner.
inline CopyTurns*& copy_turns() {
    static CopyTurns* turns = new CopyTurns(std::thread::hardware_concurrency());
    return turns;
}

// Several threads may call a ring at once: its memory is written and read without locks, and calls share no other data. The
// rows of one episode (`stream`) come from one thread; settings are made when it is created.
struct PyRing {
    Ring ring;
    std::vector<InputField> inputs;
    std::vector<nb::object> memory;
    int terminated = -1, truncated = -1;  // the fields that mark the end of an episode
    double timeout = 10.0;
    double alpha = 0.6, epsilon = 1e-6;
    std::size_t row_bytes = 0;
    std::unique_ptr<ThreadPool> threads;
    Stream stream;
    std::atomic<std::uint64_t> key{0};
    std::atomic<std::uint64_t> calls{0};

    PyRing(Bytes control, Bytes slots, std::optional<Bytes> links, std::optional<Bytes> tree, const std::vector<FieldTuple>& fields,
           std::size_t copiers, std::uint64_t seed) {
        if (control.shape(0) < sizeof(Control)) throw std::invalid_argument("the control block is too short");
        ring.control = reinterpret_cast<Control*>(control.data());
        if (ring.control->magic != kMagic || ring.control->version != kVersion)
            raise_protocol_error("ProtocolMismatch", "expected a replay of layout version " + std::to_string(kVersion) + ", found version " +
                                                         std::to_string(ring.control->version) + "; use the same release of jurybox on both ends");
        ring.capacity = ring.control->capacity;
        ring.slot_bytes = ring.control->slot_bytes;
        ring.slots = reinterpret_cast<std::byte*>(slots.data());
        if (ring.capacity == 0 || ring.slot_bytes < 8 || slots.shape(0) / ring.slot_bytes < ring.capacity)
            throw std::invalid_argument("the slots are shorter than their control block says");
        if (links) {
            if (links->shape(0) < ring.capacity * sizeof(Link)) throw std::invalid_argument("the links are too short");
            ring.links = reinterpret_cast<Link*>(links->data());
            memory.push_back(nb::cast(*links));
        }
        if (tree) {
            if (tree->shape(0) < SumTree::words(ring.capacity) * 8) throw std::invalid_argument("the sum tree is too short");
            ring.tree = SumTree(reinterpret_cast<SumTree::Word*>(tree->data()), ring.capacity);
            memory.push_back(nb::cast(*tree));
        }
        memory.push_back(nb::cast(control));
        memory.push_back(nb::cast(slots));
        for (const auto& [name, dtype, shape, offset, stored, codec, scale, most] : fields) {
            std::size_t elements = 1;
            for (std::size_t size : shape) elements *= size;
            PyObject* interned = nb::str(name).release().ptr();
            PyUnicode_InternInPlace(&interned);
            const auto item = nb::cast<std::size_t>(nb::object(dtype.attr("itemsize")));
            inputs.push_back(InputField{nb::steal<nb::object>(interned), dtype, nb::cast<std::string>(nb::object(dtype.attr("kind")))[0], item, shape});
            if (offset + stored > ring.slot_bytes || shape.size() > Source::kMaxDims - 1) throw std::invalid_argument("a field lies outside its slot");
            ring.fields.push_back(Field{offset, stored, elements * item, elements, static_cast<Codec>(codec), scale, most});
            row_bytes += elements * item;
        }
        if (inputs.empty() || inputs.size() > 64) throw std::invalid_argument("a replay has 1 to 64 fields");
        if (copiers > 1) threads = std::make_unique<ThreadPool>(copiers);
        reseed(seed);
    }

    void reseed(std::uint64_t seed) {
        key.store(mixed(seed, 0), std::memory_order_relaxed);
        calls.store(0, std::memory_order_relaxed);
    }
    std::uint64_t next_key() { return mixed(key.load(std::memory_order_relaxed), calls.fetch_add(1, std::memory_order_relaxed)); }

    // ---- from a call's arguments to sources

    void parse(PyObject* const* values, Py_ssize_t positional, PyObject* names, std::size_t lead, std::size_t& n, Source* sources, Held& held) const {
        const Py_ssize_t given = names == nullptr ? 0 : NB_TUPLE_GET_SIZE(names);
        if (positional != 0) raise_protocol_error("SpecMismatch", "fields are given by name: " + field_names());
        const std::size_t wanted = inputs.size();
        for (std::size_t f = 0; f < wanted; ++f) {
            PyObject* value = nullptr;
            const PyObject* name = inputs[f].name.ptr();
            // Calls usually name the fields in their order.
            if (static_cast<Py_ssize_t>(f) < given && NB_TUPLE_GET_ITEM(names, static_cast<Py_ssize_t>(f)) == name) {
                value = values[f];
            } else {
                for (Py_ssize_t k = 0; k < given && value == nullptr; ++k)
                    if (NB_TUPLE_GET_ITEM(names, k) == name || PyUnicode_Compare(NB_TUPLE_GET_ITEM(names, k), const_cast<PyObject*>(name)) == 0) value = values[k];
            }
            if (value == nullptr) raise_protocol_error("SpecMismatch", "field '" + text_of(inputs[f].name) + "' is missing; expected " + field_names());
            source_of(inputs[f], value, lead, f, n, sources[f], held);
        }
        if (static_cast<std::size_t>(given) != wanted) {
            for (Py_ssize_t k = 0; k < given; ++k) {
                const nb::object name = nb::borrow(NB_TUPLE_GET_ITEM(names, k));
                bool known = false;
                for (const auto& input : inputs) known = known || name.equal(input.name);
                if (!known) raise_protocol_error("SpecMismatch", "there is no field '" + text_of(name) + "'; expected " + field_names());
            }
        }
    }

    std::string field_names() const {
        std::string s;
        for (const auto& input : inputs) s += (s.empty() ? "" : ", ") + text_of(input.name);
        return s;
    }

    unsigned ends(const Source* sources, std::size_t row) const {
        if (terminated >= 0 && truth(sources[terminated], static_cast<std::size_t>(terminated), row)) return 2;
        if (truncated >= 0 && truth(sources[truncated], static_cast<std::size_t>(truncated), row)) return 1;
        return 0;
    }
    bool truth(const Source& s, std::size_t field, std::size_t row) const {
        const std::byte* at = s.data + static_cast<std::ptrdiff_t>(row) * s.row_stride;
        const InputField& f = inputs[field];
        if (f.kind == 'f') {
            if (f.item == 4) {
                float x;
                std::memcpy(&x, at, 4);
                return x != 0.0F;
            }
            double x = 0.0;
            std::memcpy(&x, at, std::min<std::size_t>(f.item, 8));
            return x != 0.0;
        }
        for (std::size_t i = 0; i < f.item; ++i)
            if (at[i] != std::byte{0}) return true;
        return false;
    }

    // ---- writing

    // Return how many of n rows may be added now; 0: wait or drop.
    std::uint64_t admitted(std::uint64_t n) const {
        if (!ring.limited() || ring.may_insert(n)) return n;
        std::uint64_t low = 0, high = n;  // binary search, since the limiter checks a number of insertions
        while (low + 1 < high) {
            const std::uint64_t middle = (low + high) / 2;
            (ring.may_insert(middle) ? low : high) = middle;
        }
        return low;
    }

    // What `write` has done, and why it ended early.
    struct Wrote {
        std::uint64_t rows = 0;
        Written outcome = Written::yes;
        std::size_t field = 0;  // the one that is too dense
        bool timed_out = false, interrupted = false;
    };

    // Reserve tickets for up to n rows, and wait if the mode requires it. 0: the ring is full, or the time-out has passed.
    std::uint64_t tickets(std::uint64_t n, Ticket& first, double deadline, Unlocked* without, bool& interrupted) {
        std::uint64_t got = 0;
        const auto ready = [&] {
            const std::uint64_t may = admitted(n);
            if (may == 0) return false;
            if (ring.control->full == Full::overwrite) {
                first = ring.reserve(may);
                got = may;
                return true;
            }
            got = ring.reserve_within(may, first);
            return got != 0 || ring.control->full == Full::drop_newest;
        };
        wait_until(ring.control->room, deadline, ready, [&] { return interrupted = without->interrupted(); });
        return got;
    }

    // Write rows [0, n); `streams`: null, one for all rows, or one per row. `without`: null if the caller holds Python's lock,
    // which is allowed only in a ring whose writers do not wait.
    Wrote write(const Source* sources, std::uint64_t n, Stream* streams, bool stream_a_row, bool final_row, Unlocked* without) {
        Writer writer(ring);
        std::optional<SumTree::Update> update;
        const bool prioritized = ring.tree.present();
        std::uint64_t top = 0;
        if (prioritized) {
            update.emplace(ring.tree);
            top = ring.first_priority();
        }
        const bool simple = ring.control->full == Full::overwrite && !ring.limited();
        const double deadline = simple ? 0.0 : monotonic_seconds() + timeout;
        Wrote wrote;
        std::uint64_t& done = wrote.rows;
        std::uint64_t passed = 0;  // consecutive slots that were taken
        while (done < n) {
            Ticket first = 0;
            // Rows that others see while this call waits can also be drawn by them.
            if (!simple && prioritized) update->finish();
            const std::uint64_t got = simple ? (first = ring.reserve(n - done), n - done) : tickets(n - done, first, deadline, without, wrote.interrupted);
            if (got == 0) {
                if (ring.control->full == Full::drop_newest && !wrote.interrupted && admitted(1) != 0)
                    ring.control->dropped.fetch_add(n - done, std::memory_order_relaxed);
                else
                    wrote.timed_out = true;
                break;
            }
            for (std::uint64_t i = 0; i < got; ++i) {
                Stream* stream = streams == nullptr ? nullptr : streams + (stream_a_row ? done : 0);
                const unsigned end = stream == nullptr || final_row ? 0 : ends(sources, done);
                const Written outcome = writer.write(first + i, sources, done, stream, end, final_row);
                if (outcome == Written::yes) {
                    if (prioritized) update->set(ring.slot_of(first + i), final_row ? 0 : top);  // 0: never drawn
                    passed = 0, ++done;
                    continue;
                }
                // The row uses the next ticket; one more is reserved under the same conditions, so that a ring that must not
                // overwrite rows does not.
                const bool on = outcome == Written::taken && ++passed < ring.capacity;
                ring.control->retried.fetch_add(on ? 1 : got - i, std::memory_order_relaxed);
                if (on) continue;
                wrote.outcome = outcome == Written::taken ? Written::no_slot : outcome;
                wrote.field = writer.failed_field;
                return wrote;
            }
            if (ring.limited()) announce(ring.control->rows);
        }
        return wrote;
    }

    // Implement add and extend: parse, write, raise errors.
    PyObject* add(PyObject* const* values, Py_ssize_t positional, PyObject* names, std::size_t lead, Stream* streams, std::size_t stream_rows, bool final_row) {
        Source sources[64];
        Held held;
        std::size_t n = ~std::size_t{0};
        parse(values, positional, names, lead, n, sources, held);
        if (lead == 0) n = 1;
        const bool handlers = ring.links != nullptr && (ring.limited() || ring.control->full == Full::block);  // it may wait
        const Adding adding(handlers ? streams : nullptr, stream_rows != 0 ? stream_rows : 1);
        if (stream_rows != 0 && n != stream_rows)
            raise_protocol_error("SpecMismatch", "expected " + std::to_string(stream_rows) + " rows, one for each stream, came " + std::to_string(n));
        if (ring.links == nullptr) streams = nullptr;
        std::optional<Unlocked> without;
        std::optional<CopyTurns::Turn> turn;
        // A writer that waits for room runs signal handlers meanwhile, which may write: it must not hold a turn.
        const bool waits = ring.limited() || ring.control->full == Full::block;
        if (waits || n * row_bytes >= kWithoutGil) without.emplace();
        if (without && !waits) turn.emplace(*copy_turns());
        const Wrote wrote = write(sources, n, streams, stream_rows != 0, final_row, without ? &*without : nullptr);
        turn.reset();
        without.reset();
        if (wrote.interrupted && PyErr_Occurred() != nullptr) throw nb::python_error();
        if (wrote.outcome == Written::too_dense)
            raise_protocol_error("SpecMismatch", "field '" + text_of(inputs[wrote.field].name) + "': expected at most " +
                                                     std::to_string(ring.fields[wrote.field].most) + " non-zero elements in a row, came more; declare it with a larger bound");
        if (wrote.outcome == Written::no_slot)
            raise_protocol_error("Busy", "every slot of the ring is being written or was left by a killed writer; make the replay anew");
        if (wrote.timed_out)
            raise_protocol_error("Timeout", std::to_string(wrote.rows) + " of " + std::to_string(n) + " rows were written within " + std::to_string(timeout) +
                                                " s: " + (ring.control->full == Full::block ? "the ring is full and nobody takes or discards rows" : "the rate limiter waits for samples") +
                                                "; read more, or give a longer timeout");
        return PyLong_FromUnsignedLongLong(wrote.rows);
    }

    // Prepare the copy in a forked child: its rows begin new episodes, and its random draws differ from the parent's. The
    // copying threads, and locks that they may hold, belong to the parent and are dropped.
    void after_fork(std::uint64_t seed) {
        copy_turns() = new CopyTurns(std::thread::hardware_concurrency());  // the parent's may be locked by another thread
        stream = Stream{};
        reseed(seed);
        if (!threads) return;
        const std::size_t copiers = threads->threads();
        static_cast<void>(threads.release());
        threads = std::make_unique<ThreadPool>(copiers);
    }
};

// Adds rows of consecutive episodes of one environment, or of n parallel environments.
struct PyStreams {
    PyRing* ring;
    nb::object owner;
    std::vector<Stream> streams;
    bool group;  // whether add() takes one row for each stream
};

// The target arrays of a sample, created once for a batch that is reused. While a sample is drawn, `busy` is set, and another
// thread's call is refused, so that samples are never mixed.
struct PyColumns {
    Request request;
    std::atomic<bool> busy{false};
    std::size_t capacity = 0;
    std::vector<nb::object> memory;
};

}  // namespace jurybox::replay
