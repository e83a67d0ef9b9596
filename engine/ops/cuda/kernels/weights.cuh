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

struct Weights {            // mirrored by linear.py; device address and the matrix's numbers
    const unsigned char* data;
    float up, down, out;    // 2^(24-p) * constant of the type, 2^-p, 2^p
    unsigned factor0, factor1, factor1_high;  // half2: 2^(24-p) in two steps, for rows g and for rows g + 8
    int exponent;           // E32: added to the stored byte
    int rows, records;      // rows of the matrix (of one expert), records along k
    long long expert_bytes;
};

// What a lane keeps of one record (its rows' d), of one 64-k tile (their scales as stored), and of one 32-k half.
struct Record {
    const unsigned char* base;  // in shared memory
    unsigned da, db;
};
struct Tile { unsigned a, b, a1, b1; };
struct Group { unsigned sa, oa, sb, ob; };

DEVICE unsigned word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
DEVICE unsigned word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }
template <class T>
DEVICE T load(const unsigned char* p) { return *(const T*)p; }
DEVICE unsigned both(float f) { return pack_half2(f, f); }

DEVICE Record open_record(const unsigned char* base, const Weights& w) {
    Record r{base};
    [[maybe_unused]] const int g = (threadIdx.x & 31) >> 2;
    [[maybe_unused]] constexpr float HIGH = WIDE_CODES ? 1.f : 0.0625f;
#if FMT_SCALES == SCALES_SUPER32_MIN || FMT_SCALES == SCALES_SUPER16_MIN
    const unsigned dma = load<unsigned>(base + FMT_D_AT + g * 4), dmb = load<unsigned>(base + FMT_D_AT + g * 4 + 32);
    // The minimum is met as a 256th of itself (a 4-bit one, in the high nibble, as a 16th): dmin stays a normal half.
    const float down = -w.down * (FMT_SCALES == SCALES_SUPER16_MIN ? 16.f : 256.f);
    r.da = pack_half2(low_float(dma) * w.up, high_float(dma) * down);
    r.db = pack_half2(low_float(dmb) * (w.up * HIGH), high_float(dmb) * down);
#elif FMT_SCALES == SCALES_SUPER16 || FMT_SCALES == SCALES_SUPER32
    const float da = half_to_float(load<unsigned short>(base + FMT_D_AT + g * 2));
    const float db = half_to_float(load<unsigned short>(base + FMT_D_AT + g * 2 + 16));
    r.da = both(da * w.up), r.db = both(db * (w.up * HIGH));
#endif
    return r;
}

DEVICE Tile open_tile(const Record& r, const Weights& w, int tile) {
    Tile s{};
    [[maybe_unused]] const unsigned char* at = r.base + FMT_SCALES_AT;
    [[maybe_unused]] const int g = (threadIdx.x & 31) >> 2;
#if FMT_SCALES == SCALES_SUPER32_MIN || FMT_SCALES == SCALES_SUPER16_MIN || FMT_SCALES == SCALES_SUPER16
    s.a = load<unsigned>(at + g * 16 + tile * 4), s.b = load<unsigned>(at + g * 16 + tile * 4 + 128);
#elif FMT_SCALES == SCALES_SUPER32
    s.a = load<unsigned short>(at + g * 8 + tile * 2), s.b = load<unsigned short>(at + g * 8 + tile * 2 + 64);
#elif FMT_SCALES == SCALES_E32
    s.a = load<unsigned short>(at + tile * 32 + g * 2), s.b = load<unsigned short>(at + tile * 32 + g * 2 + 16);
#elif FMT_SCALES == SCALES_D32
    s.a = hmul2(hmul2(load<unsigned>(at + tile * 64 + g * 4), w.factor0), w.factor1);
    s.b = hmul2(hmul2(load<unsigned>(at + tile * 64 + g * 4 + 32), w.factor0), w.factor1_high);
#elif FMT_SCALES == SCALES_DM32
    const uint2 a = load<uint2>(at + tile * 128 + g * 8), b = load<uint2>(at + tile * 128 + g * 8 + 64);
    s.a = hmul2(hmul2(a.x, w.factor0), w.factor1), s.b = hmul2(hmul2(b.x, w.factor0), w.factor1_high);
    s.a1 = hmul2(hmul2(a.y, w.factor0), w.factor1), s.b1 = hmul2(hmul2(b.y, w.factor0), w.factor1_high);
#endif
    return s;
}

