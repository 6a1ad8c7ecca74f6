// What a process holds for its clients, counted for each connection and in all: bytes of requests, bytes of answers, calls.
//
// Every door asks before it keeps a byte. What is beyond a limit is refused, not delayed: half-sent messages that wait for each
// other would never end. All operations may be called by several threads.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace jurybox {

enum class Resource {
    kReceived = 0,  // bytes of requests, from their arrival until they are answered or dropped, also inflated and decoded
    kAnswers = 1,   // bytes of answers that have not left the process
    kCalls = 2,     // calls that have begun and are not answered
};
inline constexpr std::size_t kResources = 3;

enum class Refusal {
    kNone = 0,
    kShare = 1,  // the connection holds its share
    kAll = 2,    // all connections together hold what the process may
};

enum class Door { kHttp = 0, kGrpc = 1, kRobots = 2, kTcp = 3 };  // where a connection came in
inline constexpr std::size_t kDoors = 4;

struct BudgetLimits {
    std::array<std::size_t, kResources> each, in_all;
};

class Budget {
  public:
    static constexpr std::size_t kSmall = 64u << 10;  // bytes of a request or an answer that large ones cannot shut out

    explicit Budget(const BudgetLimits& limits) : limits_(limits) {}
    Budget(const Budget&) = delete;
    Budget& operator=(const Budget&) = delete;

    const BudgetLimits& limits() const { return limits_; }
    std::size_t held(Resource kind) const { return held_[index(kind)].load(std::memory_order_relaxed); }
    // How often a request for more was refused at a door for this reason.
    std::uint64_t refused(Resource kind, Refusal reason, Door door) const {
        return refused_[static_cast<std::size_t>(door)][index(kind)][reason == Refusal::kAll].load(std::memory_order_relaxed);
    }

  private:
    friend class Account;
    static std::size_t index(Resource kind) { return static_cast<std::size_t>(kind); }

    // An eighth is for small ones. The first of all is accepted whatever its size, so that a limit never makes it impossible.
    bool take(Resource kind, std::size_t size, std::size_t whole) {
        const std::size_t all = limits_.in_all[index(kind)], most = whole > kSmall ? all - all / 8 : all;
        auto& held = held_[index(kind)];
        std::size_t before = held.load(std::memory_order_relaxed);
        do {
            if (before > 0 && (size > most || before > most - size)) return false;
        } while (!held.compare_exchange_weak(before, before + size, std::memory_order_relaxed));
        return true;
    }
    void owe(Resource kind, std::size_t size) { held_[index(kind)].fetch_add(size, std::memory_order_relaxed); }
    void give(Resource kind, std::size_t size) { held_[index(kind)].fetch_sub(size, std::memory_order_relaxed); }
    void refuse(Resource kind, Refusal reason, Door door) {
        refused_[static_cast<std::size_t>(door)][index(kind)][reason == Refusal::kAll].fetch_add(1, std::memory_order_relaxed);
    }

    const BudgetLimits limits_;
    std::array<std::atomic<std::size_t>, kResources> held_{};
    std::array<std::array<std::array<std::atomic<std::uint64_t>, 2>, kResources>, kDoors> refused_{};
};

// What one connection holds. Its destructor returns everything.
class Account {
  public:
    Account(std::shared_ptr<Budget> budget, Door door) : budget_(std::move(budget)), door_(door) {}
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;
    ~Account() {
        for (std::size_t i = 0; i < kResources; ++i) budget_->give(static_cast<Resource>(i), held_[i].load(std::memory_order_relaxed));
    }

    // Take `size` more for a request or an answer of `whole` bytes, as far as known.
    Refusal take(Resource kind, std::size_t size, std::size_t whole = 0) {
        const std::size_t most = budget_->limits_.each[Budget::index(kind)];
        auto& held = held_[Budget::index(kind)];
        std::size_t before = held.load(std::memory_order_relaxed);
        Refusal refusal = Refusal::kNone;
        do {
            // One answer is always accepted here: it may be larger than any request.
            const bool first = before == 0 && kind == Resource::kAnswers;
            if (!first && (size > most || before > most - size)) {
                refusal = Refusal::kShare;
                break;
            }
        } while (!held.compare_exchange_weak(before, before + size, std::memory_order_relaxed));
        if (refusal == Refusal::kNone && !budget_->take(kind, size, std::max(size, whole))) {
            held.fetch_sub(size, std::memory_order_relaxed);
            refusal = Refusal::kAll;
        }
        if (refusal != Refusal::kNone) budget_->refuse(kind, refusal, door_);
        return refusal;
    }

    // Take `size` more whatever the limits are: it is there already.
    void owe(Resource kind, std::size_t size) {
        held_[Budget::index(kind)].fetch_add(size, std::memory_order_relaxed);
        budget_->owe(kind, size);
    }

    void give(Resource kind, std::size_t size) {
        if (size == 0) return;
        held_[Budget::index(kind)].fetch_sub(size, std::memory_order_relaxed);
        budget_->give(kind, size);
    }

    std::size_t held(Resource kind) const { return held_[Budget::index(kind)].load(std::memory_order_relaxed); }
    Budget& budget() const { return *budget_; }

  private:
    const std::shared_ptr<Budget> budget_;
    const Door door_;
    std::array<std::atomic<std::size_t>, kResources> held_{};
};

}  // namespace jurybox
