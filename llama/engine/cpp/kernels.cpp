// The operators of a decoding step on a CPU. Their speed is limited by the memory bandwidth for weights, keys and values.
//
//     blocks.h       rows of x in 8 bits times a weight in 2 to 8 bits, and the layout of such a weight
//     formats.cpp    the functions for each of these formats
//     bfloat16.h     a few rows of x times a bfloat16 weight
//     widened.h      rows of x times a weight in 16 bits, in float32
//     panels.h       many rows of x times a weight, in bfloat16
//     matrix.h       the loops of bfloat16.h and widened.h, and the innermost product of panels.h: vectors, or AMX
//     attention.h    attention of a few queries
//     prompt.h       attention of many queries, and the operator (attention.cpp)
//     elementwise.h  norms, rotations, SwiGLU
//     block.h        a complete block, which calls the others
//     rounding.h     quantization of a weight to 4 or 8 bits
//     pool.h         the threads
//     border.h       what the operators require of their arguments
//     vectors.h      vectors of 16 floats, which all of them use
//
// The same sources serve every form of llama/engine/kernels.py, which compiles them and calls the operators. They use the compiler's vector
// types, and the few instructions that a compiler does not choose on its own.

#include <torch/csrc/stable/library.h>

#include "bfloat16.h"
#include "block.h"
#include "rounding.h"

int64_t torch_threads() { return torch::stable::get_num_threads(); }

STABLE_TORCH_LIBRARY(clearllama, m) {
    m.def("linear_blocks(Tensor x, Tensor tiles, int bits, int group, bool offset, int out_features,"
          " bool codebook=False, bool levels=False) -> Tensor");
    m.def("quantize_to_tiles(Tensor weight, Tensor clips, int bits, int group, bool offset) -> Tensor");
    m.def("linear_bf16(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? k_scale, Tensor? v_scale) -> Tensor");
    m.def("add_norm(Tensor(a!) h, Tensor? delta, Tensor weight, float eps) -> Tensor");
    m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
    m.def("rotate(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? positions, Tensor(a!) keys, Tensor(b!) values,"
          " Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, Tensor? k_offset=None) -> Tensor");
    m.def("block(Tensor(a!) h, Tensor? added, Tensor[] norms, float eps, Tensor[] tiles, int[] formats, Tensor cos, Tensor sin,"
          " Tensor positions, Tensor? mask, Tensor(b!) keys, Tensor(c!) values, Tensor(d!)? k_scale, Tensor(e!)? v_scale, int end) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(clearllama, CPU, m) {
    m.impl("linear_blocks", TORCH_BOX(&linear_blocks));
    m.impl("quantize_to_tiles", TORCH_BOX(&quantize_to_tiles));
    m.impl("linear_bf16", TORCH_BOX(&linear_bf16));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("add_norm", TORCH_BOX(&add_norm));
    m.impl("swiglu", TORCH_BOX(&swiglu));
    m.impl("rotate", TORCH_BOX(&rotate));
    m.impl("block", TORCH_BOX(&block));
}

// Chooses the calling thread's numbers of threads: for the kernels (0: as many as torch uses), and for torch's operators (0: as before).
// torch::set_num_threads would also change the latter for threads that start later.
extern "C" {
[[gnu::weak]] void omp_set_num_threads(int);
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int);

[[gnu::visibility("default")]] void clearllama_choose_threads(int64_t kernels, int64_t operators) {
    chosen_threads() = kernels;
    if (operators && omp_set_num_threads) omp_set_num_threads(int(operators));
    if (operators && MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(int(operators));
}
}
