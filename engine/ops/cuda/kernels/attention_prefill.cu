// attention, prefill: as attention_decode, for consecutive positions of one sequence: row i sees positions 0..positions[i].
//
// Block = 64 rows of one head, warp = 16 of them; keys and values pass through shared memory, tile by tile from position 0, for
// all four. The tiles and their order do not depend on where the chunk began, so neither do the bits. Rows at position -1, at
// the end, are padding. Bound by the tensor cores, at long contexts by shared memory reads.
#include "attention.cuh"

struct PrefillArgs {          // mirrored by attention.py
    Cache cache;
    const unsigned short* q;  // [m, heads * DIM]
    unsigned short* out;      // [m, ldo]
    const int* positions;     // [m]
    const int* sequences;     // [m], all equal
    int m, heads, ldo;
    float scale;
};
static_assert(sizeof(PrefillArgs) == ARGS_BYTES, "attention.py and attention_prefill.cu disagree about PrefillArgs");

constexpr int WARPS = 4, ROWS = WARPS * 16, TOKENS = DIM > 128 ? 32 : 64;
constexpr bool KEEP_Q = DIM <= 128;  // in registers; else in shared memory, in the order in which lanes ask for them
constexpr int TILE_BYTES = TOKENS * TILE_ROW, SCALE_BYTES = KV_INT8 ? TOKENS * 2 : 0, STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int SHARED_BYTES = 2 * STAGE_BYTES + (KEEP_Q ? 0 : WARPS * GROUPS * 1024);
static_assert(SHARED_BYTES <= PREFILL_SHARED, "attention.py allows too little shared memory");

KERNEL void __launch_bounds__(WARPS * 32) attention_prefill(const __grid_constant__ PrefillArgs a) {
    extern __shared__ __align__(128) unsigned char memory[];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y;  // the longest rows begin first
    const int kv_head = head / (a.heads / a.cache.kv_heads), sequence = a.sequences[first];
    int length = 0;
    for (int i = lane; i < ROWS; i += 32) if (first + i < a.m) length = max(length, a.positions[first + i] + 1);
    UNROLL for (int step = 16; step; step >>= 1) length = max(length, __shfl_xor_sync(ALL_LANES, length, step));
    if (length == 0) return;

    const auto keys = [&](int tile) { return memory + (tile & 1) * STAGE_BYTES; };
    const auto stage = [&](int tile) {
        unsigned char* at = keys(tile);
        if (tile * TOKENS < length)
            stage_tile<TOKENS>(a.cache, sequence, kv_head, tile * TOKENS, length, at, at + TILE_BYTES,
                               (unsigned short*)(at + 2 * TILE_BYTES), (unsigned short*)(at + 2 * TILE_BYTES + SCALE_BYTES), threadIdx.x, WARPS * 32);
        commit_copies();
    };
    stage(0);
    const int row[2] = {first + warp * 16 + g, first + warp * 16 + g + 8};
    int limit[2];
    UNROLL for (int r = 0; r < 2; r++) limit[r] = row[r] < a.m ? a.positions[row[r]] + 1 : 0;
    Queries q[KEEP_Q ? GROUPS : 1];
    uint4* shared_q = (uint4*)(memory + 2 * STAGE_BYTES) + warp * (GROUPS * 64) + lane;
    UNROLL for (int c = 0; c < GROUPS; c++) {
        Queries v;
        const uint4* from = (const uint4*)(a.q + (long long)head * DIM) + t + c * 4;
        v.low = limit[0] ? from[(long long)row[0] * a.heads * (DIM / 8)] : make_uint4(0, 0, 0, 0);
        v.high = limit[1] ? from[(long long)row[1] * a.heads * (DIM / 8)] : make_uint4(0, 0, 0, 0);
        if (KEEP_Q) q[KEEP_Q ? c : 0] = v;
        else shared_q[c * 64] = v.low, shared_q[c * 64 + 32] = v.high;
    }
    Rows rows;
    rows.clear();
    NO_UNROLL for (int tile = 0; tile * TOKENS < length; tile++) {
        wait_copies<0>();
        __syncthreads();  // this tile is there, and the one before it has been read by all
        stage(tile + 1);
        const unsigned char* at = keys(tile);
        rows.attend<TOKENS>([&](int c) { return KEEP_Q ? q[KEEP_Q ? c : 0] : Queries{shared_q[c * 64], shared_q[c * 64 + 32]}; }, at,
                            at + TILE_BYTES, (const unsigned short*)(at + 2 * TILE_BYTES),
                            (const unsigned short*)(at + 2 * TILE_BYTES + SCALE_BYTES), a.scale, tile * TOKENS, limit);
    }
    rows.finish();
    UNROLL for (int r = 0; r < 2; r++) {
        if (!limit[r]) continue;
        unsigned short* out = a.out + (long long)row[r] * a.ldo + head * DIM;
        const float over = 1.f / rows.sum[r];
        UNROLL for (int j = 0; j < OUT_TILES; j++) UNROLL for (int i = 0; i < 2; i++)
            out[Rows::dim(j, i)] = float_to_half(rows.out[j][2 * r + i] * over);
    }
}
