// Scratch memory for vectors: aligned to a cache line, freed with its owner, not initialized.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace pagedray {

struct Free {
    void operator()(void* p) const { std::free(p); }
};

template <class T>
std::unique_ptr<T[], Free> aligned(int64_t n) {
    return std::unique_ptr<T[], Free>(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64)));
}

}  // namespace pagedray
