// Quantized weights as the kernels read them: GGUF's numbers in the order of panel.h. w = scale code + minimum, in fp32,
// then rounded to the dtype: what dequantizing the file gives, bit for bit, for scale * code is exact in fp32.
//
// A panel is blocks of BLOCK_STEPS steps. A block: per column `d` and, where there is a minimum, `m` (fp16), then its steps;
// a step: the codes of its two tiles; in the K formats, before them, the integers by which `d` and `m` are multiplied:
// [SCALES][32] and [32]. So a K format's block has one `d` for 8 steps as in the file, the others' for one.
//
// Codes are nibbles or bytes (5 and 6 bits take a byte). Of nibbles, element 128 b + 16 i + l of a tile (in the order of
// panel.h) is bits 4 i of 32-bit word 16 b + l: a vector of words shifted by 4 i has 16 neighbors in its low bits.
#pragma once

#include "panel.h"

namespace pagedray {

constexpr int PLAIN = 0;  // not quantized

template <int BITS_, int ZERO_, bool MINIMUM_, bool K_ = false, int SCALES_ = 1>
struct Format {
    static constexpr int BITS = BITS_;             // a code takes in memory
    static constexpr int ZERO = ZERO_;             // is taken from each code (bytes are signed, and have it taken already)
    static constexpr bool MINIMUM = MINIMUM_;      // or a scale alone
    static constexpr bool K = K_;                  // d and m are multiplied by integers
    static constexpr int SCALES = SCALES_;         // of a step, each for 32 / SCALES k
    static constexpr int BLOCK_STEPS = K ? 8 : 1;
    static constexpr int TILE_BYTES = STEP * TILE * BITS / 8;
    static constexpr int HEAD_BYTES = PANEL * 2 * (1 + MINIMUM);
    static constexpr int INTEGER_BYTES = K ? PANEL * (SCALES + MINIMUM) : 0;
    static constexpr int STEP_BYTES = INTEGER_BYTES + 2 * TILE_BYTES;
    static constexpr int BLOCK_BYTES = HEAD_BYTES + BLOCK_STEPS * STEP_BYTES;

    static constexpr int64_t panel_bytes(int64_t steps) { return steps / BLOCK_STEPS * BLOCK_BYTES; }
};

// By GGML's numbers. 5_0 lies as 8_0 does.
using Q4_0 = Format<4, 8, false>;
using Q4_1 = Format<4, 0, true>;
using Q5_1 = Format<8, 0, true>;
using Q8_0 = Format<8, 0, false>;
using Q4_K = Format<4, 0, true, true>;
using Q5_K = Format<8, 0, true, true>;
using Q6_K = Format<8, 0, false, true, 2>;

template <class F>
bool with_format(int64_t format, F f) {
    switch (format) {
        case 2: f(Q4_0{}); return true;
        case 3: f(Q4_1{}); return true;
        case 6: f(Q8_0{}); return true;
        case 7: f(Q5_1{}); return true;
        case 8: f(Q8_0{}); return true;
        case 12: f(Q4_K{}); return true;
        case 13: f(Q5_K{}); return true;
        case 14: f(Q6_K{}); return true;
        default: return false;
    }
}

// The low nibble of each lane, less `ZERO`.
template <int ZERO>
vfloat low_nibbles(vint words) {
#if defined(__AVX512F__)  // a look-up in a register: the instruction ignores the other bits
    vfloat table;
    for (int i = 0; i < W; i++) table[i] = i - ZERO;
    return _mm512_permutexvar_ps((__m512i)words, table);
#else
    return __builtin_convertvector((words & 15) - ZERO, vfloat);
#endif
}

// Two rows of 16 elements of a tile, v-th vector of each.
inline void store_rows(float* to, vfloat first, vfloat second) {
    store(to, first);
    store(to + TILE, second);
}
inline void store_rows(bf16* to, vfloat first, vfloat second) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
    memcpy(to, &both, sizeof both);
#else
    store(to, first);
    store(to + TILE, second);
#endif
}

// The numbers of 16 columns for each lane of a tile's rows of 16 elements: of rows 0, 2, ... and of rows 1, 3, ...
template <class T>
struct Lanes {
    static constexpr int V = TILE / W;
    vfloat row[2][V];

    explicit Lanes(const vfloat (&columns)[V]) {
        if constexpr (GROUP<T> == 1) {
            for (int v = 0; v < V; v++) row[0][v] = row[1][v] = columns[v];
        } else {  // a row holds two k of eight columns
            vint first, second;
            for (int i = 0; i < W; i++) {
                first[i] = i / 2;
                second[i] = W / 2 + i / 2;
            }
            row[0][0] = __builtin_shuffle(columns[0], first);
            row[1][0] = __builtin_shuffle(columns[0], second);
        }
    }
};

// Step `s` of a panel to the plain layout, rounded to T, as numbers of type X: T, or the floats that will be multiplied.
template <class F, class T, class X>
void dequantize_step(X* to, const uint8_t* panel, int64_t s) {
    constexpr int V = TILE / W, ROWS = STEP / F::SCALES;  // rows of 16 elements in a tile with the same scale
    const uint8_t* head = panel + s / F::BLOCK_STEPS * F::BLOCK_BYTES;
    const uint8_t* step = head + F::HEAD_BYTES + s % F::BLOCK_STEPS * F::STEP_BYTES;
    const int8_t* integers = reinterpret_cast<const int8_t*>(step);
    for (int h = 0; h < 2; h++) {
        const uint8_t* codes = step + F::INTEGER_BYTES + h * F::TILE_BYTES;
        vfloat d[V], m[V] = {}, scale[V];
        for (int v = 0; v < V; v++) {
            const int column = h * TILE + v * W;
            d[v] = load(reinterpret_cast<const half*>(head) + column);
            if (F::MINIMUM) m[v] = load(reinterpret_cast<const half*>(head) + PANEL + column);
            if (F::MINIMUM && F::K) m[v] = -(m[v] * load(integers + F::SCALES * PANEL + column));
        }
        const Lanes<T> minimums(m);
        for (int g = 0; g < F::SCALES; g++) {
            for (int v = 0; v < V; v++)
                scale[v] = F::K ? d[v] * load(integers + g * PANEL + h * TILE + v * W) : d[v];
            const Lanes<T> scales(scale);
            for (int r = g * ROWS; r < (g + 1) * ROWS; r += 8)
                for (int v = 0; v < V; v++) {
                    const auto value = [&](int i) {
                        vfloat code;
                        if constexpr (F::BITS == 4) {
                            vint words;
                            memcpy(&words, codes + r * TILE / 2 + v * W * 4, sizeof words);
                            code = low_nibbles<F::ZERO>(words >> 4 * i);
                        } else {
                            code = load(reinterpret_cast<const int8_t*>(codes) + (r + i) * TILE + v * W);
                        }
                        vfloat scaled = code * scales.row[i % 2][v];
                        if (F::MINIMUM) scaled += minimums.row[i % 2][v];
                        return std::is_same_v<X, T> ? scaled : round_to<false>(static_cast<T*>(nullptr), scaled);
                    };
#pragma GCC unroll 4
                    for (int i = 0; i < 8; i += 2) store_rows(to + (r + i) * TILE + v * W, value(i), value(i + 1));
                }
        }
        to += STEP * TILE;
    }
}

}  // namespace pagedray
