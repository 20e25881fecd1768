// What a layer computes between its matrix products: norms, rotations, SwiGLU. Numbers are rounded where model.py rounds them.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "pool.h"
#include "vectors.h"

namespace {

// y = x / rms(x) * weight, over C numbers. y may be x.
template <typename T>
inline void norm(const T* x, const T* weight, T* y, int64_t C, float eps) {
    floats squares[PARTS] = {};
    for (int64_t i = 0; i < C; i += LANES) {
        const floats some = widen_some<floats>(x + i, std::min(LANES, C - i));
        squares[i / LANES % PARTS] += some * some;
    }
    const float scale = 1 / std::sqrt(sum_of(load<f32x16>(squares)) / float(C) + eps);
    for (int64_t i = 0; i < C; i += LANES) {
        const int64_t count = std::min(LANES, C - i);
        store(as_stored<T>(widen_some<floats>(x + i, count) * scale) * widen_some<floats>(weight + i, count), y + i, count);
    }
}

// h (M, C) += added (M, C), unless that is null; then, unless weight (C) is null, y (M, C) = h / rms(h) * weight.
template <typename T>
void add_norm(T* h, const T* added, const T* weight, T* y, int64_t M, int64_t C, float eps) {
    for_each_part(M, C * sizeof(T), [&](int64_t m) {
        T* row = h + m * C;
        for (int64_t i = 0; added && i < C; i += LANES) {
            const int64_t count = std::min(LANES, C - i);
            store(widen_some<floats>(row + i, count) + widen_some<floats>(added + m * C + i, count), row + i, count);
        }
        if (weight) norm(row, weight, y + m * C, C, eps);
    });
}

// gate (M, F) = silu(gate) * up.
template <typename T>
void swiglu(T* gate, const T* up, int64_t M, int64_t F) {
    for_each_part(M, F * sizeof(T), [&](int64_t m) {
        T* g = gate + m * F;
        for (int64_t i = 0; i < F; i += LANES) {
            const int64_t count = std::min(LANES, F - i);
            const floats x = widen_some<floats>(g + i, count), e = exp_of(x > floats{} ? -x : x);
            const floats silu = x * ((x > floats{} ? floats{} + 1.0f : e) / (e + 1.0f));
            store(as_stored<T>(silu) * widen_some<floats>(up + m * F + i, count), g + i, count);
        }
    });
}

// Stores a head (D) of keys or values: as it is, or in 8 bits with a scale, as cache.quantize_kv does.
template <typename T, typename N>
void keep(const N* head, int64_t b, int64_t h, int64_t slot, int64_t D, const Kept& to) {
    if (!to.scales) {
        if constexpr (std::is_same_v<T, N>) std::memcpy(to.at<T>(b, h, slot), head, D * sizeof(T));
        return;
    }
    float most = 0, finite = 0;
    for (int64_t i = 0; i < D; i++) most = std::max(most, std::fabs(to_float(head[i]))), finite += 0 * to_float(head[i]);
    const float scale = most / 127 + finite, step = scale == 0 ? 1 : scale;
    *to.scale(b, h, slot) = scale;
    for (int64_t i = 0; i < D; i++) to.at<int8_t>(b, h, slot)[i] = scale == scale ? int8_t(std::nearbyint(to_float(head[i]) / step)) : 0;
}

// How the heads of a layer are rotated before they are used and stored. cos and sin (T, D/2) or (B, T, D/2): strides of rows, tokens and pairs.
struct Rotation {
    const float *cos, *sin;  // null: a layer without RoPE
    int64_t row, token, pair;
    const void *q_norm, *k_norm;  // weights (D) of an RMSNorm of each head; or null
    const float* k_offset;        // (KV, D), subtracted from keys in 8 bits; or null
    float eps;
};

// Rotates queries (B T, H D) in place, and keeps rotated keys and values (B T, KV D) in the slots (T) or (B, T) of a cache. Entries 2i and
// 2i + 1 of a head are rotated by angle i. Keys in 8 bits are multiplied by the Hadamard matrix, as in cache.QuantizedLayerCache.
template <typename T>
void rotate(T* q, T* k, const T* v, const Rotation& r, const Attention& a, const int64_t* slots, bool slots_by_row) {
    const int64_t B = a.B, TOKENS = a.T, H = a.H, KV = a.KV, D = a.D;
    for_each_part(B * TOKENS, H * D * sizeof(T), [&](int64_t row) {
        const int64_t b = row / TOKENS, t = row % TOKENS, slot = slots[slots_by_row ? row : t], at = b * r.row + t * r.token;
        const auto turn = [&](T* head, const void* weight) {
            if (weight) norm(head, (const T*)weight, head, D, r.eps);
            for (int64_t i = 0; i < D / 2 && r.cos; i++) {
                const float x = to_float(head[2 * i]), y = to_float(head[2 * i + 1]), c = r.cos[at + i * r.pair], s = r.sin[at + i * r.pair];
                from_float(std::fma(x, c, -(y * s)), head[2 * i]);  // each machine rounds the same steps
                from_float(std::fma(x, s, y * c), head[2 * i + 1]);
            }
        };
        for (int64_t h = 0; h < H; h++) turn(q + (row * H + h) * D, r.q_norm);
        for (int64_t h = 0; h < KV; h++) {
            T* key = k + (row * KV + h) * D;
            turn(key, r.k_norm);
            if (a.keys.scales) {
                float spread[WIDEST];
                for (int64_t i = 0; i < D; i++) spread[i] = to_float(key[i]) - (r.k_offset ? r.k_offset[h * D + i] : 0);
                hadamard(spread, D);
                keep<T>(spread, b, h, slot, D, a.keys);
            } else {
                keep<T>(key, b, h, slot, D, a.keys);
            }
            keep<T>(v + (row * KV + h) * D, b, h, slot, D, a.values);
        }
    });
}

}  // namespace
