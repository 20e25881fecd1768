// Packs the blocks of a GGUF file into tiles: the same as a function of READERS (quant/groups.py) followed by quant.tiles.pack.

#pragma once

#include "linear.h"
#include "rounding.h"

namespace {

// A block of a row, unpacked: 32 or 256 unsigned integers, and the float16 numbers and the integers that a tile has for them.
struct Block {
    uint8_t quants[BLOCK];
    uint16_t numbers[2];
    int8_t integers[2][16];
};

// Adds n bytes as 8 n / bits quants, shifted to the left: the lowest bits of every byte, then the next ones.
inline void add_fields(const uint8_t* from, int64_t n, int bits, int shift, uint8_t* quants) {
    typedef uint32_t some __attribute__((vector_size(16)));
    for (int f = 0; f < 8; f += bits)
        for (int64_t i = 0; i < n; i += 16, quants += 16) {
            const some field = load<some>(from + i) >> uint32_t(f) & 0x01010101u * ((1u << bits) - 1);
            const some all = load<some>(quants) | field << uint32_t(shift);
            std::memcpy(quants, &all, 16);
        }
}

// What the blocks contain: quant/groups.py. The quants are 0 before.
template <int BITS, bool OFFSET>
void read_32(const uint8_t* p, Block& to) {
    std::memcpy(to.numbers, p, 2 * (1 + OFFSET));
    p += 2 * (1 + OFFSET);
    if (BITS == 8) {
        for (int64_t i = 0; i < 32; i++) to.quants[i] = p[i] ^ 128;
        return;
    }
    for (int64_t i = 0; BITS == 5 && i < 32; i++) to.quants[i] = (load<uint32_t>(p) >> i & 1) << 4;
    add_fields(p + 4 * (BITS == 5), 16, 4, 0, to.quants);
}
inline void read_factors(const uint8_t* p, Block& to) {  // the offset is subtracted
    std::memcpy(to.numbers, p, 4);
    to.numbers[1] ^= 0x8000;
}
template <int BITS>
void read_k(const uint8_t* p, Block& to) {
    read_factors(p, to);
    for (int64_t i = 0; i < 4; i++) {
        const uint8_t a = p[4 + i], b = p[8 + i], c = p[12 + i];
        to.integers[0][i] = a & 63, to.integers[0][4 + i] = (c & 15) | a >> 6 << 4;
        to.integers[1][i] = b & 63, to.integers[1][4 + i] = c >> 4 | b >> 6 << 4;
    }
    if (BITS == 5) add_fields(p + 16, 32, 1, 4, to.quants);
    for (int64_t i = 0; i < 4; i++) add_fields(p + 16 + 32 * (BITS == 5) + 32 * i, 32, 4, 0, to.quants + 64 * i);
}
inline void read_quarters(const uint8_t* p, int shift, Block& to) {
    for (int64_t i = 0; i < 2; i++) add_fields(p + 32 * i, 32, 2, shift, to.quants + 128 * i);
}
inline void read_q2_k(const uint8_t* p, Block& to) {
    for (int64_t i = 0; i < 16; i++) to.integers[0][i] = p[i] & 15, to.integers[1][i] = p[i] >> 4;
    read_quarters(p + 16, 0, to);
    read_factors(p + 80, to);
}
inline void read_q3_k(const uint8_t* p, Block& to) {
    add_fields(p, 32, 1, 2, to.quants);
    read_quarters(p + 32, 0, to);
    for (int64_t i = 0; i < 16; i++)
        to.integers[0][i] = ((p[96 + i % 8] >> i / 8 * 4 & 15) | (p[104 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
    std::memcpy(to.numbers, p + 108, 2);
}
inline void read_q6_k(const uint8_t* p, Block& to) {
    for (int64_t i = 0; i < 2; i++) add_fields(p + 64 * i, 64, 4, 0, to.quants + 128 * i);
    read_quarters(p + 128, 4, to);
    std::memcpy(to.integers[0], p + 192, 16);
    std::memcpy(to.numbers, p + 208, 2);
}
inline void read_iq4_xs(const uint8_t* p, Block& to) {
    std::memcpy(to.numbers, p, 2);
    for (int64_t i = 0; i < 8; i++)
        to.integers[0][i] = ((p[4 + i / 2] >> i % 2 * 4 & 15) | (load<uint16_t>(p + 2) >> 2 * i & 3) << 4) - 32;
    for (int64_t i = 0; i < 8; i++) add_fields(p + 8 + 16 * i, 16, 4, 0, to.quants + 32 * i);
}

// A type of blocks: their bytes, and the format of a weight that consists of them.
struct BlockType {
    const char* name;
    int64_t bytes;
    Kind kind;
    void (*read)(const uint8_t* p, Block& to);

    int64_t inputs() const { return kind.levels ? BLOCK : kind.group; }
};
constexpr BlockType BLOCK_TYPES[] = {
    {"Q2_K", 84, {2, 16, true, false, true}, read_q2_k},    {"Q3_K", 110, {3, 16, false, false, true}, read_q3_k},
    {"Q4_0", 18, {4, 32}, read_32<4, false>},               {"Q4_1", 20, {4, 32, true}, read_32<4, true>},
    {"Q4_K", 144, {4, 32, true, false, true}, read_k<4>},   {"Q5_0", 22, {5, 32}, read_32<5, false>},
    {"Q5_1", 24, {5, 32, true}, read_32<5, true>},          {"Q5_K", 176, {5, 32, true, false, true}, read_k<5>},
    {"Q6_K", 210, {6, 16, false, false, true}, read_q6_k},  {"Q8_0", 34, {8, 32}, read_32<8, false>},
    {"IQ4_NL", 18, {4, 32, false, true}, read_32<4, false>}, {"IQ4_XS", 136, {4, 32, false, true, true}, read_iq4_xs},
};
constexpr int8_t IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Writes one block of 16 rows.
inline void write_block(const Block* rows, const Kind& kind, int64_t inputs, uint8_t* to) {
    const int64_t low = kind.bits == 8 ? 8 : kind.bits >= 4 ? 4 : 2, high = kind.bits - low, unit = high ? 32 / high : inputs;
    const int64_t groups = kind.levels ? inputs / kind.group : 0, weights = inputs * ROWS * kind.bits / 8;
    uint8_t* const numbers = kind.levels ? to : to + weights;
    for (int64_t i = 0; i < 1 + kind.offset; i++)
        for (int64_t r = 0; r < ROWS; r++) {
            const uint16_t size = rows[r].numbers[i] & 0x7fff, number = rows[r].numbers[i] | (size > 0x7c00) << 9;  // a NaN is quiet
            std::memcpy(numbers + 32 * i + 2 * r, &number, 2);
            for (int64_t g = 0; g < groups; g++) {  // of a factor that is 0 or not finite, 0
                const int8_t integer = size > 0 && size < 0x7c00 ? rows[r].integers[i][g] : 0;
                uint8_t* const at = numbers + 32 * (1 + kind.offset) + g * ROWS + r;
                if (kind.bits == 2 && i) *at |= integer << 4;
                else at[i * groups * ROWS] = integer;
            }
        }
    if (kind.levels) to += 32 * (1 + kind.offset) + groups * ROWS * (1 + (kind.offset && kind.bits > 2));
    for (int part = 0; part < PARTS; part++) {
        floats columns[BLOCK / 4];  // 4 inputs of LANES rows each
        transpose(rows[part * LANES].quants, sizeof(Block), inputs / 4, columns);
        uint8_t* at = to + 4 * LANES * part;
        const auto write = [&](int64_t first, int64_t bits, int64_t lowest) {  // some bits of a unit
            for (int64_t k = first; k < first + unit; k += 32 / bits, at += 64) {
                words together{};
                for (int64_t i = 0; i < 8 / bits; i++)
                    together |= ((words)columns[k / 4 + i] >> uint32_t(lowest) & 0x01010101u * ((1u << bits) - 1)) << uint32_t(i * bits);
                std::memcpy(at, &together, sizeof together);
            }
        };
        for (int64_t first = 0; first < inputs; first += unit) {
            write(first, low, 0);
            if (high) write(first, high, low);
        }
    }
}

// Packs rows of blocks (rows, bytes), or these rows in another order (n), into tiles.
void pack_blocks(const Tensor& raw, std::string type, std::optional<Tensor> order, Tensor out) {
    const auto* known = std::find_if(std::begin(BLOCK_TYPES), std::end(BLOCK_TYPES), [&](const BlockType& one) { return type == one.name; });
    require(known != std::end(BLOCK_TYPES) && raw.dim() == 2 && raw.size(1) % known->bytes == 0, "complete blocks of a known type");
    const int64_t count = raw.size(1) / known->bytes, N = order ? order->numel() : raw.size(0);
    const Kind& kind = known->kind;
    const Shape s = kind.shape(count * known->inputs());
    check_rows(raw, "blocks", ScalarType::Byte, {raw.size(0), raw.size(1)});
    check(out, "tiles", ScalarType::Byte, {(N + ROWS - 1) / ROWS, s.tile});
    if (order) check(*order, "the order of rows", ScalarType::Long, {N});
    const auto* rows = order ? (const int64_t*)order->const_data_ptr() : nullptr;
    for (int64_t i = 0; rows && i < N; i++) require(rows[i] >= 0 && rows[i] < raw.size(0), "numbers of rows");
    const auto* from = (const uint8_t*)raw.const_data_ptr();
    auto* tiles = (uint8_t*)out.mutable_data_ptr();
    const int64_t inputs = known->inputs(), stride = raw.stride(0);
    for_each_part(out.size(0), ROWS * raw.size(1), [&](int64_t t) {
        Block blocks[ROWS] = {};
        for (int64_t b = 0; b < count; b++) {
            for (int64_t r = 0; r < ROWS; r++) {
                const int64_t n = t * ROWS + r;
                std::memset(blocks[r].quants, n < N || kind.offset || kind.codebook ? 0 : 1 << (kind.bits - 1), inputs);
                if (n < N) known->read(from + (rows ? rows[n] : n) * stride + b * known->bytes, blocks[r]);
            }
            write_block(blocks, kind, inputs, tiles + t * s.tile + b * s.stride);
        }
        for (int64_t i = 0; kind.codebook && i < 64; i++) tiles[(t + 1) * s.tile - 64 + i] = IQ4_VALUES[i % 16] + 128;
    });
}

}  // namespace
