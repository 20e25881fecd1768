// Attention of a few queries. Keys and values are read once, in the dtype of the cache.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "border.h"
#include "groups.h"
#include "matrix.h"
#include "pool.h"

// Keys or values (B, KV, S, D) as a cache keeps them: rows, heads and slots are any distance apart. In 8 bits, with a scale for each head and slot.
struct Kept {
    void* data;
    int64_t row, head, slot;
    float* scales;  // or null
    int64_t scale_row, scale_head;

    template <typename C>
    C* at(int64_t b, int64_t h, int64_t s) const { return (C*)data + b * row + h * head + s * slot; }
    float* scale(int64_t b, int64_t h, int64_t s) const { return scales ? scales + b * scale_row + h * scale_head + s : nullptr; }
};

// Attention of queries (B, H, T, D), whose rows, heads and tokens are any distance apart -> y (B, T, H, D).
struct Attention {
    int64_t B, H, KV, T, S, D;
    const void* q;
    int64_t row, head, token;
    Kept keys, values;
    const bool* mask;  // (T, S), or (B, T, S) with `mask_by_row`; null: every query sees every key
    bool mask_by_row;
    void* y;

    int64_t queries() const { return H / KV * T; }  // that share a key/value head: number r is token r % T of the group's head r / T
    template <typename N>
    const N* query(int64_t b, int64_t kv, int64_t r) const { return (const N*)q + b * row + (kv * (H / KV) + r / T) * head + r % T * token; }
    template <typename N>
    N* result(int64_t b, int64_t kv, int64_t r) const { return (N*)y + ((b * T + r % T) * H + kv * (H / KV) + r / T) * D; }
    const bool* seen(int64_t b, int64_t r) const { return mask ? mask + ((mask_by_row ? b * T : 0) + r % T) * S : nullptr; }
};

void attend(const Attention& a, bool is_float);  // queries and results in float32 or bfloat16; attention.cpp defines it