// Scale and offset of 32 k (half h of a tile) as half2 pairs of equal values.
DEVICE Group group(const Record& r, const Weights& w, const Tile& s, int h) {
    Group q{};
    [[maybe_unused]] const int t = threadIdx.x & 3;
    // Byte 0x64 above a byte v makes the half 1024 + v; byte 0x44 makes 4 + v / 256.
    [[maybe_unused]] constexpr unsigned MAGIC = 0x64646464u, MAGIC_MIN = 0x44644464u, ZERO_MIN = 0x44006400u;
#if FMT_SCALES == SCALES_SUPER32_MIN
    const unsigned pick = h ? 0x5342 : 0x5140;
    const unsigned pa = hmul2(hsub2(__byte_perm(s.a, MAGIC_MIN, pick), ZERO_MIN), r.da);
    const unsigned pb = hmul2(hsub2(__byte_perm(s.b, MAGIC_MIN, pick), ZERO_MIN), r.db);
    q.sa = low2(pa), q.oa = high2(pa), q.sb = low2(pb), q.ob = high2(pb);
#elif FMT_SCALES == SCALES_SUPER16_MIN
    const unsigned pick = 0x4040 + 0x0101 * (2 * h + (t >> 1));
    const unsigned xa = __byte_perm(s.a, 0, pick), xb = __byte_perm(s.b, 0, pick);
    const unsigned pa = hmul2(hsub2((xa & 0x00f0000fu) | ZERO_MIN, ZERO_MIN), r.da);
    const unsigned pb = hmul2(hsub2((xb & 0x00f0000fu) | ZERO_MIN, ZERO_MIN), r.db);
    q.sa = low2(pa), q.oa = high2(pa), q.sb = low2(pb), q.ob = high2(pb);
#elif FMT_SCALES == SCALES_SUPER16 || FMT_SCALES == SCALES_SUPER32
    const unsigned pick = 0x4040 + 0x0101 * (FMT_SCALES == SCALES_SUPER16 ? 2 * h + (t >> 1) : h);
    constexpr unsigned ZERO = (0x6400u + FMT_SCALE_BIAS) * 0x10001u;
    const unsigned sa = hsub2(__byte_perm(s.a, MAGIC, pick), ZERO), sb = hsub2(__byte_perm(s.b, MAGIC, pick), ZERO);
    q.sa = hmul2(sa, r.da), q.sb = hmul2(sb, r.db);
    q.oa = hmul2(q.sa, FMT_OFFSET_LOW), q.ob = hmul2(q.sb, FMT_OFFSET_HIGH);
#elif FMT_SCALES == SCALES_D32
    q.sa = h ? high2(s.a) : low2(s.a), q.sb = h ? high2(s.b) : low2(s.b);
    q.oa = hmul2(q.sa, FMT_OFFSET_LOW), q.ob = hmul2(q.sb, FMT_OFFSET_HIGH);
#elif FMT_SCALES == SCALES_DM32
    const unsigned pa = h ? s.a1 : s.a, pb = h ? s.b1 : s.b;
    q.sa = low2(pa), q.oa = high2(pa), q.sb = low2(pb), q.ob = high2(pb);
#elif FMT_SCALES == SCALES_E32
    const int ea = (int)(s.a >> 8 * h & 255) + w.exponent, eb = (int)(s.b >> 8 * h & 255) + w.exponent;
    q.sa = (unsigned)max(min(ea, 30), 0) * 0x04000400u;  // under f16's range: a group of zeros
    q.sb = (unsigned)max(min(eb, 30), 0) * 0x04000400u;
    q.oa = hmul2(q.sa, FMT_OFFSET_LOW), q.ob = hmul2(q.sb, FMT_OFFSET_LOW);
#endif
    return q;
}

// F32 weights keep their precision (routers are F32): they go through the tensor cores as two halves, the rounded weight and
// what the rounding left.
constexpr int PARTS = FMT_BITS == 32 ? 2 : 1;

DEVICE unsigned pack_part(int part, float low, float high) {
    const unsigned whole = pack_half2(low, high);
    return part ? pack_half2(low - low_float(whole), high - high_float(whole)) : whole;
}

