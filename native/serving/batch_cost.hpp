// An estimate of what a batch costs, by which engines and the gateway decide whether waiting for more rows pays.
#pragma once
#include <algorithm>
#include <cstdint>

namespace jurybox {

// The least fixed cost of a batch, in ns, for which all clients that return promptly are waited for: a smaller one is of the order
// of a context switch.
constexpr std::int64_t kLargeNs = 1'000'000;

// A linear model of a batch's duration as a function of its rows, by exponentially weighted least squares.
class BatchCost {
  public:
    // Record that a batch of `rows` rows took `ns`. Return what one of a single row would have taken by the estimate so far; the
    // least possible while batches of one size do not show it.
    double observe(std::int64_t rows, std::int64_t ns) {
        const double n = static_cast<double>(rows), took = static_cast<double>(ns);
        const double one = shown_ ? std::max(0.0, took - row_ * (n - 1.0)) : took / std::max(1.0, n);
        weight_ = kKeep * weight_ + 1.0;
        rows_ = kKeep * rows_ + n;
        ns_ = kKeep * ns_ + took;
        rows2_ = kKeep * rows2_ + n * n;
        rows_ns_ = kKeep * rows_ns_ + n * took;
        const bool same = n == last_;
        last_ = n;
        equal_ = same ? std::min(equal_ + 1, kStale) : 0;
        shortest_ = same ? std::min(took, kForget * shortest_) : took;
        const double spread = weight_ * rows2_ - rows_ * rows_;
        if (spread < kSpread * rows_ * rows_) return one;  // equal sizes do not determine the slope: keep the last estimate
        shown_ = true;
        row_ = std::max(0.0, (weight_ * rows_ns_ - rows_ * ns_) / spread);
        fixed_ = std::max(0.0, (ns_ - row_ * rows_) / weight_);
        return one;
    }

    // The cost in ns that is independent of the number of rows; 0 until batches of different sizes have shown it.
    double fixed() const { return fixed_; }

    // The same; while equal batches do not show which part that is, all of the shortest. Whoever waits by it sends a larger batch,
    // which shows it. By a wrong estimate for which nobody waits, two groups of clients in turn would send batches of one size for
    // ever.
    double possible() const { return shown_ && equal_ < kStale ? fixed_ : shortest_; }

    // The time in ns within which clients return promptly, a share of `possible`; 0 if that is too small to wait for all of them.
    std::int64_t prompt(double share) const {
        const double fixed = possible();
        return fixed < static_cast<double>(kLargeNs) ? 0 : static_cast<std::int64_t>(fixed * share);
    }

  private:
    static constexpr double kKeep = 0.995;   // what is left of past batches' weight with each batch
    static constexpr double kSpread = 0.02;  // the smallest variance of the number of rows over its squared mean for a fit
    static constexpr int kStale = 50;        // batches of one size, after which the last estimate may be out of date
    static constexpr double kForget = 1.01;  // how much the shortest of them grows with each: it follows a model that got slower

    double weight_ = 0.0, rows_ = 0.0, ns_ = 0.0, rows2_ = 0.0, rows_ns_ = 0.0;
    double fixed_ = 0.0, row_ = 0.0;
    double last_ = -1.0, shortest_ = 0.0;  // rows of the last batch; the least that those before it with as many took
    int equal_ = 0;                        // how many those are
    bool shown_ = false;
};

}  // namespace jurybox
