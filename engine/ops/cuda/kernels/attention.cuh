// One warp's share of flash attention on mma.m16n8k16: 16 query rows against tiles of keys and values in shared memory.
//
// Keys are read as operand B of Q K^T, eight dims of a token a lane; values through transposing ldmatrix as operand B of P V.
// int8 keys and values become exact halves in registers; a key's scale goes onto its score, a value's onto its probability.
// A tile's rows are swizzled so that neither kind of read meets a bank twice.
#pragma once
#include "common.cuh"

// Set by attention.py: DIM (32, 64, 128, 256), KV_INT8.
constexpr int KV_BYTES = KV_INT8 ? 1 : 2;
constexpr int ROW_BYTES = DIM * KV_BYTES, PIECES = ROW_BYTES / 16;
constexpr int TILE_ROW = ROW_BYTES < 128 ? 128 : ROW_BYTES;  // bytes of a token in shared memory
constexpr int GROUPS = DIM / 32, OUT_TILES = DIM / 8;
constexpr float LOG2_E = 1.4426950408889634f;

DEVICE int piece_at(int row, int piece) {
    const int swizzle = KV_INT8 ? ((row & 3) << 1) | ((row >> 2) & 1) : ((row & 1) << 2) | ((row >> 1) & 3);
    return row * TILE_ROW + ((piece ^ swizzle) << 4);
}

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Bytes of two tokens-by-dims int8 to two halves each, exactly: 0x64 over (v + 128) is 1152 + v.
DEVICE unsigned widen(unsigned biased, unsigned pick) { return hsub2(__byte_perm(biased, 0x64646464u, pick), 0x64806480u); }

// TOKENS keys and values of one kv head, into shared memory by `threads` threads; tokens at and past `end` become zeros.
template <int TOKENS>
DEVICE void stage_tile(const Cache& cache, int sequence, int head, int first, int end, unsigned char* keys, unsigned char* values,
                       unsigned short* k_scales, unsigned short* v_scales, int thread, int threads) {
    const long long block = cache.tables[(long long)sequence * cache.table_width + first / BLOCK_TOKENS];
    const long long token = (block * cache.kv_heads + head) * BLOCK_TOKENS + first % BLOCK_TOKENS;
    const unsigned char* k = (const unsigned char*)cache.k + token * ROW_BYTES;
    const unsigned char* v = (const unsigned char*)cache.v + token * ROW_BYTES;
    const unsigned k_to = shared_address(keys), v_to = shared_address(values);
    UNROLL for (int i = thread; i < TOKENS * PIECES; i += threads) {
        const int row = i / PIECES, piece = i % PIECES;
        copy16_async(k_to + piece_at(row, piece), k + i * 16, first + row < end);
        copy16_async(v_to + piece_at(row, piece), v + i * 16, first + row < end);
    }
    if (KV_INT8 && thread < TOKENS / 8) {
        copy16_async(shared_address(k_scales + thread * 8), cache.k_scales + token + thread * 8, first + thread * 8 < end);
        copy16_async(shared_address(v_scales + thread * 8), cache.v_scales + token + thread * 8, first + thread * 8 < end);
    }
}

struct Queries { uint4 low, high; };  // rows g and g + 8, dims 8t to 8t + 7 of 32

// State of 16 rows: unnormalised output, running maximum and a lane's part of the sum, rows g ([0]) and g + 8 ([1]).
struct Rows {
    float out[OUT_TILES][4];
    float most[2], sum[2];

