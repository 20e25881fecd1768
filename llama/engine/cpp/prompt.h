// Attention of many queries in bfloat16: matrix products with panels of keys and of values. No more than CHUNK scores of a query exist at
// a time, as in flash attention (arXiv:2205.14135).

#pragma once

#include "attention.h"
#include "border.h"
#include "matrix.h"
#include "panels.h"

namespace {

constexpr int64_t FEW_QUERIES = 16;
constexpr int64_t QUERIES = 96;  // queries of a key/value head that share every panel

// 16 keys as a panel. bfloat16 represents integers of 8 bits exactly.
inline void key_panel(const bf16* k, int64_t n, int64_t stride, int64_t D, int64_t inputs, uint32_t* panel) { panel_of(k, n, D, stride, inputs, panel); }
inline void key_panel(const int8_t* k, int64_t n, int64_t stride, int64_t D, int64_t inputs, uint32_t* panel) {
    bf16 rows[ROWS * WIDEST];
    for (int64_t r = 0; r < std::min(ROWS, n); r++)
        for (int64_t i = 0; i < D; i += 16) store(widen(k + r * stride + i), rows + r * D + i);
    panel_of(rows, n, D, D, inputs, panel);
}

// 16 entries of n values as a panel: for every 2 values, 16 entries x 2 numbers. Values from n to `inputs` are zero.
template <typename C>
inline void value_panel(const C* v, int64_t n, int64_t stride, int64_t inputs, uint32_t* panel) {
    for (int64_t s = 0; s < inputs; s += 2, panel += 16) {
        const u32x16 first = s < n ? (u32x16)widen(v + s * stride) >> 16 : u32x16{};
        const u32x16 pair = first | (s + 1 < n ? (u32x16)widen(v + (s + 1) * stride) : u32x16{});
        std::memcpy(panel, &pair, 64);
    }
}

// The state of `rows` queries (D) of a head: for each one, its sum of exp(score - largest) v, and the sum of exp(score - largest).
struct Softmax {
    float largest[QUERIES], total[QUERIES];
    float out[QUERIES * WIDEST];

