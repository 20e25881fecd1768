// Rows of x times a weight (N, K) in few bits, packed in tiles by llama/quant/tiles.py.
//
// A tile is 16 rows of the weight; each row uses one lane of a vector. A vector of 64 bytes has 4 inputs of 16 rows, or parts of the
// bits of more inputs. The bytes of a tile are blocks of inputs, in this order:
//
//     block 0: weights  8 bits: for every 4 inputs, 16 rows x 4 bytes
//                       4 bits: for every 8 inputs, 16 rows x 4 bytes; inputs 0-3 in the low halves, inputs 4-7 in the high halves
//                       2 bits: for every 16 inputs, 16 rows x 4 bytes; inputs 0-3 in the lowest two bits, and so on
//                       5 bits: 32 inputs as in 4 bits, and 64 bytes with their highest bits: inputs 0-3 in the lowest bit, and so on
//                       6 bits: 16 inputs as in 4 bits, and 64 bytes with their highest two bits
//                       3 bits: 32 inputs as in 2 bits, and 64 bytes with their highest bits
//              scale    16 x float16
//              offset   16 x float16, if the format has offsets
//     block 1: the same, and so on
//
// A block is one group of inputs. Or, with two levels of scales, it is 256 inputs in groups of 16 or 32. Then it begins with 16 x float16
// and, if the format has offsets, another 16 x float16: two factors. A signed byte for each group and row follows, by which the first
// factor is multiplied to get the scale, and one for the offset; in 2 bits, both share a byte. The weights come last.
//
// If a row has a single scale, blocks have none, and 16 x float32 follow the last block. With a codebook, the integers of 4 bits are
// indices into 16 values, and 64 bytes follow the last block: the values + 128, four times.
//
// Each row of x is quantized to 8 bits, with a scale for each group of inputs. Then
//
//     y[row] = sum over groups of  scale_w[row] * scale_x * sum_k(w[row, k] * x[k])  +  offset[row] * scale_x * sum_k(x[k])
//
// where w is unsigned, as the instruction vpdpbusd requires, and the inner sum is exact in 32 bits. Four inputs of x are broadcast
// to all lanes, so no sum across lanes is needed, and up to MANY rows of x share every read of the weight. For more than a few rows, weights
// in another form than one level of scales and 4 or 8 bits are widened to bytes, a part of a tile at a time, once for up to 96 rows.
//
// Nearly all of the time is spent in `Sums::add`.

#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vectors.h"

// A row of x in 8 bits: for each group, its inputs as bytes, or as pairs of 16-bit numbers (Functions::pairs), and then these numbers. All of it
// lies together, since a row in several arrays takes twice the time. `start` subtracts the zero point of unsigned weights:
// sum((w - zero) x) = sum(w x) - zero sum(x).
struct Numbers {
    float scale, sum;  // sum: of x times scale
    int32_t start;
};
struct Rows {
    const uint8_t* x;
    int64_t stride;  // bytes of a row
};

struct Shape {
    int64_t groups, group;  // the groups of a row, and their inputs; with two levels of scales, groups of complete blocks
    int64_t stride, tile;   // bytes of a block and of a tile
};

// The functions for a format: they belong to no dtype of x, so each of them is compiled once.
struct Functions {
    int32_t zero;  // what the integer dot products count as 0
    bool pairs;    // x is used in 16 bits (Sums::PAIRS)
    bool halves;   // a start is two numbers in 16 bits (Sums::HALVES)
    void (*one_row)(const uint8_t* tile, int64_t apart, const Shape& s, const Rows& x, f32x16* y);
    struct {
        int64_t count;
        void (*run)(const uint8_t* tile, int64_t apart, const Shape& s, const Rows& x, f32x16* y, bool add);
    } rows[5];
    void (*widen)(const uint8_t* tile, const Shape& s, int64_t first, int64_t count, uint8_t* wide);  // null: multiplied as it is stored
    const Functions* wide;
    int64_t few;  // rows that are multiplied by the weight as it is stored
    bool offset;
    void (*row)(const uint8_t* tile, const Shape& s, int64_t lane, int64_t K, float* y);
};

