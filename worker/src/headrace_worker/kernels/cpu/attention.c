/* Causal grouped-query attention over paged KV, read where it lies.
 *
 * The tokens of a prefill chunk are taken some at a time, with all the query heads of one KV head, so
 * that a key or value is read once for up to MAX_PAIRS pairs. Positions are taken by blocks that stay in
 * the first cache: scores, then weights relative to the largest score so far, then values
 * (arXiv 2112.05682). Blocks begin at multiples of BLOCK and weights outside of what a token sees are
 * exact zeros: a token's result does not depend on how its prompt was cut. D % 16 == 0. */
#include "attention.h"

#include <math.h>
#include <string.h>

#include "tile.h"

#define BLOCK 64 /* positions */
/* Positions and pairs whose scores are computed together. */
#define SCORED (WIDTH == 16 ? 8 : 4)
#define SCORED_PAIRS (WIDTH == 16 ? 6 : 3)

void hr_write_kv(const float *k, const float *v, int64_t row_stride, const kv_view *kv,
                 int64_t num_rows, const head_shape *heads) {
    const int64_t size = heads->num_kv_heads * heads->head_dim;
    for (int64_t t = 0; t < num_rows; t++) {
        memcpy(kv->keys + kv->slots[t] * size, k + t * row_stride, size * sizeof(float));
        memcpy(kv->values + kv->slots[t] * size, v + t * row_stride, size * sizeof(float));
    }
}

void hr_soft_cap(float *x, int64_t size, float cap) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store8(x + i, tanh8(load8(x + i) / splat(cap)) * splat(cap));
    if (i == size) return;
    float rest[LANES] = {0};
    memcpy(rest, x + i, (size - i) * sizeof(float));
    store8(rest, tanh8(load8(rest) / splat(cap)) * splat(cap));
    memcpy(x + i, rest, (size - i) * sizeof(float));
}

/* Tokens of a tile: as many as fit, at least one. */
static int64_t tokens_of_tile(const head_shape *heads) {
    const int64_t group = heads->num_heads / heads->num_kv_heads;
    return group < MAX_PAIRS ? MAX_PAIRS / group : 1;
}

int64_t find_runs(const kv_view *kv, int64_t num_rows, const head_shape *heads, token_run *runs) {
    const int64_t most = tokens_of_tile(heads);
    int64_t num = 0;
    for (int64_t t = 0; t < num_rows; t++) {
        token_run *last = runs + num - 1;
        const int goes_on = num && last->num < most &&
                            kv->table_start[t] == kv->table_start[t - 1] &&
                            kv->context[t] == kv->context[t - 1] + 1;
        if (goes_on)
            last->num++;
        else
            runs[num++] = (token_run){t, 1};
    }
    return num;
}

/* One thread's room: where keys lie, then queries, scores and sums of a tile's pairs. */
typedef struct {
    const float *at[2][BLOCK]; /* of this block and of the next */
    float scores[MAX_PAIRS * BLOCK];
    f32x8 totals[MAX_PAIRS]; /* of the weights */
    float tops[MAX_PAIRS];   /* largest score so far */
    float *q;                /* (pairs, D) */
    float *mixed;            /* (D / 16, MAX_PAIRS, 16) weighted values */
} room;

int64_t attention_scratch_bytes(const head_shape *heads) {
    return (sizeof(room) + 2 * MAX_PAIRS * heads->head_dim * (int64_t)sizeof(float) + 63) / 64 * 64;
}

static room *room_in(char *scratch, const head_shape *heads) {
    room *r = (room *)scratch;
    r->q = (float *)(r + 1);
    r->mixed = r->q + MAX_PAIRS * heads->head_dim;
    return r;
}

/* What a tile is: some tokens of one run and some query heads of one KV head. */
typedef struct {
    int64_t token, num_tokens, kv_head, head, num_heads, num_pairs;
    int64_t start, end; /* positions that any of them sees, from a whole BLOCK on */
} tile;

static int64_t first_seen(const attention *a, int64_t token) {
    const int64_t context = a->kv->context[token], window = a->how->window;
    return window > 0 && window < context ? context - window : 0;
}

