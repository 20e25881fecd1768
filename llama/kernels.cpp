// Products of a few rows with a weight matrix, at the speed at which the memory delivers the weights.
//
// Two of them: `linear_bf16` takes a plain bfloat16 weight (N, K) as nn.Linear holds it, `linear_blocks` one of 4 or 8
// bits in tiles (llama/quant.py packs them). Decoding one token is nothing but such products, one row each.
//
// A tile is 16 rows of the weight, one a lane of a vector of 16 numbers. It is read from front to back:
//
//     group 0: for every 4 inputs   16 rows x 4 weights of 8 bits (64 bytes), or for every 8 inputs of 4 bits: inputs 0-3
//                                   in the low halves of the bytes, inputs 4-7 in the high ones
//              scale                16 x float16
//              offset               16 x float16, if the scheme has one
//     group 1: the same, and so on; with one scale for a whole row instead, 16 x float32 follow the last group.
//
// One row of x is turned into 8-bit integers too, with a scale for every group of inputs. Then
//
//     y[row] = sum over groups of  scale_w[row] * scale_x * sum_k(w[row, k] * x[k])  +  offset[row] * scale_x * sum_k(x[k])
//
// where w is unsigned, as the instruction for it (vpdpbusd) wants, and the inner sum is exact in 32 bits. Four inputs of
// x go into all lanes at once; so no sum across lanes is ever needed, and 12 rows of x share every weight read.
//
// The same source serves every processor: the vectors are the compiler's, and `dot4` is the one instruction that matters.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

using torch::stable::Tensor;

namespace {

constexpr int64_t ROWS = 16;  // of a tile
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void from_float(float x, float& y) { y = x; }
inline void from_float(float x, bf16& y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y.bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;  // to nearest even; NaN stays NaN
}

template <typename V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}

inline f32x16 load_half(const void* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    const __m128i* h = (const __m128i*)p;
    __m256 v[2] = {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
    return load<f32x16>(v);
#else
    f32x16 v;
    for (int i = 0; i < 16; i++) {
        _Float16 h;
        std::memcpy(&h, (const char*)p + 2 * i, 2);
        v[i] = float(h);
    }
    return v;
#endif
}

typedef int8_t i8x16 __attribute__((vector_size(16)));

template <typename T>
inline f32x16 widen(const T* p);
template <>
inline f32x16 widen(const float* p) {
    return load<f32x16>(p);
}
template <>
inline f32x16 widen(const bf16* p) {
    typedef uint16_t u16x16 __attribute__((vector_size(32)));
    return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}
template <>
inline f32x16 widen(const int8_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    const __m256i half[2] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
    return __builtin_convertvector(load<i32x16>(half), f32x16);
#endif
    return __builtin_convertvector(__builtin_convertvector(load<i8x16>(p), i32x16), f32x16);
}

// The largest magnitude of n numbers; NaN if one is not finite. A compiler may not reorder float operations, so the 16 maxima that
// are kept side by side are spelled out.
struct Largest {
    f32x16 top{}, finite{};
    void see(f32x16 x) {
        const f32x16 size = (f32x16)((i32x16)x & 0x7fffffff);
        top = size > top ? size : top;
        finite += x * 0.0f;
    }
    float get() const {
        float most = 0, sum = 0;
        for (int i = 0; i < 16; i++) most = top[i] > most ? top[i] : most, sum += finite[i];
        return most + sum;
    }
};

inline i32x16 to_whole(f32x16 x) {  // to nearest even, for |x| < 2^22
    return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, i32x16);  // 1.5 * 2^23: adding it rounds to a whole number
}

template <typename V>
inline auto sum_of(V v) {
    auto sum = v[0];
    for (int i = 1; i < 16; i++) sum += v[i];
    return sum;
}

// ------------------------------------------------------------------------------------------------ 4 and 8 bits
// acc[row] += sum over 4 inputs of w[row][i] * x[i]; w is 64 unsigned bytes, x 4 signed ones.
// Without VNNI 8-bit weights are taken as signed (w - 128), since pairs of unsigned ones would overflow 16 bits.
#if defined(__AVX512VNNI__)
constexpr bool SIGNED8 = false;
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
}
#elif defined(__AVX2__)
constexpr bool SIGNED8 = true;
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    __m256i part[2];
    std::memcpy(part, &w, 64);
    for (int i = 0; i < 2; i++) {
        __m256i u = part[i], s = _mm256_set1_epi32(x);
        if (BITS == 8) {
            __m256i q = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
            u = _mm256_abs_epi8(q), s = _mm256_sign_epi8(s, q);
        }
        part[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
    }
    return acc + load<i32x16>(part);
}
#else
constexpr bool SIGNED8 = false;
template <int BITS>
inline i32x16 dot4(i32x16 acc, u32x16 w, int32_t x) {
    for (int i = 0; i < 4; i++) acc += (i32x16)((w >> (8 * i)) & 255) * int32_t(int8_t(x >> (8 * i)));
    return acc;
}
#endif

// A row of x in 8 bits. `start` takes the middle of unsigned weights off: sum((w - zero) x) = sum(w x) - zero sum(x).
struct Row {
    const int8_t* x;       // (groups * group)
    const float* scale;    // (groups)
    const int32_t* start;  // (groups)
    const float* sum;      // (groups), times scale
};

