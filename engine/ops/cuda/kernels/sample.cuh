// The tokens that top-k and top-p leave of a row of logits, for sample_pick: a block of PICK_THREADS per row.
//
// `gather` counts the row in 256 bins of an eighth of a nat below the peak, finds the bin at which enough tokens, or enough
// probability mass, are above, and sorts everything down to there in shared memory, best first, the lower token first of
// equals. Bins need integer atomics alone (64-bit and float ones are loops in shared memory: they took 2 ms a row). Where more
// tokens than the pool holds are in question (very flat rows), `cut_at` selects by radix over the whole row: slow, and as exact.
#pragma once
#include "common.cuh"

constexpr int PICK_THREADS = 1024, POOL = 4096, BINS = 256, PER_THREAD = POOL / PICK_THREADS;

DEVICE unsigned order_of(float v) {  // unsigned integers in the order of floats
    const unsigned bits = __float_as_uint(v);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The best of a row up to a point: those with a greater key, and of those with an equal one the tokens up to `last`.
struct Cut {
    unsigned key;
    int last;
    DEVICE bool keeps(float v, int token) const { return order_of(v) > key || (order_of(v) == key && token <= last); }
};
constexpr Cut NO_CUT = {0, 0x7fffffff};

struct Scratch {
    unsigned long long bins[256], totals[PICK_THREADS / 32], above;
    unsigned digit;
    int counts[PICK_THREADS / 32], last;
};

DEVICE unsigned long long block_total(unsigned long long v, Scratch& shared) {  // every thread gets the sum
    UNROLL for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(ALL_LANES, v, step);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared.totals[threadIdx.x >> 5] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < PICK_THREADS / 32; i++) v += shared.totals[i];
    return v;
}

// Least number of best tokens whose weights reach `wanted`. Radix select, eight bits of the key a turn, by the whole block.
template <class Weight>
DEVICE Cut cut_at(const float* row, int vocab, unsigned long long wanted, const Weight& weight, Scratch& shared) {
    unsigned key = 0, mask = 0;
    unsigned long long above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) shared.bins[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += PICK_THREADS) {
            const unsigned k = order_of(row[i]);
            if ((k & mask) != key) continue;
            const unsigned long long w = weight(row[i], i);
            if (w) atomicAdd(&shared.bins[k >> shift & 255], w);
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // the first bin from the top at which the sum reaches `wanted`; a lane has eight
            const int top = 255 - threadIdx.x * 8;
            unsigned long long own = 0, before;
            for (int i = 0; i < 8; i++) own += shared.bins[top - i];
            before = own;
            UNROLL for (int step = 1; step < 32; step *= 2) {
                const unsigned long long other = __shfl_up_sync(ALL_LANES, before, step);
                if (threadIdx.x >= step) before += other;
            }
            before += above - own;
            if (before < wanted && before + own >= wanted) {
                int bin = top;
                while (before + shared.bins[bin] < wanted) before += shared.bins[bin--];
                shared.digit = bin, shared.above = before;
            }
        }
        __syncthreads();
        key |= shared.digit << shift, mask |= 255u << shift, above = shared.above;
    }
    // Of equal keys the least tokens are taken: each thread counts those in its run of tokens, in order.
    const int run = (vocab + PICK_THREADS - 1) / PICK_THREADS, from = threadIdx.x * run, to = min(vocab, from + run);
    int own = 0, before, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned long long each = 1;
    for (int i = from; i < to; i++) if (order_of(row[i]) == key) { const unsigned long long w = weight(row[i], i); if (w) own++, each = w; }
    before = own;
    UNROLL for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) shared.counts[warp] = before;
    __syncthreads();
    before -= own;
    for (int w = 0; w < warp; w++) before += shared.counts[w];
    if (own) {
        int keep = (int)((wanted - above + each - 1) / each) - before;  // of this thread's
        for (int i = from; i < to && keep > 0; i++)
            if (order_of(row[i]) == key && weight(row[i], i) && --keep == 0) shared.last = i;
    }
    __syncthreads();
    return {key, shared.last};
}


DEVICE float value_of(unsigned order) { return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order); }

struct Scale {  // logits as nats below the best
    float peak, over_temperature;
    DEVICE float of(float v) const { return (v - peak) * over_temperature; }
    DEVICE int bin(float v) const { return min(BINS - 1, (int)(of(v) * -8.f)); }
    DEVICE unsigned long long mass(float v) const { return (unsigned long long)(__expf(of(v)) * 1099511627776.f); }  // times 2^40
};
DEVICE unsigned long long share_of(unsigned long long total, float share) { return max((unsigned long long)((double)total * share), 1ull); }

struct Pool {
    unsigned long long keys[POOL];       // order of the value, then of the token, the lower first
    unsigned counts[BINS], masses[BINS];  // masses: 4,096ths of exp(-bin / 8)
    unsigned long long total;
    int size, last_bin, kept;
    Scratch scratch;
    DEVICE float value(int i) const { return value_of((unsigned)(keys[i] >> 32)); }
    DEVICE int token(int i) const { return (int)~(unsigned)keys[i]; }
};

