// y = x W^T + bias. W [N, K] is packed once, at load, so that it is read as one stream: one copy of the weights serves
// decode, where that stream's speed is all that counts, and prefill.
//
// Packed: [N / 32, K / 32, 2, 32 / G, 16, G]: panels of 32 rows of W (columns of y); in a panel steps of 32 k; a step is
// two tiles of 16 columns, each with the k of its columns side by side, G at a time. G = 2 where the CPU multiplies pairs
// of bf16 (VNNI order), else 1. N and K are padded with zeros.
//
// Every y[m][n] is one chain of additions over k from 0 up, whatever the number of rows: so a row gives the same bits in
// any company. Sums are in fp32.
#include <algorithm>

#include "memory.h"
#include "pool.h"
#include "simd.h"

namespace pagedray {

constexpr int PANEL = 32, STEP = 32, TILE = 16;
constexpr int PREFETCH_BYTES = 2048;
constexpr int RUNS_PER_THREAD = 4;

// With many rows, what a core works on at a time fits its L2 cache: BATCH rows of x, BLOCK_BYTES of each, against as much
// of PANELS panels. Their sums wait in fp32 from one block of k to the next, so the chains stay what they are.
constexpr int BATCH = 240, PANELS = 4, BLOCK_BYTES = 2048;

// How the products are made: GROUP neighboring k to a lane, and the element type that x is brought to.
template <class T>
struct Product {
    static constexpr int GROUP = 1;
    using X = float;
    static vfloat weights(const T* p) { return load(p); }
    static vfloat multiply_add(vfloat sum, vfloat w, const float* x) { return sum + w * *x; }
};
#if defined(__AVX512BF16__)
template <>
struct Product<bf16> {
    static constexpr int GROUP = 2;
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

struct Shape {
    int64_t rows, n, k;
    int64_t steps() const { return (k + STEP - 1) / STEP; }
    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    int64_t panel_size() const { return steps() * STEP * PANEL; }
};

// sums [R][32] = or += R rows of x times a panel, in registers. x [k / G][R][G].
template <class T, int R>
static void multiply_panel(float* sums, const T* panel, const typename Product<T>::X* x, int64_t steps, bool add,
                           bool prefetch) {
    constexpr int G = Product<T>::GROUP, V = TILE / W;
    vfloat sum[R][2][V] = {};
    for (int r = 0; r < R && add; r++)
        for (int h = 0; h < 2; h++)
            for (int v = 0; v < V; v++) sum[r][h][v] = load(sums + r * PANEL + h * TILE + v * W);
    for (int64_t s = 0; s < steps; s++, panel += STEP * PANEL) {
        if (prefetch)
            for (size_t i = 0; i < STEP * PANEL * sizeof(T); i += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(panel) + PREFETCH_BYTES + i);
        for (int k = 0; k < STEP; k += G, x += R * G) {
            vfloat w[2][V];
            for (int h = 0; h < 2; h++)
                for (int v = 0; v < V; v++) w[h][v] = Product<T>::weights(panel + (h * STEP + k) * TILE + v * W * G);
            for (int r = 0; r < R; r++)
                for (int h = 0; h < 2; h++)
                    for (int v = 0; v < V; v++)
                        sum[r][h][v] = Product<T>::multiply_add(sum[r][h][v], w[h][v], x + r * G);
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++)
            for (int v = 0; v < V; v++) store(sums + r * PANEL + h * TILE + v * W, sum[r][h][v]);
}

// Up to ROWS rows of x. `arrange` brings them to the order in which `multiply` reads them: by k, a step being rows * STEP
// elements. `multiply` sets sums [rows][32] to `steps` steps of a panel, or adds them. `prepare` comes before the first
// multiplication of that many rows, `finish` after the last of all.
template <class T>
struct Block {
    static constexpr int ROWS = W == 16 ? 12 : (W == 8 ? 2 : 1);  // as many as registers hold
    using X = typename Product<T>::X;

    static void arrange(X* to, const T* from, int64_t stride, int64_t rows, int64_t k, int64_t padded) {
        constexpr int G = Product<T>::GROUP;
        std::fill(to + k / G * G * rows, to + rows * padded, X{});
        for (int64_t i = 0; i < k; i += G)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = i; j < std::min<int64_t>(i + G, k); j++)
                    convert(to[(i / G * rows + r) * G + j - i], from[r * stride + j]);
    }

    template <int R = ROWS>
    static void multiply(float* sums, const T* panel, const X* x, int64_t rows, int64_t steps, bool add, bool prefetch) {
        if (rows == R) return multiply_panel<T, R>(sums, panel, x, steps, add, prefetch);
        if constexpr (R > 1) multiply<R - 1>(sums, panel, x, rows, steps, add, prefetch);
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
    static constexpr int ROWS = 2 * TILE;
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
        _tile_loadconfig(&config);
    }
    static void finish() { _tile_release(); }

    static void multiply(float* sums, const bf16* panel, const bf16* x, int64_t rows, int64_t steps, bool add,
                         bool prefetch) {
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
        for (int64_t s = 0; s < steps; s++, panel += STEP * PANEL, x += rows * STEP) {
            if (prefetch)
                for (int i = 0; i < STEP * PANEL * 2; i += 64)
                    __builtin_prefetch(reinterpret_cast<const char*>(panel) + PREFETCH_BYTES + i, 0, 2);
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

template <class T, class Out>
static void linear(Out* out, const T* x, int64_t x_stride, const T* packed, const T* bias, const Shape& shape,
                   int threads) {
    using X = typename Block<T>::X;
    constexpr int ROWS = Block<T>::ROWS;
    const int64_t padded = shape.steps() * STEP, panels = shape.panels();
    constexpr int64_t BATCH_ROWS = (BATCH + ROWS - 1) / ROWS * ROWS;
    const int64_t batches = (shape.rows + BATCH_ROWS - 1) / BATCH_ROWS, items = batches * panels;
    const int64_t block = shape.rows <= ROWS ? shape.steps() : BLOCK_BYTES / (STEP * sizeof(X));  // in steps
    // Runs of panels: long enough to stream, short enough that threads end together.
    const int64_t runs = panels * padded < 4096 ? 1 : std::min<int64_t>(items, RUNS_PER_THREAD * threads);
    parallel(runs, threads, [&](Tasks& mine) {
        const int64_t most_rows = std::min(shape.rows, BATCH_ROWS), sums_size = most_rows * PANEL;
        const auto arranged = aligned<X>(most_rows * padded);
        const auto sums = aligned<float>(PANELS * sums_size);
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
            const int64_t begin = item / panels * BATCH_ROWS, end = std::min(begin + BATCH_ROWS, shape.rows);
            if (item / panels != arranged_batch) {
                arranged_batch = item / panels;
                for (int64_t m = begin; m < end; m += ROWS)
                    Block<T>::arrange(arranged.get() + (m - begin) * padded, x + m * x_stride, x_stride,
                                      std::min<int64_t>(ROWS, end - m), shape.k, padded);
            }
            const int64_t p = item % panels, count = std::min({last - item, panels - p, static_cast<int64_t>(PANELS)});
            for (int64_t s = 0; s < shape.steps(); s += block) {
                const int64_t steps = std::min(block, shape.steps() - s);
                for (int64_t i = 0; i < count; i++) {
                    const T* panel = packed + (p + i) * shape.panel_size() + s * STEP * PANEL;
                    for (int64_t m = begin; m < end; m += ROWS) {
                        const int64_t rows = std::min<int64_t>(ROWS, end - m);
                        if (rows != prepared) Block<T>::prepare(prepared = rows);
                        Block<T>::multiply(sums.get() + i * sums_size + (m - begin) * PANEL, panel,
                                           arranged.get() + (m - begin) * padded + s * STEP * rows, rows, steps, s > 0,
                                           m == begin);
                    }
                }
            }
            for (int64_t m = begin; m < end; m++)
                for (int64_t i = 0; i < count; i++) {
                    const int64_t column = (p + i) * PANEL, columns = std::min<int64_t>(PANEL, shape.n - column);
                    const float* row = sums.get() + i * sums_size + (m - begin) * PANEL;
                    for_each_vector(columns, [&](int64_t j, auto get, auto put) {
                        const vfloat sum = load(row + j);
                        put(out + m * shape.n + column + j, bias ? sum + get(bias + column + j) : sum);
                    });
                }
            item += count;
        }
        Block<T>::finish();
    });
}

template <class T>
static void pack(T* packed, const T* weight, int64_t stride, const Shape& shape, int threads) {
    constexpr int G = Product<T>::GROUP;
    parallel_for(shape.panels(), 1, threads, [&](int64_t p) {
        T* panel = packed + p * shape.panel_size();
        std::fill_n(panel, shape.panel_size(), T{});
        for (int64_t n = p * PANEL; n < std::min((p + 1) * PANEL, shape.n); n++) {
            const int64_t tile = n % PANEL / TILE, column = n % TILE;
            for (int64_t k = 0; k < shape.k; k++)
                panel[((k / STEP * 2 + tile) * STEP + k % STEP / G * G) * TILE + column * G + k % G] =
                    weight[n * stride + k];
        }
    });
}

}  // namespace pagedray

using namespace pagedray;

// Elements that a packed [n, k] weight takes.
PAGEDRAY_API int64_t pagedray_packed_size(int64_t n, int64_t k) {
    const Shape shape{0, n, k};
    return shape.panels() * shape.panel_size();
}

PAGEDRAY_API void pagedray_pack_linear(int32_t dtype, void* packed, const void* weight, int64_t n, int64_t k,
                                       int64_t stride, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        pack(static_cast<T*>(packed), static_cast<const T*>(weight), stride, Shape{0, n, k}, threads);
    });
}

// `out` is in `out_dtype`: that of the rest, or fp32.
PAGEDRAY_API void pagedray_linear(int32_t dtype, int32_t out_dtype, void* out, const void* x, const void* packed,
                                  const void* bias, int64_t rows, int64_t n, int64_t k, int64_t x_stride,
                                  int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_dtype(out_dtype, [&](auto* out_type) {
            using Out = std::remove_pointer_t<decltype(out_type)>;
            if constexpr (std::is_same_v<Out, T> || std::is_same_v<Out, float>)
                linear(static_cast<Out*>(out), static_cast<const T*>(x), x_stride, static_cast<const T*>(packed),
                       static_cast<const T*>(bias), Shape{rows, n, k}, threads);
        });
    });
}
