// Attention of many queries: matrix products with panels of keys and of values. No more than CHUNK scores of a query exist at
// a time, as in flash attention (arXiv:2205.14135).

#pragma once

#include "attention.h"
#include "border.h"
#include "matrix.h"
#include "panels.h"

namespace {

constexpr int64_t FEW_QUERIES = 16;
constexpr int64_t QUERIES = 96;  // queries of a key/value head that share every panel

// 16 keys as a panel of `inputs` inputs, zero beyond n and D. bfloat16 represents integers of 8 bits exactly.
inline void key_panel(const bf16* k, int64_t n, int64_t stride, int64_t D, int64_t inputs, bf16*, uint32_t* panel) {
    panel_of(k, n, D, stride, inputs, panel);
}
inline void key_panel(const int8_t* k, int64_t n, int64_t stride, int64_t D, int64_t inputs, bf16*, uint32_t* panel) {
    bf16 rows[ROWS * WIDEST];
    for (int64_t r = 0; r < std::min(ROWS, n); r++)
        for (int64_t i = 0; i < D; i += 16) store(widen(k + r * stride + i), rows + r * D + i);
    panel_of(rows, n, D, D, inputs, panel);
}
template <typename C>
inline void key_panel(const C* k, int64_t n, int64_t stride, int64_t D, int64_t inputs, float*, uint32_t* panel) {
    for (int64_t i = 0; i < inputs; i += 16, panel += 256) {
        u32x16 keys[16] = {};
        for (int64_t r = 0; r < std::min(ROWS, n) && i < D; r++) keys[r] = (u32x16)widen(k + r * stride + i);
        transpose(keys);
        std::memcpy(panel, keys, sizeof keys);
    }
}

// 16 entries of n values as a panel: for every value, or every 2 values in bfloat16, 16 entries. Values from n to `inputs` are zero.
template <typename C, typename N>
inline void value_panel(const C* v, int64_t n, int64_t stride, int64_t inputs, N*, uint32_t* panel) {
    for (int64_t s = 0; s < inputs; s += PAIR<N>, panel += 16) {
        u32x16 entries = s < n ? (u32x16)widen(v + s * stride) : u32x16{};
        if (PAIR<N> == 2) entries = entries >> 16 | (s + 1 < n ? (u32x16)widen(v + (s + 1) * stride) : u32x16{});
        std::memcpy(panel, &entries, 64);
    }
}

// The state of `rows` queries (D) of a head: for each one, its sum of exp(score - largest) v, and the sum of exp(score - largest).
struct Softmax {
    float largest[QUERIES], total[QUERIES];
    float out[QUERIES * WIDEST];

