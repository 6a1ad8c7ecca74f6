// The budget: shares of connections and of all of them, returned whole whatever happens.
#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "common/budget.hpp"

using namespace jurybox;

namespace {

constexpr std::size_t kKiB = 1u << 10;
constexpr BudgetLimits kLimits{{400 * kKiB, 400 * kKiB, 4}, {800 * kKiB, 800 * kKiB, 6}};

std::shared_ptr<Budget> budget_of(const BudgetLimits& limits = kLimits) { return std::make_shared<Budget>(limits); }

void a_connection_gets_its_share_and_no_more() {
    const auto budget = budget_of();
    Account one(budget, Door::kGrpc), other(budget, Door::kGrpc);
    CHECK(one.take(Resource::kReceived, 300 * kKiB) == Refusal::kNone);
    CHECK(one.take(Resource::kReceived, 100 * kKiB + 1) == Refusal::kShare && one.held(Resource::kReceived) == 300 * kKiB);
    CHECK(one.take(Resource::kReceived, 100 * kKiB) == Refusal::kNone);
    CHECK(other.take(Resource::kReceived, 1) == Refusal::kNone && budget->held(Resource::kReceived) == 400 * kKiB + 1);
    CHECK(budget->refused(Resource::kReceived, Refusal::kShare, Door::kGrpc) == 1 && budget->refused(Resource::kReceived, Refusal::kAll, Door::kGrpc) == 0);
    CHECK(budget->refused(Resource::kReceived, Refusal::kShare, Door::kHttp) == 0 && budget->refused(Resource::kAnswers, Refusal::kShare, Door::kGrpc) == 0);
}

void all_connections_together_get_no_more_than_all() {
    const auto budget = budget_of();
    std::vector<std::unique_ptr<Account>> several;
    for (int i = 0; i < 6; ++i) several.push_back(std::make_unique<Account>(budget, Door::kGrpc));
    for (int i = 0; i < 6; ++i) CHECK(several[i]->take(Resource::kCalls, 1) == Refusal::kNone);
    CHECK(several[0]->take(Resource::kCalls, 1) == Refusal::kAll && several[0]->held(Resource::kCalls) == 1);
    several[5].reset();
    CHECK(several[0]->take(Resource::kCalls, 1) == Refusal::kNone && budget->held(Resource::kCalls) == 6);
}

void large_requests_leave_an_eighth_to_small_ones() {
    const auto budget = budget_of();
    Account one(budget, Door::kGrpc), two(budget, Door::kGrpc), third(budget, Door::kGrpc);
    CHECK(one.take(Resource::kReceived, 350 * kKiB) == Refusal::kNone && two.take(Resource::kReceived, 350 * kKiB) == Refusal::kNone);
    CHECK(third.take(Resource::kReceived, 65 * kKiB) == Refusal::kAll);
    CHECK(third.take(Resource::kReceived, 10 * kKiB, 65 * kKiB) == Refusal::kAll);  // the beginning of a large one
    CHECK(third.take(Resource::kReceived, 64 * kKiB) == Refusal::kNone);
    CHECK(third.take(Resource::kReceived, 36 * kKiB) == Refusal::kNone && third.take(Resource::kReceived, 1) == Refusal::kAll);
}

void one_answer_is_accepted_whatever_its_size() {
    const auto budget = budget_of();
    Account one(budget, Door::kGrpc), other(budget, Door::kGrpc);
    CHECK(one.take(Resource::kAnswers, 5000 * kKiB) == Refusal::kNone && one.take(Resource::kAnswers, 1) == Refusal::kShare);
    CHECK(other.take(Resource::kAnswers, 1) == Refusal::kAll);
    CHECK(other.take(Resource::kReceived, 401 * kKiB) == Refusal::kShare);
    one.give(Resource::kAnswers, 5000 * kKiB);
    CHECK(other.take(Resource::kAnswers, 1) == Refusal::kNone);
}

void sizes_that_overflow_are_refused() {
    const auto budget = budget_of();
    Account one(budget, Door::kGrpc);
    CHECK(one.take(Resource::kReceived, 1) == Refusal::kNone);
    for (const std::size_t size : {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX / 2}) CHECK(one.take(Resource::kReceived, size) == Refusal::kShare);
    CHECK(one.held(Resource::kReceived) == 1);
}

void a_connection_that_ends_returns_everything() {
    const auto budget = budget_of();
    {
        Account one(budget, Door::kGrpc);
        CHECK(one.take(Resource::kReceived, 5) == Refusal::kNone && one.take(Resource::kAnswers, 7) == Refusal::kNone);
        one.owe(Resource::kReceived, 900 * kKiB);  // more than all: it is there
        CHECK(budget->held(Resource::kReceived) == 900 * kKiB + 5);
        CHECK(one.take(Resource::kReceived, 1) == Refusal::kShare);
        one.give(Resource::kReceived, 3);
    }
    for (const Resource kind : {Resource::kReceived, Resource::kAnswers, Resource::kCalls}) CHECK(budget->held(kind) == 0);
}

void threads_share_it_exactly() {
    const auto budget = budget_of({{100, 100, 100}, {150, 150, 150}});
    std::atomic<std::size_t> above{0};
    std::vector<std::thread> threads;
    Account shared(budget, Door::kGrpc);
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
            Account own(budget, Door::kGrpc);
            for (int i = 0; i < 20'000; ++i) {
                Account& account = i % 2 ? own : shared;
                const std::size_t size = 1 + i % 60;
                if (account.take(Resource::kReceived, size) != Refusal::kNone) continue;
                if (budget->held(Resource::kReceived) > 150 || account.held(Resource::kReceived) > 200) above += 1;  // the second while others revert
                account.give(Resource::kReceived, size);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(above == 0 && budget->held(Resource::kReceived) == 0);
}

}  // namespace

int main() {
    a_connection_gets_its_share_and_no_more();
    all_connections_together_get_no_more_than_all();
    large_requests_leave_an_eighth_to_small_ones();
    one_answer_is_accepted_whatever_its_size();
    sizes_that_overflow_are_refused();
    a_connection_that_ends_returns_everything();
    threads_share_it_exactly();
    std::puts("budget: ok");
    return 0;
}