// The two k16 steps of half h: a[step][0..3] as mma wants them.
DEVICE void unpack(unsigned (&a)[2][4], const Record& r, const Weights& w, const Tile& s, int tile, int h, [[maybe_unused]] int part = 0) {
    const int lane = threadIdx.x & 31;
#if FMT_BITS == 16
    const unsigned char* at = r.base + tile * 2048 + h * 1024 + lane * 16;
    const uint4 x = load<uint4>(at), y = load<uint4>(at + 512);
    a[0][0] = x.x, a[0][2] = x.y, a[1][0] = x.z, a[1][2] = x.w;
    a[0][1] = y.x, a[0][3] = y.y, a[1][1] = y.z, a[1][3] = y.w;
#elif FMT_BITS == 17
    const unsigned char* at = r.base + tile * 2048 + h * 1024 + lane * 16;
    const uint4 x = load<uint4>(at), y = load<uint4>(at + 512);
    UNROLL for (int i = 0; i < 4; i++) {
        const unsigned lo = word(x, i), hi = word(y, i);
        a[i >> 1][(i & 1) * 2] = pack_half2(__uint_as_float(lo << 16) * w.down, __uint_as_float(lo & 0xffff0000u) * w.down);
        a[i >> 1][(i & 1) * 2 + 1] = pack_half2(__uint_as_float(hi << 16) * w.down, __uint_as_float(hi & 0xffff0000u) * w.down);
    }
#elif FMT_BITS == 32
    UNROLL for (int row = 0; row < 2; row++) UNROLL for (int step = 0; step < 2; step++) {
        const uint4 x = load<uint4>(r.base + tile * 4096 + h * 2048 + row * 1024 + step * 512 + lane * 16);
        a[step][row] = pack_part(part, __uint_as_float(x.x) * w.down, __uint_as_float(x.y) * w.down);
        a[step][row + 2] = pack_part(part, __uint_as_float(x.z) * w.down, __uint_as_float(x.w) * w.down);
    }
#else
    const Group q = group(r, w, s, h);
    unsigned u[2][4];  // codes as pairs of halves; [step][0]: row g, k 0-1; [1]: row g + 8; [2], [3]: the same, k 2-3
#if FMT_BITS == 8
    const uint4 x = load<uint4>(r.base + tile * 1024 + h * 512 + lane * 16);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int row = 0; row < 2; row++) {
        const unsigned v = word(x, step * 2 + row);
        u[step][row] = __byte_perm(v, 0, 0x4140), u[step][row + 2] = __byte_perm(v, 0, 0x4342);
    }
#elif FMT_LEVELS
    const uint2 x = load<uint2>(r.base + tile * 512 + lane * 16 + h * 8);
    UNROLL for (int step = 0; step < 2; step++) {
        const unsigned v = word(x, step), low3 = v & 0x77777777u, side = ((v >> 1) & 0x44444444u) | 0x32103210u;
        UNROLL for (int row = 0; row < 2; row++) {  // eight levels a byte permute; the code's top bit picks the half
            const unsigned pick = low3 >> (16 * row);
            const unsigned levels = __byte_perm(__byte_perm(FMT_LEVELS_0, FMT_LEVELS_1, pick), __byte_perm(FMT_LEVELS_2, FMT_LEVELS_3, pick), side >> (16 * row));
            u[step][row] = __byte_perm(levels, 0, 0x4140), u[step][row + 2] = __byte_perm(levels, 0, 0x4342);
        }
    }
#elif FMT_BITS >= 4
    const uint2 x = load<uint2>(r.base + tile * 512 + lane * 16 + h * 8);
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
    const unsigned high = load<unsigned>(r.base + FMT_HIGH_AT + tile * 128 + lane * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const int shift = 8 * h + 2 * step + q2 - 4;
        const unsigned v = shift < 0 ? high << -shift : high >> shift;
        u[step][q2 * 2] |= v & 0x00100010u, u[step][q2 * 2 + 1] |= v & 0x01000100u;
    }
#elif FMT_BITS == 6
    const unsigned high = load<unsigned>(r.base + FMT_HIGH_AT + tile * 256 + lane * 8 + h * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const int shift = 8 * step + 2 * q2 - 4;
        const unsigned v = shift < 0 ? high << -shift : high >> shift;
        u[step][q2 * 2] |= v & 0x00300030u, u[step][q2 * 2 + 1] |= v & 0x03000300u;
    }
#endif
#else  // 2 or 3 bits
    const unsigned x = load<unsigned>(r.base + tile * 256 + lane * 8 + h * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const unsigned v = x >> (8 * step + 2 * q2);
        u[step][q2 * 2] = v & 0x00030003u, u[step][q2 * 2 + 1] = v & 0x00300030u;
    }
#if FMT_BITS == 3
    const unsigned high = load<unsigned>(r.base + FMT_HIGH_AT + tile * 128 + lane * 4);
    UNROLL for (int step = 0; step < 2; step++) UNROLL for (int q2 = 0; q2 < 2; q2++) {
        const int shift = 8 * h + 2 * step + q2 - 2;
        const unsigned v = shift < 0 ? high << -shift : high >> shift;
        u[step][q2 * 2] |= v & 0x00040004u, u[step][q2 * 2 + 1] |= v & 0x00400040u;
    }
#endif
#endif
    UNROLL for (int step = 0; step < 2; step++) {
        a[step][0] = hfma2(u[step][0], q.sa, q.oa), a[step][1] = hfma2(u[step][1], q.sb, q.ob);
        a[step][2] = hfma2(u[step][2], q.sa, q.oa), a[step][3] = hfma2(u[step][3], q.sb, q.ob);
    }
#endif
}
