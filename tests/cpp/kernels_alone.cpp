// Runs the kernels on fixed inputs, without torch and without Python, and writes their results.
//
//     kernels_alone [THREADS] > FILE
//
// A result is a line with its name, its type and its sizes, and then its numbers. tests/test_arm.py compares the results of two builds.

#include <cstdio>
#include <string>

#include "../../llama/engine/cpp/attention.cpp"
#include "../../llama/engine/cpp/formats.cpp"
#include "../../llama/engine/cpp/layers.h"
#include "../../llama/engine/cpp/pack.h"
#include "../../llama/engine/cpp/rounding.h"

int64_t torch_threads() { return torch::stable::get_num_threads(); }

using enum torch::headeronly::ScalarType;
using torch::headeronly::ScalarType;
typedef std::vector<int64_t> Axes;

namespace {

constexpr const char* NAMES[] = {"uint8", "int8", "int64", "float32", "bfloat16", "bool"};

void write(const std::string& name, const Tensor& x) {
    std::printf("%s|%s|", name.c_str(), NAMES[int(x.scalar_type())]);
    for (int64_t i = 0; i < x.dim(); i++) std::printf("%s%lld", i ? "," : "", (long long)x.size(i));
    std::printf("\n");
    std::fwrite(x.const_data_ptr(), 1, x.bytes(), stdout);
}

uint32_t random_bits() {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 40);
}

// Multiples of 2^-23 between -3 and 3, around 0. Every machine computes the same ones.
float random_number() {
    int64_t sum = 0;
    for (int i = 0; i < 3; i++) sum += int64_t(random_bits()) - (1 << 23);
    return float(sum) / (1 << 23);
}

Tensor random_tensor(Axes sizes, ScalarType type) {
    Tensor x(sizes, type);
    for (int64_t i = 0; i < x.numel(); i++) {
        if (type == Float) ((float*)x.mutable_data_ptr())[i] = random_number();
        else if (type == BFloat16) from_float(random_number(), ((bf16*)x.mutable_data_ptr())[i]);
        else if (type == Bool) ((bool*)x.mutable_data_ptr())[i] = random_bits() % 4;
        else ((uint8_t*)x.mutable_data_ptr())[i] = uint8_t(random_bits());
    }
    return x;
}

// Integers between low and high. The first ones of every group are low and high, so that scales are 1.
Tensor integers(int64_t rows, int64_t columns, int64_t group, int low, int high) {
    Tensor x({rows, columns}, Float);
    for (int64_t i = 0; i < x.numel(); i++) {
        const int64_t k = i % columns % group;
        ((float*)x.mutable_data_ptr())[i] = float(k == 0 ? high : k == 1 ? low : low + int(random_bits() % (high - low + 1)));
    }
    return x;
}

std::string name_of(const Kind& kind) {
    return std::to_string(kind.bits) + " bits, group " + std::to_string(kind.group) + (kind.offset ? ", offset" : "") +
           (kind.codebook ? ", codebook" : "") + (kind.levels ? ", levels" : "");
}

// The panel of a tile. `linear_tiles` multiplies panels only with AMX.
Tensor panel_of_tile(const uint8_t* tile, int64_t K, const Kind& kind) {
    const Shape shape = kind.shape(K);
    const int64_t inputs = (shape.groups * shape.group + 31) / 32 * 32;
    Tensor panel({inputs, 16}, BFloat16);
    const auto run = with_format(kind.bits, kind.group, kind.offset, kind.codebook, kind.levels, []<Format F>() { return panel_from<F>; });
    run(tile, shape, 0, shape.groups, inputs, (uint32_t*)panel.mutable_data_ptr());
    return panel;
}

// Tiles of a weight (37, 200) with random bits, and float16 numbers between 1/4 and 1/2 with any sign.
Tensor random_tiles(const Kind& kind) {
    const Shape shape = kind.shape(200);
    Tensor tiles = random_tensor({3, shape.tile}, Byte);
    const int64_t numbers = 32 * (1 + kind.offset), count = shape.groups * shape.group / (kind.levels ? BLOCK : shape.group);
    for (int64_t t = 0; t < 3; t++) {
        auto* tile = (uint8_t*)tiles.mutable_data_ptr() + t * shape.tile;
        for (int64_t b = 0; b < count; b++)
            for (int64_t i = 1; i < numbers; i += 2) {
                uint8_t& high = tile[b * shape.stride + (kind.levels ? i : shape.stride - numbers + i)];
                high = 0x34 | (high & 0x83);
            }
        for (int64_t i = 16; kind.codebook && i < 64; i++) tile[shape.tile - 64 + i] = tile[shape.tile - 64 + i % 16];
    }
    return tiles;
}