/* Where the keys of `num` positions from `pos` on lie. */
static void find_keys(const attention *a, const tile *t, int64_t pos, int64_t num, const float **at) {
    const kv_view *kv = a->kv;
    const int64_t slot_size = a->heads->num_kv_heads * a->heads->head_dim;
    const int64_t *table = kv->block_ids + kv->table_start[t->token] + pos / kv->block_size;
    const float *keys = kv->keys + t->kv_head * a->heads->head_dim;
    int64_t offset = pos % kv->block_size;
    for (int64_t i = 0; i < num; table++, offset = 0) {
        const float *from = keys + (*table * kv->block_size + offset) * slot_size;
        for (; offset < kv->block_size && i < num; offset++, i++, from += slot_size) at[i] = from;
    }
    for (int64_t i = num; i % SCORED; i++) at[i] = at[num - 1];
}

#if WIDTH == 16
/* In each quarter: a0 + a1, a2 + a3, b0 + b1, b2 + b3. */
INLINE __m512 add_pairwise(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* Products of `pairs` queries with the keys of SCORED positions, those of two positions in one vector: the
 * sums are those of eight lanes, so their bits are the same at any width. */
INLINE void score_some(int pairs, const float *q, int64_t dim, const float *const *at, float scale,
                       float *scores) {
    fvec sums[SCORED_PAIRS][4] = {{{0}}};
    for (int64_t d = 0; d < dim; d += LANES) {
        __m512 keys[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512d low = _mm512_castpd256_pd512((__m256d)load8(at[i] + d));
            keys[i] = (__m512)_mm512_insertf64x4(low, (__m256d)load8(at[i + 4] + d), 1);
        }
#pragma GCC unroll 6
        for (int p = 0; p < pairs; p++) {
            const fvec query = (fvec)_mm512_broadcast_f64x4((__m256d)load8(q + p * dim + d));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sums[p][i] = fmav(query, (fvec)keys[i], sums[p][i]);
        }
    }
    const __m512i in_order = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15);
    __m512 quarters[SCORED_PAIRS];
#pragma GCC unroll 6
    for (int p = 0; p < pairs; p++) {
        __m512 halves[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512 a = (__m512)sums[p][2 * i], b = (__m512)sums[p][2 * i + 1];
            halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        }
        quarters[p] = add_pairwise(halves[0], halves[1]);
    }
#pragma GCC unroll 3
    for (int p = 0; p < pairs; p += 2) {
        const __m512 both = add_pairwise(quarters[p], quarters[p + 1 < pairs ? p + 1 : p]);
        const fvec result = (fvec)_mm512_permutexvar_ps(in_order, both) * splatv(scale);
        store8(scores + p * BLOCK, (f32x8)_mm512_castps512_ps256((__m512)result));
        if (p + 1 < pairs)
            store8(scores + (p + 1) * BLOCK, (f32x8)_mm512_extractf64x4_pd((__m512d)result, 1));
    }
}
#else
typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x4_mem __attribute__((vector_size(16), aligned(4), may_alias));

/* a0 + a1, a2 + a3, b0 + b1, b2 + b3 */
INLINE f32x4 add_pairwise(f32x4 a, f32x4 b) {
    typedef int32_t i32x4 __attribute__((vector_size(16)));
    return __builtin_shuffle(a, b, (i32x4){0, 2, 4, 6}) + __builtin_shuffle(a, b, (i32x4){1, 3, 5, 7});
}

INLINE f32x4 fold(f32x8 v) {
    return (f32x4){v[0], v[1], v[2], v[3]} + (f32x4){v[4], v[5], v[6], v[7]};
}

/* Products of `pairs` queries with the keys of SCORED positions. Twelve sums, three queries and one key
 * are all registers that AVX2 has. */
INLINE void score_some(int pairs, const float *q, int64_t dim, const float *const *at, float scale,
                       float *scores) {
    f32x8 sums[SCORED_PAIRS][SCORED] = {{{0}}};
    const float *k[SCORED];
    for (int i = 0; i < SCORED; i++) k[i] = at[i];
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x8 query[SCORED_PAIRS];
#pragma GCC unroll 4
        for (int p = 0; p < pairs; p++) query[p] = load8(q + p * dim + d);
#pragma GCC unroll 4
        for (int i = 0; i < SCORED; i++) {
            const f32x8 key = load8(k[i] + d);
#pragma GCC unroll 4
            for (int p = 0; p < pairs; p++) sums[p][i] = fma8(query[p], key, sums[p][i]);
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < pairs; p++) {
        const f32x4 low = add_pairwise(fold(sums[p][0]), fold(sums[p][1]));
        const f32x4 high = add_pairwise(fold(sums[p][2]), fold(sums[p][3]));
        *(f32x4_mem *)(scores + p * BLOCK) = add_pairwise(low, high) * (f32x4){scale, scale, scale, scale};
    }
}
#endif

