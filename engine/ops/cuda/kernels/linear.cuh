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
    int m, ldx, ldy;
    int segment;               // records in one segment of k; the last may have fewer
    int epilogue;
};
static_assert(sizeof(LinearArgs) == ARGS_BYTES, "linear.py and linear.cuh disagree about LinearArgs");

constexpr int STAGE_RECORDS = RECORD_BYTES > 1280 ? 1 : RECORD_BYTES > 640 ? 2 : 4;
constexpr int STAGE_BYTES = STAGE_RECORDS * RECORD_BYTES, STAGE_TILES = STAGE_RECORDS * RECORD_TILES;
constexpr int SCALE_BYTES = STAGE_TILES * SCALE_TILE;  // expanded scales of a stage
constexpr int MAX_WARPS = 8;   // segments at most

// The rows that a block computes: of expert `expert`, `count` places from `first` on.
struct Item { int expert, first, count; };

DEVICE bool find_item(Item& item, const LinearArgs& a, int most) {  // false: there is no item for this block
    item.expert = 0, item.first = blockIdx.y * most, item.count = min(a.m - item.first, most);
    if (!a.items) return true;
    wait_for_earlier_kernels();  // the items are another kernel's result
    if ((int)blockIdx.y >= *a.item_count) return false;
    const int4 i = a.items[blockIdx.y];
    item.expert = i.x, item.first = i.y, item.count = i.z;
    return true;
}
DEVICE long long row_of_x(const LinearArgs& a, int place) { return (long long)(a.x_rows ? a.x_rows[place] : place) * a.ldx; }

DEVICE int segment_start(int segment, const LinearArgs& a) { return min(segment * a.segment, a.w.records); }

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
