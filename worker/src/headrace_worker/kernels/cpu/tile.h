/* The inner loop of all float32 products: a few rows times 16 columns, or a multiple of that. */
#ifndef HEADRACE_TILE_H
#define HEADRACE_TILE_H

#include "panels.h"

#define MAX_TILE_ROWS 6

#define TILE_PANELS 4 /* at most; with fewer registers one panel is as many sums as there is room for */
#define WIDE_PANELS (WIDTH == 16 ? TILE_PANELS : 1)

/* Lines of 16 that rows are multiplied with: line k of panel p begins at panels[p] + 16 k, or with `at` at
 * at[k] + column + 16 p. */
typedef struct {
    const float *panels[TILE_PANELS];
    const float *const *at;
    int64_t column;
} tile_lines;

/* acc (rows, panels, 16), rows acc_stride apart, += x (rows, depth), rows x_stride apart, times the lines. */
INLINE void multiply(int rows, int panels, const float *x, int64_t x_stride, const tile_lines *w,
                     int64_t depth, float *acc, int64_t acc_stride) {
    fvec sum[MAX_TILE_ROWS][TILE_PANELS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                sum[r][p][v] = loadv(acc + r * acc_stride + p * PANEL + v * WIDTH);
    for (int64_t k = 0; k < depth; k++) {
        fvec line[TILE_PANELS][VECS];
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++) {
            const float *from = w->at ? w->at[k] + w->column + p * PANEL : w->panels[p] + k * PANEL;
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++) line[p][v] = loadv(from + v * WIDTH);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const fvec factor = splatv(x[r * x_stride + k]);
#pragma GCC unroll 8
            for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++)
                    sum[r][p][v] = fmav(line[p][v], factor, sum[r][p][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                storev(acc + r * acc_stride + p * PANEL + v * WIDTH, sum[r][p][v]);
}

/* Any number of rows up to MAX_TILE_ROWS; more than those are left for another call. */
INLINE void multiply_rows(int64_t rows, int panels, const float *x, int64_t x_stride, const tile_lines *w,
                          int64_t depth, float *acc, int64_t acc_stride) {
    switch (rows) {
    case 1: multiply(1, panels, x, x_stride, w, depth, acc, acc_stride); break;
    case 2: multiply(2, panels, x, x_stride, w, depth, acc, acc_stride); break;
    case 3: multiply(3, panels, x, x_stride, w, depth, acc, acc_stride); break;
    case 4: multiply(4, panels, x, x_stride, w, depth, acc, acc_stride); break;
    case 5: multiply(5, panels, x, x_stride, w, depth, acc, acc_stride); break;
    default: multiply(6, panels, x, x_stride, w, depth, acc, acc_stride); break;
    }
}

#endif
