/* A whole step: all layers and the head in one call.
 *
 * What a row needs by itself (norms, rotation, gates, rounding) is handed out some rows at a time,
 * products panel by panel, attention by runs of tokens and KV heads. */
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "linear.h"
#include "sample.h"

#define MAX_TOKENS 512 /* computed together; bounds the scratch */
#define ROWS_OF_STAGE 4

/* What a model does not have is NULL. Matrices are in panels. */
typedef struct {
    const float *attention_norm, *ffn_norm;
    matrix qkv, attention_out, gate_up, down;
    const float *qkv_bias, *q_norm, *k_norm, *attention_post_norm, *ffn_post_norm;
    scoring how; /* a window means the local cosines and sines, too */
} layer;

typedef struct {
    int64_t num_layers, hidden_size, ffn_size, has_gelu, rounding;
    head_shape heads;
    double eps, logit_soft_cap;
    const layer *layers;
    const float *final_norm;
    matrix head;
} model;

typedef struct {
    int64_t num_tokens, num_logits;
    float *hidden;                      /* (T, E) embeddings; overwritten */
    const float *cos, *sin;             /* (T, D/2) */
    const float *local_cos, *local_sin; /* (T, D/2), of windowed layers */
    const int64_t *logit_idx;           /* ascending, tokens that want logits */
    float *states;                      /* (num_logits, E), behind the last norm */
    float *logits;                      /* (num_logits, V), or NULL: the states are enough */
    kv_view kv;                         /* of the first layer */
    int64_t layer_stride;               /* floats from one layer's pool to the next */
} step;

/* Threads and scratch that steps share. */
typedef struct {
    pool *threads;
    char *scratch;
    int64_t capacity_bytes;
} context;

/* Everything that the stages of one layer read and write. */
typedef struct {
    const model *m;
    const layer *l;
    const step *s;
    kv_view kv;
    int64_t num_rows; /* tokens under way */
    float *normed, *qkv, *mixed, *gate_up, *gated;
    rounded q;
    token_run *runs;
    int64_t num_runs, scratch_bytes;
    int64_t *context, *table_start; /* of the rows that go on to the end */
    char *scratch;
    pool *threads;
} work;

/* stamps: of all workers of this machine, see cores.h; NULL = this one has it for itself. */
context *hr_context_start(int64_t num_threads, void *stamps, int64_t seat, int64_t num_cores) {
    const cores among = {stamps, seat, num_cores};
    context *c = calloc(1, sizeof(context));
    if (c && !(c->threads = hr_pool_start(num_threads, &among))) {
        free(c);
        return NULL;
    }
    return c;
}

void hr_context_stop(context *c) {
    hr_pool_stop(c->threads);
    free(c->scratch);
    free(c);
}

