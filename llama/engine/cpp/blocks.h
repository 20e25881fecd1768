// Rows of x times a weight (N, K) in 4 or 8 bits, packed in tiles by llama/quant/tiles.py.
//
// A tile is 16 rows of the weight; each row uses one lane of a vector. The bytes of a tile, in order:
//
//     group 0: weights   8 bits: for every 4 inputs, 16 rows x 4 bytes
//                        4 bits: for every 8 inputs, 16 rows x 4 bytes; inputs 0-3 in the low halves, inputs 4-7 in the high halves
//              scale     16 x float16
//              offset    16 x float16, if the format has offsets
//     group 1: the same, and so on. If a row has a single scale, groups have none, and 16 x float32 follow the last group.
//
// Each row of x is quantized to 8 bits, with a scale for each group of inputs. Then
//
//     y[row] = sum over groups of  scale_w[row] * scale_x * sum_k(w[row, k] * x[k])  +  offset[row] * scale_x * sum_k(x[k])
//
// where w is unsigned, as the instruction vpdpbusd requires, and the inner sum is exact in 32 bits. Four inputs of x are broadcast
// to all lanes, so no sum across lanes is needed, and up to 12 rows of x share every read of the weight.
//
// Nearly all of the time is spent in `dot4`.

#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int64_t ROWS = 16;       // rows of a tile
constexpr int64_t MOST_ROWS = 96;  // rows of x that a thread multiplies by a tile before it takes other work
// Bytes that one row prefetches ahead, on processors whose own prefetcher stops at the end of a page.
#if defined(__AMX_BF16__)
constexpr int64_t AHEAD = 4096;
#else
constexpr int64_t AHEAD = 0;
#endif

// acc[row] += sum over 4 inputs of w[row][i] * x[i]; w is 64 unsigned bytes, x is 4 signed bytes.
// With SIGNED8, 8-bit weights are used as signed (w - 128): AVX2 adds two products in 16 bits, which unsigned ones can overflow, and
// ARM's first instruction for this multiplies signed bytes only.
#if defined(__AVX512VNNI__)
constexpr bool SIGNED8 = false;
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
}
#elif defined(__AVX2__)
constexpr bool SIGNED8 = true;
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    __m256i part[2];
    std::memcpy(part, &w, 64);
    for (int i = 0; i < 2; i++) {
        __m256i u = part[i], s = _mm256_set1_epi32(x);
        if (BITS == 8) {
            __m256i q = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
            u = _mm256_abs_epi8(q), s = _mm256_sign_epi8(s, q);
        }
        part[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
    }
    return acc + load<i32x16>(part);
}
#elif defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SIGNED8 = false;
inline int32x4_t dot16(int32x4_t acc, uint8x16_t w, int8x16_t x) { return vusdotq_s32(acc, w, x); }
#else
constexpr bool SIGNED8 = true;
inline int32x4_t dot16(int32x4_t acc, uint8x16_t w, int8x16_t x) { return vdotq_s32(acc, vreinterpretq_s8_u8(w), x); }
#endif
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    int32x4_t sum[4];
    std::memcpy(sum, &acc, 64);
    if (BITS == 8 && SIGNED8) w ^= 0x80808080u;
    for (int i = 0; i < 4; i++) sum[i] = dot16(sum[i], load<uint8x16_t>((const char*)&w + 16 * i), vreinterpretq_s8_s32(vdupq_n_s32(x)));
    return load<i32x16>(sum);
}
#else
constexpr bool SIGNED8 = false;
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    for (int i = 0; i < 4; i++) acc += (i32x16)((w >> (8 * i)) & 255) * int32_t(int8_t(x >> (8 * i)));
    return acc;
}
#endif

// A row of x in 8 bits. `start` subtracts the zero point of unsigned weights: sum((w - zero) x) = sum(w x) - zero sum(x).
struct Row {
    const int8_t* x;       // (groups * group)
    const float* scale;    // (groups)
    const int32_t* start;  // (groups)
    const float* sum;      // (groups), sum of x times scale
};