namespace {

constexpr int64_t CHUNK = 256;  // keys per piece of work; the results of the pieces are combined at the end
constexpr int64_t WIDEST = 256;  // largest head_dim

// sums: lane i of the result is the sum of all lanes of v[i], for as many vectors as they have lanes. Each step folds two into one.
template <int WIDTH, typename V>
inline V fold(V a, V b) {
    constexpr int COUNT = sizeof(V) / 4;
    decltype(a < b) low, high;
    for (int i = 0; i < COUNT; i++) {
        low[i] = i / (2 * WIDTH) * 2 * WIDTH + i % WIDTH + (i / WIDTH % 2) * COUNT;  // COUNT and above: from b
        high[i] = low[i] + WIDTH;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}
template <typename V, int WIDTH = sizeof(V) / 8>
inline V sums(V* v) {
    for (int i = 0; i < WIDTH; i++) v[i] = fold<WIDTH>(v[i], v[i + WIDTH]);
    if constexpr (WIDTH > 1) return sums<V, WIDTH / 2>(v);
    return v[0];
}

// Inputs and outputs of a piece of attention: R queries that share a key/value head, and n <= CHUNK of its keys.
template <typename C>
struct Piece {
    int64_t R, D, n;
    const float* q;                     // (R, D), times 1 / sqrt(D)
    const C *k, *v;                     // (n, D), rows `stride` apart
    int64_t k_stride, v_stride;
    const float *k_scale, *v_scale;     // (n) each, or null without scales
    const bool* const* seen;            // (R): which of the n keys a query may see; null: all
    float *out, *largest, *sum;         // (R, D) sum of exp(score - largest) v, (R) largest score, (R) sum of exp(score - largest)
};

// Prefetches later keys, and the values of these keys. The hardware prefetcher stops at the end of a page.
template <typename C>
inline void prefetch(const Piece<C>& p, int64_t key) {
    for (int64_t i = 0; i < p.D; i += 64 / sizeof(C)) {
        __builtin_prefetch(p.k + (key + 32) * p.k_stride + i);
        __builtin_prefetch(p.v + key * p.v_stride + i);
    }
}

// QUERIES queries of a piece, from `first` on: their products with keys, and sums of values. VECTORS: D / 16; 0: any.
template <typename C, int VECTORS, int QUERIES>
struct Queries {
    static constexpr int COLUMNS = PARTS == 1 ? VECTORS ? VECTORS : WIDEST / 16 : 4;  // registers of a value that are summed at once
    const Piece<C>& p;
    const float* q;
    const int64_t vectors;

    Queries(const Piece<C>& p, int64_t first) : p(p), q(p.q + first * p.D), vectors((VECTORS ? VECTORS : p.D / 16) * PARTS) {}

    // Products with keys s to s + 16, which are widened once for all queries. Beyond `count`, the last key is repeated.
    void products(int64_t s, int64_t count, f32x16* out) const {
        for (int part = 0; part < PARTS; part++) {
            floats acc[QUERIES][LANES];
            for (int64_t j = 0; j < LANES; j++) {
                const C* key = p.k + (s + std::min(part * LANES + j, count - 1)) * p.k_stride;
                prefetch(p, s + part * LANES + j);
                floats sum[QUERIES]{};
                for (int64_t i = 0; i < vectors; i++) {
                    const floats wide = to_floats(key + LANES * i);
                    for (int r = 0; r < QUERIES; r++) sum[r] += wide * load<floats>(q + r * p.D + LANES * i);
                }
                for (int r = 0; r < QUERIES; r++) acc[r][j] = sum[r];
            }
            for (int r = 0; r < QUERIES; r++) {
                const floats some = sums(acc[r]);
                std::memcpy((float*)(out + r) + part * LANES, &some, sizeof some);
            }
        }
    }

    // out[r] = sum of weights[r][j] v[j]. A value whose weights are all 0 is not read, so it may be NaN.
    void values(const float (*weights)[CHUNK], float (*out)[WIDEST]) const {
        for (int64_t first = 0; first < vectors; first += COLUMNS) {
            const int64_t columns = !VECTORS || VECTORS * PARTS % COLUMNS ? std::min<int64_t>(COLUMNS, vectors - first) : COLUMNS;
            floats acc[QUERIES][COLUMNS]{};
            for (int64_t j = 0; j < p.n; j++) {
                float any = 0;
                for (int r = 0; r < QUERIES; r++) any += std::fabs(weights[r][j]);
                if (any == 0) continue;
                for (int64_t i = 0; i < columns; i++) {
                    const floats wide = to_floats(p.v + j * p.v_stride + LANES * (first + i));
                    for (int r = 0; r < QUERIES; r++) acc[r][i] += wide * weights[r][j];
                }
            }
            for (int r = 0; r < QUERIES; r++) std::memcpy(out[r] + LANES * first, acc[r], columns * sizeof(floats));
        }
    }
};

#if !defined(__AVX2__) || defined(__AVX512BF16__)
// The same for keys and values in bfloat16, two numbers in each lane: entries of a key, or entries of two values. Weights are rounded
// to bfloat16, as in flash attention.
template <int VECTORS, int QUERIES>
    requires(VECTORS > 0)
struct Queries<bf16, VECTORS, QUERIES> {
    const Piece<bf16>& p;
    alignas(64) bf16 q[QUERIES][VECTORS * 16];

    Queries(const Piece<bf16>& p, int64_t first) : p(p) {
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < VECTORS; i++)  // p.q is q / sqrt(D), and q was in bfloat16
                store(load<f32x16>(p.q + (first + r) * p.D + 16 * i) * std::sqrt(float(p.D)), q[r] + 16 * i);
    }

    void products(int64_t s, int64_t count, f32x16* out) const {
        f32x16 acc[QUERIES][16];
        for (int64_t j = 0; j < 16; j++) {
            const bf16* key = p.k + (s + std::min(j, count - 1)) * p.k_stride;
            prefetch(p, s + j);
            for (int r = 0; r < QUERIES; r++) acc[r][j] = f32x16{};
            for (int i = 0; i < VECTORS / 2; i++)
                for (int r = 0; r < QUERIES; r++) acc[r][j] = dot2(acc[r][j], load<u32x16>(key + 32 * i), load<u32x16>(q[r] + 32 * i));
        }
        for (int r = 0; r < QUERIES; r++) out[r] = sums(acc[r]) / std::sqrt(float(p.D));
    }

    void values(const float (*weights)[CHUNK], float (*out)[WIDEST]) const {
        alignas(64) bf16 rounded[QUERIES][CHUNK];
        f32x16 acc[QUERIES][VECTORS];
        for (int r = 0; r < QUERIES; r++) {
            for (int64_t j = 0; j < p.n; j += 16) store(load<f32x16>(weights[r] + j), rounded[r] + j);
            for (int i = 0; i < VECTORS; i++) acc[r][i] = f32x16{};
        }
        for (int64_t j = 0; j < p.n; j += 2) {
            uint32_t pairs[QUERIES], any = 0;  // the weights of two values, the first in the low half
            for (int r = 0; r < QUERIES; r++) any |= pairs[r] = load<uint32_t>(rounded[r] + j) & (j + 1 < p.n ? ~0u : 0xffffu);
            if (any == 0) continue;
            for (int i = 0; i < VECTORS; i += 2) {
                const u32x16 a = any & 0xffffu ? load<u32x16>(p.v + j * p.v_stride + 16 * i) : u32x16{};
                const u32x16 b = any >> 16 ? load<u32x16>(p.v + (j + 1) * p.v_stride + 16 * i) : u32x16{};
                const u32x16 even = (a & 0xffffu) | b << 16, odd = a >> 16 | (b & 0xffff0000u);
                for (int r = 0; r < QUERIES; r++)
                    acc[r][i] = dot2(acc[r][i], even, u32x16{} + pairs[r]), acc[r][i + 1] = dot2(acc[r][i + 1], odd, u32x16{} + pairs[r]);
            }
        }
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < VECTORS; i++)
                for (int lane = 0; lane < 16; lane++) out[r][i / 2 * 32 + 2 * lane + i % 2] = acc[r][i][lane];
    }
};
#endif

