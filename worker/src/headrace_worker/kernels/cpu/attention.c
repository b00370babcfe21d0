/* Causal grouped-query attention over paged KV, read where it lies.
 *
 * The tokens of a prefill chunk are taken some at a time, with all the query heads of one KV head, so
 * that a key or value is read once for up to MAX_PAIRS pairs. Scores of a pair are computed position
 * by position in one order, weights outside of what a token sees are exact zeros, and all loops are
 * bound to positions, not to the chunk: a token's result does not depend on how its prompt was cut.
 * D % 16 == 0. */
#include "attention.h"

#include <math.h>
#include <string.h>

#include "tile.h"

#define COLUMNS PANEL /* positions that one product of queries and keys covers */

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

/* One thread's room: where positions lie, then queries, a panel of keys, and scores of a tile. */
typedef struct {
    float *q, *scores, *keys;
    const float **at;
} room;

static int64_t padded(int64_t context) { return (context + 2 * COLUMNS) / COLUMNS * COLUMNS; }

int64_t attention_scratch_bytes(const head_shape *heads, int64_t max_context) {
    const int64_t floats = (MAX_PAIRS + COLUMNS) * heads->head_dim + MAX_PAIRS * padded(max_context);
    return (floats * (int64_t)sizeof(float) + padded(max_context) * (int64_t)sizeof(float *) + 63) / 64 * 64;
}

static room room_in(char *scratch, const head_shape *heads, int64_t size) {
    room r;
    r.at = (const float **)scratch;
    r.q = (float *)(r.at + size);
    r.keys = r.q + MAX_PAIRS * heads->head_dim;
    r.scores = r.keys + COLUMNS * heads->head_dim;
    return r;
}

/* Eight rows of eight floats to columns. */
INLINE void transpose8(const float *const from[8], float *to, int64_t stride) {
    f32x8 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = load8(from[i]);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shuffle(a[i], a[i + 1], (i32x8){0, 8, 2, 10, 4, 12, 6, 14});
        b[i + 1] = __builtin_shuffle(a[i], a[i + 1], (i32x8){1, 9, 3, 11, 5, 13, 7, 15});
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = i; j < i + 2; j++) {
            a[j] = __builtin_shuffle(b[j], b[j + 2], (i32x8){0, 1, 8, 9, 4, 5, 12, 13});
            a[j + 2] = __builtin_shuffle(b[j], b[j + 2], (i32x8){2, 3, 10, 11, 6, 7, 14, 15});
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        store8(to + j * stride, __builtin_shuffle(a[j], a[j + 4], (i32x8){0, 1, 2, 3, 8, 9, 10, 11}));
        store8(to + (j + 4) * stride,
               __builtin_shuffle(a[j], a[j + 4], (i32x8){4, 5, 6, 7, 12, 13, 14, 15}));
    }
}

/* The keys of COLUMNS positions as a panel (D, COLUMNS). */
static void gather_keys(const float *const *at, int64_t head_dim, float *panel) {
    for (int64_t i = 0; i < COLUMNS; i += 8)
        for (int64_t d = 0; d < head_dim; d += 8) {
            const float *from[8];
            for (int j = 0; j < 8; j++) from[j] = at[i + j] + d;
            transpose8(from, panel + d * COLUMNS + i, COLUMNS);
        }
}

/* Scores become weights that sum to one and are exact zeros but for first <= i < end. */
static void softmax(float *scores, int64_t first, int64_t end, int64_t size, float soft_cap) {
    if (soft_cap > 0.0f) hr_soft_cap(scores, size, soft_cap);
    float top = scores[first];
    for (int64_t i = first + 1; i < end; i++) top = scores[i] > top ? scores[i] : top;
    memset(scores, 0, first / LANES * LANES * sizeof(float));
    f32x8 sum = splat(0.0f);
    int64_t i = first / LANES * LANES;
    for (; i < end; i += LANES) {
        f32x8 e = exp8(load8(scores + i) - splat(top));
        if (i < first || i + LANES > end)
            for (int64_t lane = 0; lane < LANES; lane++)
                if (i + lane < first || i + lane >= end) e[lane] = 0.0f;
        store8(scores + i, e);
        sum += e;
    }
    memset(scores + i, 0, (size - i) * sizeof(float));
    const f32x8 factor = splat(1.0f / sum8(sum));
    for (i = first / LANES * LANES; i < end; i += LANES)
        store8(scores + i, load8(scores + i) * factor);
}

/* What a tile is: some tokens of one run and some query heads of one KV head. */
typedef struct {
    int64_t token, num_tokens, kv_head, head, num_heads;
    int64_t start, end; /* positions that any of them sees, from a whole COLUMNS on */
} tile;

