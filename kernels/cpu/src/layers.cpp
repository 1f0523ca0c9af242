// A stack of decoder layers in one call, made of the other operations:
//     x = norm(h);  for each layer:  x = o(attention(rotary(qkv(x))));  h += x;  x = down(silu_and_mul(gate_up(norm(h))));
//     h += x;  x = norm(h) with the next layer's weight, in the end with the final one
// What it saves is the way from Python to each of them and back, which is a third of a small model's decode step.
// Under tensor parallelism o and down give a rank's part of x, in fp32; the ranks of one host add them up on the spot.
#include "attention.h"
#include "panel.h"
#include "pool.h"
#include "shared_group.h"

extern "C" {
void pagedray_rms_norm(int32_t, void*, const void*, const void*, int64_t, int64_t, int64_t, float, int32_t);
void pagedray_add_rms_norm(int32_t, void*, void*, const void*, const void*, const void*, int64_t, int64_t, int64_t,
                           int64_t, float, int32_t);
void pagedray_linear(int32_t, int32_t, void*, const void*, const pagedray::Linear*, int64_t, int64_t, int32_t);
void pagedray_silu_and_mul(int32_t, void*, const void*, int64_t, int64_t, int64_t, int32_t);
void pagedray_rotary_and_cache(int32_t, int32_t, void*, const void*, const void*, const int64_t*, const float*,
                               const int64_t*, void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                               int64_t, int64_t, int64_t, int32_t);
}

namespace pagedray {

struct Layer {
    const void *input_norm, *post_attention_norm;
    const Linear *qkv, *o, *gate_up, *down;
};

struct Sizes {
    int64_t tokens, hidden, intermediate, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, sequences,
        max_blocks;
    int64_t cache_dtype;  // a DType
};

}  // namespace pagedray

using namespace pagedray;

// h += x
template <class T>
static void add(T* h, const T* x, int64_t rows, int64_t hidden, int threads) {
    parallel_for(rows, 32768 / hidden + 1, threads, [&](int64_t r) {
        for_each_vector(hidden, [&](int64_t j, auto get, auto put) {
            put(h + r * hidden + j, get(h + r * hidden + j) + get(x + r * hidden + j));
        });
    });
}

// `residual` [tokens, hidden] comes in as the embeddings; `x` [tokens, hidden] goes out as the normed hidden states. `wide`
// is scratch for [tokens, max(qkv, 2 intermediate)], `narrow` for [tokens, max(num_heads head_dim, intermediate)].
// `caches` holds each layer's K and V. Where `final_norm` is null, for another stage comes next, the result is `residual`.
// Heads and intermediate are this rank's; `group` is null where it has all of them. Returns what SharedGroup's waits do.
PAGEDRAY_API int32_t pagedray_decoder_layers(int32_t dtype, void* x, void* residual, void* wide, void* narrow,
                                          const Layer* layers, int64_t num_layers, void* const* caches,
                                          const void* final_norm, const int64_t* positions, const float* cos_sin,
                                          const int64_t* slots, const int32_t* query_start_loc, const int32_t* seq_lens,
                                          const int32_t* block_tables, const Sizes* sizes, float eps, float scale,
                                          SharedGroup* group, int32_t threads) {
    const auto& [tokens, hidden, intermediate, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, sequences,
                 max_blocks, cache_dtype] = *sizes;
    const int64_t heads = num_heads * head_dim, kv_heads = num_kv_heads * head_dim, qkv = heads + 2 * kv_heads;
    const int64_t element = dtype == BFLOAT16 ? sizeof(bf16) : sizeof(float);
    const auto linear = [&](void* out, const void* in, const Linear* weight) {
        pagedray_linear(dtype, dtype, out, in, weight, tokens, weight->k, threads);
    };
    // x = linear(in), summed over the ranks
    const auto linear_to_x = [&](const void* in, const Linear* weight) -> int32_t {
        if (!group) {
            linear(x, in, weight);
            return 0;
        }
        pagedray_linear(dtype, FLOAT32, group->next_slot(), in, weight, tokens, weight->k, threads);
        return dtype == BFLOAT16 ? group->reduce(static_cast<bf16*>(x), tokens, hidden, threads)
                                 : group->reduce(static_cast<float*>(x), tokens, hidden, threads);
    };
    char* const q = static_cast<char*>(wide);
    char* const k = q + heads * element;
    char* const v = k + kv_heads * element;
    const attention::Geometry geometry{num_heads, num_kv_heads, head_dim, block_size};
    const auto plan = attention::make_plan(
        geometry, {query_start_loc, seq_lens, block_tables, sequences, max_blocks}, threads);

    pagedray_rms_norm(dtype, x, residual, layers[0].input_norm, tokens, hidden, hidden, eps, threads);
    for (int64_t l = 0; l < num_layers; l++) {
        const Layer& layer = layers[l];
        void *k_cache = caches[2 * l], *v_cache = caches[2 * l + 1];
        linear(wide, x, layer.qkv);
        pagedray_rotary_and_cache(dtype, cache_dtype, q, k, v, positions, cos_sin, slots, k_cache, v_cache, tokens, qkv,
                                  qkv, qkv, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, threads);
        const attention::Caches layer_caches{static_cast<int32_t>(cache_dtype), k_cache, v_cache};
        attention::attend(dtype, narrow, q, qkv, layer_caches, geometry, scale, plan, threads);
        if (const int32_t status = linear_to_x(narrow, layer.o)) return status;
        pagedray_add_rms_norm(dtype, x, residual, x, residual, layer.post_attention_norm, tokens, hidden, hidden,
                              hidden, eps, threads);
        linear(wide, x, layer.gate_up);
        pagedray_silu_and_mul(dtype, narrow, wide, tokens, intermediate, 2 * intermediate, threads);
        if (const int32_t status = linear_to_x(narrow, layer.down)) return status;
        const void* next_norm = l + 1 < num_layers ? layers[l + 1].input_norm : final_norm;
        if (next_norm)
            pagedray_add_rms_norm(dtype, x, residual, x, residual, next_norm, tokens, hidden, hidden, hidden, eps, threads);
        else if (dtype == BFLOAT16)
            add(static_cast<bf16*>(residual), static_cast<const bf16*>(x), tokens, hidden, threads);
        else
            add(static_cast<float*>(residual), static_cast<const float*>(x), tokens, hidden, threads);
    }
    return 0;
}
