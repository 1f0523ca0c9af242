// Scratch memory for vectors: aligned to a cache line, not initialized.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace pagedray {

struct Free {
    void operator()(void* p) const { std::free(p); }
};

// Freed with its owner.
template <class T>
std::unique_ptr<T[], Free> aligned(int64_t n) {
    return std::unique_ptr<T[], Free>(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64)));
}

// n floats that the thread keeps from one call to the next, so that no call waits for fresh pages. A type `User` has
// one such piece a thread: its next call ends the last one's use.
template <class User>
float* thread_memory(int64_t n) {
    thread_local std::unique_ptr<float[], Free> memory;
    thread_local int64_t size = 0;
    if (n > size) {
        memory = nullptr;
        memory = aligned<float>(size = n);
    }
    return memory.get();
}

}  // namespace pagedray
