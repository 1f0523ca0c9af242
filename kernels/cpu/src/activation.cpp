// out = gate / (1 + e^-gate) * up, for rows of gate, up.
#include "pool.h"
#include "simd.h"

using namespace pagedray;

PAGEDRAY_API void pagedray_silu_and_mul(int32_t dtype, void* out, const void* x, int64_t rows, int64_t width,
                                        int64_t x_stride, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(rows, 16384 / width + 1, threads, [&](int64_t r) {
            const T* gate = static_cast<const T*>(x) + r * x_stride;
            const T* up = gate + width;
            T* row = static_cast<T*>(out) + r * width;
            for_each_vector(width, [&](int64_t j, auto get, auto put) {
                const vfloat g = get(gate + j);
                put(row + j, g / (1.0f + exp(-g)) * get(up + j));
            });
        });
    });
}