void write_products(const std::string& name, const Tensor& tiles, const Kind& kind, ScalarType type) {
    const auto [bits, group, offset, codebook, levels] = kind;
    for (int64_t M : {1, 2, 3, 27}) {
        const Tensor x = random_tensor({M, 200}, type);
        write("product, " + name + ", rows " + std::to_string(M), linear_tiles(x, tiles, bits, group, offset, 37, codebook, levels));
    }
    if (type == Float) write("panel, " + name, panel_of_tile((const uint8_t*)tiles.const_data_ptr(), 200, kind));
}

void weights_as_in_files() {
    for (const Kind& kind : {Kind{5, 32, false}, {5, 32, true}, {4, 16, false, true}, {4, 32, false, true}, {4, 32, false, true, true},
                             {2, 16, true, false, true}, {3, 16, false, false, true}, {4, 32, true, false, true}, {5, 32, true, false, true},
                             {6, 16, false, false, true}})
        write_products(name_of(kind), random_tiles(kind), kind, Float);
}

void weights_in_few_bits() {
    Tensor clips({3}, Float);
    for (int i = 0; i < 3; i++) ((float*)clips.mutable_data_ptr())[i] = 1 - 0.125f * i;
    const Tensor one = torch::stable::narrow(clips, 0, 0, 1);
    std::vector<Kind> kinds = {{8, 32, false}, {8, 16, false}, {8, 32, true}, {8, 0, false}};
    for (int64_t group : {16, 32, 64, 128})
        for (bool offset : {false, true}) kinds.push_back({4, group, offset});
    for (const Kind& kind : kinds) {
        const auto [bits, group, offset, codebook, levels] = kind;
        const int64_t width = group ? group : 64;
        for (ScalarType type : {Float, BFloat16}) {
            const std::string name = name_of(kind) + (type == Float ? "" : ", bfloat16");
            const Tensor w = random_tensor({37, 200}, type), tiles = quantize_to_tiles(w, clips, bits, group, offset);
            write("tiles, " + name, tiles);
            write_products(name, tiles, kind, type);
        }
        // With scales of 1, products are integers. Only an exact sum is right.
        const int high = offset ? (1 << bits) - 1 : (1 << (bits - 1)) - 1, low = offset ? 0 : -high;
        const Tensor x = integers(27, 256, width, -127, 127), w = integers(48, 256, width, low, high);
        const Tensor tiles = quantize_to_tiles(w, one, bits, group, offset);
        write("integers x, " + name_of(kind), x), write("integers w, " + name_of(kind), w);
        write("integers y, " + name_of(kind), linear_tiles(x, tiles, bits, group, offset, 48, codebook, levels));
        write("integers y of one row, " + name_of(kind), linear_tiles(torch::stable::narrow(x, 0, 0, 1), tiles, bits, group, offset, 48, codebook, levels));
    }
}

void rows_in_8_bits() {
    const Tensor x = random_tensor({1, 200}, Float);
    const Shape s = Kind{8, 32, false}.shape(200);
    Tensor q({s.groups, s.group}, Char), start({s.groups}, Long), scale({s.groups}, Float), sum({s.groups}, Float);
    std::vector<uint8_t> row(s.groups * (s.group + sizeof(Numbers)));
    to_8_bits((const float*)x.const_data_ptr(), 200, s, Functions{.zero = 1}, row.data());
    const uint8_t* from = row.data();
    for (int64_t g = 0; g < s.groups; g++, from += s.group + sizeof(Numbers)) {
        const auto* numbers = (const Numbers*)(from + s.group);
        std::copy_n(from, s.group, (int8_t*)q.mutable_data_ptr() + g * s.group);
        ((int64_t*)start.mutable_data_ptr())[g] = numbers->start;
        ((float*)scale.mutable_data_ptr())[g] = numbers->scale, ((float*)sum.mutable_data_ptr())[g] = numbers->sum;
    }
    write("quantized x", q), write("sums of quantized x", start), write("scales of x", scale), write("sums of x", sum);
}

void products_in_bfloat16() {
    for (int64_t K : {100, 256})
        for (bool bias : {false, true}) {
            const Tensor x = random_tensor({7, K}, BFloat16), w = random_tensor({30, K}, BFloat16), b = random_tensor({30}, BFloat16);
            write("bfloat16, " + std::to_string(K) + (bias ? ", bias" : ""), linear_bf16(x, w, bias ? std::optional(b) : std::nullopt));
        }
}

void attentions() {
    for (int64_t D : {64, 80, 128})
        for (int64_t T : {1, 3, 40})
            for (ScalarType type : {Float, BFloat16})
                for (bool integers : {false, true}) {
                    const int64_t S = 301;
                    const ScalarType kept = integers ? Char : type;
                    const Tensor q = random_tensor({2, 6, T, D}, type), k = random_tensor({2, 2, S, D}, kept), v = random_tensor({2, 2, S, D}, kept);
                    std::optional<Tensor> mask, k_scale, v_scale;
                    if (T > 1) mask = random_tensor({T, S}, Bool);
                    if (integers) {
                        Tensor scales({2, 2, S}, Float);
                        for (int64_t i = 0; i < scales.numel(); i++) ((float*)scales.mutable_data_ptr())[i] = float(1 + random_bits() % 16) / 1024;
                        k_scale = v_scale = scales;
                    }
                    write("attention, " + std::to_string(D) + ", tokens " + std::to_string(T) + ", " + NAMES[int(type)] + ", " + NAMES[int(kept)],
                          attention(q, k, v, mask, k_scale, v_scale));
                }
}

