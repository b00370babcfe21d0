/* Tokens from logits. */
#ifndef HEADRACE_SAMPLE_H
#define HEADRACE_SAMPLE_H

#include "kernels.h"
#include "pool.h"

/* How rows are drawn; 0 = off for all but the draw, temperature > 0. */
typedef struct {
    float temperature, top_p, min_p;
    int32_t top_k;
    double draw; /* in [0, 1) */
    int64_t row; /* of the logits */
} sampling;

/* Returns 0, or 1 if there was no memory. tokens: (num) results. */
int64_t draw_tokens(pool *threads, const float *logits, int64_t size, const sampling *how, int64_t num,
                    int64_t *tokens);

#endif
