// Linear layers of every kind, as the operators and layers.h multiply by them.

#pragma once

#include <optional>
#include <vector>

#include "bfloat16.h"
#include "border.h"
#include "panels.h"
#if !defined(HAS_BF16)
#include "widened.h"
#endif

namespace {

// How a weight is packed; bits 16: it is a matrix in 16 bits.
struct Kind {
    int64_t bits, group = 0;
    bool offset = false, codebook = false, levels = false;
    bool operator==(const Kind&) const = default;
    Shape shape(int64_t K) const { return shape_of(K, bits, group, offset, codebook, levels); }
    bool known() const { return is_format(bits, group, offset, codebook, levels); }
    const Functions& functions() const { return functions_of(bits, group, offset, codebook, levels); }
};

// A weight (N, K), and a bias (N) in x's dtype, or null.
struct Linear {
    Kind kind;
    int64_t N;
    const void* weight;
    const void* bias;
    bool is_half;  // a matrix in float16, not bfloat16

    // Checks the tensors of a layer for x (M, K) of a dtype.
    Linear(const Tensor& w, const Tensor* b, const Kind& kind, int64_t N, int64_t K, ScalarType dtype)
        : kind(kind), N(N), weight(w.const_data_ptr()), bias(b ? b->const_data_ptr() : nullptr), is_half(w.scalar_type() == ScalarType::Half) {
        if (b) check(*b, "the bias of a linear layer", dtype, {N});
        if (kind.bits == 16) {
            check(w, "the weight of a linear layer", w.scalar_type(), {N, K});
#if defined(HAS_BF16)
            require(dtype == ScalarType::BFloat16 && w.scalar_type() == dtype, "x and weight in bfloat16");
#else
            require(is_half || w.scalar_type() == ScalarType::BFloat16, "a weight in bfloat16 or float16");
#endif
        } else {
            require(kind.known(), "the format of a packed weight");
            check(w, "the packed weight of a linear layer", ScalarType::Byte, {(N + ROWS - 1) / ROWS, kind.shape(K).tile});
        }
    }
};

// With instructions for bfloat16, everything is in bfloat16; the weight is read once for every 4 rows, with AMX once for every 512 rows.
// Otherwise x is in bfloat16 or float32, the weight in bfloat16 or float16.
template <typename T>
void product_16(const T* x, int64_t M, int64_t K, const Linear& layer, T* y) {
#if defined(HAS_BF16)
    if constexpr (std::is_same_v<T, bf16>) product_bf16(x, M, K, (const bf16*)layer.weight, (const bf16*)layer.bias, y, layer.N);
#else
    if (layer.is_half) widened_product(x, M, K, (const f16*)layer.weight, (const T*)layer.bias, y, layer.N);
    else widened_product(x, M, K, (const bf16*)layer.weight, (const T*)layer.bias, y, layer.N);
#endif
}

// x (M, K) times several layers -> y[i] (M, N of layer i).
template <typename T>
void multiply(const T* x, int64_t M, int64_t K, const Linear* layers, std::initializer_list<T*> y) {
    const int64_t count = int64_t(y.size());
    for (int64_t i = 0; i < count;) {
        const Kind& kind = layers[i].kind;
        if (kind.bits == 16) {
            product_16(x, M, K, layers[i], y.begin()[i]), i++;
            continue;
        }
        const Shape shape = kind.shape(K);
        std::vector<Packed<T>> alike;  // layers of one format
        for (; i < count && layers[i].kind == kind; i++)
            alike.push_back({(const uint8_t*)layers[i].weight, layers[i].N, (const T*)layers[i].bias, y.begin()[i]});
#if defined(__AMX_BF16__)
        if (M >= PANEL_ROWS) {
            const auto panel = with_format(kind.bits, kind.group, kind.offset, kind.codebook, kind.levels, []<Format F>() { return panel_from<F>; });
            for (const Packed<T>& layer : alike) product_in_panels(x, M, K, layer, shape, panel, kind.group == 0);
            continue;
        }
#endif
        product(x, M, K, alike.data(), int64_t(alike.size()), shape, kind.functions());
    }
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Kind& kind, int64_t N) {
    require(x.dim() == 2, "x (M, K)");
    const int64_t M = x.size(0), K = x.size(1);
    check_model_dtype(x);
    check(x, "x", x.scalar_type(), {M, K});
    const Linear layer(weight, bias ? &*bias : nullptr, kind, N, K, x.scalar_type());
    Tensor y = torch::stable::new_empty(x, {M, N});
    with_type(x, [&](auto* type) { multiply((decltype(type))x.const_data_ptr(), M, K, &layer, {(decltype(type))y.mutable_data_ptr()}); });
    return y;
}

// (M, K) in float32 or bfloat16, times a packed weight (N, K) -> (M, N) in x's dtype.
Tensor linear_tiles(const Tensor& x, const Tensor& tiles, int64_t bits, int64_t group, bool offset, int64_t N, bool codebook, bool levels) {
    return linear(x, tiles, std::nullopt, {bits, group, offset, codebook, levels}, N);
}

// (M, K) times a weight (N, K) in 16 bits, plus a bias (N) -> (M, N) in x's dtype.
Tensor linear_bf16(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
    require(weight.dim() == 2, "x (M, K) and weight (N, K)");
    return linear(x, weight, bias, {16}, weight.size(0));
}

// Rows `ids` (n) of a packed weight (N, K), dequantized -> (n, K) float32.
Tensor rows_of_tiles(const Tensor& tiles, const Tensor& ids, int64_t bits, int64_t group, bool offset, int64_t N, int64_t K, bool codebook, bool levels) {
    const Linear layer(tiles, nullptr, {bits, group, offset, codebook, levels}, N, K, ScalarType::Float);
    require(ids.dim() == 1 && bits != 16, "ids (n) and a packed weight");
    check(ids, "ids", ScalarType::Long, {ids.size(0)});
    const Shape s = layer.kind.shape(K);
    const auto* id = (const int64_t*)ids.const_data_ptr();
    for (int64_t i = 0; i < ids.size(0); i++)
        if (id[i] < 0 || id[i] >= N) throw std::out_of_range("an id is not between 0 and " + std::to_string(N - 1));
    Tensor y = torch::stable::new_empty(tiles, {ids.size(0), K}, ScalarType::Float);
    const Functions& f = layer.kind.functions();
    for_each_part(ids.size(0), K * 4, [&](int64_t i) {
        f.row((const uint8_t*)layer.weight + id[i] / ROWS * s.tile, s, id[i] % ROWS, K, (float*)y.mutable_data_ptr() + i * K);
    });
    return y;
}

}  // namespace