// formats.cpp defines it, and compiles the functions of every format: half of the work of compiling the kernels.
const Functions& functions_of(int64_t bits, int64_t group, bool offset, bool codebook, bool levels);

namespace {

constexpr int64_t ROWS = 16;       // rows of a tile
constexpr int64_t BLOCK = 256;     // inputs of a block with two levels of scales
constexpr int64_t MOST_ROWS = 96;  // rows of x that a thread multiplies by a tile before it takes other work
constexpr int64_t WIDENED = 1024;  // inputs that are widened at once, so that they stay in the first cache
constexpr int MANY = PARTS == 2 ? 4 : 12;  // rows of x whose sums fit in the registers
// Tiles that are read at once for one row of x (only one kind of processor needs two), and bytes that few rows prefetch ahead of the
// processor's own prefetcher.
#if defined(__AMX_BF16__)
constexpr int STREAMS = 2;
constexpr int64_t AHEAD = 1024;
#else
constexpr int STREAMS = 1;
constexpr int64_t AHEAD = 2048;
#endif

// How a weight is stored.
struct Format {
    int bits;               // 2, 3, 4, 5, 6 or 8
    bool offset = false;    // whether a group has an offset
    bool per_row = false;   // whether a row has one scale
    bool codebook = false;  // whether the integers are indices into 16 values
    bool levels = false;    // whether there are two levels of scales
    bool wide = false;      // widened from another form: integers are bytes, scales and offsets float32
    int inputs = 0;         // of a group, if the compiler is to know their number and the bits do not determine it
    bool operator==(const Format&) const = default;

    constexpr int low() const { return wide || bits == 8 ? 8 : bits >= 4 ? 4 : 2; }
    constexpr int high() const { return wide ? 0 : bits - low(); }
    constexpr bool bytes() const { return bits == 8 || codebook; }
    constexpr bool narrow() const { return codebook || levels || (bits != 4 && bits != 8); }  // to be widened for several rows
    constexpr int64_t few() const { return PARTS != 2 ? 8 : high() ? 6 : 12; }  // rows for which widening does not pay
    constexpr int together() const { return bits == 3 ? 2 : 1; }  // groups that share a vector of high bits
    constexpr int64_t group() const { return inputs ? inputs : bits == 2 || bits == 3 || bits == 6 ? 16 : levels || bits == 5 ? 32 : 0; }  // 0: any
    constexpr int32_t middle() const { return offset && !centered() ? 0 : codebook ? 128 : 1 << (bits - 1); }  // the integer that means 0
    constexpr bool centered() const { return offset && bits == 5; }  // the product moves offsets to the middle, so that more sums fit in 16 bits
};

// Sums of products of unsigned bytes of w and signed bytes of x: add(sums, w, x) adds, in each lane, the products of 4 inputs. After at most
// MOST calls, total(sums) are the sums in 32 bits; MOST 0 is no limit. With PAIRS, w and x are 2 inputs in 16 bits. With HALVES, sums are in
// 16 bits, and so are starts: one for inputs 0 and 1 of every 4, one for inputs 2 and 3. With SIGNED8, weights of 8 bits (Format::bytes) are
// used as signed (w - 128): ARM's first instruction for this multiplies signed bytes only.
struct Sums32 {
    static constexpr bool PAIRS = false, HALVES = false;
    static constexpr int64_t MOST = 0;
    static ints total(ints sums) { return sums; }
};
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SIGNED8 = true;
#else
constexpr bool SIGNED8 = false;
#endif
#if defined(__AVX512VNNI__)
template <Format F>
struct Sums : Sums32 {
    static ints add(ints sums, words w, int32_t x) { return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x)); }
};
#elif defined(__AVX2__)
template <Format F>
struct Sums {  // AVX2 adds two products in 16 bits. Bytes would overflow, so they are pairs; of fewer bits, MOST sums fit in 16 bits
    static constexpr int64_t LARGEST = (1 << F.bits) - 1, CENTERED = 32767 / (2 * 127 * (LARGEST / 2 + 1));
    static constexpr bool PAIRS = F.bytes(), HALVES = !PAIRS && F.middle() && F.group() && F.group() <= 4 * CENTERED;
    static constexpr int64_t MOST = PAIRS ? 0 : HALVES ? CENTERED : 32767 / (2 * 127 * LARGEST);
    static ints add(ints sums, words w, int32_t x) {  // in assembly, since GCC would move sums from register to register, and to memory
        const __m256i s = _mm256_set1_epi32(x), products = PAIRS ? _mm256_madd_epi16((__m256i)w, s) : _mm256_maddubs_epi16((__m256i)w, s);
        if (PAIRS) asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
        else asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(products));
        return sums;
    }
    static ints total(ints sums) { return PAIRS ? sums : (ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
};
#else
template <Format F>
struct Sums : Sums32 {
    static ints add(ints sums, words w, int32_t x) {
        const auto bytes = vreinterpretq_s8_s32(vdupq_n_s32(x));
#if defined(__ARM_FEATURE_MATMUL_INT8)
        return (ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)w, bytes);
#else
        return (ints)vdotq_s32((int32x4_t)sums, (int8x16_t)(F.bytes() ? w ^ 0x80808080u : w), bytes);
#endif
    }
};
#endif

