// Inference requests of known forms: from the bytes of a gRPC message to rows of the gateway's lane, to an engine's ring, and
// from its answer to the bytes of another message.
//
// The gateway's Python code parses a request once, describes its form (what all such requests have in common) to this class, and
// handles everything special: a request that is not accepted here, and those that `take_back` returns, are answered there.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serving/engine_rings.hpp"

namespace jurybox {

// The parts of a ModelInferRequest of the Open Inference Protocol, which are found at its top level without parsing its
// submessages. The encoding is described at protobuf.dev/programming-guides/encoding.
struct InferParts {
    static constexpr char kId = 0x1A, kRawIn = 0x3A, kRawOut = 0x32;  // tags: field number and wire type LEN
    static constexpr std::size_t kMostHead = 4096, kMostRaw = 1024;

    std::string head;  // all fields except id and raw contents: the key of the request's form
    std::string_view id;
    std::vector<std::string_view> raw;

    // Return false if it is no such message, or only protobuf can parse it.
    bool cut(std::string_view message) {
        head.clear(), raw.clear();
        id = {};
        std::size_t at = 0;
        while (at < message.size()) {
            const std::size_t begin = at;
            const char tag = message[at++];
            if ((tag & 0x87) != 2) return false;  // all fields of the message have wire type LEN and a number below 16
            std::size_t size = 0;
            for (unsigned shift = 0;; shift += 7) {
                if (at == message.size() || shift > 28) return false;
                const auto byte = static_cast<unsigned char>(message[at++]);
                size |= std::size_t{byte & 127u} << shift;
                if (byte < 128) break;
            }
            if (size > message.size() - at) return false;
            const std::string_view field = message.substr(at, size);
            at += size;
            if (tag == kRawIn) raw.push_back(field);
            else if (tag == kId) id = field;
            else head.append(message, begin, at - begin);
            if (head.size() > kMostHead || raw.size() > kMostRaw) return false;
        }
        return std::all_of(id.begin(), id.end(), [](char byte) { return (byte & 0x80) == 0; });  // another id may be invalid UTF-8
    }

    // The tag and the size that precede a field's content.
    static std::string prefix(char tag, std::size_t size) {
        std::string made(1, tag);
        for (; size > 127; size >>= 7) made.push_back(static_cast<char>((size & 127) | 128));
        made.push_back(static_cast<char>(size));
        return made;
    }
};

// Message is a container for bytes, with Message(), resize(size) and data(). Caller identifies a connection. Belongs to one thread.
//
// Each engine has at most one ticket; requests that arrive while all of them compute share the next one. The rows have a part for
// each engine's ticket, and one to which requests are written.
template <class Message, class Caller>
class FastLane {
  public:
    // What requests have in common: their rows, and the columns of their raw inputs and outputs, in the order of the messages.
    struct Form {
        std::uint32_t rows;
        std::vector<std::uint32_t> inputs, outputs;
        std::uint64_t version = 0;       // the weights version that `heads` contain
        std::vector<std::string> heads;  // the bytes that precede each output in an answer
    };
    struct Request {
        Caller caller;
        std::int32_t call;
        std::shared_ptr<Form> form;
        std::string id;
        std::int64_t deadline;  // ns of CLOCK_MONOTONIC
        std::uint32_t first;
        Message message;  // kept until it is answered, for `take_back`
    };

    // `first` is the lane's first row in the arena, `rows` their number, `engines` the number of engines that `attach` may get.
    FastLane(std::uint32_t first, std::uint32_t rows, std::size_t engines, std::vector<RowColumn> inputs, std::vector<RowColumn> outputs)
        : first_(first), size_(rows / static_cast<std::uint32_t>(engines + 1)), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {
        for (std::size_t part = 1; part <= engines; ++part) free_.push_back(static_cast<std::uint32_t>(part) * size_);
    }

