// The shm transport of an engine: tickets and answers in shared memory, with wake-ups only for sleepers.
//
// Each engine has one segment. Every lane has a ring of tickets (its client writes, the engine reads) and a ring of
// answers (the engine writes, its client reads), so each ring has one writer and one reader, and a killed client leaves
// nothing half-done in them. A client that posts a ticket sets its lane's bit; the engine collects tickets from the lanes
// whose bits are set.
//
// A sleeper first announces that it sleeps and then checks once more for work; a producer first publishes its work and
// then checks for an announcement. Both pairs of operations are sequentially consistent, so at least one side sees the
// other. A client that is killed between the announcement, which it clears, and the system call that wakes the engine
// leaves the engine asleep, with the tickets of all clients, until its wait times out.
//
// Thirty-two lanes share the word on which their clients sleep, so that one system call wakes a batch's clients. With a
// call for each client, the first one would take the core before the second is awake.
#pragma once
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "common/wait.hpp"
#include "serving/tickets.hpp"

namespace jurybox {

constexpr std::uint32_t kShmRingsLanes = 2048;
constexpr std::uint32_t kRing = 32;  // tickets in flight on one lane; a power of two
constexpr std::size_t kMessage = 256;
constexpr std::uint32_t kWords = kShmRingsLanes / 64;  // of lanes with tickets, a bit per lane
constexpr std::uint32_t kSleepers = 32;  // lanes per word: the bits of FUTEX_WAKE_BITSET

struct Answer {
    std::uint64_t sequence;
    std::uint64_t version;
    std::uint32_t code;
    std::uint32_t alone;  // 1: no other client sent tickets recently
    std::uint64_t lease;
};
static_assert(sizeof(Answer) == 32);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Positions only grow and wrap at 2^32; a ring holds the elements between its two positions.
struct LaneRings {
    alignas(64) std::atomic<std::uint32_t> submitted;  // client
    alignas(64) std::atomic<std::uint32_t> taken;      // engine
    alignas(64) std::atomic<std::uint32_t> answered;   // engine
    alignas(64) std::atomic<std::uint32_t> received;   // client
    std::atomic<std::uint32_t> waiting;                // client: it sleeps, or is about to; the engine clears it
    alignas(64) Ticket tickets[kRing];
    Answer answers[kRing];
    char messages[kRing][kMessage];  // of each failure among the answers
};

struct ShmRingsMemory {
    // Engine: it sleeps, or is about to, until this many more tickets are posted; clients count it down. 0: it is awake.
    alignas(64) std::atomic<std::uint32_t> sleeping;
    alignas(64) std::atomic<std::uint64_t> summary;   // bit w: word w of `pending` has bits
    alignas(64) std::atomic<std::uint64_t> pending[kWords];
    struct SleepWord {
        alignas(64) Futex moved;  // engine: changes with every wake-up; clients sleep on it
    } sleep_words[kShmRingsLanes / kSleepers];
    LaneRings lanes[kShmRingsLanes];
};
static_assert(kWords < 64 && kShmRingsLanes / kSleepers <= 64);

// Return whether this was the last ticket that a sleeping engine waits for.
inline bool count_down(std::atomic<std::uint32_t>& sleeping) {
    std::uint32_t left = sleeping.load(std::memory_order_seq_cst);
    while (left && !sleeping.compare_exchange_weak(left, left - 1, std::memory_order_seq_cst)) {
    }
    return left == 1;
}

// The number of bytes, at most `room`, to which a UTF-8 text can be cut without splitting a character.
inline std::size_t whole_characters(const char* text, std::size_t length, std::size_t room) {
    if (length <= room) return length;
    std::size_t bytes = room;
    while (bytes && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) --bytes;
    return bytes;
}

// The same as ENGINE in scoreboard.py. Only the incarnation, the state and the expected wait are read here.
struct EngineRecord {
    std::uint64_t incarnation;
    std::int64_t heartbeat, expected_wait;
    std::uint32_t state, pid;
    std::uint64_t restarts, device_bytes, rings;
    std::uint32_t computing, pad;

