// The one clock of shared memory: CLOCK_MONOTONIC, the same for all processes of a host.
#pragma once
#include <cstdint>
#include <ctime>

namespace jurybox {

inline std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace jurybox
