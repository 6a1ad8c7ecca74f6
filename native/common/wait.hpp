// Waiting for another process or thread: the clock, futexes, a spin before the sleep, and a signal with many waiters.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace jurybox {

// ---- the clock: CLOCK_MONOTONIC, which all processes of a host share

inline std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

inline double monotonic_seconds() { return static_cast<double>(monotonic_ns()) * 1e-9; }

inline timespec timespec_of(std::int64_t ns) { return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)}; }

// ---- futex(2), in the variant for several processes

using Futex = std::atomic<std::uint32_t>;
static_assert(Futex::is_always_lock_free && sizeof(Futex) == 4);

// Sleep while `word` is `seen`, at most until `until_ns` of CLOCK_MONOTONIC. Returns 0 if woken, otherwise the errno:
// EAGAIN (the word was not `seen`), EINTR or ETIMEDOUT. Only a wake-up that shares one of `bits` ends the sleep.
inline int futex_wait(const Futex& word, std::uint32_t seen, std::int64_t until_ns, std::uint32_t bits = FUTEX_BITSET_MATCH_ANY) {
    const timespec until = timespec_of(until_ns);
    return syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &until, nullptr, bits) == 0 ? 0 : errno;
}

// Wake all sleepers on `word` that share one of `bits`.
inline void futex_wake(Futex& word, std::uint32_t bits = FUTEX_BITSET_MATCH_ANY) {
    syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
}

// ---- spinning: an answer that arrives within microseconds does not justify a sleep

// The time to spin before sleeping. Spinning pays if answers arrive during it. With many clients on few cores they do not,
// and a spin only takes the core from the process that would have answered. So each failure halves the time, down to
// none, and occasionally a short spin tries again. Several threads may share an object; lost updates do no harm.
class Spin {
  public:
    explicit Spin(std::int64_t most_ns) : most_(most_ns), now_(most_ns) {}

    std::int64_t budget(std::int64_t timeout_ns) {
        std::int64_t budget = now_.load(std::memory_order_relaxed);
        if (budget == 0) {
            const int skipped = skipped_.load(std::memory_order_relaxed) + 1;
            if (skipped >= kAskAgain) budget = most_;
            skipped_.store(skipped >= kAskAgain ? 0 : skipped, std::memory_order_relaxed);
        }
        return budget < timeout_ns ? budget : timeout_ns;
    }
    void ended(bool found, std::int64_t budget) {
        if (budget == 0) return;
        const std::int64_t now = now_.load(std::memory_order_relaxed);
        now_.store(found ? most_ : now < most_ / 4 ? 0 : now / 2, std::memory_order_relaxed);
    }

  private:
    static constexpr int kAskAgain = 256;
    const std::int64_t most_;
    std::atomic<std::int64_t> now_;
    std::atomic<int> skipped_{0};
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Call `found` until it returns true or the budget is spent. A spin also ends if this thread has lost its core for a
// while, because others need the core. It does not call sched_yield, which costs whole time slices under load.
template <class Found>
bool spin_until(std::int64_t budget_ns, Found found) {
    constexpr std::int64_t kTaken = 20'000;  // ns; a round of the inner loop takes less than two microseconds
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

// ---- a signal: a futex word and the number of waiters, so that an announcement without waiters makes no system call

struct Signal {
    Futex word;
    std::atomic<std::uint32_t> waiters;
};

// Wake the waiters, if there are any: their condition may be true now.
inline void announce(Signal& signal) {
    // Pairs with the waiter's increment: either the waiter sees the new state, or this sees the waiter.
    if (signal.waiters.fetch_add(0, std::memory_order_seq_cst) == 0) return;
    signal.word.fetch_add(1, std::memory_order_release);
    futex_wake(signal.word);
}

// Sleep until ready() is true or until `deadline` (monotonic seconds); return the last result of ready(). interrupted()
// is called every tenth of a second: Python handles signals there, and a waker's death cannot delay the caller longer.
template <class Ready, class Interrupted>
bool wait_until(Signal& signal, double deadline, Ready&& ready, Interrupted&& interrupted) {
    if (ready()) return true;
    signal.waiters.fetch_add(1, std::memory_order_seq_cst);
    bool done = false;
    while (true) {
        const std::uint32_t seen = signal.word.load(std::memory_order_acquire);
        if ((done = ready()) || interrupted()) break;
        const double left = deadline - monotonic_seconds();
        if (left <= 0) break;
        futex_wait(signal.word, seen, monotonic_ns() + static_cast<std::int64_t>(std::min(left, 0.1) * 1e9));
    }
    signal.waiters.fetch_sub(1, std::memory_order_relaxed);
    return done;
}

}  // namespace jurybox
