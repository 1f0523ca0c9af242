// Runs a loop's tasks on the calling thread and on the threads of one pool:
//
//     parallel(tasks, threads, [&](Tasks& mine) {
//         auto scratch = ...;                                  // once a thread
//         for (int64_t i; mine.next(i);) { ... task i ... }
//     });
//
// Nobody waits for a thread that has not begun: tasks are drawn one by one, and the caller does what nobody else draws.
// So a core that something else keeps busy costs its share, not a time slice (milliseconds) at every operation, as a
// barrier of OpenMP's does. Which thread does a task is chance; results must not depend on it.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace pagedray {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

class Pool;

// A thread's share of a loop, drawn as it goes.
class Tasks {
   public:
    bool next(int64_t& task);
    int64_t drawn = 0;

   private:
    friend class Pool;
    Pool* pool = nullptr;         // null: all tasks are this thread's
    int64_t first = -1, end = 0;  // a task drawn already; the number of tasks
};

class Pool {
   public:
    // Never destroyed: its threads may outlive everything else.
    static Pool& instance() {
        static Pool* pool = new Pool;
        return *pool;
    }

    template <class Body>
    void run(int64_t tasks, int threads, Body& body) {
        std::unique_lock<std::mutex> alone(in_use, std::try_to_lock);
        if (threads <= 1 || tasks <= 1 || tasks > MAX_TASKS || !alone) {  // another thread's loop has the pool
            Tasks all;
            all.end = tasks;
            body(all);
            return;
        }
        start_threads(threads - 1);
        invoke = [](void* b, Tasks& mine) { (*static_cast<Body*>(b))(mine); };
        argument = &body;
        helpers.store(threads - 1, std::memory_order_relaxed);
        completed.store(0, std::memory_order_relaxed);
        const uint64_t loop = (ticket.load(std::memory_order_relaxed) >> 40) + 1;
        ticket.store(loop << 40 | static_cast<uint64_t>(tasks) << 20, std::memory_order_seq_cst);
        if (sleeping.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex);
            wake.notify_all();
        }
        Tasks mine;
        mine.pool = this;
        body(mine);
        completed.fetch_add(mine.drawn, std::memory_order_acq_rel);
        for (int spins = 0; completed.load(std::memory_order_acquire) != tasks; spins++)
            if (spins < 1000) relax();
            else sched_yield();  // whoever has the last task may wait for this very core
    }

   private:
    friend class Tasks;
    static constexpr int64_t MAX_TASKS = (1 << 20) - (1 << 12);
    static constexpr int SPINS = 20000;  // a few hundred microseconds: the time from one operation to the next

    // One word, so that a draw is one atomic step: 24 bits say which loop, 20 its number of tasks, 20 the next of them.
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> completed{0};
    std::atomic<int> helpers{0};  // how many of the threads may help in this loop
    // Of the loop at hand. Written while nobody has a task of it, read only by who has drawn one.
    void (*invoke)(void*, Tasks&) = nullptr;
    void* argument = nullptr;

    std::mutex in_use, mutex;
    std::condition_variable wake;
    std::atomic<int> sleeping{0};
    int num_threads = 0;

    // A task of the loop at hand, or -1.
    int64_t draw() {
        const uint64_t drawn = ticket.fetch_add(1, std::memory_order_acq_rel);
        const int64_t task = drawn & 0xFFFFF, tasks = drawn >> 20 & 0xFFFFF;
        return task < tasks ? task : -1;
    }

    void start_threads(int count) {
        for (; num_threads < count; num_threads++) std::thread(&Pool::help, this, num_threads).detach();
    }

    bool has_work(uint64_t seen) const { return ticket.load(std::memory_order_acquire) >> 40 != seen; }

    void help(int id) {
        uint64_t seen = 0;
        while (true) {
            for (int spins = 0; !has_work(seen) && spins < SPINS; spins++) relax();
            if (!has_work(seen)) {
                std::unique_lock<std::mutex> lock(mutex);
                sleeping.fetch_add(1, std::memory_order_seq_cst);
                wake.wait(lock, [&] { return ticket.load(std::memory_order_seq_cst) >> 40 != seen; });
                sleeping.fetch_sub(1, std::memory_order_relaxed);
            }
            seen = ticket.load(std::memory_order_acquire) >> 40;
            if (id >= helpers.load(std::memory_order_relaxed)) continue;
            Tasks mine;
            mine.pool = this;
            mine.first = draw();
            if (mine.first < 0) continue;  // came too late
            invoke(argument, mine);
            completed.fetch_add(mine.drawn, std::memory_order_acq_rel);
        }
    }
};

inline bool Tasks::next(int64_t& task) {
    if (!pool) {
        task = drawn;
        return drawn < end && ++drawn;
    }
    task = first >= 0 ? first : pool->draw();
    first = -1;
    return task >= 0 && ++drawn;
}

template <class Body>
void parallel(int64_t tasks, int threads, Body&& body) {
    Pool::instance().run(tasks, threads, body);
}

// Calls body(i) for i in [0, n), `grain` of them a task.
template <class Body>
void parallel_for(int64_t n, int64_t grain, int threads, Body&& body) {
    parallel((n + grain - 1) / grain, threads, [&](Tasks& mine) {
        for (int64_t task; mine.next(task);)
            for (int64_t i = task * grain; i < std::min(n, (task + 1) * grain); i++) body(i);
    });
}

}  // namespace pagedray
