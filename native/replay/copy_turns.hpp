// Turns at copying, for threads of one process that write more rows than it has cores.
#pragma once
#include <algorithm>
#include <deque>
#include <mutex>
#include <vector>

#include "common/wait.hpp"

namespace jurybox::replay {

// At most `places` threads copy at a time; the others wait for their turn in the order in which they came. A thread keeps its
// place for a time slice of several copies, since a wake-up takes longer than most copies. It loses it earlier if it does not
// come back at once, so that threads which copy now and then do not wait for each other.
//
// Without turns, threads beyond the cores starve: Python's lock goes to whoever asks at the right moment, for seconds on end.
class CopyTurns {
    struct Place {
        const void* owner = nullptr;  // a thread, also between two of its copies
        std::int64_t until = 0, left = 0;  // when its slice ends; when its last copy ended
        bool busy = false;
    };

  public:
    explicit CopyTurns(std::size_t places, std::int64_t slice_ns = 2'000'000) : slice_(slice_ns), places_(std::max<std::size_t>(places, 1)) {}

    // The right to copy, in its scope. After kPatience a thread copies without it: its row is late, but not lost.
    class Turn {
      public:
        explicit Turn(CopyTurns& turns) : turns_(turns), place_(turns.enter()) {}
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        ~Turn() {
            if (place_ != nullptr) turns_.leave(*place_);
        }
        bool granted() const { return place_ != nullptr; }

      private:
        CopyTurns& turns_;
        Place* place_;
    };

  private:
    static constexpr std::int64_t kPatience = 1'000'000'000;
    static constexpr std::int64_t kAway = 50'000;  // ns; longer than Python takes from one copy to the next

    static const void* this_thread() {
        static thread_local char mark;
        return &mark;
    }

    Place* enter() {
        const std::unique_lock held(mutex_);
        std::int64_t now = monotonic_ns();
        if (Place* own = place_of(this_thread())) {
            if (waiting_.empty() || now < own->until) return taken(own, now);
            own->owner = nullptr;  // and to the end of the queue
        }
        if (waiting_.empty())
            if (Place* place = available(now)) return taken(place, now);
        return wait(now);
    }

    // Called and left with the lock held.
    Place* wait(std::int64_t now) {
        Futex woken{0};
        waiting_.push_back(&woken);
        const std::int64_t patience = now + kPatience;
        Place* place = nullptr;
        while (now < patience) {
            const bool first = waiting_.front() == &woken;
            if (first && (place = available(now)) != nullptr) break;
            const std::uint32_t seen = woken.load(std::memory_order_relaxed);
            const std::int64_t until = first ? std::min(next_look(now), patience) : patience;
            mutex_.unlock();
            futex_wait(woken, seen, until);
            mutex_.lock();
            now = monotonic_ns();
        }
        waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &woken));
        wake_first();  // another place may be available, too
        return place == nullptr ? nullptr : taken(place, now);
    }

    void leave(Place& place) {
        const std::unique_lock held(mutex_);
        place.busy = false;
        place.left = monotonic_ns();
        if (!waiting_.empty() && place.left >= place.until) wake_first();
    }

    Place* place_of(const void* thread) {
        for (Place& place : places_)
            if (place.owner == thread && !place.busy) return &place;
        return nullptr;
    }

    Place* available(std::int64_t now) {
        for (Place& place : places_)
            if (!place.busy && (place.owner == nullptr || now >= place.until || now - place.left >= kAway)) return &place;
        return nullptr;
    }

    // When the first in the queue looks again, unless it is woken.
    std::int64_t next_look(std::int64_t now) const {
        std::int64_t next = now + slice_;
        for (const Place& place : places_)
            if (!place.busy) next = std::min(next, std::min(place.until, place.left + kAway));
        return next;
    }

    Place* taken(Place* place, std::int64_t now) {
        if (place->owner != this_thread() || now >= place->until) place->until = now + slice_;
        place->owner = this_thread();
        place->busy = true;
        return place;
    }

    void wake_first() {
        if (waiting_.empty()) return;
        waiting_.front()->fetch_add(1, std::memory_order_relaxed);
        futex_wake(*waiting_.front());  // within the lock: afterwards the word may be gone
    }

    const std::int64_t slice_;
    std::mutex mutex_;
    std::vector<Place> places_;
    std::deque<Futex*> waiting_;  // each is on the waiting thread's stack
};

}  // namespace jurybox::replay
