// Quantizes a weight to 4 or 8 bits and packs it: the same as quant.rounding.quantize followed by quant.tiles.pack.

#pragma once

#include <sys/mman.h>

#include "groups.h"
#include "border.h"

namespace {

inline floats smaller(floats a, floats b) { return a < b ? a : b; }
inline floats larger(floats a, floats b) { return a > b ? a : b; }

// Stores x as float16, rounded to nearest even; returns the stored values.
inline floats store_half(floats x, uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i*)p, half);
    return (floats)_mm512_cvtph_ps(half);
#elif defined(__F16C__)
    const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i*)p, half);
    return (floats)_mm256_cvtph_ps(half);
#else
    const float16x4_t half = vcvt_f16_f32((float32x4_t)x);
    vst1_u8(p, vreinterpret_u8_f16(half));
    return (floats)vcvt_f32_f16(half);
#endif
}

// Returns x. The compiler can't fuse the operations before and after it, which would round differently than torch does.
inline floats unfused(floats x) {
    asm("" : "+m"(x));
    return x;
}

// Transposes LANES rows of `width` numbers of 32 bits: to[k][r] = from[r * stride + k], with `stride` in bytes.
inline void transpose(const void* from, int64_t stride, int64_t width, floats* to) {
    for (int64_t r = 0; r < LANES; r += 4)
        for (int64_t k = 0; k < width; k += 4) {
            const char* const at = (const char*)from + r * stride + 4 * k;
            float* const out = (float*)(to + k) + r;
#if defined(__AVX2__)
            __m128 a = load<__m128>(at), b = load<__m128>(at + stride), c = load<__m128>(at + 2 * stride), d = load<__m128>(at + 3 * stride);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(out, a), _mm_storeu_ps(out + LANES, b), _mm_storeu_ps(out + 2 * LANES, c), _mm_storeu_ps(out + 3 * LANES, d);
#else
            for (int64_t i = 0; i < 16; i++) std::memcpy(out + i % 4 * LANES + i / 4, at + i / 4 * stride + i % 4 * 4, 4);
#endif
        }
}
inline void load_rows(const float* from, int64_t stride, int64_t width, floats* to) { transpose(from, 4 * stride, width, to); }
inline void load_rows(const bf16* from, int64_t stride, int64_t width, floats* to) {
    transpose(from, 2 * stride, width / 2, to);  // in pairs
    for (int64_t k = width / 2 - 1; k >= 0; k--) {
        const words pair = (words)to[k];
        to[2 * k] = (floats)(pair << 16), to[2 * k + 1] = (floats)(pair & 0xffff0000u);
    }
}

// Columns `first` to first + n of up to LANES rows: values[k][r]. The padding of a row repeats its first number, or is zero.
template <typename T>
void load_group(const T* w, int64_t rows, int64_t K, int64_t first, int64_t n, int64_t width, bool repeat, floats* values) {
    if (rows >= LANES && n == width) return load_rows(w + first, K, width, values);
    T rest[LANES * 128] = {};
    for (int64_t r = 0; r < std::min(rows, LANES); r++)
        for (int64_t k = 0; k < width; k++)
            if (k < n || repeat) rest[r * width + k] = w[r * K + first + (k < n ? k : 0)];
    load_rows(rest, width, width, values);
}

// The range of the numbers in each lane; `finite` is NaN where one is not finite.
struct Range {
    floats low, high, finite;
    explicit Range(floats x) : low(x), high(x), finite{} {}
    void see(floats x) { low = smaller(x, low), high = larger(x, high), finite += x * 0.0f; }
    floats largest() const { return larger(-low, high); }
};

// (v - offset) / step, clamped to 0 .. top and rounded to nearest even. The integer is in the low bits: 1.5 * 2^23 is added.
constexpr float MAGIC = 12582912;
inline floats quants_of(floats v, floats step, floats offset, floats top) {
    return smaller(larger((v - offset) / step, floats{}), top) + MAGIC;
}

struct Settings {
    int64_t bits, group;  // group 0: one float32 scale per row
    bool offset;
    const float* clips;
    int64_t tries;
};

