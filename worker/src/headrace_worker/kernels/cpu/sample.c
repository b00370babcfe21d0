/* Draws tokens: softmax with temperature, truncation, then one place of the cumulated probabilities.
 *
 * Nothing is sorted: passes over the weights, which stay in the second cache, halve the range of a threshold
 * until it is the border of what is kept. Weights are relative to the
 * likeliest token's, which has 1; all sums of them are float64 in one order. */
#include <math.h>
#include <stdlib.h>

#include "panels.h"
#include "sample.h"

/* Weights below are taken as zeros: exp8 does not go further down. */
#define LOWEST -87.0f
#define SMALLEST_THRESHOLD 1e-38f
/* Higher logits, which a broken model may give, count as this; see sampling.py. */
#define HIGHEST 1e30f

typedef struct {
    const float *logits; /* (rows, vocabulary) */
    int64_t size;        /* of the vocabulary */
    const sampling *how; /* one for each draw */
    int64_t *tokens;     /* the results */
    char *scratch;       /* scratch_bytes for each thread */
    int64_t scratch_bytes;
} draws;

typedef struct {
    float *weights;
    int32_t *tokens;
} room;

typedef double f64x8 __attribute__((vector_size(64)));

/* The largest that is a number; at most HIGHEST. */
static float largest(const float *x, int64_t size) {
    f32x8 top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const f32x8 value = load8(x + i);
        top = choose8(value > top, value, top);
    }
    float found = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) found = top[lane] > found ? top[lane] : found;
    for (; i < size; i++) found = x[i] > found ? x[i] : found;
    return found < HIGHEST ? found : HIGHEST;
}

INLINE double sum_lanes(f64x8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* Sixteen lanes. Sums go by eight, so their bits are the same at any width. */
#define STEP 16

INLINE void add_lanes(const float *from, f64x8 *sum) {
    *sum += __builtin_convertvector(load8(from), f64x8);
    *sum += __builtin_convertvector(load8(from + LANES), f64x8);
}

/* NaN stays. */
INLINE fvec not_above(fvec x, float highest) {
#if WIDTH == 16
    return (fvec)_mm512_min_ps((__m512)splatv(highest), (__m512)x);
#else
    return at_most8(x, splat(highest));
#endif
}

/* Weights of STEP tokens. Too small a number becomes zero, and so does NaN. */
INLINE void weigh_some(const float *logits, float top, float factor, float *weights) {
    for (int v = 0; v < STEP; v += WIDTH) {
        const fvec x = (not_above(loadv(logits + v), HIGHEST) - splatv(top)) * splatv(factor), weight = expv(x);
#if WIDTH == 16
        const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(LOWEST), _CMP_GT_OQ);
        storev(weights + v, (fvec)_mm512_maskz_mov_ps(counts, (__m512)weight));
#else
        store8(weights + v, choose8(x > splat(LOWEST), weight, splat(0.0f)));
#endif
    }
}

/* Weights of all tokens, padded with zeros to whole steps; returns their sum. */
static double weigh(const float *logits, int64_t size, float temperature, float *weights) {
    const float top = largest(logits, size), factor = 1.0f / temperature;
    f64x8 sum = {0};
    int64_t i = 0;
    for (; i + STEP <= size; i += STEP) {
        weigh_some(logits + i, top, factor, weights + i);
        add_lanes(weights + i, &sum);
    }
    if (i < size) {
        float rest[STEP];
        for (int lane = 0; lane < STEP; lane++) rest[lane] = i + lane < size ? logits[i + lane] : -INFINITY;
        weigh_some(rest, top, factor, weights + i);
        add_lanes(weights + i, &sum);
    }
    return sum_lanes(sum);
}

static int has_top_p(const sampling *how) { return how->top_p > 0.0f && how->top_p < 1.0f; }

/* How many weights reach a threshold, and their sum. */
static double mass_above(const float *weights, int64_t size, float threshold, int64_t *count) {
    f64x8 sum = {0};
    *count = 0;
    for (int64_t i = 0; i < size; i += STEP) {
        float above[STEP];
#if WIDTH == 16
        const __m512 weight = (__m512)loadv(weights + i);
        const __mmask16 is_above = _mm512_cmp_ps_mask(weight, _mm512_set1_ps(threshold), _CMP_GE_OQ);
        storev(above, (fvec)_mm512_maskz_mov_ps(is_above, weight));
        *count += __builtin_popcount(is_above);
#else
        for (int v = 0; v < STEP; v += LANES) {
            const f32x8 weight = load8(weights + i + v);
            const i32x8 is_above = weight >= splat(threshold);
            store8(above + v, choose8(is_above, weight, splat(0.0f)));
            for (int lane = 0; lane < LANES; lane++) *count -= is_above[lane];
        }
#endif
        add_lanes(above, &sum);
    }
    return sum_lanes(sum);
}

/* The border of a truncation: kept is what lies above, and the first `ties` tokens that lie on it. */
typedef struct {
    float weight;
    int64_t ties;
} border;

/* Keeps the likeliest until there are `count` of them or they weigh `mass`; the other is out of reach. */
typedef struct {
    double count, mass;
} limit;

static int is_reached(const limit *l, const float *weights, int64_t size, float threshold) {
    int64_t count;
    const double mass = mass_above(weights, size, threshold, &count);
    return count >= l->count || mass >= l->mass;
}

typedef union {
    uint32_t bits;
    float value;
} float_bits;