    // Adds n keys to row r: replaces their scores by weights, which are rounded to N, and scales what was summed before.
    template <typename N>
    void add(int64_t r, int64_t n, int64_t D, const float* scores, float scale, const bool* seen, const float* k_scale, const float* v_scale, N* weights) {
        floats w[CHUNK / LANES], top = floats{} + largest[r];
        for (int64_t s = 0; s < n; s += LANES) {
            ints visible = load<ints>(&LANE_NUMBERS) < int32_t(n - s);
            const int64_t count = std::min(LANES, n - s);
            floats x = load<floats>(scores + s) * scale, scale_of_key = floats{} + 1.0f;
            if (k_scale) scale_of_key = widen_some<floats>(k_scale + s, count);
            if (seen) visible &= widen_some<floats>((const int8_t*)seen + s, count) != 0.0f;
            x *= scale_of_key;
            x = x > -INFINITY ? x : floats{} + NAN;  // finite numbers can't produce -inf
            x = visible ? x : floats{} - INFINITY;
            top = x > top ? x : top;
            w[s / LANES] = x;
        }
        float most = -INFINITY;
        for (int i = 0; i < LANES; i++) most = std::max(most, top[i]);
        const float base = most == -INFINITY ? 0 : most, rest = std::exp(largest[r] - base);
        floats sum[PARTS] = {};
        for (int64_t s = 0; s < n; s += LANES) {
            floats e = exp_of(w[s / LANES] - base), scale_of_value = floats{} + 1.0f;
            sum[s / LANES % PARTS] += e;
            if (v_scale) scale_of_value = widen_some<floats>(v_scale + s, std::min(LANES, n - s));
            store(e == 0.0f ? e : e * scale_of_value, weights + s);
        }
        largest[r] = most, total[r] = total[r] * rest + sum_of(load<f32x16>(sum));
        for (int64_t i = 0; i < D && rest != 1; i++) out[r * D + i] *= rest;
    }
};

// N: of queries, weights and results, float or bf16; C: of keys and values
template <typename N, typename C>
void attend_many(const Attention& a) {
    const int64_t D = a.D, R = a.queries(), blocks = (R + QUERIES - 1) / QUERIES, inputs = (D + 31) / 32 * 32, stride = inputs + 32;
    for_each_unit(a.B * a.KV * blocks, [&](int64_t unit) {
        const int64_t first = unit % blocks * QUERIES, kv = unit / blocks % a.KV, b = unit / blocks / a.KV, n = std::min(QUERIES, R - first);
        const int64_t rows = (n + 15) / 16 * 16;
        thread_local std::vector<N> query, weights;
        thread_local std::vector<uint32_t> panels;
        thread_local std::vector<float> sums;
        thread_local std::vector<Softmax> states;  // in a vector, since a thread that gets no memory for its variables ends the process
        states.resize(1);
        Softmax& state = states[0];
        query.assign(QUERIES * stride, N{}), weights.assign(QUERIES * (CHUNK + 32), N{});
        panels.resize(CHUNK * std::max(inputs, WIDEST) / PAIR<N>), sums.resize(QUERIES * std::max(CHUNK, WIDEST));
        const bool* seen[QUERIES];
        int64_t end = a.mask ? 0 : a.S;  // keys from here on are seen by no query
        for (int64_t r = 0; r < n; r++) {
            const N* from = a.query<N>(b, kv, first + r);
            float spread[WIDEST];
            for (int64_t i = 0; i < D && a.keys.scales; i++) spread[i] = to_float(from[i]);
            if (a.keys.scales) hadamard(spread, D);  // as the keys were
            for (int64_t i = 0; i < D && a.keys.scales; i += 16) store(load<f32x16>(spread + i), &query[r * stride + i]);
            if (!a.keys.scales) std::memcpy(&query[r * stride], from, D * sizeof(N));
            seen[r] = a.seen(b, first + r);
            if (const void* last = seen[r] ? memrchr(seen[r], 1, a.S) : nullptr) end = std::max(end, (const bool*)last - seen[r] + 1);
            state.largest[r] = -INFINITY, state.total[r] = 0;
        }
        std::fill_n(state.out, n * D, 0.0f);
        for (int64_t s = 0; s < end; s += CHUNK) {
            const int64_t keys = std::min(CHUNK, end - s), key_panels = (keys + 31) / 32 * 2, value_panels = (D + 31) / 32 * 2;
            const int64_t of_keys = inputs * 16 / PAIR<N>, of_values = key_panels * 256 / PAIR<N>;  // words of a panel
            for (int64_t p = 0; p < key_panels; p++)
                key_panel(a.keys.at<const C>(b, kv, s + 16 * p), keys - 16 * p, a.keys.slot, D, inputs, query.data(), &panels[p * of_keys]);
            matrix_product(query.data(), stride, rows, panels.data(), inputs, key_panels, sums.data());
            for (int64_t r = 0; r < n; r++)
                state.add(r, keys, D, &sums[r * key_panels * 16], 1 / std::sqrt(float(D)), seen[r] ? seen[r] + s : nullptr, a.keys.scale(b, kv, s),
                          a.values.scale(b, kv, s), &weights[r * (CHUNK + 32)]);
            for (int64_t p = 0; p < value_panels; p++) {
                if (16 * p < D) value_panel(a.values.at<const C>(b, kv, s) + 16 * p, keys, a.values.slot, key_panels * 16, query.data(), &panels[p * of_values]);
                else std::fill_n(&panels[p * of_values], of_values, 0);
            }
            matrix_product(weights.data(), CHUNK + 32, rows, panels.data(), key_panels * 16, value_panels, sums.data());
            for (int64_t r = 0; r < n; r++)
                for (int64_t i = 0; i < D; i++) state.out[r * D + i] += sums[r * value_panels * 16 + i];
        }
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < D; i += 16)
                store(state.total[r] == 0 ? f32x16{} : load<f32x16>(&state.out[r * D + i]) / state.total[r], a.result<N>(b, kv, first + r) + i);
    });
}

template <typename N>
void attend_in(const Attention& a) {
    const bool integers = a.keys.scales, many = a.T > FEW_QUERIES;
    const auto run = many ? integers ? attend_many<N, int8_t> : attend_many<N, N> : integers ? attend_few<N, int8_t> : attend_few<N, N>;
    run(a);
}

}  // namespace