#if defined(__AVX512VNNI__)
// The same for keys and values in 8 bits, with integer arithmetic. Products: 16 keys in the lanes of a vector, four entries of a
// head in each lane. Values: two keys in each lane, with 16-bit weights. A query is the sum of two 8-bit vectors; the second one
// holds the rounding error of the first.
template <int VECTORS, int QUERIES>
    requires(VECTORS > 0)
struct Queries<int8_t, VECTORS, QUERIES> {
    const Piece<int8_t>& p;
    alignas(64) int8_t q[QUERIES][2][VECTORS * 16];
    float scale[QUERIES];
    int32_t start[QUERIES][2];

    Queries(const Piece<int8_t>& p, int64_t first) : p(p) {
        for (int r = 0; r < QUERIES; r++) {
            const float* from = p.q + (first + r) * p.D;
            Largest<f32x16> largest;
            for (int i = 0; i < VECTORS; i++) largest.see(load<f32x16>(from + 16 * i));
            scale[r] = largest.get() / 127;
            const float inverse = scale[r] > 0 ? std::min(1 / scale[r], 1e38f) : 0;  // denormal numbers become 0
            i32x16 total[2] = {};
            for (int i = 0; i < VECTORS; i++) {
                const f32x16 x = scale[r] < INFINITY ? load<f32x16>(from + 16 * i) * inverse : f32x16{};
                const i32x16 high = to_integers(x), low = to_integers((x - __builtin_convertvector(high, f32x16)) * 254.0f);
                const i8x16 bytes[2] = {__builtin_convertvector(high, i8x16), __builtin_convertvector(low, i8x16)};
                total[0] += high, total[1] += low;
                for (int part = 0; part < 2; part++) std::memcpy(&q[r][part][16 * i], &bytes[part], 16);
            }
            for (int part = 0; part < 2; part++) start[r][part] = -128 * sum_of(total[part]);  // keys are used as unsigned, 128 larger
        }
    }

