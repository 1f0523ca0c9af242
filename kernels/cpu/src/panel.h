// How the weights of linear layers lie in memory. W [N, K] is cut into panels of 32 rows of W (columns of y), a panel into
// steps of 32 k, a step into two tiles of 16 columns. In a tile the k of a column stand side by side, GROUP at a time:
// 2 where the CPU multiplies pairs of bf16 (VNNI order), else 1. N and K are padded with zeros.
//
//     plain:      [panels, steps, 2 tiles, 32 / GROUP, 16, GROUP] of the dtype
//     quantized:  see quantized.h; the same order of codes
//
// The panels of a linear layer come in parts, each in a format of its own: rows of a fused weight may come from tensors of
// different formats.
#pragma once

#include <cstdint>

#include "simd.h"

namespace pagedray {

constexpr int PANEL = 32, STEP = 32, TILE = 16;

template <class T>
constexpr int GROUP = 1;
#if defined(__AVX512BF16__)
template <>
constexpr int GROUP<bf16> = 2;
#endif

// Where in its tile, in elements, k (of a step) of a column (of a tile) stands.
template <class T>
constexpr int place(int k, int column) {
    return k / GROUP<T> * GROUP<T> * TILE + column * GROUP<T> + k % GROUP<T>;
}

// Rows of W, or columns of y, to panels; k to steps.
constexpr int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }
constexpr int64_t steps_of(int64_t k) { return (k + STEP - 1) / STEP; }

struct Part {
    int64_t format;  // PLAIN, or a GGML type
    int64_t panels;
    const void* data;
};

struct Linear {
    int64_t n, k;
    const void* bias;  // [n] of the dtype, or null
    int64_t num_parts;
    const Part* parts;
};

}  // namespace pagedray
