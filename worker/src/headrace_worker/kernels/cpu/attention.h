/* Attention of a step's tokens over paged KV. */
#ifndef HEADRACE_ATTENTION_H
#define HEADRACE_ATTENTION_H

#include "kernels.h"
#include "pool.h"

/* Up to so many (token, head) pairs share one pass over keys and values. */
#define MAX_PAIRS 48

/* Tokens that stand in one row of the batch and follow one another, `num` from `first` on; and all runs of
 * that row, `row_runs` from `first_run` on. */
typedef struct {
    int64_t first, num, first_run, row_runs;
} token_run;

/* All new keys and values must have been written before. */
typedef struct {
    const float *q;      /* (T, ...) rotated queries, rows row_stride floats apart */
    int64_t row_stride;
    float *y;            /* (T, H, D) */
    const kv_view *kv;
    const head_shape *heads;
    const scoring *how;
    const token_run *runs;
    int64_t num_runs;
    char *scratch;       /* attention_scratch_bytes for each thread */
    int64_t scratch_bytes;
} attention;

/* Cut num_rows tokens into runs; runs: room for num_rows. Returns how many. */
int64_t find_runs(const kv_view *kv, int64_t num_rows, const head_shape *heads, token_run *runs);
/* A multiple of 64; the scratch must begin at one. */
int64_t attention_scratch_bytes(const head_shape *heads);
void run_attention(pool *threads, const attention *a);

#endif
