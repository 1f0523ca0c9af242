// y = round(x / sqrt(mean(x^2) + eps)) * weight, and the same of x + residual. One row a time, sums in fp32.
#include "pool.h"
#include "simd.h"

namespace pagedray {

template <class T>
static void normalize_row(T* out, const T* x, const T* weight, int64_t hidden, float eps) {
    vfloat squares[4] = {};  // chains, so that one addition need not wait for the last
    int64_t i = 0;
    for (; i + 4 * W <= hidden; i += 4 * W)
        for (int c = 0; c < 4; c++) {
            const vfloat v = load(x + i + c * W);
            squares[c] += v * v;
        }
    for_each_vector(hidden - i, [&](int64_t j, auto get, auto) {
        const vfloat v = get(x + i + j);
        squares[0] += v * v;
    });
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / hidden;
    const vfloat scale = splat(1.0f / std::sqrt(mean + eps));
    for_each_vector(hidden, [&](int64_t j, auto get, auto put) {
        put(out + j, round_to(out, get(x + j) * scale) * get(weight + j));
    });
}

}  // namespace pagedray

using namespace pagedray;

PAGEDRAY_API void pagedray_rms_norm(int32_t dtype, void* out, const void* x, const void* weight, int64_t rows,
                                    int64_t hidden, int64_t x_stride, float eps, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(rows, 32768 / hidden + 1, threads, [&](int64_t r) {
            normalize_row(static_cast<T*>(out) + r * hidden, static_cast<const T*>(x) + r * x_stride,
                          static_cast<const T*>(weight), hidden, eps);
        });
    });
}

PAGEDRAY_API void pagedray_add_rms_norm(int32_t dtype, void* out, void* new_residual, const void* x,
                                        const void* residual, const void* weight, int64_t rows, int64_t hidden,
                                        int64_t x_stride, int64_t residual_stride, float eps, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(rows, 32768 / hidden + 1, threads, [&](int64_t r) {
            T* added = static_cast<T*>(new_residual) + r * hidden;
            const T* a = static_cast<const T*>(x) + r * x_stride;
            const T* b = static_cast<const T*>(residual) + r * residual_stride;
            for_each_vector(hidden, [&](int64_t j, auto get, auto put) { put(added + j, get(a + j) + get(b + j)); });
            normalize_row(static_cast<T*>(out) + r * hidden, added, static_cast<const T*>(weight), hidden, eps);
        });
    });
}