    // Post tickets to these engines, the preferred one first, with numbers above `number`. An incarnation that is no more among
    // them has ended, and writes no more to the rows of its ticket.
    void attach(std::vector<EngineRings> engines, std::uint64_t number) {
        std::vector<Sent> kept;
        for (Sent& sent : sent_) {
            const EngineRings& at = engines_[sent.engine];
            const auto same = std::find_if(engines.begin(), engines.end(), [&](const EngineRings& one) { return one.rings == at.rings && one.incarnation == at.incarnation; });
            if (same == engines.end()) {
                free_.push_back(sent.part);
                continue;
            }
            same->tickets = 1;
            sent.engine = static_cast<std::size_t>(same - engines.begin());
            kept.push_back(std::move(sent));
        }
        sent_ = std::move(kept), engines_ = std::move(engines);
        number_ = std::max(number_, number);
        accepts_ = true;
    }
    // Accept no more requests until `attach`.
    void detach() { accepts_ = false; }

    bool serves() const {
        return accepts_ && std::any_of(engines_.begin(), engines_.end(), [](const EngineRings& one) { return one.serves(); });
    }
    std::size_t waiting() const { return waiting_.size(); }
    std::size_t in_flight() const { return sent_.size(); }
    // The requests that are not answered.
    std::size_t pending() const {
        std::size_t sum = waiting_.size() + answered_.size();
        for (const Sent& sent : sent_) sum += sent.requests.size();
        return sum;
    }

    std::size_t columns(bool inputs) const { return inputs ? inputs_.size() : outputs_.size(); }

    // Copy a request's rows to the lane, for the next ticket. Return false, and change nothing, if they do not fit now or at all.
    bool accept(const std::shared_ptr<Form>& form, const InferParts& parts, Caller&& caller, std::int32_t call, std::int64_t deadline,
                Message& message) {
        if (!serves() || parts.raw.size() != form->inputs.size() || form->rows > size_ - used_) return false;
        for (std::size_t i = 0; i < parts.raw.size(); ++i)
            if (parts.raw[i].size() != form->rows * inputs_[form->inputs[i]].row_bytes) return false;
        const std::uint32_t row = part_ + used_;
        for (std::size_t i = 0; i < parts.raw.size(); ++i) {
            const RowColumn& column = inputs_[form->inputs[i]];
            std::memcpy(column.first + row * column.row_bytes, parts.raw[i].data(), parts.raw[i].size());
        }
        used_ += form->rows;
        waiting_.push_back({std::move(caller), call, form, std::string(parts.id), deadline, row, std::move(message)});
        return true;
    }

    // The engine to which the next ticket goes; nullptr: it must wait for an answer, or for an engine.
    EngineRings* next() {
        EngineRings* const engine = accepts_ ? choose_engine(engines_) : nullptr;
        return engine != nullptr && engine->tickets == 0 ? engine : nullptr;
    }

    // Post the waiting requests as one ticket to an engine that has none; return false if that is not possible.
    bool send(EngineRings& engine) {
        if (waiting_.empty() || free_.empty() || engine.tickets) return false;
        std::int64_t deadline = 0;
        for (const Request& one : waiting_) deadline = std::max(deadline, one.deadline);
        const std::int64_t now = monotonic_ns();
        const Ticket ticket{number_ + 1, 0, deadline, now, 0, first_ + part_, used_, 0, 0, {engine.incarnation}};
        if (!engine.rings->submit(ticket)) return false;
        engine.tickets = 1;
        sent_.push_back({static_cast<std::size_t>(&engine - engines_.data()), ++number_, now, part_, std::exchange(used_, 0), {}});
        sent_.back().requests.swap(waiting_);
        part_ = free_.back();
        free_.pop_back();
        return true;
    }

