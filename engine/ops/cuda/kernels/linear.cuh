// What both kernels of linear.cu share: arguments, a warp's ring of weight records, what happens to a finished sum.
#pragma once
#include "weights.cuh"

#define STORE_F32 0
#define STORE_F16 1
#define ADD_F32 2      // y += sum: the residual
#define SILU_F16 3     // row tiles alternate gate, up: y = silu(gate) * up

struct LinearArgs {     // mirrored by linear.py
    Weights w;
    const unsigned short* x;   // [*, ldx] f16, zero or finite beyond k
    void* y;                   // [*, ldy]
    const float* bias;         // [rows] or null
    const int4* items;         // grouped: (expert, first, count, 0); null: one matrix, rows 0..m-1
    const int* item_count;
    const int* x_rows;         // grouped: row of x, row of y, by place; null: the place itself
    const int* y_rows;
    int m, ldx, ldy, split, epilogue;
};
static_assert(sizeof(LinearArgs) == ARGS_BYTES, "linear.py and linear.cuh disagree about LinearArgs");

constexpr int STAGE_RECORDS = RECORD_BYTES > 1280 ? 1 : RECORD_BYTES > 640 ? 2 : 4;
constexpr int STAGE_BYTES = STAGE_RECORDS * RECORD_BYTES, STAGE_TILES = STAGE_RECORDS * RECORD_TILES;
constexpr int MAX_WARPS = 8;   // segments at most

struct Item { int expert, first, count; };

// The rows that this block computes. False: nothing to do. `rows` is the most one block takes.
DEVICE bool find_item(Item& item, const LinearArgs& a, int rows) {
    item.expert = 0, item.first = blockIdx.y * rows, item.count = min(a.m - item.first, rows);
    if (!a.items) return true;
    wait_for_earlier_kernels();  // the items are another kernel's result
    if (blockIdx.y >= (unsigned)*a.item_count) return false;
    const int4 i = a.items[blockIdx.y];
    item.expert = i.x, item.first = i.y, item.count = i.z;
    return true;
}

// One warp's records of RT row tiles, streamed through its own part of shared memory.
template <int RT, int STAGES>
struct Ring {
    const unsigned char* source[RT];
    unsigned char* buffer;
    unsigned barriers;
    int count;   // stages in all

    DEVICE void open(const LinearArgs& a, int expert, int first_tile, int tiles, int begin, int end, unsigned char* memory, unsigned long long* bars) {
        buffer = memory, barriers = shared_address(bars);
        count = (end - begin + STAGE_RECORDS - 1) / STAGE_RECORDS;
        UNROLL for (int rt = 0; rt < RT; rt++)
            source[rt] = a.w.data + expert * a.w.expert_bytes + ((long long)min(first_tile + rt, tiles - 1) * a.w.records + begin) * RECORD_BYTES;
        if ((threadIdx.x & 31) == 0) {
            UNROLL for (int s = 0; s < STAGES; s++) Barrier{barriers + 8 * s}.init();
            Barrier::fence_init();
        }
        __syncwarp();
        UNROLL for (int s = 0; s < STAGES; s++) if (s < count) fetch(s, end - begin);
    }
    DEVICE unsigned char* slot(int stage, int rt) const { return buffer + ((stage % STAGES) * RT + rt) * STAGE_BYTES; }
    DEVICE void fetch(int stage, int records) {
        Barrier b{barriers + 8 * (stage % STAGES)};
        const unsigned bytes = min(STAGE_RECORDS, records - stage * STAGE_RECORDS) * RECORD_BYTES;
        b.expect(bytes * RT);
        UNROLL for (int rt = 0; rt < RT; rt++) b.load(shared_address(slot(stage, rt)), source[rt] + (long long)stage * STAGE_BYTES, bytes);
        b.loads_done();
    }
    DEVICE void wait(int stage) { Barrier{barriers + 8 * (stage % STAGES)}.wait((stage / STAGES) & 1); }
};

DEVICE int segment_start(int segment, const LinearArgs& a) { return segment * a.w.records / a.split; }

DEVICE float silu(float v) { return v / (1.f + __expf(-v)); }

DEVICE void emit(const LinearArgs& a, int row, int place, float sum) {
    if (row >= a.w.rows) return;
    const long long at = (long long)(a.y_rows ? a.y_rows[place] : place) * a.ldy + row;
    float v = sum * a.w.out;
    if (a.bias) v += a.bias[row];
    if (a.epilogue == STORE_F32) ((float*)a.y)[at] = v;
    else if (a.epilogue == STORE_F16) ((unsigned short*)a.y)[at] = float_to_half(v);
    else ((float*)a.y)[at] += v;
}

DEVICE void emit_silu(const LinearArgs& a, int row, int place, float gate, float up) {
    if (row >= a.w.rows) return;
    const long long at = (long long)(a.y_rows ? a.y_rows[place] : place) * a.ldy + row;
    ((unsigned short*)a.y)[at] = float_to_half(silu(gate * a.w.out) * (up * a.w.out));
}
