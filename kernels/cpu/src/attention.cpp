// out = softmax(scale q k^T + causal mask) v over paged caches [num_blocks, num_kv_heads, block_size, row].
//
// A tile of rows goes through its keys segment by segment: both products of a segment are matrix products of packed
// keys and values, with a softmax between them; its result is one part of the rows' softmax, and parts are merged in
// order. A tile's rows are the query heads of one kv head (GQA), times some queries (attention_plan.cpp).
//
// A row's arithmetic is fixed by its keys' positions alone: segments begin at multiples of SEGMENT, each is computed
// from nothing, and merged in order. So it gives the same bits in any batch and tile, decoding or in any chunk of a
// prefill, with any block size, and whether its segments ran in one thread or in many. Where products are made of pairs
// of bf16, p is rounded to bf16 for the second one, as FlashAttention does.
#include "attention.h"

#include <algorithm>

#include "kv_row.h"
#include "matrix.h"
#include "memory.h"
#include "pool.h"
#include "softmax.h"

namespace pagedray::attention {

using matrix::Element, matrix::Multiplier, softmax::Parts;

// Tensors of a layer, with sizes in elements.
template <class T>
struct Layer {
    T* out;
    const T* q;
    const Caches& caches;
    int64_t q_stride;
    float scale;  // to scores in units of ln 2
    const Geometry& g;

    static constexpr int64_t WORD = matrix::Word<T>::SIZE, STEP = W * WORD;
    int64_t depth() const { return (g.head_dim + STEP - 1) / STEP * W; }      // of scores, in words
    int64_t columns() const { return (g.head_dim + W - 1) / W * W; }          // of the output
    int64_t part_size() const { return (Parts::size(g.group(), columns()) + 15) / 16 * 16; }
};

// What a thread works with. The products of a segment go through blocks of at most ROWS rows.
template <class T>
struct Scratch {
    static constexpr int ROWS = Multiplier<T>::ROWS;
    Element<T>*q, *keys, *values, *p;
    float *scores, *part, *result;
    T* rows[2];  // of an int8 cache, as T
    Multiplier<T> multiply;

    Scratch(const Layer<T>& layer, int64_t num_rows) {
        const int64_t depth = layer.depth(), columns = layer.columns();
        const int64_t plain = layer.caches.dtype == INT8 ? SEGMENT * layer.g.head_dim : 0;
        const int64_t sizes[] = {
            num_rows * depth, depth * SEGMENT,             columns * SEGMENT,               ROWS * SEGMENT,
            ROWS * SEGMENT,   Parts::size(ROWS, columns), Parts::size(num_rows, columns), plain, plain};
        int64_t total = 0;
        for (int64_t size : sizes) total += padded(size);
        float* next = thread_memory<Scratch>(total);
        float* pieces[9];
        for (int i = 0; i < 9; next += padded(sizes[i++])) pieces[i] = next;
        q = reinterpret_cast<Element<T>*>(pieces[0]);
        keys = reinterpret_cast<Element<T>*>(pieces[1]);
        values = reinterpret_cast<Element<T>*>(pieces[2]);
        p = reinterpret_cast<Element<T>*>(pieces[3]);
        scores = pieces[4], part = pieces[5], result = pieces[6];
        rows[0] = reinterpret_cast<T*>(pieces[7]), rows[1] = reinterpret_cast<T*>(pieces[8]);
    }
    static int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }
};

// Where n keys from position `begin` on stand in a cache with `row_size` elements to each.
static void locate(int64_t* at, const Geometry& g, const Tile& tile, int64_t begin, int n, int64_t row_size) {
    for (int t = 0; t < n;) {
        const int64_t block = tile.block_table[(begin + t) / g.block_size], offset = (begin + t) % g.block_size;
        const int64_t first = ((block * g.num_kv_heads + tile.kv_head) * g.block_size + offset) * row_size;
        const int run = static_cast<int>(std::min<int64_t>(n - t, g.block_size - offset));
        for (int i = 0; i < run; i++) at[t + i] = first + i * row_size;
        t += run;
    }
}

