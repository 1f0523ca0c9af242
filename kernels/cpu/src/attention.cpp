// out = softmax(scale q k^T + causal mask) v over a paged cache [num_blocks, num_kv_heads, block_size, head_dim].
//
// Online softmax (Milakov 2018, FlashAttention): per row, over chunks of keys,
//     m' = max(m, max s),  p = e^(s - m'),  l = l e^(m - m') + sum p,  acc = acc e^(m - m') + p v;  out = acc / l.
// A tile of rows shares each chunk it reads: the query heads of one kv head (GQA), times some queries in prefill.
//
// A row's order of arithmetic is fixed by its keys' positions alone: chunks of CHUNK inside segments of SEGMENT, segments
// merged in order. So it gives the same bits in any batch, in any chunk of a prefill, with any block size, and whether
// its segments ran in one thread or in many (FlashDecoding).
#include <algorithm>
#include <memory>
#include <vector>

#include "memory.h"
#include "pool.h"
#include "simd.h"

namespace pagedray {

constexpr int CHUNK = 64;
constexpr int SEGMENT = 256;
constexpr int TILE_ROWS = 48;  // about as many rows as make a chunk's transposition cheap
constexpr int R = 4;           // rows, and
constexpr int V = W == 16 ? 4 : 2;  // vectors, that a block of registers holds
constexpr float NEVER = -INFINITY;

struct Geometry {
    int64_t num_heads, num_kv_heads, head_dim, block_size, q_stride;
    float scale;
    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t padded_dim() const { return (head_dim + W - 1) / W * W; }  // whole vectors
};

// The rows of some neighboring queries of a sequence for one kv head; row r is query r / group, head r % group.
struct Tile {
    const int32_t* block_table;
    int64_t first_token;     // in the step
    int64_t first_position;  // in the sequence
    int rows;
    int kv_head;
    int64_t end_position(int64_t group) const { return first_position + rows / group; }
    int64_t num_segments(int64_t group) const { return (end_position(group) + SEGMENT - 1) / SEGMENT; }
};

// Softmax in progress: maximum, sum and unnormalized output of each row.
struct Partial {
    float *m, *l, *acc;  // [rows], [rows], [rows, padded_dim]
    Partial(float* memory, int rows) : m(memory), l(memory + rows), acc(memory + (2 * rows + 15) / 16 * 16) {}
    static int64_t size(int64_t rows, int64_t padded_dim) { return (2 * rows + 15) / 16 * 16 + rows * padded_dim; }
};

struct Scratch {
    std::unique_ptr<float[], Free> q, keys, values, scores, alpha;  // [rows, padded_dim], [padded_dim, CHUNK], [CHUNK, padded_dim], [rows, CHUNK], [rows]
    Scratch(int64_t rows, int64_t padded_dim)
        : q(aligned<float>(rows * padded_dim)), keys(aligned<float>(padded_dim * CHUNK)), values(aligned<float>(padded_dim * CHUNK)),
          scores(aligned<float>(rows * CHUNK)), alpha(aligned<float>(rows)) {}
};

// What a 32-bit lane of a query or key holds: one dimension; or two, where the CPU multiplies pairs of bf16 with sums
// in fp32.
template <class T>
struct Lanes {
    static constexpr int DIMS = 1;
    static vfloat load(const T* p) { return pagedray::load(p); }
    static vfloat multiply_add(vfloat sum, vfloat k, float q) { return sum + k * q; }
};
#if defined(__AVX512BF16__)
template <>
struct Lanes<bf16> {
    static constexpr int DIMS = 2;
    static vfloat load(const bf16* p) { return pagedray::load(reinterpret_cast<const float*>(p)); }
    static vfloat multiply_add(vfloat sum, vfloat k, float q) {
        return _mm512_dpbf16_ps(sum, (__m512bh)k, (__m512bh)splat_bits(q));
    }
    static __m512 splat_bits(float pair) { return _mm512_broadcastss_ps(_mm_load_ss(&pair)); }
};
#endif

// Calls f(lane, load) for each vector of lanes of a head; the last one may be in part.
template <class T, class F>
static void for_each_lanes(int64_t head_dim, F f) {
    constexpr int STEP = W * Lanes<T>::DIMS;
    int64_t d = 0;
    for (; d + STEP <= head_dim; d += STEP) f(d / Lanes<T>::DIMS, [d](const T* p) { return Lanes<T>::load(p + d); });
    if (d < head_dim)
        f(d / Lanes<T>::DIMS, [d, head_dim](const T* p) {
            T padded[STEP] = {};
            memcpy(padded, p + d, (head_dim - d) * sizeof(T));
            return Lanes<T>::load(padded);
        });
}

// keys[lane][t] = k[t][lane]: then a vector holds one lane of W keys, and scores need no sums across a vector.
template <class T>
static void transpose_keys(float* keys, const T* cache, const int64_t* at, int n, int64_t head_dim) {
    for (int t = 0; t < n; t += W)
        for_each_lanes<T>(head_dim, [&](int64_t lane, auto get) {
            vfloat square[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) square[i] = get(cache + at[t + i]);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store(keys + (lane + i) * CHUNK + t, square[i]);
        });
}

// scores[r][t] = q[r] . k[t] for N rows
template <int N, class T>
static void score_rows(float* scores, const float* q, const float* keys, int n, int64_t lanes, int64_t q_stride) {
    for (int t = 0; t < n; t += V * W) {
        vfloat s[N][V] = {};
        for (int64_t lane = 0; lane < lanes; lane++) {
            vfloat k[V];
            for (int v = 0; v < V; v++) k[v] = load(keys + lane * CHUNK + t + v * W);
            for (int r = 0; r < N; r++)
                for (int v = 0; v < V; v++) s[r][v] = Lanes<T>::multiply_add(s[r][v], k[v], q[r * q_stride + lane]);
        }
        for (int r = 0; r < N; r++)
            for (int v = 0; v < V; v++) store(scores + r * CHUNK + t + v * W, s[r][v]);
    }
}

// Scores of the first `visible` keys become p, the others 0. Returns e^(m - m').
static float softmax_row(float* scores, float& m, float& l, int visible, float scale) {
    vfloat s[CHUNK / W], highest = splat(NEVER);
    for (int v = 0; v < CHUNK / W; v++) {
        s[v] = iota() + v * W < visible ? load(scores + v * W) * scale : splat(NEVER);
        highest = max(highest, s[v]);
    }
    const float new_m = std::max(m, max(highest));
    vfloat total = {};
    for (int v = 0; v < CHUNK / W; v++) {
        const vfloat p = exp(s[v] - new_m);
        store(scores + v * W, p);
        total += p;
    }
    const float alpha = std::exp(m - new_m);
    l = l * alpha + sum(total);
    m = new_m;
    return alpha;
}

// acc[r][0 .. N*W) = acc alpha[r] + sum over t of p[r][t] v[t], for ROWS rows
template <int ROWS, int N, class T>
static void add_values_block(float* acc, int64_t stride, const float* alpha, const float* p, const T* values,
                             const int64_t* at, int64_t d, int n) {
    vfloat a[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < N; v++) a[r][v] = load(acc + r * stride + d + v * W) * alpha[r];
    for (int t = 0; t < n; t++) {
        vfloat value[N];
        for (int v = 0; v < N; v++) value[v] = load(values + at[t] + d + v * W);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < N; v++) a[r][v] += value[v] * p[r * CHUNK + t];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < N; v++) store(acc + r * stride + d + v * W, a[r][v]);
}

