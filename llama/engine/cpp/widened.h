// Rows of x times a weight in bfloat16 or float16, for processors without instructions for bfloat16.
//
// The arithmetic is that of float32: a weight is widened in registers, which is exact; products are added in float32, and only the result is
// rounded, to x's dtype. So x may be float32 too, and it is never rounded to the weight's dtype.
//
// A few rows of x: the weight is read in order, once for 3 rows. A row's result does not depend on the other rows.
// Many rows: SLICE inputs of WIDTH rows of the weight are widened to a buffer in the second cache. A panel of x has 16 rows: 16 numbers for every
// input. SIX rows of the weight times a panel fill the registers; each number of the weight is multiplied by 16 numbers of x.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "groups.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int64_t LONG = 4096;  // inputs: a longer row of x does not stay in the first cache, so 4 rows of the weight share it
constexpr int64_t FEW = 6;  // rows of x that are multiplied without panels
constexpr int64_t SIX = 6, WIDTH = 48, SLICE = 256, TOGETHER = 512;

// Memory of a thread for `count` floats.
template <int PURPOSE>
inline float* floats_of_thread(size_t count) {
    thread_local std::vector<float> memory;
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

// 2 LANES numbers: the even ones and the odd ones, as one operation widens these from bfloat16, or the first and the second half.
template <bool EVEN_ODD, typename T>
inline void load_two(const T* p, floats* two) {
    if constexpr (EVEN_ODD) {
        const words pairs = load<words>(p);
        two[0] = (floats)(pairs << 16), two[1] = (floats)(pairs & 0xffff0000u);
    } else {
        two[0] = to_floats(p), two[1] = to_floats(p + LANES);
    }
}

// M rows of x (M, K) times R rows of the weight -> y (R, M). x stays in its dtype, so it takes little of the first cache. Independent sums hide the
// latency.
template <int M, int R, int SUMS, typename W, typename T>
inline void rows_product(const T* x, const W* w, int64_t K, float* y) {
    constexpr bool EVEN_ODD = std::is_same_v<W, bf16> && std::is_same_v<T, bf16>;
    constexpr int64_t STEP = SUMS * LANES;
    floats sums[R][M][SUMS] = {};
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP)
        for (int r = 0; r < R; r++) {
            if (R > 1) __builtin_prefetch((const char*)(w + r * K + k) + AHEAD);
            for (int i = 0; i < SUMS; i += 2) {
                floats weights[2], inputs[2];
                load_two<EVEN_ODD>(w + r * K + k + i * LANES, weights);
                for (int m = 0; m < M; m++) {
                    load_two<EVEN_ODD>(x + m * K + k + i * LANES, inputs);
                    for (int j = 0; j < 2; j++) sums[r][m][i + j] += weights[j] * inputs[j];
                }
            }
        }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) {
            floats sum = sums[r][m][0] + sums[r][m][1];
            if (SUMS == 4) sum += sums[r][m][2] + sums[r][m][3];
            float& result = y[r * M + m] = 0;
            for (int i = 0; i < LANES; i++) result += sum[i];
            for (int64_t i = k; i < K; i++) result += to_float(w[r * K + i]) * to_float(x[m * K + i]);
        }
}

// Adds the products of SIX rows of the weight (SIX, SLICE) and a panel of x (depth, 16) to sums (SIX, 16).
inline void six_rows(const float* w, const float* panel, int64_t depth, bool first, float* sums) {
    floats acc[SIX][PARTS] = {};
    for (int i = 0; i < SIX * PARTS && !first; i++) acc[i / PARTS][i % PARTS] = load<floats>(sums + i * LANES);
    for (int64_t k = 0; k < depth; k++) {
        floats column[PARTS];
        for (int part = 0; part < PARTS; part++) column[part] = load<floats>(panel + 16 * k + LANES * part);
        for (int r = 0; r < SIX; r++)
            for (int part = 0; part < PARTS; part++) acc[r][part] += column[part] * w[r * SLICE + k];
    }
    for (int i = 0; i < SIX * PARTS; i++) std::memcpy(sums + i * LANES, &acc[i / PARTS][i % PARTS], sizeof(floats));
}

