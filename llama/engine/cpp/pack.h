// Packs the blocks of a GGUF file into tiles: the same as a function of READERS (quant/groups.py) followed by quant.tiles.pack.

#pragma once

#include "linear.h"
#include "rounding.h"

namespace {

typedef int8_t Integers[2][16];  // by which the factors of scales and offsets are multiplied, for each group of a block
struct Block {  // of a row, unpacked
    uint8_t quants[BLOCK];
    uint16_t numbers[2];  // scale and offset, or their factors, in float16
    Integers integers;
};

// How a type stores a block: its bytes, and where its parts begin. quant/groups.py explains them.
struct BlockType {
    const char* name;
    int64_t bytes;
    Format format;
    int64_t numbers, low, low_run;       // low bits of quants, in runs of so many bytes (read_runs)
    int64_t high = 0, high_run = 0;      // the other bits; without runs, in the order of the quants
    void (*integers)(const uint8_t* p, Integers& to) = nullptr;
    constexpr int64_t inputs() const { return format.levels ? BLOCK : format.group(); }
};

void integers_of_k(const uint8_t* p, Integers& to) {  // Q4_K and Q5_K
    for (int64_t i = 0; i < 4; i++) {
        const uint8_t a = p[4 + i], b = p[8 + i], c = p[12 + i];
        to[0][i] = a & 63, to[0][4 + i] = (c & 15) | a >> 6 << 4;
        to[1][i] = b & 63, to[1][4 + i] = c >> 4 | b >> 6 << 4;
    }
}
void integers_of_q2_k(const uint8_t* p, Integers& to) {
    for (int64_t i = 0; i < 16; i++) to[0][i] = p[i] & 15, to[1][i] = p[i] >> 4;
}
void integers_of_q3_k(const uint8_t* p, Integers& to) {
    for (int64_t i = 0; i < 16; i++) to[0][i] = ((p[96 + i % 8] >> i / 8 * 4 & 15) | (p[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
}
void integers_of_q6_k(const uint8_t* p, Integers& to) { std::memcpy(to[0], p + 192, 16); }
void integers_of_iq4_xs(const uint8_t* p, Integers& to) {
    for (int64_t i = 0; i < 8; i++) to[0][i] = ((p[4 + i / 2] >> i % 2 * 4 & 15) | (p[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32;
}

constexpr BlockType BLOCK_TYPES[] = {
    {"Q2_K", 84, {.bits = 2, .offset = true, .levels = true}, 80, 16, 32, 0, 0, integers_of_q2_k},
    {"Q3_K", 110, {.bits = 3, .levels = true}, 108, 32, 32, 0, 32, integers_of_q3_k},
    {"Q4_0", 18, {.bits = 4, .inputs = 32}, 0, 2, 16},
    {"Q4_1", 20, {.bits = 4, .offset = true, .inputs = 32}, 0, 4, 16},
    {"Q4_K", 144, {.bits = 4, .offset = true, .levels = true}, 0, 16, 32, 0, 0, integers_of_k},
    {"Q5_0", 22, {.bits = 5}, 0, 6, 16, 2},
    {"Q5_1", 24, {.bits = 5, .offset = true}, 0, 8, 16, 4},
    {"Q5_K", 176, {.bits = 5, .offset = true, .levels = true}, 0, 48, 32, 16, 32, integers_of_k},
    {"Q6_K", 210, {.bits = 6, .levels = true}, 208, 0, 64, 128, 32, integers_of_q6_k},
    {"Q8_0", 34, {.bits = 8, .inputs = 32}, 0, 2, 32},
    {"IQ4_NL", 18, {.bits = 4, .codebook = true, .inputs = 32}, 0, 2, 16},
    {"IQ4_XS", 136, {.bits = 4, .codebook = true, .levels = true}, 0, 8, 16, 0, 0, integers_of_iq4_xs},
};
constexpr int8_t IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Reads n quants of some bits and changes the bits from `shift` on. A run of bytes has the lowest bits of its quants first, then the next ones.
inline void read_runs(const uint8_t* p, int64_t run, int64_t n, int64_t bits, int64_t shift, uint8_t* quants) {
    typedef uint32_t some __attribute__((vector_size(16)));
    for (const uint8_t* const end = quants + n; quants < end; p += run)
        for (int64_t low = 0; low < 8; low += bits)
            for (int64_t i = 0; i < run; i += 16, quants += 16) {
                const some field = load<some>(p + i) >> uint32_t(low) & 0x01010101u * ((1u << bits) - 1);
                const some all = load<some>(quants) ^ field << uint32_t(shift);
                std::memcpy(quants, &all, 16);
            }
}

void read_block(const uint8_t* p, const BlockType& type, Block& to) {
    const Format& f = type.format;
    const int64_t n = type.inputs();
    for (int64_t i = 0; i < n; i += 32) std::memset(to.quants + i, f.bits == 8 ? 128 : 0, 32);  // signed bytes become unsigned
    read_runs(p + type.low, type.low_run, n, f.low(), 0, to.quants);
    if (type.high_run) read_runs(p + type.high, type.high_run, n, f.high(), f.low(), to.quants);
    for (int64_t i = 0; f.bits == 5 && !type.high_run && i < 4; i++) {  // bit j of a byte is bit 4 of quant j
        const uint64_t bits = (p[type.high + i] * 0x0101010101010101u & 0x8040201008040201u) + 0x7f7f7f7f7f7f7f7fu;
        const uint64_t all = load<uint64_t>(to.quants + 8 * i) | (bits >> 3 & 0x1010101010101010u);
        std::memcpy(to.quants + 8 * i, &all, 8);
    }
    if (f.levels) type.integers(p, to.integers);
    for (int64_t i = 0; i < 1 + f.offset; i++) {
        const uint16_t number = load<uint16_t>(p + type.numbers + 2 * i), size = number & 0x7fff;
        to.numbers[i] = (number | (size > 0x7c00) << 9) ^ (f.levels && i) << 15;  // NaN as a conversion makes it; the offset is subtracted
        if (size == 0 || size >= 0x7c00) std::memset(to.integers[i], 0, 16);
    }
    for (int64_t g = 0; f.bits == 2 && g < 16; g++) to.integers[0][g] |= to.integers[1][g] << 4;
}

// Writes a block of 16 rows; groups.h describes the layout.
void write_block(const Block* rows, const BlockType& type, uint8_t* to) {
    const Format& f = type.format;
    const int64_t n = type.inputs(), unit = f.high() ? 32 / f.high() : n, groups = f.levels ? n / f.group() : 0;
    uint8_t* numbers = f.levels ? to : to + n * ROWS * f.bits / 8;
    for (int64_t i = 0; i < 1 + f.offset; i++)
        for (int64_t r = 0; r < ROWS; r++, numbers += 2) std::memcpy(numbers, &rows[r].numbers[i], 2);
    for (int64_t i = 0; i < 1 + (f.offset && f.bits > 2); i++)
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = 0; r < ROWS; r++) *numbers++ = rows[r].integers[i][g];
    if (f.levels) to = numbers;
    for (int64_t part = 0; part < PARTS; part++) {
        floats columns[BLOCK / 4];  // 4 inputs of LANES rows each
        transpose(rows[part * LANES].quants, sizeof(Block), n / 4, columns);
        uint8_t* at = to + 4 * LANES * part;
        const auto write = [&](int64_t first, int64_t bits, int64_t shift) {  // some bits of a unit
            for (int64_t k = first; k < first + unit; k += 32 / bits, at += 64) {
                words all{};
                for (int64_t i = 0; i < 8 / bits; i++)
                    all |= ((words)columns[k / 4 + i] >> uint32_t(shift) & 0x01010101u * ((1u << bits) - 1)) << uint32_t(i * bits);
                std::memcpy(at, &all, sizeof all);
            }
        };
        for (int64_t first = 0; first < n; first += unit) {
            write(first, f.low(), 0);
            if (f.high()) write(first, f.high(), f.low());
        }
    }
}

// Packs rows of blocks (rows, bytes), or these rows in another order (n), into tiles.
void pack_blocks(const Tensor& raw, std::string name, std::optional<Tensor> order, Tensor out) {
    const auto* type = std::find_if(std::begin(BLOCK_TYPES), std::end(BLOCK_TYPES), [&](const BlockType& one) { return name == one.name; });
    require(type != std::end(BLOCK_TYPES) && raw.dim() == 2 && raw.size(1) % type->bytes == 0, "complete blocks of a known type");
    const int64_t count = raw.size(1) / type->bytes, N = order ? order->numel() : raw.size(0), stride = raw.stride(0);
    const Format& f = type->format;
    const Shape s = shape_of(count * type->inputs(), f.bits, f.group(), f.offset, f.codebook, f.levels);
    check_rows(raw, "blocks", ScalarType::Byte, {raw.size(0), raw.size(1)});
    check(out, "tiles", ScalarType::Byte, {(N + ROWS - 1) / ROWS, s.tile});
    if (order) check(*order, "the order of rows", ScalarType::Long, {N});
    const auto* rows = order ? (const int64_t*)order->const_data_ptr() : nullptr;
    for (int64_t i = 0; rows && i < N; i++) require(rows[i] >= 0 && rows[i] < raw.size(0), "numbers of rows");
    auto* tiles = (uint8_t*)out.mutable_data_ptr();
    for_each_part(out.size(0), ROWS * raw.size(1), [&](int64_t t) {
        Block blocks[ROWS]{};
        for (Block& block : blocks) std::memset(block.quants, f.codebook || f.offset ? 0 : f.middle(), BLOCK);  // of rows beyond the last
        for (int64_t b = 0; b < count; b++) {
            for (int64_t r = 0, n = t * ROWS; r < ROWS && n < N; r++, n++)
                read_block((const uint8_t*)raw.const_data_ptr() + (rows ? rows[n] : n) * stride + b * type->bytes, *type, blocks[r]);
            write_block(blocks, *type, tiles + t * s.tile + b * s.stride);
        }
        for (int64_t i = 0; f.codebook && i < 64; i++) tiles[(t + 1) * s.tile - 64 + i] = IQ4_VALUES[i % 16] + 128;
    });
}

}  // namespace
