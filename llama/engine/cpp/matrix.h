// Products of rows of x: a few with a weight as it lies in memory, many in bfloat16 with panels (panels.h), with AMX or with vectors.

#pragma once

#include <algorithm>

#include "pool.h"
#include "vectors.h"

namespace {

// y (M, N) = x (M, K) times a weight (N, K), plus a bias (N), R rows of the weight at once.
// several(x, w, K, sums) and one(x, w, K, sums): M rows of x times R rows of the weight, and times one -> sums (rows, M)
template <int M, int R, typename W, typename T, typename F>
void few_rows(const T* x, const W* w, const T* bias, T* y, int64_t N, int64_t K, F several, F one) {
    for_each_part((N + R - 1) / R, R * K * sizeof(W), [=](int64_t part) {
        for (int64_t n = part * R, end = std::min(N, n + R); n < end;) {
            const int64_t now = end - n == R ? R : 1;
            float sums[R][M];
            (now == R ? several : one)(x, w + n * K, K, sums[0]);
            for (int64_t r = 0; r < now; r++, n++)
                for (int m = 0; m < M; m++) from_float(sums[r][m] + (bias ? to_float(bias[n]) : 0), y[m * N + n]);
        }
    });
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16
#endif

// A pair of bfloat16 numbers is in 32 bits, the first one in the low half. V, U: vectors of any width, of 64 bytes with AVX-512.
#if defined(__AVX512BF16__)
inline f32x16 dot2(f32x16 acc, u32x16 a, u32x16 b) { return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
inline u32x16 pair_of(f32x16 first, f32x16 second) {
    static const __m512i order = [] {
        alignas(64) uint16_t at[32];
        for (int i = 0; i < 32; i++) at[i] = uint16_t(i / 2 + i % 2 * 16);
        return _mm512_load_si512(at);
    }();
    return (u32x16)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <typename V, typename U>
inline V dot2(V acc, U a, U b) {
    constexpr int COUNT = sizeof(V) / 16;
    float32x4_t sum[COUNT];
    bfloat16x8_t x[COUNT], y[COUNT];
    std::memcpy(sum, &acc, sizeof(V)), std::memcpy(x, &a, sizeof(V)), std::memcpy(y, &b, sizeof(V));
    for (int i = 0; i < COUNT; i++) sum[i] = vbfdotq_f32(sum[i], x[i], y[i]);
    return load<V>(sum);
}
#else
template <typename V, typename U>
inline V dot2(V acc, U a, U b) {
    acc += (V)(a << 16) * (V)(b << 16);
    return acc + (V)(a & 0xffff0000u) * (V)(b & 0xffff0000u);
}
#endif

#if !defined(__AVX512BF16__)
inline u32x16 pair_of(f32x16 first, f32x16 second) { return rounded(first) >> 16 | rounded(second); }
#endif

#if defined(__AMX_BF16__)
// Gives this thread eight tile registers of 16 rows of 64 bytes.
struct TileRegisters {
    TileRegisters() {
        // Static: GCC 12 assumes that the instruction reads only 8 bytes, and would not store the other bytes of a local variable.
        alignas(64) static const struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
};

// Rows of x; a tile register holds 16 rows x 32 inputs. Distances: from row to row, from a tile to the one below it, to the one beside it.
struct TiledRows {
    const bf16* data;
    int64_t stride, down, along;
};

// 32 (BOTH) or 16 rows of x times two panels `apart` numbers apart. The result is added to y or overwrites it. 32 inputs of a panel fill a register.
template <bool BOTH>
inline void tile_rows(const TiledRows& x, const uint32_t* panels, int64_t apart, int64_t K, bool add, float* y, int64_t width) {
    float* const corner[4] = {y, y + 16, y + 16 * width, y + 16 * width + 16};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) _tile_loadd(0, corner[0], width * 4);
    if (add) _tile_loadd(1, corner[1], width * 4);
    if (add && BOTH) _tile_loadd(2, corner[2], width * 4);
    if (add && BOTH) _tile_loadd(3, corner[3], width * 4);
    const bf16* tile = x.data;
    for (int64_t k = 0; k < K; k += 32, tile += x.along) {
        _tile_loadd(4, tile, x.stride * 2);
        _tile_loadd(6, panels + k * 8, 64);
        _tile_loadd(7, panels + apart + k * 8, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!BOTH) continue;
        _tile_loadd(5, tile + x.down, x.stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, corner[0], width * 4);
    _tile_stored(1, corner[1], width * 4);
    if (BOTH) _tile_stored(2, corner[2], width * 4);
    if (BOTH) _tile_stored(3, corner[3], width * 4);
}

// 32 rows of x, or the last 16 of them, times an even number of panels.
inline void slice_product(const TiledRows& x, int64_t rows, const uint32_t* panels, int64_t K, int64_t count, bool add, float* y) {
    const auto run = rows > 16 ? tile_rows<true> : tile_rows<false>;
    for (int64_t p = 0; p < count; p += 2) run(x, panels + p * K * 8, K * 8, K, add, y + 16 * p, 16 * count);
}

// x (M, K), rows `stride` apart, times an even number of panels -> y (M, 16 count). M is a multiple of 16, K of 32.
inline void matrix_product(const bf16* x, int64_t stride, int64_t M, const uint32_t* panels, int64_t K, int64_t count, float* y) {
    const TileRegisters registers;
    for (int64_t m = 0; m < M; m += 32) slice_product({x + m * stride, stride, 16 * stride, 32}, M - m, panels, K, count, false, y + m * 16 * count);
}
#endif

// A panel has 16 numbers for each input, or, in bfloat16, 16 pairs for every 2 inputs: a lane has PAIR inputs.
template <typename N>
constexpr int64_t PAIR = 4 / sizeof(N);
inline floats multiply_add(floats acc, words a, words b, const bf16*) { return dot2(acc, a, b); }
inline floats multiply_add(floats acc, words a, words b, const float*) { return acc + (floats)a * (floats)b; }

// Panels and rows of x that are multiplied together: their sums fit in the registers, and DEEP inputs of the panels in the first cache.
constexpr int64_t PANELS = PARTS == 1 ? 2 : 1, TALL = PARTS == 1 ? 12 : 6, DEEP = 256;

// Adds the products of inputs `from` to `to` of COUNT rows and PANELS panels to y.
template <int COUNT, typename N>
inline void vector_rows(const N* x, int64_t stride, const uint32_t* panels, int64_t K, int64_t from, int64_t to, float* y, int64_t width) {
    constexpr int VECTORS = PANELS * PARTS;
    floats acc[COUNT][VECTORS] = {};
    for (int m = 0; m < COUNT && from; m++) std::memcpy(acc[m], y + m * width, sizeof acc[m]);
    for (int64_t k = from; k < to; k += PAIR<N>) {
        words columns[VECTORS];
        for (int i = 0; i < VECTORS; i++) columns[i] = load<words>(panels + (i / PARTS * K + k) * (16 / PAIR<N>) + i % PARTS * LANES);
        for (int m = 0; m < COUNT; m++) {
            const words both = words{} + load<uint32_t>(x + m * stride + k);
            for (int i = 0; i < VECTORS; i++) acc[m][i] = multiply_add(acc[m][i], columns[i], both, x);
        }
    }
    for (int m = 0; m < COUNT; m++) std::memcpy(y + m * width, acc[m], sizeof acc[m]);
}

// x (M, K), rows `stride` apart, times an even number of panels -> y (M, 16 count). K is a multiple of 2.
template <typename N>
inline void matrix_product(const N* x, int64_t stride, int64_t M, const uint32_t* panels, int64_t K, int64_t count, float* y) {
    const int64_t width = 16 * count;
    for (int64_t p = 0; p < count; p += PANELS)
        for (int64_t k = 0; k < K; k += DEEP)
            for (int64_t m = 0; m < M;) {
                const int64_t left = M - m, now = left >= TALL ? TALL : left >= 4 ? 4 : 1;
                auto run = now == TALL ? vector_rows<TALL, N> : now == 4 ? vector_rows<4, N> : vector_rows<1, N>;
                run(x + m * stride, stride, panels + p * K * (16 / PAIR<N>), K, k, std::min(K, k + DEEP), y + m * width + 16 * p, width);
                m += now;
            }
}

}  // namespace
