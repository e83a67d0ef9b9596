// attention, decode: out[i, h] = softmax(q[i, h] K^T / sqrt(dim)) V over positions 0..positions[i] of the row's own sequence.
//
// Work item = (row, run of cache blocks, kv head): one warp takes the up to 16 query heads of a kv head as the rows of its mma
// tile, streams its run through its own ring in shared memory and writes an unnormalised part; `attention_combine` joins the
// parts of a row in order. Each block of the fixed grid finds the items from the positions, so that no launch parameter depends
// on a context's length. A row's runs depend on its own length alone: neighbours change nothing. Bound by the bytes of K and V.
#include "attention.cuh"

struct DecodeArgs {           // mirrored by attention.py
    Cache cache;
    const unsigned short* q;  // [m, heads * DIM]
    unsigned short* out;      // [m, ldo] f16
    float* parts;             // [m, MOST_RUNS, heads, DIM]
    float2* sums;             // [m, MOST_RUNS, heads]: maximum (in powers of two), sum
    const int* positions;     // [m]; -1: padding
    const int* sequences;     // [m]
    int m, heads, ldo;
    float scale;              // log2(e) / sqrt(DIM)
};
static_assert(sizeof(DecodeArgs) == ARGS_BYTES, "attention.py and attention_decode.cu disagree about DecodeArgs");

constexpr int WARPS = 2, STAGES = DIM > 128 ? 2 : 3, TOKENS = DIM > 128 ? 16 : 32, MOST_ROWS = 64, MOST_RUNS = 64;
constexpr bool KEEP_Q = DIM <= 128;  // in registers; else in shared memory, in the order in which lanes ask for them
constexpr int TILE_BYTES = TOKENS * TILE_ROW, SCALE_BYTES = KV_INT8 ? TOKENS * 2 : 0, STAGE_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
constexpr int WARP_BYTES = STAGES * STAGE_BYTES + (KEEP_Q ? 0 : GROUPS * 1024), SHARED_BYTES = WARPS * WARP_BYTES;
static_assert(SHARED_BYTES <= DECODE_SHARED, "attention.py allows too little shared memory");

// Cache blocks of one run of a row that sees `length` positions, and how many runs there are.
DEVICE int run_blocks(int length) {
    const int blocks = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    return max((blocks + MOST_RUNS - 1) / MOST_RUNS, blocks >= 8 ? 2 : 1);
}
DEVICE int run_count(int length) {
    const int blocks = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    return length > 0 ? (blocks + run_blocks(length) - 1) / run_blocks(length) : 0;
}

struct Ring {
    unsigned char* memory;
    DEVICE unsigned char* keys(int step) const { return memory + step % STAGES * STAGE_BYTES; }
    DEVICE unsigned char* values(int step) const { return keys(step) + TILE_BYTES; }
    DEVICE unsigned short* k_scales(int step) const { return (unsigned short*)(keys(step) + 2 * TILE_BYTES); }
    DEVICE unsigned short* v_scales(int step) const { return (unsigned short*)(keys(step) + 2 * TILE_BYTES + SCALE_BYTES); }
};