struct Shape {
    int64_t groups, group, stride;  // stride: bytes of one group of a tile
};

// Two halves of 128 bytes of a group in 8 bits, or the low and the high halves of 64 bytes in 4 bits.
template <int BITS>
inline void load_weights(const uint8_t* w, u32x16* halves) {
    const u32x16 first = load<u32x16>(w);
    halves[0] = BITS == 4 ? first & 0x0f0f0f0fu : first;
    halves[1] = BITS == 4 ? (first >> 4) & 0x0f0f0f0fu : load<u32x16>(w + 64);
}

// GROUPS successive groups of a tile times M rows, added to `total`.
template <int BITS, bool OFFSET, bool PER_ROW, int M, int GROUPS>
inline void groups_product(const uint8_t* tile, const Shape& s, const Row* rows, int64_t g, f32x16* total) {
    constexpr int SUMS = M == 1 ? 2 : 1;  // independent sums hide the latency of dot4
    i32x16 acc[GROUPS][SUMS][M];
    const int8_t* x[GROUPS][M];
    for (int j = 0; j < GROUPS; j++)
        for (int m = 0; m < M; m++) {
            acc[j][0][m] = i32x16{} + rows[m].start[g + j];
            for (int i = 1; i < SUMS; i++) acc[j][i][m] = i32x16{};
            x[j][m] = rows[m].x + (g + j) * s.group;
        }
#pragma GCC unroll 4
    for (int64_t k = 0; k < s.group; k += 8)
        for (int j = 0; j < GROUPS; j++) {
            const uint8_t* w = tile + j * s.stride + k * ROWS * BITS / 8;
            if (AHEAD && M == 1)
                for (int i = 0; i < BITS / 4; i++) __builtin_prefetch(w + AHEAD + 64 * i);
            u32x16 halves[2];
            load_weights<BITS>(w, halves);
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 2; i++) acc[j][i % SUMS][m] = dot4<BITS>(acc[j][i % SUMS][m], halves[i], load<int32_t>(x[j][m] + k + 4 * i));
        }
    for (int j = 0; j < GROUPS; j++) {
        const uint8_t* numbers = tile + j * s.stride + s.group * ROWS * BITS / 8;
        const f32x16 scale = PER_ROW ? f32x16{} + 1.0f : load_half(numbers);
        const f32x16 offset = OFFSET ? load_half(numbers + 32) : f32x16{};
        for (int m = 0; m < M; m++) {
            for (int i = 1; i < SUMS; i++) acc[j][0][m] += acc[j][i][m];
            total[m] += __builtin_convertvector(acc[j][0][m], f32x16) * (PER_ROW ? f32x16{} + rows[m].scale[g + j] : scale * rows[m].scale[g + j]);
            if (OFFSET) total[m] += offset * rows[m].sum[g + j];
        }
    }
}

// A tile times M rows of x. For one row in 4 bits, two groups at a time: a group has too few operations to hide their latency.
template <int BITS, bool OFFSET, bool PER_ROW, int M>
void tile_product(const uint8_t* tile, const Shape& s, const Row* rows, f32x16* y) {
    f32x16 total[M];
    for (int m = 0; m < M; m++) total[m] = f32x16{};
    int64_t g = 0;
    for (; BITS == 4 && M == 1 && g + 2 <= s.groups; g += 2)
        groups_product<BITS, OFFSET, PER_ROW, M, 2>(tile + g * s.stride, s, rows, g, total);
    for (; g < s.groups; g++) groups_product<BITS, OFFSET, PER_ROW, M, 1>(tile + g * s.stride, s, rows, g, total);
    const f32x16 scale = PER_ROW ? load<f32x16>(tile + s.groups * s.stride) : f32x16{} + 1.0f;
    for (int m = 0; m < M; m++) y[m] = total[m] * scale;
}

