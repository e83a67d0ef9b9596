// linear: y[m, rows] = x[m, k] * W[rows, k]^T (+ bias), W quantised and re-laid, x f16, sums f32.
//
// Two kernels, one result to the bit: k is cut into `split` segments of whole records, each segment is summed in order of k
// by mma.m16n8k16 (weights are operand A, tokens lie on n), and the segments are added in order. Neither the number of rows,
// nor a row's place among them, nor the kernel taken changes a row.
//
// linear_rows_*: up to 8*NT rows. Block = RT row tiles of 16; its warps are the segments, each streams its own records through
//   shared memory (all of a small matrix is in flight at once, before the wait for the kernel that makes x), x comes from L1/L2.
//   Bound by the bytes of W up to 16 rows, then by reads of x.
// linear_tile: 64 rows and more. Block = 128 rows of W x 64 of x; every warp walks all of k for its two row tiles, x is staged
//   through shared memory. Bound by the tensor cores.
//
// Grouped (experts): blockIdx.y takes an item (expert, first place, count) from a list made on the device.
#include "linear.cuh"

template <int NT>
DEVICE void load_x(uint4 (&b)[NT], const uint4* const (&x)[NT], int k32) {
    UNROLL for (int n = 0; n < NT; n++) b[n] = x[n][k32 * 4];
}

template <int NT, int RT>
DEVICE void multiply(float (&acc)[RT][NT][4], int rt, const unsigned (&w)[2][4], const uint4 (&b)[NT]) {
    UNROLL for (int n = 0; n < NT; n++) mma(acc[rt][n], w[0], b[n].x, b[n].y), mma(acc[rt][n], w[1], b[n].z, b[n].w);
}

template <int NT, int RT, int STAGES>
DEVICE void linear_rows(const LinearArgs& a) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned long long barriers[MAX_WARPS][STAGES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const bool gated = a.epilogue == SILU_F16;
    const int tiles = (a.w.rows + 15) / 16 * (gated ? 2 : 1), first_tile = blockIdx.x * RT;
    Item item;
    if (!find_item(item, a, NT * 8)) return;
    const int begin = segment_start(warp, a), end = segment_start(warp + 1, a);
    Ring<RT, STAGES> ring;
    ring.open(a, item.expert, first_tile, tiles, begin, end, memory + warp * (STAGES * RT * STAGE_BYTES), barriers[warp]);
    let_later_kernels_start();
    wait_for_earlier_kernels();

    const uint4* x[NT];  // a column past the last row repeats that row: it is computed and dropped
    UNROLL for (int n = 0; n < NT; n++) {
        const int place = item.first + min(n * 8 + g, item.count - 1);
        x[n] = (const uint4*)(a.x + (long long)(a.x_rows ? a.x_rows[place] : place) * a.ldx) + t;
    }
    float acc[RT][NT][4] = {};
    // Activations are asked for DEPTH halves of a tile ahead, each into the registers that its half has just left: they come
    // from L2, and a weight tile alone (100 instructions) does not cover that way.
    constexpr int DEPTH = NT <= 2 && STAGE_TILES % 2 == 0 ? 4 : 2;
    uint4 b[DEPTH][NT];
    int k32 = begin * (RECORD_K / 32);
    const int last = end * (RECORD_K / 32) - 1;
    UNROLL for (int d = 0; d < DEPTH; d++) load_x(b[d], x, min(k32 + d, last));
    NO_UNROLL for (int stage = 0; stage < ring.count; stage++) {
        ring.wait(stage);
        Record record[RT];
        UNROLL for (int rt = 0; rt < RT; rt++) record[rt] = open_record(ring.slot(stage, rt), a.w);
        const int stage_tiles = min(STAGE_RECORDS, end - begin - stage * STAGE_RECORDS) * RECORD_TILES;
        NO_UNROLL for (int first = 0; first < stage_tiles; first += DEPTH / 2) {
            UNROLL for (int d = 0; d < DEPTH; d++) {
                const int tile = first + d / 2, h = d & 1;
                if (RECORD_TILES == 1 && tile >= stage_tiles) break;  // odd only at the end of the segment
                UNROLL for (int rt = 0; rt < RT; rt++) {
                    if (RECORD_TILES == 1 && h == 0) record[rt] = open_record(ring.slot(stage, rt) + tile * RECORD_BYTES, a.w);
                    UNROLL for (int part = 0; part < PARTS; part++) {
                        unsigned w[2][4];
                        unpack(w, record[rt], a.w, open_tile(record[rt], a.w, tile % RECORD_TILES), tile % RECORD_TILES, h, part);
                        multiply(acc, rt, w, b[d]);
                    }
                }
                load_x(b[d], x, min(k32 + DEPTH, last));
                k32++;
            }
        }
        __syncwarp();
        if (stage + STAGES < ring.count) ring.fetch(stage + STAGES, end - begin);
    }

    // Segments meet in shared memory, eight tokens at a time; [segment][row tile][token][16 rows, padded to 20].
    float* sums = (float*)memory;
    const int segments = blockDim.x >> 5;
    UNROLL for (int n = 0; n < NT; n++) {
        if (n * 8 >= item.count) break;
        __syncthreads();
        UNROLL for (int rt = 0; rt < RT; rt++) {
            float* mine = sums + (warp * RT + rt) * 160 + t * 40 + g;
            mine[0] = acc[rt][n][0], mine[20] = acc[rt][n][1], mine[8] = acc[rt][n][2], mine[28] = acc[rt][n][3];
        }
        __syncthreads();
        const int tokens = min(8, item.count - n * 8), outputs = (gated ? 1 : RT) * 16 * tokens;
        for (int i = threadIdx.x; i < outputs; i += blockDim.x) {
            const int row = i & 15, token = (i >> 4) % tokens, rt = (i >> 4) / tokens, place = item.first + n * 8 + token;
            float sum[2] = {0.f, 0.f};
            for (int s = 0; s < segments; s++) {
                sum[0] += sums[(s * RT + rt) * 160 + token * 20 + row];
                if (RT == 2 && gated) sum[1] += sums[(s * RT + 1) * 160 + token * 20 + row];
            }
            if (gated) emit_silu(a, (first_tile >> 1) * 16 + row, place, sum[0], sum[1]);
            else emit(a, (first_tile + rt) * 16 + row, place, sum[0]);
        }
    }
}

