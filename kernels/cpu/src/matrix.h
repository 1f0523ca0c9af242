// C = A B for matrices that a core's caches hold, as attention makes them.
//
// Their elements come in words of 32 bits along the depth of the product: one float; or two neighboring bf16 where the
// CPU multiplies pairs of them with sums in fp32. A is [rows, depth] words; B stands in panels of W columns,
// [columns / W, depth, W] words; C is [rows, columns] in fp32. `depth` and `columns` are multiples of W.
//
// Every c is one chain of additions over the depth from 0 up, whatever the number of rows and columns, and zeros at the
// end of the depth add nothing: so a row gives the same bits in any company.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace pagedray::matrix {

// What the elements of A and B are for tensors of T, and how many of them make a word.
template <class T>
struct Word {
    using Element = float;
    static constexpr int SIZE = 1;
    static vfloat multiply_add(vfloat sum, vfloat b, const float* a) { return sum + b * *a; }
};
#if defined(__AVX512BF16__)
template <>
struct Word<bf16> {
    using Element = bf16;
    static constexpr int SIZE = 2;
    static vfloat multiply_add(vfloat sum, vfloat b, const bf16* a) {
        int32_t pair;
        memcpy(&pair, a, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)b, (__m512bh)_mm512_set1_epi32(pair));
    }
};
#endif

template <class T>
using Element = typename Word<T>::Element;

// R rows times P panels, in registers.
template <class T, int R, int P>
static void multiply_block(float* c, int64_t c_stride, const Element<T>* a, int64_t a_stride, const Element<T>* b,
                           int64_t depth) {
    constexpr int SIZE = Word<T>::SIZE;
    vfloat sum[R][P] = {};
    for (int64_t k = 0; k < depth; k++) {
        vfloat column[P];
        for (int p = 0; p < P; p++) column[p] = load(reinterpret_cast<const float*>(b) + (p * depth + k) * W);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                sum[r][p] = Word<T>::multiply_add(sum[r][p], column[p], a + r * a_stride + k * SIZE);
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) store(c + r * c_stride + p * W, sum[r][p]);
}

// Holds what its thread's matrix unit is set to; there is none for most T and CPUs.
template <class T>
class Multiplier {
   public:
    static constexpr int ROWS = 32;  // at most, in a call

    void operator()(float* c, int64_t c_stride, const Element<T>* a, int64_t a_stride, const Element<T>* b, int rows,
                    int64_t depth, int64_t columns) {
        constexpr int R = 4;
        int r = 0;
        for (; r + R <= rows; r += R)
            multiply_rows<R>(c + r * c_stride, c_stride, a + r * a_stride, a_stride, b, depth, columns);
        c += r * c_stride, a += r * a_stride;
        if (rows - r == 3) multiply_rows<3>(c, c_stride, a, a_stride, b, depth, columns);
        if (rows - r == 2) multiply_rows<2>(c, c_stride, a, a_stride, b, depth, columns);
        if (rows - r == 1) multiply_rows<1>(c, c_stride, a, a_stride, b, depth, columns);
    }

   private:
    template <int R>
    static void multiply_rows(float* c, int64_t c_stride, const Element<T>* a, int64_t a_stride, const Element<T>* b,
                              int64_t depth, int64_t columns) {
        constexpr int P = W == 16 ? 4 : 2;
        int64_t n = 0;
        for (; n + P * W <= columns; n += P * W)
            multiply_block<T, R, P>(c + n, c_stride, a, a_stride, b + n * depth * Word<T>::SIZE, depth);
        for (; n < columns; n += W)
            multiply_block<T, R, 1>(c + n, c_stride, a, a_stride, b + n * depth * Word<T>::SIZE, depth);
    }
};

#if defined(__AMX_BF16__)
// The matrix unit: 16 x 16 sums of 32 products in one instruction. A tile has up to 16 rows of 64 bytes.
template <>
class Multiplier<bf16> {
   public:
    static constexpr int ROWS = 32;

    ~Multiplier() {
        if (configured) _tile_release();
    }

    void operator()(float* c, int64_t c_stride, const bf16* a, int64_t a_stride, const bf16* b, int rows, int64_t depth,
                    int64_t columns) {
        if (rows != configured) configure(rows);
        c_stride *= sizeof(float), a_stride *= sizeof(bf16);
        if (rows <= 16) one_tile_of_rows(c, c_stride, a, a_stride, b, depth, columns / W);
        else two_tiles_of_rows(c, c_stride, a, a_stride, b, depth, columns / W);
    }

   private:
    struct __attribute__((packed)) Configuration {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    };
    int configured = 0;

    void configure(int rows) {
        configured = rows;
        Configuration configuration;
        const auto set = [&](std::initializer_list<int> tiles, int n) {
            for (int tile : tiles) configuration.rows[tile] = n;
        };
        if (rows <= 16) {
            set({0, 1, 2, 3, 4}, rows);
            set({5, 6, 7}, 16);
        } else {
            set({0, 1, 4, 6, 7}, 16);
            set({2, 3, 5}, rows - 16);
        }
        asm volatile("" ::"m"(configuration));  // GCC 12 takes the instruction to read eight bytes only
        _tile_loadconfig(&configuration);
    }