// 16 values, and their bytes for the indices in w.
struct Codebook {
    words values;
    explicit Codebook(const uint8_t* p) : values(load<words>(p)) {}
    words operator()(words w) const {
#if defined(__AVX512BW__)
        return (words)_mm512_shuffle_epi8((__m512i)values, (__m512i)w);
#elif defined(__AVX2__)
        return (words)_mm256_shuffle_epi8((__m256i)values, (__m256i)w);
#else
        return (words)vqtbl1q_u8((uint8x16_t)values, (uint8x16_t)w);
#endif
    }
};

template <Format F>
constexpr int32_t zero_of() {  // what the integer dot products count as 0
    return F.middle() - (F.bytes() && SIGNED8 ? 128 : 0);
}
template <Format F>
inline int64_t group_of(const Shape& s) {
    return F.group() ? F.group() : s.group;
}
template <Format F>
inline int64_t groups_of_a_block(const Shape& s) {
    return F.levels ? BLOCK / group_of<F>(s) : 1;
}
template <Format F>
inline int64_t x_bytes(const Shape& s) {  // of a group of x
    return group_of<F>(s) * (1 + Sums<F>::PAIRS) + sizeof(Numbers);
}

// Group i of a block: where its bits are, and its scale and offset.
template <Format F>
struct Group {
    const uint8_t* low;
    const uint8_t* high;
    words high_bits[PARTS];
    floats scale[PARTS], offset[PARTS]{};

    Group() = default;
    Group(const uint8_t* block, const Shape& s, int64_t i, const floats (*factors)[PARTS]) {
        const int64_t inputs = group_of<F>(s), count = groups_of_a_block<F>(s), together = F.together();
        const int64_t low_bytes = inputs * ROWS * F.low() / 8, bytes = inputs * ROWS * (F.low() + F.high()) / 8;
        const uint8_t* weights = block + (F.levels ? s.stride - count * bytes : 0) + i / together * together * bytes;
        low = weights + i % together * low_bytes;
        high = weights + together * low_bytes;
        for (int part = 0; part < PARTS; part++) {
            const int64_t row = part * LANES;
            if (F.high()) high_bits[part] = load<words>(high + 4 * row) >> uint32_t(i % together * 4);
            if (F.levels) {
                const uint8_t* numbers = block + 32 * (1 + F.offset) + i * ROWS + row;
                const chars first = load<chars>(numbers);
                scale[part] = factors[0][part] * to_floats(F.bits == 2 ? first & 15 : first);
                if (F.offset) offset[part] = factors[1][part] * to_floats(F.bits == 2 ? first >> 4 & 15 : load<chars>(numbers + count * ROWS));
            } else if (F.wide) {
                scale[part] = load<floats>(low + bytes + 4 * row);
                if (F.offset) offset[part] = load<floats>(low + bytes + 64 + 4 * row);
            } else {
                scale[part] = F.per_row ? floats{} + 1.0f : load_half(low + bytes + 2 * row);
                if (F.offset) offset[part] = load_half(low + bytes + 32 + 2 * row);
            }
        }
    }

