// Attention of few queries and of many: a source of its own, so that another core compiles it.

#include "prompt.h"

void attend(const Attention& a, bool is_float) { is_float ? attend_in<float>(a) : attend_in<bf16>(a); }

// -> (B, T, H, D). q (B, H, T, D), k and v (B, KV, S, D), mask bool (T, S) or (B, 1, T, S), as in torch's scaled_dot_product_attention; k and v may
// be 8-bit integers with a float32 scale for each key (B, KV, S): then q is multiplied by the Hadamard matrix, as the keys were.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> mask, std::optional<Tensor> k_scale,
                 std::optional<Tensor> v_scale) {
    require(q.dim() == 4 && k.dim() == 4, "q (B, H, T, D) and k (B, KV, S, D)");
    const int64_t B = q.size(0), H = q.size(1), T = q.size(2), D = q.size(3), KV = k.size(1), S = k.size(2);
    check_model_dtype(q);
    check_heads(H, KV, D);
    check_rows(q, "q", q.scalar_type(), {B, H, T, D});
    require(k_scale.has_value() == v_scale.has_value(), "scales of both keys and values");
    const Kept keys = kept(k, k_scale, q.scalar_type(), {B, KV, S, D}), values = kept(v, v_scale, q.scalar_type(), {B, KV, S, D});
    Tensor y = torch::stable::new_empty(q, {B, T, H, D});
    attend({B, H, KV, T, S, D, q.const_data_ptr(), q.stride(0), q.stride(1), q.stride(2), keys, values, mask_of(mask, B, T, S),
            mask && mask->dim() == 4 && mask->size(0) == B && B > 1, y.mutable_data_ptr()}, q.scalar_type() == ScalarType::Float);
    return y;
}
