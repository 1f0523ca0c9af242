// y = x W^T + bias. W [N, K] is packed once, at load, so that it is read as one stream: one copy of the weights serves
// decode, where that stream's speed is all that counts, and prefill.
// panel.h says how. A quantized weight stays as it is until steps of a panel are wanted: they are dequantized into the core's
// cache, once for all rows of x that are multiplied with them, and the rest goes on as with a plain weight.
//
// Every y[m][n] is one chain of additions over k from 0 up, whatever the number of rows: so a row gives the same bits in
// any company. Sums are in fp32.
#include <algorithm>

#include "memory.h"
#include "panel.h"
#include "pool.h"
#include "quantized.h"

namespace pagedray {

constexpr int PREFETCH_BYTES = 2048;
constexpr int RUNS_PER_THREAD = 4;

// With many rows, what a core works on at a time fits its caches: BATCH rows of x and their sums the L2; BLOCK_BYTES of a
// panel's columns, and of as many rows of x as are multiplied at a time, the L1. Sums wait in fp32 from one block of k to the
// next, so the chains stay what they are. PANELS together write longer pieces of y's rows.
constexpr int BATCH = 240, PANELS = 4, BLOCK_BYTES = 576;

// How much of a panel is dequantized at a time where few rows want it, unless a step: it fits the L1 cache.
constexpr int DEQUANTIZED_BYTES = 16384;

// How the products are made: of GROUP neighboring k in a lane, x being brought to the element type X.
template <class T>
struct Product {
    using X = float;
    template <class E>
    static vfloat weights(const E* p) {  // T's, or X's
        return load(p);
    }
    static vfloat multiply_add(vfloat sum, vfloat w, const float* x) { return sum + w * *x; }
};
#if defined(__AVX512BF16__)
template <>
struct Product<bf16> {
    using X = bf16;
    static vfloat weights(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }
    static vfloat multiply_add(vfloat sum, vfloat w, const bf16* pair) {
        int32_t bits;
        memcpy(&bits, pair, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(bits));
    }
};
#endif

inline void convert(float& to, float from) { to = from; }
inline void convert(bf16& to, bf16 from) { to = from; }
inline void convert(float& to, bf16 from) {
    const uint32_t bits = static_cast<uint32_t>(from.bits) << 16;
    memcpy(&to, &bits, 4);
}

// Where steps of a panel come from, one after another: step(s) in the plain layout, of elements E.
template <class E>
struct PlainSteps {
    const E* first;
    const char* ahead;  // what will be wanted, to be fetched meanwhile: `bytes` with each step
    int64_t bytes;

    const E* operator()(int64_t s) const {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + s * bytes + i, 0, 2);
        return first + s * STEP * PANEL;
    }
};

// Dequantized when asked for, to one of two places in turn: so the next step may be asked for while one is in use, which
// keeps the vector units busy while the matrix unit multiplies.
template <class T, class F>
struct QuantizedSteps {
    const uint8_t* panel;
    int64_t begin;
    T* room;  // [2][step]

    const T* operator()(int64_t s) const {
        T* step = room + s % 2 * STEP * PANEL;
        const uint8_t* ahead = panel + (begin + s) * F::BLOCK_BYTES / F::BLOCK_STEPS + PREFETCH_BYTES;
        for (int i = 0; i < F::BLOCK_BYTES / F::BLOCK_STEPS; i += 64) __builtin_prefetch(ahead + i);
        dequantize_step<F, T>(step, panel, begin + s);
        return step;
    }
};

// As many registers as hold sums: 24 of AVX-512's 32; of 16 as many as leave a panel's weights room.
constexpr int SUMS = W == 16 ? 24 : 8;

