// Rows of x times a bfloat16 weight: the operator, and its form for a few rows on processors with instructions for bfloat16.

#pragma once

#include <algorithm>
#include <optional>

#include "border.h"
#include "elementwise.h"
#include "matrix.h"
#include "panels.h"
#include "pool.h"
#include "vectors.h"
#if !defined(HAS_BF16)
#include "widened.h"
#endif

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

// (M, K) times a weight (N, K), plus a bias (N) -> (M, N) in x's dtype. With instructions for bfloat16, everything is in bfloat16; the weight is
// read once for every 4 rows, with AMX once for every 512 rows. Otherwise x is in bfloat16 or float32, the weight in bfloat16 or float16.
Tensor linear_bf16(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
    require(x.dim() == 2 && weight.dim() == 2, "x (M, K) and weight (N, K)");
    const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
    const ScalarType dtype = x.scalar_type(), stored = weight.scalar_type();
    check_model_dtype(x);
    check(x, "x", dtype, {M, K});
    check(weight, "the weight of a linear layer", stored, {N, K});
    if (bias) check(*bias, "the bias of a linear layer", dtype, {N});
    Tensor y = torch::stable::new_empty(x, {M, N});
    const void *w = weight.const_data_ptr(), *b = bias ? bias->const_data_ptr() : nullptr;
#if defined(HAS_BF16)
    require(dtype == ScalarType::BFloat16 && stored == dtype, "x and weight in bfloat16");
    product_bf16((const bf16*)x.const_data_ptr(), M, K, (const bf16*)w, (const bf16*)b, (bf16*)y.mutable_data_ptr(), N);
#else
    require(stored == ScalarType::BFloat16 || stored == ScalarType::Half, "a weight in bfloat16 or float16");
    with_type(x, [&](auto* type) {
        typedef std::remove_pointer_t<decltype(type)> T;
        const auto run = [&](const auto* typed) { widened_product((const T*)x.const_data_ptr(), M, K, typed, (const T*)b, (T*)y.mutable_data_ptr(), N); };
        if (stored == ScalarType::Half) run((const f16*)w);
        else run((const bf16*)w);
    });
#endif
    return y;
}

}  // namespace