/* Ask for the keys or values of `num` positions: they lie too far apart for the machine to guess. */
INLINE void fetch(const float *const *at, int64_t offset, int64_t num, int64_t dim) {
    for (int64_t i = 0; i < num; i++)
        for (int64_t d = 0; d < dim; d += PANEL) __builtin_prefetch(at[i] + offset + d);
}

static void score(const attention *a, const tile *t, int64_t num, const float *const *at,
                  room *r) {
    const int64_t dim = a->heads->head_dim;
    const float scale = a->how->scale;
    for (int64_t pair = 0; pair < t->num_pairs; pair += SCORED_PAIRS)
        for (int64_t i = 0; i < num; i += SCORED) {
            const float *q = r->q + pair * dim;
            float *to = r->scores + pair * BLOCK + i;
            switch (t->num_pairs - pair) {
            case 1: score_some(1, q, dim, at + i, scale, to); break;
            case 2: score_some(2, q, dim, at + i, scale, to); break;
#if WIDTH == 16
            case 3: score_some(3, q, dim, at + i, scale, to); break;
            case 4: score_some(4, q, dim, at + i, scale, to); break;
            case 5: score_some(5, q, dim, at + i, scale, to); break;
#endif
            default: score_some(SCORED_PAIRS, q, dim, at + i, scale, to); break;
            }
        }
}

/* A new largest score: what was summed up so far is relative to the old one. */
static void rescale(const attention *a, int64_t pair, float top, room *r) {
    const f32x8 factor = exp8(splat(r->tops[pair] - top));
    r->tops[pair] = top;
    r->totals[pair] *= factor;
    for (int64_t d = 0; d < a->heads->head_dim; d += LANES) {
        float *mixed = r->mixed + (d / PANEL * MAX_PAIRS + pair) * PANEL + d % PANEL;
        store8(mixed, load8(mixed) * factor);
    }
}

/* Which of the positions from i on a pair sees; all of a block that it sees whole. */
INLINE i32x8 seen_at(int is_whole, int64_t i, int64_t first, int64_t end) {
    const i32x8 at = (i32x8){0, 1, 2, 3, 4, 5, 6, 7} + (int32_t)i, all = at == at;
    return is_whole ? all : (at >= (int32_t)first) & (at < (int32_t)end);
}

INLINE void weigh_some(int is_whole, const attention *a, int64_t pair, int64_t first, int64_t end,
                       room *r) {
    float *scores = r->scores + pair * BLOCK;
    f32x8 top8 = splat(scores[first]);
    for (int64_t i = first / LANES * LANES; i < end; i += LANES) {
        const f32x8 value = load8(scores + i);
        const i32x8 is_larger = (value > top8) & seen_at(is_whole, i, first, end);
        top8 = choose8(is_larger, value, top8);
    }
    float top = top8[0];
    for (int i = 1; i < LANES; i++) top = top8[i] > top ? top8[i] : top;
    if (top > r->tops[pair]) rescale(a, pair, top, r);
    const f32x8 relative_to = splat(r->tops[pair]);
    f32x8 total = r->totals[pair];
#if WIDTH == 16
    if (is_whole) {
        for (int64_t i = 0; i < BLOCK; i += WIDTH) {
            storev(scores + i, expv(loadv(scores + i) - splatv(r->tops[pair])));
            total += load8(scores + i);
            total += load8(scores + i + LANES);
        }
        r->totals[pair] = total;
        return;
    }
#endif
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        f32x8 e = splat(0.0f);
        if (is_whole || (i < end && i + LANES > first))
            e = choose8(seen_at(is_whole, i, first, end), exp8(load8(scores + i) - relative_to), e);
        store8(scores + i, e);
        total += e;
    }
    r->totals[pair] = total;
}

/* Scores of a pair become weights, exact zeros but for first <= i < end; 0 <= first, end <= BLOCK. */
static void weigh(const attention *a, int64_t pair, int64_t first, int64_t end, room *r) {
    float *scores = r->scores + pair * BLOCK;
    if (first >= end) {
        memset(scores, 0, BLOCK * sizeof(float));
        return;
    }
    if (a->how->soft_cap > 0.0f) hr_soft_cap(scores, BLOCK, a->how->soft_cap);
    if (first == 0 && end == BLOCK)
        weigh_some(1, a, pair, 0, BLOCK, r);
    else
        weigh_some(0, a, pair, first, end, r);
}