    void center() {
        for (int part = 0; part < PARTS; part++) offset[part] += scale[part] * float(F.middle());
    }
    // Inputs k to k + STEP, unsigned, four in a vector.
    static constexpr int64_t STEP = F.low() == 2 ? 16 : 8;
    void weights(int64_t k, words (*fours)[PARTS]) const {
        constexpr uint32_t MASK = 0x01010101u * ((1 << F.low()) - 1), HIGH = 0x01010101u * (((1 << F.high()) - 1) << F.low());
        const uint8_t* w = low + k * ROWS * F.low() / 8;
        for (int i = 0; i < STEP / 4; i++) {
            const int shift = F.high() * (int(k / 4) + i) - F.low();
            for (int part = 0; part < PARTS; part++) {
                const uint8_t* at = w + 4 * LANES * part;
                fours[i][part] = F.low() == 8 ? load<words>(at + 64 * i) : (load<words>(at) >> uint32_t(i * F.low())) & MASK;
                if (F.high()) fours[i][part] |= (shift < 0 ? high_bits[part] << uint32_t(-shift) : high_bits[part] >> uint32_t(shift)) & HIGH;
            }
        }
    }
    [[gnu::always_inline]] void prefetch(int64_t k) const {  // GCC would drop calls of a function that only prefetches
        for (int64_t i = 0; i < STEP * F.low() / 32; i++) __builtin_prefetch(low + k * ROWS * F.low() / 8 + AHEAD + 64 * i);
        if (F.high() && k == 0) __builtin_prefetch(high + AHEAD);  // of the next
    }
};

template <Format F>
inline void load_factors(const uint8_t* block, const Shape& s, floats (*factors)[PARTS]) {
    if (!F.levels) return;
    for (int i = 0; i < 1 + F.offset; i++)
        for (int part = 0; part < PARTS; part++) factors[i][part] = load_half(block + 32 * i + 2 * LANES * part);
    for (int64_t i = 0; i < 320; i += 64) __builtin_prefetch(block + AHEAD + i);
}

