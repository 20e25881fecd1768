// Vectors of 16 numbers in the compiler's portable vector types, and the operations that these types lack.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y.bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;  // round to nearest even; NaN stays NaN
}

template <typename V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}

inline f32x16 load_half(const void* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    const __m128i* h = (const __m128i*)p;
    __m256 v[2] = {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
    return load<f32x16>(v);
#else
    f32x16 v;
    for (int i = 0; i < 16; i++) {
        _Float16 h;
        std::memcpy(&h, (const char*)p + 2 * i, 2);
        v[i] = float(h);
    }
    return v;
#endif
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

template <typename T>
inline f32x16 widen(const T* p);
template <>
inline f32x16 widen(const float* p) {
    return load<f32x16>(p);
}
template <>
inline f32x16 widen(const bf16* p) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}
template <>
inline f32x16 widen(const int8_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    const __m256i half[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
    return __builtin_convertvector(load<i32x16>(half), f32x16);
#endif
    return __builtin_convertvector(__builtin_convertvector(load<i8x16>(p), i32x16), f32x16);
}

// The largest magnitude of the numbers seen; NaN if one is not finite. A compiler may not reorder float operations, so the code
// keeps 16 maxima explicitly.
struct Largest {
    f32x16 top{}, finite{};
    void see(f32x16 x) {
        const f32x16 size = (f32x16)((i32x16)x & 0x7fffffff);
        top = size > top ? size : top;
        finite += x * 0.0f;
    }
    float get() const {
        float most = 0, sum = 0;
        for (int i = 0; i < 16; i++) most = top[i] > most ? top[i] : most, sum += finite[i];
        return most + sum;
    }
};

inline i32x16 to_integers(f32x16 x) {  // round to nearest even, for |x| < 2^22; NaN becomes 0, since sums of the result must not overflow
    x = x == x ? x : f32x16{};
    return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, i32x16);  // adding 1.5 * 2^23 rounds to an integer
}

template <typename V>
inline auto sum_of(V v) {
    auto sum = v[0];
    for (int i = 1; i < 16; i++) sum += v[i];
    return sum;
}

}  // namespace