// Quantizes up to LANES rows (K) and packs them into the lanes of a tile from `lane` on.
template <typename T>
void quantize_lanes(const T* w, int64_t rows, int64_t K, const Settings& s, uint8_t* tile, int64_t lane) {
    const int64_t width = s.group ? s.group : 64, bytes = width * ROWS * s.bits / 8;
    const float middle = float(1 << (s.bits - 1));
    const floats one = floats{} + 1.0f, top = floats{} + float((1 << s.bits) - 1);
    const uint32_t empty = s.offset ? 0 : 1 << (s.bits - 1);
    words exists{};  // lanes that have a row
    for (int64_t r = 0; r < std::min(rows, LANES); r++) exists[r] = ~0u;
    floats values[128], row_scale{};
    if (!s.group) {
        Range range(floats{});
        for (int64_t first = 0; first < K; first += width) {
            load_group(w, rows, K, first, std::min(width, K - first), width, false, values);
            for (int64_t k = 0; k < width; k++) range.see(values[k]);
        }
        row_scale = range.largest() / (middle - 1) + range.finite;
    }
    for (int64_t first = 0; first < K; first += width) {
        const int64_t n = std::min(width, K - first);
        load_group(w, rows, K, first, n, width, s.offset, values);  // the padding must not widen the range
        Range range(values[0]);
        for (int64_t k = 0; k < width; k++) range.see(values[k]);
        uint8_t* const scale_at = tile + bytes + 2 * lane;
        floats scale{}, offset{}, least{};
        for (int64_t i = 0; i < s.tries; i++) {
            floats new_scale = row_scale, new_offset, error{};
            if (s.offset) {
                const floats half = unfused((range.high - range.low) / 2.0f * s.clips[i]);
                new_scale = store_half(half * 2.0f / top + range.finite, scale_at);
                new_offset = store_half((range.low + range.high) / 2.0f - half, scale_at);
            } else {
                if (s.group) new_scale = store_half(range.largest() * s.clips[i] / (middle - 1) + range.finite, scale_at);
                new_offset = -new_scale * middle;
            }
            const floats step = new_scale > 0.0f ? new_scale : one;
            for (int64_t k = 0; k < n && s.tries > 1; k++) {
                const floats gap = (quants_of(values[k], step, new_offset, top) - MAGIC) * new_scale + new_offset - values[k];
                error += gap * gap;
            }
            const ints better = i ? error < least : ints{} - 1;
            scale = better ? new_scale : scale;
            offset = better ? new_offset : offset;
            least = better ? error : least;
        }
        const floats step = scale > 0.0f ? scale : one;
        for (int64_t k = 0; k < width; k += 4) {
            words word{};  // inputs k to k + 3, a byte each
            for (int64_t i = 0; i < 4; i++) {
                const words q = (words)quants_of(values[k + i], step, offset, top) & 255u;
                word |= (k + i < n ? (q & exists) | (empty & ~exists) : words{} + empty) << uint32_t(8 * i);
            }
            uint8_t* const at = tile + (s.bits == 8 ? k / 4 : k / 8) * 64 + 4 * lane;
            if (s.bits == 4 && k % 8) word = word << 4u | load<words>(at);
            std::memcpy(at, &word, sizeof(word));
        }
        if (s.group) store_half(scale, scale_at);
        if (s.offset) store_half(offset, scale_at + 32);
        tile += bytes + (s.group ? 32 : 0) + (s.offset ? 32 : 0);
    }
    if (!s.group) std::memcpy(tile + 4 * lane, &row_scale, sizeof(row_scale));
}

// quant.rounding.quantize explains the method, groups.h the layout.
template <typename T>
void quantize_rows(const T* w, int64_t N, int64_t K, const Settings& s, uint8_t* tiles, int64_t tile_bytes) {
    for_each_unit((N + ROWS - 1) / ROWS, [&](int64_t t) {
        for (int64_t lane = 0; lane < ROWS; lane += LANES) {
            const int64_t row = std::min(t * ROWS + lane, N);
            quantize_lanes(w + row * K, N - row, K, s, tiles + t * tile_bytes, lane);
        }
    });
}

// The tiles of a weight (N, K) in float32 or bfloat16. clips (float32): the factors to try for narrowing a group's range.
Tensor quantize_to_tiles(const Tensor& weight, const Tensor& clips, int64_t bits, int64_t group, bool offset) {
    require(weight.dim() == 2 && clips.dim() == 1, "weight (N, K) and a list of clips");
    require((bits == 8 && group == 0 && !offset) || ((bits == 4 || bits == 8) && group > 0 && group <= 128 && group % 16 == 0),
            "4 or 8 bits in groups of 16 to 128, or 8 bits in rows");
    const int64_t N = weight.size(0), K = weight.size(1), width = group ? group : 64;
    check_model_dtype(weight);
    check(weight, "weight", weight.scalar_type(), {N, K});
    check(clips, "clips", ScalarType::Float, {clips.size(0)});
    const int64_t group_bytes = width * ROWS * bits / 8 + (group ? 32 : 0) + (offset ? 32 : 0);
    const int64_t tile_bytes = (K + width - 1) / width * group_bytes + (group ? 0 : 64);
    Tensor y = torch::stable::new_empty(weight, {(N + ROWS - 1) / ROWS, tile_bytes}, torch::headeronly::ScalarType::Byte);
    const Settings s{bits, group, offset, (const float*)clips.const_data_ptr(), clips.size(0)};
    auto* tiles = (uint8_t*)y.mutable_data_ptr();
    madvise((void*)(uintptr_t(tiles) & -4096), y.size(0) * tile_bytes, MADV_HUGEPAGE);  // system/pages.py says why
    with_type(weight, [&](auto* type) { quantize_rows((decltype(type))weight.const_data_ptr(), N, K, s, tiles, tile_bytes); });
    return y;
}

}  // namespace