    // Set the state; called by the engine. A reader of the new state (acquire) also sees the engine's earlier writes.
    void show(std::uint32_t now) { reinterpret_cast<std::atomic<std::uint32_t>*>(&state)->store(now, std::memory_order_release); }

    std::int64_t wait() const { return reinterpret_cast<const std::atomic<std::int64_t>*>(&expected_wait)->load(std::memory_order_relaxed); }

    bool serves(std::uint64_t in_incarnation) const {
        constexpr std::uint32_t kServing = 2;
        return reinterpret_cast<const std::atomic<std::uint64_t>*>(&incarnation)->load(std::memory_order_acquire) == in_incarnation &&
               reinterpret_cast<const std::atomic<std::uint32_t>*>(&state)->load(std::memory_order_acquire) == kServing;
    }
};
static_assert(sizeof(EngineRecord) == 64);

// The result of a call without an answer's code.
constexpr int kNotSent = -1;
constexpr int kNotAnswered = -2;
constexpr int kNotFit = -3;

// Any process of the user can write to this memory. So each side keeps its own copy of the positions that it writes, and
// checks those of the other side: two positions are at most a ring apart.
inline bool possible(std::uint32_t from, std::uint32_t to) { return to - from <= kRing; }

// The engine's side of a new ring segment, in which all positions are zero.
class ShmRingsEngine {
  public:
    ShmRingsEngine(ShmRingsMemory* memory, std::uint64_t incarnation, std::int64_t spin_ns)
        : memory_(memory),
          incarnation_(incarnation),
          taken_(kShmRingsLanes),
          answered_(kShmRingsLanes),
          spin_(spin_ns),
          lone_spin_(kLoneSpin * spin_ns),
          pause_spin_(spin_ns) {}

    // Restore positions of the engine that were overwritten, and set the bits of lanes with tickets. Return the number of
    // lanes that were overwritten. Tickets in their rings may be lost: after `renew` their clients send them again.
    std::size_t mend() {
        std::size_t overwritten = 0;
        for (std::uint32_t number = 0; number < kShmRingsLanes; ++number) {
            LaneRings& lane = memory_->lanes[number];
            if (lane.taken.load(std::memory_order_relaxed) != taken_[number] ||
                lane.answered.load(std::memory_order_relaxed) != answered_[number]) {
                lane.taken.store(taken_[number], std::memory_order_relaxed);
                lane.answered.store(answered_[number], std::memory_order_release);
                ++overwritten;
            }
            const std::uint32_t submitted = lane.submitted.load(std::memory_order_acquire);
            if (submitted == taken_[number] || !possible(taken_[number], submitted)) continue;
            memory_->pending[number / 64].fetch_or(std::uint64_t{1} << number % 64, std::memory_order_seq_cst);
            memory_->summary.fetch_or(std::uint64_t{1} << number / 64, std::memory_order_seq_cst);
        }
        return overwritten;
    }

    // Begin another incarnation in the same memory: tickets for the previous one are dropped.
    void renew(std::uint64_t incarnation) { incarnation_ = incarnation; }

    // Collect at most `room` posted tickets; the others stay in their rings.
    std::size_t collect(Ticket* out, std::size_t room) {
        std::size_t n = 0;
        std::uint64_t words = memory_->summary.load(std::memory_order_seq_cst);
        if (words == 0) return 0;
        words = memory_->summary.exchange(0, std::memory_order_seq_cst) & kAllWords;
        // Begin after the lane that was served last, so that lanes take turns if they do not all fit into one batch. The
        // earlier lanes of its word come at the end.
        const std::uint32_t start = next_ / 64;
        const std::uint64_t earlier = (std::uint64_t{1} << next_ % 64) - 1;
        std::uint64_t last = 0;
        for (std::uint32_t k = 0; k <= kWords; ++k) {
            const std::uint32_t w = (start + k) % kWords;
            if (!(words >> w & 1)) continue;
            std::uint64_t bits = k < kWords ? memory_->pending[w].exchange(0, std::memory_order_seq_cst) : std::exchange(last, 0);
            if (k == 0) last = bits & earlier, bits &= ~earlier;
            while (bits) {
                const std::uint32_t lane = w * 64 + static_cast<std::uint32_t>(__builtin_ctzll(bits));
                const bool visited = n < room;
                if (!visited || !drain(lane, out, room, n)) {
                    memory_->pending[w].fetch_or(bits, std::memory_order_seq_cst);
                    if (last) memory_->pending[start].fetch_or(last, std::memory_order_seq_cst);
                    memory_->summary.fetch_or(words, std::memory_order_seq_cst);
                    next_ = (lane + visited) % kShmRingsLanes;
                    return n;
                }
                bits &= bits - 1;
            }
            if (k > 0 || last == 0) words &= ~(std::uint64_t{1} << w);
        }
        return n;
    }