    void products(int64_t s, int64_t count, f32x16* out) const {
        i32x16 acc[QUERIES][2];
        for (int r = 0; r < QUERIES; r++)
            for (int part = 0; part < 2; part++) acc[r][part] = i32x16{} + start[r][part];
        for (int i = 0; i < VECTORS / 4; i++) {
            u32x16 keys[16];
            for (int64_t j = 0; j < 16; j++) keys[j] = load<u32x16>(p.k + (s + std::min(j, count - 1)) * p.k_stride + 64 * i);
            transpose(keys);
            for (int k = 0; k < 16; k++)
                for (int r = 0; r < QUERIES; r++)
                    for (int part = 0; part < 2; part++)
                        acc[r][part] = Sums<Format{8}>::add(acc[r][part], keys[k] ^ 0x80808080u, load<int32_t>(&q[r][part][64 * i + 4 * k]));
        }
        for (int64_t j = 0; j < 16; j++) prefetch(p, s + j);
        for (int r = 0; r < QUERIES; r++)
            out[r] = (__builtin_convertvector(acc[r][0], f32x16) + __builtin_convertvector(acc[r][1], f32x16) / 254.0f) * scale[r];
    }

    void values(const float (*weights)[CHUNK], float (*out)[WIDEST]) const {
        static_assert(CHUNK * 127ll * 32767 < 1ll << 31);
        alignas(64) int16_t quantized[QUERIES][CHUNK];
        float unit[QUERIES];
        for (int r = 0; r < QUERIES; r++) {
            Largest<f32x16> largest;
            for (int64_t j = 0; j < p.n; j += 16) largest.see(load<f32x16>(weights[r] + j));
            unit[r] = largest.get() / 32767;
            const float inverse = unit[r] > 0 ? std::min(1 / unit[r], 1e38f) : 0;
            for (int64_t j = 0; j < p.n; j += 16) {
                typedef int16_t i16x16 __attribute__((vector_size(32)));
                const i16x16 w = __builtin_convertvector(to_integers(load<f32x16>(weights[r] + j) * inverse), i16x16);
                std::memcpy(quantized[r] + j, &w, 32);
            }
        }
        i32x16 acc[QUERIES][VECTORS];
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < VECTORS; i++) acc[r][i] = i32x16{};
        for (int64_t j = 0; j < p.n; j += 2) {
            const int8_t *a = p.v + j * p.v_stride, *b = j + 1 < p.n ? a + p.v_stride : a;
            __m512i pairs[VECTORS];
            for (int i = 0; i < VECTORS / 2; i++) {
                const __m512i x = _mm512_cvtepi8_epi16(load<__m256i>(a + 32 * i)), y = _mm512_cvtepi8_epi16(load<__m256i>(b + 32 * i));
                pairs[2 * i] = _mm512_unpacklo_epi16(x, y), pairs[2 * i + 1] = _mm512_unpackhi_epi16(x, y);
            }
            for (int r = 0; r < QUERIES; r++)
                for (int i = 0; i < VECTORS; i++)
                    acc[r][i] = (i32x16)_mm512_dpwssd_epi32((__m512i)acc[r][i], pairs[i], _mm512_set1_epi32(load<int32_t>(&quantized[r][j])));
        }
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < VECTORS; i++)
                for (int lane = 0; lane < 16; lane++)  // unpacking separated the entries in runs of 4
                    out[r][i / 2 * 32 + lane / 4 * 8 + i % 2 * 4 + lane % 4] = unit[r] * acc[r][i][lane];
    }
};
#endif

