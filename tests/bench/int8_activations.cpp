// Would int8 activations be faster? One core, one linear layer of 8 bits a weight with a scale for 32: the kernel as it is
// (weights dequantized to bf16, AMX) against sums of int8 products, exact within a group: VNNI where there is one row, AMX
// where there are many. Scales are per 32 k on both sides, as a quality of 0.5% asks for.
//
//     g++ -std=c++17 -O3 -pthread -march=sapphirerapids -mprefer-vector-width=512 tests/bench/int8_activations.cpp -o /tmp/a && /tmp/a
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "../../kernels/cpu/src/linear.cpp"

constexpr int64_t N = 4096, K = 2048, STEPS = K / STEP, COPIES = 12;

// A step of a panel: 32 scales in fp16, then for each tile [8][16 columns][4 k] codes: as they are for AMX, + 128 for VNNI.
using Q = Q8_0;

static void vnni_row(float* out, const uint8_t* panel, const int8_t* x, const float* x_scale, const int32_t* x_sum) {
    vfloat sum[2] = {};
    for (int64_t s = 0; s < STEPS; s++, panel += Q::BLOCK_BYTES) {
        for (int i = 0; i < Q::BLOCK_BYTES; i += 64) __builtin_prefetch(panel + PREFETCH_BYTES + i);
        for (int h = 0; h < 2; h++) {
            const uint8_t* codes = panel + Q::HEAD_BYTES + h * Q::TILE_BYTES;
            __m512i acc = _mm512_set1_epi32(-128 * x_sum[s]);
            for (int k = 0; k < 8; k++) {
                int32_t four;
                memcpy(&four, x + s * STEP + k * 4, 4);
                acc = _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(codes + k * 64), _mm512_set1_epi32(four));
            }
            const vfloat scale = load(reinterpret_cast<const half*>(panel) + h * TILE) * x_scale[s];
            sum[h] += (vfloat)_mm512_cvtepi32_ps(acc) * scale;
        }
    }
    store(out, sum[0]);
    store(out + TILE, sum[1]);
}

// 16 rows of x [steps][16][32] with scales [steps][16], one tile of columns.
static void amx_rows(float* out, const uint8_t* panel, int h, const int8_t* x, const float* x_scale) {
    vfloat sum[TILE] = {};
    alignas(64) int32_t products[2][TILE * TILE];
    for (int64_t s = 0; s <= STEPS; s++) {  // products of a step while the sums of the last one are made
        if (s < STEPS) {
            _tile_zero(0);
            _tile_loadd(1, x + s * TILE * STEP, 32);
            _tile_loadd(2, panel + s * Q::BLOCK_BYTES + Q::HEAD_BYTES + h * Q::TILE_BYTES, 64);
            _tile_dpbssd(0, 1, 2);
            _tile_stored(0, products[s % 2], 64);
        }
        if (s > 0) {
            const vfloat scale = load(reinterpret_cast<const half*>(panel + (s - 1) * Q::BLOCK_BYTES) + h * TILE);
            for (int r = 0; r < TILE; r++)
                sum[r] += (vfloat)_mm512_cvtepi32_ps(_mm512_load_si512(products[(s - 1) % 2] + r * TILE)) *
                          (scale * x_scale[(s - 1) * TILE + r]);
        }
    }
    for (int r = 0; r < TILE; r++) store(out + r * N + h * TILE, sum[r]);
}

template <class F>
static double seconds(F f) {
    double best = 1e9;
    for (int turn = 0; turn < 5; turn++) {
        const auto start = std::chrono::steady_clock::now();
        for (int64_t c = 0; c < COPIES; c++) f(c);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / COPIES);
    }
    return best;
}

int main() {
    syscall(SYS_arch_prctl, 0x1023, 18);
    std::mt19937 random;
    const int64_t bytes = N / PANEL * Q::panel_bytes(STEPS);
    const int64_t size = bytes * COPIES + PREFETCH_BYTES + (2 << 20);
    uint8_t* first = static_cast<uint8_t*>(aligned_alloc(2 << 20, size / (2 << 20) * (2 << 20)));
    madvise(first, size, MADV_HUGEPAGE);
    for (int64_t i = 0; i < bytes * COPIES; i++) first[i] = random() & 0x1f;
    for (const int64_t rows : {1, 240}) {
        std::vector<bf16> x(rows * K);
        for (auto& e : x) e.bits = 0x3f80 | (random() & 0x807f);
        std::vector<int8_t> codes(rows * K);
        for (auto& c : codes) c = random();
        std::vector<float> out(rows * N), scales(rows * STEPS, 0.01f);
        std::vector<int32_t> sums(STEPS, 7);
        const double now = seconds([&](int64_t c) {
            const Part part{8, N / PANEL, first + c * bytes};
            const Linear weight{N, K, nullptr, 1, &part};
            linear(out.data(), x.data(), K, weight, rows, 1);
        });
        TileConfig config;
        for (int i = 0; i < 3; i++) config.row_bytes[i] = i == 1 ? 32 : 64, config.rows[i] = i == 2 ? 8 : 16;
        _tile_loadconfig(&config);
        const double int8 = seconds([&](int64_t c) {
            for (int64_t p = 0; p < N / PANEL; p++) {
                const uint8_t* panel = first + c * bytes + p * Q::panel_bytes(STEPS);
                if (rows == 1) vnni_row(out.data() + p * PANEL, panel, codes.data(), scales.data(), sums.data());
                for (int64_t r = 0; rows > 1 && r < rows; r += TILE)
                    for (int h = 0; h < 2; h++)
                        amx_rows(out.data() + r * N + p * PANEL, panel, h, codes.data() + r * K, scales.data() + r * STEPS);
            }
        });
        _tile_release();
        printf("%3ld rows of %ld x %ld: bf16 activations %.0f us (%.1f GB/s, %.0f Gop/s), int8 %.0f us (%.1f GB/s, %.0f Gop/s)\n",
               (long)rows, (long)N, (long)K, 1e6 * now, bytes / now / 1e9, 2e-9 * rows * N * K / now, 1e6 * int8,
               bytes / int8 / 1e9, 2e-9 * rows * N * K / int8);
    }
}
