// What a batch costs, from the durations of batches of different sizes.
#include "serving/batch_cost.hpp"

#include <cstdio>

#include "check.hpp"

using namespace jurybox;

namespace {

bool about(double found, double expected) { return found > 0.999 * expected && found < 1.001 * expected; }

void the_fixed_cost_is_told_from_that_of_the_rows() {
    BatchCost cost;
    CHECK(cost.fixed() == 0 && cost.possible() == 0);
    CHECK(cost.observe(4, 120'000) == 30'000);  // the least possible
    CHECK(cost.fixed() == 0 && cost.possible() == 120'000);
    for (int i = 0; i < 50; ++i) cost.observe(1 + i % 8, 80'000 + 10'000 * (1 + i % 8));
    CHECK(about(cost.fixed(), 80'000) && about(cost.possible(), 80'000));
    CHECK(about(cost.observe(8, 160'000), 90'000));
    CHECK(cost.observe(8, 1'000) == 0);  // no batch takes less than nothing
}

void equal_batches_keep_the_estimate_and_make_it_doubtful() {
    BatchCost cost;
    for (int i = 0; i < 240; ++i) cost.observe(1 + i % 6, 40'000 * (1 + i % 6));
    CHECK(cost.fixed() < 1'000 && cost.possible() == cost.fixed());
    for (int i = 0; i < 600; ++i) cost.observe(3, 120'000);
    CHECK(cost.fixed() < 1'000 && cost.possible() == 120'000);
    cost.observe(3, 90'000);
    CHECK(cost.possible() == 90'000);
    for (int i = 0; i < 600; ++i) cost.observe(3, 300'000);
    CHECK(cost.possible() == 300'000);
    for (int i = 0; i < 9; ++i) cost.observe(6, 300'000);  // both groups at once: it is fixed after all
    CHECK(cost.fixed() > 200'000 && cost.possible() == cost.fixed());
}

void no_rows_are_no_reason_to_divide_by_nothing() {
    BatchCost cost;
    CHECK(cost.observe(0, 5'000) == 5'000);
    CHECK(cost.observe(0, 5'000) >= 0);
    CHECK(cost.fixed() >= 0 && cost.possible() >= 0);
}

void only_a_large_fixed_cost_has_prompt_clients() {
    BatchCost small, large;
    for (int i = 0; i < 60; ++i) small.observe(4, kLargeNs - 1), large.observe(4, kLargeNs);
    CHECK(small.prompt(0.25) == 0 && large.prompt(0.25) == kLargeNs / 4);
}

}  // namespace

int main() {
    the_fixed_cost_is_told_from_that_of_the_rows();
    equal_batches_keep_the_estimate_and_make_it_doubtful();
    no_rows_are_no_reason_to_divide_by_nothing();
    only_a_large_fixed_cost_has_prompt_clients();
    std::puts("ok");
}
