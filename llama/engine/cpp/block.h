// A complete block with packed weights, in the order of model.py. Every step is an operator of its own too, which checks its arguments.

#pragma once

#include <vector>

#include "border.h"
#include "elementwise.h"
#include "panels.h"

// attention.cpp defines it, prompt.h explains it.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> mask, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale);

namespace {

// h (B T, C): first `added`, the result of the previous block, is added to it, later this block's attention.
// tiles and formats (bits, group, offset, codebook, levels, rows for each): wq wk wv joined, wo, w_gate w_up joined, w_down
// norms: of attention and of feed_forward. cos, sin, positions, keys, values and their scales as in `rotate`; attention sees keys up to `end`.
// -> the result of feed_forward (B T, C), which is to be added to h
Tensor block(Tensor h, std::optional<Tensor> added, std::vector<Tensor> norms, double eps, std::vector<Tensor> tiles, std::vector<int64_t> formats,
             const Tensor& cos, const Tensor& sin, const Tensor& positions, std::optional<Tensor> mask, Tensor keys, Tensor values,
             std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t end) {
    const auto linear = [&](const Tensor& x, int64_t i) {
        const int64_t* f = &formats[6 * i];
        return linear_blocks(x, tiles[i], f[0], f[1], f[2], f[5], f[3], f[4]);
    };
    require(norms.size() == 2 && tiles.size() == 4 && formats.size() == 24, "two norms, and four packed weights with their formats");
    require(h.dim() == 2 && keys.dim() == 4 && h.size(0) % keys.size(0) == 0 && 0 <= end && end <= keys.size(2), "h (B T, C) and keys (B, KV, slots, D)");
    using torch::stable::narrow;
    const int64_t B = keys.size(0), T = h.size(0) / B, KV = keys.size(1) * keys.size(3);
    Tensor qkv = torch::stable::view(linear(add_norm(h, added, norms[0], eps), 0), {B, T, formats[5]});
    const int64_t H = formats[5] - 2 * KV, F = formats[17] / 2;
    Tensor q = rotate(narrow(qkv, 2, 0, H), narrow(qkv, 2, H, KV), narrow(qkv, 2, H + KV, KV), cos, sin, positions, keys, values, k_scale, v_scale,
                      std::nullopt);  // only a bias makes an offset, and these layers have none
    Tensor k = narrow(keys, 2, 0, end), v = narrow(values, 2, 0, end);
    for (auto* scale : {&k_scale, &v_scale})
        if (*scale) *scale = narrow(**scale, 2, 0, end);
    Tensor y = attend(torch::stable::transpose(q, 1, 2), k, v, mask, k_scale, v_scale);  // (B, T, H, D)
    const Tensor x = add_norm(h, linear(torch::stable::view(y, {B * T, H}), 1), norms[1], eps);
    Tensor inner = linear(x, 2);
    return linear(swiglu(narrow(inner, 1, 0, F), narrow(inner, 1, F, F)), 3);
}

}  // namespace