    // Answer tickets; return the number of answers dropped because their client does not read its ring.
    std::size_t reply(const Ticket* tickets, std::size_t n, std::uint32_t code, std::uint64_t version,
                      const char* message, std::size_t length) {
        std::size_t dropped = 0;
        const std::uint32_t alone = same_lane_ >= kAlone;
        for (std::size_t i = 0; i < n; ++i) {
            if (tickets[i].lane >= kShmRingsLanes) continue;
            LaneRings& lane = memory_->lanes[tickets[i].lane];
            const std::uint32_t at = answered_[tickets[i].lane];
            if (at - lane.received.load(std::memory_order_acquire) == kRing) {
                ++dropped;
                continue;
            }
            if (code != kOk) {
                const std::size_t bytes = whole_characters(message, length, kMessage - 1);
                char* const text = lane.messages[at % kRing];
                std::memcpy(text, message, bytes);
                text[bytes] = '\0';
            }
            lane.answers[at % kRing] = Answer{tickets[i].sequence, version, code, alone, tickets[i].lease};
            lane.answered.store(answered_[tickets[i].lane] = at + 1, std::memory_order_seq_cst);
        }
        // One call wakes a word's clients, in whatever order their tickets were collected.
        std::uint32_t sleepers[kShmRingsLanes / kSleepers];
        std::uint64_t words = 0;  // those with sleepers
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t number = tickets[i].lane;
            if (number >= kShmRingsLanes) continue;
            LaneRings& lane = memory_->lanes[number];
            if (!lane.waiting.load(std::memory_order_seq_cst) || !lane.waiting.exchange(0, std::memory_order_seq_cst))
                continue;
            const std::uint32_t word = number / kSleepers;
            if (!(words >> word & 1)) sleepers[word] = 0;
            words |= std::uint64_t{1} << word;
            sleepers[word] |= std::uint32_t{1} << number % kSleepers;
        }
        for (; words; words &= words - 1) {
            const auto word = static_cast<std::uint32_t>(__builtin_ctzll(words));
            wake(word, sleepers[word]);
        }
        return dropped;
    }

    // Wait until a ticket is posted or one of the descriptors is readable. Return true if there may be tickets: one was
    // posted, or `fds[1]`, another source of tickets, is the only readable descriptor besides `fds[0]`. `fds[0]` is the
    // pipe to which clients write to wake a sleeping engine. The engine spins only for postings: messages through a
    // descriptor come from threads or processes that need the core. A lone client, such as one behind a gateway, leaves a
    // core free for a longer spin; after a sleep the same forward takes twice as long on a cold core.
    bool wait(pollfd* fds, std::size_t n_fds, std::int64_t timeout_ns) {
        const auto posted = [this] { return memory_->summary.load(std::memory_order_seq_cst) != 0; };
        if (posted()) return true;
        int turns = 0;
        Spin& spin = same_lane_ >= kAlone ? lone_spin_ : spin_;
        const std::int64_t budget = spin.budget(timeout_ns);
        bool other = false;
        const bool found = spin_until(budget, [&] {
            if (posted()) return true;
            if (n_fds > 1 && ++turns % 64 == 0) other = ::poll(fds + 1, n_fds - 1, 0) > 0;
            return other;
        });
        spin.ended(found && !other, budget);
        if (!found) {
            memory_->sleeping.store(1, std::memory_order_seq_cst);
            if (!posted()) {
                sleep(fds, n_fds, timeout_ns);
                other = true;
            }
            memory_->sleeping.store(0, std::memory_order_seq_cst);
        }
        return posted() || (other && tickets_only(fds, n_fds));
    }