// sums [R][32] = or += R rows of x times a panel, in registers; of many rows, one of the panel's two tiles after the other.
// x [k / G][R][G].
template <class T, int R, class E>
static void multiply_panel(float* sums, const PlainSteps<E>& weights, const typename Product<T>::X* x, int64_t steps,
                           bool add) {
    constexpr int G = GROUP<T>, V = TILE / W, TILES = R * 2 * V <= SUMS ? 2 : 1;
    for (int first = 0; first < 2; first += TILES, sums += TILES * TILE) {
        const PlainSteps<E> from{weights.first + first * STEP * TILE, weights.ahead, first ? 0 : weights.bytes};
        const auto* at = x;
        vfloat sum[R][TILES][V] = {};
        for (int r = 0; r < R && add; r++)
            for (int h = 0; h < TILES; h++)
                for (int v = 0; v < V; v++) sum[r][h][v] = load(sums + r * PANEL + h * TILE + v * W);
        for (int64_t s = 0; s < steps; s++) {
            const E* step = from(s);
            for (int k = 0; k < STEP; k += G, at += R * G) {
                vfloat w[TILES][V];
                for (int h = 0; h < TILES; h++)
                    for (int v = 0; v < V; v++) w[h][v] = Product<T>::weights(step + (h * STEP + k) * TILE + v * W * G);
                for (int r = 0; r < R; r++)
                    for (int h = 0; h < TILES; h++)
                        for (int v = 0; v < V; v++)
                            sum[r][h][v] = Product<T>::multiply_add(sum[r][h][v], w[h][v], at + r * G);
            }
        }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < TILES; h++)
                for (int v = 0; v < V; v++) store(sums + r * PANEL + h * TILE + v * W, sum[r][h][v]);
    }
}

// Up to ROWS rows of x. `arrange` brings them to the order in which `multiply` reads them: by k, a step being rows * STEP
// elements. `multiply` sets sums [rows][32] to `steps` steps of a panel, or adds them. `prepare` comes before the first
// multiplication of that many rows, `finish` after the last of all. A block that `INTERLEAVES` takes QuantizedSteps, too.
// With up to FEW rows a panel is read once, as one stream.
template <class T>
struct Block {
    static constexpr int ROWS = W == 16 ? 12 : (W == 8 ? 6 : 1);  // as many as registers hold
    static constexpr int FEW = std::min(ROWS, SUMS / (2 * TILE / W));
    static constexpr bool INTERLEAVES = false;
    using X = typename Product<T>::X;

    static void arrange(X* to, const T* from, int64_t stride, int64_t rows, int64_t k, int64_t padded) {
        constexpr int G = GROUP<T>;
        std::fill(to + k / G * G * rows, to + rows * padded, X{});
        for (int64_t i = 0; i < k; i += G)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = i; j < std::min<int64_t>(i + G, k); j++)
                    convert(to[(i / G * rows + r) * G + j - i], from[r * stride + j]);
    }

    template <int R = ROWS, class E>
    static void multiply(float* sums, const PlainSteps<E>& weights, const X* x, int64_t rows, int64_t steps, bool add) {
        if (rows == R) return multiply_panel<T, R>(sums, weights, x, steps, add);
        if constexpr (R > 1) multiply<R - 1>(sums, weights, x, rows, steps, add);
    }

    static void prepare(int64_t) {}
    static void finish() {}
};

#if defined(__AMX_BF16__)
struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The matrix unit: 16 x 16 sums of 32 products in one instruction. Tiles 0-3 are sums, 4-5 x, 6-7 W.
template <>
struct Block<bf16> {
    static constexpr int ROWS = 2 * TILE, FEW = ROWS;
    static constexpr bool INTERLEAVES = true;
    using X = bf16;

    static void arrange(bf16* to, const bf16* from, int64_t stride, int64_t rows, int64_t k, int64_t padded) {
        for (int64_t i = 0; i < padded; i += STEP)
            for (int64_t r = 0; r < rows; r++, to += STEP) {
                const int64_t n = std::min<int64_t>(STEP, k - i);
                memcpy(to, from + r * stride + i, n * sizeof(bf16));
                std::fill(to + n, to + STEP, bf16{});
            }
    }

    static void prepare(int64_t rows) {
        TileConfig config;
        for (int i = 0; i < 8; i++) config.row_bytes[i] = 64;
        for (int i : {0, 1, 4}) config.rows[i] = rows > TILE ? TILE : rows;
        for (int i : {2, 3, 5}) config.rows[i] = rows > TILE ? rows - TILE : 1;
        for (int i : {6, 7}) config.rows[i] = TILE;
        asm volatile("" ::"m"(config));  // GCC 12 takes the instruction to read eight bytes only
        _tile_loadconfig(&config);
    }
    static void finish() { _tile_release(); }