static void mix(const attention *a, const tile *t, int64_t num, const float *const *at, room *r) {
    const int64_t to_values = a->kv->values - a->kv->keys;
    for (int64_t d = 0; d < a->heads->head_dim; d += PANEL)
        for (int64_t pair = 0; pair < t->num_pairs; pair += MAX_TILE_ROWS)
            multiply_rows(t->num_pairs - pair, r->scores + pair * BLOCK, BLOCK, NULL, at,
                          to_values + d, num, r->mixed + (d / PANEL * MAX_PAIRS + pair) * PANEL);
}

static void finish(const attention *a, const tile *t, const room *r) {
    const int64_t dim = a->heads->head_dim;
    for (int64_t pair = 0; pair < t->num_pairs; pair++) {
        const int64_t token = t->token + pair / t->num_heads, head = t->head + pair % t->num_heads;
        float *y = a->y + (token * a->heads->num_heads + head) * dim;
        const f32x8 factor = splat(1.0f / sum8(r->totals[pair]));
        for (int64_t d = 0; d < dim; d += LANES)
            store8(y + d, load8(r->mixed + (d / PANEL * MAX_PAIRS + pair) * PANEL + d % PANEL) * factor);
    }
}

static int64_t block_size_at(const tile *t, int64_t pos) {
    const int64_t left = t->end - pos;
    return left < 0 ? 0 : left < BLOCK ? left : BLOCK;
}

static void attend(const attention *a, const tile *t, char *scratch) {
    const int64_t dim = a->heads->head_dim, to_values = a->kv->values - a->kv->keys;
    room *r = room_in(scratch, a->heads);
    for (int64_t i = 0; i < t->num_tokens; i++)
        memcpy(r->q + i * t->num_heads * dim, a->q + (t->token + i) * a->row_stride + t->head * dim,
               t->num_heads * dim * sizeof(float));
    memset(r->mixed, 0, MAX_PAIRS * dim * sizeof(float));
    for (int64_t pair = 0; pair < t->num_pairs; pair++) {
        r->totals[pair] = splat(0.0f);
        r->tops[pair] = -INFINITY;
    }
    int64_t num = block_size_at(t, t->start), next;
    find_keys(a, t, t->start, num, r->at[0]);
    for (int64_t pos = t->start, i = 0; pos < t->end; pos += BLOCK, i = !i, num = next) {
        next = block_size_at(t, pos + BLOCK);
        fetch(r->at[i], to_values, num, dim);
        score(a, t, num, r->at[i], r);
        find_keys(a, t, pos + BLOCK, next, r->at[!i]);
        fetch(r->at[!i], 0, next, dim);
        for (int64_t pair = 0; pair < t->num_pairs; pair++) {
            const int64_t token = t->token + pair / t->num_heads;
            const int64_t first = first_seen(a, token) - pos, end = a->kv->context[token] - pos;
            weigh(a, pair, first > 0 ? first : 0, end < num ? end : num, r);
        }
        mix(a, t, num, r->at[i], r);
    }
    finish(a, t, r);
}

/* One run and one KV head. */
static void run_item(void *job, int64_t item, int64_t thread_idx) {
    const attention *a = job;
    const int64_t group = a->heads->num_heads / a->heads->num_kv_heads;
    /* The latest tokens see most: first, so that threads end together. */
    const token_run *run = a->runs + (a->num_runs - 1 - item / a->heads->num_kv_heads);
    tile t = {.token = run->first, .num_tokens = run->num, .kv_head = item % a->heads->num_kv_heads};
    t.start = first_seen(a, run->first) / BLOCK * BLOCK;
    t.end = a->kv->context[run->first + run->num - 1];
    for (int64_t head = 0; head < group; head += t.num_heads) {
        t.head = t.kv_head * group + head;
        t.num_heads = group - head < MAX_PAIRS ? group - head : MAX_PAIRS;
        t.num_pairs = t.num_tokens * t.num_heads;
        attend(a, &t, a->scratch + thread_idx * a->scratch_bytes);
    }
}

void run_attention(pool *threads, const attention *a) {
    run_items(threads, run_item, (void *)a, a->num_runs * a->heads->num_kv_heads);
}
