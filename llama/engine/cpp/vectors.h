// Vectors of 16 numbers in the compiler's portable vector types, and the operations that these types lack.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
constexpr i32x16 LANE_NUMBERS{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The compiler keeps vectors that are wider than a register in memory. Where that costs time, 16 numbers are PARTS registers.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
constexpr int64_t PARTS = 16 / LANES;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int8_t chars __attribute__((vector_size(LANES)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
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

inline floats load_half(const void* p) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return (floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t*)p)));
#endif
}
inline float to_float(f16 x) {  // GCC 12 has no type for it on ARM
    const f16 numbers[LANES] = {x};
    return load_half(numbers)[0];
}

// To bfloat16 in the high half of each lane, to nearest even; NaN stays NaN.
template <typename V>
inline auto rounded(V x) {
    typedef uint32_t Bits __attribute__((vector_size(sizeof(V))));
    const Bits bits = (Bits)x, up = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return x == x ? up : Bits{} + 0x7fc00000u;
}

// Stores the first `count` numbers of x, rounded to T.
template <typename V>
inline void store(V x, float* p, size_t count = sizeof(V) / 4) {
    if (count == sizeof(V) / 4) std::memcpy(p, &x, sizeof(V));
    else std::memcpy(p, &x, count * 4);
}
template <typename V>
inline void store(V x, bf16* p, size_t count = sizeof(V) / 4) {
    typedef uint16_t Halves __attribute__((vector_size(sizeof(V) / 2)));
    const Halves halves = __builtin_convertvector(rounded(x) >> 16, Halves);
    if (count == sizeof(V) / 4) std::memcpy(p, &halves, sizeof(V) / 2);
    else std::memcpy(p, &halves, count * 2);
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

inline floats to_floats(chars x) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x)));
#else
    return __builtin_convertvector(__builtin_convertvector(x, ints), floats);
#endif
}
inline floats to_floats(const float* p) { return load<floats>(p); }
inline floats to_floats(const bf16* p) {  // with the instructions for AVX, since GCC 12 would convert in halves
#if defined(__AVX512F__)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#elif defined(__AVX2__)
    return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16);
#else
    typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
    return (floats)(__builtin_convertvector(load<shorts>(p), words) << 16);
#endif
}
inline floats to_floats(const f16* p) { return load_half(p); }
inline floats to_floats(const int8_t* p) { return to_floats(load<chars>(p)); }
inline chars to_chars(ints x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400));  // of four numbers, in each word of a half
    return (chars)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
    return __builtin_convertvector(x, chars);
#endif
}
template <typename V = f32x16, typename T>
inline V widen(const T* p) {
    floats parts[sizeof(V) / sizeof(floats)];
    for (floats& part : parts) part = to_floats(p), p += LANES;
    return load<V>(parts);
}

template <typename T, typename V>
inline V as_stored(V x) {  // rounded to T
    T numbers[sizeof(V) / 4];
    store(x, numbers);
    return widen<V>(numbers);
}

// The first `count` numbers of a vector; the others are 0.
template <typename V = f32x16, typename T>
inline V widen_some(const T* p, int64_t count) {
    T numbers[sizeof(V) / 4] = {};
    if (count == sizeof(V) / 4) return widen<V>(p);
    std::memcpy(numbers, p, count * sizeof(T));
    return widen<V>(numbers);
}

// The largest magnitude of the numbers seen; NaN if one is not finite. The bits of magnitudes are in the order of the magnitudes.
template <typename V>
struct Largest {
    typedef decltype(V{} < V{}) Bits;
    Bits top{};
    void see(V x) {
        const Bits size = (Bits)x & 0x7fffffff;
        top = size > top ? size : top;
    }
    float get() const {
        int32_t most = 0;
        for (size_t i = 0; i < sizeof(V) / 4; i++) most = std::max<int32_t>(most, top[i]);
        const float largest = load<float>(&most);
        return largest < INFINITY ? largest : NAN;
    }
};

