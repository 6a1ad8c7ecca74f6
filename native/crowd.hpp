// Which clients are about to come back: the bookkeeping of engine/crowd.py, over the tickets of a batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tickets.hpp"

namespace jurybox {

class ArrivalTracker {
  public:
    explicit ArrivalTracker(std::size_t lanes) : lanes_(lanes) {}

    // Quick clients that have been answered and have not asked again yet.
    std::size_t away() const { return away_; }

    // These tickets have arrived. A client is quick that was back within `quick_ns` of its last answer.
    void came(const Ticket* tickets, std::size_t n, std::int64_t now, std::int64_t quick_ns) {
        for (std::size_t i = 0; i < n; ++i) {
            if (tickets[i].lane >= lanes_.size()) continue;
            Pace& pace = lanes_[tickets[i].lane];
            pace.quick = now - pace.answered <= quick_ns;
            away_ -= pace.away;
            pace.away = false;
        }
    }

    // These tickets have been answered.
    void answered(const Ticket* tickets, std::size_t n, std::int64_t now) {
        for (std::size_t i = 0; i < n; ++i) {
            if (tickets[i].lane >= lanes_.size()) continue;
            Pace& pace = lanes_[tickets[i].lane];
            pace.answered = now;
            away_ += std::size_t{pace.quick} - std::size_t{pace.away};
            pace.away = pace.quick;
        }
    }

    // Who is away now does not come back soon: nobody is waited for until it was quick again.
    void stays_away() {
        for (Pace& pace : lanes_) {
            if (pace.away) pace.quick = pace.away = false;
        }
        away_ = 0;
    }

  private:
    struct Pace {
        std::int64_t answered = 0;
        bool quick = false;
        bool away = false;
    };
    std::vector<Pace> lanes_;
    std::size_t away_ = 0;
};

}  // namespace jurybox
