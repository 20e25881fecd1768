// Quantizes a weight to 4 or 8 bits and packs it: the same as quant.rounding.quantize followed by quant.tiles.pack.

#pragma once

#include <torch/csrc/stable/tensor.h>
#include "blocks.h"

namespace {

// Stores x as float16, rounded to nearest even; returns the stored values.
inline f32x16 store_half(f32x16 x, uint8_t* p) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    __m256 v[2];
    std::memcpy(v, &x, 64);
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)p + i, _mm256_cvtps_ph(v[i], _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 16; i++) {
        const _Float16 h = _Float16(x[i]);
        std::memcpy(p + 2 * i, &h, 2);
    }
#endif
    return load_half(p);
}

// Returns x. The compiler can't fuse the operations before and after it, which would round differently than torch does.
inline f32x16 unfused(f32x16 x) {
    asm("" : "+m"(x));
    return x;
}

// (v - offset) / scale, rounded to an integer and clamped to 0 .. top.
inline f32x16 quants_of(f32x16 v, f32x16 scale, f32x16 offset, float top) {
    const f32x16 zero{}, one = zero + 1.0f, most = zero + top, magic = zero + 12582912.0f;  // as in exp_of
    f32x16 x = (v - offset) / (scale > zero ? scale : one);
    x = x < zero ? zero : x;
    x = x > most ? most : x;
    return (x + magic) - magic;
}

struct Settings {
    int64_t bits, group;  // group 0: one float32 scale per row
    bool offset;
    const float* clips;
    int64_t tries;
};

// Quantizes and packs `rows` rows (K) into one tile. quant.rounding.quantize explains the method, blocks.h the layout.
template <typename T>
void quantize_tile(const T* w, int64_t rows, int64_t K, const Settings& s, uint8_t* tile) {
    const int64_t width = s.group ? s.group : 64, bytes = width * ROWS * s.bits / 8;
    const float top = float((1 << s.bits) - 1), middle = float(1 << (s.bits - 1));
    const f32x16 empty = f32x16{} + (s.offset ? 0 : middle);
    i32x16 exists{};  // lanes that have a row
    for (int64_t r = 0; r < rows; r++) exists[r] = -1;
    f32x16 values[128], row_scale{};
    for (int64_t r = 0; r < rows && !s.group; r++) {
        float largest = 0, finite = 0;
        for (int64_t k = 0; k < K; k++) {
            const float v = to_float(w[r * K + k]);
            largest = std::max(largest, std::fabs(v)), finite += v * 0;
        }
        row_scale[r] = largest / (middle - 1) + finite;
    }
    for (int64_t first = 0; first < K; first += width) {
        const int64_t n = std::min(width, K - first);
        float numbers[16] = {};
        for (int64_t k = 0; k < width; k++) {
            for (int64_t r = 0; r < rows; r++)  // the padding of the last group must not widen its range
                numbers[r] = k < n ? to_float(w[r * K + first + k]) : s.offset ? values[0][r] : 0;
            values[k] = load<f32x16>(numbers);
        }
        f32x16 low = values[0], high = values[0], finite{}, scale{}, offset{}, least{};
        for (int64_t k = 0; k < width; k++) {
            low = values[k] < low ? values[k] : low;
            high = values[k] > high ? values[k] : high;
            finite += values[k] * 0.0f;
        }
        uint8_t* const numbers_at = tile + bytes;
        for (int64_t i = 0; i < s.tries; i++) {
            f32x16 new_scale = row_scale, new_offset, error{};
            if (s.offset) {
                const f32x16 half = unfused((high - low) / 2.0f * s.clips[i]);
                new_scale = store_half(half * 2.0f / top + finite, numbers_at);
                new_offset = store_half((low + high) / 2.0f - half, numbers_at);
            } else {
                const f32x16 largest = -low > high ? -low : high;
                if (s.group) new_scale = store_half(largest * s.clips[i] / (middle - 1) + finite, numbers_at);
                new_offset = -new_scale * middle;
            }
            for (int64_t k = 0; k < n && s.tries > 1; k++) {
                const f32x16 gap = quants_of(values[k], new_scale, new_offset, top) * new_scale + new_offset - values[k];
                error += gap * gap;
            }
            const i32x16 better = i ? error < least : i32x16{} - 1;
            scale = better ? new_scale : scale;
            offset = better ? new_offset : offset;
            least = better ? error : least;
        }
        for (int64_t k = 0; k < width; k += 4) {
            u32x16 word{};  // inputs k to k + 3, a byte each
            for (int64_t i = 0; i < 4; i++) {
                f32x16 q = quants_of(values[k + i], scale, offset, top);
                q = k + i < n ? (exists ? q : empty) : empty;
                word |= (u32x16)__builtin_convertvector(q, i32x16) << uint32_t(8 * i);
            }
            uint8_t* const at = tile + (s.bits == 8 ? k / 4 : k / 8) * 64;
            if (s.bits == 4 && k % 8) word = word << 4u | load<u32x16>(at);
            std::memcpy(at, &word, 64);
        }
        if (s.group) store_half(scale, numbers_at);
        if (s.offset) store_half(offset, numbers_at + 32);
        tile = numbers_at + (s.group ? 32 : 0) + (s.offset ? 32 : 0);
    }
    if (!s.group) std::memcpy(tile, &row_scale, 64);
}

template <typename T>
void quantize_rows(const T* w, int64_t N, int64_t K, const Settings& s, uint8_t* tiles, int64_t tile_bytes) {
    for_each_unit((N + ROWS - 1) / ROWS,
                  [&](int64_t t) { quantize_tile(w + t * ROWS * K, std::min(ROWS, N - t * ROWS), K, s, tiles + t * tile_bytes); });
}

// The tiles of a weight (N, K) in float32 or bfloat16. clips (float32): the factors to try for narrowing a group's range.
Tensor quantize_to_tiles(const Tensor& weight, const Tensor& clips, int64_t bits, int64_t group, bool offset) {
    const int64_t N = weight.size(0), K = weight.size(1), width = group ? group : 64;
    const int64_t group_bytes = width * ROWS * bits / 8 + (group ? 32 : 0) + (offset ? 32 : 0);
    const int64_t tile_bytes = (K + width - 1) / width * group_bytes + (group ? 0 : 64);
    Tensor y = torch::stable::new_empty(weight, {(N + ROWS - 1) / ROWS, tile_bytes}, torch::headeronly::ScalarType::Byte);
    const Settings s{bits, group, offset, (const float*)clips.const_data_ptr(), clips.size(0)};
    auto* tiles = (uint8_t*)y.mutable_data_ptr();
    if (weight.scalar_type() == torch::headeronly::ScalarType::Float)
        quantize_rows((const float*)weight.const_data_ptr(), N, K, s, tiles, tile_bytes);
    else quantize_rows((const bf16*)weight.const_data_ptr(), N, K, s, tiles, tile_bytes);
    return y;
}

}  // namespace
