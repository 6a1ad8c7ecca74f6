// The engines that may compute a lane's tickets, as its client sees them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "serving/shm_rings.hpp"

namespace jurybox {

struct EngineRings {
    ShmRingsClient* rings;
    const EngineRecord* record;
    std::uint64_t incarnation;  // the engine's life to which `rings` belong
    std::size_t tickets = 0;    // of the lane, in flight

    bool serves() const { return record->serves(incarnation); }
};

// As Lane.choose_engine of lane.py: return the engine with the fewest tickets of those whose expected wait is at most 1.5 times the
// least, the first of equal ones; nullptr if none serves.
inline EngineRings* choose_engine(std::vector<EngineRings>& engines) {
    if (engines.size() == 1) return engines[0].serves() ? &engines[0] : nullptr;
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (const EngineRings& one : engines)
        if (one.serves()) least = std::min(least, one.record->wait());
    const double bound = 1.5 * static_cast<double>(std::max<std::int64_t>(0, least));  // negative: another process corrupted it
    EngineRings* best = nullptr;
    for (EngineRings& one : engines)
        if (one.serves() && static_cast<double>(one.record->wait()) <= bound && (best == nullptr || one.tickets < best->tickets)) best = &one;
    return best;
}

}  // namespace jurybox
