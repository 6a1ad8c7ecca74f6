#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "common/budget.hpp"
#include "gateway/grpc_connection.hpp"
#include "gateway/fast_lane.hpp"

namespace nb = nanobind;

namespace jurybox {
namespace {

using Connection = GrpcConnection<BytesMessage>;
using Event = Connection::Event;

// A call to the forms' method whose message is not complete, or has been complete for less than a call of `feed`.
struct HeldCall {
    std::string path;
    std::int64_t timeout;
    BytesMessage message;
    bool complete = false;
};

struct Peer {
    Peer(const GrpcLimits& limits, std::shared_ptr<Account> account) : connection(limits, std::move(account)) {}
    Connection connection;
    std::unordered_map<std::int32_t, HeldCall> held;
    std::string authorization;  // what a call must show, empty: nothing

    // Return whether a call shows what the last admitted call of this connection has shown.
    bool admits(std::int32_t call) const {
        if (authorization.empty()) return true;
        const auto* metadata = connection.metadata(call);
        if (metadata == nullptr) return false;
        std::size_t same = 0, shown = 0;
        for (const auto& [name, value] : *metadata)
            if (name == "authorization") ++shown, same += value == authorization;
        return shown == 1 && same == 1;
    }
};

// The connection of a request: its Python object, which keeps the native one.
struct Caller {
    nb::object owner;
    Peer* peer;
};
using RequestLane = FastLane<BytesMessage, Caller>;

// Does nothing after `close`. The objects that the lane points to are kept until then. Like connections and forms, it belongs to
// one thread: that of the gateway's event loop.
struct BoundFastPath {
    std::unique_ptr<RequestLane> lane;
    Columns inputs, outputs;
    std::vector<GivenEngine> engines;
    nb::object wake;