template <typename C, int VECTORS, int QUERIES>
void attend_queries(const Piece<C>& p, int64_t first) {
    const Queries<C, VECTORS, QUERIES> queries(p, first);
    float weights[QUERIES][CHUNK];
    floats top[QUERIES];
    for (int r = 0; r < QUERIES; r++) top[r] = floats{} - INFINITY;
    ints odd[QUERIES] = {};  // lanes with a NaN, or with -inf, which finite numbers can't produce
    for (int64_t s = 0; s < p.n; s += 16) {
        const int64_t count = std::min<int64_t>(16, p.n - s);
        bool any = false;
        for (int r = 0; r < QUERIES; r++) any |= !p.seen[first + r] || std::memchr(p.seen[first + r] + s, 1, count);
        if (!any) {
            for (int r = 0; r < QUERIES; r++) std::fill_n(weights[r] + s, 16, -INFINITY);
            continue;
        }
        f32x16 scores[QUERIES];
        queries.products(s, count, scores);
        for (int64_t i = 0; i < 16; i += LANES) {
            const int64_t some = std::clamp<int64_t>(count - i, 0, LANES);
            const floats scale = p.k_scale ? widen_some<floats>(p.k_scale + s + i, some) : floats{} + 1.0f;
            for (int r = 0; r < QUERIES; r++) {
                ints visible = load<ints>(&LANE_NUMBERS) < int32_t(some);
                if (p.seen[first + r]) visible &= widen_some<floats>((const int8_t*)p.seen[first + r] + s + i, some) != 0.0f;
                const floats w = visible ? load<floats>((const float*)&scores[r] + i) * scale : floats{} - INFINITY;
                odd[r] |= visible & ~(w > -INFINITY);
                top[r] = w > top[r] ? w : top[r];
                std::memcpy(weights[r] + s + i, &w, sizeof w);
            }
        }
    }
    for (int r = 0; r < QUERIES; r++) {
        float most = -INFINITY;
        bool nan = false;
        for (int i = 0; i < LANES; i++) most = std::max(most, top[r][i]), nan |= odd[r][i] != 0;
        floats total[PARTS] = {};
        for (int64_t s = 0; s < p.n; s += LANES) {
            floats e = most == -INFINITY ? floats{} : exp_of(load<floats>(weights[r] + s) - most), scale = floats{} + 1.0f;
            total[s / LANES % PARTS] += e;
            if (p.v_scale) scale = widen_some<floats>(p.v_scale + s, std::min(LANES, p.n - s));
            e = e == 0.0f ? e : e * scale;
            std::memcpy(weights[r] + s, &e, sizeof e);
        }
        p.largest[first + r] = nan && most == -INFINITY ? 0 : most;  // -inf would mean that every key is masked
        p.sum[first + r] = nan || most == INFINITY ? NAN : sum_of(load<f32x16>(total));
    }
    float out[QUERIES][WIDEST];
    queries.values(weights, out);
    for (int r = 0; r < QUERIES; r++) std::memcpy(p.out + (first + r) * p.D, out[r], p.D * sizeof(float));
}

template <typename C>
void attend_piece(const Piece<C>& p) {
    for (int64_t r = 0; r < p.R;) {
        const int64_t left = p.R - r;
        if (p.D == 64 && left >= 4) attend_queries<C, 4, 4>(p, r), r += 4;
        else if (p.D == 64 && left == 3) attend_queries<C, 4, 3>(p, r), r += 3;
        else if (p.D == 64) attend_queries<C, 4, 1>(p, r), r += 1;
        else if (p.D == 128 && left >= 2) attend_queries<C, 8, 2>(p, r), r += 2;
        else if (p.D == 128) attend_queries<C, 8, 1>(p, r), r += 1;
        else attend_queries<C, 0, 1>(p, r), r += 1;
    }
}

inline void check_heads(int64_t H, int64_t KV, int64_t D) {
    require(KV > 0 && H % KV == 0, "a number of heads that is a multiple of the key/value heads");
    require(D % 16 == 0 && D <= WIDEST, "a head_dim that is a multiple of 16 up to 256");
}

