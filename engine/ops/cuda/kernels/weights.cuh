// Re-laid weights: from one record in shared memory to operand A of mma.m16n8k16.
//
// A record holds 16 output rows x 64 or 256 k (layout.py has its byte map and the bit-exact way back). Lane = 4*g + t takes
// rows g and g + 8 and, of each 32 k, the eight from 8*t on: activations are then read as they lie, 16 bytes a lane.
//
// Every code u is unsigned and is used as the f16 subnormal u * 2^-24, which is the code's own bits: no conversion. With
// S = scale * 2^(24-p) and O = offset * 2^-p, one fused multiply-add gives weight * 2^-p = u * S + O, rounded once; p is one
// exponent per matrix that keeps S finite, undone on the f32 sum. Row g + 8 sits four bits higher where codes have up to 6
// bits, so its S is divided by 16. Compared with subtracting a magic 1024 this saves 4 of 13 instructions per 8 weights.
#pragma once
#include "common.cuh"

// Set by layout.py: FMT_BITS (16, 17, 32: f16, bf16, f32), FMT_LEVELS (codes name levels of a table), FMT_SCALES,
// FMT_TILES (64-k tiles of a record), FMT_BYTES, FMT_HIGH_AT (second plane), FMT_SCALES_AT, FMT_D_AT, FMT_SCALE_BIAS,
// FMT_OFFSET_LOW and _HIGH (offset over scale for rows g and g + 8), FMT_ODD (codes are 2u + 1).
#define SCALES_NONE 0
#define SCALES_D32 1     // f16 d per 32
#define SCALES_DM32 2    // f16 d, m per 32
#define SCALES_E32 3     // exponent byte per 32
#define SCALES_SUPER32 4       // u8 scale per 32, f16 d per 256
#define SCALES_SUPER16 5       // u8 scale per 16, f16 d per 256
#define SCALES_SUPER32_MIN 6   // u8 scale, u8 minimum per 32; f16 d, dmin per 256
#define SCALES_SUPER16_MIN 7   // 4-bit scale, 4-bit minimum per 16; f16 d, dmin per 256

constexpr int RECORD_TILES = FMT_TILES, RECORD_K = 64 * FMT_TILES, RECORD_BYTES = FMT_BYTES;
constexpr bool WIDE_CODES = FMT_BITS == 8 || FMT_LEVELS;  // both rows of a lane at the same bit position
// From a tile's codes to the next tile's: within a record, or from record to record where each is one tile.
constexpr int LOW_TILE = FMT_BITS < 4 ? 256 : FMT_BITS < 8 ? 512 : FMT_BITS == 8 ? 1024 : FMT_BITS == 32 ? 4096 : 2048;
constexpr int HIGH_TILE = FMT_BITS == 6 ? 256 : 128;
constexpr int LOW_STRIDE = RECORD_TILES == 1 ? RECORD_BYTES : LOW_TILE, HIGH_STRIDE = RECORD_TILES == 1 ? RECORD_BYTES : HIGH_TILE;

struct Weights {            // mirrored by linear.py; device address and the matrix's numbers
    const unsigned char* data;
    float up, down, out;    // 2^(24-p) * constant of the type, 2^-p, 2^p
    unsigned factor0, factor1, factor1_high;  // half2: 2^(24-p) in two steps, for rows g and for rows g + 8
    int exponent;           // E32: added to the stored byte
    int rows, records;      // rows of the matrix (of one expert), records along k
    long long expert_bytes;
};

// ---- scales ----
// Once per record (or per stage of one-tile records) a warp turns the stored scales into what the tiles' lanes multiply by: for
// every g of every run of 16 or 32 k an entry of row g and row g + 8: S, and O where the type has minima (else O is a constant
// times S), each as a pair of equal halves. All lanes share the conversion, once; doing it where it is used took a quarter of
// all instructions.
constexpr int SUBGROUPS = FMT_SCALES == SCALES_SUPER16 || FMT_SCALES == SCALES_SUPER16_MIN ? 2 : 1;  // runs in 32 k
constexpr bool MINIMA = FMT_SCALES == SCALES_DM32 || FMT_SCALES == SCALES_SUPER32_MIN || FMT_SCALES == SCALES_SUPER16_MIN;
constexpr int ENTRY = MINIMA ? 16 : 8, SCALE_TILE = FMT_SCALES == SCALES_NONE ? 0 : 2 * SUBGROUPS * 8 * ENTRY;  // bytes; of a tile

