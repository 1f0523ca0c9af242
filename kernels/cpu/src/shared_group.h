// Ranks of one host that share pages: each writes its part into its own slot, says so, and waits until all have.
//
// Slots come in two sets, used in turn, so one wait a round is enough: who has arrived at round n + 1 has read all of round
// n, and nobody writes a slot of round n + 2, which is that of round n, before all have arrived at n + 1.
// Parts are added in the order of the ranks, so every rank gets the same bits, whoever came first.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#include "pool.h"
#include "simd.h"

namespace pagedray {

// What a rank knows of its group; Python owns it. The pages: a line of 64 bytes with the abort flag, one for each rank's
// round, and from the next page on the slots.
struct SharedGroup {
    char* pages;
    int64_t slot_bytes;
    int32_t rank, size;
    uint64_t round;    // rounds this rank has arrived at
    double timeout;    // seconds that a wait may take

    static constexpr int64_t LINE = 64, PAGE = 4096;
    static int64_t header_bytes(int64_t size) { return ((size + 1) * LINE + PAGE - 1) / PAGE * PAGE; }

    std::atomic<int32_t>& aborted() { return *reinterpret_cast<std::atomic<int32_t>*>(pages); }
    std::atomic<uint64_t>& arrived(int32_t r) { return *reinterpret_cast<std::atomic<uint64_t>*>(pages + (r + 1) * LINE); }
    float* slot(int32_t r, uint64_t of_round) {
        return reinterpret_cast<float*>(pages + header_bytes(size) + ((of_round & 1) * size + r) * slot_bytes);
    }
    float* next_slot() { return slot(rank, round + 1); }  // where this rank's next part goes

    // Returns 0; ABORTED; or 1 + a rank that did not come in time.
    static constexpr int32_t ABORTED = -1;
    int32_t arrive_and_wait();
    // The sum of all parts, [rows, hidden], rounded to T. Every rank has written its part to `next_slot`.
    template <class T>
    int32_t reduce(T* out, int64_t rows, int64_t hidden, int threads);
};

inline double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

inline int32_t SharedGroup::arrive_and_wait() {
    constexpr int SPINS = 1000;            // tens of microseconds: ranks in step meet within them
    constexpr double YIELDING = 0.02;      // seconds; a peer that is further behind has more than a time slice to go
    round++;
    arrived(rank).store(round, std::memory_order_release);
    double began = 0.0;
    for (int32_t r = 0; r < size; r++) {
        for (int64_t tries = 0; arrived(r).load(std::memory_order_acquire) < round; tries++) {
            if (tries < SPINS) {
                relax();
                continue;
            }
            if (aborted().load(std::memory_order_relaxed)) return ABORTED;
            const double now = seconds();
            if (began == 0.0) began = now;
            if (now - began > timeout) return 1 + r;
            if (now - began < YIELDING) {
                sched_yield();
            } else {
                const timespec pause{0, 50'000};
                nanosleep(&pause, nullptr);
            }
        }
    }
    return aborted().load(std::memory_order_relaxed) ? ABORTED : 0;
}

template <class T>
int32_t SharedGroup::reduce(T* out, int64_t rows, int64_t hidden, int threads) {
    if (const int32_t status = arrive_and_wait()) return status;
    parallel_for(rows, 32768 / hidden + 1, threads, [&](int64_t row) {
        for_each_vector(hidden, [&](int64_t j, auto get, auto put) {
            vfloat sum = get(slot(0, round) + row * hidden + j);
            for (int32_t r = 1; r < size; r++) sum += get(slot(r, round) + row * hidden + j);
            put(out + row * hidden + j, sum);
        });
    });
    return 0;
}

}  // namespace pagedray
