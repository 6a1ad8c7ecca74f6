#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "gateway/grpc_client.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

struct BoundGrpcClient : GrpcClient<BytesMessage> {
    using GrpcClient::GrpcClient;
    std::shared_ptr<std::string> sending = std::make_shared<std::string>();  // shared with an array that nobody has freed
};
using Client = BoundGrpcClient;

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// Process bytes; return the calls that have ended since: of one that succeeded its response, of another one how it ended.
nb::list receive(Client& self, nb::bytes data) {
    self.feed(reinterpret_cast<const std::uint8_t*>(data.c_str()), data.size());
    nb::list ended;
    for (auto& result : std::exchange(self.results(), {})) {
        if (result.ok) {
            ended.append(nb::make_tuple(result.stream, result.message.take()));
            continue;
        }
        nb::list fields;
        for (const auto& [name, value] : result.fields) fields.append(nb::make_tuple(bytes_of(name), bytes_of(value)));
        ended.append(nb::make_tuple(result.stream, nb::make_tuple(static_cast<int>(result.end), result.detail, std::move(fields))));
    }
    return ended;
}

// Return many bytes as an array, whose memory is used again: fresh one costs more than what is copied to it.
nb::object outgoing(Client& self) {
    constexpr std::size_t kMany = 64 << 10;
    if (self.sending.use_count() > 1) self.sending = std::make_shared<std::string>();
    std::string& made = *self.sending;
    made.clear();
    self.send(made, 1 << 20);
    if (made.size() < kMany) return bytes_of(made);
    auto held = std::make_unique<std::shared_ptr<std::string>>(self.sending);
    const nb::capsule owner(held.get(), [](void* pointer) noexcept { delete static_cast<std::shared_ptr<std::string>*>(pointer); });
    held.release();
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(made.data(), {made.size()}, owner));
}

}  // namespace

// It belongs to one thread at a time.
void bind_grpc_client(nb::module_& m) {
    nb::class_<Client>(m, "GrpcClient", "The client's end of an HTTP/2 connection for gRPC's unary calls, without the socket.")
        .def(
            "__init__",
            [](Client* self, const Client::Fields& head, std::size_t most) { new (self) Client(head, most); },
            nb::arg("head"), nb::arg("most"), "`head`: names and values that begin each call, pseudo fields first; `most`: bytes of a response.")
        .def(
            "call", [](Client& self, nb::bytes request, const std::string& timeout) { return self.call(BytesMessage(std::move(request)), timeout); },
            nb::arg("request"), nb::arg("timeout"), nb::lock_self(),
            "Begin a call, with a time-out as in the field grpc-timeout; return its number, or 0 if this connection takes no more.")
        .def("cancel", [](Client& self, std::int32_t call) { self.cancel(call); }, nb::arg("call"), nb::lock_self(), "End a call whose result nobody wants.")
        .def("receive", receive, nb::arg("data"), nb::lock_self(),
             "Process bytes; return the ended calls: (number, response), or of one that failed (number, (0 closed, 1 reset, 2 not seen by the "
             "server, 3 too large or 4 unreadable; HTTP/2's error code or the length; fields)).")
        .def("outgoing", outgoing, nb::lock_self(), "Bytes to send, some MiB at most; empty if there are none. Many are an array of uint8.")
        .def_prop_ro("open", [](const Client& self) { return self.open(); }, "Whether calls may begin: False once the connection is over or the server leaves.")
        .def_prop_ro("over", [](const Client& self) { return self.over(); }, "Whether nothing will be received any more: calls under way have no result.")
        .def_prop_ro("calls", [](const Client& self) { return self.calls(); }, "The number of calls that have not ended.");
}

}  // namespace jurybox