template <class T>
DEVICE T load(const unsigned char* p) { return *(const T*)p; }
DEVICE unsigned word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE unsigned word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }
DEVICE unsigned both(float f) { return pack_half2(f, f); }

// Half of entry number `entry`, that of row `row`: S alone, or the halves S (low) and O (high) of `so`.
DEVICE void put_scale(unsigned char* to, int entry, int row, unsigned s) {
    *(unsigned*)(to + (entry * 8 + (row & 7)) * 8 + (row >> 3) * 4) = s;
}
DEVICE void put_pair(unsigned char* to, int entry, int row, unsigned so) {
    *(uint2*)(to + (entry * 8 + (row & 7)) * 16 + (row >> 3) * 8) = make_uint2(low2(so), high2(so));
}

// The entries of `tiles` tiles whose records begin at `records`, by one warp; a __syncwarp on either side is the caller's.
DEVICE void expand_scales([[maybe_unused]] unsigned char* to, [[maybe_unused]] const unsigned char* records,
                          [[maybe_unused]] const Weights& w, [[maybe_unused]] int tiles) {
    const int row = threadIdx.x & 15, part = (threadIdx.x & 31) >> 4;
    [[maybe_unused]] const bool high = row >= 8 && !WIDE_CODES;
    // Byte 0x64 above a byte v makes the half 1024 + v; byte 0x44 makes 4 + v / 256.
    [[maybe_unused]] constexpr unsigned MAGIC = 0x64646464u, MAGIC_MIN = 0x44644464u, ZERO_MIN = 0x44006400u;
    [[maybe_unused]] constexpr float HIGH = 0.0625f;
#if FMT_SCALES == SCALES_SUPER32_MIN || FMT_SCALES == SCALES_SUPER16_MIN
    // A minimum is met as a 256th of itself (a 4-bit one, in the high nibble, as a 16th): dmin stays a normal half.
    const unsigned stored = load<unsigned>(records + FMT_D_AT + row * 4);
    const float down = w.down * (FMT_SCALES == SCALES_SUPER16_MIN ? -16.f : -256.f);
    const unsigned d = pack_half2(low_float(stored) * (high ? w.up * HIGH : w.up), high_float(stored) * down);
    const uint2 bytes = load<uint2>(records + FMT_SCALES_AT + row * 16 + part * 8);
#if FMT_SCALES == SCALES_SUPER32_MIN
    UNROLL for (int i = 0; i < 4; i++) {
        const unsigned so = hmul2(hsub2(__byte_perm(word(bytes, i >> 1), MAGIC_MIN, i & 1 ? 0x5342 : 0x5140), ZERO_MIN), d);
        put_pair(to, part * 4 + i, row, so);
    }
#else
    UNROLL for (int i = 0; i < 8; i++) {
        const unsigned twice = __byte_perm(word(bytes, i >> 2), 0, 0x4040 + 0x0101 * (i & 3));
        const unsigned so = hmul2(hsub2((twice & 0x00f0000fu) | ZERO_MIN, ZERO_MIN), d);
        put_pair(to, part * 8 + i, row, so);
    }
#endif
#elif FMT_SCALES == SCALES_SUPER16 || FMT_SCALES == SCALES_SUPER32
    constexpr unsigned ZERO = (0x6400u + FMT_SCALE_BIAS) * 0x10001u;
    const unsigned d = both(half_to_float(load<unsigned short>(records + FMT_D_AT + row * 2)) * (high ? w.up * HIGH : w.up));
#if FMT_SCALES == SCALES_SUPER16
    const uint2 bytes = load<uint2>(records + FMT_SCALES_AT + row * 16 + part * 8);
#else
    const uint2 bytes = make_uint2(load<unsigned>(records + FMT_SCALES_AT + row * 8 + part * 4), 0);
#endif
    UNROLL for (int i = 0; i < 4 * SUBGROUPS; i++) {
        const unsigned code = __byte_perm(word(bytes, i >> 2), MAGIC, 0x4040 + 0x0101 * (i & 3));
        put_scale(to, part * 4 * SUBGROUPS + i, row, hmul2(hsub2(code, ZERO), d));
    }
#elif FMT_SCALES != SCALES_NONE
    for (int tile = part; tile < tiles; tile += 2) {
        const unsigned char* at = records + tile * RECORD_BYTES + FMT_SCALES_AT;
        [[maybe_unused]] const unsigned factor = high ? w.factor1_high : w.factor1;
#if FMT_SCALES == SCALES_DM32
        const uint2 pairs = load<uint2>(at + row * 8);
        UNROLL for (int h = 0; h < 2; h++) {
            const unsigned so = hmul2(hmul2(word(pairs, h), w.factor0), factor);
            put_pair(to, tile * 2 + h, row, so);
        }
#else
#if FMT_SCALES == SCALES_D32
        const unsigned pair = hmul2(hmul2(load<unsigned>(at + row * 4), w.factor0), factor);
        const unsigned s[2] = {low2(pair), high2(pair)};
#else   // an exponent under f16's range is a group of zeros
        const int pair = load<unsigned short>(at + row * 2);
        const unsigned s[2] = {(unsigned)max(min((pair & 255) + w.exponent, 30), 0) * 0x04000400u,
                               (unsigned)max(min((pair >> 8) + w.exponent, 30), 0) * 0x04000400u};
#endif
        UNROLL for (int h = 0; h < 2; h++) put_scale(to, tile * 2 + h, row, s[h]);
#endif
    }
#endif
}