// Rows of x (M, K) in panels (M / 16, inputs, 16), zero beyond M and K.
template <typename T>
void to_panels(const T* x, int64_t M, int64_t K, int64_t inputs, float* panels) {
    for_each_unit((M + 15) / 16, [=](int64_t p) {
        for (int64_t k = 0; k < inputs; k += 16) {
            u32x16 numbers[16] = {};
            for (int64_t m = 16 * p; m < std::min(M, 16 * p + 16); m++) {
                numbers[m % 16] = (u32x16)widen_some(x + m * K + k, std::min<int64_t>(16, K - k));
            }
            transpose(numbers);
            std::memcpy(panels + (p * inputs + k) * 16, numbers, sizeof numbers);
        }
    });
}

template <typename W, typename T>
void many_rows(const T* x, int64_t M, int64_t K, const W* w, const T* bias, T* y, int64_t N) {
    const int64_t inputs = (K + 15) / 16 * 16, count = (M + 15) / 16;
    float* const panels = floats_of_thread<0>(count * 16 * inputs);
    to_panels(x, M, K, inputs, panels);
    for_each_unit((N + WIDTH - 1) / WIDTH, [=](int64_t unit) {
        const int64_t n = unit * WIDTH, rows = std::min(WIDTH, N - n), sixes = (rows + SIX - 1) / SIX;
        float *const wide = floats_of_thread<1>(WIDTH * SLICE), *const sums = floats_of_thread<2>(count * WIDTH * 16);  // (count, WIDTH, 16)
        for (int64_t first = 0; first < inputs; first += SLICE) {
            const int64_t depth = std::min(SLICE, inputs - first);
            for (int64_t r = 0; r < sixes * SIX; r++) {
                const W* const row = w + (n + std::min(r, rows - 1)) * K + first;
                for (int64_t k = 0, some = std::min(depth, K - first); k < depth; k += LANES) {
                    floats numbers{};
                    if (k + LANES <= some) numbers = to_floats(row + k);
                    else for (int64_t i = 0; i < some - k; i++) numbers[i] = to_float(row[k + i]);
                    std::memcpy(wide + r * SLICE + k, &numbers, sizeof numbers);
                }
            }
            for (int64_t p = 0; p < count; p++)
                for (int64_t i = 0; i < sixes; i++)
                    six_rows(wide + i * SIX * SLICE, panels + (p * inputs + first) * 16, depth, first == 0, sums + (p * WIDTH + i * SIX) * 16);
        }
        for (int64_t p = 0; p < count; p++)
            for (int64_t r = 0; r < rows; r += 16) {
                u32x16 numbers[16];
                std::memcpy(numbers, sums + (p * WIDTH + r) * 16, sizeof numbers);
                transpose(numbers);
                const int64_t some = std::min<int64_t>(16, rows - r);
                const f32x16 added = bias ? widen_some(bias + n + r, some) : f32x16{};
                for (int64_t m = 16 * p; m < std::min(M, 16 * p + 16); m++) store((f32x16)numbers[m % 16] + added, y + m * N + n + r, some);
            }
    });
}

template <int M, typename W, typename T>
void few_widened(const T* x, const W* w, const T* bias, T* y, int64_t N, int64_t K) {
    constexpr int R = M == 1 ? 4 : 1;
    if (K <= LONG) few_rows<M, 1>(x, w, bias, y, N, K, rows_product<M, 1, 4, W, T>, rows_product<M, 1, 4, W, T>);
    else few_rows<M, R>(x, w, bias, y, N, K, rows_product<M, R, 2, W, T>, rows_product<M, 1, 2, W, T>);
}

// y (M, N) = x (M, K) times a weight (N, K), plus a bias (N).
template <typename W, typename T>
void widened_product(const T* x, int64_t M, int64_t K, const W* w, const T* bias, T* y, int64_t N) {
    if (M > FEW) {
        for (int64_t m = 0; m < M; m += TOGETHER) many_rows(x + m * K, std::min(TOGETHER, M - m), K, w, bias, y + m * N, N);
        return;
    }
    for (int64_t m = 0; m < M; m += 3) {
        const auto run = M - m >= 3 ? few_widened<3, W, T> : M - m == 2 ? few_widened<2, W, T> : few_widened<1, W, T>;
        run(x + m * K, w, bias, y + m * N, N, K);
    }
}

}  // namespace