    // Adds n keys to row r: replaces their scores by weights, which are rounded to bfloat16, and scales what was summed before.
    void add(int64_t r, int64_t n, int64_t D, const float* scores, float scale, const bool* seen, const float* k_scale, const float* v_scale, bf16* weights) {
        floats w[CHUNK / LANES], top = floats{} + largest[r];
        for (int64_t s = 0; s < n; s += LANES) {
            ints visible = load<ints>(&LANE_NUMBERS) < int32_t(n - s);
            const int64_t count = std::min(LANES, n - s);
            floats x = load<floats>(scores + s) * scale, scale_of_key = floats{} + 1.0f;
            if (k_scale) scale_of_key = widen_some<floats>(k_scale + s, count);
            if (seen) visible &= widen_some<floats>((const int8_t*)seen + s, count) != 0.0f;
            x *= scale_of_key;
            x = x > -INFINITY ? x : floats{} + NAN;  // finite numbers can't produce -inf
            x = visible ? x : floats{} - INFINITY;
            top = x > top ? x : top;
            w[s / LANES] = x;
        }
        float most = -INFINITY;
        for (int i = 0; i < LANES; i++) most = std::max(most, top[i]);
        const float base = most == -INFINITY ? 0 : most, rest = std::exp(largest[r] - base);
        floats sum[PARTS] = {};
        for (int64_t s = 0; s < n; s += LANES) {
            floats e = exp_of(w[s / LANES] - base), scale_of_value = floats{} + 1.0f;
            sum[s / LANES % PARTS] += e;
            if (v_scale) scale_of_value = widen_some<floats>(v_scale + s, std::min(LANES, n - s));
            store(e == 0.0f ? e : e * scale_of_value, weights + s);
        }
        largest[r] = most, total[r] = total[r] * rest + sum_of(load<f32x16>(sum));
        for (int64_t i = 0; i < D && rest != 1; i++) out[r * D + i] *= rest;
    }
};

template <typename C>
void attend_prompt(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, const std::optional<Tensor>& k_scale,
                   const std::optional<Tensor>& v_scale, Tensor& y) {
    const int64_t B = q.size(0), H = q.size(1), T = q.size(2), D = q.size(3), KV = k.size(1), S = k.size(2), R = H / KV * T;
    const int64_t blocks = (R + QUERIES - 1) / QUERIES, inputs = (D + 31) / 32 * 32, stride = inputs + 32;
    const auto* mask_data = mask ? (const bool*)mask->const_data_ptr() : nullptr;
    const bool mask_by_row = mask && mask->dim() == 4 && mask->size(0) == B && B > 1;
    for_each_unit(B * KV * blocks, [&](int64_t unit) {
        const int64_t first = unit % blocks * QUERIES, head = unit / blocks % KV, b = unit / blocks / KV, n = std::min(QUERIES, R - first);
        const int64_t rows = (n + 15) / 16 * 16, scale_at = (b * KV + head) * (k_scale ? k_scale->stride(1) : 0);
        thread_local std::vector<bf16> query, weights;
        thread_local std::vector<uint32_t> panels;
        thread_local std::vector<float> sums;
        thread_local std::vector<Softmax> states;  // in a vector, since a thread that gets no memory for its variables ends the process
        states.resize(1);
        Softmax& state = states[0];
        query.assign(QUERIES * stride, bf16{}), weights.assign(QUERIES * (CHUNK + 32), bf16{});
        panels.resize(CHUNK * std::max(inputs, WIDEST) / 2), sums.resize(QUERIES * std::max(CHUNK, WIDEST));
        const bool* seen[QUERIES];
        int64_t end = mask_data ? 0 : S;  // keys from here on are seen by no query
        for (int64_t r = 0; r < n; r++) {
            const int64_t h = head * (H / KV) + (first + r) / T, t = (first + r) % T;
            const bf16* from = (const bf16*)q.const_data_ptr() + b * q.stride(0) + h * q.stride(1) + t * q.stride(2);
            float spread[WIDEST];
            for (int64_t i = 0; i < D && k_scale; i++) spread[i] = to_float(from[i]);
            if (k_scale) hadamard(spread, D);  // as the keys were
            for (int64_t i = 0; i < D && k_scale; i += 16) store(load<f32x16>(spread + i), &query[r * stride + i]);
            if (!k_scale) std::memcpy(&query[r * stride], from, D * sizeof(bf16));
            seen[r] = mask_data ? mask_data + ((mask_by_row ? b * T : 0) + t) * S : nullptr;
            if (const void* last = seen[r] ? memrchr(seen[r], 1, S) : nullptr) end = std::max(end, (const bool*)last - seen[r] + 1);
            state.largest[r] = -INFINITY, state.total[r] = 0;
        }
        std::fill_n(state.out, n * D, 0.0f);
        for (int64_t s = 0; s < end; s += CHUNK) {
            const int64_t keys = std::min(CHUNK, end - s), key_panels = (keys + 31) / 32 * 2, value_panels = (D + 31) / 32 * 2;
            const auto* k_at = (const C*)k.const_data_ptr() + b * k.stride(0) + head * k.stride(1) + s * k.stride(2);
            const auto* v_at = (const C*)v.const_data_ptr() + b * v.stride(0) + head * v.stride(1) + s * v.stride(2);
            for (int64_t p = 0; p < key_panels; p++)
                key_panel(k_at + 16 * p * k.stride(2), keys - 16 * p, k.stride(2), D, inputs, &panels[p * inputs * 8]);
            matrix_product(query.data(), stride, rows, panels.data(), inputs, key_panels, sums.data());
            for (int64_t r = 0; r < n; r++)
                state.add(r, keys, D, &sums[r * key_panels * 16], 1 / std::sqrt(float(D)), seen[r] ? seen[r] + s : nullptr,
                          k_scale ? (const float*)k_scale->const_data_ptr() + scale_at + s : nullptr,
                          v_scale ? (const float*)v_scale->const_data_ptr() + scale_at + s : nullptr, &weights[r * (CHUNK + 32)]);
            for (int64_t p = 0; p < value_panels; p++) {
                if (16 * p < D) value_panel(v_at + 16 * p, keys, v.stride(2), key_panels * 16, &panels[p * key_panels * 128]);
                else std::fill_n(&panels[p * key_panels * 128], key_panels * 128, 0);
            }
            matrix_product(weights.data(), CHUNK + 32, rows, panels.data(), key_panels * 16, value_panels, sums.data());
            for (int64_t r = 0; r < n; r++)
                for (int64_t i = 0; i < D; i++) state.out[r * D + i] += sums[r * value_panels * 16 + i];
        }
        for (int64_t r = 0; r < n; r++) {
            const int64_t h = head * (H / KV) + (first + r) / T, t = (first + r) % T;
            bf16* to = (bf16*)y.mutable_data_ptr() + ((b * T + t) * H + h) * D;
            for (int64_t i = 0; i < D; i += 16)
                store(state.total[r] == 0 ? f32x16{} : load<f32x16>(&state.out[r * D + i]) / state.total[r], to + i);
        }
    });
}

}  // namespace