// ---- codes ----
// F32 weights keep their precision (routers are F32): they go through the tensor cores as two halves, the rounded weight and
// what the rounding left.
constexpr int PARTS = FMT_BITS == 32 ? 2 : 1;

DEVICE unsigned pack_part(int part, float low, float high) {
    const unsigned whole = pack_half2(low, high);
    return part ? pack_half2(low - low_float(whole), high - high_float(whole)) : whole;
}

// The two k16 steps of half h of tile `tile`: a[step][0..3] as mma wants them. `records` as for expand_scales, `scales` its result.
DEVICE void unpack(unsigned (&a)[2][4], const unsigned char* records, [[maybe_unused]] const unsigned char* scales,
                   [[maybe_unused]] const Weights& w, int tile, int h, [[maybe_unused]] int part = 0) {
    const int lane = threadIdx.x & 31;
    const unsigned char* low = records + tile * LOW_STRIDE;
#if FMT_BITS == 16
    const unsigned char* at = low + h * 1024 + lane * 16;
    const uint4 x = load<uint4>(at), y = load<uint4>(at + 512);
    a[0][0] = x.x, a[0][2] = x.y, a[1][0] = x.z, a[1][2] = x.w;
    a[0][1] = y.x, a[0][3] = y.y, a[1][1] = y.z, a[1][3] = y.w;
#elif FMT_BITS == 17
    const unsigned char* at = low + h * 1024 + lane * 16;
    const uint4 x = load<uint4>(at), y = load<uint4>(at + 512);
    UNROLL for (int i = 0; i < 4; i++) {
        const unsigned lo = word(x, i), hi = word(y, i);
        a[i >> 1][(i & 1) * 2] = pack_half2(__uint_as_float(lo << 16) * w.down, __uint_as_float(lo & 0xffff0000u) * w.down);
        a[i >> 1][(i & 1) * 2 + 1] = pack_half2(__uint_as_float(hi << 16) * w.down, __uint_as_float(hi & 0xffff0000u) * w.down);
    }
#elif FMT_BITS == 32
    UNROLL for (int row = 0; row < 2; row++) UNROLL for (int step = 0; step < 2; step++) {
        const uint4 x = load<uint4>(low + h * 2048 + row * 1024 + step * 512 + lane * 16);
        a[step][row] = pack_part(part, __uint_as_float(x.x) * w.down, __uint_as_float(x.y) * w.down);
        a[step][row + 2] = pack_part(part, __uint_as_float(x.z) * w.down, __uint_as_float(x.w) * w.down);
    }
#else
    const int subgroup = SUBGROUPS == 2 ? (lane & 3) >> 1 : 0;
    const unsigned char* entry = scales + tile * SCALE_TILE + ((h * SUBGROUPS + subgroup) * 8 + (lane >> 2)) * ENTRY;
#ifdef FMT_OFFSET_LOW
    const uint2 s = load<uint2>(entry);
    const uint4 q = make_uint4(s.x, hmul2(s.x, FMT_OFFSET_LOW), s.y, hmul2(s.y, FMT_OFFSET_HIGH));
#else
    const uint4 q = load<uint4>(entry);
#endif
    unsigned u[2][4];  // codes as pairs of halves; [step][0]: row g, k 0-1; [1]: row g + 8; [2], [3]: the same, k 2-3
#if FMT_BITS == 8
    const uint4 x = load<uint4>(low + h * 512 + lane * 16);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int row = 0; row < 2; row++) {
        const unsigned v = word(x, step * 2 + row);
        u[step][row] = __byte_perm(v, 0, 0x4140), u[step][row + 2] = __byte_perm(v, 0, 0x4342);
    }
