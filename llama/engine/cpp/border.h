// What the operators require of their arguments. Each operator checks them once, before it reads memory: its loops use raw pointers, and a
// user may have replaced a weight. The operators are registered for the CPU only, so tensors of other devices never arrive here.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "vectors.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

inline void require(bool holds, const char* expected) {
    if (!holds) throw std::invalid_argument(std::string("the C++ kernels expect ") + expected);
}

typedef std::initializer_list<int64_t> Sizes;

inline bool has_sizes(const Tensor& x, Sizes sizes) {
    if (x.dim() != int64_t(sizes.size())) return false;
    int64_t axis = 0;
    for (int64_t size : sizes)
        if (x.size(axis++) != size) return false;
    return true;
}

// A tensor of this dtype and these sizes whose numbers lie one after another.
inline void check(const Tensor& x, const char* name, ScalarType dtype, Sizes sizes) {
    if (x.scalar_type() == dtype && has_sizes(x, sizes) && x.is_contiguous()) return;
    std::string expected;
    for (int64_t size : sizes) expected += (expected.empty() ? "" : ", ") + std::to_string(size);
    throw std::invalid_argument(std::string("the C++ kernels expect ") + name + " of shape (" + expected + "), contiguous and in the dtype of the model");
}

// The same, but only the numbers along the last axis must lie one after another.
inline void check_rows(const Tensor& x, const char* name, ScalarType dtype, Sizes sizes) {
    if (x.scalar_type() == dtype && has_sizes(x, sizes) && (x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) == 1)) return;
    check(x, name, dtype, sizes);
}

inline bool same_strides(const Tensor& a, const Tensor& b) {
    for (int64_t axis = 0; axis < a.dim(); axis++)
        if (a.size(axis) > 1 && a.stride(axis) != b.stride(axis)) return false;
    return true;
}

inline void check_model_dtype(const Tensor& x) {
    require(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16, "float32 or bfloat16");
}

// Calls f with a null pointer of the type of x's numbers: float or bf16.
template <typename F>
void with_type(const Tensor& x, F f) {
    if (x.scalar_type() == torch::headeronly::ScalarType::Float) f((float*)nullptr);
    else f((bf16*)nullptr);
}

}  // namespace