    // Wait until `tickets` lanes have tickets or the time-out has passed. The wait is short as a rule, and a sleep of that
    // length costs as much as it lasts, so the engine first spins; a longer wait leaves the core to the clients.
    void pause(pollfd* pipe, std::int64_t timeout_ns, std::uint32_t tickets) {
        const std::int64_t until = monotonic_ns() + timeout_ns, budget = pause_spin_.budget(timeout_ns);
        const bool found = spin_until(budget, [&] { return lanes_posted() >= tickets; });
        if (found || budget < timeout_ns) pause_spin_.ended(found, budget);  // else no sleep follows, which it would have saved
        const std::int64_t left = until - monotonic_ns();
        if (found || left <= 0) return;
        memory_->sleeping.store(tickets, std::memory_order_seq_cst);
        // Count earlier postings; one that is being made may count twice, which only ends the pause early.
        for (std::uint32_t came = lanes_posted(); came; --came) count_down(memory_->sleeping);
        if (memory_->sleeping.load(std::memory_order_seq_cst)) sleep(pipe, 1, left);
        memory_->sleeping.store(0, std::memory_order_seq_cst);
    }

  private:
    static bool tickets_only(const pollfd* fds, std::size_t n_fds) {
        for (std::size_t i = 2; i < n_fds; ++i)
            if (fds[i].revents != 0) return false;
        return n_fds > 1 && fds[1].revents != 0;
    }

    void sleep(pollfd* fds, std::size_t n_fds, std::int64_t timeout_ns) {
        const timespec timeout = timespec_of(timeout_ns);
        if (::ppoll(fds, n_fds, &timeout, nullptr) < 0)  // a signal arrived, and `revents` is not set
            for (std::size_t i = 0; i < n_fds; ++i) fds[i].revents = 0;
        char bytes[64];  // their values have no meaning
        while (::read(fds[0].fd, bytes, sizeof bytes) == static_cast<ssize_t>(sizeof bytes)) {
        }
    }

    std::uint32_t lanes_posted() const {
        std::uint32_t n = 0;
        for (std::uint64_t words = memory_->summary.load(std::memory_order_seq_cst) & kAllWords; words; words &= words - 1)
            n += __builtin_popcountll(memory_->pending[__builtin_ctzll(words)].load(std::memory_order_seq_cst));
        return n;
    }

    void wake(std::uint32_t word, std::uint32_t sleepers) {
        auto& moved = memory_->sleep_words[word].moved;
        moved.fetch_add(1, std::memory_order_seq_cst);  // for clients that have announced to sleep and do not sleep yet
        futex_wake(moved, sleepers);
    }

    // Move one lane's tickets to `out`; return false if there is no room for all of them.
    bool drain(std::uint32_t number, Ticket* out, std::size_t room, std::size_t& n) {
        LaneRings& lane = memory_->lanes[number];
        std::uint32_t at = taken_[number];
        const std::uint32_t end = lane.submitted.load(std::memory_order_acquire);
        if (!possible(at, end)) return true;  // invalid; the client's next ticket overwrites it
        bool alone = number == last_lane_;
        for (; at != end && n < room; ++at) {
            out[n] = lane.tickets[at % kRing];
            alone &= out[n].rows == last_rows_;
            last_rows_ = out[n].rows;
            out[n].lane = number;  // a client may send tickets only for its own lane
            // Drop tickets for an earlier incarnation: their clients see the new one on the scoreboard and send them again.
            n += out[n].incarnation == incarnation_;
        }
        lane.taken.store(taken_[number] = at, std::memory_order_release);
        same_lane_ = alone ? same_lane_ + 1 : 0;
        last_lane_ = number;
        return at == end;
    }

    // Consecutive visits to one lane whose tickets have the same number of rows: a gateway with several clients varies it.
    static constexpr std::uint64_t kAlone = 16;
    static constexpr std::int64_t kLoneSpin = 10;    // times the spin for many clients
    static constexpr std::uint64_t kAllWords = (std::uint64_t{1} << kWords) - 1;  // others may set further bits of the summary
    ShmRingsMemory* memory_;
    std::uint64_t incarnation_;
    std::vector<std::uint32_t> taken_, answered_;
    Spin spin_;
    Spin lone_spin_;
    Spin pause_spin_;
    std::uint32_t last_lane_ = kShmRingsLanes, last_rows_ = 0;
    std::uint64_t same_lane_ = 0;
    std::uint32_t next_ = 0;  // the lane at which `collect` begins
};

