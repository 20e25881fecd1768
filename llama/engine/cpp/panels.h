// Many rows of x times a weight: for prompts and large batches.
//
// Weights are read in panels of 16 rows in bfloat16: for every 2 inputs, 16 rows x 2 numbers. So a register holds two inputs of 16 rows,
// and a tile register of AMX holds 32 inputs. A panel is written to a buffer that stays in the cache, from a bfloat16 weight or from
// one in 4 or 8 bits, and multiplied with many rows of x. x is not rounded further.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

using torch::stable::Tensor;

namespace {

constexpr int64_t PANEL_ROWS = 16;        // rows of x from which the tile registers of AMX are faster than integers
constexpr int64_t PANEL_BYTES = 1 << 19;  // panels that are multiplied together; they must fit into the second cache

// Rows of x in bfloat16, zero beyond M and K: `rows` is a multiple of 16; `inputs` is one of 32, and at least as many as a tile has.
struct PaddedRows {
    int64_t M, K, rows, inputs, stride;
    std::vector<bf16> data;

    template <typename T>
    PaddedRows(const T* x, int64_t M, int64_t K, int64_t least) : M(M), K(K), rows((M + 15) / 16 * 16), inputs((std::max(K, least) + 31) / 32 * 32) {
        stride = inputs + 32;  // + 64 bytes, so that rows do not map to the same cache lines
        data.resize(rows * stride);
        for_each_unit(M, [&](int64_t m) {
            if (std::is_same_v<T, bf16>) std::memcpy(&data[m * stride], x + m * K, K * sizeof(bf16));
            else for (int64_t k = 0; k < K; k++) from_float(to_float(x[m * K + k]), data[m * stride + k]);
        });
    }
};

// Writes `inputs` inputs of 16 rows of a bfloat16 weight to a panel. Rows from N on, and inputs from K on, are zero.
inline void panel_of(const bf16* w, int64_t N, int64_t K, int64_t stride, int64_t inputs, uint32_t* panel) {
    for (int64_t k = 0; k < inputs; k += 32, panel += 16 * 16) {
        u32x16 pairs[16] = {};
        for (int64_t n = 0; n < std::min(ROWS, N); n++) {
            if (k + 32 <= K) pairs[n] = load<u32x16>(w + n * stride + k);
            else std::memcpy(&pairs[n], w + n * stride + k, std::max<int64_t>(0, K - k) * sizeof(bf16));
        }
        transpose(pairs);
        std::memcpy(panel, pairs, sizeof pairs);
    }
}

// Writes a tile of a weight in 4 or 8 bits to a panel; without its scale if that is one for each row.
template <int BITS, bool OFFSET, bool PER_ROW>
void panel_of(const uint8_t* tile, const Shape& s, int64_t inputs, uint32_t* panel) {
    std::fill(panel + s.groups * s.group * 8, panel + inputs * 8, 0);
    for (int64_t g = 0; g < s.groups; g++, tile += s.stride) {
        const uint8_t* numbers = tile + s.group * ROWS * BITS / 8;
        const f32x16 scale = PER_ROW ? f32x16{} + 1.0f : load_half(numbers);
        const f32x16 shift = OFFSET ? load_half(numbers + 32) : scale * -float(1 << (BITS - 1));
        for (int64_t k = 0; k < s.group; k += 8) {
            u32x16 halves[2];
            load_weights<BITS>(tile + k * ROWS * BITS / 8, halves);
            for (int i = 0; i < 4; i++, panel += 16) {
                const u32x16 two = halves[i / 2] >> uint32_t(16 * (i % 2));
                const f32x16 first = __builtin_convertvector((i32x16)(two & 255u), f32x16) * scale + shift;
                const f32x16 second = __builtin_convertvector((i32x16)((two >> 8) & 255u), f32x16) * scale + shift;
                const u32x16 pair = pair_of(first, second);
                std::memcpy(panel, &pair, 64);
            }
        }
    }
}

// y (M, N) from x, panel by panel: fill(n, panel) writes 16 rows of the weight from row n on, finish(n, sums) changes 16 sums.
template <typename T, typename Fill, typename Finish>
void panel_product(const PaddedRows& x, int64_t N, T* y, Fill fill, Finish finish) {
    const int64_t size = x.inputs * 8, most = PANEL_BYTES / (size * 4), together = most >= 4 ? 4 : 2;  // numbers of a panel, panels
    const int64_t groups = (N + 16 * together - 1) / (16 * together), blocks = (x.rows + MATRIX_ROWS - 1) / MATRIX_ROWS;
    for_each_unit(groups * blocks, [&](int64_t unit) {
        thread_local std::vector<uint32_t> panels;
        thread_local std::vector<float> sums;
        const int64_t n = unit / blocks * 16 * together, first = unit % blocks * MATRIX_ROWS, M = std::min(MATRIX_ROWS, x.rows - first);
        const int64_t count = std::min(together, (N - n + 31) / 32 * 2);
        if (int64_t(panels.size()) < size * together) panels.resize(size * together);
        if (int64_t(sums.size()) < MATRIX_ROWS * 16 * together) sums.resize(MATRIX_ROWS * 16 * together);
        for (int64_t p = 0; p < count; p++) {
            if (n + 16 * p < N) fill(n + 16 * p, panels.data() + p * size);
            else std::fill_n(panels.data() + p * size, size, 0);
        }
        matrix_product(x.data.data() + first * x.stride, x.stride, M, panels.data(), x.inputs, count, sums.data());
        for (int64_t m = first; m < std::min(x.M, first + M); m++)
            for (int64_t p = 0; p < count && n + 16 * p < N; p++)
                store(finish(n + 16 * p, load<f32x16>(&sums[((m - first) * count + p) * 16])), y + m * N + n + 16 * p, std::min(ROWS, N - n - 16 * p));
    });
}

template <typename T, int BITS, bool OFFSET, bool PER_ROW>
void product_in_panels(const T* x, int64_t M, int64_t K, const uint8_t* tiles, const Shape& s, T* y, int64_t N) {
    const PaddedRows rows(x, M, K, s.groups * s.group);  // a weight's last group is padded
    const auto tile = [&](int64_t n) { return tiles + n / ROWS * (s.groups * s.stride + (PER_ROW ? 64 : 0)); };
    const auto fill = [&](int64_t n, uint32_t* panel) { panel_of<BITS, OFFSET, PER_ROW>(tile(n), s, rows.inputs, panel); };
    panel_product(rows, N, y, fill, [&](int64_t n, f32x16 sums) { return PER_ROW ? sums * load<f32x16>(tile(n) + s.groups * s.stride) : sums; });
}

template <typename T>
void linear_blocks_of(const T* x, int64_t M, int64_t K, const uint8_t* tiles, int64_t bits, int64_t group, bool offset, T* y, int64_t N) {
    with_format(bits, group, offset, [&]<int BITS, bool OFFSET, bool PER_ROW>() {
        auto run = product<T, BITS, OFFSET, PER_ROW>;
        if constexpr (HAS_TILES) run = M < PANEL_ROWS ? run : product_in_panels<T, BITS, OFFSET, PER_ROW>;
        run(x, M, K, tiles, shape_of(K, bits, group, offset), y, N);
    });
}

// (M, K) in float32 or bfloat16, times a packed weight (N, K) -> (M, N) in x's dtype.
Tensor linear_blocks(const Tensor& x, const Tensor& tiles, int64_t bits, int64_t group, bool offset, int64_t N) {
    const int64_t M = x.size(0), K = x.size(1);
    Tensor y = torch::stable::new_empty(x, {M, N});
    const auto* w = (const uint8_t*)tiles.const_data_ptr();
    if (x.scalar_type() == torch::headeronly::ScalarType::Float)
        linear_blocks_of((const float*)x.const_data_ptr(), M, K, w, bits, group, offset, (float*)y.mutable_data_ptr(), N);
    else
        linear_blocks_of((const bf16*)x.const_data_ptr(), M, K, w, bits, group, offset, (bf16*)y.mutable_data_ptr(), N);
    return y;
}

}  // namespace