// GROUPS groups, from group i of a block on, of each of TILES tiles, `apart` bytes apart, times the same groups of M rows, added to `total`.
template <Format F, int M, int TILES, int GROUPS>
inline void groups_product(const uint8_t* block, int64_t apart, const Shape& s, int64_t i, const floats (*factors)[2][PARTS], const Codebook& values,
                           const Rows& x, floats (*total)[M][PARTS]) {
    typedef Sums<F> Sum;
    constexpr int CHAINS = M == 1 && F.group() != 16 && PARTS == 1 ? 2 : 1;  // independent sums hide the latency of Sum::add
    constexpr int64_t STEP = Group<F>::STEP, CHUNK = 4 * Sum::MOST / STEP * STEP, BYTES = 1 + Sum::PAIRS;
    constexpr bool IN_SUMS = zero_of<F>() == 0 || Sum::HALVES || !CHUNK;  // sums begin with `start`, or need none
    constexpr int STEPS = M == 1 && STEP == 8 && CHUNK % 16 == 0 ? 2 : 1;  // one row has too few operations for a step of the loop
    const int64_t group = group_of<F>(s), of_group = x_bytes<F>(s);
    ints sums[TILES * GROUPS][M][PARTS]{};
    Group<F> groups[TILES * GROUPS];
    for (int p = 0; p < TILES * GROUPS; p++) {
        const int j = p / GROUPS, next = p % GROUPS;
        groups[p] = Group<F>(block + j * apart + (F.levels ? 0 : next * s.stride), s, F.levels ? i + next : 0, factors[j]);
        if (F.centered() && !F.wide) groups[p].center();
    }
    const auto numbers = [&](int p, int m) { return (const Numbers*)(x.x + m * x.stride + p % GROUPS * of_group + group * BYTES); };
    const auto add = [&](int64_t first, int64_t end) __attribute__((always_inline)) {
        ints acc[TILES * GROUPS][CHAINS][M][PARTS]{};
        for (int p = 0; p < TILES * GROUPS && IN_SUMS && zero_of<F>(); p++)
            for (int m = 0; m < M; m++)
                for (ints& of_part : acc[p][0][m]) of_part += numbers(p, m)->start;
#pragma GCC unroll 2
        for (int64_t some = first; some < end; some += STEPS * STEP)
            for (int64_t i = 0; i < STEPS * TILES * GROUPS; i++) {
                const int64_t p = i % (TILES * GROUPS), k = some + i / (TILES * GROUPS) * STEP;
                if (M <= 4 && !F.wide) groups[p].prefetch(k);
                words fours[STEP / 4][PARTS];
                groups[p].weights(k, fours);
                const uint8_t* const inputs = x.x + p % GROUPS * of_group + k * BYTES;
                for (int n = 0; n < STEP / 4 * BYTES; n++) {
                    words w[PARTS];
                    for (int part = 0; part < PARTS; part++) {
                        w[part] = F.codebook ? values(fours[n / BYTES][part]) : fours[n / BYTES][part];
                        if (Sum::PAIRS) w[part] = (n % 2 ? w[part] >> 8 : w[part]) & 0x00ff00ffu;
                    }
                    for (int m = 0; m < M; m++) {
                        const auto four = load<int32_t>(inputs + m * x.stride + 4 * n);
                        for (int part = 0; part < PARTS; part++) acc[p][n % CHAINS][m][part] = Sum::add(acc[p][n % CHAINS][m][part], w[part], four);
                    }
                }
            }
        for (int p = 0; p < TILES * GROUPS; p++)
            for (int m = 0; m < M; m++)
                for (int part = 0; part < PARTS; part++)
                    for (int n = 0; n < CHAINS; n++) sums[p][m][part] += Sum::total(acc[p][n][m][part]);
    };
    if constexpr (CHUNK) {
        for (int64_t k = 0; k < group; k += CHUNK) add(k, std::min(k + CHUNK, group));
    } else {
        add(0, group);
    }
    for (int p = 0; p < TILES * GROUPS; p++)
        for (int m = 0; m < M; m++) {
            const Numbers* of_x = numbers(p, m);
            for (int part = 0; part < PARTS; part++) {
                floats& to = total[p / GROUPS][m][part];
                const ints sum = IN_SUMS ? sums[p][m][part] : sums[p][m][part] + of_x->start;
                to += __builtin_convertvector(sum, floats) * (F.per_row ? floats{} + of_x->scale : groups[p].scale[part] * of_x->scale);
                if (F.offset) to += groups[p].offset[part] * of_x->sum;
            }
        }
}

// TILES tiles, `apart` bytes apart, GROUPS groups at a time, times M rows of x -> y (TILES, M), or added to y.
template <Format F, int M, int TILES, int GROUPS = 1>
void tile_product(const uint8_t* tile, int64_t apart, const Shape& s, const Rows& rows, f32x16* y, bool add) {
    const uint8_t* const end = tile + s.tile - 64;
    const Codebook values(end);
    floats total[TILES][M][PARTS] = {}, factors[TILES][2][PARTS];
    if (add) std::memcpy(total, y, sizeof total);
    Rows x = rows;
    const int64_t of_block = F.levels ? groups_of_a_block<F>(s) : GROUPS;  // even
    for (int64_t g = 0; g < s.groups; tile += F.levels ? s.stride : GROUPS * s.stride) {
        for (int j = 0; j < TILES; j++) load_factors<F>(tile + j * apart, s, factors[j]);
        if (g + of_block > s.groups) {  // the last of an odd number
            groups_product<F, M, TILES, 1>(tile, apart, s, 0, factors, values, x, total);
            break;
        }
        for (int64_t i = 0; i < of_block; i += GROUPS, g += GROUPS, x.x += GROUPS * x_bytes<F>(s))
            groups_product<F, M, TILES, GROUPS>(tile, apart, s, i, factors, values, x, total);
    }
    for (int j = 0; j < TILES; j++)
        for (int part = 0; part < PARTS; part++) {
            const floats scale = F.per_row ? load<floats>(end + j * apart + 4 * LANES * part) : floats{} + 1.0f;
            for (int m = 0; m < M; m++) {
                const floats product = total[j][m][part] * scale;
                std::memcpy((float*)(y + j * M + m) + LANES * part, &product, sizeof product);
            }
        }
}