// Quantizes one row of x (K) to 8 bits, group by group. A nonfinite number makes its group's scale NaN, and so the result.
template <typename T>
void to_8_bits(const T* x, int64_t K, const Shape& s, int32_t zero, int8_t* q, float* scale, int32_t* start, float* sum) {
    for (int64_t g = 0; g < s.groups; g++, x += s.group, q += s.group) {
        const int64_t n = std::min(s.group, K - g * s.group);
        T rest[128] = {};  // the last group, padded
        const T* from = n < s.group ? (const T*)std::memcpy(rest, x, n * sizeof(T)) : x;
        Largest largest;
        for (int64_t i = 0; i < s.group; i += 16) largest.see(widen(from + i));
        const float most = largest.get(), inverse = most > 0 ? 127 / most : 0;
        scale[g] = most / 127;
        i32x16 total{};
        for (int64_t i = 0; i < s.group; i += 16) {
            const i32x16 v = to_integers(widen(from + i) * inverse);
            const i8x16 bytes = __builtin_convertvector(v, i8x16);
            std::memcpy(q + i, &bytes, 16);
            total += v;
        }
        start[g] = -zero * sum_of(total);
        sum[g] = scale[g] * sum_of(total);
    }
}

template <typename T, int BITS, bool OFFSET, bool PER_ROW>
void product(const T* x, int64_t M, int64_t K, const uint8_t* tiles, const Shape& s, T* y, int64_t N) {
    const int64_t padded = s.groups * s.group + 64, count = M * s.groups;  // + 64 bytes, so that rows do not map to the same cache lines
    std::vector<int8_t> q(M * padded);
    std::vector<float> scale(count), sum(count);
    std::vector<int32_t> start(count);
    const int32_t zero = (OFFSET ? 0 : 1 << (BITS - 1)) - (BITS == 8 && SIGNED8 ? 128 : 0);
    std::vector<Row> rows(M);
    for_each_unit(M, [&](int64_t m) {
        const int64_t at = m * s.groups;
        to_8_bits(x + m * K, K, s, zero, &q[m * padded], &scale[at], &start[at], &sum[at]);
        rows[m] = {&q[m * padded], &scale[at], &start[at], &sum[at]};
    });
    const int64_t tile_bytes = s.groups * s.stride + (PER_ROW ? 64 : 0), blocks = (M + MOST_ROWS - 1) / MOST_ROWS;
    for_each_unit((N + ROWS - 1) / ROWS * blocks, [&](int64_t unit) {
        const int64_t t = unit / blocks, end = std::min(M, (unit % blocks + 1) * MOST_ROWS);
        const uint8_t* tile = tiles + t * tile_bytes;
        for (int64_t m = unit % blocks * MOST_ROWS; m < end;) {
            f32x16 out[12];
            const int64_t left = end - m, now = left >= 12 ? 12 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            auto run = now == 12  ? tile_product<BITS, OFFSET, PER_ROW, 12>
                       : now == 8 ? tile_product<BITS, OFFSET, PER_ROW, 8>
                       : now == 4 ? tile_product<BITS, OFFSET, PER_ROW, 4>
                       : now == 2 ? tile_product<BITS, OFFSET, PER_ROW, 2>
                                  : tile_product<BITS, OFFSET, PER_ROW, 1>;
            run(tile, s, &rows[m], out);
            for (int64_t i = 0; i < now; i++, m++) store(out[i], y + m * N + t * ROWS, std::min(ROWS, N - t * ROWS));
        }
    });
}

// Calls f with the three constants that describe a format.
template <typename F>
void with_format(int64_t bits, int64_t group, bool offset, F f) {
    if (group == 0) f.template operator()<8, false, true>();
    else if (bits == 8 && !offset) f.template operator()<8, false, false>();
    else if (bits == 8) f.template operator()<8, true, false>();
    else if (!offset) f.template operator()<4, false, false>();
    else f.template operator()<4, true, false>();
}

inline Shape shape_of(int64_t K, int64_t bits, int64_t group, bool offset) {
    const int64_t width = group ? group : 64;
    return {(K + width - 1) / width, width, width * ROWS * bits / 8 + (group ? 32 : 0) + (offset ? 32 : 0)};
}

}  // namespace
