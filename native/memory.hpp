// Gather and scatter of rows: the two memory-bound steps of a batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jurybox {

// A run of rows: `rows` rows from `first` on.
struct Run {
    std::uint32_t first;
    std::uint32_t rows;
};

// Copy the runs of `table`, one after another, to `out`. Rows are `row_bytes` long.
inline void gather(const std::byte* table, std::size_t row_bytes, const Run* runs, std::size_t n, std::byte* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t bytes = runs[i].rows * row_bytes;
        std::memcpy(out, table + runs[i].first * row_bytes, bytes);
        out += bytes;
    }
}

// The other way: spread consecutive rows of `in` over the runs of `table`.
inline void scatter(std::byte* table, std::size_t row_bytes, const Run* runs, std::size_t n, const std::byte* in) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t bytes = runs[i].rows * row_bytes;
        std::memcpy(table + runs[i].first * row_bytes, in, bytes);
        in += bytes;
    }
}

}  // namespace jurybox