/* Positive floats are ordered like their bits: halving finds the largest threshold that reaches the limit.
 * Everything that may be kept is at least `low`. */
static border find_border(const limit *l, const float *weights, int64_t size, float low) {
    float_bits reached = {.value = low}, above = {.value = 1.0f};
    above.bits++;
    if (!is_reached(l, weights, size, low)) return (border){low, size};
    while (above.bits - reached.bits > 1) {
        const float_bits middle = {reached.bits + (above.bits - reached.bits) / 2};
        if (is_reached(l, weights, size, middle.value))
            reached = middle;
        else
            above = middle;
    }
    int64_t count;
    const double mass = mass_above(weights, size, above.value, &count);
    const double by_count = l->count - count, by_mass = ceil((l->mass - mass) / reached.value);
    const double ties = by_count < by_mass ? by_count : by_mass;
    return (border){reached.value, ties < 1.0 ? 1 : ties > size ? size : (int64_t)ties};
}

/* The stricter of two. */
static border stricter(border a, border b) {
    if (a.weight != b.weight) return a.weight > b.weight ? a : b;
    return a.ties < b.ties ? a : b;
}

static border truncation(const sampling *how, const float *weights, int64_t size, float low, double total) {
    border kept = {how->min_p > low ? how->min_p : low, size};
    if (how->top_k) {
        const limit first = {how->top_k, INFINITY};
        const border of_k = find_border(&first, weights, size, low);
        int64_t count;
        float_bits above = {.value = of_k.weight};
        above.bits++;
        /* Top-p counts within what top-k left. */
        total = mass_above(weights, size, above.value, &count);
        const int64_t rest = how->top_k - count, ties = rest < of_k.ties ? rest : of_k.ties;
        total += (double)of_k.weight * (double)ties;
        kept = stricter(kept, of_k);
    }
    if (has_top_p(how)) {
        const limit first = {INFINITY, how->top_p * total};
        kept = stricter(kept, find_border(&first, weights, size, low));
    }
    return kept;
}

/* A power of four that everything reaches which truncation may keep. */
static float threshold_for(const sampling *how, const float *weights, int64_t size, double total) {
    /* What top-k leaves is all needed to know top-p's share. */
    if (!how->top_k && !has_top_p(how)) return how->min_p;
    const limit l = {how->top_k ? how->top_k : INFINITY, how->top_k ? INFINITY : how->top_p * total};
    float t = 0.25f;
    while (t > SMALLEST_THRESHOLD && !is_reached(&l, weights, size, t)) t *= 0.25f;
    return t;
}

/* Tokens that reach the threshold in order, and their weights, which replace all weights. */
static int64_t gather(int64_t size, float threshold, float *weights, int32_t *tokens) {
    int64_t num = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        const f32x8 weight = load8(weights + i);
        const i32x8 is_above = weight >= splat(threshold);
#ifdef __AVX2__
        if (_mm256_testz_si256((__m256i)is_above, (__m256i)is_above)) continue;
#endif
        for (int lane = 0; lane < LANES; lane++) {
            weights[num] = weight[lane];
            tokens[num] = (int32_t)(i + lane);
            num += is_above[lane] != 0;
        }
    }
    for (int64_t i = num; i % STEP; i++) weights[i] = 0.0f;
    return num;
}

/* Weights that are not kept become zeros. */
static void truncate(border kept, int64_t size, float *weights) {
    for (int64_t i = 0; i < size; i++) {
        const int is_tie = weights[i] == kept.weight;
        if (weights[i] < kept.weight || (is_tie && kept.ties == 0)) weights[i] = 0.0f;
        kept.ties -= is_tie && kept.ties;
    }
}

/* The first place whose cumulated weight exceeds the draw's share of all. */
static int64_t pick(const float *weights, int64_t size, double draw) {
    double total = 0.0, reached = 0.0;
    for (int64_t i = 0; i < size; i++) total += weights[i];
    int64_t i = 0;
    for (; i < size - 1; i++) {
        reached += weights[i];
        if (reached > draw * total) break;
    }
    return i;
}

static int64_t draw_one(const draws *d, const sampling *how, const room *r) {
    const double total = weigh(d->logits + how->row * d->size, d->size, how->temperature, r->weights);
    const int is_cut = how->top_k || how->min_p > 0.0f || has_top_p(how);
    if (!is_cut || !(total > 0.0)) return pick(r->weights, d->size, how->draw);
    const float threshold = threshold_for(how, r->weights, d->size, total);
    const int64_t num = gather(d->size, threshold, r->weights, r->tokens);
    truncate(truncation(how, r->weights, num, threshold, total), num, r->weights);
    return r->tokens[pick(r->weights, num, how->draw)];
}

static void run_item(void *job, int64_t item, int64_t thread_idx) {
    const draws *d = job;
    char *own = d->scratch + thread_idx * d->scratch_bytes;
    const room r = {(float *)own, (int32_t *)(own + d->scratch_bytes / 2)};
    d->tokens[item] = draw_one(d, d->how + item, &r);
}

int64_t draw_tokens(pool *threads, const float *logits, int64_t size, const sampling *how, int64_t num,
                    int64_t *tokens) {
    draws d = {logits, size, how, tokens, NULL, (size * 4 + 191) / 64 * 128};
    d.scratch = aligned_alloc(64, (size_t)(d.scratch_bytes * num_threads_of(threads)));
    if (!d.scratch) return 1;
    run_items(threads, run_item, &d, num);
    free(d.scratch);
    return 0;
}
