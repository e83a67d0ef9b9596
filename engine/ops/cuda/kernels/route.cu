// route: which experts a row goes to, and the work of the grouped products made from that, without a word to the host.
//
// route_choose: shares = softmax(logits) of the `used` best experts (the first of equals), over their sum if `normalise`;
//   warp = row. route_group: rows sorted by expert into places, and items of up to `rows_of_item` places of one expert; one
//   block. The order within an expert is as it comes: no product depends on it. route_add: y += sum over j of share_j * part_j,
//   in order of j. Rows at position -1 are padding: no expert is read for them. Bound by latency.
#include "common.cuh"

struct RouteArgs {            // mirrored by route.py
    const float* logits;      // [m, experts]
    const int* positions;     // [m]
    int* chosen;              // [m, used]
    float* shares;            // [m, used]
    int4* items;              // [most]
    int* item_count;          // [1]
    int* tokens;              // [m * used]: row of a place
    int* pairs;               // [m * used]: row * used + j of a place
    const float* parts;       // [m * used, width]
    float* y;                 // [m, width]
    int m, experts, used, normalise, rows_of_item, width;
};
static_assert(sizeof(RouteArgs) == ARGS_BYTES, "route.py and route.cu disagree about RouteArgs");

constexpr int MOST_EXPERTS = 512, PER_LANE = MOST_EXPERTS / 32, WARPS = 8, THREADS = 1024;

KERNEL void __launch_bounds__(WARPS * 32) route_choose(const __grid_constant__ RouteArgs a) {
    const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    if (row >= a.m) return;
    float odds[PER_LANE], most = -INFINITY, total = 0.f;
    UNROLL for (int i = 0; i < PER_LANE; i++) {
        const int expert = lane + 32 * i;
        odds[i] = expert < a.experts ? a.logits[(long long)row * a.experts + expert] : -INFINITY;
        most = fmaxf(most, odds[i]);
    }
    most = warp_max(most);
    UNROLL for (int i = 0; i < PER_LANE; i++) total += odds[i] = __expf(odds[i] - most);
    total = warp_sum(total);
    float kept = 0.f;
    const bool padding = a.positions[row] < 0;
    for (int j = 0; j < a.used; j++) {
        float best = -1.f;
        int at = 0;
        UNROLL for (int i = 0; i < PER_LANE; i++) if (lane + 32 * i < a.experts && odds[i] > best) best = odds[i], at = lane + 32 * i;
        UNROLL for (int step = 16; step; step >>= 1) {
            const float other = __shfl_xor_sync(ALL_LANES, best, step);
            const int where = __shfl_xor_sync(ALL_LANES, at, step);
            if (other > best || (other == best && where < at)) best = other, at = where;
        }
        UNROLL for (int i = 0; i < PER_LANE; i++) if (at == lane + 32 * i) odds[i] = -2.f;
        kept += best;
        if (lane == 0) a.chosen[row * a.used + j] = padding ? -1 : at, a.shares[row * a.used + j] = best;
    }
    __syncwarp();
    const float over = 1.f / (a.normalise ? kept : total);
    for (int j = lane; j < a.used; j += 32) a.shares[row * a.used + j] *= over;
}

KERNEL void __launch_bounds__(THREADS, 1) route_group(const __grid_constant__ RouteArgs a) {
    __shared__ int counts[MOST_EXPERTS], next[MOST_EXPERTS], warp_totals[2][MOST_EXPERTS / 32];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int pairs = a.m * a.used, expert = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (expert < MOST_EXPERTS) counts[expert] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) if (a.chosen[i] >= 0) atomicAdd(&counts[a.chosen[i]], 1);
    __syncthreads();
    // Places and items before each expert: two prefix sums, a warp over 32 experts, then over the warps.
    int count = 0, items = 0, places_to = 0, items_to = 0;
    if (expert < MOST_EXPERTS) {
        count = places_to = counts[expert], items = items_to = (count + a.rows_of_item - 1) / a.rows_of_item;
        UNROLL for (int step = 1; step < 32; step *= 2) {
            const int p = __shfl_up_sync(ALL_LANES, places_to, step), q = __shfl_up_sync(ALL_LANES, items_to, step);
            if (lane >= step) places_to += p, items_to += q;
        }
        if (lane == 31) warp_totals[0][warp] = places_to, warp_totals[1][warp] = items_to;
    }
    __syncthreads();
    if (expert < MOST_EXPERTS) {
        for (int w = 0; w < warp; w++) places_to += warp_totals[0][w], items_to += warp_totals[1][w];
        const int first = places_to - count;
        next[expert] = first;
        for (int i = 0; i < items; i++) {
            const int from = i * a.rows_of_item;
            a.items[items_to - items + i] = make_int4(expert, first + from, min(a.rows_of_item, count - from), 0);
        }
        if (expert == MOST_EXPERTS - 1) *a.item_count = items_to;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
        if (a.chosen[i] < 0) continue;
        const int place = atomicAdd(&next[a.chosen[i]], 1);
        a.tokens[place] = i / a.used, a.pairs[place] = i;
    }
}

KERNEL void __launch_bounds__(256) route_add(const __grid_constant__ RouteArgs a) {
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int row = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (column >= a.width || a.positions[row] < 0) return;
    float4* y = (float4*)(a.y + (long long)row * a.width + column);
    float4 sum = *y;
    for (int j = 0; j < a.used; j++) {
        const float share = a.shares[row * a.used + j];
        const float4 part = *(const float4*)(a.parts + ((long long)row * a.used + j) * a.width + column);
        sum.x += share * part.x, sum.y += share * part.y, sum.z += share * part.z, sum.w += share * part.w;
    }
    *y = sum;
}
