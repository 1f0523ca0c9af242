// Cuts a step's attention into tiles: rows that read the same keys.
//
// - A prompt's queries, some neighbors a tile, go through all their segments in one piece; keys that prompts share are
//   not worth sharing there, as packing them is little work beside a tile's rows.
// - Where rows are few and contexts long (decode), each segment is a tile, and the parts of a row are merged in the
//   end: threads share the context (FlashDecoding), and sequences that have a segment in the same blocks, as those with
//   a common prefix do, share the tile and read its keys once (cascade inference, Hydragen, ChunkAttention).
#include "attention.h"

#include <algorithm>

namespace pagedray::attention {

constexpr int64_t TILE_ROWS = 384;  // so many that the packing of keys and values costs little beside them
constexpr int64_t FEW_ROWS = 64;

namespace {

struct Sequence {
    const int32_t* block_table;
    int64_t first_query, num_queries, length;
    int64_t history() const { return length - num_queries; }
    int64_t num_segments() const { return (length + SEGMENT - 1) / SEGMENT; }
};

class Planner {
   public:
    Planner(const Geometry& geometry, const Batch& batch, int threads) : geometry(geometry) {
        for (int64_t b = 0; b < batch.sequences; b++) {
            const int64_t begin = batch.query_start_loc[b], queries = batch.query_start_loc[b + 1] - begin;
            const int32_t* table = batch.block_tables + b * batch.max_blocks;
            if (queries) sequences.push_back({table, begin, queries, batch.seq_lens[b]});
        }
        // Those that will share segments stand together, and among them those with a common prefix.
        std::sort(sequences.begin(), sequences.end(), [&](const Sequence& a, const Sequence& b) {
            if (apart(a) != apart(b)) return apart(b);
            const int64_t blocks = std::min(blocks_of(a.length), blocks_of(b.length));
            const auto [x, y] = std::mismatch(a.block_table, a.block_table + blocks, b.block_table);
            if (x != a.block_table + blocks) return *x < *y;
            return a.length != b.length ? a.length < b.length : a.first_query < b.first_query;
        });
        while (tile_rows > FEW_ROWS && threads > 1 && num_whole_tiles() < 4 * threads) tile_rows /= 2;

        std::vector<Sequence> split;
        for (Sequence s : sequences) {
            const int64_t first = plan.queries.size();
            for (int64_t i = 0; i < s.num_queries; i++) {
                Query query{s.first_query + i, s.history() + i, -1};
                if (apart(s)) {
                    query.first_part = plan.num_parts;
                    plan.num_parts += query.num_segments() * geometry.num_kv_heads;
                    plan.split_queries.push_back(plan.queries.size());
                }
                plan.queries.push_back(query);
            }
            s.first_query = first;
            if (apart(s)) split.push_back(s);
            else add_tiles(s, first, s.num_queries, 0, s.num_segments());
        }
        share_segments(split);
        // So that no thread starts a long one when the others are done.
        std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                         [](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
    }

    Plan plan;

   private:
    const Geometry& geometry;
    std::vector<Sequence> sequences;
    int64_t tile_rows = TILE_ROWS;

    int64_t blocks_of(int64_t tokens) const { return (tokens + geometry.block_size - 1) / geometry.block_size; }
    int64_t queries_per_tile() const { return std::max<int64_t>(1, tile_rows / geometry.group()); }
    bool few(const Sequence& s) const { return s.num_queries * geometry.group() <= FEW_ROWS; }
    bool apart(const Sequence& s) const { return few(s) && s.num_segments() > 1; }
    int64_t num_whole_tiles() const {
        int64_t tiles = 0;
        for (const Sequence& s : sequences)
            if (!few(s)) tiles += (s.num_queries + queries_per_tile() - 1) / queries_per_tile() * geometry.num_kv_heads;
        return tiles;
    }
    static int64_t cost(const Tile& t) { return (t.last_segment - t.first_segment) * (t.num_queries + 8); }

    // Whether both have segment s, all of it before their queries, in the same blocks.
    bool same_segment(const Sequence& a, const Sequence& b, int64_t s) const {
        if (std::min(a.history(), b.history()) < (s + 1) * SEGMENT) return false;
        const int64_t first = s * SEGMENT / geometry.block_size, last = blocks_of((s + 1) * SEGMENT);
        return std::equal(a.block_table + first, a.block_table + last, b.block_table + first);
    }

    void share_segments(const std::vector<Sequence>& split) {
        int64_t most = 0;
        for (const Sequence& s : split) most = std::max(most, s.num_segments());
        for (int64_t segment = 0; segment < most; segment++)
            for (size_t i = 0; i < split.size();) {
                int64_t queries = split[i].num_queries;
                size_t next = i + 1;
                for (; next < split.size() && same_segment(split[i], split[next], segment); next++)
                    queries += split[next].num_queries;
                if (segment < split[i].num_segments())
                    add_tiles(split[i], split[i].first_query, queries, segment, segment + 1);
                i = next;
            }
    }

    // `queries` from `first` on, the sequence's own and maybe those of its neighbors.
    void add_tiles(const Sequence& s, int64_t first, int64_t queries, int64_t first_segment, int64_t last_segment) {
        for (int64_t i = 0; i < queries; i += queries_per_tile()) {
            const int64_t count = std::min(queries_per_tile(), queries - i);
            const int64_t end = plan.queries[first + i + count - 1].position + 1;
            for (int64_t h = 0; h < geometry.num_kv_heads; h++) {
                Tile tile{s.block_table, first + i, count, h, first_segment, last_segment, end};
                tile.last_segment = std::min(last_segment, (end + SEGMENT - 1) / SEGMENT);
                if (tile.first_segment >= tile.last_segment) continue;  // these queries see nothing of it
                plan.tiles.push_back(tile);
                const int64_t rows = count * geometry.group();
                plan.most_rows = std::max(plan.most_rows, rows);
                plan.work += rows * (tile.last_segment - first_segment) * SEGMENT * geometry.head_dim;
            }
        }
    }
};

}  // namespace

Plan make_plan(const Geometry& geometry, const Batch& batch, int threads) {
    return std::move(Planner(geometry, batch, threads).plan);
}

}  // namespace pagedray::attention
