// The products with weights in 2 to 8 bits (groups.h), compiled for every format. No headers of torch, which take seconds to read.

#include "groups.h"

namespace {

template <Format F>
const Functions& functions_for() {
    if constexpr (F.narrow()) {
        static constexpr Format W = wide_form<F>();
        static const Functions wide{zero_of<W>(), Sums<W>::PAIRS, Sums<W>::HALVES, nullptr,
                                    {{MANY, tile_product<W, MANY, 1>}, {4, tile_product<W, 4, 1>}, {2, tile_product<W, 2, 1>}}};
        static const Functions functions{zero_of<F>(), Sums<F>::PAIRS, Sums<F>::HALVES, one_row_product<F>, {{4, tile_product<F, 4, 1>}, {2, tile_product<F, 2, 1>}},
                                         widen_groups<F>, &wide, F.few(), F.offset, row_of_tile<F>};
        return functions;
    } else {
        static const Functions functions{zero_of<F>(), Sums<F>::PAIRS, Sums<F>::HALVES, one_row_product<F>,
                                         {{MANY, tile_product<F, MANY, 1>}, {MANY * 2 / 3, tile_product<F, MANY * 2 / 3, 1>},
                                          {4, tile_product<F, 4, 1>}, {2, tile_product<F, 2, 1>}, {1, tile_product<F, 1, 1>}},
                                         nullptr, nullptr, 0, F.offset, row_of_tile<F>};
        return functions;
    }
}

}  // namespace

const Functions& functions_of(int64_t bits, int64_t group, bool offset, bool codebook, bool levels) {
    return *with_format(bits, group, offset, codebook, levels, []<Format F>() { return &functions_for<F>(); });
}
