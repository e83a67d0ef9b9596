// embed: y[i, :] = row tokens[i] of the re-laid table, f32.   expand: y[rows, k] f16 = the whole matrix.
//
// Both read records as linear does and give the very numbers that its tensor cores see (times 2^p), so they also show by
// themselves that a format is unpacked right. embed: block = one token, warps share out its records; 16 rows are read for
// one, which at a few tokens a step is nothing. expand: warp = one record; bound by the bytes of y.
#include "weights.cuh"

struct EmbedArgs {        // mirrored by embed.py
    Weights w;
    const int* tokens;    // [m]; expand: unused
    void* y;
    int k, ldy;
};
static_assert(sizeof(EmbedArgs) == ARGS_BYTES, "embed.py and embed.cu disagree about EmbedArgs");

constexpr int WARPS = 4;

// The eight weights of row g (of row g + 8 with `high`) that a lane holds of half h.
DEVICE uint4 row_of(const unsigned (&a)[2][4], bool high) {
    return high ? make_uint4(a[0][1], a[0][3], a[1][1], a[1][3]) : make_uint4(a[0][0], a[0][2], a[1][0], a[1][2]);
}

// One warp's place in shared memory: a record and its expanded scales.
struct Place {
    unsigned char* record;
    unsigned char* scales;
    Barrier barrier;

    DEVICE Place(unsigned char* memory, unsigned long long* barriers) {
        const int warp = threadIdx.x >> 5;
        record = memory + warp * (RECORD_BYTES + RECORD_TILES * SCALE_TILE), scales = record + RECORD_BYTES;
        barrier = {shared_address(barriers + warp)};
        init_barriers<1>(barrier.address);
    }
    DEVICE void fill(const Weights& w, long long tile, int index, unsigned parity) {
        __syncwarp();
        const unsigned targets[1] = {shared_address(record)};
        const void* const from[1] = {w.data + (tile * w.records + index) * RECORD_BYTES};
        barrier.load(targets, from, RECORD_BYTES);
        barrier.wait(parity);
        expand_scales(scales, record, w, RECORD_TILES);
        __syncwarp();
    }
};

KERNEL void __launch_bounds__(WARPS * 32) embed(const __grid_constant__ EmbedArgs a) {
    __shared__ __align__(128) unsigned char memory[WARPS * (RECORD_BYTES + RECORD_TILES * SCALE_TILE)];
    __shared__ unsigned long long barriers[WARPS];
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int token = a.tokens[blockIdx.x];
    Place place(memory, barriers);
    float* y = (float*)a.y + (long long)blockIdx.x * a.ldy;
    unsigned parity = 0;
    for (int r = warp; r < a.w.records; r += WARPS, parity ^= 1) {
        place.fill(a.w, token >> 4, r, parity);
        for (int tile = 0; tile < RECORD_TILES; tile++) {
            UNROLL for (int h = 0; h < 2; h++) {
                unsigned w[2][4];
                unpack(w, place.record, place.scales, a.w, tile, h);
                const uint4 v = row_of(w, token & 8);
                const int k = r * RECORD_K + tile * 64 + h * 32 + t * 8;
                if (g != (token & 7)) continue;
                UNROLL for (int i = 0; i < 4; i++) {
                    if (k + 2 * i < a.k) y[k + 2 * i] = low_float(word(v, i)) * a.w.out;
                    if (k + 2 * i + 1 < a.k) y[k + 2 * i + 1] = high_float(word(v, i)) * a.w.out;
                }
            }
        }
    }
}

KERNEL void __launch_bounds__(WARPS * 32) expand(const __grid_constant__ EmbedArgs a) {
    __shared__ __align__(128) unsigned char memory[WARPS * (RECORD_BYTES + RECORD_TILES * SCALE_TILE)];
    __shared__ unsigned long long barriers[WARPS];
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int r = blockIdx.x * WARPS + warp;
    if (r >= a.w.records) return;
    Place place(memory, barriers);
    place.fill(a.w, blockIdx.y, r, 0);
    for (int tile = 0; tile < RECORD_TILES; tile++) {
        UNROLL for (int h = 0; h < 2; h++) {
            unsigned w[2][4];
            unpack(w, place.record, place.scales, a.w, tile, h);
            const int k = r * RECORD_K + tile * 64 + h * 32 + t * 8;
            UNROLL for (int high = 0; high < 2; high++) {
                const int row = blockIdx.y * 16 + high * 8 + g;
                if (row >= a.w.rows || k >= a.ldy) continue;
                uint4 v = row_of(w, high);
                v.x = pack_half2(low_float(v.x) * a.w.out, high_float(v.x) * a.w.out);
                v.y = pack_half2(low_float(v.y) * a.w.out, high_float(v.y) * a.w.out);
                v.z = pack_half2(low_float(v.z) * a.w.out, high_float(v.z) * a.w.out);
                v.w = pack_half2(low_float(v.w) * a.w.out, high_float(v.w) * a.w.out);
                *(uint4*)((unsigned short*)a.y + (long long)row * a.ldy + k) = v;  // ldy is a multiple of 8
            }
        }
    }
}
