/* Causal grouped-query attention over paged KV, read where it lies.
 *
 * The tokens of a prefill chunk are taken some at a time, with all the query heads of one KV head, so
 * that a key or value is read once for up to MAX_PAIRS pairs. Positions are taken by blocks that stay in
 * the first cache: scores, then weights relative to the largest score so far, then values
 * (arXiv 2112.05682). Blocks begin at multiples of BLOCK and weights outside of what a token sees are
 * exact zeros: a token's result does not depend on how its prompt was cut.
 *
 * Keys lie in panels of 16 positions, dimension after dimension, so that scores are products like those
 * with weights: lanes are positions, and every sum runs over the dimensions in order. D % 16 == 0. */
#include "attention.h"

#include <math.h>
#include <string.h>

#include "tile.h"

#define BLOCK 64 /* positions */

static float *key_panel(const kv_view *kv, int64_t slot, int64_t head, const head_shape *heads) {
    return kv->keys + (slot / PANEL * heads->num_kv_heads + head) * heads->head_dim * PANEL;
}

void hr_write_keys(const float *k, int64_t row_stride, const kv_view *kv, int64_t num_rows,
                   const head_shape *heads, int64_t first_head, int64_t num_heads) {
    const int64_t dim = heads->head_dim;
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t head = first_head; head < first_head + num_heads; head++) {
            const float *from = k + t * row_stride + head * dim;
            float *to = key_panel(kv, kv->slots[t], head, heads) + kv->slots[t] % PANEL;
            for (int64_t d = 0; d < dim; d++) to[d * PANEL] = from[d];
        }
}

void hr_fetch_keys(const kv_view *kv, int64_t row, const head_shape *heads) {
    const int64_t size = heads->num_kv_heads * heads->head_dim * PANEL;
    const float *panels = key_panel(kv, kv->slots[row], 0, heads) + kv->slots[row] % PANEL;
    for (int64_t i = 0; i < size; i += PANEL) __builtin_prefetch(panels + i, 1);
}

void hr_write_values(const float *v, int64_t row_stride, const kv_view *kv, int64_t num_rows,
                     const head_shape *heads) {
    const int64_t size = heads->num_kv_heads * heads->head_dim;
    for (int64_t t = 0; t < num_rows; t++)
        memcpy(kv->values + kv->slots[t] * size, v + t * row_stride, size * sizeof(float));
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
        const int is_same_row = num && kv->table_start[t] == kv->table_start[t - 1] &&
                                kv->context[t] == kv->context[t - 1] + 1;
        if (is_same_row && last->num < most) {
            last->num++;
            continue;
        }
        runs[num] = (token_run){t, 1, is_same_row ? last->first_run : num, 0};
        num++;
    }
    for (int64_t i = num - 1; i >= 0; i--) {
        const token_run *next = runs + i + 1;
        const int ends_row = i == num - 1 || next->first_run != runs[i].first_run;
        runs[i].row_runs = ends_row ? i + 1 - runs[i].first_run : next->row_runs;
    }
    return num;
}

/* Where the keys and values of a block lie. */
typedef struct {
    const float *keys[BLOCK / PANEL], *values[BLOCK];
} block_place;