// -> (B, T, H, D). q (B, H, T, D), k and v (B, KV, S, D), mask bool (T, S) or (B, 1, T, S), as in torch's scaled_dot_product_attention; k and v may
// be 8-bit integers with a float32 scale for each key (B, KV, S): then q is multiplied by the Hadamard matrix, as the keys were. More than FEW_QUERIES must be in bfloat16.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> mask, std::optional<Tensor> k_scale,
              std::optional<Tensor> v_scale) {
    require(q.dim() == 4 && k.dim() == 4, "q (B, H, T, D) and k (B, KV, S, D)");
    const int64_t B = q.size(0), H = q.size(1), T = q.size(2), D = q.size(3), KV = k.size(1), S = k.size(2);
    const ScalarType dtype = q.scalar_type(), cached = k_scale ? ScalarType::Char : dtype;
    check_model_dtype(q);
    require(KV > 0 && H % KV == 0, "a number of heads that is a multiple of the key/value heads");
    require(D % 16 == 0 && D <= WIDEST, "a head_dim that is a multiple of 16 up to 256");
    require(T <= FEW_QUERIES || dtype == ScalarType::BFloat16, "bfloat16 for many queries");
    check_rows(q, "q", dtype, {B, H, T, D});
    check_rows(k, "k", cached, {B, KV, S, D});
    check_rows(v, "v", cached, {B, KV, S, D});
    require(k_scale.has_value() == v_scale.has_value(), "scales of both keys and values");
    for (const auto* scale : {&k_scale, &v_scale})
        if (*scale) {
            check_rows(**scale, "the scales of keys and values", ScalarType::Float, {B, KV, S});
            require(B == 1 || (*scale)->stride(0) == KV * (*scale)->stride(1), "scales whose heads are equally far apart");
            require(same_strides(**scale, *k_scale), "scales of keys and values with the same strides");
        }
    if (mask && mask->dim() == 4) check(*mask, "mask", ScalarType::Bool, {mask->size(0) == B ? B : 1, 1, T, S});
    else if (mask) check(*mask, "mask", ScalarType::Bool, {T, S});
    Tensor y = torch::stable::new_empty(q, {B, T, H, D});
    const bool is_float = dtype == ScalarType::Float;
    if (q.size(2) > FEW_QUERIES && k_scale) attend_prompt<int8_t>(q, k, v, mask, k_scale, v_scale, y);
    else if (q.size(2) > FEW_QUERIES) attend_prompt<bf16>(q, k, v, mask, k_scale, v_scale, y);
    else if (k_scale && is_float) attend_to<float, int8_t>(q, k, v, mask, k_scale, v_scale, y);
    else if (k_scale) attend_to<bf16, int8_t>(q, k, v, mask, k_scale, v_scale, y);
    else if (is_float) attend_to<float, float>(q, k, v, mask, k_scale, v_scale, y);
    else attend_to<bf16, bf16>(q, k, v, mask, k_scale, v_scale, y);
    return y;
}