    // Receive the answer to a ticket in flight; return whether one has arrived. If its `code` is kOk, its requests are `answered`, to
    // be answered with `answer`. Those of the last one were answered or taken back.
    bool receive() {
        if (!answered_.empty()) return false;
        for (auto sent = sent_.begin(); sent != sent_.end(); ++sent) {
            EngineRings& engine = engines_[sent->engine];
            Answer answer;
            while (engine.rings->receive(&answer, 1) == 1) {
                if (answer.sequence != sent->number) continue;
                engine.tickets = 0;
                version_ = answer.version, code_ = answer.code, rows_ = sent->rows, took_ = monotonic_ns() - sent->submitted;
                answered_ = std::move(sent->requests);
                free_.push_back(sent->part);
                sent_.erase(sent);
                return true;
            }
        }
        return false;
    }
    std::uint64_t version() const { return version_; }
    std::uint32_t code() const { return code_; }
    std::uint32_t rows() const { return rows_; }  // of the answered ticket
    std::int64_t took() const { return took_; }   // ns
    std::vector<Request>& answered() { return answered_; }

    // Write a ModelInferResponse with the outputs of a request, whose form has the heads of `version`.
    void answer(const Request& request, Message& message) const {
        const Form& form = *request.form;
        const std::string id = request.id.empty() ? std::string() : InferParts::prefix(InferParts::kId, request.id.size()) + request.id;
        std::size_t size = id.size();
        for (std::size_t i = 0; i < form.outputs.size(); ++i) size += form.heads[i].size() + form.rows * outputs_[form.outputs[i]].row_bytes;
        message.resize(size);
        char* to = message.data();
        const auto put = [&to](const void* from, std::size_t bytes) {
            std::memcpy(to, from, bytes);
            to += bytes;
        };
        for (std::size_t i = 0; i < form.outputs.size(); ++i) {
            const RowColumn& column = outputs_[form.outputs[i]];
            put(form.heads[i].data(), form.heads[i].size());
            put(column.first + request.first * column.row_bytes, form.rows * column.row_bytes);
        }
        put(id.data(), id.size());
    }

    // Drop the requests for which `gone(caller, call)` is true, with their messages. Their rows stay in use as long as those of
    // their ticket.
    template <class Gone>
    void cancel(Gone gone) {
        const auto drop = [&gone](std::vector<Request>& some) {
            some.erase(std::remove_if(some.begin(), some.end(), [&gone](const Request& one) { return gone(one.caller, one.call); }), some.end());
        };
        drop(answered_);
        for (Sent& sent : sent_) drop(sent.requests);
        drop(waiting_);
        if (waiting_.empty()) used_ = 0;
    }

    // Return the requests whose deadline is before `until`, those of an answered ticket, and those that no engine will answer as it
    // does not serve, and do not answer them. The rows of a ticket in flight stay in use until its engine has answered or ended.
    std::vector<Request> take_back(std::int64_t until) {
        std::vector<Request> back;
        const auto take = [&back](std::vector<Request>& some, std::int64_t before) {
            const auto kept = std::stable_partition(some.begin(), some.end(), [&](const Request& one) { return one.deadline < before; });
            std::move(some.begin(), kept, std::back_inserter(back));
            some.erase(some.begin(), kept);
        };
        constexpr std::int64_t all = std::numeric_limits<std::int64_t>::max();
        take(answered_, all);
        for (Sent& sent : sent_) take(sent.requests, engines_[sent.engine].serves() ? until : all);
        take(waiting_, serves() ? until : all);
        if (waiting_.empty()) used_ = 0;
        return back;
    }

  private:
    struct Sent {
        std::size_t engine;  // index
        std::uint64_t number;
        std::int64_t submitted;
        std::uint32_t part, rows;
        std::vector<Request> requests;
    };

    const std::uint32_t first_, size_;  // of a part
    const std::vector<RowColumn> inputs_, outputs_;
    std::vector<EngineRings> engines_;
    std::uint64_t number_ = 0, version_ = 0;
    std::int64_t took_ = 0;
    std::uint32_t code_ = kOk, rows_ = 0, used_ = 0;
    std::uint32_t part_ = 0;           // the first row of the part that requests are written to
    std::vector<std::uint32_t> free_;  // the others without a ticket
    bool accepts_ = false;
    std::vector<Request> waiting_, answered_;
    std::vector<Sent> sent_;
};

}  // namespace jurybox