/* One thread's room: places of this block and of the next, then queries, scores and sums of a tile's pairs. */
typedef struct {
    block_place at[2];
    float scores[MAX_PAIRS * BLOCK];
    fvec totals[MAX_PAIRS][VECS]; /* of the weights */
    float tops[MAX_PAIRS];        /* largest score so far */
    float *q;                     /* (pairs, D), scaled */
    float *mixed;                 /* (pairs, D) weighted values */
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

/* Where `num` positions from `pos` on lie, a multiple of BLOCK. */
static void find_block(const attention *a, const tile *t, int64_t pos, int64_t num, block_place *at) {
    const kv_view *kv = a->kv;
    const int64_t dim = a->heads->head_dim, *table = kv->block_ids + kv->table_start[t->token];
    for (int64_t i = 0; i < num; i += PANEL) {
        const int64_t slot = table[(pos + i) / kv->block_size] * kv->block_size + (pos + i) % kv->block_size;
        at->keys[i / PANEL] = key_panel(kv, slot, t->kv_head, a->heads);
        for (int64_t j = i; j < i + PANEL && j < num; j++)
            at->values[j] = kv->values + ((slot + j - i) * a->heads->num_kv_heads + t->kv_head) * dim;
    }
}

/* Ask for lines before they are read: they lie too far apart for the machine to guess. */
INLINE void fetch(const float *const *at, int64_t num, int64_t size) {
    for (int64_t i = 0; i < num; i++)
        for (int64_t d = 0; d < size; d += PANEL) __builtin_prefetch(at[i] + d);
}

static int64_t panels_for(int64_t num) { return (num + PANEL - 1) / PANEL; }

INLINE void score_panels(int panels, const tile *t, int64_t dim, const float *const *keys, room *r,
                         float *scores) {
    tile_lines lines = {.at = NULL};
    for (int i = 0; i < panels; i++) lines.panels[i] = keys[i];
    for (int64_t pair = 0; pair < t->num_pairs; pair += MAX_TILE_ROWS)
        multiply_rows(t->num_pairs - pair, panels, r->q + pair * dim, dim, &lines, dim,
                      scores + pair * BLOCK, BLOCK);
}

static void score(const attention *a, const tile *t, int64_t num, const block_place *at, room *r) {
    const int64_t dim = a->heads->head_dim, panels = panels_for(num);
    memset(r->scores, 0, t->num_pairs * BLOCK * sizeof(float));
    int64_t i = 0;
    for (; i + WIDE_PANELS <= panels; i += WIDE_PANELS)
        score_panels(WIDE_PANELS, t, dim, at->keys + i, r, r->scores + i * PANEL);
    for (; i < panels; i++) score_panels(1, t, dim, at->keys + i, r, r->scores + i * PANEL);
}

/* A new largest score: what was summed up so far is relative to the old one. */
static void rescale(const attention *a, int64_t pair, float top, room *r) {
    const f32x8 factor = exp8(splat(r->tops[pair] - top));
    float *mixed = r->mixed + pair * a->heads->head_dim;
    r->tops[pair] = top;
    for (int v = 0; v < VECS; v++) r->totals[pair][v] *= splatv(factor[0]);
    for (int64_t d = 0; d < a->heads->head_dim; d += LANES) store8(mixed + d, load8(mixed + d) * factor);
}

/* Lanes of the scores at i..; those outside of first..end become `other`. */
INLINE fvec only_seen(int is_whole, fvec x, int64_t i, int64_t first, int64_t end, float other) {
    if (is_whole) return x;
#if WIDTH == 16
    const uint32_t from = first > i ? ~0u << (first - i < WIDTH ? first - i : WIDTH) : ~0u;
    const uint32_t to = end > i ? ~(~0u << (end - i < WIDTH ? end - i : WIDTH)) : 0;
    return (fvec)_mm512_mask_mov_ps(_mm512_set1_ps(other), (__mmask16)(from & to), (__m512)x);
#else
    const i32x8 at = (i32x8){0, 1, 2, 3, 4, 5, 6, 7} + (int32_t)i;
    return choose8((at >= (int32_t)first) & (at < (int32_t)end), x, splat(other));
#endif
}

INLINE float largest_lane(fvec x) {
#if WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

INLINE fvec greater(fvec a, fvec b) {
#if WIDTH == 16
    return (fvec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return at_least8(a, b);
#endif
}

INLINE void weigh_some(int is_whole, const attention *a, int64_t pair, int64_t first, int64_t end,
                       room *r) {
    float *scores = r->scores + pair * BLOCK;
    fvec e[BLOCK / PANEL][VECS], top = splatv(-INFINITY);
    for (int64_t i = 0; i < BLOCK; i += WIDTH)
        top = greater(top, only_seen(is_whole, loadv(scores + i), i, first, end, -INFINITY));
    const float largest = largest_lane(top);
    if (largest > r->tops[pair]) rescale(a, pair, largest, r);
    const fvec relative_to = splatv(r->tops[pair]);
    for (int p = 0; p < BLOCK / PANEL; p++)
        for (int v = 0; v < VECS; v++) {
            const int64_t i = p * PANEL + v * WIDTH;
            e[p][v] = only_seen(is_whole, expv(loadv(scores + i) - relative_to), i, first, end, 0.0f);
            storev(scores + i, e[p][v]);
        }
    for (int v = 0; v < VECS; v++) r->totals[pair][v] += (e[0][v] + e[1][v]) + (e[2][v] + e[3][v]);
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

INLINE void mix_panels(int panels, const tile *t, int64_t dim, int64_t num, const block_place *at, int64_t d,
                       room *r) {
    const tile_lines lines = {.at = at->values, .column = d};
    for (int64_t pair = 0; pair < t->num_pairs; pair += MAX_TILE_ROWS)
        multiply_rows(t->num_pairs - pair, panels, r->scores + pair * BLOCK, BLOCK, &lines, num,
                      r->mixed + pair * dim + d, dim);
}

static void mix(const attention *a, const tile *t, int64_t num, const block_place *at, room *r) {
    const int64_t dim = a->heads->head_dim;
    int64_t d = 0;
    for (; d + WIDE_PANELS * PANEL <= dim; d += WIDE_PANELS * PANEL)
        mix_panels(WIDE_PANELS, t, dim, num, at, d, r);
    for (; d < dim; d += PANEL) mix_panels(1, t, dim, num, at, d, r);
}

/* In one order at any width. */
INLINE float total_of(const fvec total[VECS]) {
    float lanes[PANEL];
    for (int v = 0; v < VECS; v++) storev(lanes + v * WIDTH, total[v]);
    return sum8(load8(lanes) + load8(lanes + LANES));
}

static void finish(const attention *a, const tile *t, const room *r) {
    const int64_t dim = a->heads->head_dim;
    for (int64_t pair = 0; pair < t->num_pairs; pair++) {
        const int64_t token = t->token + pair / t->num_heads, head = t->head + pair % t->num_heads;
        const float *mixed = r->mixed + pair * dim;
        float *y = a->y + (token * a->heads->num_heads + head) * dim;
        const f32x8 factor = splat(1.0f / total_of(r->totals[pair]));
        for (int64_t d = 0; d < dim; d += LANES) store8(y + d, load8(mixed + d) * factor);
    }
}

static int64_t block_size_at(const tile *t, int64_t pos) {
    const int64_t left = t->end - pos;
    return left < 0 ? 0 : left < BLOCK ? left : BLOCK;
}

/* Queries of a tile, scaled, and nothing summed up. */
static void begin(const attention *a, const tile *t, room *r) {
    const int64_t dim = a->heads->head_dim, size = t->num_heads * dim;
    for (int64_t i = 0; i < t->num_tokens; i++) {
        const float *q = a->q + (t->token + i) * a->row_stride + t->head * dim;
        for (int64_t d = 0; d < size; d += LANES)
            store8(r->q + i * size + d, load8(q + d) * splat(a->how->scale));
    }
    memset(r->mixed, 0, t->num_pairs * dim * sizeof(float));
    memset(r->totals, 0, sizeof r->totals);
    for (int64_t pair = 0; pair < t->num_pairs; pair++) r->tops[pair] = -INFINITY;
}

static void attend(const attention *a, const tile *t, char *scratch) {
    const int64_t dim = a->heads->head_dim;
    room *r = room_in(scratch, a->heads);
    begin(a, t, r);
    int64_t num = block_size_at(t, t->start), next;
    block_place *at = &r->at[0], *then = &r->at[1];
    find_block(a, t, t->start, num, at);
    for (int64_t pos = t->start; pos < t->end; pos += BLOCK, num = next) {
        fetch(at->values, num, dim);
        score(a, t, num, at, r);
        next = block_size_at(t, pos + BLOCK);
        find_block(a, t, pos + BLOCK, next, then);
        fetch(then->keys, panels_for(next), dim * PANEL);
        for (int64_t pair = 0; pair < t->num_pairs; pair++) {
            const int64_t token = t->token + pair / t->num_heads;
            const int64_t first = first_seen(a, token) - pos, end = a->kv->context[token] - pos;
            weigh(a, pair, first > 0 ? first : 0, end < num ? end : num, r);
        }
        mix(a, t, num, at, r);
        block_place *const was = at;
        at = then;
        then = was;
    }
    finish(a, t, r);
}

/* One run and one KV head. */
static void run_item(void *job, int64_t item, int64_t thread_idx) {
    const attention *a = job;
    const int64_t group = a->heads->num_heads / a->heads->num_kv_heads;
    /* The latest tokens see most: first, so that threads end together. A row's runs go head by head, so that
     * keys and values stay in the second cache. */
    const int64_t num_kv_heads = a->heads->num_kv_heads, place = a->num_runs * num_kv_heads - 1 - item;
    const token_run *row = a->runs + place / num_kv_heads;
    const int64_t of_row = place - row->first_run * num_kv_heads;
    const token_run *run = a->runs + row->first_run + of_row % row->row_runs;
    tile t = {.token = run->first, .num_tokens = run->num, .kv_head = of_row / row->row_runs};
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