// Keys or values in a tensor (B, KV, S, D), with any strides but the last; `scales` (B, KV, S) makes them 8-bit integers.
inline Kept kept(const Tensor& x, const std::optional<Tensor>& scales, ScalarType dtype, Sizes sizes) {
    check_rows(x, "keys and values", scales ? ScalarType::Char : dtype, sizes);
    if (!scales) return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2), nullptr, 0, 0};
    check_rows(*scales, "the scales of keys and values", ScalarType::Float, {sizes.begin()[0], sizes.begin()[1], sizes.begin()[2]});
    return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2), (float*)scales->mutable_data_ptr(), scales->stride(0), scales->stride(1)};
}

inline const bool* mask_of(const std::optional<Tensor>& mask, int64_t B, int64_t T, int64_t S) {
    if (!mask) return nullptr;
    if (mask->dim() == 4) check(*mask, "mask", ScalarType::Bool, {mask->size(0) == B ? B : 1, 1, T, S});
    else check(*mask, "mask", ScalarType::Bool, {T, S});
    return (const bool*)mask->const_data_ptr();
}

// N: of queries and results; C: of keys and values
template <typename N, typename C>
void attend_few(const Attention& a) {
    const int64_t R = a.queries(), D = a.D, pieces = (a.S + CHUNK - 1) / CHUNK, width = D + 2, heads = a.B * a.KV;
    std::vector<float> parts(heads * pieces * R * width), queries(heads * R * D);
    for (int64_t unit = 0; unit < heads * R; unit++) {
        const N* from = a.query<N>(unit / R / a.KV, unit / R % a.KV, unit % R);
        float* query = &queries[unit * D];
        for (int64_t i = 0; i < D; i++) query[i] = to_float(from[i]) / std::sqrt(float(D));
        if (a.keys.scales) hadamard(query, D);  // as the keys were
    }
    for_each_unit(heads * pieces, [&](int64_t unit) {
        std::vector<const bool*> seen(R);
        const int64_t first = unit % pieces * CHUNK, kv = unit / pieces % a.KV, b = unit / pieces / a.KV;
        for (int64_t r = 0; r < R; r++) seen[r] = a.mask ? a.seen(b, r) + first : nullptr;
        int64_t n = std::min(CHUNK, a.S - first);
        const auto sees_last = [&](const bool* mask) { return !mask || mask[n - 1]; };
        while (n > 0 && std::none_of(seen.begin(), seen.end(), sees_last)) n--;  // slots after the last visible key are empty
        float* part = parts.data() + unit * R * width;
        attend_piece(Piece<C>{R, D, n, &queries[unit / pieces * R * D], a.keys.at<C>(b, kv, first), a.values.at<C>(b, kv, first), a.keys.slot, a.values.slot,
                              a.keys.scale(b, kv, first), a.values.scale(b, kv, first), seen.data(), part, part + R * D, part + R * (D + 1)});
    });
    for (int64_t unit = 0; unit < heads * R; unit++) {
        const int64_t r = unit % R;
        const float* part = parts.data() + unit / R * pieces * R * width;
        float top = -INFINITY, total = 0, sums[WIDEST] = {};
        for (int64_t p = 0; p < pieces; p++) top = std::max(top, part[p * R * width + R * D + r]);
        for (int64_t p = 0; p < pieces && top > -INFINITY; p++) {
            const float* one = part + p * R * width;
            const float weight = std::exp(one[R * D + r] - top);
            total += weight * one[R * (D + 1) + r];
            for (int64_t i = 0; i < D; i++) sums[i] += weight * one[r * D + i];
        }
        N* to = a.result<N>(unit / R / a.KV, unit / R % a.KV, r);
        for (int64_t i = 0; i < D; i++) from_float(total == 0 ? 0 : sums[i] / total, to[i]);
    }
}

}  // namespace