// rmsnorm: y[i, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight, f32 to f16, r = rows[i] (or i).
//
// Block = one row, every thread four numbers at a time, sums in an order that depends on the width alone. Bound by latency.
#include "common.cuh"

struct RmsnormArgs {          // mirrored by rmsnorm.py
    const float* x;           // [*, width]
    const float* weight;      // [width]
    unsigned short* y;        // [m, ldy]
    const int* rows;          // [m] or null
    int width, ldy;
    float eps;
};
static_assert(sizeof(RmsnormArgs) == ARGS_BYTES, "rmsnorm.py and rmsnorm.cu disagree about RmsnormArgs");

KERNEL void __launch_bounds__(1024) rmsnorm(const __grid_constant__ RmsnormArgs a) {
    __shared__ float shared[32];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int row = a.rows ? a.rows[blockIdx.x] : blockIdx.x;
    const float4* x = (const float4*)(a.x + (long long)row * a.width);
    float sum = 0.f;
    for (int i = threadIdx.x; i < a.width / 4; i += blockDim.x) {
        const float4 v = x[i];
        sum += v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w);
    }
    const float scale = rsqrtf(block_sum(sum, shared) / a.width + a.eps);
    uint2* y = (uint2*)(a.y + (long long)blockIdx.x * a.ldy);
    for (int i = threadIdx.x; i < a.width / 4; i += blockDim.x) {
        const float4 v = x[i], w = ((const float4*)a.weight)[i];
        y[i] = make_uint2(pack_half2(v.x * scale * w.x, v.y * scale * w.y), pack_half2(v.z * scale * w.z, v.w * scale * w.w));
    }
}
