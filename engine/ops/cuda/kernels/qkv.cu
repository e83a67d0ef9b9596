// qkv: what stands between the product for Q, K and V and attention, for every row:
//   Q, K: per head, RMS norm with weight (where the model has one), then the rotary embedding;  Q leaves as f16;
//   K, V: into the cache as f16, or as int8 with scale max|v| / 127 (f16) per head and token.
//
// Warp = one head of one row; a row at position -1 is padding and touches nothing. Angles are position * frequency in f64,
// brought to one turn before the f32 sine: position 200,000 is as exact as position 1. Bound by latency (decode), bytes (prefill).
#include "common.cuh"

struct QkvArgs {              // mirrored by qkv.py
    Cache cache;
    const float* qkv;         // [m, (heads + 2 kv heads) * dim]
    unsigned short* q;        // [m, heads * dim] f16
    const float* q_norm;      // [dim] or null
    const float* k_norm;
    const double* frequencies;  // [pairs], radians a position
    const int* positions;     // [m]
    const int* sequences;     // [m]: row of the block tables
    int heads, dim, pairs, interleaved, int8;
    float eps, magnitude;
};
static_assert(sizeof(QkvArgs) == ARGS_BYTES, "qkv.py and qkv.cu disagree about QkvArgs");

constexpr int WARPS = 8, MOST_DIM = 256;

// v * weight / rms over one head; each lane holds dims lane, lane + 32, ...
DEVICE void normalise(float* v, const QkvArgs& a, const float* weight) {
    const int lane = threadIdx.x & 31;
    float sum = 0.f;
    for (int d = lane; d < a.dim; d += 32) sum += v[d] * v[d];
    const float scale = rsqrtf(warp_sum(sum) / a.dim + a.eps);
    for (int d = lane; d < a.dim; d += 32) v[d] *= scale * weight[d];
    __syncwarp();
}

DEVICE void turn(float* v, const QkvArgs& a, const float2* angles) {
    for (int pair = threadIdx.x & 31; pair < a.pairs; pair += 32) {
        const int i = a.interleaved ? 2 * pair : pair, j = a.interleaved ? i + 1 : pair + a.pairs;
        const float x = v[i], y = v[j], cos = angles[pair].x, sin = angles[pair].y;
        v[i] = x * cos - y * sin, v[j] = x * sin + y * cos;
    }
    __syncwarp();
}

DEVICE void store(const float* v, const QkvArgs& a, void* target, unsigned short* scales, int head, int position, int sequence) {
    const int lane = threadIdx.x & 31;
    const long long block = a.cache.tables[(long long)sequence * a.cache.table_width + position / BLOCK_TOKENS];
    const long long token = (block * a.cache.kv_heads + head) * BLOCK_TOKENS + position % BLOCK_TOKENS;
    if (!a.int8) {
        for (int d = lane; d < a.dim; d += 32) ((unsigned short*)target)[token * a.dim + d] = float_to_half(v[d]);
        return;
    }
    float most = 0.f;
    for (int d = lane; d < a.dim; d += 32) most = fmaxf(most, fabsf(v[d]));
    const unsigned short scale = float_to_half(warp_max(most) / 127.f);
    const float wide = half_to_float(scale);
    for (int d = lane; d < a.dim; d += 32)
        ((signed char*)target)[token * a.dim + d] = wide > 0.f ? (signed char)fminf(fmaxf(rintf(v[d] / wide), -127.f), 127.f) : 0;
    if (lane == 0) scales[token] = scale;
}

KERNEL void __launch_bounds__(WARPS * 32) qkv(const __grid_constant__ QkvArgs a) {
    __shared__ float values[WARPS][MOST_DIM];
    __shared__ float2 angles[MOST_DIM / 2];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x, kv_heads = a.cache.kv_heads;
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int position = a.positions[row];
    if (position < 0) return;
    for (int i = threadIdx.x; i < a.pairs; i += blockDim.x) {
        double half_turns = position * a.frequencies[i] * 0.31830988618379067154;
        half_turns -= 2. * rint(half_turns * 0.5);
        angles[i] = make_float2(cospif((float)half_turns) * a.magnitude, sinpif((float)half_turns) * a.magnitude);
    }
    __syncthreads();
    const int head = blockIdx.y * WARPS + warp;  // Q heads, then K's, then V's
    if (head >= a.heads + 2 * kv_heads) return;
    float* v = values[warp];
    const float* from = a.qkv + ((long long)row * (a.heads + 2 * kv_heads) + head) * a.dim;
    for (int d = lane; d < a.dim; d += 32) v[d] = from[d];
    __syncwarp();
    const bool is_q = head < a.heads, is_v = head >= a.heads + kv_heads;
    const float* weight = is_q ? a.q_norm : a.k_norm;
    if (!is_v && weight) normalise(v, a, weight);
    if (!is_v) turn(v, a, angles);
    if (is_q) {
        unsigned short* q = a.q + ((long long)row * a.heads + head) * a.dim;
        for (int d = lane; d < a.dim; d += 32) q[d] = float_to_half(v[d]);
    } else if (is_v) {
        store(v, a, a.cache.v, a.cache.v_scales, head - a.heads - kv_heads, position, a.sequences[row]);
    } else {
        store(v, a, a.cache.k, a.cache.k_scales, head - a.heads, position, a.sequences[row]);
    }
}
