// relay: the bytes of a GGUF matrix to the records of layout.py, on the device; layout.lay is its twin.
//
// Warp = one 64-k tile of one row tile: each lane gathers the 32 codes that it will hold as lane 4g + t of linear's warps and
// writes their words; lanes 0 to 15 write the scales of the tile's 16 rows. Reads are single bytes out of L1; at load the copy
// from the host is an order of magnitude slower. It also finds the greatest |d| and |minimum|, which the exponent p needs.
#include "common.cuh"

// Set by layout.py: RAW_NAME as a number (ggml's), BLOCK_K, BLOCK_BYTES of the file, and the FMT_* of weights.cuh.
#define SCALES_NONE 0
#define SCALES_D32 1
#define SCALES_DM32 2
#define SCALES_E32 3
#define SCALES_SUPER32 4
#define SCALES_SUPER16 5
#define SCALES_SUPER32_MIN 6
#define SCALES_SUPER16_MIN 7

struct RelayArgs {            // mirrored by relay.py
    const unsigned char* raw; // [experts, rows, bytes of a row]
    unsigned char* records;   // [experts, row tiles, records, FMT_BYTES]
    const unsigned char* points;  // IQ types: level numbers of the lattice's points
    unsigned* extremes;       // [2]: bits of the greatest |d| and |minimum|, raised by atomicMax
    long long expert_bytes;   // of the records
    int rows, k, records_along_k, tile_stride, tile_offset;
};
static_assert(sizeof(RelayArgs) == ARGS_BYTES, "relay.py and relay.cu disagree about RelayArgs");

typedef const unsigned char* Block;

DEVICE unsigned two(Block b) { return b[0] | b[1] << 8; }
DEVICE unsigned four(Block b) { return two(b) | two(b + 2) << 16; }
DEVICE unsigned in_turn(Block b, int i) { return b[i >> 1] >> 4 * (i & 1) & 15; }
DEVICE unsigned pair_of(Block b, int i) { return b[i / 128 * 32 + i % 32] >> 2 * (i % 128 / 32) & 3; }
DEVICE unsigned minus(unsigned number, int i) { return (number | (__popc(number) & 1) << 7) >> i & 1; }

// Code i of a block.
DEVICE unsigned code(Block b, int i, [[maybe_unused]] Block points) {
#if RAW_NAME == 2 || RAW_NAME == 20   // Q4_0, IQ4_NL
    return b[2 + i % 16] >> 4 * (i / 16) & 15;
#elif RAW_NAME == 3                   // Q4_1
    return b[4 + i % 16] >> 4 * (i / 16) & 15;
#elif RAW_NAME == 6                   // Q5_0
    return (b[6 + i % 16] >> 4 * (i / 16) & 15) | (four(b + 2) >> i & 1) << 4;
#elif RAW_NAME == 7                   // Q5_1
    return (b[8 + i % 16] >> 4 * (i / 16) & 15) | (four(b + 4) >> i & 1) << 4;
#elif RAW_NAME == 8                   // Q8_0
    return b[2 + i] ^ 0x80;
#elif RAW_NAME == 39                  // MXFP4
    return b[1 + i % 16] >> 4 * (i / 16) & 15;
#elif RAW_NAME == 10                  // Q2_K
    return pair_of(b + 16, i);
#elif RAW_NAME == 11                  // Q3_K
    return pair_of(b + 32, i) | (b[i % 32] >> i / 32 & 1) << 2;
#elif RAW_NAME == 12                  // Q4_K
    return b[16 + i / 64 * 32 + i % 32] >> 4 * (i % 64 / 32) & 15;
#elif RAW_NAME == 13                  // Q5_K
    return (b[48 + i / 64 * 32 + i % 32] >> 4 * (i % 64 / 32) & 15) | (b[16 + i % 32] >> i / 32 & 1) << 4;
#elif RAW_NAME == 14                  // Q6_K
    return (b[i / 128 * 64 + i % 64] >> 4 * (i % 128 / 64) & 15) | pair_of(b + 128, i) << 4;
#elif RAW_NAME == 23                  // IQ4_XS
    return b[8 + i / 32 * 16 + i % 16] >> 4 * (i % 32 / 16) & 15;
#elif RAW_NAME == 21                  // IQ3_S
    const unsigned magnitude = points[(b[2 + i / 4] | (b[66 + i / 32] >> i / 4 % 8 & 1) << 8) * 4 + i % 4];
    return b[74 + i / 8] >> i % 8 & 1 ? 7 - magnitude : 8 + magnitude;
#elif RAW_NAME == 18                  // IQ3_XXS
    return points[b[2 + i / 4] * 4 + i % 4] | minus(four(b + 66 + i / 32 * 4) >> 7 * (i % 32 / 8) & 127, i % 8) << 3;
#elif RAW_NAME == 17                  // IQ2_XS
    const unsigned q = two(b + 2 + i / 8 * 2);
    return points[(q & 511) * 8 + i % 8] | minus(q >> 9, i % 8) << 3;
#else
    return 0;
#endif
}