template <int ROWS, class T>
static void add_values(float* acc, int64_t stride, const float* alpha, const float* p, const T* values,
                       const int64_t* at, int n) {
    int64_t d = 0;
    for (; d + V * W <= stride; d += V * W) add_values_block<ROWS, V>(acc, stride, alpha, p, values, at, d, n);
    for (; d < stride; d += W) add_values_block<ROWS, 1>(acc, stride, alpha, p, values, at, d, n);
}

// Calls f<R>(r) for each R rows of first .. last, and f<1 .. R - 1> for the rest.
template <class F>
static void for_each_block(int first, int last, F f) {
    int r = first;
    for (; r + R <= last; r += R) f(std::integral_constant<int, R>(), r);
    static_assert(R == 4);
    if (last - r == 3) f(std::integral_constant<int, 3>(), r);
    if (last - r == 2) f(std::integral_constant<int, 2>(), r);
    if (last - r == 1) f(std::integral_constant<int, 1>(), r);
}

template <class T>
static void load_queries(float* q, const T* source, const Geometry& g, const Tile& tile) {
    for (int r = 0; r < tile.rows; r++) {
        const int64_t head = tile.kv_head * g.group() + r % g.group();
        const T* from = source + (tile.first_token + r / g.group()) * g.q_stride + head * g.head_dim;
        for_each_lanes<T>(g.head_dim, [&](int64_t lane, auto get) { store(q + r * g.padded_dim() + lane, get(from)); });
    }
}

