// Many rows of x times a weight: for prompts and large batches.
//
// Weights are read in panels of 16 rows in bfloat16: for every 2 inputs, 16 rows x 2 numbers. So a register holds two inputs of 16 rows,
// and a tile register of AMX holds 32 inputs. A panel is written to a buffer that stays in the cache, from a bfloat16 weight or from
// one in 4 or 8 bits, and multiplied with many rows of x. x is not rounded further.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "groups.h"
#include "border.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int64_t PANEL_ROWS = 16;  // rows of x from which the tile registers of AMX are faster than integers

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

// Writes `groups` groups of a tile to a panel of `inputs` inputs; without its scale if that is one for each row. The format is one
// that needs no widening.
template <Format F>
void panel_of(const uint8_t* tile, const Shape& s, int64_t groups, int64_t inputs, uint32_t* panel) {
    std::fill(panel + groups * s.group * 8, panel + inputs * 8, 0);
    for (int64_t g = 0; g < groups; g++, tile += s.stride) {
        const Group<F> from(tile, s, 0, nullptr);
        const f32x16 scale = load<f32x16>(from.scale), shift = load<f32x16>(from.offset) - scale * float(F.middle());
        for (int64_t k = 0; k < s.group; k += 8) {
            words halves[2][PARTS];
            from.weights(k, halves);
            for (int i = 0; i < 4; i++, panel += 16) {
                const u32x16 two = load<u32x16>(halves[i / 2]) >> uint32_t(16 * (i % 2));
                const f32x16 first = __builtin_convertvector((i32x16)(two & 255u), f32x16) * scale + shift;
                const f32x16 second = __builtin_convertvector((i32x16)((two >> 8) & 255u), f32x16) * scale + shift;
                const u32x16 pair = pair_of(first, second);
                std::memcpy(panel, &pair, 64);
            }
        }
    }
}

// The same from group `first` on, for every format.
template <Format F>
void panel_from(const uint8_t* tile, const Shape& s, int64_t first, int64_t groups, int64_t inputs, uint32_t* panel) {
    if constexpr (F.narrow()) {
        uint8_t wide[BLOCK * ROWS + BLOCK / 16 * 128];
        std::fill(panel + groups * s.group * 8, panel + inputs * 8, 0);
        for (int64_t g = 0; g < groups;) {
            const int64_t now = std::min(groups - g, BLOCK / s.group);
            widen_groups<F>(tile, s, first + g, now, wide);
            panel_of<wide_form<F>()>(wide, wide_shape(now, s.group, F.offset), now, now * s.group, panel + g * s.group * 8);
            g += now;
        }
    } else {
        panel_of<F>(tile + first * s.stride, s, groups, inputs, panel);
    }
}

#if defined(__AMX_BF16__)
// A unit of work multiplies WIDTH rows of the weight, DEPTH inputs at a time, by TOGETHER rows of x. Their panels take a half of the second
// cache; x passes by in slices of 32 rows.
constexpr int64_t WIDTH = 256, DEPTH = 2048, TOGETHER = 512;

// Memory in pages of 2 MB. In small pages, which lie anywhere, some parts of a buffer displace others from the second cache.
template <typename T>
struct LargePages {
    static constexpr size_t SIZE = 1 << 21;
    std::unique_ptr<T[], void (*)(void*)> data{nullptr, free};
    size_t count = 0;

    T* at_least(size_t wanted) {
        if (wanted <= count) return data.get();
        const size_t bytes = (wanted * sizeof(T) + SIZE - 1) / SIZE * SIZE;
        data.reset(), count = 0;
        data.reset((T*)aligned_alloc(SIZE, bytes));
        if (!data) throw std::bad_alloc();
        madvise(data.get(), bytes, MADV_HUGEPAGE);
        count = bytes / sizeof(T);
        return data.get();
    }
};
struct Scratch {  // of a thread
    LargePages<bf16> tiles;
    LargePages<uint32_t> panels;
    LargePages<float> sums;
};
inline Scratch& scratch() {
    thread_local Scratch of_thread;
    return of_thread;
}

