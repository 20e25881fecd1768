// The operators of a decoding step on a CPU. Their speed is limited by the memory bandwidth for weights, keys and values.
//
//     groups.h       rows of x in 8 bits times a weight in 2 to 8 bits, and the layout of such a weight
//     formats.cpp    the functions for each of these formats
//     bfloat16.h     rows of x times a bfloat16 weight
//     widened.h      rows of x times a weight in 16 bits, in float32
//     panels.h       many rows of x times a weight, in bfloat16
//     matrix.h       the loops of bfloat16.h and widened.h, and the innermost product of panels.h: vectors, or AMX
//     attention.h    attention of a few queries
//     prompt.h       attention of many queries, and the operator (attention.cpp)
//     elementwise.h  norms, rotations, SwiGLU
//     linear.h       linear layers of every kind
//     layers.h       all layers of a model, which calls the others
//     rounding.h     quantization of a weight to 4 or 8 bits
//     pack.h         packing of the blocks of a GGUF file
//     pool.h         the threads
//     border.h       what the operators require of their arguments
//     vectors.h      vectors of 16 floats, which all of them use
//
// The same sources serve every form of llama/engine/kernels.py, which compiles them and calls the operators. They use the compiler's vector
// types, and the few instructions that a compiler does not choose on its own.

#include <torch/csrc/stable/library.h>

#include "layers.h"
#include "pack.h"

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> mask, std::optional<Tensor> k_scale,
                 std::optional<Tensor> v_scale);  // attention.cpp defines it

int64_t torch_threads() { return torch::stable::get_num_threads(); }

STABLE_TORCH_LIBRARY(clearllama, m) {
    m.def("linear_tiles(Tensor x, Tensor tiles, int bits, int group, bool offset, int out_features,"
          " bool codebook=False, bool levels=False) -> Tensor");
    m.def("rows_of_tiles(Tensor tiles, Tensor ids, int bits, int group, bool offset, int out_features, int in_features,"
          " bool codebook, bool levels) -> Tensor");
    m.def("quantize_to_tiles(Tensor weight, Tensor clips, int bits, int group, bool offset) -> Tensor");
    m.def("pack_blocks(Tensor raw, str type, Tensor? order, Tensor(a!) out) -> ()");
    m.def("linear_bf16(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? k_scale, Tensor? v_scale) -> Tensor");
    m.def("layers(Tensor(a!) h, Tensor[] weights, Tensor formats, Tensor[] biases, Tensor[] norms, Tensor[] head_norms, float eps, int[] rotates,"
          " Tensor cos, Tensor sin, Tensor slots, Tensor? mask, Tensor(b!)[] keys, Tensor(c!)[] values, Tensor(d!)[] scales, Tensor[] k_offsets, int S) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(clearllama, CPU, m) {
    m.impl("linear_tiles", TORCH_BOX(&linear_tiles));
    m.impl("rows_of_tiles", TORCH_BOX(&rows_of_tiles));
    m.impl("quantize_to_tiles", TORCH_BOX(&quantize_to_tiles));
    m.impl("pack_blocks", TORCH_BOX(&pack_blocks));
    m.impl("linear_bf16", TORCH_BOX(&linear_bf16));
    m.impl("attend", TORCH_BOX(&attention));
    m.impl("layers", TORCH_BOX(&layers));
}

// Chooses the calling thread's numbers of threads: for the kernels (0: as many as torch uses), and for torch's operators (0: as before).
// torch::set_num_threads would also change the latter for threads that start later.
extern "C" {
[[gnu::weak]] void omp_set_num_threads(int);
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int);

[[gnu::visibility("default")]] int64_t clearllama_threads() { return thread_count(); }

[[gnu::visibility("default")]] void clearllama_choose_threads(int64_t kernels, int64_t operators) {
    chosen_threads() = kernels;
    if (operators && omp_set_num_threads) omp_set_num_threads(int(operators));
    if (operators && MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(int(operators));
}
}
