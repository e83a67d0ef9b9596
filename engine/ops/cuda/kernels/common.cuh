// Device functions shared by all kernels. Half-precision arithmetic is inline PTX, so that no toolkit header is needed:
// NVRTC alone compiles this tree. A `half2` value travels as its 32 bits (`unsigned`), low half first.
#pragma once

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")

constexpr unsigned ALL_LANES = 0xffffffffu;
#define INFINITY __int_as_float(0x7f800000)

// ---- half precision (subnormals are kept: the weight formats rely on it) ----

DEVICE unsigned hfma2(unsigned a, unsigned b, unsigned c) {
    unsigned r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
DEVICE unsigned hmul2(unsigned a, unsigned b) {
    unsigned r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE unsigned hsub2(unsigned a, unsigned b) {
    unsigned r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
DEVICE unsigned low2(unsigned a) { return __byte_perm(a, a, 0x1010); }
DEVICE unsigned high2(unsigned a) { return __byte_perm(a, a, 0x3232); }

DEVICE float half_to_float(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
DEVICE float low_float(unsigned h2) { return half_to_float((unsigned short)h2); }
DEVICE float high_float(unsigned h2) { return half_to_float((unsigned short)(h2 >> 16)); }

// Two floats to half2, clamped to the finite range: an overflow must not become an infinity (and then NaN) downstream.
DEVICE unsigned pack_half2(float low, float high) {
    unsigned r;
    low = fminf(fmaxf(low, -65504.f), 65504.f);
    high = fminf(fmaxf(high, -65504.f), 65504.f);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
DEVICE unsigned short float_to_half(float f) { return (unsigned short)pack_half2(f, 0.f); }

// ---- tensor cores ----

// c[16x8] += a[16x16] * b[16x8], f16 operands, f32 sums. The one product of every matrix kernel: its inner order of sums is
// the hardware's and does not depend on the other columns, which is what row invariance rests on.
// Volatile, as is load_ahead: a load stays behind the product whose operand it replaces and is not put off to its own use.
DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE uint4 load_ahead(const void* global) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global));
    return v;
}

// ---- shared memory and asynchronous copies ----

DEVICE bool elect() {  // true in one lane of a converged warp, in a way that the compiler knows
#if __CUDA_ARCH__ >= 900
    unsigned chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen;
#else
    return (threadIdx.x & 31) == 0;
#endif
}

DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

DEVICE void copy16_async(unsigned shared, const void* global, bool valid) {  // zero-filled when not valid
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait_copies() {  // all but the N latest groups of this thread have landed
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

DEVICE void ldmatrix_x4_trans(unsigned (&r)[4], unsigned shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}

// Completion of bulk loads into shared memory. On sm_90 and later one lane starts a bulk copy that reports its bytes; before,
// every lane copies 16 bytes at a time and arrives when its copies have landed. Waiting is the same.
struct Barrier {
    unsigned address;

    DEVICE void init() {  // by one thread; fence_init and a warp or block barrier follow
#if __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
#else
        asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(address) : "memory");
#endif
    }
    static DEVICE void fence_init() {
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    // N runs of `bytes` (a multiple of 16) each, by all lanes of one warp after they have agreed (__syncwarp) that the
    // targets are free; completes one phase.
    template <int N>
    DEVICE void load(const unsigned (&targets)[N], const void* const (&global)[N], unsigned bytes) {
#if __CUDA_ARCH__ >= 900
        if (elect()) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes * N) : "memory");
            UNROLL for (int i = 0; i < N; i++)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             ::"r"(targets[i]), "l"(global[i]), "r"(bytes), "r"(address) : "memory");
        }
#else
        UNROLL for (int i = 0; i < N; i++)
            for (unsigned at = (threadIdx.x & 31) * 16; at < bytes; at += 512)
                copy16_async(targets[i] + at, (const char*)global[i] + at, true);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
#endif
    }
    DEVICE void wait(unsigned parity) {
#if __CUDA_ARCH__ >= 900
#define TRY "mbarrier.try_wait.parity.shared.b64"
#else
#define TRY "mbarrier.test_wait.parity.shared.b64"
#endif
        asm volatile("{\n.reg .pred done;\nagain:\n" TRY " done, [%0], %1;\n@done bra out;\nbra again;\nout:\n}"
                     ::"r"(address), "r"(parity) : "memory");
#undef TRY
    }
};

template <int N>
DEVICE void init_barriers(unsigned address) {  // N of them, by the warp that will use them
    if (elect()) {
        UNROLL for (int i = 0; i < N; i++) Barrier{address + 8 * i}.init();
        Barrier::fence_init();
    }
    __syncwarp();
}

// ---- programmatic dependent launch: every kernel waits before it reads what an earlier kernel wrote ----

DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_later_kernels_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- reductions with a fixed order ----

DEVICE float block_sum(float v, float* shared) {  // shared: 32 floats; every thread gets the sum
    UNROLL for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(ALL_LANES, v, step);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    v = (threadIdx.x & 31) < blockDim.x / 32 ? shared[threadIdx.x & 31] : 0.f;
    UNROLL for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

DEVICE float warp_sum(float v) {
    UNROLL for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}
DEVICE float warp_max(float v) {
    UNROLL for (int step = 16; step; step >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, step));
    return v;
}

// Places in the paged cache: a block is 64 tokens of all kv heads of one layer's K (or V), [kv head][token][dim].
constexpr int BLOCK_TOKENS = 64;

struct Cache {                 // mirrored by cache.py; one layer
    void* k;
    void* v;
    unsigned short* k_scales;  // int8: f16 [block][kv head][64]
    unsigned short* v_scales;
    const int* tables;         // [sequences, table_width]: block of each 64 positions
    int table_width, kv_heads;
};