// Everything that a segment reads, block by block in turn: then misses of many pages are under way at a time, where the
// order of reading would have them one after the other.
template <class T>
static void prefetch(const T* k_cache, const T* v_cache, const int64_t* at, int n, int64_t row_size) {
    constexpr int BLOCK = 16;
    for (int i = 0; i < BLOCK; i++)
        for (int t = i; t < n; t += BLOCK)
            for (const T* cache : {k_cache, v_cache})
                for (int64_t d = 0; d < row_size; d += 64 / sizeof(T)) __builtin_prefetch(cache + at[t] + d, 0, 2);
}

template <class T>
static void load_queries(Element<T>* to, const Layer<T>& layer, const Tile& tile, const Query* queries) {
    const int64_t D = layer.g.head_dim, group = layer.g.group(), stride = layer.depth() * layer.WORD;
    for (int64_t i = 0; i < tile.num_queries; i++) {
        const T* from = layer.q + queries[i].token * layer.q_stride + tile.kv_head * group * D;
        for (int64_t h = 0; h < group; h++, from += D, to += stride) {
            if constexpr (std::is_same_v<T, Element<T>>) memcpy(to, from, D * sizeof(T));
            else for_each_vector(D, [&](int64_t d, auto get, auto put) { put(to + d, get(from + d)); });
            std::fill(to + D, to + stride, Element<T>{});
        }
    }
}

// Packs n keys and values from position `begin` on for the two products, `padded` keys of them.
template <class T>
static void load_segment(const Layer<T>& layer, const Tile& tile, int64_t begin, int n, int padded,
                         Scratch<T>& scratch) {
    const int64_t D = layer.g.head_dim;
    int64_t at[SEGMENT];
    const void *keys = layer.caches.keys, *values = layer.caches.values;
    if (layer.caches.dtype == INT8) {
        const int8_t *const from[] = {static_cast<const int8_t*>(keys), static_cast<const int8_t*>(values)};
        locate(at, layer.g, tile, begin, n, kv_row::size(D));
        prefetch(from[0], from[1], at, n, kv_row::size(D));
        for (int i = 0; i < 2; i++)
            for (int t = 0; t < n; t++) kv_row::read(scratch.rows[i] + t * D, from[i] + at[t], D);
        for (int t = 0; t < n; t++) at[t] = t * D;
        keys = scratch.rows[0], values = scratch.rows[1];
    } else {
        locate(at, layer.g, tile, begin, n, D);
        prefetch(static_cast<const T*>(keys), static_cast<const T*>(values), at, n, D);
    }
    for (int t = n; t < padded; t++) at[t] = at[n - 1];  // some key, that no row sees
    matrix::pack_columns<T>(scratch.keys, static_cast<const T*>(keys), at, padded, D, layer.depth());
    matrix::pack_rows<T>(scratch.values, static_cast<const T*>(values), at, n, D, padded / layer.WORD);
}

// Merges one segment into the tile's result.
template <class T>
static void attend_segment(const Parts& result, const Layer<T>& layer, const Tile& tile, const Query* queries,
                           int64_t segment, Scratch<T>& scratch) {
    constexpr int ROWS = Scratch<T>::ROWS, WORD = Layer<T>::WORD, STEP = Layer<T>::STEP;
    const int64_t group = layer.g.group(), depth = layer.depth(), columns = layer.columns();
    const int64_t begin = segment * SEGMENT, rows = tile.num_queries * group;
    const int n = static_cast<int>(std::min<int64_t>(SEGMENT, tile.end_position - begin));
    const int padded = (n + STEP - 1) / STEP * STEP;
    load_segment(layer, tile, begin, n, padded, scratch);

    const auto visible = [&](int64_t row) {
        return static_cast<int>(std::clamp<int64_t>(queries[row / group].position + 1 - begin, 0, n));
    };
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int count = static_cast<int>(std::min<int64_t>(ROWS, rows - r));
        if (!visible(r + count - 1)) continue;
        const Parts part(scratch.part, count);
        scratch.multiply(scratch.scores, SEGMENT, scratch.q + r * depth * WORD, depth * WORD, scratch.keys, count,
                         depth, padded);
        for (int i = 0; i < count; i++)
            softmax::scores_to_p(scratch.p + i * SEGMENT, part.m[i], part.l[i], scratch.scores + i * SEGMENT,
                                 visible(r + i), padded, layer.scale);
        scratch.multiply(part.acc, columns, scratch.p, SEGMENT, scratch.values, count, padded / WORD, columns);
        softmax::merge(result.from(r, columns), part, count, columns);
    }
}

