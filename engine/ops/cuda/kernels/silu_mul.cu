// silu_mul: y[i, j] = silu(gate_up[i, j]) * gate_up[i, width + j], f32 to f16; where gate and up have different types.
#include "common.cuh"

struct SiluMulArgs {          // mirrored by silu_mul.py
    const float* gate_up;     // [m, 2 * width]
    unsigned short* y;        // [m, ldy]
    int width, ldy;
};
static_assert(sizeof(SiluMulArgs) == ARGS_BYTES, "silu_mul.py and silu_mul.cu disagree about SiluMulArgs");

KERNEL void __launch_bounds__(256) silu_mul(const __grid_constant__ SiluMulArgs a) {
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= a.width) return;
    const float* row = a.gate_up + (long long)blockIdx.y * 2 * a.width;
    const float gate = row[j];
    a.y[(long long)blockIdx.y * a.ldy + j] = float_to_half(gate / (1.f + __expf(-gate)) * row[a.width + j]);
}
