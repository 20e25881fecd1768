// The tile instructions of AMX in plain C++, for processors without them: a test compiles the kernels with this header.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig fake_loadconfig
#define _tile_release fake_release
#define _tile_loadd(tile, base, stride) fake_move(tile, (char*)(base), stride, true)
#define _tile_stored(tile, base, stride) fake_move(tile, (char*)(base), stride, false)
#define _tile_zero(tile) std::memset(fake_tiles().data[fake_check(tile)], 0, 1024)
#define _tile_dpbf16ps fake_dpbf16ps

struct FakeTiles {
    alignas(64) char data[8][1024];
    bool ready = false;
};
inline FakeTiles& fake_tiles() {
    static thread_local FakeTiles tiles;
    return tiles;
}
inline int fake_check(int tile) {  // a processor would raise a signal
    if (!fake_tiles().ready || tile < 0 || tile > 7) std::abort();
    return tile;
}
inline void fake_loadconfig(const void* config) {
    const auto* bytes = (const uint8_t*)config;
    if (bytes[0] != 1 || bytes[1] != 0) std::abort();
    for (int i = 0; i < 8; i++) {
        uint16_t width;
        std::memcpy(&width, bytes + 16 + 2 * i, 2);
        if (width != 64 || bytes[48 + i] != 16) std::abort();
    }
    std::memset(fake_tiles().data, 0, sizeof fake_tiles().data);
    fake_tiles().ready = true;
}
inline void fake_release() { fake_tiles().ready = false; }
inline void fake_move(int tile, char* base, int64_t stride, bool load) {
    for (int row = 0; row < 16; row++) {
        char* line = fake_tiles().data[fake_check(tile)] + 64 * row;
        if (load) std::memcpy(line, base + row * stride, 64);
        else std::memcpy(base + row * stride, line, 64);
    }
}
inline void fake_numbers(int tile, float* numbers) {  // 16 rows of 32 numbers in bfloat16
    const char* at = fake_tiles().data[fake_check(tile)];
    for (int i = 0; i < 512; i++) {
        uint16_t half;
        std::memcpy(&half, at + 2 * i, 2);
        const uint32_t bits = uint32_t(half) << 16;
        std::memcpy(numbers + i, &bits, 4);
    }
}
inline void fake_dpbf16ps(int c, int a, int b) {  // c[m][n] += a[m][2k] b[k][2n] + a[m][2k + 1] b[k][2n + 1]
    float x[512], y[512], *sums = (float*)fake_tiles().data[fake_check(c)];
    fake_numbers(a, x), fake_numbers(b, y);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 2; i++) sums[16 * m + n] += x[32 * m + 2 * k + i] * y[32 * k + 2 * n + i];
}
