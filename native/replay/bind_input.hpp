// Converts Python values to `Source`: NumPy arrays without a call to NumPy, other values through numpy.asarray.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "replay/ring.hpp"

namespace jurybox::replay {

namespace nb = nanobind;

// The public head of NumPy's array object (numpy.org/doc/stable/reference/c-api/types-and-structures.html,
// PyArrayObject), unchanged since NumPy 1.7. The buffer protocol takes a tenth of a microsecond per field, a third of the
// time to add a small row. `array_head_is_as_expected` checks the layout once.
struct ArrayHead {
    PyObject_HEAD
    char* data;
    int dims;
    Py_ssize_t* shape;
    Py_ssize_t* strides;
    PyObject* base;
    PyObject* dtype;
    int flags;
};
constexpr int kContiguous = 0x1, kAligned = 0x100;

struct NumPy {
    PyObject* array_type;
    nb::object asarray, can_cast, array_equal, isinf, errstate;
    bool head_known;

    // Not a function's static: its initialisation would hold a lock while another thread, which waits for that lock, may get
    // the interpreter's lock, a deadlock. If two threads create one, the first is used. Never destroyed, since Python may
    // have ended before.
    static const NumPy& get() {
        static std::atomic<const NumPy*> loaded{nullptr};
        const NumPy* known = loaded.load(std::memory_order_acquire);
        if (known != nullptr) return *known;
        const NumPy* made = new NumPy();
        return loaded.compare_exchange_strong(known, made, std::memory_order_acq_rel) ? *made : *known;
    }

  private:
    NumPy() {
        const nb::module_ numpy = nb::module_::import_("numpy");
        array_type = nb::object(numpy.attr("ndarray")).release().ptr();
        asarray = numpy.attr("asarray");
        can_cast = numpy.attr("can_cast");
        array_equal = numpy.attr("array_equal");
        isinf = numpy.attr("isinf");
        errstate = numpy.attr("errstate");
        const nb::object probe = numpy.attr("zeros")(nb::make_tuple(2, 3), "float32");
        const auto* head = reinterpret_cast<const ArrayHead*>(probe.ptr());
        const auto address = nb::cast<std::uintptr_t>(nb::object(probe.attr("ctypes").attr("data")));
        head_known = head->data == reinterpret_cast<char*>(address) && head->dims == 2 && head->shape[0] == 2 && head->shape[1] == 3 &&
                     head->strides[0] == 12 && head->strides[1] == 4 && head->dtype == nb::object(probe.attr("dtype")).ptr() &&
                     (head->flags & kContiguous) != 0;
    }
};

[[noreturn]] inline void raise_protocol_error(const char* name, const std::string& message) {
    const nb::object type = nb::module_::import_("jurybox.protocol.errors").attr(name);
    PyErr_SetString(type.ptr(), message.c_str());
    throw nb::python_error();
}

inline std::string text_of(const nb::object& object) { return nb::str(object).c_str(); }

// The requirements for the values of one field.
struct InputField {
    nb::object name;   // interned
    nb::object dtype;  // NumPy's dtype object
    char kind;         // b, i, u or f
    std::size_t item;
    std::vector<std::size_t> shape;

