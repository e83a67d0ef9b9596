// sample: one token a row, by the rules and in the order of engine/sampling.py, its oracle: logit bias, repetition, presence and
// frequency penalties, temperature, top-k, top-p, min-p, then Gumbel-max with Philox4x32-10 noise of (seed; token, index, choice).
//
// sample_scan: block = 4,096 logits of one row: bias and penalties, the slice's best, and the raw logits' log-sum-exp.
// sample_noise: the same grid, for rows without truncation: noise for every token that can still win, the slice's best score.
// sample_pick: block = one row: joins the slices; of a truncated row it gathers and sorts the tokens that truncation can leave
//   (sample.cuh). Probability mass is summed in fixed point, so that no order of sums decides. It also counts the token and
//   writes it where the next forward reads.
// Scores are f32 where the oracle has f64: they differ in about one draw in a million. Bound by latency; truncation by L2.
#include "sample.cuh"

struct Slot {                 // mirrored by sample.py; what the sampler knows of one sequence
    float temperature, top_p, log_min_p, repetition, presence, frequency;
    int top_k;
    unsigned seed_low, seed_high, choice;
    int logprobs;             // -1: none
    int bias_count, penalised;
    int unused[3];
};
struct SampleArgs {           // mirrored by sample.py
    const float* logits;      // [m, vocab]
    float* adjusted;          // [m, vocab], used by rows with bias or penalties
    const Slot* slots;
    unsigned short* counts;   // [slots, vocab]: 0x8000 for a token of prompt or output, and its count in the output
    const int* bias_tokens;   // [slots, MOST_BIAS]
    const float* bias_values;
    float4* slices;           // [m, slices]: best adjusted logit, its token, raw maximum, raw sum
    float2* scores;           // [m, slices]: best score, its token
    const int* rows;          // [m]: slot of a row, -1 for padding
    const int* indices;       // [m]: index of the token to be drawn
    int* last_tokens;         // [slots]
    int* tokens;              // [m]; -1: the greatest logit is not finite
    float* logprobs;          // [m]
    int* top_tokens;          // [m, MOST_TOP]
    float* top_logprobs;
    int vocab, slice_count;
};
static_assert(sizeof(SampleArgs) == ARGS_BYTES, "sample.py and sample.cu disagree about SampleArgs");

constexpr int SLICE = 4096, THREADS = 256, MOST_BIAS = 512, MOST_TOP = 20;
constexpr float GREATEST = 22.8739f, HOPELESS = -26.0195f;  // of sampling.py: a score that far below cannot win

struct Best {  // the greatest value; among equals the least token
    float value;
    int token;
    DEVICE void take(float v, int t) { if (v > value || (v == value && t < token)) value = v, token = t; }
    DEVICE void over_warp() {
        UNROLL for (int step = 16; step; step >>= 1) {
            const float v = __shfl_xor_sync(ALL_LANES, value, step);
            take(v, __shfl_xor_sync(ALL_LANES, token, step));
        }
    }
    DEVICE void over_block(Best* shared) {  // shared: 32; every thread gets the best
        over_warp();
        __syncthreads();
        if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = *this;
        __syncthreads();
        const int lane = threadIdx.x & 31;
        *this = lane < (int)blockDim.x / 32 ? shared[lane] : Best{-INFINITY, 0x7fffffff};
        over_warp();
    }
};

DEVICE bool truncated(const Slot& s) { return s.top_k > 0 || s.top_p < 1.f || s.log_min_p > HOPELESS; }
DEVICE bool adjusts(const Slot& s) { return s.bias_count > 0 || s.penalised; }
DEVICE const float* row_of(const SampleArgs& a, const Slot& s) {
    return (adjusts(s) ? a.adjusted : a.logits) + (long long)blockIdx.y * a.vocab;
}