// The client's side: one lane of one engine's rings. It belongs to one thread at a time; other threads may call `wait`,
// `watch` and `in_flight` meanwhile, for example one that watches on behalf of an event loop.
class ShmRingsClient {
  public:
    // `wake` is the writing end of the engine's pipe. Answers to an earlier holder of the lane are skipped.
    ShmRingsClient(ShmRingsMemory* memory, std::uint32_t lane, std::uint64_t lease, int wake, std::int64_t spin_ns)
        : memory_(memory), lane_(memory->lanes[lane]), number_(lane), lease_(lease), wake_(wake), spin_(spin_ns), lone_spin_(kLone * spin_ns) {
        const std::uint32_t answered = lane_.answered.load(std::memory_order_acquire);
        lane_.received.store(answered, std::memory_order_release);
        received_.store(answered, std::memory_order_relaxed);
        // Tickets of an earlier holder may still be in the ring.
        const std::uint32_t taken = lane_.taken.load(std::memory_order_acquire);
        submitted_ = lane_.submitted.load(std::memory_order_relaxed);
        if (!possible(taken, submitted_)) submitted_ = taken;
    }

    // Post a ticket; return false if the ring's number of tickets is in flight.
    bool submit(Ticket ticket) {
        const std::uint32_t at = submitted_, in_flight = in_flight_.load(std::memory_order_relaxed);
        if (in_flight >= kRing || at - lane_.taken.load(std::memory_order_acquire) == kRing) return false;
        ticket.lease = lease_;
        ticket.lane = number_;
        lane_.tickets[at % kRing] = ticket;
        lane_.submitted.store(submitted_ = at + 1, std::memory_order_release);
        unanswered_[in_flight] = ticket.sequence;
        in_flight_.store(in_flight + 1, std::memory_order_relaxed);
        memory_->pending[number_ / 64].fetch_or(std::uint64_t{1} << number_ % 64, std::memory_order_seq_cst);
        memory_->summary.fetch_or(std::uint64_t{1} << number_ / 64, std::memory_order_seq_cst);
        if (count_down(memory_->sleeping)) {
            const char byte = 1;
            // A full pipe wakes the engine, too. The scoreboard shows if the engine is gone.
            [[maybe_unused]] const ssize_t written = ::write(wake_, &byte, 1);
        }
        return true;
    }

    // Wait at most `timeout_ns` for answers; return whether there are any.
    bool wait(std::int64_t timeout_ns) {
        const std::uint32_t seen = received_.load(std::memory_order_acquire);
        const auto came = [&] { return lane_.answered.load(std::memory_order_acquire) != seen; };
        if (came()) return true;
        Spin& spin = alone_.load(std::memory_order_relaxed) ? lone_spin_ : spin_;
        const std::int64_t budget = spin.budget(timeout_ns);
        const bool found = spin_until(budget, came);
        spin.ended(found, budget);
        if (found) return true;
        const std::int64_t until = monotonic_ns() + timeout_ns;
        auto& moved = memory_->sleep_words[number_ / kSleepers].moved;
        while (!came()) {
            const std::uint32_t before = moved.load(std::memory_order_seq_cst);
            lane_.waiting.store(1, std::memory_order_seq_cst);
            if (lane_.answered.load(std::memory_order_seq_cst) != seen) break;
            // Returns at once if the word has changed meanwhile, also for other clients. After a signal the caller gets
            // control.
            const int why = futex_wait(moved, before, until, std::uint32_t{1} << number_ % kSleepers);
            if (why == EINTR || why == ETIMEDOUT) break;
        }
        // `waiting` stays set, since another thread may still sleep here. Otherwise it costs the engine one wake-up.
        return came();
    }