static int64_t qkv_size(const model *m) {
    return (m->heads.num_heads + 2 * m->heads.num_kv_heads) * m->heads.head_dim;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Point the work's buffers into the context's scratch; 0 if there is no memory. */
static int allocate(context *c, work *k) {
    const model *m = k->m;
    const int64_t rows = k->s->num_tokens, mixed = m->heads.num_heads * m->heads.head_dim;
    const int64_t widest = larger(larger(m->hidden_size, m->ffn_size), mixed);
    k->scratch_bytes = attention_scratch_bytes(&m->heads);
    const struct {
        void *to;
        int64_t bytes;
    } parts[] = {{&k->normed, rows * m->hidden_size * 4},
                 {&k->qkv, rows * qkv_size(m) * 4},
                 {&k->mixed, rows * mixed * 4},
                 {&k->gate_up, rows * 2 * m->ffn_size * 4},
                 {&k->gated, rows * m->ffn_size * 4},
                 {&k->q.groups, rounded_bytes(rows, widest)},
                 {&k->runs, rows * (int64_t)sizeof(token_run)},
                 {&k->context, rows * (int64_t)sizeof(int64_t)},
                 {&k->table_start, rows * (int64_t)sizeof(int64_t)},
                 {&k->scratch, k->scratch_bytes * num_threads_of(c->threads)}};
    const int num = sizeof(parts) / sizeof(parts[0]);
    int64_t total = 64;
    for (int i = 0; i < num; i++) total += (parts[i].bytes + 63) / 64 * 64;
    if (total > c->capacity_bytes) {
        free(c->scratch);
        c->scratch = malloc(total);
        c->capacity_bytes = c->scratch ? total : 0;
    }
    if (!c->scratch) return 0;
    char *next = c->scratch + (64 - (uintptr_t)c->scratch % 64) % 64;
    for (int i = 0; i < num; i++) {
        memcpy(parts[i].to, &next, sizeof next);
        next += (parts[i].bytes + 63) / 64 * 64;
    }
    return 1;
}

/* Call `run` for each of `rows` rows, some at a time. */
typedef struct {
    void (*run)(const work *k, int64_t row);
    const work *k;
    int64_t rows;
} stage;

static void run_rows(void *job, int64_t item, int64_t thread_idx) {
    (void)thread_idx;
    const stage *s = job;
    const int64_t end = (item + 1) * ROWS_OF_STAGE;
    for (int64_t row = item * ROWS_OF_STAGE; row < end && row < s->rows; row++) s->run(s->k, row);
}

static void each_row(const work *k, void (*run)(const work *, int64_t)) {
    stage s = {run, k, k->num_rows};
    run_items(k->threads, run_rows, &s, (s.rows + ROWS_OF_STAGE - 1) / ROWS_OF_STAGE);
}

/* Round a row of what `w` is multiplied with, if it is to be. */
static void round_row(const work *k, const float *x, const matrix *w, int64_t row) {
    rounded q = k->q;
    q.rounding = rounding_for(w, k->m->rounding);
    if (q.rounding != EXACT) hr_quantise(x + row * w->num_in, w->num_in, &q, row);
}

static void multiply_all(const work *k, const float *x, const matrix *w, float *y, int64_t rows,
                         int64_t accumulate) {
    rounded q = k->q;
    q.rounding = rounding_for(w, k->m->rounding);
    const product p = {x, q.rounding == EXACT ? NULL : &q, w, y, rows, accumulate};
    run_product(k->threads, &p);
}

/* Whether some of the tokens follow one another. */
static int has_chunks(const work *k) { return k->num_runs < k->num_rows; }

static void norm_attention(const work *k, int64_t row) {
    const int64_t size = k->m->hidden_size;
    hr_rms_norm(k->s->hidden + row * size, k->l->attention_norm, k->normed + row * size, 1, size,
                (float)k->m->eps);
    round_row(k, k->normed, &k->l->qkv, row);
    /* A decode's keys go to as many lines as they have elements, all far away. */
    if (!has_chunks(k)) hr_fetch_keys(&k->kv, row, &k->m->heads);
}

static void norm_ffn(const work *k, int64_t row) {
    const int64_t size = k->m->hidden_size;
    hr_rms_norm(k->s->hidden + row * size, k->l->ffn_norm, k->normed + row * size, 1, size,
                (float)k->m->eps);
    round_row(k, k->normed, &k->l->gate_up, row);
}

static void prepare_heads(const work *k, int64_t row) {
    const layer *l = k->l;
    const step *s = k->s;
    const int64_t dim = k->m->heads.head_dim, num_heads = k->m->heads.num_heads;
    const int64_t num_kv_heads = k->m->heads.num_kv_heads, size = qkv_size(k->m);
    const float eps = (float)k->m->eps;
    float *q = k->qkv + row * size, *key = q + num_heads * dim;
    if (l->qkv_bias)
        for (int64_t i = 0; i < size; i += LANES)
            store8(q + i, load8(q + i) + load8(l->qkv_bias + i));
    if (l->q_norm) {
        hr_rms_norm(q, l->q_norm, q, num_heads, dim, eps);
        hr_rms_norm(key, l->k_norm, key, num_kv_heads, dim, eps);
    }
    hr_rope(q, (l->how.window ? s->local_cos : s->cos) + row * dim / 2,
            (l->how.window ? s->local_sin : s->sin) + row * dim / 2, 1, size,
            num_heads + num_kv_heads, dim);
    kv_view kv = k->kv;
    kv.slots += row;
    if (!has_chunks(k)) hr_write_keys(key, size, &kv, 1, &k->m->heads, 0, num_kv_heads);
    hr_write_values(key + num_kv_heads * dim, size, &kv, 1, &k->m->heads);
}

/* All rows' keys of one head: neighbours share cache lines, which two threads would pull from each other. */
static void write_keys_of_head(void *job, int64_t head, int64_t thread_idx) {
    (void)thread_idx;
    const work *k = job;
    const head_shape *heads = &k->m->heads;
    hr_write_keys(k->qkv + heads->num_heads * heads->head_dim, qkv_size(k->m), &k->kv, k->num_rows, heads, head, 1);
}

static void round_mixed(const work *k, int64_t row) {
    round_row(k, k->mixed, &k->l->attention_out, row);
}

static void gate(const work *k, int64_t row) {
    const int64_t size = k->m->ffn_size;
    (k->m->has_gelu ? hr_gelu_mul : hr_silu_mul)(k->gate_up + row * 2 * size, k->gated + row * size, 1,
                                                 size);
    round_row(k, k->gated, &k->l->down, row);
}

static void add_normed(const work *k, const float *norm, int64_t row) {
    const int64_t size = k->m->hidden_size;
    float *room = k->normed + row * size, *hidden = k->s->hidden + row * size;
    hr_rms_norm(room, norm, room, 1, size, (float)k->m->eps);
    for (int64_t i = 0; i < size; i += LANES) store8(hidden + i, load8(hidden + i) + load8(room + i));
}

static void add_mixed(const work *k, int64_t row) { add_normed(k, k->l->attention_post_norm, row); }
static void add_ffn(const work *k, int64_t row) { add_normed(k, k->l->ffn_post_norm, row); }

/* hidden += x W^T, normed before if there is a norm, which `add` does. */
static void add_product(const work *k, const float *x, const matrix *w, const float *norm,
                        void (*add)(const work *, int64_t)) {
    multiply_all(k, x, w, norm ? k->normed : k->s->hidden, k->num_rows, !norm);
    if (norm) each_row(k, add);
}

static void attend(const work *k) {
    const attention a = {k->qkv,         qkv_size(k->m), k->mixed,   &k->kv, &k->m->heads,
                         &k->l->how,     k->runs,        k->num_runs, k->scratch, k->scratch_bytes};
    run_attention(k->threads, &a);
}

/* Behind the last layer's keys and values only the tokens matter whose result is wanted: the others end here. */
static void keep_wanted(work *k) {
    const int64_t size = qkv_size(k->m), hidden_size = k->m->hidden_size;
    for (int64_t i = 0; i < k->s->num_logits; i++) {
        const int64_t from = k->s->logit_idx[i];
        k->context[i] = k->kv.context[from];
        k->table_start[i] = k->kv.table_start[from];
        memmove(k->qkv + i * size, k->qkv + from * size, size * sizeof(float));
        memmove(k->s->hidden + i * hidden_size, k->s->hidden + from * hidden_size, hidden_size * sizeof(float));
    }
    k->kv.context = k->context;
    k->kv.table_start = k->table_start;
    k->num_rows = k->s->num_logits;
    k->num_runs = find_runs(&k->kv, k->num_rows, &k->m->heads, k->runs);
}

static void run_layer(work *k) {
    each_row(k, norm_attention);
    multiply_all(k, k->normed, &k->l->qkv, k->qkv, k->num_rows, 0);
    each_row(k, prepare_heads);
    if (has_chunks(k)) run_items(k->threads, write_keys_of_head, k, k->m->heads.num_kv_heads);
    if (k->l == k->m->layers + k->m->num_layers - 1) keep_wanted(k);
    attend(k);
    if (rounding_for(&k->l->attention_out, k->m->rounding) != EXACT) each_row(k, round_mixed);
    add_product(k, k->mixed, &k->l->attention_out, k->l->attention_post_norm, add_mixed);
    each_row(k, norm_ffn);
    multiply_all(k, k->normed, &k->l->gate_up, k->gate_up, k->num_rows, 0);
    each_row(k, gate);
    add_product(k, k->gated, &k->l->down, k->l->ffn_post_norm, add_ffn);
}

static void run_head(const work *k) {
    const model *m = k->m;
    const step *s = k->s;
    const int64_t size = m->hidden_size;
    for (int64_t i = 0; i < s->num_logits; i++) {
        hr_rms_norm(s->hidden + i * size, m->final_norm, s->states + i * size, 1, size, (float)m->eps);
        if (s->logits) round_row(k, s->states, &m->head, i);
    }
    if (!s->logits) return;
    multiply_all(k, s->states, &m->head, s->logits, s->num_logits, 0);
    if (m->logit_soft_cap > 0.0)
        for (int64_t i = 0; i < s->num_logits; i++)
            hr_soft_cap(s->logits + i * m->head.num_out, m->head.num_out, (float)m->logit_soft_cap);
}

static int run_part(context *c, const model *m, const step *s) {
    work k = {.m = m, .s = s, .kv = s->kv, .num_rows = s->num_tokens, .threads = c->threads};
    if (!allocate(c, &k)) return 0;
    k.num_runs = find_runs(&k.kv, s->num_tokens, &m->heads, k.runs);
    for (k.l = m->layers; k.l < m->layers + m->num_layers; k.l++) {
        run_layer(&k);
        k.kv.keys += s->layer_stride;
        k.kv.values += s->layer_stride;
    }
    run_head(&k);
    return 1;
}

/* The part of a step from token `first` on; logit_idx: room for its indices. */
static step part_of(const step *s, const model *m, int64_t first, int64_t logit, int64_t *logit_idx) {
    const int64_t half = first * m->heads.head_dim / 2, left = s->num_tokens - first;
    step part = *s;
    part.num_tokens = left < MAX_TOKENS ? left : MAX_TOKENS;
    part.hidden += first * m->hidden_size;
    part.cos += half;
    part.sin += half;
    part.local_cos += half;
    part.local_sin += half;
    part.kv.slots += first;
    part.kv.table_start += first;
    part.kv.context += first;
    part.states += logit * m->hidden_size;
    if (part.logits) part.logits += logit * m->head.num_out;
    part.logit_idx = logit_idx;
    part.num_logits = 0;
    while (logit < s->num_logits && s->logit_idx[logit] < first + part.num_tokens)
        logit_idx[part.num_logits++] = s->logit_idx[logit++] - first;
    return part;
}

/* Returns 0, or 1 if there was no memory. */
int64_t hr_step(context *c, const model *m, const step *s) {
    int64_t logit_idx[MAX_TOKENS], failed = 0;
    for (int64_t first = 0, logit = 0; first < s->num_tokens && !failed; first += MAX_TOKENS) {
        const step part = part_of(s, m, first, logit, logit_idx);
        failed = !run_part(c, m, &part);
        logit += part.num_logits;
    }
    rest(c->threads);
    return failed;
}

/* One product by itself: y = x W^T with rows rounded to `rounding`. Returns 0, or 1 without memory. */
int64_t hr_linear(context *c, const float *x, const matrix *w, float *y, int64_t num_rows,
                  int64_t rounding) {
    rounded q = {rounding_for(w, rounding), malloc(rounded_bytes(num_rows, w->num_in))};
    if (!q.groups) return 1;
    if (q.rounding != EXACT)
        for (int64_t row = 0; row < num_rows; row++) hr_quantise(x + row * w->num_in, w->num_in, &q, row);
    const product p = {x, q.rounding == EXACT ? NULL : &q, w, y, num_rows, 0};
    run_product(c->threads, &p);
    rest(c->threads);
    free(q.groups);
    return 0;
}

/* Attention by itself; see `attention`. Returns 0, or 1 if there was no memory. */
int64_t hr_attention(context *c, const float *q, float *y, const kv_view *kv, int64_t num_rows,
                     const head_shape *heads, const scoring *how) {
    attention a = {.q = q, .row_stride = heads->num_heads * heads->head_dim, .y = y, .kv = kv,
                   .heads = heads, .how = how,
                   .scratch_bytes = attention_scratch_bytes(heads)};
    token_run *runs = malloc(num_rows * sizeof(token_run));
    a.scratch = aligned_alloc(64, a.scratch_bytes * num_threads_of(c->threads));
    if (runs && a.scratch) {
        a.num_runs = find_runs(kv, num_rows, heads, runs);
        a.runs = runs;
        run_attention(c->threads, &a);
        rest(c->threads);
    }
    const int64_t failed = !runs || !a.scratch;
    free(runs);
    free(a.scratch);
    return failed;
}

/* Tokens drawn from rows of logits; see `sampling`. Returns 0, or 1 if there was no memory. */
int64_t hr_draw(context *c, const float *logits, int64_t vocab_size, const sampling *how, int64_t num_draws,
                int64_t *tokens) {
    const int64_t failed = draw_tokens(c->threads, logits, vocab_size, how, num_draws, tokens);
    rest(c->threads);
    return failed;
}
