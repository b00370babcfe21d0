/* Products of rows with a matrix in panels. */
#ifndef HEADRACE_LINEAR_H
#define HEADRACE_LINEAR_H

#include "panels.h"
#include "pool.h"

/* Rows rounded to whole numbers, each group of 32 by a scale of its own. */
typedef struct {
    int64_t rounding; /* INT16 or INT8 */
    float *scales;    /* (rows, groups) */
    float *sums;      /* (rows, groups) scale times the sum of the values */
    void *values;     /* (rows, columns); int16 in the order of `quantise.c` */
} rounded;

/* y = x W^T, or y += x W^T. */
typedef struct {
    const float *x;   /* (rows, num_in); not read with a rounding */
    const rounded *q; /* NULL: EXACT */
    const matrix *w;
    float *y;
    int64_t num_rows, accumulate;
} product;

#define ROWS_OF_ITEM 120 /* a multiple of all tiles' rows */

void hr_quantise(const float *x, int64_t num_in, const rounded *to, int64_t row);
void multiply_exact(const product *p, int64_t panel, int64_t num_panels, int64_t row, int64_t rows);
void multiply_rounded(const product *p, int64_t panel, int64_t row, int64_t rows);
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
        for (int64_t o = 0; o < size; o++)
            to[o] = p->accumulate ? to[o] + sums[r * stride + o] : sums[r * stride + o];
    }
}

#endif
