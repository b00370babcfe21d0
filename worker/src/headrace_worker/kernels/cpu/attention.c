/* Grouped-query attention of single tokens over paged KV, read where it lies.
 *
 * Each token sees the first `context` positions of its block table, or the last of them that lie in
 * the window. All new keys and values must
 * have been written before. scores: room for (H / K) * (the longest context + 8) floats. Reads each
 * key and value once per token. D % 8 == 0. */
#include <math.h>
#include <string.h>

#include "kernels.h"

#define MAX_GROUP 8 /* query heads that share one pass over keys and values */

void hr_write_kv(const float *k, const float *v, int64_t row_stride, const kv_view *kv,
                 int64_t num_rows, const head_shape *heads) {
    const int64_t size = heads->num_kv_heads * heads->head_dim;
    for (int64_t t = 0; t < num_rows; t++) {
        memcpy(kv->keys + kv->slots[t] * size, k + t * row_stride, size * sizeof(float));
        memcpy(kv->values + kv->slots[t] * size, v + t * row_stride, size * sizeof(float));
    }
}

static float dot(const float *a, const float *b, int64_t size) {
    f32x8 sum = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) sum = fma8(load8(a + i), load8(b + i), sum);
    return sum8(sum);
}

/* Ask for a vector that is needed one block later: blocks lie apart, which hardware cannot guess. */
static void fetch(const float *from, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / (int64_t)sizeof(float)) __builtin_prefetch(from + i);
}

/* Turn scores into weights that sum to one; entries up to the next multiple of 8 are scratch. */
static void softmax(float *scores, int64_t size) {
    float top = scores[0];
    for (int64_t i = 1; i < size; i++) top = scores[i] > top ? scores[i] : top;
    for (int64_t i = size; i % LANES; i++) scores[i] = -INFINITY;
    f32x8 sum = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        f32x8 e = exp8(load8(scores + i) - splat(top));
        store8(scores + i, e);
        if (i + LANES > size)
            for (int64_t lane = size - i; lane < LANES; lane++) e[lane] = 0.0f;
        sum += e;
    }
    f32x8 factor = splat(1.0f / sum8(sum));
    for (int64_t i = 0; i < size; i += LANES) store8(scores + i, load8(scores + i) * factor);
}

void hr_soft_cap(float *x, int64_t size, float cap) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        store8(x + i, tanh8(load8(x + i) / splat(cap)) * splat(cap));
    for (; i < size; i++) x[i] = tanhf(x[i] / cap) * cap;
}

/* Up to MAX_GROUP query heads of one KV head. q, y: (group, D). Position `first` is the first that
 * is seen; scores are counted from it. */
static void attend(const float *q, float *y, float *scores, const float *keys, const float *values,
                   const int64_t *table, int64_t first, int64_t context, int64_t block_size,
                   int64_t group, const head_shape *heads, const scoring *how) {
    const int64_t head_dim = heads->head_dim, slot_size = heads->num_kv_heads * head_dim;
    const int64_t num_seen = context - first, row = num_seen + LANES - num_seen % LANES;
    const int64_t stride = block_size * slot_size, *block = table + first / block_size;
    int64_t end;
    for (int64_t start = first; start < context; start = end, block++) {
        end = (start / block_size + 1) * block_size;
        if (end > context) end = context;
        const float *key = keys + *block * stride + start % block_size * slot_size;
        const float *next = end < context ? keys + block[1] * stride : key;
        for (int64_t pos = start; pos < end; pos++, key += slot_size, next += slot_size) {
            fetch(next, head_dim);
            for (int64_t h = 0; h < group; h++)
                scores[h * row + pos - first] = dot(q + h * head_dim, key, head_dim) * how->scale;
        }
    }
    for (int64_t h = 0; h < group; h++) {
        if (how->soft_cap > 0.0f) hr_soft_cap(scores + h * row, num_seen, how->soft_cap);
        softmax(scores + h * row, num_seen);
    }
    memset(y, 0, group * head_dim * sizeof(float));
    block = table + first / block_size;
    for (int64_t start = first; start < context; start = end, block++) {
        end = (start / block_size + 1) * block_size;
        if (end > context) end = context;
        const float *value = values + *block * stride + start % block_size * slot_size;
        const float *next = end < context ? values + block[1] * stride : value;
        for (int64_t pos = start; pos < end; pos++, value += slot_size, next += slot_size) {
            fetch(next, head_dim);
            for (int64_t h = 0; h < group; h++) {
                const f32x8 weight = splat(scores[h * row + pos - first]);
                for (int64_t i = 0; i < head_dim; i += LANES)
                    store8(y + h * head_dim + i,
                           fma8(weight, load8(value + i), load8(y + h * head_dim + i)));
            }
        }
    }
}

void hr_attention(const float *q, int64_t row_stride, float *y, float *scores, const kv_view *kv,
                  int64_t num_rows, const head_shape *heads, const scoring *how) {
    const int64_t head_dim = heads->head_dim, per_kv = heads->num_heads / heads->num_kv_heads;
    for (int64_t t = 0; t < num_rows; t++)
        for (int64_t head = 0; head < heads->num_heads;) {
            const int64_t kv_head = head / per_kv, left = (kv_head + 1) * per_kv - head;
            const int64_t group = left < MAX_GROUP ? left : MAX_GROUP, context = kv->context[t];
            const int64_t is_cut = how->window > 0 && how->window < context;
            attend(q + t * row_stride + head * head_dim, y + (t * heads->num_heads + head) * head_dim,
                   scores, kv->keys + kv_head * head_dim, kv->values + kv_head * head_dim,
                   kv->block_ids + kv->table_start[t], is_cut ? context - how->window : 0, context,
                   kv->block_size, group, heads, how);
            head += group;
        }
}
