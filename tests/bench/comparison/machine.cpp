// The machine's limits as a kernel meets them: bytes read from memory a second, bf16 operations a second.
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Seconds from the moment when all threads are there until the last has ended. body(thread).
template <class Body>
double timed(int threads, Body body) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
        pool.emplace_back([&, t] {
            ready.fetch_add(1);
            while (!go.load()) _mm_pause();
            body(t);
        });
    while (ready.load() < threads) std::this_thread::yield();
    auto began = Clock::now();
    go.store(true);
    for (auto& thread : pool) thread.join();
    return std::chrono::duration<double>(Clock::now() - began).count();
}

std::atomic<int64_t> sink;  // so that the compiler keeps what is computed

// Four streams a thread, an accumulator each: one alone waits for its own additions.
void read_all(const char* data, size_t bytes) {
    size_t part = bytes / 4 / 64 * 64;
    int64_t sum = 0;
#if defined(__AVX512F__)
    __m512i s[4] = {};
    for (size_t i = 0; i < part; i += 64)
        for (int k = 0; k < 4; ++k) s[k] = _mm512_add_epi64(s[k], _mm512_loadu_si512(data + k * part + i));
    for (auto& v : s) sum += _mm512_reduce_add_epi64(v);
#else
    uint64_t s[4] = {};
    for (size_t i = 0; i < part; i += 8)
        for (int k = 0; k < 4; ++k) {
            uint64_t v;
            std::memcpy(&v, data + k * part + i, 8);
            s[k] += v;
        }
    sum = s[0] + s[1] + s[2] + s[3];
#endif
    sink.fetch_add(sum);
}

// `rounds` times 2 x 2 products of tiles or registers, operands from the first cache. The operations done.
double multiply(int64_t rounds) {
#if defined(__AMX_BF16__)
    alignas(64) char a[2][1024] = {}, b[2][1024] = {}, c[1024];
    alignas(64) struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_loadd(4, a[0], 64);
        _tile_loadd(6, b[0], 64);
        _tile_loadd(7, b[1], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a[1], 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 64);
    _tile_release();
    sink.fetch_add(c[0]);
    return rounds * 4.0 * 2 * 16 * 16 * 32;
#elif defined(__AVX512BF16__)
    __m512 s[16] = {};
    alignas(64) char a[1024] = {};
    asm volatile("" : "+m"(a));  // or the compiler knows that all sums are one
    for (int64_t i = 0; i < rounds; ++i)
        for (int k = 0; k < 16; ++k)
            s[k] = _mm512_dpbf16_ps(s[k], (__m512bh)_mm512_load_si512(a + 64 * k), (__m512bh)_mm512_load_si512(a));
    float sum = 0;
    for (auto& v : s) sum += _mm512_reduce_add_ps(v);
    sink.fetch_add(int64_t(sum));
    return rounds * 16.0 * 2 * 32;
#elif defined(__AVX2__) && defined(__FMA__)
    __m256 s[12] = {};
    alignas(64) float a[96] = {};
    asm volatile("" : "+m"(a));  // or the compiler knows that all sums are one
    for (int64_t i = 0; i < rounds; ++i)
        for (int k = 0; k < 12; ++k)
            s[k] = _mm256_fmadd_ps(_mm256_load_ps(a + 8 * k), _mm256_load_ps(a), s[k]);
    float sum = 0;
    for (auto& v : s) sum += _mm256_cvtss_f32(v);
    sink.fetch_add(int64_t(sum));
    return rounds * 12.0 * 2 * 8;
#else
    return 0.0;
#endif
}

}  // namespace

// Memory to read: on huge pages where the system gives them, written once. Null where there is none.
extern "C" void* allocate(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_HUGEPAGE);
    std::memset(memory, 1, bytes);
    return memory;
}

extern "C" void release(void* memory, size_t bytes) { munmap(memory, bytes); }

// Bytes a second.
extern "C" double read_rate(const void* memory, size_t bytes, int threads) {
    size_t part = bytes / threads;
    double seconds = timed(threads, [&](int t) { read_all(static_cast<const char*>(memory) + t * part, part); });
    return part * threads / seconds;
}

// Operations (a multiplication or an addition each) a second; 0 where this CPU has nothing better than scalars.
extern "C" double matrix_rate(int64_t rounds, int threads) {
#if defined(__AMX_BF16__)
    if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */)) return 0.0;
#endif
    std::atomic<int64_t> operations{0};
    double seconds = timed(threads, [&](int) { operations.fetch_add(int64_t(multiply(rounds))); });
    return operations / seconds;
}