// For one row of x. A group in 4 bits has too few operations to hide their latency, so two are multiplied at a time, in one tile or in two.
template <Format F>
void one_row_product(const uint8_t* tile, int64_t apart, const Shape& s, const Rows& x, f32x16* y) {
    tile_product<F, 1, STREAMS, STREAMS == 1 && F.bits < 8 ? 2 : 1>(tile, apart, s, x, y, false);
}

// Widens groups `first` to first + count of a tile to bytes, with float32 scales and offsets: the format wide_form<F>().
template <Format F>
constexpr Format wide_form() {
    return {.bits = F.codebook ? 8 : F.bits, .offset = F.offset, .wide = true, .inputs = int(F.group())};
}
inline Shape wide_shape(int64_t groups, int64_t group, bool offset) {
    const int64_t stride = group * ROWS + 64 * (1 + offset);
    return {groups, group, stride, groups * stride};
}
template <Format F>
void widen_groups(const uint8_t* tile, const Shape& s, int64_t first, int64_t count, uint8_t* wide) {
    const Codebook values(tile + s.tile - 64);
    const int64_t group = group_of<F>(s), per_block = groups_of_a_block<F>(s);
    for (int64_t g = first; g < first + count; g++) {
        const uint8_t* block = tile + g / per_block * s.stride;
        floats factors[2][PARTS];
        load_factors<F>(block, s, factors);
        Group<F> from(block, s, g % per_block, factors);
        if (F.centered()) from.center();
        for (int64_t k = 0; k < group; k += Group<F>::STEP) {
            words fours[Group<F>::STEP / 4][PARTS];
            from.prefetch(k);
            from.weights(k, fours);
            for (auto& four : fours)
                for (words w : four) {
                    if (F.codebook) w = values(w);
                    std::memcpy(wide, &w, sizeof w);
                    wide += sizeof w;
                }
        }
        std::memcpy(wide, from.scale, 64);
        if (F.offset) std::memcpy(wide + 64, from.offset, 64);
        wide += 64 * (1 + F.offset);
    }
}

// Quantizes one row of x (K) to 8 bits, group by group. A nonfinite number makes its group's scale NaN, and so the result.
// In pairs of 16 bits, inputs 0 and 2 stand before inputs 1 and 3, as the bytes of a word of the weight are separated.
template <typename T>
void to_8_bits(const T* x, int64_t K, const Shape& s, const Functions& f, uint8_t* q) {
    for (int64_t g = 0; g < s.groups; g++, x += s.group) {
        const int64_t n = std::clamp<int64_t>(K - g * s.group, 0, s.group);
        T rest[128] = {};  // the last group, padded
        const T* from = n < s.group ? (const T*)std::memcpy(rest, x, n * sizeof(T)) : x;
        Largest<floats> largest;
        for (int64_t i = 0; i < s.group; i += LANES) largest.see(to_floats(from + i));
        const float most = largest.get(), inverse = most > 0 ? std::min(127 / most, 1e38f) : 0;  // denormal numbers become 0
        const bool finite = most < INFINITY;
        ints totals{};
        for (int64_t i = 0; i < s.group; i += LANES) {
            const ints v = finite ? to_integers(to_floats(from + i) * inverse) : ints{};
            totals += v;
            if (f.pairs) {
                int16_t* to = (int16_t*)q;
                for (int64_t j = 0; j < LANES; j++) to[j / 4 * 4 + j % 2 * 2 + j / 2 % 2] = int16_t(v[j]);
            } else {
                const chars bytes = to_chars(v);
                std::memcpy(q, &bytes, LANES);
            }
            q += LANES * (1 + f.pairs);
        }
        int32_t half[2] = {};
        for (int64_t i = 0; i < LANES; i++) half[i / 2 % 2] += totals[i];
        const int32_t total = half[0] + half[1], start = f.halves ? (-f.zero * half[0] & 0xffff) | -f.zero * half[1] * 65536 : -f.zero * total;
        const Numbers numbers{most / 127, most / 127 * total, start};
        std::memcpy(q, &numbers, sizeof numbers);
        q += sizeof numbers;
    }
}

