#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gateway/grpc_connection.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

// The memory of a bytes object: filled before other code can see it, or read.
class BytesMessage {
  public:
    BytesMessage() = default;
    explicit BytesMessage(nb::bytes given) : bytes_(given.release().ptr()) {}
    BytesMessage(BytesMessage&& other) noexcept : bytes_(std::exchange(other.bytes_, nullptr)) {}
    BytesMessage& operator=(BytesMessage&& other) noexcept {
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~BytesMessage() { Py_XDECREF(bytes_); }

    void resize(std::size_t size) {
        const auto wanted = static_cast<Py_ssize_t>(size);
        if (bytes_ == nullptr) bytes_ = PyBytes_FromStringAndSize(nullptr, wanted);
        else if (size != this->size()) _PyBytes_Resize(&bytes_, wanted);
        if (bytes_ == nullptr) throw nb::python_error();
    }
    char* data() { return PyBytes_AsString(bytes_); }
    const char* data() const { return PyBytes_AsString(bytes_); }
    std::size_t size() const { return bytes_ ? static_cast<std::size_t>(PyBytes_Size(bytes_)) : 0; }
    nb::object take() {
        if (bytes_ == nullptr) resize(0);
        return nb::steal(std::exchange(bytes_, nullptr));
    }

  private:
    PyObject* bytes_ = nullptr;
};

using Connection = GrpcConnection<BytesMessage>;

nb::list feed(Connection& connection, nb::handle data, std::size_t size) {
    const Read given(data);
    if (size > given.size()) throw std::invalid_argument("more bytes were named than came");
    const bool goes_on = connection.feed(reinterpret_cast<const std::uint8_t*>(given.bytes()), size);
    nb::list made;
    // Moved out of the connection: creating objects may run the garbage collector, and code that calls this connection.
    std::vector<Connection::Event> events;
    events.swap(connection.events());
    for (auto& event : events) {
        const int kind = static_cast<int>(event.kind);
        switch (event.kind) {
            case GrpcEvent::kCall:
                made.append(nb::make_tuple(kind, event.stream, nb::make_tuple(nb::bytes(event.path.data(), event.path.size()), event.timeout)));
                break;
            case GrpcEvent::kMessage:
            case GrpcEvent::kCompressed:
                made.append(nb::make_tuple(kind, event.stream, event.message.take()));
                break;
            default: made.append(nb::make_tuple(kind, event.stream, event.timeout));
        }
    }
    events.clear();
    if (connection.events().empty()) connection.events().swap(events);  // to reuse its memory
    if (!goes_on) made.append(nb::none());
    return made;
}

nb::bytes outgoing(Connection& connection) {
    static thread_local std::string bytes;  // to reuse its memory
    bytes.clear();
    connection.send(bytes);
    nb::bytes made(bytes.data(), bytes.size());
    if (bytes.capacity() > (4u << 20)) std::string().swap(bytes);
    return made;
}

nb::object metadata(const Connection& connection, std::int32_t stream) {
    nb::list made;
    if (const auto* all = connection.metadata(stream)) {
        for (const auto& [name, value] : *all) {
            made.append(nb::make_tuple(nb::bytes(name.data(), name.size()), nb::bytes(value.data(), value.size())));
        }
    }
    return made;
}

}  // namespace

void bind_grpc(nb::module_& m) {
    nb::class_<Connection>(m, "GrpcConnection")
        .def(
            "__init__",
            [](Connection* self, std::uint32_t message, std::uint32_t metadata, std::uint32_t streams) {
                new (self) Connection(GrpcLimits{message, metadata, streams});
            },
            nb::arg("most_message"), nb::arg("most_metadata"), nb::arg("most_calls"))
        .def("feed", feed, nb::arg("data"), nb::arg("size"))
        .def("outgoing", outgoing)
        .def("metadata", metadata, nb::arg("call"))
        .def("taken", &Connection::taken, nb::arg("call"), nb::arg("size"))
        .def("send", [](Connection& self, std::int32_t call, nb::bytes message) { return self.answer(call, BytesMessage(std::move(message))); },
             nb::arg("call"), nb::arg("message"))
        .def("finish",
             [](Connection& self, std::int32_t call, int status, const std::string& message, const std::vector<std::pair<std::string, std::string>>& trailing) {
                 self.finish(call, status, message, trailing);
             },
             nb::arg("call"), nb::arg("status"), nb::arg("message"), nb::arg("trailing"))
        .def("answer",
             [](Connection& self, std::int32_t call, nb::bytes message) {
                 if (self.answer(call, BytesMessage(std::move(message)))) self.finish(call, 0, {}, {});
             },
             nb::arg("call"), nb::arg("message"))
        .def("queued", &Connection::queued, nb::arg("call"))
        .def("drain", &Connection::drain)
        .def("ping", &Connection::ping)
        .def_prop_ro("calls", &Connection::calls)
        .def_prop_ro("over", &Connection::over);
    m.def("nghttp2", [] {
        const auto& library = nghttp2::library();
        return nb::make_tuple(library.missing.empty() ? library.version(0)->version : "", library.missing);
    }, "The version of the system's libnghttp2, and why it is not used; one of the two is empty.");
}

}  // namespace jurybox