struct Shape {
    int64_t groups, group, stride;  // stride: bytes of one group of a tile
};

template <int BITS, bool OFFSET, bool PER_ROW, int M>
void tile_product(const uint8_t* tile, const Shape& s, const Row* rows, f32x16* y) {
    const int64_t bytes = s.group * ROWS * BITS / 8;
    f32x16 total[M];
    for (int m = 0; m < M; m++) total[m] = f32x16{};
    for (int64_t g = 0; g < s.groups; g++, tile += s.stride) {
        i32x16 acc[M];
        const int8_t* x[M];
        for (int m = 0; m < M; m++) {
            acc[m] = i32x16{} + rows[m].start[g];
            x[m] = rows[m].x + g * s.group;
        }
#pragma GCC unroll 4
        for (int64_t i = 0; i < bytes; i += 64) {
            u32x16 w = load<u32x16>(tile + i);
            if (BITS == 8) {
                for (int m = 0; m < M; m++) acc[m] = dot4<8>(acc[m], w, load<int32_t>(x[m] + i / 16));
            } else {
                u32x16 low = w & 0x0f0f0f0fu, high = (w >> 4) & 0x0f0f0f0fu;
                for (int m = 0; m < M; m++) {
                    acc[m] = dot4<4>(acc[m], low, load<int32_t>(x[m] + i / 8));
                    acc[m] = dot4<4>(acc[m], high, load<int32_t>(x[m] + i / 8 + 4));
                }
            }
        }
        f32x16 scale = PER_ROW ? f32x16{} + 1.0f : load_half(tile + bytes);
        f32x16 offset = OFFSET ? load_half(tile + bytes + 32) : f32x16{};
        for (int m = 0; m < M; m++) {
            total[m] += __builtin_convertvector(acc[m], f32x16) * (PER_ROW ? f32x16{} + rows[m].scale[g] : scale * rows[m].scale[g]);
            if (OFFSET) total[m] += offset * rows[m].sum[g];
        }
    }
    f32x16 scale = PER_ROW ? load<f32x16>(tile) : f32x16{} + 1.0f;
    for (int m = 0; m < M; m++) y[m] = total[m] * scale;
}

// One row of x (K) in 8 bits, group by group. A number that is not finite makes its group's scale NaN, and so the result.
template <typename T>
void to_8_bits(const T* x, int64_t K, const Shape& s, int32_t zero, int8_t* q, float* scale, int32_t* start, float* sum) {
    for (int64_t g = 0; g < s.groups; g++, x += s.group, q += s.group) {
        const int64_t n = std::min(s.group, K - g * s.group);
        T rest[128] = {};  // the last group, filled up
        const T* from = n < s.group ? (const T*)std::memcpy(rest, x, n * sizeof(T)) : x;
        Largest largest;
        for (int64_t i = 0; i < s.group; i += 16) largest.see(widen(from + i));
        const float most = largest.get(), inverse = most > 0 ? 127 / most : 0;
        scale[g] = most / 127;
        i32x16 total{};
        for (int64_t i = 0; i < s.group; i += 16) {
            const i32x16 v = to_whole(widen(from + i) * inverse);
            const i8x16 bytes = __builtin_convertvector(v, i8x16);
            std::memcpy(q + i, &bytes, 16);
            total += v;
        }
        start[g] = -zero * sum_of(total);
        sum[g] = scale[g] * sum_of(total);
    }
}

template <typename T, int BITS, bool OFFSET, bool PER_ROW>
void product(const T* x, int64_t M, int64_t K, const uint8_t* tiles, const Shape& s, T* y, int64_t N) {
    const int64_t padded = s.groups * s.group + 64, count = M * s.groups;  // 64: or rows would fall on the same places of a cache
    std::vector<int8_t> q(M * padded);
    std::vector<float> scale(count), sum(count);
    std::vector<int32_t> start(count);
    const int32_t zero = (OFFSET ? 0 : 1 << (BITS - 1)) - (BITS == 8 && SIGNED8 ? 128 : 0);
    std::vector<Row> rows(M);
    torch::stable::parallel_for(0, M, 8, [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) {
            const int64_t at = m * s.groups;
            to_8_bits(x + m * K, K, s, zero, &q[m * padded], &scale[at], &start[at], &sum[at]);
            rows[m] = {&q[m * padded], &scale[at], &start[at], &sum[at]};
        }
    });
    const int64_t tile_bytes = s.groups * s.stride + (PER_ROW ? 64 : 0);
    torch::stable::parallel_for(0, (N + ROWS - 1) / ROWS, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const uint8_t* tile = tiles + t * tile_bytes;
            for (int64_t m = 0; m < M;) {
                f32x16 out[12];
                const int64_t left = M - m, now = left >= 12 ? 12 : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
                auto run = now == 12  ? tile_product<BITS, OFFSET, PER_ROW, 12>
                           : now == 8 ? tile_product<BITS, OFFSET, PER_ROW, 8>
                           : now == 4 ? tile_product<BITS, OFFSET, PER_ROW, 4>
                           : now == 2 ? tile_product<BITS, OFFSET, PER_ROW, 2>
                                      : tile_product<BITS, OFFSET, PER_ROW, 1>;
                run(tile, s, &rows[m], out);
                for (int64_t i = 0; i < now; i++, m++)
                    for (int64_t r = 0; r < std::min(ROWS, N - t * ROWS); r++) from_float(out[i][r], y[m * N + t * ROWS + r]);
            }
        }
    });
}

