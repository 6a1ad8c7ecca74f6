// What the machine takes to hand out memory and to write and read a file; seconds, as one JSON object.
// usage: storage SHARED_FOLDER DISK_FOLDER MEMORY_BYTES FILE_BYTES
// "touch": a new file in SHARED_FOLDER, every page of it written once by two threads (allocated, zeroed, mapped);
// "again": the same pages once more. "write": random bytes into DISK_FOLDER with fsync; "read": the same, cold.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 8 << 20 };
static char *memory;
static size_t size;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *touch(void *half) {
    memset(memory + (half ? size / 2 : 0), 1, size / 2);
    return NULL;
}

static double touched(void) {
    const double begin = now();
    pthread_t other;
    pthread_create(&other, NULL, touch, &size);
    touch(NULL);
    pthread_join(other, NULL);
    return now() - begin;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    size = strtoull(argv[3], NULL, 10) / 2 * 2;
    // The first round is not told: memory that this machine has never used before has to be had from its host first.
    double first = 0, again = 0;
    for (int round = 0; round < 2; ++round) {
        int shared = open(argv[1], O_TMPFILE | O_RDWR, 0600);
        if (shared < 0 || ftruncate(shared, (off_t)size) != 0) return 1;
        memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
        if (memory == MAP_FAILED) return 1;
        first = touched(), again = touched();
        munmap(memory, size);
        close(shared);
    }

    const size_t length = (strtoull(argv[4], NULL, 10) + BLOCK - 1) / BLOCK * BLOCK;
    int file = open(argv[2], O_TMPFILE | O_RDWR, 0600);
    uint64_t *block = malloc(BLOCK), random = 88172645463325252ULL;
    for (size_t i = 0; i < BLOCK / 8; ++i) block[i] = (random ^= random << 13, random ^= random >> 7, random ^= random << 17);
    double begin = now();
    for (size_t at = 0; at < length; at += BLOCK)
        if (pwrite(file, block, BLOCK, (off_t)at) != BLOCK) return 1;
    if (fsync(file) != 0) return 1;
    const double written = now() - begin;
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    begin = now();
    for (size_t at = 0; at < length; at += BLOCK)
        if (pread(file, block, BLOCK, (off_t)at) != BLOCK) return 1;
    printf("{\"touch\": %.4f, \"again\": %.4f, \"write\": %.4f, \"read\": %.4f}\n", first, again, written, now() - begin);
    return 0;
}