    // Tiles 0-3 are the sums of four panels, 4 is A, 5-7 are B in turn.
    static void one_tile_of_rows(float* c, int64_t c_stride, const bf16* a, int64_t a_stride, const bf16* b,
                                 int64_t depth, int64_t panels) {
        const int64_t panel = depth * W * 2;
        for (; panels >= 4; panels -= 4, b += 4 * panel, c += 4 * W) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < depth; k += 16) {
                const bf16* at = b + k * W * 2;
                _tile_loadd(4, a + k * 2, a_stride);
                _tile_loadd(5, at, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, at + panel, 64);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(7, at + 2 * panel, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, at + 3 * panel, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            _tile_stored(0, c, c_stride);
            _tile_stored(1, c + W, c_stride);
            _tile_stored(2, c + 2 * W, c_stride);
            _tile_stored(3, c + 3 * W, c_stride);
        }
        for (; panels > 0; panels--, b += panel, c += W) {
            _tile_zero(0);
            for (int64_t k = 0; k < depth; k += 16) {
                _tile_loadd(4, a + k * 2, a_stride);
                _tile_loadd(5, b + k * W * 2, 64);
                _tile_dpbf16ps(0, 4, 5);
            }
            _tile_stored(0, c, c_stride);
        }
    }

    // Tiles 0-3 are the sums of two tiles of rows and two panels, 4-5 are A, 6-7 B.
    static void two_tiles_of_rows(float* c, int64_t c_stride, const bf16* a, int64_t a_stride, const bf16* b,
                                  int64_t depth, int64_t panels) {
        const int64_t panel = depth * W * 2;
        const auto below = [](auto* p, int64_t stride) { return reinterpret_cast<const char*>(p) + 16 * stride; };
        for (; panels > 0; panels -= 2, b += 2 * panel, c += 2 * W) {
            const bool two = panels > 1;
            char* const c_below = reinterpret_cast<char*>(c) + 16 * c_stride;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t k = 0; k < depth; k += 16) {
                _tile_loadd(4, a + k * 2, a_stride);
                _tile_loadd(5, below(a + k * 2, a_stride), a_stride);
                _tile_loadd(6, b + k * W * 2, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
                if (two) {
                    _tile_loadd(7, b + panel + k * W * 2, 64);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, c, c_stride);
            _tile_stored(2, c_below, c_stride);
            if (two) {
                _tile_stored(1, c + W, c_stride);
                _tile_stored(3, c_below + W * sizeof(float), c_stride);
            }
        }
    }
};
#endif

// Writes B's panels from rows that are its columns (keys): column j is n elements at `from + at[j]`, and then zeros.
template <class T>
static void pack_columns(Element<T>* b, const T* from, const int64_t* at, int columns, int64_t n, int64_t depth) {
    constexpr int STEP = W * Word<T>::SIZE;  // elements to a vector
    const auto words = [](const T* p) {
        if constexpr (Word<T>::SIZE == 1) return load(p);
        else return load(reinterpret_cast<const float*>(p));
    };
    for (int j = 0; j < columns; j += W, b += depth * STEP)
        for (int64_t k = 0; k < n; k += STEP) {
            vfloat square[W];
            if (k + STEP <= n) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) square[i] = words(from + at[j + i] + k);
            } else {
                for (int i = 0; i < W; i++) {
                    T padded[STEP] = {};
                    memcpy(padded, from + at[j + i] + k, (n - k) * sizeof(T));
                    square[i] = words(padded);
                }
            }
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++)
                store(reinterpret_cast<float*>(b) + (k / Word<T>::SIZE + i) * W, square[i]);
        }
}

// Writes B's panels from its own rows (values): [depth, columns] elements, row k at `from + at[k]`, the first `rows` of
// them; zeros below and beyond `n`.
template <class T>
static void pack_rows(Element<T>* b, const T* from, const int64_t* at, int rows, int64_t n, int64_t depth) {
    if constexpr (Word<T>::SIZE == 1) {
        for (int64_t d = 0; d < n; d += W, b += depth * W)
            for (int64_t k = 0; k < depth; k++) {
                const int part = static_cast<int>(std::min<int64_t>(W, n - d));
                vfloat row = {};
                if (k < rows) row = part == W ? load(from + at[k] + d) : load_part(from + at[k] + d, part);
                store(b + k * W, row);
            }
    }
#if defined(__AVX512BF16__)
    else {
        // Pairs of rows interleaved: unpack works within 128 bits, so quarters of a row go where it wants them first.
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        for (int64_t d = 0; d < n; d += 2 * W, b += 2 * depth * W * 2) {
            const __mmask32 part = n - d >= 2 * W ? ~0u : (1u << (n - d)) - 1;
            const auto get = [&](int64_t k) {
                return _mm512_maskz_permutexvar_epi64(0xFF, order, _mm512_maskz_loadu_epi16(part, from + at[k] + d));
            };
            const auto put = [&](int64_t k, __m512i even, __m512i odd) {
                _mm512_storeu_si512(b + k * W * 2, _mm512_unpacklo_epi16(even, odd));
                if (d + W < n) _mm512_storeu_si512(b + (depth + k) * W * 2, _mm512_unpackhi_epi16(even, odd));
            };
            int64_t k = 0;
            for (; 2 * k + 1 < rows; k++) put(k, get(2 * k), get(2 * k + 1));
            if (2 * k < rows) put(k, get(2 * k), __m512i{}), k++;
            for (; k < depth; k++) put(k, __m512i{}, __m512i{});
        }
    }
#endif
}

}  // namespace pagedray::matrix