// A linear layer with a packed weight: y (M, N) = x (M, K) times the weight, plus a bias (N) or none.
template <typename T>
struct Packed {
    const uint8_t* tiles;
    int64_t N;
    const T* bias;
    T* y;

    int64_t count() const { return (N + ROWS - 1) / ROWS; }  // tiles
    void write(f32x16 sums, int64_t m, int64_t tile) const {
        const int64_t n = tile * ROWS, some = std::min(ROWS, N - n);
        store(bias ? as_stored<T>(sums) + widen_some(bias + n, some) : sums, y + m * N + n, some);
    }
};

// Multiplies x (M, K) by the weights of several layers, which have the same format and K: x is quantized once, and one loop does all of it.
template <typename T>
void product(const T* x, int64_t M, int64_t K, const Packed<T>* layers, int64_t layer_count, const Shape& s, const Functions& stored) {
    const bool widened = stored.widen && M > stored.few;
    const Functions& f = widened ? *stored.wide : stored;
    const int64_t of_group = s.group * (1 + f.pairs) + sizeof(Numbers);
    const int64_t stride = s.groups * of_group + 64;  // + 64 bytes, so that rows do not map to the same cache lines
    std::vector<uint8_t> q((M + MANY) * stride);
    for_each_unit(M, [&](int64_t m) { to_8_bits(x + m * K, K, s, f, &q[m * stride]); });
    const int64_t streams = M == 1 ? STREAMS : 1, blocks = (M + MOST_ROWS - 1) / MOST_ROWS;
    const auto units = [=](const Packed<T>& layer) { return (layer.count() + streams - 1) / streams * blocks; };
    int64_t total = 0;
    for (int64_t i = 0; i < layer_count; i++) total += units(layers[i]);
    for_each_part(total, streams * s.tile, [&](int64_t unit) {
        const Packed<T>* layer = layers;
        for (int64_t some; unit >= (some = units(*layer)); layer++) unit -= some;
        const int64_t t = unit / blocks * streams;
        const uint8_t* tile = layer->tiles + t * s.tile;
        if (M == 1) {
            const int64_t two = STREAMS == 2 && t + 1 < layer->count();  // a last tile alone is multiplied twice
            f32x16 out[2];
            f.one_row(tile, two * s.tile, s, {q.data(), stride}, out);
            for (int64_t j = 0; j <= two; j++) layer->write(out[j], 0, t + j);
            return;
        }
        const int64_t begin = unit % blocks * MOST_ROWS, end = std::min(M, begin + MOST_ROWS), slice = widened ? WIDENED / s.group : s.groups;
        f32x16 out[MOST_ROWS + 12];
        alignas(64) uint8_t wide[WIDENED * ROWS + WIDENED / 16 * 128];
        Shape shape = s;
        for (int64_t g = 0; g < s.groups; g += slice) {
            if (widened) {
                shape = wide_shape(std::min(slice, s.groups - g), s.group, stored.offset);
                stored.widen(tile, s, g, shape.groups, wide);
            }
            for (int64_t m = begin; m < end;) {
                const auto* best = f.rows;
                while (best->count * 3 > (end - m) * 4 && best[1].run) best++;  // the last rows may be fewer than the function multiplies
                best->run(widened ? wide : tile, 0, shape, {&q[m * stride + g * of_group], stride}, out + m - begin, g > 0);
                m += best->count;
            }
        }
        for (int64_t m = begin; m < end; m++) layer->write(out[m - begin], m, t);
    });
}

