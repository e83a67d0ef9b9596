// linear: y[m, rows] = x[m, k] * W[rows, k]^T (+ bias), W quantised and re-laid, x f16, sums f32.
//
// Two kernels, one result to the bit: k is cut into segments of whole records, each segment is summed in order of k
// by mma.m16n8k16 (weights are operand A, tokens lie on n), and the segments are added in order. Neither the number of rows,
// nor a row's place among them, nor the kernel taken changes a row.
//
// linear_rows_*: up to 8*NT rows, the item blockIdx.y. A block takes RT row tiles of 16, its warps are the segments; it goes on
//   to further row tiles, each warp streaming records through its own ring without a break, the first of them before the wait
//   for the kernel that makes x. Activations come from L1/L2, a few halves of a tile ahead. Bound by the bytes of W up to 8
//   rows (instructions: about 65 a tile of 16 x 64, a third of what the bytes leave time for), then by reads of x.
// linear_tile: 64 rows and more. Block = 128 rows of W x 64 of x; every warp walks all of k for its two row tiles, x is staged
//   through shared memory. Bound by the tensor cores.
//
// Grouped (experts): an item is (expert, first place, count) from a list made on the device.
#include "linear_rows.cuh"
#include "linear_tile.cuh"

#define ROWS_KERNEL(NT, RT, BLOCKS) \
    KERNEL void __launch_bounds__(MAX_WARPS * 32, BLOCKS) linear_rows_##NT##_##RT(const __grid_constant__ LinearArgs a) { \
        linear_rows<NT, RT, 2>(a); \
    }
ROWS_KERNEL(1, 1, (RECORD_TILES > 1 ? 3 : 2))
ROWS_KERNEL(1, 2, 2)
ROWS_KERNEL(2, 2, 2)
ROWS_KERNEL(4, 2, 2)
ROWS_KERNEL(8, 2, 1)
KERNEL void __launch_bounds__(TILE_WARPS * 32, 2) linear_tile_8_2(const __grid_constant__ LinearArgs a) { linear_tile<8, 2>(a); }