// Rows of x in tiles of 16 rows x 32 inputs, zero beyond M and K.
template <typename T>
void to_tiles(const T* x, int64_t M, int64_t K, int64_t inputs, bf16* tiles) {
    for_each_unit((M + 15) / 16, [=](int64_t block) {
        for (int64_t m = block * 16; m < block * 16 + 16; m++)
            for (int64_t k = 0; k < inputs; k += 32) {
                bf16* to = tiles + block * 16 * inputs + k * 16 + m % 16 * 32;
                const int64_t count = m < M ? std::clamp<int64_t>(K - k, 0, 32) : 0;
                if (count < 32) std::fill_n(to, 32, bf16{});
                if (std::is_same_v<T, bf16>) std::memcpy(to, x + m * K + k, count * sizeof(bf16));
                else for (int64_t i = 0; i < count; i++) from_float(to_float(x[m * K + k + i]), to[i]);
            }
    });
}

// y (M, N) from x (M, K) in panels of the weight: fill(n, k, depth, panel) writes `depth` inputs of 16 rows of the weight from row n and
// input k on, finish(n, sums) changes 16 sums. The weight has `least` inputs, K or a few more.
template <typename T, typename Fill, typename Finish>
void panel_product(const T* x, int64_t M, int64_t K, int64_t least, int64_t N, T* y, Fill fill, Finish finish) {
    const int64_t inputs = (std::max(K, least) + 31) / 32 * 32, share = (N / (4 * thread_count()) + 31) / 32 * 32, width = std::clamp<int64_t>(share, 32, WIDTH);
    for (int64_t first = 0; first < M; first += TOGETHER, x += TOGETHER * K, y += TOGETHER * N) {
        const int64_t rows = std::min(TOGETHER, M - first);
        bf16* const tiles = scratch().tiles.at_least((rows + 31) * inputs);
        to_tiles(x, rows, K, inputs, tiles);
        for_each_unit((N + width - 1) / width, [=](int64_t unit) {
            const TileRegisters registers;
            const int64_t n = unit * width, count = (std::min(width, N - n) + 31) / 32 * 2, kept = inputs > DEPTH ? rows + 31 : 32;
            uint32_t* const panels = scratch().panels.at_least(WIDTH * DEPTH / 2);
            float* const sums = scratch().sums.at_least(kept * WIDTH);
            for (int64_t k = 0; k < inputs; k += DEPTH) {
                const int64_t depth = std::min(DEPTH, inputs - k);
                for (int64_t p = 0; p < count; p++) {
                    if (n + 16 * p < N) fill(n + 16 * p, k, depth, &panels[p * depth * 8]);
                    else std::fill_n(&panels[p * depth * 8], depth * 8, 0);
                }
                for (int64_t m = 0; m < rows; m += 32) {
                    float* sum = &sums[inputs > DEPTH ? m * count * 16 : 0];
                    slice_product({tiles + m * inputs + k * 16, 32, 16 * inputs, 512}, rows - m, panels, depth, count, k > 0, sum);
                    for (int64_t i = m; k + depth == inputs && i < std::min(rows, m + 32); i++)
                        for (int64_t p = 0; p < count && n + 16 * p < N; p++)
                            store(finish(n + 16 * p, load<f32x16>(sum + ((i - m) * count + p) * 16)), y + i * N + n + 16 * p, std::min(ROWS, N - n - 16 * p));
                }
            }
        });
    }
}

template <typename T>
void product_in_panels(const T* x, int64_t M, int64_t K, const Packed<T>& layer, const Shape& s, decltype(&panel_from<Format{8}>) panel_of_tile, bool per_row) {
    const auto tile = [=](int64_t n) { return layer.tiles + n / ROWS * s.tile; };
    const auto fill = [=](int64_t n, int64_t k, int64_t depth, uint32_t* panel) {
        const int64_t g = k / s.group;  // DEPTH is a multiple of every group
        panel_of_tile(tile(n), s, g, std::min(s.groups - g, depth / s.group), depth, panel);
    };
    const auto finish = [=](int64_t n, f32x16 sums) {
        if (per_row) sums *= load<f32x16>(tile(n) + s.groups * s.stride);
        return layer.bias ? as_stored<T>(sums) + widen_some(layer.bias + n, std::min(ROWS, layer.N - n)) : sums;
    };
    panel_product(x, M, K, s.groups * s.group, layer.N, layer.y, fill, finish);  // the weight's last group is padded
}
#endif

}  // namespace