    // Watch on behalf of an event loop, in a thread that may sleep: for `timeout_ns`, add one to the eventfd whenever
    // answers have arrived that were not received. Each call keeps its own record of what it reported, so any number of
    // threads may watch, and a new one reports answers that are there already. While watching is off, it only sleeps.
    void watch(int eventfd, std::int64_t timeout_ns) const {
        const std::int64_t until = monotonic_ns() + timeout_ns;
        auto& moved = memory_->sleep_words[number_ / kSleepers].moved;
        std::uint32_t known = received_.load(std::memory_order_acquire);
        do {
            if (!watched_.load(std::memory_order_seq_cst)) {
                futex_wait(watched_, 0, until);
                continue;
            }
            const std::uint32_t before = moved.load(std::memory_order_seq_cst);
            lane_.waiting.store(1, std::memory_order_seq_cst);
            const std::uint32_t answered = lane_.answered.load(std::memory_order_seq_cst);
            if (answered == known) {
                futex_wait(moved, before, until, std::uint32_t{1} << number_ % kSleepers);
                continue;
            }
            known = answered;
            if (received_.load(std::memory_order_acquire) == answered) continue;
            const std::uint64_t one = 1;
            [[maybe_unused]] const ssize_t written = ::write(eventfd, &one, sizeof one);  // a full one is readable, too
        } while (monotonic_ns() < until);
    }

    // Turn watching off while the owner itself waits for the answer. Turned on, it reports all answers not yet received.
    void set_watched(bool on) {
        if (watched_.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(on)) return;
        watched_.store(on, std::memory_order_seq_cst);
        if (on) futex_wake(watched_);
    }

    // Make the next answer wake this lane's ShmRingsWord, for an owner that sleeps elsewhere. Return whether there is one.
    bool arm() {
        const std::uint32_t seen = received_.load(std::memory_order_relaxed);
        if (lane_.answered.load(std::memory_order_acquire) != seen) return true;
        lane_.waiting.store(1, std::memory_order_seq_cst);
        return lane_.answered.load(std::memory_order_seq_cst) != seen;
    }

    // Wait without sleeping, and only if no other client uses this engine; return whether there are answers.
    bool spin() {
        const std::uint32_t seen = received_.load(std::memory_order_relaxed);
        const auto came = [&] { return lane_.answered.load(std::memory_order_acquire) != seen; };
        if (came() || !alone_.load(std::memory_order_relaxed)) return came();
        const std::int64_t budget = lone_spin_.budget(INT64_MAX);
        const bool found = spin_until(budget, came);
        lone_spin_.ended(found, budget);
        return found;
    }

    // Receive at most `room` answers of this lease that have arrived. `message` is that of the last failure among them.
    std::size_t receive(Answer* out, std::size_t room) {
        std::uint32_t at = received_.load(std::memory_order_relaxed), in_flight = in_flight_.load(std::memory_order_relaxed);
        const std::uint32_t end = lane_.answered.load(std::memory_order_acquire);
        if (!possible(at, end)) at = end - kRing;  // invalid or overrun; repeated answers are recognised by their numbers
        std::size_t n = 0;
        for (; at != end && n < room; ++at) {
            const Answer& answer = lane_.answers[at % kRing];
            if (answer.lease != lease_) continue;
            out[n++] = answer;
            if (answer.code != kOk) std::memcpy(message_, lane_.messages[at % kRing], kMessage - 1);
            alone_.store(answer.alone, std::memory_order_relaxed);
            for (std::uint32_t i = 0; i < in_flight; ++i) {
                if (unanswered_[i] != answer.sequence) continue;
                unanswered_[i] = unanswered_[--in_flight];
                break;
            }
        }
        in_flight_.store(in_flight, std::memory_order_relaxed);
        lane_.received.store(at, std::memory_order_release);
        received_.store(at, std::memory_order_release);
        return n;
    }

    // Peek at the answer of this lease that `receive` would return first; return false if there is none.
    bool next(Answer& out) const {
        std::uint32_t at = received_.load(std::memory_order_relaxed);
        const std::uint32_t end = lane_.answered.load(std::memory_order_acquire);
        if (!possible(at, end)) at = end - kRing;
        for (; at != end; ++at) {
            out = lane_.answers[at % kRing];
            if (out.lease == lease_) return true;
        }
        return false;
    }