static int64_t first_seen(const attention *a, int64_t token) {
    const int64_t context = a->kv->context[token], window = a->how->window;
    return window > 0 && window < context ? context - window : 0;
}

/* Where the keys of this KV head lie, from t->start on; past the end, where the last one does. */
static void find_keys(const attention *a, const tile *t, int64_t size, const float **at) {
    const kv_view *kv = a->kv;
    const int64_t slot_size = a->heads->num_kv_heads * a->heads->head_dim;
    const int64_t *table = kv->block_ids + kv->table_start[t->token];
    const float *keys = kv->keys + t->kv_head * a->heads->head_dim;
    for (int64_t i = 0; i < size; i++) {
        const int64_t pos = t->start + i < t->end ? t->start + i : t->end - 1;
        at[i] = keys + (table[pos / kv->block_size] * kv->block_size + pos % kv->block_size) * slot_size;
    }
}

static void score(const attention *a, int64_t num_pairs, int64_t size, const room *r) {
    const int64_t dim = a->heads->head_dim;
    for (int64_t i = 0; i < size; i += COLUMNS) {
        gather_keys(r->at + i, dim, r->keys);
        for (int64_t pair = 0; pair < num_pairs; pair += MAX_TILE_ROWS) {
            float sums[MAX_TILE_ROWS * COLUMNS] = {0};
            multiply_rows(num_pairs - pair, r->q + pair * dim, dim, r->keys, NULL, 0, dim, sums);
            for (int64_t j = pair; j < num_pairs && j < pair + MAX_TILE_ROWS; j++)
                for (int64_t c = 0; c < COLUMNS; c += LANES)
                    store8(r->scores + j * size + i + c,
                           load8(sums + (j - pair) * COLUMNS + c) * splat(a->how->scale));
        }
    }
}

static float *output_of(const attention *a, const tile *t, int64_t pair) {
    const int64_t token = t->token + pair / t->num_heads, head = t->head + pair % t->num_heads;
    return a->y + (token * a->heads->num_heads + head) * a->heads->head_dim;
}

static void mix(const attention *a, const tile *t, int64_t num_pairs, int64_t size, const room *r) {
    const int64_t to_values = a->kv->values - a->kv->keys;
    for (int64_t pair = 0; pair < num_pairs; pair += MAX_TILE_ROWS)
        for (int64_t d = 0; d < a->heads->head_dim; d += COLUMNS) {
            float sums[MAX_TILE_ROWS * COLUMNS] = {0};
            multiply_rows(num_pairs - pair, r->scores + pair * size, size, NULL, r->at, to_values + d,
                          t->end - t->start, sums);
            for (int64_t j = pair; j < num_pairs && j < pair + MAX_TILE_ROWS; j++)
                memcpy(output_of(a, t, j) + d, sums + (j - pair) * COLUMNS, COLUMNS * sizeof(float));
        }
}

static void attend(const attention *a, const tile *t, char *scratch) {
    const int64_t dim = a->heads->head_dim, num_pairs = t->num_tokens * t->num_heads;
    const int64_t size = (t->end - t->start + COLUMNS - 1) / COLUMNS * COLUMNS;
    const room r = room_in(scratch, a->heads, size);
    for (int64_t i = 0; i < t->num_tokens; i++)
        memcpy(r.q + i * t->num_heads * dim,
               a->q + (t->token + i) * a->row_stride + t->head * dim,
               t->num_heads * dim * sizeof(float));
    find_keys(a, t, size, r.at);
    score(a, num_pairs, size, &r);
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const int64_t token = t->token + pair / t->num_heads;
        softmax(r.scores + pair * size, first_seen(a, token) - t->start,
                a->kv->context[token] - t->start, size, a->how->soft_cap);
    }
    mix(a, t, num_pairs, size, &r);
}

/* One run and one KV head. */
static void run_item(void *job, int64_t item, int64_t thread_idx) {
    const attention *a = job;
    const int64_t group = a->heads->num_heads / a->heads->num_kv_heads;
    /* The latest tokens see most: first, so that threads end together. */
    const token_run *run = a->runs + (a->num_runs - 1 - item / a->heads->num_kv_heads);
    tile t = {run->first, run->num, item % a->heads->num_kv_heads, 0, 0, 0, 0};
    t.start = first_seen(a, run->first) / COLUMNS * COLUMNS;
    t.end = a->kv->context[run->first + run->num - 1];
    for (int64_t head = 0; head < group; head += t.num_heads) {
        t.head = t.kv_head * group + head;
        t.num_heads = group - head < MAX_PAIRS ? group - head : MAX_PAIRS;
        attend(a, &t, a->scratch + thread_idx * a->scratch_bytes);
    }
}

void run_attention(pool *threads, const attention *a) {
    run_items(threads, run_item, (void *)a, a->num_runs * a->heads->num_kv_heads);
}
