// 64 rows of x a block: every warp walks all of k for its two row tiles and keeps the segments apart (linear.cu says the rest).
#pragma once
#include "linear.cuh"

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
            from[rt] = a.w.data + item.expert * a.w.expert_bytes +
                ((long long)min(first_tile + rt, tiles - 1) * a.w.records + stage * STAGE_RECORDS) * RECORD_BYTES;
        }
        const int records = min(STAGE_RECORDS, a.w.records - stage * STAGE_RECORDS);
        Barrier{bars + 8 * (stage % TILE_STAGES)}.load(targets, from, records * RECORD_BYTES);
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
                UNROLL for (int rt = 0; rt < RT; rt++)
                    unpack(w[rt], records + rt * STAGE_BYTES, scales + rt * SCALE_BYTES, a.w, tile, h, part);
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