    DEVICE void clear() {
        UNROLL for (int j = 0; j < OUT_TILES; j++) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.f;
        most[0] = most[1] = -INFINITY, sum[0] = sum[1] = 0.f;
    }
    // The dimension of out[j][i] (and of out[j][2 + i], row g + 8).
    static DEVICE int dim(int j, int i) {
        const int t = threadIdx.x & 3;
        return KV_INT8 ? 16 * (j >> 1) + 4 * t + 2 * i + (j & 1) : 8 * j + 2 * t + i;
    }
    DEVICE void finish() {  // every lane of a quad gets the whole sum
        UNROLL for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 1);
            sum[r] += __shfl_xor_sync(ALL_LANES, sum[r], 2);
        }
    }

    // One tile of TOKENS tokens, the first of them at position `first`; row r sees positions below limit[r].
    template <int TOKENS, class Load>
    DEVICE void attend(const Load& queries, const unsigned char* keys, const unsigned char* values, const unsigned short* k_scales,
                       const unsigned short* v_scales, float scale, int first, const int (&limit)[2]) {
        constexpr int TILES = TOKENS / 8;
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        float s[TILES][4] = {};
        UNROLL for (int c = 0; c < GROUPS; c++) {
            const Queries q = queries(c);
            const unsigned a0[4] = {q.low.x, q.high.x, q.low.y, q.high.y}, a1[4] = {q.low.z, q.high.z, q.low.w, q.high.w};
            UNROLL for (int n = 0; n < TILES; n++) {
                uint4 b;
                if (KV_INT8) {
                    uint2 raw = *(const uint2*)(keys + piece_at(n * 8 + g, 2 * c + (t >> 1)) + (t & 1) * 8);
                    raw.x ^= 0x80808080u, raw.y ^= 0x80808080u;
                    b = make_uint4(widen(raw.x, 0x4140), widen(raw.x, 0x4342), widen(raw.y, 0x4140), widen(raw.y, 0x4342));
                } else b = *(const uint4*)(keys + piece_at(n * 8 + g, 4 * c + t));
                mma(s[n], a0, b.x, b.y), mma(s[n], a1, b.z, b.w);
            }
        }
        float peak[2] = {-INFINITY, -INFINITY};
        UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int i = 0; i < 4; i++) {
            const int token = n * 8 + 2 * t + (i & 1);
            const float k_scale = KV_INT8 ? half_to_float(k_scales[token]) : 1.f;
            s[n][i] = first + token < limit[i >> 1] ? s[n][i] * (scale * k_scale) : -INFINITY;
            peak[i >> 1] = fmaxf(peak[i >> 1], s[n][i]);
        }
        float base[2];
        UNROLL for (int r = 0; r < 2; r++) {
            peak[r] = fmaxf(peak[r], __shfl_xor_sync(ALL_LANES, peak[r], 1));
            peak[r] = fmaxf(fmaxf(peak[r], __shfl_xor_sync(ALL_LANES, peak[r], 2)), most[r]);
            base[r] = peak[r] == -INFINITY ? 0.f : peak[r];  // nothing seen yet: exp2(-inf - 0) is the zero wanted
            const float shrink = exp2_fast(most[r] - base[r]);
            most[r] = peak[r], sum[r] *= shrink;
            UNROLL for (int j = 0; j < OUT_TILES; j++) out[j][2 * r] *= shrink, out[j][2 * r + 1] *= shrink;
        }
        UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int i = 0; i < 4; i++) {
            const float p = exp2_fast(s[n][i] - base[i >> 1]);
            sum[i >> 1] += p;
            // A scale past the end may be anything: keep it away from the zeros there.
            s[n][i] = KV_INT8 ? (p > 0.f ? p * half_to_float(v_scales[n * 8 + 2 * t + (i & 1)]) : 0.f) : p;
        }
        UNROLL for (int k = 0; k < TOKENS / 16; k++) {
            const float (&x)[4] = s[2 * k], (&y)[4] = s[2 * k + 1];
            const unsigned p[4] = {pack_half2(x[0], x[1]), pack_half2(x[2], x[3]), pack_half2(y[0], y[1]), pack_half2(y[2], y[3])};
            UNROLL for (int pair = 0; pair < PIECES / 2; pair++) {
                unsigned v[4];
                ldmatrix_x4_trans(v, shared_address(values + piece_at(k * 16 + (lane & 15), 2 * pair + (lane >> 4))));
                if (KV_INT8) {
                    UNROLL for (int i = 0; i < 4; i++) v[i] ^= 0x80808080u;
                    UNROLL for (int i = 0; i < 2; i++) {
                        mma(out[4 * pair + 2 * i], p, widen(v[2 * i], 0x4240), widen(v[2 * i + 1], 0x4240));
                        mma(out[4 * pair + 2 * i + 1], p, widen(v[2 * i], 0x4341), widen(v[2 * i + 1], 0x4341));
                    }
                } else mma(out[2 * pair], p, v[0], v[1]), mma(out[2 * pair + 1], p, v[2], v[3]);
            }
        }
    }
};
