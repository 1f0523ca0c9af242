// Softmax in parts. The part of a row that some of its keys make is, for scores s in units of ln 2,
//     m = max s,  l = sum of 2^(s - m),  acc = sum of 2^(s - m) v,
// and two parts make one (online softmax: Milakov 2018, FlashAttention):
//     m = max(m1, m2),  l = l1 2^(m1 - m) + l2 2^(m2 - m),  acc likewise;  in the end out = acc / l.
#pragma once

#include <algorithm>
#include <cfloat>

#include "simd.h"

namespace pagedray::softmax {

constexpr float NEVER = -FLT_MAX;  // the maximum of no scores

// 2^x for x <= 0, within 2 ulp; 2^0 is exactly 1, and below -126 it is 2^-126 or less. A NaN stays one.
// Attention of long prompts spends more on these than on its products.
#if defined(__AVX512DQ__)
inline vfloat exp2(vfloat x) {
    const vfloat f = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    vfloat p = splat(1.86713012e-3f);
    p = p * f + 9.01703019e-3f;
    p = p * f + 5.57999132e-2f;
    p = p * f + 2.40164450e-1f;
    p = p * f + 6.93151312e-1f;
    p = p * f + 1.0f;
    return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)x);  // p 2^floor(x)
}
#else
inline vfloat exp2(vfloat x) {
    x = x < -126.f ? splat(-126.f) : x;
    const vfloat shifted = x + 12582912.f;  // 1.5 * 2^23: its lowest bits are now round(x)
    const vfloat f = x - (shifted - 12582912.f);
    vfloat p = splat(1.32647273e-3f);
    p = p * f + 9.67151299e-3f;
    p = p * f + 5.55073358e-2f;
    p = p * f + 2.40222424e-1f;
    p = p * f + 6.93147004e-1f;
    p = p * f + 1.0f;
    return (vfloat)((vint)p + ((vint)shifted << 23));
}
#endif

// scores[0 .. visible) times scale become p = 2^(s - m), p[visible .. padded) = 0. The row has room for `padded`, a
// multiple of W. p may stand where the scores do.
template <class T>
static void scores_to_p(T* p, float& m, float& l, const float* scores, int visible, int padded, float scale) {
    vfloat highest[2] = {splat(NEVER), splat(NEVER)};
    int t = 0;
    for (; t + 2 * W <= visible; t += 2 * W)
        for (int c = 0; c < 2; c++) highest[c] = max(highest[c], load(scores + t + c * W) * scale);
    for (; t < visible; t += W) {
        const vfloat s = load(scores + t) * scale;
        highest[0] = max(highest[0], iota() + t < visible ? s : splat(NEVER));
    }
    const float most = m = max(max(highest[0], highest[1]));
    vfloat total = {};
    for (t = 0; t + W <= visible; t += W) {
        const vfloat e = exp2(load(scores + t) * scale - most);
        store(p + t, e);
        total += e;
    }
    if (t < visible) {
        const vfloat e = exp2(load(scores + t) * scale - most);
        const vfloat seen = iota() + t < visible ? e : vfloat{};
        store(p + t, seen);
        total += seen;
        t += W;
    }
    for (; t < padded; t += W) store(p + t, vfloat{});
    l = sum(total);
}

// Parts of several rows: m [rows], l [rows], acc [rows, stride], rows rounded up to whole vectors in m and l.
struct Parts {
    float *m, *l, *acc;

    Parts(float* memory, int64_t rows) : m(memory), l(memory + padded(rows)), acc(memory + 2 * padded(rows)) {}
    // Those from row r, a multiple of W, on.
    Parts from(int64_t r, int64_t stride) const {
        Parts rest = *this;
        rest.m += r, rest.l += r, rest.acc += r * stride;
        return rest;
    }
    static int64_t padded(int64_t rows) { return (rows + W - 1) / W * W; }
    static int64_t size(int64_t rows, int64_t stride) { return 2 * padded(rows) + rows * stride; }

    void clear(int64_t rows, int64_t stride) const {
        std::fill_n(m, padded(rows), NEVER);
        std::fill_n(l, padded(rows), 0.f);
        std::fill_n(acc, rows * stride, 0.f);
    }
};

// into = into + part, for each of the rows
static void merge(const Parts& into, const Parts& part, int64_t rows, int64_t stride) {
    for (int64_t first = 0; first < rows; first += W) {
        const vfloat m1 = load(into.m + first), m2 = load(part.m + first), m = max(m1, m2);
        const vfloat scale1 = exp2(m1 - m), scale2 = exp2(m2 - m);
        store(into.m + first, m);
        store(into.l + first, load(into.l + first) * scale1 + load(part.l + first) * scale2);
        for (int64_t r = first; r < std::min(first + W, rows); r++) {
            const float a = scale1[r - first], b = scale2[r - first];
            for (int64_t d = r * stride; d < (r + 1) * stride; d += W)
                store(into.acc + d, load(into.acc + d) * a + load(part.acc + d) * b);
        }
    }
}

}  // namespace pagedray::softmax