// Dequantizes row `lane` of a tile: -> y (K), rounded as groups.py rounds.
template <Format F>
void row_of_tile(const uint8_t* tile, const Shape& s, int64_t lane, int64_t K, float* y) {
    const uint8_t* const end = tile + s.tile - 64;
    const Codebook values(end);
    const int64_t per_block = groups_of_a_block<F>(s);
    floats factors[2][PARTS];
    for (int64_t g = 0; g < s.groups; g++) {
        const uint8_t* block = tile + g / per_block * s.stride;
        load_factors<F>(block, s, factors);
        const Group<F> from(block, s, g % per_block, factors);
        const float scale = F.per_row ? load<float>(end + 4 * lane) : from.scale[lane / LANES][lane % LANES], offset = from.offset[lane / LANES][lane % LANES];
        for (int64_t k = 0; k < group_of<F>(s); k += Group<F>::STEP) {
            words fours[Group<F>::STEP / 4][PARTS];
            from.weights(k, fours);
            for (int64_t i = 0, at = g * s.group + k; i < Group<F>::STEP && at < K; i++, at++) {
                words four = fours[i / 4][lane / LANES];
                if (F.codebook) four = values(four);
                const int32_t quant = four[lane % LANES] >> i % 4 * 8 & 255;
                float product = float(F.offset ? quant : quant - F.middle()) * scale;
                asm("" : "+m"(product));  // the compiler would round only the sum
                y[at] = F.offset ? product + offset : product;
            }
        }
    }
}

constexpr Format FORMATS[] = {
    {.bits = 8, .offset = true, .inputs = 32}, {.bits = 8, .inputs = 32}, {.bits = 4, .offset = true, .inputs = 32}, {.bits = 4, .inputs = 32},
    {.bits = 8, .per_row = true}, {.bits = 8, .offset = true}, {.bits = 8}, {.bits = 4, .offset = true}, {.bits = 4}, {.bits = 5, .offset = true}, {.bits = 5},
    {.bits = 4, .codebook = true}, {.bits = 4, .codebook = true, .levels = true}, {.bits = 4, .offset = true, .levels = true}, {.bits = 6, .levels = true},
    {.bits = 2, .offset = true, .levels = true}, {.bits = 3, .levels = true}, {.bits = 5, .offset = true, .levels = true},
};

// Calls f with one of FORMATS as a template argument.
template <size_t I = 0, typename F>
auto with_format(int64_t bits, int64_t group, bool offset, bool codebook, bool levels, F f) {
    constexpr int inputs = FORMATS[I].inputs;
    if constexpr (I + 1 < std::size(FORMATS))
        if (FORMATS[I] != Format{int(bits), offset, group == 0, codebook, levels, false, inputs} || (inputs && inputs != group))
            return with_format<I + 1>(bits, group, offset, codebook, levels, f);
    return f.template operator()<FORMATS[I]>();
}

// A group of more than 128 inputs would not fit into the buffer of `to_8_bits`.
inline bool is_format(int64_t bits, int64_t group, bool offset, bool codebook, bool levels) {
    const Format wanted{int(bits), offset, group == 0, codebook, levels};
    if (std::find(std::begin(FORMATS), std::end(FORMATS), wanted) == std::end(FORMATS)) return false;
    return wanted.per_row || (wanted.group() ? group == wanted.group() : group > 0 && group <= 128 && group % 16 == 0);
}

inline Shape shape_of(int64_t K, int64_t bits, int64_t group, bool offset, bool codebook, bool levels) {
    const int64_t width = group ? group : 64, count = levels ? BLOCK / width : 1, blocks = (K + count * width - 1) / (count * width);
    const int64_t scales = levels ? count * ROWS * (1 + (offset && bits > 2)) : 0, numbers = group ? 32 * (1 + offset) : 0;
    const int64_t stride = count * width * ROWS * bits / 8 + scales + numbers;
    return {blocks * count, width, stride, blocks * stride + (group == 0 || codebook ? 64 : 0)};
}

}  // namespace
