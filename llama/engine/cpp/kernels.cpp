// What decoding one token is made of, at the speed at which the memory delivers weights, keys and values:
//
//     blocks.h      x times a weight of 4 or 8 bits, and how such a weight lies in memory
//     bfloat16.h    x times a plain bfloat16 weight
//     attention.h   attention of a few queries
//     rounding.h    a weight rounded to 4 or 8 bits
//     vectors.h     the 16 numbers at a time with which all of them compute
//
// One source serves every processor: the vectors are the compiler's, and the few instructions it would not find by itself stand
// beside a form for the processors that lack them. llama/kernels.py builds it and has the Python side.

#include <torch/csrc/stable/library.h>

#include "attention.h"
#include "bfloat16.h"
#include "blocks.h"
#include "rounding.h"

STABLE_TORCH_LIBRARY(clearllama, m) {
    m.def("linear_blocks(Tensor x, Tensor tiles, int bits, int group, bool offset, int out_features) -> Tensor");
    m.def("round_to_tiles(Tensor weight, Tensor clips, int bits, int group, bool offset) -> Tensor");
    m.def("linear_bf16(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? k_scale, Tensor? v_scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(clearllama, CPU, m) {
    m.impl("linear_blocks", TORCH_BOX(&linear_blocks));
    m.impl("round_to_tiles", TORCH_BOX(&round_to_tiles));
    m.impl("linear_bf16", TORCH_BOX(&linear_bf16));
    m.impl("attend", TORCH_BOX(&attend));
}