template <typename T>
void product_of(const T* x, int64_t M, int64_t K, const uint8_t* tiles, int64_t bits, int64_t group, bool offset, T* y, int64_t N) {
    const bool per_row = group == 0;
    Shape s{0, per_row ? 64 : group, 0};
    s.groups = (K + s.group - 1) / s.group;
    s.stride = s.group * ROWS * bits / 8 + (per_row ? 0 : 32) + (offset ? 32 : 0);
    if (per_row) product<T, 8, false, true>(x, M, K, tiles, s, y, N);
    else if (bits == 8 && !offset) product<T, 8, false, false>(x, M, K, tiles, s, y, N);
    else if (bits == 8) product<T, 8, true, false>(x, M, K, tiles, s, y, N);
    else if (!offset) product<T, 4, false, false>(x, M, K, tiles, s, y, N);
    else product<T, 4, true, false>(x, M, K, tiles, s, y, N);
}

// (M, K) float32 or bfloat16 times a packed weight (N, K) -> (M, N) of x's dtype.
Tensor linear_blocks(const Tensor& x, const Tensor& tiles, int64_t bits, int64_t group, bool offset, int64_t N) {
    const int64_t M = x.size(0), K = x.size(1);
    Tensor y = torch::stable::new_empty(x, {M, N});
    const auto* w = (const uint8_t*)tiles.const_data_ptr();
    if (x.scalar_type() == torch::headeronly::ScalarType::Float)
        product_of((const float*)x.const_data_ptr(), M, K, w, bits, group, offset, (float*)y.mutable_data_ptr(), N);
    else
        product_of((const bf16*)x.const_data_ptr(), M, K, w, bits, group, offset, (bf16*)y.mutable_data_ptr(), N);
    return y;
}

// ---------------------------------------------------------------------------------------------------- rounding
inline f32x16 store_half(f32x16 x, uint8_t* p) {  // as float16, to nearest even; returns what is stored
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    __m256 v[2];
    std::memcpy(v, &x, 64);
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)p + i, _mm256_cvtps_ph(v[i], _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 16; i++) {
        const _Float16 h = _Float16(x[i]);
        std::memcpy(p + 2 * i, &h, 2);
    }
#endif
    return load_half(p);
}

// x itself; but the compiler can't fuse what makes it with what uses it, which would round otherwise than torch does.
inline f32x16 apart(f32x16 x) {
    asm("" : "+m"(x));
    return x;
}

// (v - offset) / scale as a whole number from 0 to top.
inline f32x16 quants_of(f32x16 v, f32x16 scale, f32x16 offset, float top) {
    const f32x16 zero{}, one = zero + 1.0f, most = zero + top, magic = zero + 12582912.0f;  // as in exp_of
    f32x16 x = (v - offset) / (scale > zero ? scale : one);
    x = x < zero ? zero : x;
    x = x > most ? most : x;
    return (x + magic) - magic;
}

struct Rounding {
    int64_t bits, group;  // group 0: one scale in float32 for a whole row
    bool offset;
    const float* clips;
    int64_t tries;
};

// A tile of `rows` rows (K): `quantize` and `pack` of llama/ in one, where both are explained.
template <typename T>
void round_tile(const T* w, int64_t rows, int64_t K, const Rounding& s, uint8_t* tile) {
    const int64_t width = s.group ? s.group : 64, bytes = width * ROWS * s.bits / 8;
    const float top = float((1 << s.bits) - 1), middle = float(1 << (s.bits - 1));
    const f32x16 empty = f32x16{} + (s.offset ? 0 : middle);
    i32x16 there{};
    for (int64_t r = 0; r < rows; r++) there[r] = -1;
    f32x16 values[128], row_scale{};
    for (int64_t r = 0; r < rows && !s.group; r++) {
        float largest = 0, finite = 0;
        for (int64_t k = 0; k < K; k++) {
            const float v = to_float(w[r * K + k]);
            largest = std::max(largest, std::fabs(v)), finite += v * 0;
        }
        row_scale[r] = largest / (middle - 1) + finite;
    }
    for (int64_t first = 0; first < K; first += width) {
        const int64_t n = std::min(width, K - first);
        float numbers[16] = {};
        for (int64_t k = 0; k < width; k++) {
            for (int64_t r = 0; r < rows; r++)  // what fills up the last group must not widen its range
                numbers[r] = k < n ? to_float(w[r * K + first + k]) : s.offset ? values[0][r] : 0;
            values[k] = load<f32x16>(numbers);
        }
        f32x16 low = values[0], high = values[0], finite{}, scale{}, offset{}, least{};
        for (int64_t k = 0; k < width; k++) {
            low = values[k] < low ? values[k] : low;
            high = values[k] > high ? values[k] : high;
            finite += values[k] * 0.0f;
        }
        uint8_t* const numbers_at = tile + bytes;
        for (int64_t i = 0; i < s.tries; i++) {
            f32x16 new_scale = row_scale, new_offset, error{};
            if (s.offset) {
                const f32x16 half = apart((high - low) / 2.0f * s.clips[i]);
                new_scale = store_half(half * 2.0f / top + finite, numbers_at);
                new_offset = store_half((low + high) / 2.0f - half, numbers_at);
            } else {
                const f32x16 largest = -low > high ? -low : high;
                if (s.group) new_scale = store_half(largest * s.clips[i] / (middle - 1) + finite, numbers_at);
                new_offset = -new_scale * middle;
            }
            for (int64_t k = 0; k < n && s.tries > 1; k++) {
                const f32x16 gap = quants_of(values[k], new_scale, new_offset, top) * new_scale + new_offset - values[k];
                error += gap * gap;
            }
            const i32x16 better = i ? error < least : i32x16{} - 1;
            scale = better ? new_scale : scale;
            offset = better ? new_offset : offset;
            least = better ? error : least;
        }
        for (int64_t k = 0; k < width; k += 4) {
            u32x16 word{};  // inputs k to k + 3, a byte each
            for (int64_t i = 0; i < 4; i++) {
                f32x16 q = quants_of(values[k + i], scale, offset, top);
                q = k + i < n ? (there ? q : empty) : empty;
                word |= (u32x16)__builtin_convertvector(q, i32x16) << uint32_t(8 * i);
            }
            uint8_t* const at = tile + (s.bits == 8 ? k / 4 : k / 8) * 64;
            if (s.bits == 4 && k % 8) word = word << 4u | load<u32x16>(at);
            std::memcpy(at, &word, 64);
        }
        if (s.group) store_half(scale, numbers_at);
        if (s.offset) store_half(offset, numbers_at + 32);
        tile = numbers_at + (s.group ? 32 : 0) + (s.offset ? 32 : 0);
    }
    if (!s.group) std::memcpy(tile, &row_scale, 64);
}