template <typename V>
inline auto to_integers(V x) {  // round to nearest even, for |x| < 2^22; NaN becomes 0, since sums of the result must not overflow
    x = x == x ? x : V{};
    return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, decltype(x < x));  // adding 1.5 * 2^23 rounds to an integer
}

// The numbers of a and b with these indices; from 16 on (8 for 64-bit numbers) they are those of b.
template <int... INDEX, typename V>
inline V pick(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, INDEX...);
#else
    typedef decltype(a < b) I;
    return __builtin_shuffle(a, b, I{INDEX...});
#endif
}

// The sum of 16 numbers, in pairs.
template <typename V>
inline auto sum_of(V v) {
    v += pick<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(v, v);
    v += pick<4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3>(v, v);
    v += pick<2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1>(v, v);
    return v[0] + v[1];
}

// exp(x) for x <= 0, relative error 2e-7: 2^n times a polynomial in the remainder; 0 below -87.
template <typename V>
inline V exp_of(V x) {
    const V lowest = V{} - 87.0f;
    const auto small = x < lowest;
    x = small ? lowest : x;
    const V magic = V{} + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const V n = (x * 1.44269504f + magic) - magic;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    V p = V{} + 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    const auto exponent = (__builtin_convertvector(n, decltype(x < x)) + 127) << 23;
    return small ? V{} : p * (V)exponent;
}

// Transposes 16 x 16 numbers: pairs of numbers, then of 64 bits, then of 128 bits twice.
inline void transpose(u32x16* v) {
    typedef uint64_t u64x8 __attribute__((vector_size(64)));
    const auto low32 = [](u32x16 a, u32x16 b) { return pick<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(a, b); };
    const auto high32 = [](u32x16 a, u32x16 b) { return pick<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(a, b); };
    const auto low64 = [](u32x16 a, u32x16 b) { return (u32x16)pick<0, 8, 2, 10, 4, 12, 6, 14>((u64x8)a, (u64x8)b); };
    const auto high64 = [](u32x16 a, u32x16 b) { return (u32x16)pick<1, 9, 3, 11, 5, 13, 7, 15>((u64x8)a, (u64x8)b); };
    const auto even = [](u32x16 a, u32x16 b) { return (u32x16)pick<0, 1, 4, 5, 8, 9, 12, 13>((u64x8)a, (u64x8)b); };
    const auto odd = [](u32x16 a, u32x16 b) { return (u32x16)pick<2, 3, 6, 7, 10, 11, 14, 15>((u64x8)a, (u64x8)b); };
    u32x16 t[16];
    for (int i = 0; i < 16; i += 4) {  // t[i + j]: numbers j, 4 + j, 8 + j and 12 + j of vectors i to i + 3
        const u32x16 a = low32(v[i], v[i + 1]), b = high32(v[i], v[i + 1]), c = low32(v[i + 2], v[i + 3]), d = high32(v[i + 2], v[i + 3]);
        t[i] = low64(a, c), t[i + 1] = high64(a, c), t[i + 2] = low64(b, d), t[i + 3] = high64(b, d);
    }
    for (int j = 0; j < 4; j++) {
        const u32x16 a = even(t[j], t[4 + j]), b = odd(t[j], t[4 + j]), c = even(t[8 + j], t[12 + j]), d = odd(t[8 + j], t[12 + j]);
        v[j] = even(a, c), v[4 + j] = even(b, d), v[8 + j] = odd(a, c), v[12 + j] = odd(b, d);
    }
}

// Multiplies x (D) by a Hadamard matrix / sqrt(n) in runs of n, the largest power of two that divides D, as cache.hadamard does.
inline void hadamard(float* x, int64_t D) {
    const int64_t n = D & -D;
    for (int64_t step = 1; step < n; step *= 2)
        for (int64_t first = 0; first < D; first += 2 * step)
            for (int64_t i = first; i < first + step; i++) {
                const float a = x[i], b = x[i + step];
                x[i] = a + b, x[i + step] = a - b;
            }
    for (int64_t i = 0; i < D; i++) x[i] *= float(1 / std::sqrt(double(n)));
}

}  // namespace
