/* A whole step of few tokens: all layers and the head in one call. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* What a model does not have is NULL. */
typedef struct {
    const float *attention_norm, *ffn_norm;
    matrix qkv, attention_out, gate_up, down;
    const float *qkv_bias, *q_norm, *k_norm, *attention_post_norm, *ffn_post_norm;
    scoring how; /* a window means the local cosines and sines, too */
} layer;

typedef struct {
    int64_t num_layers, hidden_size, ffn_size, has_gelu;
    head_shape heads;
    double eps, logit_soft_cap;
    const layer *layers;
    const float *final_norm;
    matrix head;
} model;

typedef struct {
    int64_t num_tokens, num_logits, max_context;
    float *hidden;                         /* (T, E) embeddings; overwritten */
    const float *cos, *sin;                /* (T, D/2) */
    const float *local_cos, *local_sin;    /* (T, D/2), of windowed layers */
    const int64_t *logit_idx;              /* tokens that want logits */
    float *logits;                         /* (num_logits, V) */
    kv_view kv;                            /* of the first layer */
    int64_t layer_stride;                  /* floats from one layer's pool to the next */
} step;

/* Scratch of a step, one allocation. */
typedef struct {
    float *normed, *qkv, *mixed, *gate_up, *gated, *scores;
} buffers;

static float *allocate(const model *m, const step *s, buffers *b) {
    const int64_t rows = s->num_tokens, hidden = m->hidden_size, dim = m->heads.head_dim;
    const int64_t normed_rows = rows > s->num_logits ? rows : s->num_logits;
    const int64_t sizes[] = {normed_rows * hidden,
                             rows * (m->heads.num_heads + 2 * m->heads.num_kv_heads) * dim,
                             rows * m->heads.num_heads * dim,
                             rows * 2 * m->ffn_size,
                             rows * m->ffn_size,
                             m->heads.num_heads * (s->max_context + LANES)};
    float **parts[] = {&b->normed, &b->qkv, &b->mixed, &b->gate_up, &b->gated, &b->scores};
    int64_t total = 0;
    for (int i = 0; i < 6; i++) total += sizes[i];
    float *scratch = malloc(total * sizeof(float)), *next = scratch;
    if (!scratch) return NULL;
    for (int i = 0; i < 6; next += sizes[i], i++) *parts[i] = next;
    return scratch;
}

/* hidden += x W^T, normed before if there is a norm; `room` holds the product meanwhile. */
static void add_linear(const float *x, const matrix *w, const float *norm, float *hidden,
                       float *room, int64_t rows, float eps) {
    if (!norm) {
        hr_linear(x, w, hidden, rows, 1);
        return;
    }
    hr_linear(x, w, room, rows, 0);
    hr_rms_norm(room, norm, room, rows, w->num_out, eps);
    for (int64_t i = 0; i < rows * w->num_out; i += LANES)
        store8(hidden + i, load8(hidden + i) + load8(room + i));
}

static void prepare_heads(const layer *l, const model *m, const step *s, float *qkv) {
    const int64_t dim = m->heads.head_dim, num_heads = m->heads.num_heads;
    const int64_t num_kv_heads = m->heads.num_kv_heads, size = (num_heads + 2 * num_kv_heads) * dim;
    for (int64_t t = 0; t < s->num_tokens; t++) {
        float *q = qkv + t * size, *k = q + num_heads * dim;
        if (l->qkv_bias)
            for (int64_t i = 0; i < size; i += LANES)
                store8(q + i, load8(q + i) + load8(l->qkv_bias + i));
        if (l->q_norm) {
            hr_rms_norm(q, l->q_norm, q, num_heads, dim, (float)m->eps);
            hr_rms_norm(k, l->k_norm, k, num_kv_heads, dim, (float)m->eps);
        }
    }
    hr_rope(qkv, l->how.window ? s->local_cos : s->cos, l->how.window ? s->local_sin : s->sin,
            s->num_tokens, size, num_heads + num_kv_heads, dim);
}

static void run_layer(const layer *l, const model *m, const step *s, const kv_view *kv,
                      const buffers *b) {
    const int64_t rows = s->num_tokens, hidden = m->hidden_size, dim = m->heads.head_dim;
    const int64_t num_heads = m->heads.num_heads, num_kv_heads = m->heads.num_kv_heads;
    const int64_t qkv_size = (num_heads + 2 * num_kv_heads) * dim;
    const float eps = (float)m->eps;
    hr_rms_norm(s->hidden, l->attention_norm, b->normed, rows, hidden, eps);
    hr_linear(b->normed, &l->qkv, b->qkv, rows, 0);
    prepare_heads(l, m, s, b->qkv);
    hr_write_kv(b->qkv + num_heads * dim, b->qkv + (num_heads + num_kv_heads) * dim, qkv_size, kv,
                rows, &m->heads);
    hr_attention(b->qkv, qkv_size, b->mixed, b->scores, kv, rows, &m->heads, &l->how);
    add_linear(b->mixed, &l->attention_out, l->attention_post_norm, s->hidden, b->normed, rows, eps);
    hr_rms_norm(s->hidden, l->ffn_norm, b->normed, rows, hidden, eps);
    hr_linear(b->normed, &l->gate_up, b->gate_up, rows, 0);
    (m->has_gelu ? hr_gelu_mul : hr_silu_mul)(b->gate_up, b->gated, rows, m->ffn_size);
    add_linear(b->gated, &l->down, l->ffn_post_norm, s->hidden, b->normed, rows, eps);
}

/* Returns 0, or 1 if there was no memory. */
int64_t hr_step(const model *m, const step *s) {
    buffers b;
    float *scratch = allocate(m, s, &b);
    if (!scratch) return 1;
    const int64_t hidden = m->hidden_size;
    kv_view kv = s->kv;
    for (const layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        run_layer(l, m, s, &kv, &b);
        kv.keys += s->layer_stride;
        kv.values += s->layer_stride;
    }
    for (int64_t i = 0; i < s->num_logits; i++)
        hr_rms_norm(s->hidden + s->logit_idx[i] * hidden, m->final_norm, b.normed + i * hidden, 1,
                    hidden, (float)m->eps);
    hr_linear(b.normed, &m->head, s->logits, s->num_logits, 0);
    if (m->logit_soft_cap > 0.0)
        hr_soft_cap(s->logits, s->num_logits * m->head.num_out, (float)m->logit_soft_cap);
    free(scratch);
    return 0;
}
