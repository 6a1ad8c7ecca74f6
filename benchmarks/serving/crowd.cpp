// Many clients of the shm transport without an interpreter: each is a process that copies its row in, asks, and copies
// its outputs out, over and over. The lanes are leased by who starts it (crowd.py).
// usage: crowd SECONDS RINGS_FD PIPE_FD ARENA_FD INCARNATION IN_OFFSET IN_BYTES OUT_OFFSET,OUT_BYTES,... LANE:LEASE:ROW ...
// -> one JSON object: requests answered, CPU seconds of all clients
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "serving/shm_rings.hpp"

using namespace jurybox;

static std::byte* mapped(int fd) {
    struct stat about;
    if (fstat(fd, &about) != 0) std::exit(3);
    void* memory = mmap(nullptr, static_cast<std::size_t>(about.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) std::exit(3);
    return static_cast<std::byte*>(memory);
}

int main(int argc, char** argv) {
    if (argc < 10) return 2;
    const double seconds = std::atof(argv[1]);
    const int pipe = std::atoi(argv[3]);
    auto* rings = reinterpret_cast<ShmRingsMemory*>(mapped(std::atoi(argv[2])));
    std::byte* arena = mapped(std::atoi(argv[4]));
    const std::uint64_t incarnation = std::strtoull(argv[5], nullptr, 10);
    const std::size_t in = std::strtoull(argv[6], nullptr, 10), in_bytes = std::strtoull(argv[7], nullptr, 10);
    std::vector<std::pair<std::size_t, std::size_t>> outputs;
    for (char* at = argv[8]; *at != '\0';) {
        const std::size_t offset = std::strtoull(at, &at, 10), bytes = std::strtoull(at + 1, &at, 10);
        outputs.emplace_back(offset, bytes);
        if (*at == ',') ++at;
    }
    const std::size_t clients = static_cast<std::size_t>(argc - 9);
    auto* answered = static_cast<std::uint64_t*>(mmap(nullptr, 64 * clients, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const std::int64_t begin = monotonic_ns() + 300'000'000, end = begin + static_cast<std::int64_t>(seconds * 1e9);
    for (std::size_t c = 0; c < clients; ++c) {
        if (fork() != 0) continue;
        char* at = argv[9 + c];
        const auto lane = static_cast<std::uint32_t>(std::strtoull(at, &at, 10));
        const std::uint64_t lease = std::strtoull(at + 1, &at, 10);
        const auto row = static_cast<std::uint32_t>(std::strtoull(at + 1, &at, 10));
        ShmRingsClient client(rings, lane, lease, pipe, 100'000);
        std::vector<std::byte> given(in_bytes), taken(1 << 16);
        for (std::uint64_t sequence = (lease << 32) + 1;; ++sequence) {
            const std::int64_t now = monotonic_ns();
            if (now > end) break;
            std::memcpy(arena + in + row * in_bytes, given.data(), in_bytes);
            Answer answer;
            if (!client.submit(Ticket{sequence, 0, now + 10'000'000'000, now, 0, row, 1, 0, 0, {incarnation}})) std::_Exit(4);
            if (!client.answer_to(sequence, 10'000'000'000, answer) || answer.code != 0) std::_Exit(5);
            for (const auto& [offset, bytes] : outputs) std::memcpy(taken.data(), arena + offset + row * bytes, bytes);
            answered[8 * c] += now >= begin;
        }
        std::_Exit(0);
    }
    bool good = true;
    for (int status; wait(&status) > 0;) good &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::uint64_t total = 0;
    for (std::size_t c = 0; c < clients; ++c) total += answered[8 * c];
    rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    const double cpu = static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    std::printf("{\"answered\": %llu, \"cpu\": %.4f}\n", static_cast<unsigned long long>(total), cpu);
    return good ? 0 : 1;
}
