// Waiting awake for a little while: what others answer within microseconds is not worth a sleep.
#pragma once
#include <cstdint>

#include "clock.hpp"

namespace jurybox {

// How long to spin before sleeping. Spinning pays while answers come within it; where they do not (many clients on
// few cores) it only takes the core from whoever would have answered. So failures halve it, down to none, and now
// and then a short spin asks again.
class Spin {
  public:
    explicit Spin(std::int64_t most_ns) : most_(most_ns), now_(most_ns) {}

    std::int64_t budget(std::int64_t timeout_ns) {
        std::int64_t budget = now_;
        if (budget == 0 && ++skipped_ == kAskAgain) {
            skipped_ = 0;
            budget = most_;
        }
        return budget < timeout_ns ? budget : timeout_ns;
    }
    void ended(bool found, std::int64_t budget) {
        if (budget == 0) return;
        if (found)
            now_ = most_;
        else
            now_ = now_ < most_ / 4 ? 0 : now_ / 2;
    }

  private:
    static constexpr int kAskAgain = 256;
    std::int64_t most_;
    std::int64_t now_;
    int skipped_ = 0;
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Run `found` until it is true or the budget is spent, or until the core was taken away for a while: then it is wanted.
// The core is not offered with sched_yield: under load that costs whole time slices of the others.
template <class Found>
bool spin_until(std::int64_t budget_ns, Found found) {
    constexpr std::int64_t kTaken = 20'000;  // ns; a round of the inner loop takes below two microseconds
    if (budget_ns <= 0) return false;
    std::int64_t now = monotonic_ns();
    const std::int64_t until = now + budget_ns;
    while (now < until) {
        for (int i = 0; i < 64; ++i) {
            pause();
            if (found()) return true;
        }
        const std::int64_t before = now;
        now = monotonic_ns();
        if (now - before > kTaken) return false;
    }
    return false;
}

}  // namespace jurybox
