// Up to 8*NT rows of x: the warps of a block are the segments of k (linear.cu says the rest).
#pragma once
#include "linear.cuh"

// What a warp streams: stage after stage of its segment, row tiles after row tiles (`group`, RT of them).
template <int RT, int STAGES>
struct Ring {
    unsigned char* memory;
    unsigned barriers;
    int slot, parity;            // of the stage to be read; what comes STAGES later goes into its place
    int next_stage, next_group;  // to be asked for
    const unsigned char* next_from;
    int begin, records, stages;  // the segment, and its stages

    DEVICE void open(const LinearArgs& a, int expert, int warp, unsigned char* at, unsigned long long* bars) {
        memory = at, barriers = shared_address(bars);
        begin = segment_start(warp, a), records = segment_start(warp + 1, a) - begin;
        stages = (records + STAGE_RECORDS - 1) / STAGE_RECORDS;
        slot = parity = next_stage = 0, next_group = blockIdx.x;
        next_from = a.w.data + expert * a.w.expert_bytes + ((long long)next_group * RT * a.w.records + begin) * RECORD_BYTES;
        init_barriers<STAGES>(barriers);
    }
    DEVICE unsigned char* at(int index) const { return memory + index * (RT * STAGE_BYTES); }
    DEVICE void fetch(const LinearArgs& a, int to, int groups, int tiles) {
        if (next_group >= groups) return;
        unsigned targets[RT];
        const void* from[RT];
        UNROLL for (int rt = 0; rt < RT; rt++) {
            targets[rt] = shared_address(at(to)) + rt * STAGE_BYTES;
            // An odd last tile is taken twice, and its twin dropped.
            from[rt] = rt == 0 || next_group * RT + rt < tiles ? next_from + (long long)rt * a.w.records * RECORD_BYTES : next_from;
        }
        const int left = records - next_stage * STAGE_RECORDS;
        Barrier{barriers + 8 * to}.load(targets, from, RECORD_TILES > 1 ? STAGE_BYTES : min(STAGE_RECORDS, left) * RECORD_BYTES);
        next_from += STAGE_BYTES;
        if (++next_stage < stages) return;
        next_from += ((long long)gridDim.x * RT * a.w.records - stages * STAGE_RECORDS) * RECORD_BYTES;
        next_stage = 0, next_group += gridDim.x;
    }
    DEVICE unsigned char* wait() {
        Barrier{barriers + 8 * slot}.wait(parity);
        return at(slot);
    }
    DEVICE void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// Activations of one warp's segment, as operand B of NT columns of eight rows. They are asked for DEPTH halves of a tile ahead,
// each into the registers that its half has just left; at the end of the segment those of its start are asked for, which the
// next row tiles want.
template <int NT>
struct Activations {
    static constexpr int DEPTH = NT > 2 ? 1 : NT == 1 ? (STAGE_TILES % 2 == 0 ? 4 : 2) : RECORD_TILES > 1 ? 4 : 2;
    const uint4* x[NT];
    uint4 b[DEPTH][NT];
    int halves, next;