// Best first; n is a power of two.
DEVICE void sort(unsigned long long* keys, int n) {
    for (int run = 2; run <= n; run *= 2) for (int stride = run / 2; stride; stride /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < n / 2; i += PICK_THREADS) {
            const int low = 2 * i - (i & (stride - 1)), high = low + stride;
            const unsigned long long x = keys[low], y = keys[high];
            if ((x < y) == ((low & run) == 0)) keys[low] = y, keys[high] = x;
        }
    }
    __syncthreads();
}

// The last bin that is needed, by warp 0: for `count` tokens; or, if count is 0, for `share` of the mass, as far as a token in it
// is at `least` or above.
DEVICE void find_last_bin(Pool& pool, int count, float share, float least) {
    const int lane = threadIdx.x;
    unsigned own = 0, tokens;
    float own_mass = 0.f, mass;
    for (int i = 0; i < BINS / 32; i++) {
        const int bin = lane * (BINS / 32) + i;
        own += pool.counts[bin], own_mass += pool.masses[bin] * __expf(bin * -0.125f) * (1.f / 4096.f);
    }
    tokens = own, mass = own_mass;
    UNROLL for (int step = 1; step < 32; step *= 2) {
        const unsigned t = __shfl_up_sync(ALL_LANES, tokens, step);
        const float m = __shfl_up_sync(ALL_LANES, mass, step);
        if (lane >= step) tokens += t, mass += m;
    }
    const float wanted = share * (float)pool.total * 9.0949470177e-13f * 1.00002f;  // masses are rounded down, so enough is enough
    const bool enough = count ? tokens >= (unsigned)count : share < 1.f && mass >= wanted;
    const unsigned reached = __ballot_sync(ALL_LANES, enough);
    if (lane == 0) {
        const int last = reached ? (__ffs(reached) - 1) * (BINS / 32) + BINS / 32 - 1 : BINS - 1;
        pool.last_bin = count ? last : min(last, (int)(least * -8.f) + 1);
    }
}

// Fills the pool; false: it is too small. Without `share` below 1 the masses are left out.
DEVICE bool gather(const float* row, int vocab, const Scale& scale, int count, float share, float least, Pool& pool) {
    __syncthreads();
    if (threadIdx.x < BINS) pool.counts[threadIdx.x] = pool.masses[threadIdx.x] = 0;
    if (threadIdx.x == 0) pool.size = 0;
    __syncthreads();
    unsigned long long total = 0;
    for (int i = threadIdx.x; i < vocab; i += PICK_THREADS) {
        const int bin = scale.bin(row[i]);
        atomicAdd(&pool.counts[bin], 1u);
        if (share >= 1.f || count) continue;
        total += scale.mass(row[i]);
        atomicAdd(&pool.masses[bin], (unsigned)(fminf(__expf(scale.of(row[i]) + bin * 0.125f), 1.f) * 4096.f));
    }
    total = block_total(total, pool.scratch);
    if (threadIdx.x == 0) pool.total = total;
    __syncthreads();
    if (threadIdx.x < 32) find_last_bin(pool, count, share, least);
    __syncthreads();
    const int lane = threadIdx.x & 31;
    for (int base = 0; base < vocab; base += PICK_THREADS) {
        const int i = base + threadIdx.x;
        const bool in = i < vocab && scale.bin(row[i]) <= pool.last_bin;
        const unsigned found = __ballot_sync(ALL_LANES, in);
        if (!found) continue;
        int at = 0;
        if (lane == 0) at = atomicAdd(&pool.size, __popc(found));
        at = __shfl_sync(ALL_LANES, at, 0) + __popc(found & ((1u << lane) - 1));
        if (in && at < POOL) pool.keys[at] = (unsigned long long)order_of(row[i]) << 32 | ~(unsigned)i;
    }
    __syncthreads();
    if (pool.size > POOL) return false;
    int n = 2;
    while (n < pool.size) n *= 2;
    for (int i = pool.size + threadIdx.x; i < n; i += PICK_THREADS) pool.keys[i] = 0;
    sort(pool.keys, n);
    return true;
}

// How many of the first `count` tokens of the pool top-p leaves: the least whose mass reaches `share` of the whole, which is the
// row's, or that of these tokens if `of_these` (top-k comes before top-p).
DEVICE int nucleus(const Scale& scale, int count, bool of_these, float share, Pool& pool) {
    if (share >= 1.f) return count;
    const int first = threadIdx.x * PER_THREAD, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned long long own = 0, before;
    for (int i = first; i < first + PER_THREAD; i++) if (i < count) own += scale.mass(pool.value(i));
    const unsigned long long total = block_total(own, pool.scratch), wanted = share_of(of_these ? total : pool.total, share);
    before = own;
    UNROLL for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_up_sync(ALL_LANES, before, step);
        if (lane >= step) before += other;
    }
    __syncthreads();
    if (lane == 31) pool.scratch.totals[warp] = before;
    if (threadIdx.x == 0) pool.kept = count;
    __syncthreads();
    before -= own;
    for (int w = 0; w < warp; w++) before += pool.scratch.totals[w];
    for (int i = first; i < first + PER_THREAD; i++) if (i < count) {
        const unsigned long long after = before + scale.mass(pool.value(i));
        if (before < wanted && after >= wanted) pool.kept = i + 1;
        before = after;
    }
    __syncthreads();
    return pool.kept;
}
