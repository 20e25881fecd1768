// What a block computes between its matrix products: norms, rotations, SwiGLU. Numbers are rounded where model.py rounds them.

#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "border.h"
#include "pool.h"
#include "vectors.h"

namespace {

template <typename T, typename V>
inline V as_stored(V x) {  // rounded to T
    T numbers[sizeof(V) / 4];
    store(x, numbers);
    return widen<V>(numbers);
}

// h += delta, then h / rms(h) * weight: h (M, C), changed in place; delta (M, C) or nothing; weight (C) -> (M, C).
Tensor add_norm(Tensor h, std::optional<Tensor> delta, const Tensor& weight, double eps) {
    require(h.dim() == 2, "h (M, C)");
    const int64_t M = h.size(0), C = h.size(1);
    const ScalarType dtype = h.scalar_type();
    check_model_dtype(h);
    check(h, "h", dtype, {M, C});
    if (delta) check(*delta, "delta", dtype, {M, C});
    check(weight, "the weight of a norm", dtype, {C});
    Tensor y = torch::stable::new_empty(h, {M, C});
    with_type(h, [&](auto* type) {
        typedef std::remove_pointer_t<decltype(type)> T;
        for_each_part(M, C * sizeof(T), [&](int64_t m) {
            T *row = (T*)h.mutable_data_ptr() + m * C, *out = (T*)y.mutable_data_ptr() + m * C;
            const T *added = delta ? (const T*)delta->const_data_ptr() + m * C : nullptr, *w = (const T*)weight.const_data_ptr();
            floats squares[PARTS] = {};
            for (int64_t i = 0; i < C; i += LANES) {
                const int64_t count = std::min(LANES, C - i);
                if (added) store(widen_some<floats>(row + i, count) + widen_some<floats>(added + i, count), row + i, count);
                const floats x = widen_some<floats>(row + i, count);
                squares[i / LANES % PARTS] += x * x;
            }
            const float scale = 1 / std::sqrt(sum_of(load<f32x16>(squares)) / float(C) + float(eps));
            for (int64_t i = 0; i < C; i += LANES) {
                const int64_t count = std::min(LANES, C - i);
                store(as_stored<T>(widen_some<floats>(row + i, count) * scale) * widen_some<floats>(w + i, count), out + i, count);
            }
        });
    });
    return y;
}

// silu(gate) * up: (M, F) twice, rows may be apart -> (M, F).
Tensor swiglu(const Tensor& gate, const Tensor& up) {
    require(gate.dim() == 2, "gate (M, F)");
    const int64_t M = gate.size(0), F = gate.size(1);
    check_model_dtype(gate);
    check_rows(gate, "gate", gate.scalar_type(), {M, F});
    check_rows(up, "up", gate.scalar_type(), {M, F});
    Tensor y = torch::stable::new_empty(gate, {M, F});
    with_type(gate, [&](auto* type) {
        typedef std::remove_pointer_t<decltype(type)> T;
        for_each_part(M, F * sizeof(T), [&](int64_t m) {
            const T *g = (const T*)gate.const_data_ptr() + m * gate.stride(0), *u = (const T*)up.const_data_ptr() + m * up.stride(0);
            for (int64_t i = 0; i < F; i += LANES) {
                const int64_t count = std::min(LANES, F - i);
                const floats x = widen_some<floats>(g + i, count), e = exp_of(x > floats{} ? -x : x);
                const floats silu = x * ((x > floats{} ? floats{} + 1.0f : e) / (e + 1.0f));
                store(as_stored<T>(silu) * widen_some<floats>(u + i, count), (T*)y.mutable_data_ptr() + m * F + i, count);
            }
        });
    });
    return y;
}

// Stores a head (D) in keys or values: as it is, or with scales in 8 bits, as cache.quantize_kv does.
template <typename T>
void store_head(const T* head, int64_t b, int64_t h, int64_t position, const Tensor& to, const std::optional<Tensor>& scales) {
    const int64_t D = to.size(3), at = b * to.stride(0) + h * to.stride(1) + position * to.stride(2);
    if (!scales) return void(std::memcpy((T*)to.mutable_data_ptr() + at, head, D * sizeof(T)));
    float most = 0, finite = 0;
    for (int64_t i = 0; i < D; i++) most = std::max(most, std::fabs(to_float(head[i]))), finite += 0 * to_float(head[i]);
    const float scale = most / 127 + finite, step = scale == 0 ? 1 : scale;
    ((float*)scales->mutable_data_ptr())[b * scales->stride(0) + h * scales->stride(1) + position * scales->stride(2)] = scale;
    for (int64_t i = 0; i < D; i++) ((int8_t*)to.mutable_data_ptr())[at + i] = scale == scale ? int8_t(std::nearbyint(to_float(head[i]) / step)) : 0;
}

// Rotates queries and keys, and stores keys and values for attention.
//
// q (B, T, H D), k and v (B, T, KV D), whose tokens may be apart; cos and sin (T, D/2) or (B, T, D/2), with any stride on the last axis;
// keys and values (B, KV, slots, D), written at positions (T) or (B, T), or at 0, 1, 2, .. without positions; in 8 bits with scales (B, KV, slots):
// then k_offset (KV, 1, D) is subtracted from the keys, and they are multiplied by the Hadamard matrix, as in cache.QuantizedLayerCache
// -> rotated queries (B, T, H, D). Entries 2i and 2i + 1 of a head are rotated by angle i.
Tensor rotate(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin, std::optional<Tensor> positions,
              Tensor keys, Tensor values, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, std::optional<Tensor> k_offset) {
    require(q.dim() == 3 && keys.dim() == 4, "q (B, T, H D) and keys (B, KV, slots, D)");
    const int64_t B = q.size(0), T = q.size(1), KV = keys.size(1), slots = keys.size(2), D = keys.size(3), H = q.size(2) / D;
    const ScalarType dtype = q.scalar_type();
    check_model_dtype(q);
    require(D % 2 == 0, "an even head_dim");
    check_rows(q, "q", dtype, {B, T, H * D});
    check_rows(k, "k", dtype, {B, T, KV * D});
    check_rows(v, "v", dtype, {B, T, KV * D});
    require(k_scale.has_value() == v_scale.has_value(), "scales of both keys and values");
    check_rows(keys, "keys", k_scale ? ScalarType::Char : dtype, {B, KV, slots, D});
    check_rows(values, "values", v_scale ? ScalarType::Char : dtype, {B, KV, slots, D});
    for (const auto* scale : {&k_scale, &v_scale})
        if (*scale) check_rows(**scale, "the scales of keys and values", ScalarType::Float, {B, KV, slots});
    if (k_offset) check(*k_offset, "the offset of keys", ScalarType::Float, {KV, 1, D});
    require(cos.scalar_type() == ScalarType::Float && sin.scalar_type() == ScalarType::Float, "cos and sin in float32");
    require((has_sizes(cos, {T, D / 2}) && has_sizes(sin, {T, D / 2})) || (has_sizes(cos, {B, T, D / 2}) && has_sizes(sin, {B, T, D / 2})),
            "cos and sin (T, D/2) or (B, T, D/2)");
    require(same_strides(cos, sin), "cos and sin with the same strides");
    if (positions && positions->dim() == 2) check(*positions, "positions", ScalarType::Long, {B, T});
    else if (positions) check(*positions, "positions", ScalarType::Long, {T});
    const int64_t step = cos.stride(cos.dim() - 1);
    Tensor y = torch::stable::new_empty(q, {B, T, H, D});
    const auto* at = positions ? (const int64_t*)positions->const_data_ptr() : nullptr;
    for (int64_t i = 0; at && i < T * (positions->dim() == 2 ? B : 1); i++)
        if (at[i] < 0 || at[i] >= slots) throw std::out_of_range("a position is outside the cache");
    if (!at && T > slots) throw std::out_of_range("there are more tokens than slots");
    with_type(q, [&](auto* type) {
        typedef std::remove_pointer_t<decltype(type)> N;
        for_each_part(B * T, H * D * sizeof(N), [&](int64_t row) {
            const int64_t b = row / T, t = row % T, position = !at ? t : at[positions->dim() == 2 ? row : t];
            const int64_t angles = cos.dim() == 3 ? b * cos.stride(0) + t * cos.stride(1) : t * cos.stride(0);
            const float *c = (const float*)cos.const_data_ptr() + angles, *s = (const float*)sin.const_data_ptr() + angles;
            const auto turn = [&](const N* from, N* to) {
                for (int64_t i = 0; i < D / 2; i++) {
                    const float x = to_float(from[2 * i]), y = to_float(from[2 * i + 1]);
                    from_float(x * c[i * step] - y * s[i * step], to[2 * i]);
                    from_float(x * s[i * step] + y * c[i * step], to[2 * i + 1]);
                }
            };
            const N* query = (const N*)q.const_data_ptr() + b * q.stride(0) + t * q.stride(1);
            for (int64_t h = 0; h < H; h++) turn(query + h * D, (N*)y.mutable_data_ptr() + (row * H + h) * D);
            const N *key = (const N*)k.const_data_ptr() + b * k.stride(0) + t * k.stride(1), *value = (const N*)v.const_data_ptr() + b * v.stride(0) + t * v.stride(1);
            std::vector<N> turned(D);
            std::vector<float> spread(D);
            for (int64_t h = 0; h < KV; h++) {
                turn(key + h * D, turned.data());
                if (k_scale) {
                    const float* offset = k_offset ? (const float*)k_offset->const_data_ptr() + h * D : nullptr;
                    for (int64_t i = 0; i < D; i++) spread[i] = to_float(turned[i]) - (offset ? offset[i] : 0);
                    hadamard(spread.data(), D);
                    store_head(spread.data(), b, h, position, keys, k_scale);
                } else {
                    store_head(turned.data(), b, h, position, keys, k_scale);
                }
                store_head(value + h * D, b, h, position, values, v_scale);
            }
        });
    });
    return y;
}

}  // namespace
