// Rows of x times a bfloat16 weight, on processors with instructions for bfloat16.

#pragma once

#include <algorithm>

#include "border.h"
#include "matrix.h"
#include "panels.h"
#include "pool.h"
#include "vectors.h"

namespace {

#if defined(HAS_BF16)
// Rows of the weight that are read at once. They are in different pages. Some processors read several pages in parallel, others only one at full speed.
constexpr int ROWS_AT_ONCE = STREAMS == 2 ? 4 : 1;

// M rows of x times R rows of the weight -> y (R, M). With several, the next R rows are prefetched.
template <int M, int R>
void rows_product(const bf16* x, const bf16* w, int64_t K, float* y) {
    constexpr int SUMS = M == 1 && ROWS_AT_ONCE == 1 ? 2 : 1;  // independent sums hide the latency
    f32x16 acc[R][M][SUMS] = {};
    int64_t k = 0;
    for (; k + 32 * SUMS <= K; k += 32 * SUMS)
        for (int r = 0; r < R; r++)
            for (int i = 0; i < SUMS; i++) {
                const int64_t at = k + 32 * i;
                if (ROWS_AT_ONCE > 1) __builtin_prefetch(w + (R + r) * K + at, 0, 2);
                for (int m = 0; m < M; m++) acc[r][m][i] = dot2(acc[r][m][i], load<u32x16>(w + r * K + at), load<u32x16>(x + m * K + at));
            }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) {
            for (int i = 1; i < SUMS; i++) acc[r][m][0] += acc[r][m][i];
            float& sum = y[r * M + m] = sum_of(acc[r][m][0]);
            for (int64_t i = k; i < K; i++) sum += to_float(w[r * K + i]) * to_float(x[m * K + i]);
        }
}

template <int M>
void few_bf16(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t N, int64_t K) {
    few_rows<M, ROWS_AT_ONCE>(x, w, bias, y, N, K, rows_product<M, ROWS_AT_ONCE>, rows_product<M, 1>);
}

void product_bf16(const bf16* x, int64_t M, int64_t K, const bf16* w, const bf16* bias, bf16* y, int64_t N) {
#if defined(__AMX_BF16__)
    if (M > 4) {
        const auto fill = [=](int64_t n, int64_t k, int64_t depth, uint32_t* panel) { panel_of(w + n * K + k, N - n, K - k, K, depth, panel); };
        const auto add_bias = [=](int64_t n, f32x16 sums) { return bias ? sums + widen_some(bias + n, std::min(ROWS, N - n)) : sums; };
        return panel_product(x, M, K, K, N, y, fill, add_bias);
    }
#endif
    for (int64_t m = 0; m < M;) {
        const int64_t now = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
        const auto run = now == 4 ? few_bf16<4> : now == 2 ? few_bf16<2> : few_bf16<1>;
        run(x + m * K, w, bias, y + m * N, N, K);
        m += now;
    }
}
#endif

}  // namespace