template <typename T>
void round_rows(const T* w, int64_t N, int64_t K, const Rounding& s, uint8_t* tiles, int64_t tile_bytes) {
    torch::stable::parallel_for(0, (N + ROWS - 1) / ROWS, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            round_tile(w + t * ROWS * K, std::min(ROWS, N - t * ROWS), K, s, tiles + t * tile_bytes);
    });
}

// A weight (N, K), float32 or bfloat16, rounded to 4 or 8 bits: its tiles. clips (float32): how far to draw in a group's range.
Tensor round_to_tiles(const Tensor& weight, const Tensor& clips, int64_t bits, int64_t group, bool offset) {
    const int64_t N = weight.size(0), K = weight.size(1), width = group ? group : 64;
    const int64_t of_group = width * ROWS * bits / 8 + (group ? 32 : 0) + (offset ? 32 : 0);
    const int64_t tile_bytes = (K + width - 1) / width * of_group + (group ? 0 : 64);
    Tensor y = torch::stable::new_empty(weight, {(N + ROWS - 1) / ROWS, tile_bytes}, torch::headeronly::ScalarType::Byte);
    const Rounding s{bits, group, offset, (const float*)clips.const_data_ptr(), clips.size(0)};
    auto* tiles = (uint8_t*)y.mutable_data_ptr();
    if (weight.scalar_type() == torch::headeronly::ScalarType::Float)
        round_rows((const float*)weight.const_data_ptr(), N, K, s, tiles, tile_bytes);
    else round_rows((const bf16*)weight.const_data_ptr(), N, K, s, tiles, tile_bytes);
    return y;
}

// ---------------------------------------------------------------------------------------------------- bfloat16
// 32 products of bfloat16 added to 16 sums.
#if defined(__AVX512BF16__)
inline f32x16 dot2(f32x16 acc, const bf16* w, const bf16* x) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, load<__m512bh>(w), load<__m512bh>(x));
}
#else
inline f32x16 dot2(f32x16 acc, const bf16* w, const bf16* x) {
    u32x16 a = load<u32x16>(w), b = load<u32x16>(x);  // two numbers in each: one above, one below
    acc += (f32x16)(a << 16) * (f32x16)(b << 16);
    return acc + (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
}
#endif

// One row of the weight times M rows of x. The weight is one stream from front to back, which memory serves best.
template <int M>
void row_product(const bf16* x, const bf16* w, int64_t K, float* y) {
    constexpr int SUMS = M == 1 ? 2 : 1;  // that don't wait for each other
    f32x16 acc[M][SUMS];
    for (int m = 0; m < M; m++)
        for (int i = 0; i < SUMS; i++) acc[m][i] = f32x16{};
    int64_t k = 0;
    for (; k + 32 * SUMS <= K; k += 32 * SUMS)
        for (int i = 0; i < SUMS; i++) {
            for (int m = 0; m < M; m++) acc[m][i] = dot2(acc[m][i], w + k + 32 * i, x + m * K + k + 32 * i);
        }
    for (int m = 0; m < M; m++) {
        for (int i = 1; i < SUMS; i++) acc[m][0] += acc[m][i];
        y[m] = 0;
        for (int i = 0; i < 16; i++) y[m] += acc[m][0][i];
        for (int64_t i = k; i < K; i++) y[m] += to_float(w[i]) * to_float(x[m * K + i]);
    }
}

template <int M>
void few_rows(const bf16* x, const bf16* w, const bf16* bias, bf16* y, int64_t N, int64_t K) {
    torch::stable::parallel_for(0, N, 32, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            float out[M];
            row_product<M>(x, w + n * K, K, out);
            for (int m = 0; m < M; m++) from_float(out[m] + (bias ? to_float(bias[n]) : 0), y[m * N + n]);
        }
    });
}