// Integer scale (and minimum) of group i of a block.
DEVICE unsigned scale(Block b, int i) {
#if RAW_NAME == 10
    return b[i];
#elif RAW_NAME == 11
    return (b[96 + i % 8] >> 4 * (i / 8) & 15) | (b[104 + i % 4] >> 2 * (i / 4) & 3) << 4;
#elif RAW_NAME == 12 || RAW_NAME == 13
    return i < 4 ? b[4 + i] & 63 : (b[8 + i] & 15) | b[i] >> 6 << 4;
#elif RAW_NAME == 14
    return b[192 + i] ^ 0x80;
#elif RAW_NAME == 23
    return in_turn(b + 4, i) | (two(b + 2) >> 2 * i & 3) << 4;
#elif RAW_NAME == 21
    return 1 + 2 * in_turn(b + 106, i);
#elif RAW_NAME == 18
    return 1 + 2 * (four(b + 66 + i * 4) >> 28);
#elif RAW_NAME == 17
    return 1 + 2 * in_turn(b + 66, i);
#else
    return 0;
#endif
}
DEVICE unsigned minimum(Block b, int i) { return i < 4 ? b[8 + i] & 63 : b[8 + i] >> 4 | b[4 + i] >> 6 << 4; }

constexpr int D_OF_BLOCK = RAW_NAME == 10 ? 80 : RAW_NAME == 11 ? 108 : RAW_NAME == 14 ? 208 : 0;
constexpr int WARPS = 4;

struct Rows {
    Block first;
    long long row_bytes;
    int rows, k, row0;
    // Block that holds k0 of row r of the tile, null beyond the matrix.
    DEVICE Block at(int r, int k0) const {
        if (row0 + r >= rows || k0 >= k) return nullptr;
        return first + (row0 + r) * row_bytes + (long long)(k0 / BLOCK_K) * BLOCK_BYTES;
    }
};

DEVICE void raise(unsigned* to, unsigned bits) {
    UNROLL for (int step = 16; step; step >>= 1) bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, step));
    if ((threadIdx.x & 31) == 0) atomicMax(to, bits);
}

#if FMT_SCALES == SCALES_NONE
#if FMT_BITS == 32
typedef unsigned Value;
DEVICE unsigned magnitude(Value v) { return v & 0x7fffffffu; }
#else
typedef unsigned short Value;
DEVICE unsigned magnitude(Value v) { return v & 0x7fffu; }
#endif

DEVICE void write_floats(const RelayArgs& a, const Rows& in, unsigned char* record, int k0) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    unsigned most = 0;
    UNROLL for (int h = 0; h < 2; h++) UNROLL for (int row = 0; row < 2; row++) for (int i = 0; i < 8; i++) {
        const int k = k0 + 32 * h + 8 * t + i;
        const Block b = in.at(g + 8 * row, k);
        const Value v = b ? *(const Value*)b : 0;
        const int place = sizeof(Value) == 4 ? ((h * 2 + row) * 2 + i / 4) * 128 + lane * 4 + i % 4 : (h * 2 + row) * 256 + lane * 8 + i;
        ((Value*)record)[place] = v;
        most = max(most, magnitude(v));
    }
    raise(a.extremes, most);
}
#else
DEVICE void write_codes(const RelayArgs& a, const Rows& in, unsigned char* record, int tile, int k0) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    unsigned low[2][4] = {}, high[2] = {};  // words of each half; high bits of three and five: word 0 for both halves
    UNROLL for (int h = 0; h < 2; h++) UNROLL for (int step = 0; step < 2; step++) UNROLL for (int row = 0; row < 2; row++)
        UNROLL for (int i = 0; i < 4; i++) {
            const int k = k0 + 32 * h + 8 * t + 4 * step + i;
            const Block b = in.at(g + 8 * row, k);
            const unsigned c = b ? code(b, k % BLOCK_K, a.points) : 0;
            const int two_at = 8 * step + 4 * row + 16 * (i & 1) + 2 * (i >> 1);
            const int one_at = 8 * h + 2 * step + (i >> 1) + 4 * row + 16 * (i & 1);
#if FMT_BITS == 8
            low[h][step * 2 + row] |= c << 8 * i;
#elif FMT_BITS >= 4
            low[h][step] |= (c & 15) << (FMT_LEVELS ? 16 * row + 4 * i : 4 * row + 16 * (i & 1) + 8 * (i >> 1));
            if (FMT_BITS == 5) high[0] |= (c >> 4) << one_at;
            if (FMT_BITS == 6) high[h] |= (c >> 4) << two_at;
#else
            low[h][0] |= (c & 3) << two_at;
            if (FMT_BITS == 3) high[0] |= (c >> 2) << one_at;
#endif
        }