// One segment of keys for a tile, from nothing. Rows that see none of it keep l = 0.
template <class T>
static void attend_segment(Partial out, const Geometry& g, const Tile& tile, int64_t segment, const T* k_cache,
                           const T* v_cache, Scratch& scratch) {
    const int64_t D = g.head_dim, stride = g.padded_dim(), group = g.group();
    const int64_t lanes = (D + Lanes<T>::DIMS - 1) / Lanes<T>::DIMS;
    std::fill_n(out.m, tile.rows, NEVER);
    std::fill_n(out.l, tile.rows, 0.f);
    std::fill_n(out.acc, tile.rows * stride, 0.f);
    const int64_t begin = segment * SEGMENT, end = std::min(begin + SEGMENT, tile.end_position(group));
    for (int64_t chunk = begin; chunk < end; chunk += CHUNK) {
        const int n = static_cast<int>(std::min<int64_t>(CHUNK, end - chunk));
        int64_t at[CHUNK] = {};  // where each key stands in the cache; beyond n: some place that exists
        for (int t = 0; t < n;) {
            const int64_t block = tile.block_table[(chunk + t) / g.block_size], offset = (chunk + t) % g.block_size;
            const int64_t first_at = ((block * g.num_kv_heads + tile.kv_head) * g.block_size + offset) * D;
            const int run = static_cast<int>(std::min<int64_t>(n - t, g.block_size - offset));
            for (int i = 0; i < run; i++) at[t + i] = first_at + i * D;
            t += run;
        }
        // Rows are in order of position: those before `first` see nothing of this chunk.
        const int first = static_cast<int>(std::max<int64_t>(0, chunk - tile.first_position) * group);
        float *q = scratch.q.get(), *p = scratch.scores.get(), *alpha = scratch.alpha.get();

        transpose_keys(scratch.keys.get(), k_cache, at, n, D);
        for_each_block(first, tile.rows, [&](auto rows, int r) {
            score_rows<rows(), T>(p + r * CHUNK, q + r * stride, scratch.keys.get(), n, lanes, stride);
        });
        for (int r = first; r < tile.rows; r++) {
            const int64_t visible = tile.first_position + r / group - chunk + 1;
            alpha[r] = softmax_row(p + r * CHUNK, out.m[r], out.l[r], std::min<int64_t>(n, visible), g.scale);
        }
        const bool in_place = D == stride && (tile.rows - first <= R || std::is_same_v<T, float>);
        for (int t = 0; t < n && !in_place; t++) {  // converted once for all rows, padded to whole vectors
            float* row = scratch.values.get() + t * stride;
            for_each_vector(D, [&](int64_t d, auto get, auto) { store(row + d, get(v_cache + at[t] + d)); });
            at[t] = t * stride;
        }
        for_each_block(first, tile.rows, [&](auto rows, int r) {
            float* acc = out.acc + r * stride;
            if (in_place) add_values<rows()>(acc, stride, alpha + r, p + r * CHUNK, v_cache, at, n);
            else add_values<rows()>(acc, stride, alpha + r, p + r * CHUNK, scratch.values.get(), at, n);
        });
    }
}

// into = into + part
static void merge(Partial into, Partial part, int rows, int64_t stride) {
    for (int r = 0; r < rows; r++) {
        if (part.l[r] == 0) continue;
        const float m = std::max(into.m[r], part.m[r]);
        const float a = std::exp(into.m[r] - m), b = std::exp(part.m[r] - m);
        into.m[r] = m;
        into.l[r] = into.l[r] * a + part.l[r] * b;
        for (int64_t d = r * stride; d < (r + 1) * stride; d += W)
            store(into.acc + d, load(into.acc + d) * a + load(part.acc + d) * b);
    }
}

template <class T>
static void write_output(T* out, Partial result, const Geometry& g, const Tile& tile) {
    for (int r = 0; r < tile.rows; r++) {
        const int64_t token = tile.first_token + r / g.group(), head = tile.kv_head * g.group() + r % g.group();
        T* row = out + (token * g.num_heads + head) * g.head_dim;
        const float inverse = 1.0f / result.l[r];
        for_each_vector(g.head_dim, [&](int64_t d, auto, auto put) {
            put(row + d, load(result.acc + r * g.padded_dim() + d) * inverse);
        });
    }
}

