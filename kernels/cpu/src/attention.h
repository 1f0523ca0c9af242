// Paged attention in two parts: what a step's batch makes of it, the same for every layer, and a layer's work.
#pragma once

#include <cstdint>
#include <vector>

namespace pagedray::attention {

constexpr int SEGMENT = 256;  // keys

struct Geometry {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t group() const { return num_heads / num_kv_heads; }
};

// A layer's keys and values, [num_blocks, num_kv_heads, block_size, head_dim] of the queries' dtype, or rows of kv_row.h
// where `dtype` is INT8.
struct Caches {
    int32_t dtype;
    const void *keys, *values;
};

// A step's batch, as kernels.ops.AttentionMetadata has it.
struct Batch {
    const int32_t *query_start_loc, *seq_lens, *block_tables;
    int64_t sequences, max_blocks;
};

struct Query {
    int64_t token;       // in the step
    int64_t position;    // in its sequence
    int64_t first_part;  // where the softmax of its first segment is kept for one kv head; -1: it is not
    int64_t num_segments() const { return position / SEGMENT + 1; }
};

// Some queries for one kv head over some segments of keys that all of them have in the same blocks. Row r is query
// r / group, head r % group. Positions do not fall from query to query where a segment hides keys from any of them.
struct Tile {
    const int32_t* block_table;
    int64_t first_query, num_queries;  // of Plan::queries
    int64_t kv_head, first_segment, last_segment;
    int64_t end_position;  // of the keys
};

struct Plan {
    std::vector<Query> queries;
    std::vector<Tile> tiles;             // the longest first
    std::vector<int64_t> split_queries;  // those whose segments are apart, to be merged in the end; of `queries`
    int64_t num_parts = 0, most_rows = 0, work = 0;
};

Plan make_plan(const Geometry& geometry, const Batch& batch, int threads);

// out [tokens, num_heads, head_dim]; q's tokens are q_stride apart.
void attend(int32_t dtype, void* out, const void* q, int64_t q_stride, const Caches& caches, const Geometry& geometry,
            float scale, const Plan& plan, int threads);

}  // namespace pagedray::attention
