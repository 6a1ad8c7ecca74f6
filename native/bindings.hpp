// Common parts of the bindings: their registration functions, and memory borrowed from Python objects.
#pragma once
#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace jurybox {

void bind_budget(nanobind::module_& m);
void bind_tickets(nanobind::module_& m);
void bind_shm_rings(nanobind::module_& m);
void bind_grpc(nanobind::module_& m);
void bind_grpc_client(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_zmtp(nanobind::module_& m);
void bind_relay_lane(nanobind::module_& m);
void bind_pictures(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_replay_archive(nanobind::module_& m);

// The C++ part of Python's ShmRingsClient.
class ShmRingsClient;
ShmRingsClient& rings_client(nanobind::handle client);

// The C++ part of Python's Zmtp.
class Zmtp;
Zmtp& zmtp_of(nanobind::handle link);

// An engine that may compute a lane's tickets: the lane's side of the rings of one of its incarnations, its record of
// scoreboard.ENGINE, and the incarnation.
using GivenEngine = std::tuple<nanobind::object, nanobind::object, std::uint64_t>;

// Return them for native code, which must not outlive the objects. There must be one at least.
struct EngineRings;
std::vector<EngineRings> engines_of(const std::vector<GivenEngine>& given);

// Memory that is kept by a call, or by an object that it creates.
using Bytes = nanobind::ndarray<std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// Each tensor's rows in an arena, and the bytes of one row.
using Columns = std::vector<std::pair<Bytes, std::size_t>>;

// Return a lane's columns, which begin at its row `first`.
struct RowColumn;
std::vector<RowColumn> columns_of(const Columns& given, std::uint32_t first, std::uint32_t rows);

// Memory borrowed from a Python object for one call, of any dtype, including structured arrays, which nb::ndarray does not
// accept. It is also cheaper, since the dtype is not described.
class Borrowed {
  public:
    Borrowed(nanobind::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | flags) != 0) throw nanobind::python_error();
    }
    ~Borrowed() { PyBuffer_Release(&view_); }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;

    std::byte* bytes() const { return static_cast<std::byte*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }
    // The size of the first dimension, and the bytes of one of its rows.
    std::size_t rows() const { return view_.ndim ? static_cast<std::size_t>(view_.shape[0]) : 1; }
    // The sizes of all dimensions.
    const Py_ssize_t* shape() const { return view_.shape; }
    std::size_t dimensions() const { return static_cast<std::size_t>(view_.ndim); }
    std::size_t row_bytes() const { return rows() ? size() / rows() : 0; }

    std::size_t item_bytes() const { return view_.itemsize > 0 ? static_cast<std::size_t>(view_.itemsize) : 1; }

    // Return the memory as an array of records of T.
    template <class T>
    T* records() const {
        if (view_.itemsize != sizeof(T)) throw std::invalid_argument("records of another size were expected");
        return static_cast<T*>(view_.buf);
    }

  private:
    Py_buffer view_;
};

// Releases Python's global lock in its scope.
//
// When an interpreter ends, Python ends every other thread that acquires the lock, with pthread_exit (before 3.14, which
// blocks it forever). That unwinds the thread's stack, and aborts the process in C++ code that must not be unwound, such as
// destructors and nanobind's calls. A thread that watches for answers would abort a program that has finished its work. So
// such a thread waits here for the end of the process.
class Unlocked {
  public:
    Unlocked() : thread_(PyEval_SaveThread()) {}
    ~Unlocked() { lock(); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

    // Run the handlers of signals that have arrived. Return whether one raised an exception, which stays set.
    bool interrupted() {
        lock();
        const bool raised = PyErr_CheckSignals() != 0;
        thread_ = PyEval_SaveThread();
        return raised;
    }

  private:
    void lock() {
        try {
            PyEval_RestoreThread(thread_);
        } catch (const abi::__forced_unwind&) {
            while (true) ::pause();  // of unistd.h; that of common/wait.hpp would not sleep
        }
    }

    PyThreadState* thread_;
};

// The memory of a bytes object: filled before other code can see it, or read.
class BytesMessage {
  public:
    BytesMessage() = default;
    explicit BytesMessage(nanobind::bytes given) : bytes_(given.release().ptr()) {}
    BytesMessage(BytesMessage&& other) noexcept : bytes_(std::exchange(other.bytes_, nullptr)) {}
    BytesMessage& operator=(BytesMessage&& other) noexcept {
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~BytesMessage() { Py_XDECREF(bytes_); }

    // Copies what is there, since the limited API cannot resize bytes.
    void resize(std::size_t size) {
        const std::size_t had = this->size();
        if (bytes_ != nullptr && size == had) return;
        PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
        if (made == nullptr) throw nanobind::python_error();
        if (const std::size_t kept = std::min(had, size)) std::memcpy(PyBytes_AsString(made), data(), kept);
        Py_XDECREF(std::exchange(bytes_, made));
    }
    char* data() { return PyBytes_AsString(bytes_); }
    const char* data() const { return PyBytes_AsString(bytes_); }
    std::size_t size() const { return bytes_ ? static_cast<std::size_t>(PyBytes_Size(bytes_)) : 0; }
    nanobind::object take() {
        if (bytes_ == nullptr) resize(0);
        return nanobind::steal(std::exchange(bytes_, nullptr));
    }

  private:
    PyObject* bytes_ = nullptr;
};

class Read : public Borrowed {
  public:
    explicit Read(nanobind::handle object) : Borrowed(object, 0) {}
};

class Write : public Borrowed {
  public:
    explicit Write(nanobind::handle object) : Borrowed(object, PyBUF_WRITABLE) {}
};

}  // namespace jurybox
