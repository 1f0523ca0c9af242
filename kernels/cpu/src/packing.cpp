// Weights brought to the order of panel.h, once, at load; and rows of GGUF's blocks dequantized, for embeddings.
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "quantized.h"

namespace pagedray {

// A GGUF block (llama.cpp, ggml-common.h) taken apart: codes as panels hold them, scales as the file holds them.
struct Unpacked {
    int8_t codes[256];
    half d, m;
    int8_t scales[16], minimums[8];
};

static half half_at(const uint8_t* p) {
    half h;
    memcpy(&h, p, 2);
    return h;
}

// The values and bytes of a block, and how it is read. `F` is the format that it lies in afterwards.
template <class F_, int VALUES_, int BYTES_>
struct BlockType {
    using F = F_;
    static constexpr int VALUES = VALUES_, BYTES = BYTES_;
};

struct Block4_0 : BlockType<Q4_0, 32, 18> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        for (int i = 0; i < 32; i++) u.codes[i] = p[2 + i % 16] >> i / 16 * 4 & 15;
    }
};
struct Block4_1 : BlockType<Q4_1, 32, 20> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        u.m = half_at(p + 2);
        for (int i = 0; i < 32; i++) u.codes[i] = p[4 + i % 16] >> i / 16 * 4 & 15;
    }
};
static void unpack_5(Unpacked& u, const uint8_t* high, const uint8_t* low, int zero) {
    for (int i = 0; i < 32; i++)
        u.codes[i] = (low[i % 16] >> i / 16 * 4 & 15) + (high[i / 8] >> i % 8 & 1) * 16 - zero;
}
struct Block5_0 : BlockType<Q8_0, 32, 22> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        unpack_5(u, p + 2, p + 6, 16);
    }
};
struct Block5_1 : BlockType<Q5_1, 32, 24> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        u.m = half_at(p + 2);
        unpack_5(u, p + 4, p + 8, 0);
    }
};
struct Block8_0 : BlockType<Q8_0, 32, 34> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        memcpy(u.codes, p + 2, 32);
    }
};
// 8 scales and 8 minimums of 6 bits in 12 bytes.
static void unpack_integers(Unpacked& u, const uint8_t* p) {
    for (int i = 0; i < 4; i++) {
        u.scales[i] = p[i] & 63;
        u.minimums[i] = p[4 + i] & 63;
        u.scales[4 + i] = (p[8 + i] & 15) | p[i] >> 6 << 4;
        u.minimums[4 + i] = p[8 + i] >> 4 | p[4 + i] >> 6 << 4;
    }
}
struct Block4_K : BlockType<Q4_K, 256, 144> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        u.m = half_at(p + 2);
        unpack_integers(u, p + 4);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) u.codes[g * 32 + i] = p[16 + g / 2 * 32 + i] >> g % 2 * 4 & 15;
    }
};
struct Block5_K : BlockType<Q5_K, 256, 176> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p);
        u.m = half_at(p + 2);
        unpack_integers(u, p + 4);
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++)
                u.codes[g * 32 + i] = (p[48 + g / 2 * 32 + i] >> g % 2 * 4 & 15) + (p[16 + i] >> g & 1) * 16;
    }
};
struct Block6_K : BlockType<Q6_K, 256, 210> {
    static void unpack(Unpacked& u, const uint8_t* p) {
        u.d = half_at(p + 208);
        memcpy(u.scales, p + 192, 16);
        for (int g = 0; g < 8; g++)  // 32 values: nibbles of the low bytes, two bits of the high ones
            for (int i = 0; i < 32; i++) {
                const int low = p[g / 4 * 64 + g % 2 * 32 + i] >> g % 4 / 2 * 4 & 15;
                const int high = p[128 + g / 4 * 32 + i] >> g % 4 * 2 & 3;
                u.codes[g * 32 + i] = low + high * 16 - 32;
            }
    }
};

template <class F>
static void with_block(int64_t format, F f) {
    switch (format) {
        case 2: return f(Block4_0{});
        case 3: return f(Block4_1{});
        case 6: return f(Block5_0{});
        case 7: return f(Block5_1{});
        case 8: return f(Block8_0{});
        case 12: return f(Block4_K{});
        case 13: return f(Block5_K{});
        case 14: return f(Block6_K{});
    }
}

template <class T>
static void pack(T* packed, const T* weight, int64_t stride, int64_t num_rows, int64_t num_k, int threads) {
    const int64_t panel_size = steps_of(num_k) * STEP * PANEL;
    parallel_for(panels_of(num_rows), 1, threads, [&](int64_t p) {
        T* panel = packed + p * panel_size;
        std::fill_n(panel, panel_size, T{});
        for (int64_t n = p * PANEL; n < std::min((p + 1) * PANEL, num_rows); n++)
            for (int64_t k = 0; k < num_k; k++)
                panel[(k / STEP * 2 + n % PANEL / TILE) * STEP * TILE + place<T>(k % STEP, n % TILE)] =
                    weight[n * stride + k];
    });
}

// One block to its column of a panel. `head` is where that column's first block of steps begins.
template <class F, class T>
static void put(uint8_t* head, int column, const Unpacked& u) {
    const int tile = column / TILE, within = column % TILE;
    memcpy(head + column * 2, &u.d, 2);
    if (F::MINIMUM) memcpy(head + (PANEL + column) * 2, &u.m, 2);
    for (int s = 0; s < F::BLOCK_STEPS; s++) {
        uint8_t* step = head + F::HEAD_BYTES + s * F::STEP_BYTES;
        if (F::K) {
            for (int g = 0; g < F::SCALES; g++) step[g * PANEL + column] = u.scales[s * F::SCALES + g];
            if (F::MINIMUM) step[F::SCALES * PANEL + column] = u.minimums[s];
        }
        uint8_t* codes = step + F::INTEGER_BYTES + tile * F::TILE_BYTES;
        for (int k = 0; k < STEP; k++) {
            const int at = place<T>(k, within), code = u.codes[s * STEP + k];
            if (F::BITS == 8) codes[at] = code;
            else codes[at / 128 * 64 + at % 16 * 4 + at % 128 / 32] |= code << at / 16 % 2 * 4;
        }
    }
}