#if FMT_BITS == 8
    UNROLL for (int h = 0; h < 2; h++)
        *(uint4*)(record + tile * 1024 + h * 512 + lane * 16) = make_uint4(low[h][0], low[h][1], low[h][2], low[h][3]);
#elif FMT_BITS >= 4
    *(uint4*)(record + tile * 512 + lane * 16) = make_uint4(low[0][0], low[0][1], low[1][0], low[1][1]);
#else
    *(uint2*)(record + tile * 256 + lane * 8) = make_uint2(low[0][0], low[1][0]);
#endif
    if (FMT_BITS == 3 || FMT_BITS == 5) *(unsigned*)(record + FMT_HIGH_AT + tile * 128 + lane * 4) = high[0];
    if (FMT_BITS == 6) *(uint2*)(record + FMT_HIGH_AT + tile * 256 + lane * 8) = make_uint2(high[0], high[1]);
}

DEVICE void write_scales(const RelayArgs& a, const Rows& in, unsigned char* record, int tile, int k0) {
    const int row = threadIdx.x & 15;
    unsigned most = 0, most_minimum = 0;
    unsigned char* at = record + FMT_SCALES_AT;
#if FMT_SCALES == SCALES_D32 || FMT_SCALES == SCALES_DM32 || FMT_SCALES == SCALES_E32
    UNROLL for (int h = 0; h < 2; h++) {
        const Block b = in.at(row, k0 + 32 * h);
#if FMT_SCALES == SCALES_E32
        at[row * 2 + h] = most = b ? b[0] : 0;
#elif FMT_SCALES == SCALES_D32
        ((unsigned short*)at)[row * 2 + h] = b ? two(b) : 0;
        most = max(most, b ? two(b) & 0x7fff : 0);
#else
        ((unsigned*)at)[row * 2 + h] = b ? four(b) : 0;
        most = max(most, b ? two(b) & 0x7fff : 0), most_minimum = max(most_minimum, b ? two(b + 2) & 0x7fff : 0);
#endif
#if FMT_SCALES == SCALES_E32
        raise(a.extremes, most);
#endif
    }
#else
    const Block b = in.at(row, k0);
    UNROLL for (int i = 0; i < 4; i++) {
#if FMT_SCALES == SCALES_SUPER16 || FMT_SCALES == SCALES_SUPER16_MIN
        at[row * 16 + tile * 4 + i] = b ? scale(b, tile * 4 + i) : 0;
#elif FMT_SCALES == SCALES_SUPER32
        if (i < 2) at[row * 8 + tile * 2 + i] = b ? scale(b, tile * 2 + i) : 0;
#else
        if (i >= 2) continue;
        at[row * 16 + tile * 4 + 2 * i] = b ? scale(b, tile * 2 + i) : 0;
        at[row * 16 + tile * 4 + 2 * i + 1] = b ? minimum(b, tile * 2 + i) : 0;
#endif
    }
    if (tile == 0) {
#if FMT_SCALES == SCALES_SUPER32_MIN || FMT_SCALES == SCALES_SUPER16_MIN
        ((unsigned*)(record + FMT_D_AT))[row] = b ? four(b + D_OF_BLOCK) : 0;
        most_minimum = b ? two(b + D_OF_BLOCK + 2) & 0x7fff : 0;
#else
        ((unsigned short*)(record + FMT_D_AT))[row] = b ? two(b + D_OF_BLOCK) : 0;
#endif
        most = b ? two(b + D_OF_BLOCK) & 0x7fff : 0;
    }
#endif
#if FMT_SCALES != SCALES_E32
    raise(a.extremes, most);
#endif
    raise(a.extremes + 1, most_minimum);
}
#endif

KERNEL void __launch_bounds__(WARPS * 32) relay(const __grid_constant__ RelayArgs a) {
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int k_tile = blockIdx.x * WARPS + (threadIdx.x >> 5), row_tile = blockIdx.y, expert = blockIdx.z;
    if (k_tile >= a.records_along_k * FMT_TILES) return;
    Rows in;
    in.row_bytes = (long long)(a.k / BLOCK_K) * BLOCK_BYTES, in.rows = a.rows, in.k = a.k, in.row0 = row_tile * 16;
    in.first = a.raw + expert * (a.rows * in.row_bytes);
    const int record_index = k_tile / FMT_TILES, tile = k_tile % FMT_TILES;
    unsigned char* record = a.records + expert * a.expert_bytes +
        ((long long)(row_tile * a.tile_stride + a.tile_offset) * a.records_along_k + record_index) * FMT_BYTES;
#if FMT_SCALES == SCALES_NONE
    write_floats(a, in, record, k_tile * 64);
#else
    write_codes(a, in, record, tile, k_tile * 64);
    write_scales(a, in, record, tile, k_tile * 64);
#endif
}