    std::string text(bool many) const {
        std::string s = text_of(dtype) + "(";
        if (many) s += "n, ";
        for (std::size_t size : shape) s += std::to_string(size) + ", ";
        if (s.back() == ' ') s.resize(s.size() - 2);
        return s + ")";
    }
};

// Keeps the memory alive that the sources point to.
struct Held {
    std::vector<nb::object> objects;
    std::vector<Py_buffer> buffers;
    std::array<std::array<std::byte, 16>, 64> scalars;
    Held() = default;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held() {
        for (auto& b : buffers) PyBuffer_Release(&b);
    }
};

inline void describe_mismatch(const InputField& f, nb::handle value, bool many, const char* why) {
    std::string came;
    if (nb::hasattr(value, "dtype") && nb::hasattr(value, "shape"))
        came = text_of(value.attr("dtype")) + text_of(value.attr("shape"));
    else
        came = text_of(value.type().attr("__name__"));
    raise_protocol_error("SpecMismatch", "field '" + text_of(f.name) + "': expected " + f.text(many) + ", came " + came + "; " + why);
}

// Write a Python number as the element of a scalar field. Return false if it is not a number, or out of range.
inline bool put_number(const InputField& f, PyObject* value, std::byte* out) {
    const auto store = [&](auto x) { std::memcpy(out, &x, sizeof x); };
    if (f.kind == 'f') {
        const double x = PyLong_Check(value) ? PyLong_AsDouble(value) : PyFloat_AsDouble(value);
        if (x == -1.0 && PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            return false;
        }
        if (f.item == 4) return !std::isfinite(x) || std::isfinite(static_cast<float>(x)) ? (store(static_cast<float>(x)), true) : false;
        if (f.item == 8) return store(x), true;
        return false;
    }
    if (!PyLong_Check(value)) return false;
    int overflow = 0;
    const long long x = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return false;
    const bool is_signed = f.kind == 'i';
    if (f.kind == 'b') return x == 0 || x == 1 ? (store(static_cast<std::uint8_t>(x)), true) : false;
    const int bits = static_cast<int>(8 * f.item);
    if (is_signed ? bits < 64 && (x < -(1LL << (bits - 1)) || x >= (1LL << (bits - 1))) : x < 0 || (bits < 64 && x >= (1LL << bits))) return false;
    std::memcpy(out, &x, f.item);  // little-endian, like the whole layout
    return true;
}

inline bool strides_of(const InputField& f, std::size_t lead, int dims, const Py_ssize_t* shape, const Py_ssize_t* strides, const char* data, bool contiguous,
                       std::size_t& n, Source& s) {
    if (static_cast<std::size_t>(dims) != f.shape.size() + lead) return false;
    for (std::size_t d = 0; d < f.shape.size(); ++d)
        if (static_cast<std::size_t>(shape[d + lead]) != f.shape[d]) return false;
    if (lead != 0) {
        if (n == ~std::size_t{0}) n = static_cast<std::size_t>(shape[0]);
        if (n != static_cast<std::size_t>(shape[0])) return false;
        s.row_stride = strides[0];
    }
    s.data = reinterpret_cast<const std::byte*>(data);
    s.dims = 0;
    if (!contiguous) {
        auto step = static_cast<Py_ssize_t>(f.item);
        bool packed = true;
        for (std::size_t d = f.shape.size(); d-- > 0;) {
            packed = packed && (strides[d + lead] == step || f.shape[d] == 1);
            step *= static_cast<Py_ssize_t>(f.shape[d]);
        }
        if (!packed) {
            s.dims = static_cast<int>(f.shape.size());
            s.item = f.item;
            for (int d = 0; d < s.dims; ++d) {
                s.shape[d] = f.shape[d];
                s.strides[d] = strides[static_cast<std::size_t>(d) + lead];
            }
        }
    }
    return true;
}

// The array in the field's dtype, if no number changes but by a float's rounding; else nothing.
inline nb::object converted(const InputField& f, const nb::object& array) {
    const NumPy& numpy = NumPy::get();
    const std::string kind = text_of(array.attr("dtype").attr("kind"));
    if (kind != "b" && kind != "i" && kind != "u" && kind != "f") return {};
    const nb::object quiet = numpy.errstate(nb::arg("all") = "ignore");  // what overflows is found below
    quiet.attr("__enter__")();
    nb::object cast = array.attr("astype")(f.dtype);
    quiet.attr("__exit__")(nb::none(), nb::none(), nb::none());
    const bool same = f.kind == 'f' ? nb::cast<bool>(numpy.array_equal(numpy.isinf(cast), numpy.isinf(array))) : nb::cast<bool>(numpy.array_equal(cast, array));
    return same ? cast : nb::object();
}

inline void source_of_other(const InputField& f, PyObject* value, std::size_t lead, std::size_t& n, Source& s, Held& held) {
    const NumPy& numpy = NumPy::get();
    nb::object array = numpy.asarray(nb::handle(value));
    if (!array.attr("dtype").equal(f.dtype)) {
        // Lists and Python numbers have no dtype that the user chose; the dtype of arrays must keep its kind.
        const bool chosen = nb::hasattr(nb::handle(value), "dtype");
        if (chosen && !nb::cast<bool>(numpy.can_cast(array.attr("dtype"), f.dtype, "same_kind")))
            describe_mismatch(f, nb::handle(value), lead != 0, "convert it first (astype)");
        nb::object cast = converted(f, array);
        if (!cast.is_valid()) describe_mismatch(f, nb::handle(value), lead != 0, "it holds what this dtype cannot hold");
        array = cast;
    }
    held.buffers.emplace_back();
    if (PyObject_GetBuffer(array.ptr(), &held.buffers.back(), PyBUF_STRIDES) != 0) {
        held.buffers.pop_back();
        throw nb::python_error();
    }
    held.objects.push_back(array);
    const Py_buffer& b = held.buffers.back();
    const bool contiguous = PyBuffer_IsContiguous(&b, 'C') != 0;
    if (!strides_of(f, lead, b.ndim, b.shape, b.strides, static_cast<const char*>(b.buf), contiguous, n, s))
        describe_mismatch(f, nb::handle(value), lead != 0, lead != 0 ? "all fields need the same number n of rows" : "for several rows use extend");
}

// Convert a value. lead: 0 for one row, 1 for n rows; the first field sets n (~0 before).
inline void source_of(const InputField& f, PyObject* value, std::size_t lead, std::size_t index, std::size_t& n, Source& s, Held& held) {
    const NumPy& numpy = NumPy::get();
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == numpy.array_type && numpy.head_known) {
        const auto* head = reinterpret_cast<const ArrayHead*>(value);
        if (head->dtype == f.dtype.ptr() && (head->flags & kAligned) != 0 &&
            strides_of(f, lead, head->dims, head->shape, head->strides, head->data, (head->flags & kContiguous) != 0, n, s))
            return;
    } else if (lead == 0 && f.shape.empty() && index < held.scalars.size() && put_number(f, value, held.scalars[index].data())) {
        s.data = held.scalars[index].data();
        s.dims = 0;
        return;
    }
    source_of_other(f, value, lead, n, s, held);
}

// Marks streams to which a call adds rows that may wait. A signal handler within it would add a row in the midst of an episode.
class Adding {
  public:
    Adding(Stream* streams, std::size_t n) : streams_(streams), n_(streams == nullptr ? 0 : n) {
        for (std::size_t i = 0; i < n_; ++i)
            if (streams_[i].adding)
                raise_protocol_error("Refused", "rows are being added to this stream: this is a signal handler or a destructor inside of that call, or another "
                                                "thread; give it a stream of its own");
        for (std::size_t i = 0; i < n_; ++i) streams_[i].adding = true;
    }
    ~Adding() {
        for (std::size_t i = 0; i < n_; ++i) streams_[i].adding = false;
    }
    Adding(const Adding&) = delete;
    Adding& operator=(const Adding&) = delete;

  private:
    Stream* streams_;
    std::size_t n_;
};

}  // namespace jurybox::replay