    // Wait at most `ns` for the answer to a ticket, and pass others that arrive before it to `other`. Return false if it has
    // not arrived.
    template <class Other>
    bool answer_to(std::uint64_t sequence, std::int64_t ns, Answer& answer, Other other) {
        const std::int64_t until = monotonic_ns() + ns;
        for (std::int64_t left = ns; left > 0 && wait(left) && receive(&answer, 1) == 1; left = until - monotonic_ns()) {
            if (answer.sequence == sequence) return true;
            other(answer);
        }
        return false;
    }

    // Return whether a ticket was posted and its answer was not received.
    bool holds(std::uint64_t sequence) const {
        for (std::uint32_t i = 0; i < in_flight_.load(std::memory_order_relaxed); ++i) {
            if (unanswered_[i] == sequence) return true;
        }
        return false;
    }

    std::uint32_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }

    // The message of the last failure received.
    const char* message() const { return message_; }

  private:
    ShmRingsMemory* memory_;
    LaneRings& lane_;
    std::uint32_t number_;
    std::uint64_t lease_;
    int wake_;
    // A batch of one row takes longer than a row's share of a full one, and no other client needs the core meanwhile.
    static constexpr std::int64_t kLone = 3;
    std::uint32_t submitted_;
    std::uint64_t unanswered_[kRing];  // sequences of tickets in flight
    char message_[kMessage] = {};      // its last byte stays 0, whatever another process writes to the ring
    // Written by the owner's thread, read by others.
    std::atomic<std::uint32_t> in_flight_{0}, received_;
    std::atomic<bool> alone_{false};
    Futex watched_{1};
    Spin spin_;
    Spin lone_spin_;
};

// For a process with many lanes that does not sleep on their rings: one thread watches the word that 32 of them share.
// Any thread may add and remove lanes.
class ShmRingsWord {
  public:
    ShmRingsWord(ShmRingsMemory* memory, std::uint32_t lane)
        : moved_(memory->sleep_words[lane / kSleepers].moved), seen_(moved_.load(std::memory_order_seq_cst)) {}

    void add(std::uint32_t lane) {
        lanes_.fetch_or(bit(lane), std::memory_order_seq_cst);
        wake();  // so that the thread sleeps for this lane, too
    }
    // Return the number of lanes that are left.
    int remove(std::uint32_t lane) {
        const std::uint32_t left = lanes_.fetch_and(~bit(lane), std::memory_order_seq_cst) & ~bit(lane);
        wake();
        return __builtin_popcount(left);
    }
    // Exclude a lane whose client sleeps on the word itself, until it is added again. The thread may report one more answer.
    void pause(std::uint32_t lane) { lanes_.fetch_and(~bit(lane), std::memory_order_seq_cst); }

    // For `timeout_ns`, add one to the eventfd whenever the lanes' clients may have been woken.
    void watch(int eventfd, std::int64_t timeout_ns) {
        const std::int64_t until = monotonic_ns() + timeout_ns;
        do {
            const std::uint32_t lanes = lanes_.load(std::memory_order_seq_cst);
            if (lanes == 0)
                futex_wait(lanes_, 0, until);
            else if (moved_.load(std::memory_order_seq_cst) == seen_)
                futex_wait(moved_, seen_, until, lanes);
            const std::uint32_t now = moved_.load(std::memory_order_seq_cst);
            if (now == seen_) continue;
            seen_ = now;
            if (lanes_.load(std::memory_order_seq_cst) == 0) continue;  // no lane is added
            const std::uint64_t one = 1;
            [[maybe_unused]] const ssize_t written = ::write(eventfd, &one, sizeof one);  // a full one is readable, too
        } while (monotonic_ns() < until);
    }

  private:
    static std::uint32_t bit(std::uint32_t lane) { return std::uint32_t{1} << lane % kSleepers; }
    void wake() {
        moved_.fetch_add(1, std::memory_order_seq_cst);
        futex_wake(moved_);
        futex_wake(lanes_);
    }
    Futex& moved_;
    Futex lanes_{0};  // a thread without lanes sleeps on it
    std::uint32_t seen_;
};

}  // namespace jurybox
