// Counting an answered batch into an engine's part of the scoreboard.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tickets.hpp"

namespace jurybox {

constexpr std::size_t kBatchBuckets = 20;
constexpr std::size_t kTimeBuckets = 40;

// The same as scoreboard.py's COUNTERS. Histograms count powers of two: bucket i holds values in [2^(i-1), 2^i).
struct Counters {
    std::uint64_t requests, rows, batches, failed, expired, refused, not_held, version, newest, updates;
    std::int64_t adopted;
    std::uint64_t waiting;
    std::uint64_t queue_total_ns, forward_total_ns, request_total_ns, adopt_total_ns;
    std::uint64_t batch_rows[kBatchBuckets];
    std::uint64_t queue_ns[kTimeBuckets], forward_ns[kTimeBuckets], request_ns[kTimeBuckets], adopt_ns[kTimeBuckets];
};

inline std::size_t bucket(std::uint64_t value, std::size_t buckets) {
    std::size_t bits = 0;
    for (; value; value >>= 1) ++bits;
    return bits < buckets ? bits : buckets - 1;
}

// A client's clock is the host's, but what it wrote is not to be trusted: times are kept within the histogram.
inline std::uint64_t elapsed(std::int64_t since, std::int64_t until) {
    constexpr std::int64_t kMost = std::int64_t{1} << (kTimeBuckets - 1);
    if (since >= until) return 0;
    return static_cast<std::uint64_t>(since > until - kMost ? until - since : kMost);
}

// Show what an engine counted: its own record is out of others' reach, the scoreboard's is not. `waiting` is set there alone.
inline void show(const Counters& own, Counters& shown) {
    const std::uint64_t waiting = shown.waiting;
    std::memcpy(&shown, &own, sizeof(Counters));
    shown.waiting = waiting;
}

// `began` and `ended` are ns of CLOCK_MONOTONIC. The record has one writer, and readers take each word as it is.
inline void count_batch(Counters& counters, const Ticket* tickets, std::size_t n, std::size_t rows, std::int64_t began,
                        std::int64_t ended) {
    counters.requests += n;
    counters.rows += rows;
    counters.batches += 1;
    counters.batch_rows[bucket(rows, kBatchBuckets)] += 1;
    const std::uint64_t forward = elapsed(began, ended);
    counters.forward_total_ns += forward;
    counters.forward_ns[bucket(forward, kTimeBuckets)] += 1;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t queue = elapsed(tickets[i].submitted, began);
        const std::uint64_t request = elapsed(tickets[i].submitted, ended);
        counters.queue_total_ns += queue;
        counters.request_total_ns += request;
        counters.queue_ns[bucket(queue, kTimeBuckets)] += 1;
        counters.request_ns[bucket(request, kTimeBuckets)] += 1;
    }
}

}  // namespace jurybox
