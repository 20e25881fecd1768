// The part of torch's stable C++ interface that the kernels use, without torch: dense tensors that own or share their memory.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

namespace torch::headeronly {
enum class ScalarType { Byte, Char, Long, Float, BFloat16, Bool, Half };
inline int64_t bytes_of(ScalarType type) {
    return type == ScalarType::Long ? 8 : type == ScalarType::Float ? 4 : type == ScalarType::BFloat16 || type == ScalarType::Half ? 2 : 1;
}
}  // namespace torch::headeronly

namespace torch::stable {

class Tensor {
    std::shared_ptr<void> memory;
    int64_t first = 0;  // index of the first number
    std::vector<int64_t> sizes, strides;
    headeronly::ScalarType type;

public:
    Tensor(std::vector<int64_t> sizes, headeronly::ScalarType type) : sizes(sizes), strides(sizes.size()), type(type) {
        for (int64_t i = dim() - 1, step = 1; i >= 0; step *= sizes[i--]) strides[i] = step;
        memory.reset(std::malloc(bytes() + 1), std::free);  // exactly so many bytes, so that a sanitizer sees an access beyond them
    }
    int64_t dim() const { return int64_t(sizes.size()); }
    int64_t size(int64_t axis) const { return sizes[axis]; }
    int64_t stride(int64_t axis) const { return strides[axis]; }
    int64_t numel() const {
        int64_t count = 1;
        for (int64_t size : sizes) count *= size;
        return count;
    }
    bool is_contiguous() const {
        for (int64_t i = dim() - 1, step = 1; i >= 0; step *= sizes[i--])
            if (sizes[i] != 1 && strides[i] != step) return false;
        return true;
    }
    int64_t bytes() const { return numel() * bytes_of(type); }
    headeronly::ScalarType scalar_type() const { return type; }
    void* mutable_data_ptr() const { return (char*)memory.get() + first * bytes_of(type); }
    const void* const_data_ptr() const { return mutable_data_ptr(); }

    friend Tensor narrow(Tensor x, int64_t axis, int64_t start, int64_t length) {
        x.first += start * x.strides[axis], x.sizes[axis] = length;
        return x;
    }
    friend Tensor transpose(Tensor x, int64_t a, int64_t b) {
        std::swap(x.sizes[a], x.sizes[b]), std::swap(x.strides[a], x.strides[b]);
        return x;
    }
    friend Tensor view(const Tensor& x, std::vector<int64_t> sizes) {
        Tensor y(sizes, x.type);
        y.memory = x.memory, y.first = x.first;
        return y;
    }
};

Tensor narrow(Tensor x, int64_t axis, int64_t start, int64_t length);
Tensor transpose(Tensor x, int64_t a, int64_t b);
Tensor view(const Tensor& x, std::vector<int64_t> sizes);

inline Tensor new_empty(const Tensor& like, std::vector<int64_t> sizes, std::optional<headeronly::ScalarType> type = {}) {
    return Tensor(sizes, type.value_or(like.scalar_type()));
}

inline uint32_t threads = 1;
inline uint32_t get_num_threads() { return threads; }

}  // namespace torch::stable
