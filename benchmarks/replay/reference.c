// What the memory carries: rows copied into a ring, and rows gathered from it at random, by one thread and by two.
// usage: reference ROW_BYTES CAPACITY SECONDS wall|cpu -> one JSON object, rows/s (cpu: a CPU second)
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 256 };
static size_t row, capacity;
static char *ring;
static double seconds;
static clockid_t measured = CLOCK_MONOTONIC;

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct job {
    int gather, number, threads;
    double rows_per_second;
};

static void *work(void *argument) {
    struct job *job = argument;
    char *batch = malloc(BATCH * row);
    memset(batch, 1, BATCH * row);
    uint64_t random = 88172645463325252ULL + (uint64_t)job->number * 7919, done = 0;
    size_t at = capacity / (size_t)job->threads * (size_t)job->number;
    const double begin = now(measured), until = now(CLOCK_MONOTONIC) + seconds;
    do {
        for (size_t i = 0; i < BATCH; ++i) {
            if (job->gather) {
                random ^= random << 13, random ^= random >> 7, random ^= random << 17;
                memcpy(batch + i * row, ring + (size_t)(((unsigned __int128)random * capacity) >> 64) * row, row);
            } else {
                memcpy(ring + at * row, batch + i * row, row);
                if (++at == capacity) at = 0;
            }
        }
        done += BATCH;
    } while (now(CLOCK_MONOTONIC) < until);
    job->rows_per_second = (double)done / (now(measured) - begin);
    free(batch);
    return NULL;
}

static double run(int gather, int threads) {
    pthread_t thread[8];
    struct job job[8];
    double total = 0;
    for (int i = 0; i < threads; ++i) {
        job[i] = (struct job){gather, i, threads, 0};
        pthread_create(&thread[i], NULL, work, &job[i]);
    }
    for (int i = 0; i < threads; ++i) {
        pthread_join(thread[i], NULL);
        total += job[i].rows_per_second;
    }
    return measured == CLOCK_MONOTONIC ? total : total / threads;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    if (strcmp(argv[4], "cpu") == 0) measured = CLOCK_THREAD_CPUTIME_ID;
    row = strtoull(argv[1], NULL, 10), capacity = strtoull(argv[2], NULL, 10), seconds = atof(argv[3]);
    ring = malloc(row * capacity);
    memset(ring, 1, row * capacity);
    printf("{\"add_1_thread\": %.0f, ", run(0, 1));
    printf("\"add_2_threads\": %.0f, ", run(0, 2));
    printf("\"gather_1_thread\": %.0f, ", run(1, 1));
    printf("\"gather_2_threads\": %.0f}\n", run(1, 2));
    return 0;
}