    void close() {
        lane.reset();
        inputs.clear(), outputs.clear();
        engines.clear();
        wake.reset();
    }
};

struct Forms {
    struct Entry {
        nb::object keeps;  // the Python object of `lane`
        BoundFastPath* lane;
        std::shared_ptr<RequestLane::Form> form;
    };
    std::string path;
    std::unordered_map<std::string, Entry> entries;
    InferParts parts;
};

enum { kDirect = 7 };  // an event of `feed` beside those of GrpcEvent

void append(nb::list& made, GrpcEvent kind, std::int32_t call, nb::handle value) {
    made.append(nb::make_tuple(static_cast<int>(kind), call, value));
}

// Give a held call to Python: its beginning, and its message if that is complete.
void release(nb::list& made, std::int32_t call, HeldCall& held) {
    append(made, GrpcEvent::kCall, call, nb::make_tuple(nb::bytes(held.path.data(), held.path.size()), held.timeout));
    if (held.complete) append(made, GrpcEvent::kMessage, call, held.message.take());
}

// Pass a complete call to the lane of its form. Return false if Python must answer it.
bool accept(Forms& forms, nb::handle owner, Peer& peer, std::int32_t call, HeldCall& held, nb::list& made) {
    constexpr std::int64_t kHurry = 100'000'000, kLongest = 60'000'000'000;  // ns; the second is DEFAULT_TIMEOUT of lanes.py
    if (!held.complete || (held.timeout >= 0 && held.timeout < kHurry) || !peer.admits(call)) return false;
    Account& account = peer.connection.account();
    if (2 * account.held(Resource::kAnswers) > account.budget().limits().each[static_cast<std::size_t>(Resource::kAnswers)]) return false;
    if (!forms.parts.cut({std::as_const(held.message).data(), held.message.size()})) return false;
    const auto found = forms.entries.find(forms.parts.head);
    if (found == forms.entries.end() || found->second.lane->lane == nullptr) return false;
    const auto& [keeps, owning, form] = found->second;
    RequestLane& lane = *owning->lane;
    const std::int64_t left = held.timeout < 0 ? kLongest : std::min(held.timeout, kLongest);
    if (!lane.accept(form, forms.parts, Caller{nb::borrow(owner), &peer}, call, monotonic_ns() + left, held.message)) return false;
    made.append(nb::make_tuple(static_cast<int>(kDirect), call, owning->wake));
    return true;
}

// Drop a call that a lane has accepted, or all of a connection (-1): its peer is gone.
void cancel(Forms& forms, const Peer& peer, std::int32_t call) {
    const BoundFastPath* before = nullptr;
    for (auto& [key, entry] : forms.entries) {
        if (entry.lane == before || entry.lane->lane == nullptr) continue;
        before = entry.lane;
        entry.lane->lane->cancel([&](const Caller& caller, std::int32_t its) { return caller.peer == &peer && (call < 0 || its == call); });
    }
}

// End a call whose answer the budget has no room for.
void refuse_answer(Connection& connection, std::int32_t call) {
    const std::string why = "answers of " + std::to_string(connection.account().held(Resource::kAnswers)) +
                            " bytes wait to be read on this connection, as many as it may have, or others hold what there is: read them, and ask again later";
    connection.finish(call, 8, why, {{"jurybox-code", std::to_string(kBusy)}});  // RESOURCE_EXHAUSTED
}

// Queue the only answer of a call, and end it.
void answer_whole(Connection& connection, std::int32_t call, BytesMessage message) {
    const Sent sent = connection.answer(call, std::move(message));
    if (sent == Sent::kQueued) connection.finish(call, 0, {}, {});
    if (sent == Sent::kRefused) refuse_answer(connection, call);
}

// Return the events for Python. Calls to the method of `forms` are held back until they are complete; those that a lane accepts
// cause a single event, with the lane's `wake`.
nb::list feed(Peer& peer, nb::handle data, std::size_t size, Forms* forms, nb::handle owner) {
    const Read given(data);
    if (size > given.size()) throw std::invalid_argument("more bytes were named than came");
    const bool goes_on = peer.connection.feed(reinterpret_cast<const std::uint8_t*>(given.bytes()), size);
    nb::list made;
    // Moved out of the connection: creating objects may run the garbage collector, and code that calls this connection.
    std::vector<Event> events;
    events.swap(peer.connection.events());
    for (auto& event : events) {
        if (event.kind == GrpcEvent::kGone && forms != nullptr) cancel(*forms, peer, event.stream);
        const auto held = peer.held.find(event.stream);
        if (held != peer.held.end()) {
            HeldCall& call = held->second;
            if (event.kind == GrpcEvent::kMessage && !call.complete) {
                call.message = std::move(event.message);
                call.complete = true;
                continue;
            }
            const bool over = event.kind == GrpcEvent::kGone ||
                              (event.kind == GrpcEvent::kEnd && forms != nullptr && accept(*forms, owner, peer, event.stream, call, made));
            if (!over) release(made, event.stream, call);
            peer.held.erase(held);
            if (over) continue;
        }
        switch (event.kind) {
            case GrpcEvent::kCall:
                if (forms != nullptr && event.path == forms->path)
                    peer.held.emplace(event.stream, HeldCall{std::move(event.path), event.timeout, {}});
                else
                    append(made, event.kind, event.stream, nb::make_tuple(nb::bytes(event.path.data(), event.path.size()), event.timeout));
                break;
            case GrpcEvent::kMessage:
            case GrpcEvent::kCompressed: append(made, event.kind, event.stream, event.message.take()); break;
            default: append(made, event.kind, event.stream, nb::int_(event.timeout));
        }
    }
    events.clear();
    if (peer.connection.events().empty()) peer.connection.events().swap(events);  // to reuse its memory
    if (!goes_on) made.append(nb::none());
    return made;
}

nb::bytes outgoing(Peer& peer) {
    constexpr std::size_t kMost = 256u << 10;  // at once, so that what a peer does not read stays where it is counted
    static thread_local std::string bytes;     // to reuse its memory
    bytes.clear();
    peer.connection.send(bytes, kMost);
    nb::bytes made(bytes.data(), bytes.size());
    if (bytes.capacity() > (4u << 20)) std::string().swap(bytes);
    return made;
}

nb::object metadata(const Peer& peer, std::int32_t stream) {
    nb::list made;
    if (const auto* all = peer.connection.metadata(stream)) {
        for (const auto& [name, value] : *all) {
            made.append(nb::make_tuple(nb::bytes(name.data(), name.size()), nb::bytes(value.data(), value.size())));
        }
    }
    return made;
}

nb::object cut(nb::bytes message) {
    InferParts parts;
    const std::string_view whole(message.c_str(), message.size());
    if (!parts.cut(whole)) return nb::none();
    nb::list raw;
    for (const auto& one : parts.raw) raw.append(nb::make_tuple(one.data() - whole.data(), one.size()));
    return nb::make_tuple(nb::bytes(parts.head.data(), parts.head.size()), nb::bytes(parts.id.data(), parts.id.size()), raw);
}

void add_form(Forms& forms, nb::bytes key, nb::object lane, std::uint32_t rows, std::vector<std::uint32_t> inputs, std::vector<std::uint32_t> outputs) {
    BoundFastPath& held = nb::cast<BoundFastPath&>(lane);
    if (held.lane == nullptr) return;
    const auto beyond = [](const std::vector<std::uint32_t>& some, std::size_t n) {
        return std::any_of(some.begin(), some.end(), [n](std::uint32_t one) { return one >= n; });
    };
    if (rows == 0 || outputs.empty() || beyond(inputs, held.lane->columns(true)) || beyond(outputs, held.lane->columns(false)))
        throw std::invalid_argument("expected rows and outputs, and columns that the lane has");
    auto form = std::make_shared<RequestLane::Form>();
    form->rows = rows, form->inputs = std::move(inputs), form->outputs = std::move(outputs);
    forms.entries.insert_or_assign(std::string(key.c_str(), key.size()), Forms::Entry{std::move(lane), &held, std::move(form)});
}

// Answer the requests of the answered ticket; return the Python objects of their connections, whose bytes must be sent. Those whose
// form lacks the heads of this version are left to `take_back`.
nb::list answer(BoundFastPath& held) {
    nb::list touched;
    if (held.lane == nullptr) return touched;
    std::vector<RequestLane::Request>& requests = held.lane->answered();
    const auto has_heads = [&](const RequestLane::Request& one) {
        return !one.form->heads.empty() && one.form->version == held.lane->version();
    };
    const auto end = std::stable_partition(requests.begin(), requests.end(), has_heads);
    auto next = requests.begin();
    // Also after an exception, so that none is lost if there is no memory for the next one.
    const auto erase = [&](const void*) { requests.erase(requests.begin(), next); };
    const std::unique_ptr<const void, decltype(erase)> answered(&requests, erase);
    for (; next != end; ++next) {
        BytesMessage message;
        held.lane->answer(*next, message);
        touched.append(next->caller.owner);
        Connection& connection = next->caller.peer->connection;
        answer_whole(connection, next->call, std::move(message));
    }
    return touched;
}

// Return (connection, call, ns until its deadline, message) of each request that was due before a time.
nb::list give_back(BoundFastPath& held, std::int64_t until) {
    nb::list back;
    if (held.lane == nullptr) return back;
    const std::int64_t now = monotonic_ns();
    for (auto& request : held.lane->take_back(until))
        if (request.caller.peer->connection.metadata(request.call) != nullptr)  // else the peer has cancelled it
            back.append(nb::make_tuple(std::move(request.caller.owner), request.call, std::max<std::int64_t>(0, request.deadline - now), request.message.take()));
    return back;
}

}  // namespace

void bind_grpc(nb::module_& m) {
    nb::class_<Peer>(m, "GrpcConnection")
        .def(
            "__init__",
            [](Peer* self, std::uint32_t message, std::uint32_t metadata, std::uint32_t streams, std::shared_ptr<Account> account) {
                new (self) Peer(GrpcLimits{message, metadata, streams}, std::move(account));
            },
            nb::arg("most_message"), nb::arg("most_metadata"), nb::arg("most_calls"), nb::arg("account"))
        .def("feed", feed, nb::arg("data"), nb::arg("size"), nb::arg("forms").none() = nb::none(), nb::arg("owner") = nb::none(),
             "Process received bytes and return events (kind, call, value); None as the last one ends the connection. Requests of "
             "known `forms` go to their lanes; `owner` is the object that `FastLane.answer` and `take_back` return for them.")
        .def_prop_ro("more", [](const Peer& self) { return self.connection.more(); },
                     "Whether received bytes are left for another `feed`, without bytes, once others have had their turn.")
        .def(
            "gone",
            [](Peer& self, Forms* forms) {
                if (forms != nullptr) cancel(*forms, self, -1);
                self.held.clear();
                self.connection.abandon();
            },
            nb::arg("forms").none(), "Drop everything, also the requests that lanes have accepted: the peer is gone.")
        .def("outgoing", outgoing, "Bytes to send, some 256 KiB at most; empty if there are none.")
        .def("metadata", metadata, nb::arg("call"))
        .def("trust", [](Peer& self, nb::bytes authorization) { self.authorization.assign(authorization.c_str(), authorization.size()); },
             nb::arg("authorization"), "Pass to lanes only calls that show this value, which was admitted.")
        .def("taken", [](Peer& self, std::int32_t call, std::size_t size, std::size_t messages) { self.connection.taken(call, size, messages); },
             nb::arg("call"), nb::arg("size"), nb::arg("messages") = 1,
             "Let the peer send as much more as so many messages of `size` bytes in all, which were processed.")
        .def("hold", [](Peer& self, std::int32_t call, std::size_t size, std::size_t whole) { return static_cast<int>(self.connection.hold(call, size, whole)); },
             nb::arg("call"), nb::arg("size"), nb::arg("whole"),
             "Count so many bytes more for a call, of a message of `whole` bytes; return a refusal as `Account.take`.")
        .def("silent", [](const Peer& self, std::int64_t before) { return self.connection.silent(before); }, nb::arg("before"),
             "Calls with an incomplete message of which no byte has arrived since a time (ns of CLOCK_MONOTONIC).")
        .def("send",
             [](Peer& self, std::int32_t call, nb::bytes message) {
                 const Sent sent = self.connection.answer(call, BytesMessage(std::move(message)));
                 if (sent == Sent::kRefused) refuse_answer(self.connection, call);
                 return sent == Sent::kQueued;
             },
             nb::arg("call"), nb::arg("message"), "Queue one of several answers; return False if the call is over, or ended as the budget has no room.")
        .def("finish",
             [](Peer& self, std::int32_t call, int status, const std::string& message, const std::vector<std::pair<std::string, std::string>>& trailing) {
                 self.held.erase(call);
                 self.connection.finish(call, status, message, trailing);
             },
             nb::arg("call"), nb::arg("status"), nb::arg("message"), nb::arg("trailing"))
        .def("answer",
             [](Peer& self, std::int32_t call, nb::bytes message) { answer_whole(self.connection, call, BytesMessage(std::move(message))); },
             nb::arg("call"), nb::arg("message"))
        .def("queued", [](const Peer& self, std::int32_t call) { return self.connection.queued(call); }, nb::arg("call"))
        .def("drain", [](Peer& self) { self.connection.drain(); })
        .def("ping", [](Peer& self) { self.connection.ping(); })
        .def_prop_ro("calls", [](const Peer& self) { return self.connection.calls(); })
        .def_prop_ro("over", [](const Peer& self) { return self.connection.over(); });

    nb::class_<Forms>(m, "InferForms", "The forms of requests that `GrpcConnection.feed` passes to lanes.")
        .def("__init__", [](Forms* self, nb::bytes path) { new (self) Forms{std::string(path.c_str(), path.size()), {}, {}}; }, nb::arg("path"),
             "`path` is that of the method.")
        .def_prop_ro("path", [](const Forms& self) { return nb::bytes(self.path.data(), self.path.size()); })
        .def("add", add_form, nb::arg("key"), nb::arg("lane"), nb::arg("rows"), nb::arg("inputs"), nb::arg("outputs"),
             "Pass requests of the form `key`, with so many rows, to a lane; `inputs` and `outputs` are the lane's columns in the order of "
             "the messages.")
        .def(
            "set_heads",
            [](Forms& self, nb::bytes key, std::uint64_t version, const std::vector<nb::bytes>& heads) {
                const auto found = self.entries.find(std::string(key.c_str(), key.size()));
                if (found == self.entries.end()) return;
                auto& form = *found->second.form;
                if (heads.size() != form.outputs.size()) throw std::invalid_argument("expected the bytes before each output");
                form.version = version;
                form.heads.clear();
                for (const nb::bytes& head : heads) form.heads.emplace_back(head.c_str(), head.size());
            },
            nb::arg("key"), nb::arg("version"), nb::arg("heads"), "Set the bytes before each output in answers of a weights version.")
        .def("remove", [](Forms& self, nb::bytes key) { self.entries.erase(std::string(key.c_str(), key.size())); }, nb::arg("key"));

    nb::class_<BoundFastPath>(m, "FastLane", "Answers requests of known forms: from gRPC messages to rows, to an engine's ring, and back.")
        .def(
            "__init__",
            [](BoundFastPath* self, std::uint32_t first, std::uint32_t rows, std::size_t engines, const Columns& inputs, const Columns& outputs,
               nb::object wake) {
                if (engines == 0 || rows / (engines + 1) == 0) throw std::invalid_argument("expected a row for each engine's ticket, and another one");
                auto lane = std::make_unique<RequestLane>(first, rows, engines, columns_of(inputs, first, rows), columns_of(outputs, first, rows));
                new (self) BoundFastPath{std::move(lane), inputs, outputs, {}, std::move(wake)};
            },
            nb::arg("first"), nb::arg("rows"), nb::arg("engines"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("wake"),
            "`first` and `rows` are its rows in the arena, `engines` the most that `attach` gets, `inputs` and `outputs` each tensor's memory, "
            "uint8, and the bytes of a row; `wake` is the value of the event of `feed` for a request.")
        .def(
            "attach",
            [](BoundFastPath& self, std::vector<GivenEngine> engines, std::uint64_t number) {
                if (self.lane == nullptr) return;
                self.lane->attach(engines_of(engines), number);
                self.engines.swap(engines);
            },
            nb::arg("engines"), nb::arg("number"),
            "Post tickets, with numbers above this one, to engines, the preferred one first: the lane's side of the rings of an engine's "
            "incarnation, the engine's record of scoreboard.ENGINE, and the incarnation. Those of earlier calls that are not among them have ended.")
        .def("detach", [](BoundFastPath& self) { if (self.lane) self.lane->detach(); }, "Accept no requests until `attach`.")
        .def_prop_ro("waiting", [](const BoundFastPath& self) { return self.lane ? self.lane->waiting() : 0; }, "Requests for the next ticket.")
        .def_prop_ro("pending", [](const BoundFastPath& self) { return self.lane ? self.lane->pending() : 0; },
                     "Requests that are not answered.")
        .def_prop_ro("may_send", [](BoundFastPath& self) { return self.lane && self.lane->next() != nullptr; },
                     "Whether an engine is free for the next ticket.")
        .def(
            "send",
            [](BoundFastPath& self, double seconds) -> nb::object {
                EngineRings* const engine = self.lane ? self.lane->next() : nullptr;
                if (engine == nullptr) return nb::none();
                ShmRingsClient& rings = *engine->rings;
                rings.set_watched(seconds <= 0);
                bool answered = false;
                if (!self.lane->send(*engine)) return nb::none();
                if (seconds > 0) {
                    {
                        const Unlocked release;
                        answered = rings.wait(static_cast<std::int64_t>(seconds * 1e9));
                    }
                    if (!answered) rings.set_watched(true);
                }
                return nb::bool_(answered);
            },
            nb::arg("seconds"),
            "Post the waiting requests as one ticket, and wait at most so many seconds; return whether its answer has arrived, or None if the "
            "ticket cannot be posted.")
        .def(
            "receive",
            [](BoundFastPath& self) -> nb::object {
                if (self.lane == nullptr || !self.lane->receive()) return nb::none();
                return nb::make_tuple(self.lane->code(), self.lane->version(), self.lane->rows(), static_cast<double>(self.lane->took()) / 1e9);
            },
            "Return the code, the weights version, the rows and the seconds of a ticket's answer, or None if none has arrived. Its requests "
            "must be answered or taken back before the next call.")
        .def("answer", answer, "Answer the requests of the answered ticket; return the `owner` of each, whose connection must be flushed.")
        .def("take_back", give_back, nb::arg("until"),
             "Return (owner, call, ns until its deadline, message) of the requests that must be answered otherwise: those due before a time (ns "
             "of CLOCK_MONOTONIC), of an answered ticket, and those that no engine will answer.")
        .def("close", [](BoundFastPath& self) { self.close(); }, "Release everything; later calls do nothing.");

    m.def("cut_infer_request", cut, nb::arg("message"),
          "Split a ModelInferRequest at its top level: all fields except id and raw contents, the id, and (offset, size) of each raw "
          "content. None if only protobuf can parse it.");
    m.def("nghttp2", [] {
        const auto& library = nghttp2::library();
        return nb::make_tuple(library.missing.empty() ? library.version(0)->version : "", library.missing);
    }, "The version of the system's libnghttp2, and why it is not used; one of the two is empty.");
}

}  // namespace jurybox
