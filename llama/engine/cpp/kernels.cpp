// The operators of a decoding step on a CPU. Their speed is limited by the memory bandwidth for weights, keys and values.
//
//     blocks.h      x times a weight in 4 or 8 bits, and the layout of such a weight
//     bfloat16.h    x times a bfloat16 weight
//     attention.h   attention of a few queries
//     rounding.h    quantization of a weight to 4 or 8 bits
//     vectors.h     vectors of 16 floats, which all of them use
//
// One source serves every processor. It uses the compiler's vector types; the few instructions that a compiler does not choose on
// its own have an alternative for processors without them. llama/engine/kernels.py compiles the source and calls the operators.

#include <torch/csrc/stable/library.h>

#include "bfloat16.h"
#include "panels.h"
#include "prompt.h"
#include "rounding.h"

STABLE_TORCH_LIBRARY(clearllama, m) {
    m.def("linear_blocks(Tensor x, Tensor tiles, int bits, int group, bool offset, int out_features) -> Tensor");
    m.def("quantize_to_tiles(Tensor weight, Tensor clips, int bits, int group, bool offset) -> Tensor");
    m.def("linear_bf16(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? k_scale, Tensor? v_scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(clearllama, CPU, m) {
    m.impl("linear_blocks", TORCH_BOX(&linear_blocks));
    m.impl("quantize_to_tiles", TORCH_BOX(&quantize_to_tiles));
    m.impl("linear_bf16", TORCH_BOX(&linear_bf16));
    m.impl("attend", TORCH_BOX(&attend));
}