constexpr int TILE_WARPS = 4, TILE_ROWS = 64, X_STAGES = 3, X_BYTES = TILE_ROWS * 128, TILE_STAGES = 2;

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
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const bool gated = a.epilogue == SILU_F16;
    const int tiles = (a.w.rows + 15) / 16 * (gated ? 2 : 1), first_tile = (blockIdx.x * TILE_WARPS + warp) * RT;
    Item item;
    if (!find_item(item, a, TILE_ROWS)) return;
    Ring<RT, TILE_STAGES> ring;
    unsigned char* weights = memory + X_STAGES * X_BYTES + warp * (TILE_STAGES * RT * STAGE_BYTES);
    ring.open(a, item.expert, first_tile, tiles, 0, a.w.records, weights, barriers[warp]);
    float4* totals = (float4*)(memory + X_STAGES * X_BYTES + TILE_WARPS * TILE_STAGES * RT * STAGE_BYTES) + warp * (RT * NT * 32) + lane;
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
        if (place == 0) ring.wait(stage);
        Record record[RT];
        UNROLL for (int rt = 0; rt < RT; rt++) record[rt] = open_record(ring.slot(stage, rt) + place * RECORD_BYTES, a.w);
        NO_UNROLL for (int tile = 0; tile < RECORD_TILES; tile++, kt++) {
            Tile scales[RT];
            UNROLL for (int rt = 0; rt < RT; rt++) scales[rt] = open_tile(record[rt], a.w, tile);
            wait_copies<X_STAGES - 2>();
            __syncthreads();
            if (kt + X_STAGES - 1 < k_tiles) stage_x(a, rows, kt + X_STAGES - 1, x + (kt + X_STAGES - 1) % X_STAGES * X_BYTES);
            commit_copies();
            const unsigned char* here = memory + kt % X_STAGES * X_BYTES + g * 128;
            UNROLL for (int h = 0; h < 2; h++) {
                UNROLL for (int part = 0; part < PARTS; part++) {
                    unsigned w[RT][2][4];
                    UNROLL for (int rt = 0; rt < RT; rt++) unpack(w[rt], record[rt], a.w, scales[rt], tile, h, part);
                    UNROLL for (int n = 0; n < NT; n++) {
                        const uint4 b = load<uint4>(here + n * 1024 + ((h * 4 + t) ^ ((g & 1) << 2)) * 16);
                        UNROLL for (int rt = 0; rt < RT; rt++) mma(acc[rt][n], w[rt][0], b.x, b.y), mma(acc[rt][n], w[rt][1], b.z, b.w);
                    }
                }
            }
        }
        if (place == STAGE_RECORDS - 1 || r == a.w.records - 1) {
            __syncwarp();
            if (stage + TILE_STAGES < ring.count) ring.fetch(stage + TILE_STAGES, a.w.records);
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

#define ROWS_KERNEL(NT, RT, STAGES, BLOCKS) \
    KERNEL void __launch_bounds__(MAX_WARPS * 32, BLOCKS) linear_rows_##NT##_##RT(const __grid_constant__ LinearArgs a) { linear_rows<NT, RT, STAGES>(a); }
ROWS_KERNEL(1, 1, 3, 3)
ROWS_KERNEL(1, 2, 2, 2)
ROWS_KERNEL(2, 2, 2, 2)
ROWS_KERNEL(4, 2, 2, 1)
ROWS_KERNEL(8, 2, 2, 1)
KERNEL void __launch_bounds__(TILE_WARPS * 32, 2) linear_tile_8_2(const __grid_constant__ LinearArgs a) { linear_tile<8, 2>(a); }