template <class T>
static void write_output(const Layer<T>& layer, const Parts& result, int64_t row, const Query& query, int64_t kv_head) {
    const int64_t D = layer.g.head_dim, group = layer.g.group();
    T* out = layer.out + (query.token * layer.g.num_heads + kv_head * group) * D;
    for (int64_t r = row; r < row + group; r++, out += D) {
        const float inverse = 1.0f / result.l[r];
        for_each_vector(D, [&](int64_t d, auto, auto put) {
            put(out + d, load(result.acc + r * layer.columns() + d) * inverse);
        });
    }
}

template <class T>
static void attend_tile(const Layer<T>& layer, const Tile& tile, const Plan& plan, Scratch<T>& scratch, float* parts) {
    const Query* queries = plan.queries.data() + tile.first_query;
    const int64_t group = layer.g.group(), columns = layer.columns(), rows = tile.num_queries * group;
    const Parts result(scratch.result, rows);
    result.clear(rows, columns);
    load_queries(scratch.q, layer, tile, queries);
    for (int64_t s = tile.first_segment; s < tile.last_segment; s++)
        attend_segment(result, layer, tile, queries, s, scratch);
    for (int64_t i = 0; i < tile.num_queries; i++) {
        const Query& query = queries[i];
        if (query.first_part < 0) {
            write_output(layer, result, i * group, query, tile.kv_head);
        } else if (tile.first_segment < query.num_segments()) {
            const int64_t index = query.first_part + tile.kv_head * query.num_segments() + tile.first_segment;
            const Parts to(parts + index * layer.part_size(), group);
            std::copy_n(result.m + i * group, group, to.m);
            std::copy_n(result.l + i * group, group, to.l);
            std::copy_n(result.acc + i * group * columns, group * columns, to.acc);
        }
    }
}

template <class T>
static void merge_query(const Layer<T>& layer, const Query& query, int64_t kv_head, float* parts) {
    const int64_t group = layer.g.group(), size = layer.part_size(), segments = query.num_segments();
    float* first = parts + (query.first_part + kv_head * segments) * size;
    const Parts result(first, group);
    for (int64_t s = 1; s < segments; s++)
        softmax::merge(result, Parts(first + s * size, group), group, layer.columns());
    write_output(layer, result, 0, query, kv_head);
}

template <class T>
static void attend(const Layer<T>& layer, const Plan& plan, int threads) {
    struct OfParts;
    float* parts = thread_memory<OfParts>(plan.num_parts * layer.part_size());
    parallel(plan.tiles.size(), plan.work < 32768 ? 1 : threads, [&](Tasks& mine) {
        Scratch<T> scratch(layer, plan.most_rows);
        for (int64_t i; mine.next(i);) attend_tile(layer, plan.tiles[i], plan, scratch, parts);
    });
    const int64_t heads = layer.g.num_kv_heads, grain = 100000 / (layer.part_size() * 8) + 1;
    parallel_for(plan.split_queries.size() * heads, grain, threads, [&](int64_t i) {
        merge_query(layer, plan.queries[plan.split_queries[i / heads]], i % heads, parts);
    });
}

void attend(int32_t dtype, void* out, const void* q, int64_t q_stride, const Caches& caches, const Geometry& geometry,
            float scale, const Plan& plan, int threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        attend(Layer<T>{static_cast<T*>(out), static_cast<const T*>(q), caches, q_stride, scale * 1.44269504f,
                        geometry},
               plan, threads);
    });
}

}  // namespace pagedray::attention

using namespace pagedray;

PAGEDRAY_API void pagedray_paged_attention(int32_t dtype, int32_t cache_dtype, void* out, const void* q,
                                           const void* k_cache, const void* v_cache, const int32_t* query_start_loc,
                                           const int32_t* seq_lens, const int32_t* block_tables, int64_t sequences,
                                           int64_t max_blocks, int64_t q_stride, int64_t num_heads,
                                           int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale,
                                           int32_t threads) {
    const attention::Geometry geometry{num_heads, num_kv_heads, head_dim, block_size};
    const auto plan = attention::make_plan(
        geometry, {query_start_loc, seq_lens, block_tables, sequences, max_blocks}, threads);
    attention::attend(dtype, out, q, q_stride, {cache_dtype, k_cache, v_cache}, geometry, scale, plan, threads);
}
