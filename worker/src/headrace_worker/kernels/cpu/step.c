/* A whole step of few tokens: all layers and the head in one call. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

typedef struct {
    const float *attention_norm, *ffn_norm;
    matrix qkv, attention_out, gate_up, down;
} layer;

typedef struct {
    int64_t num_layers, hidden_size, ffn_size;
    head_shape heads;
    double eps;
    const layer *layers;
    const float *final_norm;
    matrix head;
} model;

typedef struct {
    int64_t num_tokens, num_logits, max_context;
    float *hidden;             /* (T, E) embeddings; overwritten */
    const float *cos, *sin;    /* (T, D/2) */
    const int64_t *logit_idx;  /* tokens that want logits */
    float *logits;             /* (num_logits, V) */
    kv_view kv;                /* of the first layer */
    int64_t layer_stride;      /* floats from one layer's pool to the next */
} step;

/* Returns 0, or 1 if there was no memory. */
int64_t hr_step(const model *m, const step *s) {
    const int64_t rows = s->num_tokens, hidden = m->hidden_size, dim = m->heads.head_dim;
    const int64_t num_heads = m->heads.num_heads, num_kv_heads = m->heads.num_kv_heads;
    const int64_t qkv_size = (num_heads + 2 * num_kv_heads) * dim;
    const int64_t normed_rows = rows > s->num_logits ? rows : s->num_logits;
    const int64_t sizes[] = {normed_rows * hidden,  rows * qkv_size,       rows * num_heads * dim,
                             rows * 2 * m->ffn_size, rows * m->ffn_size,
                             num_heads * (s->max_context + LANES)};
    int64_t total = 0;
    for (int i = 0; i < 6; i++) total += sizes[i];
    float *scratch = malloc(total * sizeof(float));
    if (!scratch) return 1;
    float *normed = scratch, *qkv = normed + sizes[0], *mixed = qkv + sizes[1];
    float *gate_up = mixed + sizes[2], *gated = gate_up + sizes[3], *scores = gated + sizes[4];
    kv_view kv = s->kv;
    for (const layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        hr_rms_norm(s->hidden, l->attention_norm, normed, rows, hidden, (float)m->eps);
        hr_linear(normed, &l->qkv, qkv, rows, 0);
        hr_rope(qkv, s->cos, s->sin, rows, qkv_size, num_heads + num_kv_heads, dim);
        hr_write_kv(qkv + num_heads * dim, qkv + (num_heads + num_kv_heads) * dim, qkv_size, &kv,
                    rows, &m->heads);
        hr_attention(qkv, qkv_size, mixed, scores, &kv, rows, &m->heads);
        hr_linear(mixed, &l->attention_out, s->hidden, rows, 1);
        hr_rms_norm(s->hidden, l->ffn_norm, normed, rows, hidden, (float)m->eps);
        hr_linear(normed, &l->gate_up, gate_up, rows, 0);
        hr_silu_mul(gate_up, gated, rows, m->ffn_size);
        hr_linear(gated, &l->down, s->hidden, rows, 1);
        kv.keys += s->layer_stride;
        kv.values += s->layer_stride;
    }
    for (int64_t i = 0; i < s->num_logits; i++)
        hr_rms_norm(s->hidden + s->logit_idx[i] * hidden, m->final_norm, normed + i * hidden, 1,
                    hidden, (float)m->eps);
    hr_linear(normed, &m->head, s->logits, s->num_logits, 0);
    free(scratch);
    return 0;
}