    template <class Steps>
    static void multiply(float* sums, const Steps& weights, const bf16* x, int64_t rows, int64_t steps, bool add) {
        const bool two = rows > TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        if (add) {
            _tile_loadd(0, sums, PANEL * 4);
            _tile_loadd(1, sums + TILE, PANEL * 4);
        }
        if (add && two) {
            _tile_loadd(2, sums + TILE * PANEL, PANEL * 4);
            _tile_loadd(3, sums + TILE * PANEL + TILE, PANEL * 4);
        }
        const bf16* next = weights(0);
        for (int64_t s = 0; s < steps; s++, x += rows * STEP) {
            const bf16* panel = next;
            if (s + 1 < steps) next = weights(s + 1);
            _tile_loadd(4, x, 64);
            _tile_loadd(6, panel, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + STEP * TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (two) {
                _tile_loadd(5, x + TILE * STEP, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, PANEL * 4);
        _tile_stored(1, sums + TILE, PANEL * 4);
        if (two) {
            _tile_stored(2, sums + TILE * PANEL, PANEL * 4);
            _tile_stored(3, sums + TILE * PANEL + TILE, PANEL * 4);
        }
    }
};
#endif

// Steps of a part's panel, from `begin` of `all_steps` on, times rows of x, `at_a_time` of them. To `room` quantized
// weights are dequantized, once for all rows. `x` is arranged, `prepared` the number of rows that Block is prepared for.
template <class T>
struct PanelProduct {
    using X = typename Block<T>::X;
    const Part& part;
    int64_t panel, all_steps, begin, steps, rows, at_a_time, padded;
    const X* x;
    float* sums;
    X* room;
    int64_t& prepared;

    void run() const {
        if (part.format == PLAIN) {
            const T* data = static_cast<const T*>(part.data) + (panel * all_steps + begin) * STEP * PANEL;
            return multiply_all(data, true);
        }
        with_format(part.format, [&](auto format) {
            using F = decltype(format);
            const uint8_t* codes = static_cast<const uint8_t*>(part.data) + panel * F::panel_bytes(all_steps);
            if constexpr (Block<T>::INTERLEAVES)
                if (rows <= Block<T>::ROWS) return multiply(0, QuantizedSteps<T, F>{codes, begin, room});
            for (int64_t s = 0; s < steps; s++) dequantize_step<F, T>(room + s * STEP * PANEL, codes, begin + s);
            multiply_all(room, false);
        });
    }

    template <class E>
    void multiply_all(const E* data, bool prefetch) const {
        constexpr int64_t STEP_BYTES = STEP * PANEL * sizeof(E);
        const char* ahead = reinterpret_cast<const char*>(data);
        if (rows <= at_a_time)
            return multiply(0, PlainSteps<E>{data, ahead + PREFETCH_BYTES, prefetch ? STEP_BYTES : 0});
        // All rows take their turn before the next panel is wanted: those of each turn fetch a share of it.
        const int64_t share = prefetch ? (STEP_BYTES * at_a_time / rows + 63) / 64 * 64 : 0;
        ahead += all_steps * STEP_BYTES;
        for (int64_t m = 0; m < rows; m += at_a_time, ahead += steps * share)
            multiply(m, PlainSteps<E>{data, ahead, share});
    }

    template <class Steps>
    void multiply(int64_t m, const Steps& weights) const {
        const int64_t count = std::min(at_a_time, rows - m);
        if (count != prepared) Block<T>::prepare(prepared = count);
        Block<T>::multiply(sums + m * PANEL, weights, x + m * padded + begin * STEP * count, count, steps, begin > 0);
    }
};

template <class T, class Out>
static void linear(Out* out, const T* x, int64_t x_stride, const Linear& weight, int64_t num_rows, int threads) {
    using X = typename Block<T>::X;
    constexpr int ROWS = Block<T>::ROWS;
    const int64_t all_steps = steps_of(weight.k), padded = all_steps * STEP, panels = panels_of(weight.n);
    constexpr int64_t BATCH_ROWS = (BATCH + ROWS - 1) / ROWS * ROWS;
    const int64_t batches = (num_rows + BATCH_ROWS - 1) / BATCH_ROWS, items = batches * panels;
    const T* bias = static_cast<const T*>(weight.bias);
    const bool few = num_rows <= Block<T>::FEW;
    bool quantized = false;
    for (int64_t i = 0; i < weight.num_parts; i++) quantized |= weight.parts[i].format != PLAIN;
    // Where weights are plain and rows not many, the larger block gained nothing.
    const int64_t at_a_time = !quantized && !few && num_rows <= ROWS ? Block<T>::FEW : ROWS;
    // In steps.
    const bool one_by_one = few && Block<T>::INTERLEAVES;
    const int64_t at_once = (few ? DEQUANTIZED_BYTES / PANEL : BLOCK_BYTES) / (STEP * sizeof(X));
    const int64_t block = few && (one_by_one || !quantized) ? all_steps : at_once;
    // Runs of panels: long enough to stream, short enough that threads end together.
    const int64_t runs = panels * padded < 4096 ? 1 : std::min<int64_t>(items, RUNS_PER_THREAD * threads);
    parallel(runs, threads, [&](Tasks& mine) {
        const int64_t most_rows = std::min(num_rows, BATCH_ROWS), sums_size = most_rows * PANEL;
        const auto arranged = aligned<X>(most_rows * padded);
        const auto sums = aligned<float>(PANELS * sums_size);
        const auto room = aligned<X>(quantized ? (one_by_one ? 2 : block) * STEP * PANEL : 0);
        int64_t prepared = 0, arranged_batch = -1, item = 0, last = 0;
        const auto more = [&] {
            int64_t run;
            if (item < last) return true;
            if (!mine.next(run)) return false;
            item = items * run / runs;
            last = items * (run + 1) / runs;
            return true;
        };
        while (more()) {
            const int64_t begin = item / panels * BATCH_ROWS, end = std::min(begin + BATCH_ROWS, num_rows);
            if (item / panels != arranged_batch) {
                arranged_batch = item / panels;
                for (int64_t m = begin; m < end; m += at_a_time)
                    Block<T>::arrange(arranged.get() + (m - begin) * padded, x + m * x_stride, x_stride,
                                      std::min(at_a_time, end - m), weight.k, padded);
            }
            const int64_t first = item % panels;  // and some neighbors of the same part
            const Part* part = weight.parts;
            int64_t panel = first;
            for (; panel >= part->panels; part++) panel -= part->panels;
            const int64_t count = std::min({last - item, part->panels - panel, static_cast<int64_t>(PANELS)});
            for (int64_t s = 0; s < all_steps; s += block) {
                const int64_t steps = std::min(block, all_steps - s);
                for (int64_t i = 0; i < count; i++)
                    PanelProduct<T>{*part, panel + i, all_steps, s, steps, end - begin, at_a_time, padded,
                                    arranged.get(), sums.get() + i * sums_size, room.get(), prepared}
                        .run();
            }
            for (int64_t m = begin; m < end; m++)
                for (int64_t i = 0; i < count; i++) {
                    const int64_t column = (first + i) * PANEL, columns = std::min<int64_t>(PANEL, weight.n - column);
                    const float* row = sums.get() + i * sums_size + (m - begin) * PANEL;
                    for_each_vector(columns, [&](int64_t j, auto get, auto put) {
                        const vfloat sum = load(row + j);
                        put(out + m * weight.n + column + j, bias ? sum + get(bias + column + j) : sum);
                    });
                }
            item += count;
        }
        Block<T>::finish();
    });
}

}  // namespace pagedray

using namespace pagedray;

// `out` [rows, n] is in `out_dtype`: that of x [rows, k] and the weight, or fp32.
PAGEDRAY_API void pagedray_linear(int32_t dtype, int32_t out_dtype, void* out, const void* x, const Linear* weight,
                                  int64_t rows, int64_t x_stride, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_dtype(out_dtype, [&](auto* out_type) {
            using Out = std::remove_pointer_t<decltype(out_type)>;
            if constexpr (std::is_same_v<Out, T> || std::is_same_v<Out, float>)
                linear(static_cast<Out*>(out), static_cast<const T*>(x), x_stride, *weight, rows, threads);
        });
    });
}