#elif FMT_LEVELS
    const uint2 x = load<uint2>(low + lane * 16 + h * 8);
    UNROLL for (int step = 0; step < 2; step++) {
        const unsigned v = word(x, step), low3 = v & 0x77777777u, side = ((v >> 1) & 0x44444444u) | 0x32103210u;
        UNROLL for (int row = 0; row < 2; row++) {  // eight levels a byte permute; the code's top bit picks the half
            const unsigned pick = low3 >> (16 * row);
            const unsigned levels = __byte_perm(__byte_perm(FMT_LEVELS_0, FMT_LEVELS_1, pick),
                                                __byte_perm(FMT_LEVELS_2, FMT_LEVELS_3, pick), side >> (16 * row));
            u[step][row] = __byte_perm(levels, 0, 0x4140), u[step][row + 2] = __byte_perm(levels, 0, 0x4342);
        }
    }
#elif FMT_BITS >= 4
    const uint2 x = load<uint2>(low + lane * 16 + h * 8);
    UNROLL for (int step = 0; step < 2; step++) {
        const unsigned v = word(x, step);
#if FMT_ODD  // the code is 2u + 1
        const unsigned even = v << 1, v7 = v >> 7;
        u[step][0] = (even & 0x001e001eu) | 0x00010001u, u[step][1] = (even & 0x01e001e0u) | 0x00100010u;
        u[step][2] = (v7 & 0x001e001eu) | 0x00010001u, u[step][3] = (v7 & 0x01e001e0u) | 0x00100010u;
#else
        const unsigned v8 = v >> 8;
        u[step][0] = v & 0x000f000fu, u[step][1] = v & 0x00f000f0u, u[step][2] = v8 & 0x000f000fu, u[step][3] = v8 & 0x00f000f0u;
#endif
    }
#if FMT_BITS == 5
    const unsigned high = load<unsigned>(records + FMT_HIGH_AT + tile * HIGH_STRIDE + lane * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const int shift = 8 * h + 2 * step + q2 - 4;
        const unsigned v = shift < 0 ? high << -shift : high >> shift;
        u[step][q2 * 2] |= v & 0x00100010u, u[step][q2 * 2 + 1] |= v & 0x01000100u;
    }
#elif FMT_BITS == 6
    const unsigned high = load<unsigned>(records + FMT_HIGH_AT + tile * HIGH_STRIDE + lane * 8 + h * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const int shift = 8 * step + 2 * q2 - 4;
        const unsigned v = shift < 0 ? high << -shift : high >> shift;
        u[step][q2 * 2] |= v & 0x00300030u, u[step][q2 * 2 + 1] |= v & 0x03000300u;
    }
#endif
#else  // 2 or 3 bits
    const unsigned x = load<unsigned>(low + lane * 8 + h * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const unsigned v = x >> (8 * step + 2 * q2);
        u[step][q2 * 2] = v & 0x00030003u, u[step][q2 * 2 + 1] = v & 0x00300030u;
    }
#if FMT_BITS == 3
    const unsigned high = load<unsigned>(records + FMT_HIGH_AT + tile * HIGH_STRIDE + lane * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const int shift = 8 * h + 2 * step + q2 - 2;
        const unsigned v = shift < 0 ? high << -shift : high >> shift;
        u[step][q2 * 2] |= v & 0x00040004u, u[step][q2 * 2 + 1] |= v & 0x00400040u;
    }
#endif
#endif
    UNROLL for (int step = 0; step < 2; step++) {
        a[step][0] = hfma2(u[step][0], q.x, q.y), a[step][1] = hfma2(u[step][1], q.z, q.w);
        a[step][2] = hfma2(u[step][2], q.x, q.y), a[step][3] = hfma2(u[step][3], q.z, q.w);
    }
#endif
}
