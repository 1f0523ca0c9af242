// A row of an int8 KV cache: a token's key or value of one head as n codes, and behind them their scale in fp32.
//     scale = largest magnitude / 127,   code = x / scale to nearest, ties to even
// A row under SMALLEST counts as zeros, for 127 / largest is to be finite; one with an infinite number, or what is no
// number, gets a scale that is none.
#pragma once

#include "simd.h"

namespace pagedray::kv_row {

constexpr float SMALLEST = 1e-30f;

inline int64_t size(int64_t n) { return n + sizeof(float); }

template <class T>
void write(int8_t* row, const T* from, int64_t n) {
    vfloat most = {}, zeros = {};
    for_each_vector(n, [&](int64_t i, auto get, auto) {
        const vfloat x = get(from + i);
        most = max(most, max(x, -x));
        zeros += x * 0.0f;
    });
    const float largest = max(most);
    float scale = largest / 127, inverse = 127 / largest;
    if (largest < SMALLEST) scale = inverse = 0;
    if (sum(zeros) != 0) {
        scale = NAN;
        memset(row, 0, n);
    } else for_each_vector(n, [&](int64_t i, auto get, auto put) { put(row + i, get(from + i) * inverse); });
    memcpy(row + n, &scale, sizeof scale);
}

template <class T>
void read(T* to, const int8_t* row, int64_t n) {
    float scale;
    memcpy(&scale, row + n, sizeof scale);
    for_each_vector(n, [&](int64_t i, auto get, auto put) { put(to + i, get(row + i) * scale); });
}

}  // namespace pagedray::kv_row
