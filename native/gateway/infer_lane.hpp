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
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serving/shm_rings.hpp"

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
// Requests that arrive while a ticket is computed share the next ticket. The rows have two halves: one is computed, requests are
// written to the other.
template <class Message, class Caller>
class InferLane {
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

    // `first` is the lane's first row in the arena, `rows` their number.
    InferLane(std::uint32_t first, std::uint32_t rows, std::vector<LaneColumn> inputs, std::vector<LaneColumn> outputs)
        : first_(first), half_(rows / 2), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

    // Post tickets to these rings, of the engine's `incarnation`, with numbers above `number`. An earlier incarnation has ended,
    // and writes no more to the rows of its tickets.
    void attach(ShmRingsClient& rings, const EngineRecord& engine, std::uint64_t incarnation, std::uint64_t number) {
        if (incarnation != incarnation_) in_flight_ = false;
        rings_ = &rings, engine_ = &engine, incarnation_ = incarnation;
        number_ = std::max(number_, number);
    }
    // Accept no more requests until `attach`.
    void detach() { rings_ = nullptr; }

    bool serves() const { return rings_ != nullptr && engine_->serves(incarnation_); }
    std::size_t waiting() const { return waiting_.size(); }
    bool in_flight() const { return in_flight_; }

    std::size_t columns(bool inputs) const { return inputs ? inputs_.size() : outputs_.size(); }

    // Copy a request's rows to the lane, for the next ticket. Return false, and change nothing, if they do not fit now or at all.
    bool accept(const std::shared_ptr<Form>& form, const InferParts& parts, Caller&& caller, std::int32_t call, std::int64_t deadline,
                Message& message) {
        if (!serves() || parts.raw.size() != form->inputs.size() || form->rows > half_ - used_) return false;
        for (std::size_t i = 0; i < parts.raw.size(); ++i)
            if (parts.raw[i].size() != form->rows * inputs_[form->inputs[i]].row_bytes) return false;
        const std::uint32_t row = (second_ ? half_ : 0) + used_;
        for (std::size_t i = 0; i < parts.raw.size(); ++i) {
            const LaneColumn& column = inputs_[form->inputs[i]];
            std::memcpy(column.first + row * column.row_bytes, parts.raw[i].data(), parts.raw[i].size());
        }
        used_ += form->rows;
        waiting_.push_back({std::move(caller), call, form, std::string(parts.id), deadline, row, std::move(message)});
        return true;
    }

    // Post the waiting requests as one ticket; return false if that is not possible. Those of the last one were answered or
    // returned.
    bool send() {
        if (in_flight_ || !sent_.empty() || waiting_.empty() || !serves()) return false;
        std::int64_t deadline = 0;
        for (const Request& one : waiting_) deadline = std::max(deadline, one.deadline);
        const Ticket ticket{number_ + 1, 0, deadline, monotonic_ns(), 0, first_ + (second_ ? half_ : 0), used_, 0, 0, {incarnation_}};
        if (!rings_->submit(ticket)) return false;
        ++number_;
        in_flight_ = true;
        sent_.swap(waiting_);
        second_ = !second_;
        rows_ = std::exchange(used_, 0);
        return true;
    }

    // Wait at most `ns` for the answer.
    bool wait(std::int64_t ns) { return rings_ != nullptr && rings_->wait(ns); }

    // Receive the answer to the ticket in flight; return whether it has arrived. If its `code` is kOk, its requests are `sent`, to
    // be answered with `answer`.
    bool receive() {
        Answer answer;
        while (rings_ != nullptr && rings_->receive(&answer, 1) == 1) {
            if (!in_flight_ || answer.sequence != number_) continue;
            in_flight_ = false;
            version_ = answer.version, code_ = answer.code;
            return true;
        }
        return false;
    }
    std::uint64_t version() const { return version_; }
    std::uint32_t code() const { return code_; }
    std::uint32_t rows() const { return rows_; }  // of the last ticket
    std::vector<Request>& sent() { return sent_; }

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
            const LaneColumn& column = outputs_[form.outputs[i]];
            put(form.heads[i].data(), form.heads[i].size());
            put(column.first + request.first * column.row_bytes, form.rows * column.row_bytes);
        }
        put(id.data(), id.size());
    }

    // Return the requests whose deadline is before `until`, and do not answer them. The rows of a ticket in flight stay in use
    // until its engine has answered or ended.
    std::vector<Request> take_back(std::int64_t until) {
        std::vector<Request> back;
        for (std::vector<Request>* some : {&sent_, &waiting_}) {
            const auto kept = std::stable_partition(some->begin(), some->end(), [&](const Request& one) { return one.deadline < until; });
            std::move(some->begin(), kept, std::back_inserter(back));
            some->erase(some->begin(), kept);
        }
        if (waiting_.empty()) used_ = 0;
        return back;
    }

  private:
    const std::uint32_t first_, half_;
    const std::vector<LaneColumn> inputs_, outputs_;
    ShmRingsClient* rings_ = nullptr;
    const EngineRecord* engine_ = nullptr;
    std::uint64_t incarnation_ = 0, number_ = 0, version_ = 0;
    std::uint32_t code_ = kOk, rows_ = 0, used_ = 0;
    bool second_ = false, in_flight_ = false;
    std::vector<Request> waiting_, sent_;
};

}  // namespace jurybox