// (M, K) times a plain weight (N, K) and a bias (N) -> (M, N); for few rows, since each 4 read the weight again.
Tensor linear_bf16(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias) {
    const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
    Tensor y = torch::stable::new_empty(x, {M, N});
    const auto *a = (const bf16*)x.const_data_ptr(), *w = (const bf16*)weight.const_data_ptr();
    const bf16* b = bias ? (const bf16*)bias->const_data_ptr() : nullptr;
    auto* out = (bf16*)y.mutable_data_ptr();
    for (int64_t m = 0; m < M;) {
        const int64_t now = M - m >= 4 ? 4 : M - m >= 2 ? 2 : 1;
        auto run = now == 4 ? few_rows<4> : now == 2 ? few_rows<2> : few_rows<1>;
        run(a + m * K, w, b, out + m * N, N, K);
        m += now;
    }
    return y;
}

// ---------------------------------------------------------------------------------------------------- attention
constexpr int64_t CHUNK = 256;  // keys of one piece of work; the pieces are put together at the end
constexpr int64_t WIDEST = 256;  // head_dim

// Lane i of the result: the sum over the lanes of v[i]. Four times, two vectors are folded into one.
template <int WIDTH>
inline f32x16 fold(f32x16 a, f32x16 b) {
    i32x16 low, high;
    for (int i = 0; i < 16; i++) {
        low[i] = i / (2 * WIDTH) * 2 * WIDTH + i % WIDTH + (i / WIDTH % 2) * 16;  // 16 and more: from b
        high[i] = low[i] + WIDTH;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}
inline f32x16 sums(f32x16* v) {
    for (int i = 0; i < 8; i++) v[i] = fold<8>(v[i], v[i + 8]);
    for (int i = 0; i < 4; i++) v[i] = fold<4>(v[i], v[i + 4]);
    for (int i = 0; i < 2; i++) v[i] = fold<2>(v[i], v[i + 2]);
    return fold<1>(v[0], v[1]);
}

// exp(x) for x <= 0, to 2e-7: 2^n times a polynomial in the rest; below -87 it is 0.
inline f32x16 exp_of(f32x16 x) {
    const f32x16 lowest = f32x16{} - 87.0f;
    const i32x16 small = x < lowest;
    x = small ? lowest : x;
    const f32x16 magic = f32x16{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const f32x16 n = (x * 1.44269504f + magic) - magic;
    const f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    f32x16 p = f32x16{} + 1.0f / 720;
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    const i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
    return small ? f32x16{} : p * (f32x16)exponent;
}

// What a piece of attention is given and what it leaves. R queries share a head of keys; n <= CHUNK keys of it are looked at.
template <typename C>
struct Piece {
    int64_t R, D, n;
    const float* q;                     // (R, D), times 1 / sqrt(D)
    const C *k, *v;                     // (n, D), rows `stride` apart
    int64_t k_stride, v_stride;
    const float *k_scale, *v_scale;     // (n) each, or null
    const bool* const* seen;            // (R): null, or which of the n keys that query may see
    float *out, *largest, *sum;         // (R, D) sum of exp(score - largest) v, (R) largest score, (R) sum of exp(score - largest)
};

// The processor foresees a stream up to the end of its page only: keys to come, and the values of these.
template <typename C>
inline void foresee(const Piece<C>& p, int64_t key) {
    for (int64_t i = 0; i < p.D; i += 64 / sizeof(C)) {
        __builtin_prefetch(p.k + (key + 32) * p.k_stride + i);
        __builtin_prefetch(p.v + key * p.v_stride + i);
    }
}

// QUERIES of a piece's queries, from `first` on: their products with 16 keys, and sums of values. VECTORS: D / 16, or 0.
template <typename C, int VECTORS, int QUERIES>
struct Queries {
    const Piece<C>& p;
    const float* q;
    const int64_t vectors;

    Queries(const Piece<C>& p, int64_t first) : p(p), q(p.q + first * p.D), vectors(VECTORS ? VECTORS : p.D / 16) {}

    // Keys s to s + count, widened once for all queries. Behind the last key: the last again.
    void products(int64_t s, int64_t count, f32x16* out) const {
        f32x16 acc[QUERIES][16];
        for (int64_t j = 0; j < 16; j++) {
            const C* key = p.k + (s + std::min(j, count - 1)) * p.k_stride;
            foresee(p, s + j);
            f32x16 wide[VECTORS ? VECTORS : WIDEST / 16];
            for (int64_t i = 0; i < vectors; i++) wide[i] = widen(key + 16 * i);
            for (int r = 0; r < QUERIES; r++) {
                f32x16 a = wide[0] * load<f32x16>(q + r * p.D);
                for (int64_t i = 1; i < vectors; i++) a += wide[i] * load<f32x16>(q + r * p.D + 16 * i);
                acc[r][j] = a;
            }
        }
        for (int r = 0; r < QUERIES; r++) out[r] = sums(acc[r]);
    }

    // out[r] = sum of weights[r][j] v[j]. A value whose weights are all 0 may be anything.
    void values(const float (*weights)[CHUNK], float (*out)[WIDEST]) const {
        f32x16 acc[QUERIES][VECTORS ? VECTORS : WIDEST / 16];
        for (int r = 0; r < QUERIES; r++)
            for (int64_t i = 0; i < vectors; i++) acc[r][i] = f32x16{};
        for (int64_t j = 0; j < p.n; j++) {
            float any = 0;
            for (int r = 0; r < QUERIES; r++) any += std::fabs(weights[r][j]);
            if (any == 0) continue;
            f32x16 wide[VECTORS ? VECTORS : WIDEST / 16];
            for (int64_t i = 0; i < vectors; i++) wide[i] = widen(p.v + j * p.v_stride + 16 * i);
            for (int r = 0; r < QUERIES; r++)
                for (int64_t i = 0; i < vectors; i++) acc[r][i] += wide[i] * weights[r][j];
        }
        for (int r = 0; r < QUERIES; r++) std::memcpy(out[r], acc[r], vectors * 64);
    }
};

#if defined(__AVX512VNNI__)
// Rows and columns of 16 x 16 numbers exchanged: blocks of WIDTH lanes change places, from halves down to single lanes.
template <int WIDTH>
inline void exchange(u32x16* v) {
    i32x16 near, far;
    for (int i = 0; i < 16; i++) {
        near[i] = i & WIDTH ? i - WIDTH + 16 : i;  // 16 and more: from the second vector
        far[i] = i & WIDTH ? i + 16 : i + WIDTH;
    }
    for (int i = 0; i < 16; i++) {
        if (i & WIDTH) continue;
        const u32x16 a = v[i], b = v[i + WIDTH];
        v[i] = __builtin_shuffle(a, b, near), v[i + WIDTH] = __builtin_shuffle(a, b, far);
    }
}

// The same for keys and values of 8 bits, in whole numbers: the 16 keys in the lanes of a vector, four entries of a head in each
// lane, as in the products above; for the values two keys a lane, with weights of 16 bits. Queries are rounded to 8 bits twice, the
// second time what the first has left over.
template <int VECTORS, int QUERIES>
struct Queries8 {
    const Piece<int8_t>& p;
    alignas(64) int8_t q[QUERIES][2][VECTORS * 16];
    float scale[QUERIES];
    int32_t start[QUERIES][2];

    Queries8(const Piece<int8_t>& p, int64_t first) : p(p) {
        for (int r = 0; r < QUERIES; r++) {
            const float* from = p.q + (first + r) * p.D;
            Largest largest;
            for (int i = 0; i < VECTORS; i++) largest.see(load<f32x16>(from + 16 * i));
            scale[r] = largest.get() / 127;
            const float inverse = scale[r] > 0 ? 1 / scale[r] : 0;
            i32x16 total[2] = {};
            for (int i = 0; i < VECTORS; i++) {
                const f32x16 x = load<f32x16>(from + 16 * i) * inverse;
                const i32x16 high = to_whole(x), low = to_whole((x - __builtin_convertvector(high, f32x16)) * 254.0f);
                const i8x16 bytes[2] = {__builtin_convertvector(high, i8x16), __builtin_convertvector(low, i8x16)};
                total[0] += high, total[1] += low;
                for (int part = 0; part < 2; part++) std::memcpy(&q[r][part][16 * i], &bytes[part], 16);
            }
            for (int part = 0; part < 2; part++) start[r][part] = -128 * sum_of(total[part]);  // keys are taken as unsigned, 128 more
        }
    }

    void products(int64_t s, int64_t count, f32x16* out) const {
        i32x16 acc[QUERIES][2];
        for (int r = 0; r < QUERIES; r++)
            for (int part = 0; part < 2; part++) acc[r][part] = i32x16{} + start[r][part];
        for (int i = 0; i < VECTORS / 4; i++) {
            u32x16 keys[16];
            for (int64_t j = 0; j < 16; j++) keys[j] = load<u32x16>(p.k + (s + std::min(j, count - 1)) * p.k_stride + 64 * i);
            exchange<8>(keys), exchange<4>(keys), exchange<2>(keys), exchange<1>(keys);
            for (int k = 0; k < 16; k++)
                for (int r = 0; r < QUERIES; r++)
                    for (int part = 0; part < 2; part++)
                        acc[r][part] = dot4<8>(acc[r][part], keys[k] ^ 0x80808080u, load<int32_t>(&q[r][part][64 * i + 4 * k]));
        }
        for (int64_t j = 0; j < 16; j++) foresee(p, s + j);
        for (int r = 0; r < QUERIES; r++)
            out[r] = (__builtin_convertvector(acc[r][0], f32x16) + __builtin_convertvector(acc[r][1], f32x16) / 254.0f) * scale[r];
    }

    void values(const float (*weights)[CHUNK], float (*out)[WIDEST]) const {
        static_assert(CHUNK * 127ll * 32767 < 1ll << 31);
        alignas(64) int16_t whole[QUERIES][CHUNK];
        float unit[QUERIES];
        for (int r = 0; r < QUERIES; r++) {
            Largest largest;
            for (int64_t j = 0; j < p.n; j += 16) largest.see(load<f32x16>(weights[r] + j));
            unit[r] = largest.get() / 32767;
            const float inverse = unit[r] > 0 ? 1 / unit[r] : 0;
            for (int64_t j = 0; j < p.n; j += 16) {
                typedef int16_t i16x16 __attribute__((vector_size(32)));
                const i16x16 w = __builtin_convertvector(to_whole(load<f32x16>(weights[r] + j) * inverse), i16x16);
                std::memcpy(whole[r] + j, &w, 32);
            }
        }
        i32x16 acc[QUERIES][VECTORS];
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < VECTORS; i++) acc[r][i] = i32x16{};
        for (int64_t j = 0; j < p.n; j += 2) {
            const int8_t *a = p.v + j * p.v_stride, *b = j + 1 < p.n ? a + p.v_stride : a;
            __m512i pairs[VECTORS];
            for (int i = 0; i < VECTORS / 2; i++) {
                const __m512i x = _mm512_cvtepi8_epi16(load<__m256i>(a + 32 * i)), y = _mm512_cvtepi8_epi16(load<__m256i>(b + 32 * i));
                pairs[2 * i] = _mm512_unpacklo_epi16(x, y), pairs[2 * i + 1] = _mm512_unpackhi_epi16(x, y);
            }
            for (int r = 0; r < QUERIES; r++)
                for (int i = 0; i < VECTORS; i++)
                    acc[r][i] = (i32x16)_mm512_dpwssd_epi32((__m512i)acc[r][i], pairs[i], _mm512_set1_epi32(load<int32_t>(&whole[r][j])));
        }
        for (int r = 0; r < QUERIES; r++)
            for (int i = 0; i < VECTORS; i++)
                for (int lane = 0; lane < 16; lane++)  // unpacking has taken 4 of every 8 entries
                    out[r][i / 2 * 32 + lane / 4 * 8 + i % 2 * 4 + lane % 4] = unit[r] * acc[r][i][lane];
    }
};
template <int QUERIES>
struct Queries<int8_t, 4, QUERIES> : Queries8<4, QUERIES> {
    using Queries8<4, QUERIES>::Queries8;
};
template <int QUERIES>
struct Queries<int8_t, 8, QUERIES> : Queries8<8, QUERIES> {
    using Queries8<8, QUERIES>::Queries8;
};
#endif

template <typename C, int VECTORS, int QUERIES>
void attend_queries(const Piece<C>& p, int64_t first) {
    const Queries<C, VECTORS, QUERIES> queries(p, first);
    float weights[QUERIES][CHUNK];
    f32x16 top[QUERIES];
    for (int r = 0; r < QUERIES; r++) top[r] = f32x16{} - INFINITY;
    i32x16 lane, odd{};  // odd: lanes that met a NaN
    for (int i = 0; i < 16; i++) lane[i] = i;
    for (int64_t s = 0; s < p.n; s += 16) {
        const int64_t count = std::min<int64_t>(16, p.n - s);
        bool any = false;
        for (int r = 0; r < QUERIES; r++) any |= !p.seen[first + r] || std::memchr(p.seen[first + r] + s, 1, count);
        if (!any) {
            for (int r = 0; r < QUERIES; r++) std::fill_n(weights[r] + s, 16, -INFINITY);
            continue;
        }
        f32x16 scores[QUERIES], scale = f32x16{} + 1.0f;
        queries.products(s, count, scores);
        if (p.k_scale) std::memcpy(&scale, p.k_scale + s, count * 4);
        for (int r = 0; r < QUERIES; r++) {
            i32x16 visible = lane < int32_t(count);
            if (p.seen[first + r]) {
                i8x16 mask{};
                std::memcpy(&mask, p.seen[first + r] + s, count);
                visible &= __builtin_convertvector(mask, i32x16) != 0;
            }
            const f32x16 w = visible ? scores[r] * scale : f32x16{} - INFINITY;
            odd |= w != w;
            top[r] = w > top[r] ? w : top[r];
            std::memcpy(weights[r] + s, &w, 64);
        }
    }
    bool nan = false;
    for (int i = 0; i < 16; i++) nan |= odd[i] != 0;
    for (int r = 0; r < QUERIES; r++) {
        float most = -INFINITY;
        for (int i = 0; i < 16; i++) most = std::max(most, top[r][i]);
        f32x16 total{};
        for (int64_t s = 0; s < p.n; s += 16) {
            f32x16 e = most == -INFINITY ? f32x16{} : exp_of(load<f32x16>(weights[r] + s) - most), scale = f32x16{} + 1.0f;
            total += e;
            if (p.v_scale) std::memcpy(&scale, p.v_scale + s, std::min<int64_t>(16, p.n - s) * 4);
            e = e == 0.0f ? e : e * scale;
            std::memcpy(weights[r] + s, &e, 64);
        }
        p.largest[first + r] = most, p.sum[first + r] = nan || most == INFINITY ? NAN : sum_of(total);
    }
    float out[QUERIES][WIDEST];
    queries.values(weights, out);
    for (int r = 0; r < QUERIES; r++) std::memcpy(p.out + (first + r) * p.D, out[r], p.D * sizeof(float));
}

template <typename C>
void attend_piece(const Piece<C>& p) {
    for (int64_t r = 0; r < p.R;) {
        const int64_t left = p.R - r;
        if (p.D == 64 && left >= 4) attend_queries<C, 4, 4>(p, r), r += 4;
        else if (p.D == 64 && left == 3) attend_queries<C, 4, 3>(p, r), r += 3;
        else if (p.D == 64) attend_queries<C, 4, 1>(p, r), r += 1;
        else if (p.D == 128 && left >= 2) attend_queries<C, 8, 2>(p, r), r += 2;
        else if (p.D == 128) attend_queries<C, 8, 1>(p, r), r += 1;
        else attend_queries<C, 0, 1>(p, r), r += 1;
    }
}

inline bool nobody_sees(const std::vector<const bool*>& seen, int64_t key) {
    for (const bool* mask : seen)
        if (!mask || mask[key]) return false;
    return true;
}

template <typename T, typename C>
void attend_to(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, const std::optional<Tensor>& k_scale,
               const std::optional<Tensor>& v_scale, Tensor& y) {
    const int64_t B = q.size(0), H = q.size(1), TOKENS = q.size(2), D = q.size(3), KV = k.size(1), S = k.size(2), G = H / KV;
    const int64_t R = G * TOKENS, pieces = (S + CHUNK - 1) / CHUNK, width = D + 2;
    const auto* q_data = (const T*)q.const_data_ptr();
    const auto *k_data = (const C*)k.const_data_ptr(), *v_data = (const C*)v.const_data_ptr();
    const auto* k_scales = k_scale ? (const float*)k_scale->const_data_ptr() : nullptr;
    const auto* v_scales = v_scale ? (const float*)v_scale->const_data_ptr() : nullptr;
    const auto* mask_data = mask ? (const bool*)mask->const_data_ptr() : nullptr;
    const bool mask_by_row = mask && mask->dim() == 4 && mask->size(0) == B && B > 1;
    std::vector<float> parts(B * KV * pieces * R * width);
    torch::stable::parallel_for(0, B * KV * pieces, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> query(R * D);
        std::vector<const bool*> seen(R);
        for (int64_t unit = begin; unit < end; unit++) {
            const int64_t piece = unit % pieces, head = unit / pieces % KV, b = unit / pieces / KV;
            const int64_t first = piece * CHUNK;
            for (int64_t r = 0; r < R; r++) {  // row r: query head head * G + r / T, token r % T
                const int64_t h = head * G + r / TOKENS, t = r % TOKENS;
                const T* from = q_data + b * q.stride(0) + h * q.stride(1) + t * q.stride(2);
                for (int64_t i = 0; i < D; i++) query[r * D + i] = to_float(from[i]) / std::sqrt(float(D));
                seen[r] = mask_data ? mask_data + ((mask_by_row ? b * TOKENS : 0) + t) * S + first : nullptr;
            }
            int64_t n = std::min(CHUNK, S - first);
            while (n > 0 && nobody_sees(seen, n - 1)) n--;  // in a buffer that is filled from the front, the rest is empty
            float* part = &parts[unit * R * width];
            const int64_t scale_at = (b * KV + head) * (k_scale ? k_scale->stride(1) : 0) + first;
            const auto* k_at = k_data + b * k.stride(0) + head * k.stride(1) + first * k.stride(2);
            const auto* v_at = v_data + b * v.stride(0) + head * v.stride(1) + first * v.stride(2);
            attend_piece(Piece<C>{R, D, n, query.data(), k_at, v_at, k.stride(2), v.stride(2), k_scales ? k_scales + scale_at : nullptr,
                                  v_scales ? v_scales + scale_at : nullptr, seen.data(), part, part + R * D, part + R * (D + 1)});
        }
    });
    auto* out = (T*)y.mutable_data_ptr();
    for (int64_t row = 0; row < B * KV * R; row++) {
        const int64_t r = row % R;
        const float* part = &parts[row / R * pieces * R * width];
        float top = -INFINITY, total = 0, sums[WIDEST] = {};
        for (int64_t p = 0; p < pieces; p++) top = std::max(top, part[p * R * width + R * D + r]);
        for (int64_t p = 0; p < pieces && top > -INFINITY; p++) {
            const float* one = part + p * R * width;
            const float weight = std::exp(one[R * D + r] - top);
            total += weight * one[R * (D + 1) + r];
            for (int64_t i = 0; i < D; i++) sums[i] += weight * one[r * D + i];
        }
        for (int64_t i = 0; i < D; i++) from_float(total == 0 ? 0 : sums[i] / total, out[row * D + i]);
    }
}

// q (B, H, T, D), k and v (B, KV, S, D), mask bool (T, S) or (B, 1, T, S) as torch's scaled_dot_product_attention takes them; k
// and v may be 8-bit integers with a float32 scale for each key (B, KV, S). For few queries: the work is to read k and v once.
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<Tensor> mask, std::optional<Tensor> k_scale,
              std::optional<Tensor> v_scale) {
    Tensor y = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), q.size(3)});
    const bool whole = q.scalar_type() == torch::headeronly::ScalarType::Float;
    if (k_scale && whole) attend_to<float, int8_t>(q, k, v, mask, k_scale, v_scale, y);
    else if (k_scale) attend_to<bf16, int8_t>(q, k, v, mask, k_scale, v_scale, y);
    else if (whole) attend_to<float, float>(q, k, v, mask, k_scale, v_scale, y);
    else attend_to<bf16, bf16>(q, k, v, mask, k_scale, v_scale, y);
    return y;
}

}  // namespace

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
