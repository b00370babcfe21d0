/* The inner loop of all float32 products: a few rows times 16 columns, or a multiple of that. */
#ifndef HEADRACE_TILE_H
#define HEADRACE_TILE_H

#include "panels.h"

#define MAX_TILE_ROWS 6

/* acc (rows, panels, 16) += x (rows, depth) times w (panels, depth, 16). Rows of x lie x_stride floats
 * apart, panels of w w_stride. With `at`, line k of the one panel starts at at[k] + column instead. */
INLINE void multiply(int rows, int panels, const float *x, int64_t x_stride, const float *w,
                     int64_t w_stride, const float *const *at, int64_t column, int64_t depth,
                     float *acc) {
    fvec sum[MAX_TILE_ROWS][4][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                sum[r][p][v] = loadv(acc + (r * panels + p) * PANEL + v * WIDTH);
    for (int64_t k = 0; k < depth; k++) {
        fvec line[4][VECS];
#pragma GCC unroll 8
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                line[p][v] = loadv((at ? at[k] + column : w + p * w_stride + k * PANEL) + v * WIDTH);
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
                storev(acc + (r * panels + p) * PANEL + v * WIDTH, sum[r][p][v]);
}

/* One panel, any number of rows up to MAX_TILE_ROWS. */
INLINE void multiply_rows(int64_t rows, const float *x, int64_t x_stride, const float *w,
                          const float *const *at, int64_t column, int64_t depth, float *acc) {
    switch (rows) {
    case 1: multiply(1, 1, x, x_stride, w, 0, at, column, depth, acc); break;
    case 2: multiply(2, 1, x, x_stride, w, 0, at, column, depth, acc); break;
    case 3: multiply(3, 1, x, x_stride, w, 0, at, column, depth, acc); break;
    case 4: multiply(4, 1, x, x_stride, w, 0, at, column, depth, acc); break;
    case 5: multiply(5, 1, x, x_stride, w, 0, at, column, depth, acc); break;
    default: multiply(6, 1, x, x_stride, w, 0, at, column, depth, acc); break;
    }
}

#endif
