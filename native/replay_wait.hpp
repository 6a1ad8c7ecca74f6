// Waiting across processes: a futex word that moves whenever rows come or go, and a count of those who wait for it,
// so that nobody makes a system call for a word that no one watches (futex(2), the shared kind).
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace jurybox::replay {

struct Signal {
    std::atomic<std::uint32_t> word;
    std::atomic<std::uint32_t> waiters;
};

inline double monotonic_seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Tell the waiters, if there are any, that the counters have moved.
inline void announce(Signal& signal) {
    // Pairs with the waiter's increment: either it sees the counters' new state, or we see the waiter.
    if (signal.waiters.fetch_add(0, std::memory_order_seq_cst) == 0) return;
    signal.word.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &signal.word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Sleep until ready() or until `deadline` (monotonic seconds); gives what ready() last said. interrupted() is asked
// every tenth of a second: it lets Python handle signals, and a waker that was killed can delay us no longer than that.
template <class Ready, class Interrupted>
bool wait_until(Signal& signal, double deadline, Ready&& ready, Interrupted&& interrupted) {
    if (ready()) return true;
    signal.waiters.fetch_add(1, std::memory_order_seq_cst);
    bool done = false;
    while (true) {
        const std::uint32_t seen = signal.word.load(std::memory_order_acquire);
        if ((done = ready()) || interrupted()) break;
        double left = deadline - monotonic_seconds();
        if (left <= 0) break;
        if (left > 0.1) left = 0.1;
        timespec pause{static_cast<time_t>(left), static_cast<long>((left - static_cast<double>(static_cast<time_t>(left))) * 1e9)};
        syscall(SYS_futex, &signal.word, FUTEX_WAIT, seen, &pause, nullptr, 0);
    }
    signal.waiters.fetch_sub(1, std::memory_order_relaxed);
    return done;
}

}  // namespace jurybox::replay