DEVICE float gumbel(const Slot& s, unsigned token, unsigned index) {
    unsigned c0 = token, c1 = index, c2 = s.choice, c3 = 0, k0 = s.seed_low, k1 = s.seed_high;
    UNROLL for (int round = 0; round < 10; round++) {
        const unsigned low0 = c0 * 0xD2511F53u, high0 = __umulhi(c0, 0xD2511F53u);
        const unsigned low1 = c2 * 0xCD9E8D57u, high1 = __umulhi(c2, 0xCD9E8D57u);
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    // u = (c0 + 1/2) / 2^32; near 1 the logarithm is taken of the distance to 1, which f32 still tells apart.
    const float low = ((float)c0 + 0.5f) * 2.3283064365386963e-10f, high = ((float)~c0 + 0.5f) * 2.3283064365386963e-10f;
    return -logf(c0 < 0x80000000u ? -logf(low) : -log1pf(-high));
}

KERNEL void __launch_bounds__(THREADS) sample_scan(const __grid_constant__ SampleArgs a) {
    __shared__ Best shared[32];
    __shared__ float sums[32], biases[SLICE];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int slot = a.rows[blockIdx.y], first = blockIdx.x * SLICE, end = min(a.vocab, first + SLICE);
    if (slot < 0) return;
    const Slot s = a.slots[slot];
    const float* raw = a.logits + (long long)blockIdx.y * a.vocab;
    if (s.bias_count) {
        for (int i = threadIdx.x; i < SLICE; i += THREADS) biases[i] = 0.f;
        __syncthreads();
        for (int i = threadIdx.x; i < s.bias_count; i += THREADS) {
            const int token = a.bias_tokens[slot * MOST_BIAS + i] - first;
            if (token >= 0 && token < SLICE) biases[token] = a.bias_values[slot * MOST_BIAS + i];
        }
        __syncthreads();
    }
    Best best{-INFINITY, 0x7fffffff}, raw_best{-INFINITY, 0x7fffffff};
    bool broken = false;
    float values[SLICE / THREADS];
    UNROLL for (int i = 0; i < SLICE / THREADS; i++) {
        const int token = first + threadIdx.x + i * THREADS;
        float v = values[i] = token < end ? raw[token] : -INFINITY;
        if (token >= end) continue;
        raw_best.take(v, token);
        if (s.bias_count) v += biases[token - first];
        if (s.penalised) {
            const unsigned seen = a.counts[(long long)slot * a.vocab + token], count = seen & 0x7fff;
            if (seen) v = (v > 0.f ? v / s.repetition : v * s.repetition) - (s.presence * (count > 0) + s.frequency * count);
        }
        if (adjusts(s)) a.adjusted[(long long)blockIdx.y * a.vocab + token] = v;
        broken |= v != v;
        best.take(v, token);
    }
    raw_best.over_block(shared);
    best.over_block(shared);
    float sum = 0.f;
    if (s.logprobs >= 0) UNROLL for (int i = 0; i < SLICE / THREADS; i++) sum += __expf(values[i] - raw_best.value);
    sum = block_sum(sum, sums);
    if (__syncthreads_or(broken)) best.value = __int_as_float(0x7fffffff);
    if (threadIdx.x == 0)
        a.slices[blockIdx.y * a.slice_count + blockIdx.x] = make_float4(best.value, __int_as_float(best.token), raw_best.value, sum);
}

// The row's best adjusted logit; a NaN anywhere wins.
DEVICE Best peak_of(const SampleArgs& a) {
    Best best{-INFINITY, 0x7fffffff};
    bool broken = false;
    for (int i = threadIdx.x & 31; i < a.slice_count; i += 32) {
        const float4 slice = a.slices[blockIdx.y * a.slice_count + i];
        broken |= slice.x != slice.x;
        best.take(slice.x, __float_as_int(slice.y));
    }
    best.over_warp();
    if (__any_sync(ALL_LANES, broken)) best.value = __int_as_float(0x7fffffff);
    return best;
}

KERNEL void __launch_bounds__(THREADS) sample_noise(const __grid_constant__ SampleArgs a) {
    __shared__ Best shared[32];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int slot = a.rows[blockIdx.y], first = blockIdx.x * SLICE, end = min(a.vocab, first + SLICE);
    if (slot < 0) return;
    const Slot s = a.slots[slot];
    if (s.temperature == 0.f || truncated(s)) return;
    const float peak = peak_of(a).value;
    const float* row = row_of(a, s);
    const unsigned index = a.indices[blockIdx.y];
    Best best{-INFINITY, 0x7fffffff};
    for (int token = first + threadIdx.x; token < end; token += THREADS) {
        const float scaled = (row[token] - peak) / s.temperature;
        if (scaled >= HOPELESS && scaled + GREATEST >= best.value) best.take(scaled + gumbel(s, token, index), token);
    }
    best.over_block(shared);
    if (threadIdx.x == 0) a.scores[blockIdx.y * a.slice_count + blockIdx.x] = make_float2(best.value, __int_as_float(best.token));
}

DEVICE int draw_truncated(const SampleArgs& a, const Slot& s, float peak, Pool& pool, Best* bests) {
    const float* row = row_of(a, s);
    const Scale scale{peak, fminf(1.f / s.temperature, 1e30f)};
    const int top_k = s.top_k > 0 ? min(s.top_k, a.vocab) : a.vocab;
    const float least = fmaxf(s.log_min_p, HOPELESS);
    const unsigned index = a.indices[blockIdx.y];
    Best best{-INFINITY, 0x7fffffff};
    if (gather(row, a.vocab, scale, top_k < a.vocab ? top_k : 0, s.top_p, least, pool)) {
        const int kept = nucleus(scale, min(top_k, pool.size), top_k < a.vocab, s.top_p, pool);
        for (int i = threadIdx.x; i < kept; i += PICK_THREADS) {
            const float scaled = scale.of(pool.value(i));
            if (scaled >= least) best.take(scaled + gumbel(s, pool.token(i), index), pool.token(i));
        }
    } else {  // so flat a distribution that the pool is too small
        Cut best_k = NO_CUT, best_p = NO_CUT;
        if (top_k < a.vocab) best_k = cut_at(row, a.vocab, top_k, [](float, int) { return 1ull; }, pool.scratch);
        if (s.top_p < 1.f) {
            const auto mass = [&](float v, int token) { return best_k.keeps(v, token) ? scale.mass(v) : 0ull; };
            unsigned long long total = 0;
            for (int i = threadIdx.x; i < a.vocab; i += PICK_THREADS) total += mass(row[i], i);
            total = block_total(total, pool.scratch);
            best_p = cut_at(row, a.vocab, share_of(total, s.top_p), mass, pool.scratch);
        }
        for (int i = threadIdx.x; i < a.vocab; i += PICK_THREADS) {
            const float scaled = scale.of(row[i]);
            if (scaled >= least && best_k.keeps(row[i], i) && best_p.keeps(row[i], i)) best.take(scaled + gumbel(s, i, index), i);
        }
    }
    best.over_block(bests);
    return best.token;
}

// Log probabilities of the raw logits: the token's, and those of the best `s.logprobs` in order.
DEVICE void write_logprobs(const SampleArgs& a, const Slot& s, int token, Pool& pool, Best* bests) {
    const float* raw = a.logits + (long long)blockIdx.y * a.vocab;
    float most = -INFINITY, sum = 0.f;
    for (int i = 0; i < a.slice_count; i++) most = fmaxf(most, a.slices[blockIdx.y * a.slice_count + i].z);
    for (int i = 0; i < a.slice_count; i++) {
        const float4 slice = a.slices[blockIdx.y * a.slice_count + i];
        sum += slice.w * __expf(slice.z - most);
    }
    const float total = most + logf(sum);
    if (threadIdx.x == 0) a.logprobs[blockIdx.y] = raw[token] - total;
    if (s.logprobs == 0) return;
    if (gather(raw, a.vocab, Scale{most, 1.f}, min(s.logprobs, a.vocab), 1.f, HOPELESS, pool)) {
        if ((int)threadIdx.x < s.logprobs) {
            a.top_tokens[blockIdx.y * MOST_TOP + threadIdx.x] = pool.token(threadIdx.x);
            a.top_logprobs[blockIdx.y * MOST_TOP + threadIdx.x] = pool.value(threadIdx.x) - total;
        }
        return;
    }
    Best after{INFINITY, -1};  // each turn the best of those that come after the last
    for (int j = 0; j < s.logprobs; j++) {
        Best best{-INFINITY, 0x7fffffff};
        for (int i = threadIdx.x; i < a.vocab; i += PICK_THREADS)
            if (raw[i] < after.value || (raw[i] == after.value && i > after.token)) best.take(raw[i], i);
        best.over_block(bests);
        after = best;
        if (threadIdx.x != 0) continue;
        a.top_tokens[blockIdx.y * MOST_TOP + j] = best.token, a.top_logprobs[blockIdx.y * MOST_TOP + j] = best.value - total;
    }
}

KERNEL void __launch_bounds__(PICK_THREADS) sample_pick(const __grid_constant__ SampleArgs a) {
    __shared__ Pool pool;
    __shared__ Best bests[32];
    let_later_kernels_start();
    wait_for_earlier_kernels();
    const int slot = a.rows[blockIdx.y];
    if (slot < 0) return;
    const Slot s = a.slots[slot];
    const Best peak = peak_of(a);
    if (!(fabsf(peak.value) < INFINITY)) {
        if (threadIdx.x == 0) a.tokens[blockIdx.y] = -1;
        return;
    }
    int token = peak.token;
    if (s.temperature > 0.f) {
        if (truncated(s)) token = draw_truncated(a, s, peak.value, pool, bests);
        else {
            Best best{-INFINITY, 0x7fffffff};
            for (int i = threadIdx.x & 31; i < a.slice_count; i += 32) {
                const float2 score = a.scores[blockIdx.y * a.slice_count + i];
                best.take(score.x, __float_as_int(score.y));
            }
            best.over_warp();
            token = best.token;
        }
    }
    if (s.logprobs >= 0) write_logprobs(a, s, token, pool, bests);
    if (threadIdx.x == 0) {
        a.tokens[blockIdx.y] = token, a.last_tokens[slot] = token;
        if (s.penalised) {
            unsigned short& count = a.counts[(long long)slot * a.vocab + token];
            count = 0x8000 | min((count & 0x7fff) + 1, 0x7fff);
        }
    }
}
