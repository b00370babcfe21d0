/* y = x W^T (or y += x W^T) for few rows, W in blocks.
 *
 * Weights become float32 in registers and are used for up to eight rows; per output one vector
 * accumulator runs over the columns in order. Reads W once per eight rows. */
#include "kernels.h"

/* The rows of a tile are short runs, which the hardware's own prefetch is late for: without this,
 * one row takes two to three times as long. */
#define AHEAD_BYTES 4096
#define CACHE_LINE 64

#define INLINE static inline __attribute__((always_inline))

/* The 32 weights of group `g` of a row. */
INLINE void weights_of(int kind, const void *row, int64_t g, f32x8 w[4]) {
    if (kind == KIND_Q4) {
        const q4_block *block = (const q4_block *)row + g;
        f32x8 scale = splat(block->scale), offset = splat(block->offset);
        for (int half = 0; half < 2; half++) {
            i32x8 wide = widen_unsigned(block->nibbles + LANES * half);
            w[half] = fma8(__builtin_convertvector(wide & 15, f32x8), scale, offset);
            w[half + 2] = fma8(__builtin_convertvector(wide >> 4, f32x8), scale, offset);
        }
    } else if (kind == KIND_Q8) {
        const q8_block *block = (const q8_block *)row + g;
        f32x8 scale = splat(block->scale);
        for (int i = 0; i < 4; i++)
            w[i] = __builtin_convertvector(widen_signed(block->values + LANES * i), f32x8) * scale;
    } else if (kind == KIND_Q8_HALVES) {
        const q8_halves_block *block = (const q8_halves_block *)row + g;
        for (int i = 0; i < 4; i++)
            w[i] = __builtin_convertvector(widen_signed(block->values + LANES * i), f32x8) *
                   splat(block->scales[i / 2]);
    } else {
        for (int i = 0; i < 4; i++)
            w[i] = load8((const float *)row + GROUP * g + LANES * i);
    }
}

INLINE int64_t group_bytes(int kind) {
    if (kind == KIND_Q4) return sizeof(q4_block);
    if (kind == KIND_Q8) return sizeof(q8_block);
    return kind == KIND_Q8_HALVES ? sizeof(q8_halves_block) : GROUP * sizeof(float);
}

/* `outs` outputs from `n` on, of `rows` rows. */
INLINE void tile(int kind, int outs, int rows, const float *x, const matrix *m, float *y, int64_t n,
                 int64_t accumulate) {
    const int64_t num_groups = m->num_in / GROUP, row_bytes = num_groups * group_bytes(kind);
    const char *first = (const char *)m->blocks + n * row_bytes;
    f32x8 acc[4][8];
#pragma GCC unroll 8
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 8
        for (int t = 0; t < rows; t++) acc[o][t] = splat(0.0f);
    for (int64_t g = 0; g < num_groups; g++) {
        for (int64_t b = 0; b < outs * group_bytes(kind); b += CACHE_LINE)
            __builtin_prefetch(first + g * outs * group_bytes(kind) + AHEAD_BYTES + b);
#pragma GCC unroll 8
        for (int o = 0; o < outs; o++) {
            f32x8 w[4];
            weights_of(kind, first + o * row_bytes, g, w);
#pragma GCC unroll 8
            for (int t = 0; t < rows; t++)
#pragma GCC unroll 8
                for (int i = 0; i < 4; i++)
                    acc[o][t] = fma8(w[i], load8(x + t * m->num_in + GROUP * g + LANES * i),
                                     acc[o][t]);
        }
    }
#pragma GCC unroll 8
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 8
        for (int t = 0; t < rows; t++) {
            float *to = y + t * m->num_out + n + o;
            *to = accumulate ? *to + sum8(acc[o][t]) : sum8(acc[o][t]);
        }
}

INLINE void strip(int kind, int outs, int rows, const float *x, const matrix *m, float *y,
                  int64_t accumulate) {
    int64_t n = 0;
    for (; n + outs <= m->num_out; n += outs) tile(kind, outs, rows, x, m, y, n, accumulate);
    for (; n < m->num_out; n++) tile(kind, 1, rows, x, m, y, n, accumulate);
}

INLINE void strips(int kind, const float *x, const matrix *m, float *y, int64_t num_rows,
                   int64_t accumulate) {
    while (num_rows > 0) {
        int64_t rows = num_rows < 8 ? num_rows : 8;
        switch (rows) {
        case 1: strip(kind, 4, 1, x, m, y, accumulate); break;
        case 2: strip(kind, 2, 2, x, m, y, accumulate); break;
        case 3: strip(kind, 2, 3, x, m, y, accumulate); break;
        case 4: strip(kind, 2, 4, x, m, y, accumulate); break;
        case 5: strip(kind, 1, 5, x, m, y, accumulate); break;
        case 6: strip(kind, 1, 6, x, m, y, accumulate); break;
        case 7: strip(kind, 1, 7, x, m, y, accumulate); break;
        default: strip(kind, 1, 8, x, m, y, accumulate); break;
        }
        x += rows * m->num_in;
        y += rows * m->num_out;
        num_rows -= rows;
    }
}

void hr_linear(const float *x, const matrix *w, float *y, int64_t num_rows, int64_t accumulate) {
    if (w->kind == KIND_Q4)
        strips(KIND_Q4, x, w, y, num_rows, accumulate);
    else if (w->kind == KIND_Q8)
        strips(KIND_Q8, x, w, y, num_rows, accumulate);
    else if (w->kind == KIND_Q8_HALVES)
        strips(KIND_Q8_HALVES, x, w, y, num_rows, accumulate);
    else
        strips(KIND_F32, x, w, y, num_rows, accumulate);
}
