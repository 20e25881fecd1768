// All layers of a model, in the order of model.py.

#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "border.h"
#include "elementwise.h"
#include "linear.h"

namespace {

constexpr int64_t WEIGHTS = 7, NUMBERS = 6;  // of a layer: wq wk wv wo w_gate w_up w_down; of a weight: see `layers`

// The sizes of all layers: B texts of T tokens, dim C; the tensors of layer i.
struct Layers {
    int64_t B, T, C;
    float eps;
    std::vector<Linear> linears;
    std::vector<const void*> norms;
    std::vector<Rotation> rotations;
    std::vector<Attention> attentions;
    const int64_t* slots;
    bool slots_by_row;

    template <typename N>
    void run(N* h) {
        const int64_t M = B * T, count = int64_t(attentions.size());
        int64_t heads = 0, inner = 0, own = 0;  // the largest sizes of q k v together, of gate and up, of q
        for (int64_t i = 0; i < count; i++) {
            const Linear* l = &linears[WEIGHTS * i];
            heads = std::max(heads, l[0].N + l[1].N + l[2].N), inner = std::max(inner, l[4].N + l[5].N), own = std::max(own, l[0].N);
        }
        const std::unique_ptr<N[]> memory(new N[M * (2 * C + own + std::max(heads, inner))]);
        N *const x = memory.get(), *const out = x + M * C, *const y = out + M * C, *const wide = y + M * own;
        for (int64_t i = 0; i < count; i++) {
            const Linear* l = &linears[WEIGHTS * i];
            Attention& a = attentions[i];
            N *const q = wide, *const k = q + M * l[0].N, *const v = k + M * l[1].N, *const gate = wide, *const up = gate + M * l[4].N;
            add_norm(h, i ? out : nullptr, (const N*)norms[2 * i], x, M, C, eps);
            multiply(x, M, C, l, {q, k, v});
            rotate(q, k, v, rotations[i], a, slots, slots_by_row);
            a.q = q, a.y = y;
            attend(a, std::is_same_v<N, float>);
            multiply(y, M, l[0].N, l + 3, {out});
            add_norm(h, out, (const N*)norms[2 * i + 1], x, M, C, eps);
            multiply(x, M, C, l + 4, {gate, up});
            swiglu(gate, up, M, l[4].N);
            multiply(gate, M, l[4].N, l + 6, {out});
        }
        add_norm(h, out, (const N*)nullptr, (N*)nullptr, M, C, eps);
    }
};

// h (B T, C) is changed in place, from the embedded tokens to the output of the last layer. For each layer:
//
//     weights     WEIGHTS, packed or in 16 bits. formats (layers, WEIGHTS, NUMBERS): bits, group, offset, codebook, levels, rows
//     biases      WEIGHTS; empty tensors where a layer has none
//     norms       of attention and of feed_forward (C)
//     head_norms  of queries and of keys (D); or no tensors at all
//     rotates     whether the layer has RoPE
//     keys, values (B, KV, slots, D); scales of both (B, KV, slots), or none; k_offsets (KV, 1, D), empty where there is none
//
// cos and sin (T, D/2) or (B, T, D/2), with any strides; slots (T) or (B, T): where the new keys and values are kept; mask (T, S) or (B, 1, T, S),
// or none, for the first S slots.
void layers(Tensor h, std::vector<Tensor> weights, const Tensor& formats, std::vector<Tensor> biases, std::vector<Tensor> norms,
            std::vector<Tensor> head_norms, double eps, std::vector<int64_t> rotates, const Tensor& cos, const Tensor& sin, const Tensor& slots,
            std::optional<Tensor> mask, std::vector<Tensor> keys, std::vector<Tensor> values, std::vector<Tensor> scales,
            std::vector<Tensor> k_offsets, int64_t S) {
    const size_t n = keys.size();
    require(n > 0 && weights.size() == WEIGHTS * n && norms.size() == 2 * n && rotates.size() == n && values.size() == n, "the tensors of each layer");
    for (const auto* some : {&scales, &head_norms}) require(some->empty() || some->size() == 2 * n, "scales or norms of each layer, or none");
    require((biases.empty() || biases.size() == WEIGHTS * n) && (k_offsets.empty() || k_offsets.size() == n), "biases and offsets of each layer, or none");
    require(h.dim() == 2 && keys[0].dim() == 4 && keys[0].size(0) > 0 && h.size(0) % keys[0].size(0) == 0, "h (B T, C) and keys (B, KV, slots, D)");
    const int64_t B = keys[0].size(0), T = h.size(0) / B, C = h.size(1), room = keys[0].size(2), D = keys[0].size(3);
    const ScalarType dtype = h.scalar_type();
    check_model_dtype(h);
    check(h, "h", dtype, {B * T, C});
    check(formats, "formats", ScalarType::Long, {int64_t(n), WEIGHTS, NUMBERS});
    require(0 <= S && S <= room && D % 2 == 0, "no more keys than slots, and an even head_dim");
    require(cos.scalar_type() == ScalarType::Float && sin.scalar_type() == ScalarType::Float, "cos and sin in float32");
    require((has_sizes(cos, {T, D / 2}) && has_sizes(sin, {T, D / 2})) || (has_sizes(cos, {B, T, D / 2}) && has_sizes(sin, {B, T, D / 2})),
            "cos and sin (T, D/2) or (B, T, D/2)");
    require(same_strides(cos, sin), "cos and sin with the same strides");
    const bool by_row = slots.dim() == 2;
    if (by_row) check(slots, "slots", ScalarType::Long, {B, T});
    else check(slots, "slots", ScalarType::Long, {T});
    const auto* at = (const int64_t*)slots.const_data_ptr();
    for (int64_t i = 0; i < T * (by_row ? B : 1); i++)
        if (at[i] < 0 || at[i] >= room) throw std::out_of_range("a position is outside the cache");
    const bool* seen = mask_of(mask, B, T, S);
    const bool mask_by_row = mask && mask->dim() == 4 && mask->size(0) == B && B > 1;
    Layers all{B, T, C, float(eps), {}, {}, {}, {}, at, by_row};
    const auto* numbers = (const int64_t*)formats.const_data_ptr();
    const auto optional = [](const std::vector<Tensor>& some, size_t i) { return some.empty() || some[i].numel() == 0 ? nullptr : &some[i]; };
    for (size_t i = 0; i < n; i++) {
        const int64_t H = numbers[5] / D, KV = keys[i].size(1), F = numbers[4 * NUMBERS + 5];
        const int64_t inputs[WEIGHTS] = {C, C, C, H * D, C, C, F}, outputs[WEIGHTS] = {H * D, KV * D, KV * D, C, F, F, C};
        check_heads(H, KV, D);
        for (size_t j = 0; j < WEIGHTS; j++, numbers += NUMBERS) {
            require(numbers[5] == outputs[j], "weights of matching sizes");
            const Kind kind{numbers[0], numbers[1], numbers[2] != 0, numbers[3] != 0, numbers[4] != 0};
            all.linears.emplace_back(weights[WEIGHTS * i + j], optional(biases, WEIGHTS * i + j), kind, outputs[j], inputs[j], dtype);
        }
        for (size_t j = 2 * i; j < 2 * i + 2; j++) {
            check(norms[j], "the weight of a norm", dtype, {C});
            all.norms.push_back(norms[j].const_data_ptr());
            if (!head_norms.empty()) check(head_norms[j], "the weight of a norm", dtype, {D});
        }
        const Tensor* offset = optional(k_offsets, i);
        if (offset) check(*offset, "the offset of keys", ScalarType::Float, {KV, 1, D});
        const auto head_norm = [&](size_t j) { return head_norms.empty() ? nullptr : head_norms[2 * i + j].const_data_ptr(); };
        all.rotations.push_back({rotates[i] ? (const float*)cos.const_data_ptr() : nullptr, (const float*)sin.const_data_ptr(),
                                 cos.dim() == 3 ? cos.stride(0) : 0, cos.stride(cos.dim() - 2), cos.stride(cos.dim() - 1), head_norm(0), head_norm(1),
                                 offset ? (const float*)offset->const_data_ptr() : nullptr, float(eps)});
        const auto scale = [&](size_t j) { return scales.empty() ? std::nullopt : std::optional(scales[2 * i + j]); };
        const Kept k = kept(keys[i], scale(0), dtype, {B, KV, room, D}), v = kept(values[i], scale(1), dtype, {B, KV, room, D});
        all.attentions.push_back({B, H, KV, T, S, D, nullptr, T * H * D, D, H * D, k, v, seen, mask_by_row, nullptr});
    }
    with_type(h, [&](auto* type) { all.run((decltype(type))h.mutable_data_ptr()); });
}

}  // namespace