DEVICE void attend_run(const DecodeArgs& a, const Ring& ring, int row, int run, int kv_head, int first_head, int heads, int length) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, sequence = a.sequences[row];
    const int begin = run * run_blocks(length) * BLOCK_TOKENS, end = min(length, begin + run_blocks(length) * BLOCK_TOKENS);
    const int steps = (end - begin + TOKENS - 1) / TOKENS;
    const auto stage = [&](int step) {
        if (step < steps)
            stage_tile<TOKENS>(a.cache, sequence, kv_head, begin + step * TOKENS, end, ring.keys(step), ring.values(step),
                               ring.k_scales(step), ring.v_scales(step), lane, 32);
        commit_copies();
    };
    __syncwarp();
    UNROLL for (int step = 0; step < STAGES - 1; step++) stage(step);
    Queries q[KEEP_Q ? GROUPS : 1];
    uint4* shared_q = (uint4*)(ring.memory + STAGES * STAGE_BYTES) + lane;
    const uint4* from = (const uint4*)(a.q + ((long long)row * a.heads + first_head) * DIM) + t;
    UNROLL for (int c = 0; c < GROUPS; c++) {
        Queries v;
        v.low = g < heads ? from[g * (DIM / 8) + c * 4] : make_uint4(0, 0, 0, 0);
        v.high = g + 8 < heads ? from[(g + 8) * (DIM / 8) + c * 4] : make_uint4(0, 0, 0, 0);
        if (KEEP_Q) q[KEEP_Q ? c : 0] = v;
        else shared_q[c * 64] = v.low, shared_q[c * 64 + 32] = v.high;
    }
    Rows rows;
    rows.clear();
    const int limit[2] = {end, end};
    NO_UNROLL for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        stage(step + STAGES - 1);
        rows.attend<TOKENS>([&](int c) { return KEEP_Q ? q[KEEP_Q ? c : 0] : Queries{shared_q[c * 64], shared_q[c * 64 + 32]}; },
                            ring.keys(step), ring.values(step), ring.k_scales(step), ring.v_scales(step), a.scale,
                            begin + step * TOKENS, limit);
    }
    wait_copies<0>();
    rows.finish();
    UNROLL for (int r = 0; r < 2; r++) {
        const int head = g + 8 * r;
        if (head >= heads) continue;
        const long long part = ((long long)row * MOST_RUNS + run) * a.heads + first_head + head;
        if (t == 0) a.sums[part] = make_float2(rows.most[r], rows.sum[r]);
        UNROLL for (int j = 0; j < OUT_TILES; j++) UNROLL for (int i = 0; i < 2; i++)
            a.parts[part * DIM + Rows::dim(j, i)] = rows.out[j][2 * r + i];
    }
}

KERNEL void __launch_bounds__(WARPS * 32) attention_decode(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ int runs_before[MOST_ROWS + 1];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    if (threadIdx.x < 32) {  // prefix sums of the runs of all rows
        int before = 0;
        for (int base = 0; base < a.m; base += 32) {
            const int row = base + threadIdx.x;
            int runs = row < a.m ? run_count(a.positions[row] + 1) : 0;
            UNROLL for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(ALL_LANES, runs, step);
                if (threadIdx.x >= step) runs += other;
            }
            if (row < a.m) runs_before[row + 1] = before + runs;
            before += __shfl_sync(ALL_LANES, runs, 31);
        }
        if (threadIdx.x == 0) runs_before[0] = 0;
    }
    __syncthreads();
    const int group = a.heads / a.cache.kv_heads, tiles = (group + 15) / 16, per_run = a.cache.kv_heads * tiles;
    const Ring ring{memory + (threadIdx.x >> 5) * WARP_BYTES};
    const int items = runs_before[a.m] * per_run;
    for (int item = blockIdx.x * WARPS + (threadIdx.x >> 5); item < items; item += gridDim.x * WARPS) {
        const int run = item / per_run, kv_head = item % per_run / tiles, tile = item % tiles;
        int row = 0;
        for (int step = 32; step; step >>= 1) if (row + step < a.m && runs_before[row + step] <= run) row += step;
        attend_run(a, ring, row, run - runs_before[row], kv_head, kv_head * group + tile * 16, min(16, group - tile * 16),
                   a.positions[row] + 1);
    }
}

KERNEL void __launch_bounds__(DIM) attention_combine(const __grid_constant__ DecodeArgs a) {
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int row = blockIdx.x, head = blockIdx.y, runs = run_count(a.positions[row] + 1);
    const float2* sums = a.sums + (long long)row * MOST_RUNS * a.heads + head;
    const float* parts = a.parts + ((long long)row * MOST_RUNS * a.heads + head) * DIM + threadIdx.x;
    float most = -INFINITY, sum = 0.f, out = 0.f;
    for (int run = 0; run < runs; run++) most = fmaxf(most, sums[run * a.heads].x);
    for (int run = 0; run < runs; run++) {
        const float2 part = sums[run * a.heads];
        const float weight = exp2_fast(part.x - most);
        sum += weight * part.y, out += weight * parts[(long long)run * a.heads * DIM];
    }
    a.out[(long long)row * a.ldo + head * DIM + threadIdx.x] = float_to_half(runs ? out / sum : 0.f);
}
