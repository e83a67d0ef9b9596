// feed: the token that each row of a forward reads: the host's, or where that is -1 the one its sequence's last sample drew.
#include "common.cuh"

struct FeedArgs {             // mirrored by feed.py
    const int* tokens;        // [m]
    const int* slots;         // [m]
    const int* last_tokens;   // [slots]
    int* fed;                 // [m]
    int m;
};
static_assert(sizeof(FeedArgs) == ARGS_BYTES, "feed.py and feed.cu disagree about FeedArgs");

KERNEL void __launch_bounds__(256) feed(const __grid_constant__ FeedArgs a) {
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.m) return;
    const int token = a.tokens[row];
    a.fed[row] = token >= 0 ? token : max(a.last_tokens[a.slots[row]], 0);
}