    DEVICE void open(const LinearArgs& a, const Item& item, int begin, int records) {  // a column past the last row repeats it
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        halves = records * RECORD_TILES * 2;
        UNROLL for (int n = 0; n < NT; n++)
            x[n] = (const uint4*)(a.x + row_of_x(a, item.first + min(n * 8 + g, item.count - 1))) + begin * (RECORD_K / 8) + t;
        restart();
    }
    DEVICE void restart() {
        UNROLL for (int d = 0; d < DEPTH; d++) UNROLL for (int n = 0; n < NT; n++) b[d][n] = load_ahead(x[n] + min(d, halves - 1) * 4);
        next = DEPTH;
    }
    DEVICE void ask(int slot) {
        const int half = RECORD_TILES == 1 ? min(next, halves - 1) : next < halves ? next : next - halves;
        UNROLL for (int n = 0; n < NT; n++) b[slot][n] = load_ahead(x[n] + half * 4);
        next++;
    }
};

// acc += one stage of records times its activations. `never` ends a basic block: the assembler puts a load that its block does
// not use last in the block, which without this would be just before its use.
template <int NT, int RT>
DEVICE void multiply_stage(float (&acc)[RT][NT][4], const LinearArgs& a, Activations<NT>& x, const unsigned char* records,
                           const unsigned char* scales, int stage_tiles, bool never) {
    constexpr int DEPTH = Activations<NT>::DEPTH, STEP = DEPTH > 2 ? DEPTH : 2;
    NO_UNROLL for (int first = 0; first < stage_tiles; first += STEP / 2) {
        UNROLL for (int d = 0; d < STEP; d++) {
            const int tile = first + d / 2, h = d & 1, slot = d % DEPTH;
            if (RECORD_TILES == 1 && tile >= stage_tiles) break;  // odd only at the end of the segment
            if (d && (DEPTH <= 2 || h == 0) && never) break;
            UNROLL for (int rt = 0; rt < RT; rt++) UNROLL for (int part = 0; part < PARTS; part++) {
                unsigned w[2][4];
                unpack(w, records + rt * STAGE_BYTES, scales + rt * SCALE_BYTES, a.w, tile, h, part);
                UNROLL for (int n = 0; n < NT; n++)
                    mma(acc[rt][n], w[0], x.b[slot][n].x, x.b[slot][n].y), mma(acc[rt][n], w[1], x.b[slot][n].z, x.b[slot][n].w);
            }
            x.ask(slot);
        }
    }
}

// The segments meet in shared memory, `sums` [2][segment][row tile][token][16 rows, padded to 20], eight tokens at a time.
template <int NT, int RT>
DEVICE void join_segments(const float (&acc)[RT][NT][4], const LinearArgs& a, const Item& item, int first_tile, float* sums, int& phase) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, segments = blockDim.x >> 5;
    const bool gated = a.epilogue == SILU_F16;
    UNROLL for (int n = 0; n < NT; n++) {
        if (n * 8 >= item.count) break;
        float* here = sums + phase * (segments * RT * 160);
        phase ^= 1;
        UNROLL for (int rt = 0; rt < RT; rt++) {
            float* mine = here + (warp * RT + rt) * 160 + (lane & 3) * 40 + (lane >> 2);
            mine[0] = acc[rt][n][0], mine[20] = acc[rt][n][1], mine[8] = acc[rt][n][2], mine[28] = acc[rt][n][3];
        }
        __syncthreads();  // one is enough: nobody writes these sums again before all have passed the next one
        const int tokens = min(8, item.count - n * 8), outputs = (gated ? 1 : RT) * 16 * tokens;
        for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
            const int row = i & 15, token = (i >> 4) % tokens, rt = (i >> 4) / tokens, place = item.first + n * 8 + token;
            float sum[2] = {0.f, 0.f};
            for (int s = 0; s < segments; s++) {
                sum[0] += here[(s * RT + rt) * 160 + token * 20 + row];
                if (RT == 2 && gated) sum[1] += here[(s * RT + 1) * 160 + token * 20 + row];
            }
            if (gated) emit_silu(a, (first_tile >> 1) * 16 + row, place, sum[0], sum[1]);
            else emit(a, (first_tile + rt) * 16 + row, place, sum[0]);
        }
    }
}

template <int NT, int RT, int STAGES>
DEVICE void linear_rows(const LinearArgs& a) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[MAX_WARPS][STAGES];
    constexpr int WARP_BYTES = RT * (STAGES * STAGE_BYTES + SCALE_BYTES);
    const int warp = threadIdx.x >> 5, segments = blockDim.x >> 5;
    const int tiles = (a.w.rows + 15) / 16 * (a.epilogue == SILU_F16 ? 2 : 1), groups = (tiles + RT - 1) / RT;
    Item item;
    if (!find_item(item, a, NT * 8)) return;
    Ring<RT, STAGES> ring;
    ring.open(a, item.expert, warp, memory + warp * WARP_BYTES, barriers[warp]);
    unsigned char* scales = ring.at(STAGES);
    float* sums = (float*)(memory + segments * WARP_BYTES);
    UNROLL for (int s = 0; s < STAGES; s++) ring.fetch(a, s, groups, tiles);
    let_later_kernels_start();
    wait_for_earlier_kernels();

    const bool never = a.segment <= 0;
    int phase = 0;
    Activations<NT> x;
    x.open(a, item, ring.begin, ring.records);
    NO_UNROLL for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        float acc[RT][NT][4] = {};
        NO_UNROLL for (int stage = 0; stage < ring.stages; stage++) {
            const unsigned char* records = ring.wait();
            const int stage_tiles = RECORD_TILES == 1 ? min(STAGE_RECORDS, ring.records - stage * STAGE_RECORDS) : STAGE_TILES;
            UNROLL for (int rt = 0; rt < RT; rt++) expand_scales(scales + rt * SCALE_BYTES, records + rt * STAGE_BYTES, a.w, stage_tiles);
            __syncwarp();
            multiply_stage<NT, RT>(acc, a, x, records, scales, stage_tiles, never);
            __syncwarp();
            ring.fetch(a, ring.slot, groups, tiles);
            ring.advance();
        }
        if (RECORD_TILES == 1) x.restart();  // the last step may have been half a one
        else x.next -= x.halves;
        join_segments<NT, RT>(acc, a, item, group * RT, sums, phase);
    }
}
