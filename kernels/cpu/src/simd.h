// A vector of floats as wide as the tier this is compiled for, in GCC's vector extensions: `+ * <` are elementwise,
// a * b + c becomes one fused instruction. One source serves AVX-512, AVX2 and plain SSE2 (or any other CPU).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PAGEDRAY_API extern "C" __attribute__((visibility("default")))

namespace pagedray {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vfloat __attribute__((vector_size(W * 4)));
typedef int32_t vint __attribute__((vector_size(W * 4)));
typedef uint32_t vuint __attribute__((vector_size(W * 4)));
typedef uint16_t vhalf __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;  // the upper half of a float
};

struct half {
    uint16_t bits;  // IEEE's fp16
};

enum DType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };  // the last one of KV caches alone: kv_row.h

// Calls f with a null pointer of the element type that `dtype` names.
template <class F>
void with_dtype(int32_t dtype, F f) {
    if (dtype == BFLOAT16) f(static_cast<bf16*>(nullptr));
    else f(static_cast<float*>(nullptr));
}

inline vfloat splat(float x) { return x - vfloat{}; }

inline vint iota() {
    vint v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

inline vfloat load(const float* p) {
    vfloat v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline vfloat load(const bf16* p) {
    vhalf h;
    memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)  // GCC 12 makes six instructions of the conversion below
    const vuint bits = (vuint)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    const vuint bits = (vuint)_mm256_cvtepu16_epi32((__m128i)h);
#else
    const vuint bits = __builtin_convertvector(h, vuint);
#endif
    return (vfloat)(bits << 16);
}

inline float to_float(half h) {  // exact, subnormal numbers too
    const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fff) << 13;
    float f;
    memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (magnitude >= 0x7c00u << 13) bits |= 0x7f800000;  // infinite, or no number
    bits |= static_cast<uint32_t>(h.bits & 0x8000) << 16;
    memcpy(&f, &bits, 4);
    return f;
}
inline half to_half(float f) {  // to nearest, ties to even; f >= 0
    if (f < 0x1p-14f) return {static_cast<uint16_t>(std::nearbyint(f * 0x1p24f))};
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint32_t rounded = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    return {static_cast<uint16_t>(std::min<uint32_t>(rounded, 0x7c00))};
}
inline vfloat load(const half* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vfloat v;
    for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
    return v;
#endif
}
inline vfloat load(const int8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    vint v;
    for (int i = 0; i < W; i++) v[i] = p[i];
    return __builtin_convertvector(v, vfloat);
#endif
}

inline void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }

// v as it comes back from memory of that element type: to nearest, ties to even. `ANY`: a NaN stays one, whatever its bits.
template <bool ANY = true>
inline vfloat round_to(const float*, vfloat v) {
    return v;
}
template <bool ANY = true>
inline vfloat round_to(const bf16*, vfloat v) {
#if defined(__AVX512BF16__)
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16);
#else
    const vuint bits = (vuint)v;
    const vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    if (!ANY) return (vfloat)rounded;
    return v == v ? (vfloat)rounded : (vfloat)(vuint{} + 0x7fc00000);
#endif
}

inline void store(bf16* p, vfloat v) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh(v);
#elif defined(__AVX2__)
    const __m256i words = (__m256i)((vuint)round_to(p, v) >> 16);
    const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    const vhalf h = __builtin_convertvector((vuint)round_to(p, v) >> 16, vhalf);
#endif
    memcpy(p, &h, sizeof h);
}

// Round to nearest, ties to even; what |v| <= 127 fits.
inline void store(int8_t* p, vfloat v) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
#elif defined(__AVX2__)
    const __m256i wide = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
#else
    for (int i = 0; i < W; i++) p[i] = static_cast<int8_t>(std::nearbyint(v[i]));
#endif
}

// The first n < W elements; the rest are zero.
template <class T>
vfloat load_part(const T* p, int n) {
    T padded[W] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
void store_part(T* p, vfloat v, int n) {
    T padded[W];
    store(padded, v);
    memcpy(p, padded, n * sizeof(T));
}

// Calls f(i, load, store) for each vector of a row of n elements, the last one maybe in part.
template <class F>
void for_each_vector(int64_t n, F f) {
    int64_t i = 0;
    for (; i + W <= n; i += W)
        f(i, [](auto* p) { return load(p); }, [](auto* p, vfloat v) { store(p, v); });
    if (const int rest = static_cast<int>(n - i))
        f(i, [rest](auto* p) { return load_part(p, rest); }, [rest](auto* p, vfloat v) { store_part(p, v, rest); });
}

inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

template <int H>
vfloat swapped(vfloat v) {
    vint order;
    for (int i = 0; i < W; i++) order[i] = i ^ H;
    return __builtin_shuffle(v, order);
}
inline float sum(vfloat v) {
    if constexpr (W > 8) v += swapped<8>(v);
    if constexpr (W > 4) v += swapped<4>(v);
    v += swapped<2>(v);
    v += swapped<1>(v);
    return v[0];
}
inline float max(vfloat v) {
    if constexpr (W > 8) v = max(v, swapped<8>(v));
    if constexpr (W > 4) v = max(v, swapped<4>(v));
    v = max(v, swapped<2>(v));
    v = max(v, swapped<1>(v));
    return v[0];
}

// e^x = 2^n e^f with n = round(x log2 e), |f| <= ln(2) / 2, and e^f by a polynomial (Cephes); within 2 ulp.
// exp(0) is exactly 1, and whatever is below -87.3, minus infinity too, gives exactly 0.
inline vfloat exp(vfloat x) {
    const vfloat lowest = splat(-87.3f), highest = splat(88.3f), rounder = splat(12582912.f);  // 1.5 * 2^23
    const vfloat clamped = x < lowest ? lowest : (x > highest ? highest : x);
    const vfloat n = (clamped * 1.44269504f + rounder) - rounder;
    const vfloat f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    vfloat p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    const vint exponent = (__builtin_convertvector(n, vint) + 127) << 23;
    const vfloat result = p * (vfloat)exponent;
    return x < lowest ? vfloat{} : result;
}

// r[i][j] <-> r[j][i], by exchanging ever larger off-diagonal squares.
template <int H = 1>
inline __attribute__((always_inline)) void transpose(vfloat (&r)[W]) {
    if constexpr (H < W) {
        vint low, high;
        for (int j = 0; j < W; j++) {
            low[j] = j & H ? W + j - H : j;
            high[j] = j & H ? W + j : j + H;
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & H)) {
                const vfloat a = r[i], b = r[i + H];
                r[i] = __builtin_shuffle(a, b, low);
                r[i + H] = __builtin_shuffle(a, b, high);
            }
        transpose<H * 2>(r);
    }
}

}  // namespace pagedray