template <class Type, class T>
static void pack_blocks(uint8_t* packed, const uint8_t* blocks, int64_t num_rows, int64_t num_k, int threads) {
    using F = typename Type::F;
    const int64_t panel_bytes = F::panel_bytes(steps_of(num_k)), row_blocks = num_k / Type::VALUES;
    parallel_for(panels_of(num_rows), 1, threads, [&](int64_t p) {
        uint8_t* panel = packed + p * panel_bytes;
        std::fill_n(panel, panel_bytes, 0);
        Unpacked u{};
        for (int64_t b = 0; b < row_blocks; b++)
            for (int64_t n = p * PANEL; n < std::min((p + 1) * PANEL, num_rows); n++) {
                Type::unpack(u, blocks + (n * row_blocks + b) * Type::BYTES);
                put<F, T>(panel + b * F::BLOCK_BYTES, n % PANEL, u);
            }
    });
}

template <class Type, class T>
static void dequantize_row(T* row, const uint8_t* blocks, int64_t num_k) {
    using F = typename Type::F;
    Unpacked u{};
    for (int64_t k = 0; k < num_k; k += Type::VALUES, blocks += Type::BYTES) {
        Type::unpack(u, blocks);
        const float d = to_float(u.d), m = F::MINIMUM ? to_float(u.m) : 0;
        float values[Type::VALUES];
        for (int i = 0; i < Type::VALUES; i++) {
            const float scale = F::K ? d * u.scales[i * F::SCALES / STEP] : d;
            values[i] = scale * (u.codes[i] - F::ZERO);
            if (F::MINIMUM) values[i] += F::K ? -(m * u.minimums[i / STEP]) : m;
        }
        for (int i = 0; i < Type::VALUES; i += W) store(row + k + i, load(values + i));
    }
}

// To blocks of 8_0: 32 codes from -127 to 127 and their scale in fp16.
template <class T>
static void quantize_row(uint8_t* blocks, const T* row, int64_t num_k) {
    for (int64_t k = 0; k < num_k; k += 32, blocks += Block8_0::BYTES) {
        float values[32], largest = 0;
        for (int i = 0; i < 32; i += W) store(values + i, load(row + k + i));
        for (int i = 0; i < 32; i++) largest = std::max(largest, std::fabs(values[i]));
        const half scale = to_half(largest / 127);
        memcpy(blocks, &scale, 2);
        const float d = to_float(scale);
        for (int i = 0; i < 32; i++) {
            const float code = d > 0 ? std::nearbyint(values[i] / d) : 0;
            blocks[2 + i] = static_cast<int8_t>(std::min(127.f, std::max(-127.f, code)));
        }
    }
}

}  // namespace pagedray

using namespace pagedray;

// Bytes that a packed [n, k] weight takes; 0: no such format.
PAGEDRAY_API int64_t pagedray_packed_bytes(int32_t dtype, int64_t format, int64_t n, int64_t k) {
    int64_t bytes = format == PLAIN ? steps_of(k) * STEP * PANEL * (dtype == BFLOAT16 ? 2 : 4) : 0;
    with_format(format, [&](auto f) { bytes = decltype(f)::panel_bytes(steps_of(k)); });
    return panels_of(n) * bytes;
}

// weight [n, k] of the dtype, `stride` elements from row to row
PAGEDRAY_API void pagedray_pack_linear(int32_t dtype, void* packed, const void* weight, int64_t n, int64_t k,
                                       int64_t stride, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        pack(static_cast<T*>(packed), static_cast<const T*>(weight), stride, n, k, threads);
    });
}

// `blocks` [n, k / values of a block]; `dtype` is that of the linear layer.
PAGEDRAY_API void pagedray_pack_blocks(int32_t dtype, int64_t format, void* packed, const void* blocks, int64_t n,
                                       int64_t k, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_block(format, [&](auto block) {
            pack_blocks<decltype(block), T>(static_cast<uint8_t*>(packed), static_cast<const uint8_t*>(blocks), n, k,
                                            threads);
        });
    });
}

// out [rows, k] = the blocks' rows `row_ids`, dequantized.
PAGEDRAY_API void pagedray_dequantize_rows(int32_t dtype, int64_t format, void* out, const void* blocks,
                                           const int64_t* row_ids, int64_t rows, int64_t k, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        with_block(format, [&](auto block) {
            using Type = decltype(block);
            const int64_t row_bytes = k / Type::VALUES * Type::BYTES;
            parallel_for(rows, 16, threads, [&](int64_t i) {
                dequantize_row<Type>(static_cast<T*>(out) + i * k,
                                     static_cast<const uint8_t*>(blocks) + row_ids[i] * row_bytes, k);
            });
        });
    });
}

// x [rows, k] to `blocks` of 8_0; k is a multiple of 32.
PAGEDRAY_API void pagedray_quantize_int8(int32_t dtype, void* blocks, const void* x, int64_t rows, int64_t k,
                                         int64_t stride, int32_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for(rows, 16, threads, [&](int64_t i) {
            quantize_row(static_cast<uint8_t*>(blocks) + i * (k / 32 * Block8_0::BYTES),
                         static_cast<const T*>(x) + i * stride, k);
        });
    });
}
