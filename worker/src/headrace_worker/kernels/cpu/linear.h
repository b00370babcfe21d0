/* Products of rows with a matrix in panels. */
#ifndef HEADRACE_LINEAR_H
#define HEADRACE_LINEAR_H

#include "panels.h"
#include "pool.h"

#define ROWS_OF_ITEM 120 /* a multiple of all tiles' rows */
#define SPARE_ROWS 7    /* behind rounded rows, readable */
#define FEW_ROWS 6      /* of rounded products: so few are multiplied with twice as many panels */

/* A group of a row rounded to whole numbers: the scale, the scale times the sum of the values, then
 * the values; int16 in the order of `quantise.c`. */
typedef struct {
    float scale, sum;
    int16_t values[GROUP];
} int16_group;

typedef struct {
    float scale, sum;
    int8_t values[GROUP];
} int8_group;

/* Rows of such groups. */
typedef struct {
    int64_t rounding; /* INT16 or INT8 */
    void *groups;
} rounded;

INLINE int64_t rounded_group_bytes(int64_t rounding) {
    return rounding == INT8 ? sizeof(int8_group) : sizeof(int16_group);
}

/* Room for rows of either rounding. */
INLINE int64_t rounded_bytes(int64_t num_rows, int64_t num_in) {
    return (num_rows + SPARE_ROWS) * (num_in / GROUP) * sizeof(int16_group);
}

/* y = x W^T, or y += x W^T. */
typedef struct {
    const float *x;   /* (rows, num_in); not read with a rounding */
    const rounded *q; /* NULL: EXACT */
    const matrix *w;
    float *y;
    int64_t num_rows, accumulate;
} product;

void hr_quantise(const float *x, int64_t num_in, const rounded *to, int64_t row);
void multiply_exact(const product *p, int64_t panel, int64_t num_panels, int64_t row, int64_t rows);
void multiply_rounded(const product *p, int64_t panel, int64_t num_panels, int64_t row, int64_t rows);
void run_product(pool *threads, const product *p);

/* What rows are rounded to for this matrix: 8 bits only where the weights have 4, none for floats. */
INLINE int64_t rounding_for(const matrix *w, int64_t wanted) {
    if (w->kind == KIND_F32) return EXACT;
    return w->kind == KIND_Q4 || wanted != INT8 ? wanted : INT16;
}

/* The sums of one panel go where they belong. sums: (rows, stride) floats. */
INLINE void put_panel(const product *p, const float *sums, int64_t stride, int64_t panel, int64_t row,
                      int64_t rows) {
    const int64_t first = panel * PANEL, left = p->w->num_out - first;
    const int64_t size = left < PANEL ? left : PANEL;
    for (int64_t r = 0; r < rows; r++) {
        float *to = p->y + (row + r) * p->w->num_out + first;
        if (size == PANEL) {
            for (int v = 0; v < VECS; v++) {
                const fvec sum = loadv(sums + r * stride + v * WIDTH);
                storev(to + v * WIDTH, p->accumulate ? loadv(to + v * WIDTH) + sum : sum);
            }
            continue;
        }
        for (int64_t o = 0; o < size; o++)
            to[o] = p->accumulate ? to[o] + sums[r * stride + o] : sums[r * stride + o];
    }
}

#endif