static std::vector<Tile> make_tiles(const Geometry& g, const int32_t* query_start_loc, const int32_t* seq_lens,
                                    const int32_t* block_tables, int64_t sequences, int64_t max_blocks) {
    const int64_t queries_per_tile = std::max<int64_t>(1, TILE_ROWS / g.group());
    std::vector<Tile> tiles;
    for (int64_t b = 0; b < sequences; b++) {
        const int64_t begin = query_start_loc[b], queries = query_start_loc[b + 1] - begin;
        for (int64_t i = 0; i < queries; i += queries_per_tile)
            for (int64_t h = 0; h < g.num_kv_heads; h++)
                tiles.push_back({block_tables + b * max_blocks, begin + i, seq_lens[b] - queries + i,
                                 static_cast<int>(std::min(queries_per_tile, queries - i) * g.group()),
                                 static_cast<int>(h)});
    }
    // The longest first, so that no thread starts one when the others are done.
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const Tile& a, const Tile& b) { return a.first_position > b.first_position; });
    return tiles;
}

template <class T>
static void paged_attention(T* out, const T* q, const T* k_cache, const T* v_cache, const Geometry& g,
                            const std::vector<Tile>& tiles, int threads) {
    const int64_t stride = g.padded_dim(), group = g.group();
    int64_t rows = 0, segments = 0, work = 0;
    for (const Tile& tile : tiles) {
        rows = std::max<int64_t>(rows, tile.rows);
        segments += tile.num_segments(group);
        work += tile.rows * tile.end_position(group) * g.head_dim;
    }
    if (work < 32768) threads = 1;
    const int64_t size = (Partial::size(rows, stride) + W - 1) / W * W, num_tiles = tiles.size();

    if (num_tiles >= 4 * threads || segments == num_tiles || threads == 1) {  // tiles enough for every thread
        parallel(num_tiles, threads, [&](Tasks& mine) {
            Scratch scratch(rows, stride);
            const auto memory = aligned<float>(2 * size);
            for (int64_t i; mine.next(i);) {
                const Tile& tile = tiles[i];
                Partial result(memory.get(), tile.rows), part(memory.get() + size, tile.rows);
                load_queries(scratch.q.get(), q, g, tile);
                attend_segment(result, g, tile, 0, k_cache, v_cache, scratch);
                for (int64_t s = 1; s < tile.num_segments(group); s++) {
                    attend_segment(part, g, tile, s, k_cache, v_cache, scratch);
                    merge(result, part, tile.rows, stride);
                }
                write_output(out, result, g, tile);
            }
        });
        return;
    }

    struct Piece { const Tile* tile; int64_t segment; };  // few tiles, long contexts: threads share out the segments
    std::vector<Piece> pieces;
    for (const Tile& tile : tiles)
        for (int64_t s = 0; s < tile.num_segments(group); s++) pieces.push_back({&tile, s});
    const auto memory = aligned<float>(segments * size);
    parallel(segments, threads, [&](Tasks& mine) {
        Scratch scratch(rows, stride);
        for (int64_t i; mine.next(i);) {
            const Tile& tile = *pieces[i].tile;
            load_queries(scratch.q.get(), q, g, tile);
            attend_segment(Partial(memory.get() + i * size, tile.rows), g, tile, pieces[i].segment, k_cache, v_cache,
                           scratch);
        }
    });
    const float* at = memory.get();
    for (const Tile& tile : tiles) {
        Partial result(const_cast<float*>(at), tile.rows);
        for (int64_t s = 1; s < tile.num_segments(group); s++)
            merge(result, Partial(const_cast<float*>(at) + s * size, tile.rows), tile.rows, stride);
        write_output(out, result, g, tile);
        at += tile.num_segments(group) * size;
    }
}

}  // namespace pagedray

using namespace pagedray;

PAGEDRAY_API void pagedray_paged_attention(int32_t dtype, void* out, const void* q, const void* k_cache,
                                           const void* v_cache, const int32_t* query_start_loc,
                                           const int32_t* seq_lens, const int32_t* block_tables, int64_t sequences,
                                           int64_t max_blocks, int64_t q_stride, int64_t num_heads,
                                           int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale,
                                           int32_t threads) {
    const Geometry g{num_heads, num_kv_heads, head_dim, block_size, q_stride, scale};
    const auto tiles = make_tiles(g, query_start_loc, seq_lens, block_tables, sequences, max_blocks);
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        paged_attention(static_cast<T*>(out), static_cast<const T*>(q), static_cast<const T*>(k_cache),
                        static_cast<const T*>(v_cache), g, tiles, threads);
    });
}
