// linear: y[m, rows] = x[m, k] * W[rows, k]^T (+ bias), W quantised and re-laid, x f16, sums f32.
//
// Two kernels, one result to the bit: k is cut into segments of whole records, each segment is summed in order of k
// by mma.m16n8k16 (weights are operand A, tokens lie on n), and the segments are added in order. Neither the number of rows,
// nor a row's place among them, nor the kernel taken changes a row.
//
// linear_rows_*: up to 8*NT rows, the item blockIdx.y. A block takes RT row tiles of 16, its warps are the segments; it goes on
//   to further row tiles, each warp streaming records through its own ring without a break, the first of them before the wait
//   for the kernel that makes x. Activations come from L1/L2, a few halves of a tile ahead. Bound by the bytes of W up to 8
//   rows (instructions: about 65 a tile of 16 x 64, a third of what the bytes leave time for), then by reads of x.
// linear_tile: 64 rows and more. Block = 128 rows of W x 64 of x; every warp walks all of k for its two row tiles, x is staged
//   through shared memory. Bound by the tensor cores.
//
// Grouped (experts): an item is (expert, first place, count) from a list made on the device.
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
        begin = segment_start(warp, a), records = segment_start(warp + 1, a) - begin, stages = (records + STAGE_RECORDS - 1) / STAGE_RECORDS;
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
        Barrier{barriers + 8 * to}.load(targets, from, RECORD_TILES > 1 ? STAGE_BYTES : min(STAGE_RECORDS, records - next_stage * STAGE_RECORDS) * RECORD_BYTES);
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
DEVICE void multiply_stage(float (&acc)[RT][NT][4], const LinearArgs& a, Activations<NT>& x, const unsigned char* records, const unsigned char* scales, int stage_tiles, bool never) {
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

constexpr int TILE_WARPS = 4, TILE_ROWS = 64, X_STAGES = 2, X_BYTES = TILE_ROWS * 128, TILE_STAGES = 2;

// 64 rows of x, 64 k, into shared memory; 16-byte pieces of odd rows are swapped so that a warp's reads meet no bank twice.
DEVICE void stage_x(const LinearArgs& a, const int (&rows)[4], int kt, unsigned target) {
    UNROLL for (int i = 0; i < 4; i++) {
        const int piece = threadIdx.x & 7, row = (threadIdx.x >> 3) + i * 16;
        const unsigned short* from = a.x + (long long)max(rows[i], 0) * a.ldx + kt * 64 + piece * 8;
        copy16_async(target + row * 128 + (piece ^ ((row & 1) << 2)) * 16, from, rows[i] >= 0);
    }
}

template <int NT, int RT>
DEVICE void linear_tile(const LinearArgs& a) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[TILE_WARPS][TILE_STAGES];
    constexpr int WARP_BYTES = RT * (TILE_STAGES * STAGE_BYTES + SCALE_BYTES + NT * 512);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const bool gated = a.epilogue == SILU_F16;
    const int tiles = (a.w.rows + 15) / 16 * (gated ? 2 : 1), first_tile = (blockIdx.x * TILE_WARPS + warp) * RT;
    Item item;
    if (!find_item(item, a, TILE_ROWS)) return;
    unsigned char* ring = memory + X_STAGES * X_BYTES + warp * WARP_BYTES;
    unsigned char* scales = ring + TILE_STAGES * RT * STAGE_BYTES;
    float4* totals = (float4*)(scales + RT * SCALE_BYTES) + lane;
    const unsigned bars = shared_address(barriers[warp]);
    init_barriers<TILE_STAGES>(bars);
    const auto fetch = [&](int stage) {
        if (stage * STAGE_RECORDS >= a.w.records) return;
        unsigned targets[RT];
        const void* from[RT];
        UNROLL for (int rt = 0; rt < RT; rt++) {
            targets[rt] = shared_address(ring) + (stage % TILE_STAGES * RT + rt) * STAGE_BYTES;
            from[rt] = a.w.data + item.expert * a.w.expert_bytes + ((long long)min(first_tile + rt, tiles - 1) * a.w.records + stage * STAGE_RECORDS) * RECORD_BYTES;
        }
        Barrier{bars + 8 * (stage % TILE_STAGES)}.load(targets, from, min(STAGE_RECORDS, a.w.records - stage * STAGE_RECORDS) * RECORD_BYTES);
    };
    UNROLL for (int stage = 0; stage < TILE_STAGES; stage++) fetch(stage);
    let_later_kernels_start();
    wait_for_earlier_kernels();

    int rows[4];
    UNROLL for (int i = 0; i < 4; i++) {
        const int row = (threadIdx.x >> 3) + i * 16;
        rows[i] = row < item.count ? (a.x_rows ? a.x_rows[item.first + row] : item.first + row) : -1;
    }
    const unsigned x = shared_address(memory);
    const int k_tiles = a.w.records * RECORD_TILES;
    UNROLL for (int s = 0; s < X_STAGES - 1; s++) {
        if (s < k_tiles) stage_x(a, rows, s, x + s * X_BYTES);
        commit_copies();
    }
    float acc[RT][NT][4] = {};
    UNROLL for (int i = 0; i < RT * NT; i++) totals[i * 32] = make_float4(0.f, 0.f, 0.f, 0.f);
    int kt = 0, segment_end = segment_start(1, a), segment = 0;
    NO_UNROLL for (int r = 0; r < a.w.records; r++) {
        const int stage = r / STAGE_RECORDS, place = r % STAGE_RECORDS;
        const unsigned char* records = ring + stage % TILE_STAGES * (RT * STAGE_BYTES);
        if (place == 0) {
            Barrier{bars + 8 * (stage % TILE_STAGES)}.wait(stage / TILE_STAGES & 1);
            const int stage_tiles = min(STAGE_RECORDS, a.w.records - r) * RECORD_TILES;
            UNROLL for (int rt = 0; rt < RT; rt++) expand_scales(scales + rt * SCALE_BYTES, records + rt * STAGE_BYTES, a.w, stage_tiles);
            __syncwarp();
        }
        NO_UNROLL for (int i = 0; i < RECORD_TILES; i++, kt++) {
            const int tile = place * RECORD_TILES + i;
            wait_copies<X_STAGES - 2>();
            __syncthreads();
            if (kt + X_STAGES - 1 < k_tiles) stage_x(a, rows, kt + X_STAGES - 1, x + (kt + X_STAGES - 1) % X_STAGES * X_BYTES);
            commit_copies();
            const unsigned char* here = memory + kt % X_STAGES * X_BYTES + g * 128;
            UNROLL for (int h = 0; h < 2; h++) UNROLL for (int part = 0; part < PARTS; part++) {
                unsigned w[RT][2][4];
                UNROLL for (int rt = 0; rt < RT; rt++) unpack(w[rt], records + rt * STAGE_BYTES, scales + rt * SCALE_BYTES, a.w, tile, h, part);
                UNROLL for (int n = 0; n < NT; n++) {
                    const uint4 b = load<uint4>(here + n * 1024 + ((h * 4 + t) ^ ((g & 1) << 2)) * 16);
                    UNROLL for (int rt = 0; rt < RT; rt++) mma(acc[rt][n], w[rt][0], b.x, b.y), mma(acc[rt][n], w[rt][1], b.z, b.w);
                }
            }
        }
        if (place == STAGE_RECORDS - 1 || r == a.w.records - 1) {
            __syncwarp();
            fetch(stage + TILE_STAGES);
        }
        if (r + 1 == segment_end) {
            UNROLL for (int rt = 0; rt < RT; rt++) UNROLL for (int n = 0; n < NT; n++) {
                float4 sum = totals[(rt * NT + n) * 32];
                float (&c)[4] = acc[rt][n];
                sum.x += c[0], sum.y += c[1], sum.z += c[2], sum.w += c[3];
                totals[(rt * NT + n) * 32] = sum;
                c[0] = c[1] = c[2] = c[3] = 0.f;
            }
            segment_end = segment_start(++segment + 1, a);
        }
    }

    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int rt = 0; rt < (RT == 2 ? 2 : 1); rt++) {
        const float4 sum = totals[(rt * NT + n) * 32], up = totals[((RT - 1) * NT + n) * 32];
        const float c[4] = {sum.x, sum.y, sum.z, sum.w}, c_up[4] = {up.x, up.y, up.z, up.w};
        UNROLL for (int i = 0; i < 4; i++) {
            const int token = n * 8 + t * 2 + (i & 1), row = g + (i >> 1) * 8, place = item.first + token;
            if (token >= item.count) continue;
            if (!gated) emit(a, (first_tile + rt) * 16 + row, place, c[i]);
            else if (rt == 0) emit_silu(a, (first_tile >> 1) * 16 + row, place, c[i], c_up[i]);
        }
    }
}

#define ROWS_KERNEL(NT, RT, BLOCKS) \
    KERNEL void __launch_bounds__(MAX_WARPS * 32, BLOCKS) linear_rows_##NT##_##RT(const __grid_constant__ LinearArgs a) { linear_rows<NT, RT, 2>(a); }
ROWS_KERNEL(1, 1, (RECORD_TILES > 1 ? 3 : 2))
ROWS_KERNEL(1, 2, 2)
ROWS_KERNEL(2, 2, 2)
ROWS_KERNEL(4, 2, 2)
ROWS_KERNEL(8, 2, 1)
KERNEL void __launch_bounds__(TILE_WARPS * 32, 2) linear_tile_8_2(const __grid_constant__ LinearArgs a) { linear_tile<8, 2>(a); }
