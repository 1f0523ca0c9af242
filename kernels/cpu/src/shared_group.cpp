// Sum and gather among the ranks of a host, called from outside the decoder: embeddings and logits.
#include "shared_group.h"

#include <cstring>

using namespace pagedray;

PAGEDRAY_API int64_t pagedray_shared_group_bytes(int64_t size, int64_t slot_bytes) {
    return SharedGroup::header_bytes(size) + 2 * size * slot_bytes;
}

PAGEDRAY_API void pagedray_shared_group_abort(SharedGroup* group) {
    group->aborted().store(1, std::memory_order_relaxed);
}

// part fp32 [rows, hidden] -> out [rows, hidden], in as many rounds as slots of that size take.
PAGEDRAY_API int32_t pagedray_all_reduce(SharedGroup* group, int32_t dtype, void* out, const float* part, int64_t rows,
                                         int64_t hidden, int32_t threads) {
    int32_t status = 0;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t at_once = group->slot_bytes / (hidden * static_cast<int64_t>(sizeof(float)));
        for (int64_t row = 0; row < rows && !status; row += at_once) {
            const int64_t count = std::min(at_once, rows - row);
            memcpy(group->next_slot(), part + row * hidden, count * hidden * sizeof(float));
            status = group->reduce(static_cast<T*>(out) + row * hidden, count, hidden, threads);
        }
    });
    return status;
}

// part fp32 [rows, columns[rank]] -> on rank 0 out [rows, sum of columns], side by side. `out` is null elsewhere.
PAGEDRAY_API int32_t pagedray_gather(SharedGroup* group, float* out, const float* part, int64_t rows,
                                     const int64_t* columns, int32_t threads) {
    int64_t widest = 0, total = 0;
    for (int32_t r = 0; r < group->size; r++) {
        widest = std::max(widest, columns[r]);
        total += columns[r];
    }
    const int64_t at_once = group->slot_bytes / (widest * static_cast<int64_t>(sizeof(float))), mine = columns[group->rank];
    for (int64_t row = 0; row < rows; row += at_once) {
        const int64_t count = std::min(at_once, rows - row);
        memcpy(group->next_slot(), part + row * mine, count * mine * sizeof(float));
        if (const int32_t status = group->arrive_and_wait()) return status;
        if (!out) continue;
        parallel_for(count, 1, threads, [&](int64_t i) {
            float* to = out + (row + i) * total;
            for (int32_t r = 0; r < group->size; to += columns[r++])
                memcpy(to, group->slot(r, group->round) + i * columns[r], columns[r] * sizeof(float));
        });
    }
    return 0;
}
