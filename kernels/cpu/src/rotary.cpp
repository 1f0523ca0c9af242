// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of each head's rotary part; q in place, k on its way into
// the cache. A cache is [num_blocks, num_kv_heads, block_size, head_dim], or of rows of kv_row.h where it is int8;
// slot = block * block_size + offset.
#include "kv_row.h"
#include "memory.h"
#include "pool.h"
#include "simd.h"

namespace pagedray {

// `out` may be `x`.
template <class T>
static void rotate_head(T* out, const T* x, const float* cos, const float* sin, int64_t half, int64_t head_dim) {
    for_each_vector(half, [&](int64_t j, auto get, auto put) {
        const vfloat x1 = get(x + j), x2 = get(x + half + j), c = get(cos + j), s = get(sin + j);
        put(out + j, x1 * c - x2 * s);
        put(out + half + j, x2 * c + x1 * s);
    });
    if (out != x) memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(T));
}

struct RotatedKey;

}  // namespace pagedray

using namespace pagedray;

PAGEDRAY_API void pagedray_rotary_and_cache(int32_t dtype, int32_t cache_dtype, void* q, const void* k, const void* v,
                                            const int64_t* positions, const float* cos_sin, const int64_t* slots,
                                            void* k_cache, void* v_cache, int64_t tokens, int64_t q_stride,
                                            int64_t k_stride, int64_t v_stride, int64_t num_heads,
                                            int64_t num_kv_heads, int64_t head_dim, int64_t rotary_dim,
                                            int64_t block_size, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t grain = 16384 / ((num_heads + 2 * num_kv_heads) * head_dim) + 1;
        parallel_for(tokens, grain, threads, [&](int64_t t) {
            const int64_t half = rotary_dim / 2;
            const float* cos = cos_sin + positions[t] * rotary_dim;
            const float* sin = cos + half;
            T* q_row = static_cast<T*>(q) + t * q_stride;
            for (int64_t h = 0; h < num_heads; h++)
                rotate_head(q_row + h * head_dim, q_row + h * head_dim, cos, sin, half, head_dim);
            if (slots[t] < 0) return;
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            for (int64_t h = 0; h < num_kv_heads; h++) {
                const int64_t row = (block * num_kv_heads + h) * block_size + offset;
                const T* key = static_cast<const T*>(k) + t * k_stride + h * head_dim;
                const T* value = static_cast<const T*>(v) + t * v_stride + h * head_dim;
                if (cache_dtype == INT8) {
                    T* rotated = reinterpret_cast<T*>(thread_memory<RotatedKey>(head_dim));
                    rotate_head(rotated, key, cos, sin, half, head_dim);
                    const int64_t at = row * kv_row::size(head_dim);
                    kv_row::write(static_cast<int8_t*>(k_cache) + at, rotated, head_dim);
                    kv_row::write(static_cast<int8_t*>(v_cache) + at, value, head_dim);
                } else {
                    rotate_head(static_cast<T*>(k_cache) + row * head_dim, key, cos, sin, half, head_dim);
                    memcpy(static_cast<T*>(v_cache) + row * head_dim, value, head_dim * sizeof(T));
                }
            }
        });
    });
}