void rows_of_weights() {
    for (const Kind& kind : {Kind{4, 32, false, true, true}, {2, 16, true, false, true}, {6, 16, false, false, true}, {8, 0}}) {
        Tensor ids({3}, Long), clips({1}, Float);
        *(float*)clips.mutable_data_ptr() = 1;
        const Tensor tiles = kind.group ? random_tiles(kind) : quantize_to_tiles(random_tensor({37, 200}, Float), clips, 8, 0, false);
        for (int i = 0; i < 3; i++) ((int64_t*)ids.mutable_data_ptr())[i] = 18 * i;
        write("rows, " + name_of(kind), rows_of_tiles(tiles, ids, kind.bits, kind.group, kind.offset, 37, 200, kind.codebook, kind.levels));
    }
}

void blocks_of_files() {
    for (const BlockType& type : BLOCK_TYPES) {
        const int64_t columns = 2 * type.inputs();
        const Format& f = type.format;
        Tensor tiles({3, shape_of(columns, f.bits, f.group(), f.offset, f.codebook, f.levels).tile}, Byte);
        pack_blocks(random_tensor({37, 2 * type.bytes}, Byte), type.name, std::nullopt, tiles);
        write(std::string("blocks, ") + type.name, tiles);
    }
}

// Two layers of 4 heads and 2 key/value heads for 2 texts of T tokens after 6 cached ones; the second layer has no RoPE.
void all_layers() {
    const int64_t B = 2, C = 64, D = 16, F = 96, S = 40, L = 2, shapes[WEIGHTS][2] = {{64, C}, {32, C}, {32, C}, {C, 64}, {F, C}, {F, C}, {C, F}};
    for (int64_t T : {1, 3, 30})
        for (bool packed : {false, true})
            for (bool integers : {false, true}) {
                std::vector<Tensor> weights, biases, norms, head_norms, keys, values, scales, offsets;
                Tensor formats({L, WEIGHTS, NUMBERS}, Long), slots({T}, Long), mask({T, S}, Bool), clips({1}, Float);
                *(float*)clips.mutable_data_ptr() = 1;
                for (int64_t i = 0; i < L * WEIGHTS; i++) {
                    const auto [rows, columns] = shapes[i % WEIGHTS];
                    const Tensor w = random_tensor({rows, columns}, BFloat16);
                    weights.push_back(packed ? quantize_to_tiles(w, clips, 8, 32, false) : w);
                    biases.push_back(random_tensor({i % 2 ? rows : 0}, BFloat16));
                    const int64_t numbers[NUMBERS] = {packed ? 8 : 16, packed ? 32 : 0, 0, 0, 0, rows};
                    std::memcpy((int64_t*)formats.mutable_data_ptr() + i * NUMBERS, numbers, sizeof numbers);
                }
                for (int64_t i = 0; i < 2 * L; i++) {
                    norms.push_back(random_tensor({C}, BFloat16)), head_norms.push_back(random_tensor({D}, BFloat16));
                    Tensor kept({B, 2, S, D}, integers ? Char : BFloat16), scale({B, 2, S}, Float);
                    std::memset(kept.mutable_data_ptr(), 0, kept.bytes()), std::memset(scale.mutable_data_ptr(), 0, scale.bytes());
                    (i < L ? keys : values).push_back(kept);
                    if (integers) scales.push_back(scale);
                    if (integers && i < L) offsets.push_back(random_tensor({2, 1, D}, Float));
                }
                for (int64_t t = 0; t < T; t++) {
                    ((int64_t*)slots.mutable_data_ptr())[t] = 6 + t;
                    for (int64_t s = 0; s < S; s++) ((bool*)mask.mutable_data_ptr())[t * S + s] = s <= 6 + t;
                }
                Tensor h = random_tensor({B * T, C}, BFloat16);
                const Tensor cos = random_tensor({T, D / 2}, Float), sin = random_tensor({T, D / 2}, Float);
                layers(h, weights, formats, biases, norms, head_norms, 1e-5, {1, 0}, cos, sin, slots, mask, keys, values, scales, offsets, S);
                const std::string name = ", tokens " + std::to_string(T) + (packed ? ", packed" : "") + (integers ? ", cache in 8 bits" : "");
                write("layers" + name, h), write("keys" + name, keys[0]);
            }
}

}  // namespace

int main(int count, char** arguments) {
    torch::stable::threads = count > 1 ? uint32_t(std::atoi(arguments[1])) : 1;
    weights_in_few_bits();
    weights_as_in_files();
    rows_in_8_bits();
    products_in_bfloat16();
    attentions();
    rows_of_weights();
    blocks_of_files();
    all_layers();
}
