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
// Bytes that one row prefetches ahead, on processors whose own prefetcher reads too little.
#if defined(__AMX_BF16__)
constexpr int64_t AHEAD = 1024;
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

// A group of each of TILES tiles, `apart` bytes apart, times M rows, added to `total`.
template <int BITS, bool OFFSET, bool PER_ROW, int M, int TILES>
inline void group_product(const uint8_t* tile, int64_t apart, const Shape& s, const Row* rows, int64_t g, f32x16 (*total)[M]) {
    constexpr int SUMS = M == 1 ? 2 : 1;  // independent sums hide the latency of dot4
    i32x16 acc[TILES][SUMS][M];
    const int8_t* x[M];
    for (int m = 0; m < M; m++) {
        for (int j = 0; j < TILES; j++) {
            acc[j][0][m] = i32x16{} + rows[m].start[g];
            for (int i = 1; i < SUMS; i++) acc[j][i][m] = i32x16{};
        }
        x[m] = rows[m].x + g * s.group;
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < s.group; k += 8)
        for (int j = 0; j < TILES; j++) {
            const uint8_t* w = tile + j * apart + k * ROWS * BITS / 8;
            if (AHEAD && M == 1)
                for (int i = 0; i < BITS / 4; i++) __builtin_prefetch(w + AHEAD + 64 * i);
            u32x16 halves[2];
            load_weights<BITS>(w, halves);
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 2; i++) acc[j][i % SUMS][m] = dot4<BITS>(acc[j][i % SUMS][m], halves[i], load<int32_t>(x[m] + k + 4 * i));
        }
    for (int j = 0; j < TILES; j++) {
        const uint8_t* numbers = tile + j * apart + s.group * ROWS * BITS / 8;
        const f32x16 scale = PER_ROW ? f32x16{} + 1.0f : load_half(numbers);
        const f32x16 offset = OFFSET ? load_half(numbers + 32) : f32x16{};
        for (int m = 0; m < M; m++) {
            for (int i = 1; i < SUMS; i++) acc[j][0][m] += acc[j][i][m];
            total[j][m] += __builtin_convertvector(acc[j][0][m], f32x16) * (PER_ROW ? f32x16{} + rows[m].scale[g] : scale * rows[m].scale[g]);
            if (OFFSET) total[j][m] += offset * rows[m].sum[g];
        }
    }
}

// Successive tiles times M rows of x.
template <int BITS, bool OFFSET, bool PER_ROW, int M, int TILES>
void tile_product(const uint8_t* tile, const Shape& s, const Row* rows, f32x16 (*y)[M]) {
    const int64_t apart = s.groups * s.stride + (PER_ROW ? 64 : 0);
    f32x16 total[TILES][M] = {};
    for (int64_t g = 0; g < s.groups; g++) group_product<BITS, OFFSET, PER_ROW, M, TILES>(tile + g * s.stride, apart, s, rows, g, total);
    for (int j = 0; j < TILES; j++) {
        const f32x16 scale = PER_ROW ? load<f32x16>(tile + j * apart + s.groups * s.stride) : f32x16{} + 1.0f;
        for (int m = 0; m < M; m++) y[j][m] = total[j][m] * scale;
    }
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
    const int64_t tile_bytes = s.groups * s.stride + (PER_ROW ? 64 : 0), count_of_tiles = (N + ROWS - 1) / ROWS;
    const auto write = [&](const f32x16& sums, int64_t m, int64_t t) { store(sums, y + m * N + t * ROWS, std::min(ROWS, N - t * ROWS)); };
    if (M == 1) {
        for_each_part((count_of_tiles + 1) / 2, 2 * tile_bytes, [&](int64_t pair) {  // two tiles at once, read in parallel
            const int64_t t = 2 * pair;
            f32x16 out[2][1];
            auto run = t + 1 < count_of_tiles ? tile_product<BITS, OFFSET, PER_ROW, 1, 2> : tile_product<BITS, OFFSET, PER_ROW, 1, 1>;
            run(tiles + t * tile_bytes, s, rows.data(), out);
            for (int64_t j = 0; j < 2 && t + j < count_of_tiles; j++) write(out[j][0], 0, t + j);
        });
        return;
    }
    const int64_t blocks = (M + MOST_ROWS - 1) / MOST_ROWS;
    for_each_part(count_of_tiles * blocks, tile_bytes, [&](int64_t unit) {
        const int64_t t = unit / blocks, end = std::min(M, (unit % blocks + 1) * MOST_ROWS);
        for (int64_t m = unit % blocks * MOST_ROWS; m < end;) {
            const auto run = [&]<int COUNT>() {
                f32x16 out[1][COUNT];
                tile_product<BITS, OFFSET, PER_ROW, COUNT, 1>(tiles + t * tile_bytes, s, &rows[m], out);
                for (int i = 0; i < COUNT; i++, m++) write(out[0][i], m, t);
            };
            const int64_t left = end - m;
            if (left >= 12) run.template operator()<12>();
            else if (left >= 8) run.template operator()<8>();
            else if (left >= 4) run.template operator()<4>();
            else if (left >= 2) run.template operator()<2>();
            else run.template operator()<1>();
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
