/* Products of rounded rows with quantised weights: whole numbers within a group, exactly, then the two
 * scales and the offset in float32, group after group. */
#include <stddef.h>
#include <string.h>

#include "dot.h"
#include "linear.h"
#include "unpack.h"

#if WIDTH != 16 /* there: linear_wide.c */

#define TILE_ROWS 4 /* at most */
#define DEPTH_GROUPS 16 /* groups whose weights are unpacked at a time; 16 KiB of int16 */

/* Unpacked weights of a group: PAIRS lines of int16 pairs or QUADS lines of bytes, 16 lanes each. */
typedef int32_t line[PANEL];

INLINE void unpack(int kind, int rounding, const void *group, line *to) {
    const int num_lines = lines_of_quad(rounding);
    for (int v = 0; v < VECS; v++) {
        const int lane = v * WIDTH;
        ivec both[2];
        if (kind != KIND_Q4) {
            for (int quad = 0; quad < QUADS; quad++) {
                pairs_of_bytes(bytes_of(kind, group), quad, v, both);
                for (int i = 0; i < 2; i++) *(ivec_mem *)(to[2 * quad + i] + lane) = both[i];
            }
            continue;
        }
        for (int quad = 0; quad < QUADS / 2; quad++) {
            const uvec packed = (uvec)loadi(((const q4_panel *)group)->quads[quad][lane]);
#pragma GCC unroll 4
            for (int i = 0; i < num_lines; i++)
                *(ivec_mem *)(to[lane_of_line(rounding, quad, i)] + lane) =
                    line_of_nibbles(rounding, packed, i);
        }
    }
}

/* sums[r][v] of the rows x and the unpacked lines `from` to `to` of a group. */
INLINE void dot(int rounding, int rows, const line *lines, const lane_mem *const *x, int from, int to,
                ivec sums[TILE_ROWS][VECS]) {
#pragma GCC unroll 4
    for (int i = from; i < to; i++) {
        ivec w[VECS];
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) w[v] = loadi(lines[i] + v * WIDTH);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const ivec factor = splati(x[r][i]);
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) {
                sums[r][v] = rounding == INT8 ? add_quads(sums[r][v], w[v], factor)
                                              : add_pairs(sums[r][v], w[v], factor);
                PINNED(sums[r][v]);
            }
        }
    }
}

/* The same straight from the packed nibbles, all lines: for so few rows that unpacking would not pay. */
INLINE void dot_nibbles(int rounding, int rows, const q4_panel *group, const lane_mem *const *x,
                        ivec sums[TILE_ROWS][VECS]) {
    const int num_lines = lines_of_quad(rounding);
#pragma GCC unroll 1
    for (int quad = 0; quad < QUADS / 2; quad++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            const uvec packed = (uvec)loadi(group->quads[quad][v * WIDTH]);
#pragma GCC unroll 4
            for (int i = 0; i < num_lines; i++) {
                const ivec w = line_of_nibbles(rounding, packed, i);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    const ivec factor = splati(x[r][lane_of_line(rounding, quad, i)]);
                    sums[r][v] = rounding == INT8 ? add_quads(sums[r][v], w, factor)
                                                  : add_pairs(sums[r][v], w, factor);
                }
            }
        }
}

INLINE void dot_bytes(int kind, int rows, const void *group, const lane_mem *const *x, int from, int to,
                      ivec sums[TILE_ROWS][VECS]) {
#pragma GCC unroll 1
    for (int quad = from; quad < to; quad++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            ivec both[2];
            pairs_of_bytes(bytes_of(kind, group), quad, v, both);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++)
                    sums[r][v] = add_pairs(sums[r][v], both[i], splati(x[r][2 * quad + i]));
        }
}

/* The rows' current groups, and the whole numbers in them. */
typedef struct {
    const char *groups[TILE_ROWS];
    const lane_mem *x[TILE_ROWS];
} tile_rows;

INLINE void at_group(tile_rows *of, int rows, const char *first, int64_t stride) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        of->groups[r] = first + r * stride;
        of->x[r] = (const lane_mem *)(of->groups[r] + offsetof(int16_group, values));
    }
}

/* totals (rows, 16) += sums, scaled, and the offsets if there are any. */
INLINE void add_scaled(int rounding, int rows, const float *w_scale, const float *w_offset,
                       const tile_rows *of, ivec sums[TILE_ROWS][VECS], float *totals) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const int16_group *from = (const int16_group *)of->groups[r]; /* an int8 one begins alike */
        const fvec x_scale = splatv(from->scale), x_sum = splatv(w_offset ? from->sum : 0.0f);
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            float *to = totals + r * PANEL + v * WIDTH;
            const ivec sum = rounding == INT8 ? finish_quads(sums[r][v]) : sums[r][v];
            fvec total = loadv(to);
            if (w_offset) total = fmav(loadv(w_offset + v * WIDTH), x_sum, total);
            storev(to, fmav(to_float(sum), loadv(w_scale + v * WIDTH) * x_scale, total));
        }
    }
}

/* One group. */
INLINE void multiply_group(int kind, int rounding, int rows, const void *group, const line *lines,
                           const tile_rows *of, float *totals) {
    const int halves = kind == KIND_Q8_HALVES ? 2 : 1;
    const int num_lines = (rounding == INT8 ? QUADS : PAIRS) / halves, quads = QUADS / halves;
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        ivec sums[TILE_ROWS][VECS] = {{{0}}};
        if (lines)
            dot(rounding, rows, lines, of->x, half * num_lines, (half + 1) * num_lines, sums);
        else if (kind == KIND_Q4)
            dot_nibbles(rounding, rows, group, of->x, sums);
        else
            dot_bytes(kind, rows, group, of->x, half * quads, (half + 1) * quads, sums);
        const float *scale = kind == KIND_Q8_HALVES ? ((const q8_halves_panel *)group)->scales[half]
                                                    : (const float *)group;
        add_scaled(rounding, rows, scale, kind == KIND_Q4 ? ((const q4_panel *)group)->offset : NULL,
                   of, sums, totals);
    }
}

/* Groups `first` to `end` of one panel, `rows` rows from `row` on. */
INLINE void multiply_tile(int kind, int rounding, int rows, const product *p, int64_t panel, int64_t row,
                          int64_t first, int64_t end, const line *lines, float *totals) {
    const int64_t num_groups = p->w->num_in / GROUP;
    const int64_t group_bytes = rounded_group_bytes(rounding), stride = num_groups * group_bytes;
    const char *group = panel_group(p->w, kind, panel, first);
    const char *x = (const char *)p->q->groups + row * stride + first * group_bytes;
    tile_rows of;
    at_group(&of, rows, x, stride);
    for (int64_t left = end - first; left > 0; left--) {
        multiply_group(kind, rounding, rows, group, lines, &of, totals);
        group += SIDE_BY_SIDE * panel_group_bytes(kind);
        if (lines) lines += rounding == INT8 ? QUADS : PAIRS;
        x += group_bytes;
        at_group(&of, rows, x, stride);
        /* The totals stay in memory between groups: the registers are for the sums. */
        __asm__ volatile("" ::: "memory");
    }
}

INLINE void multiply_some(int kind, int rounding, int64_t rows, const product *p, int64_t panel,
                          int64_t row, int64_t first, int64_t end, const line *lines, float *totals) {
    switch (rows) {
    case 1: multiply_tile(kind, rounding, 1, p, panel, row, first, end, lines, totals); break;
    case 2: multiply_tile(kind, rounding, 2, p, panel, row, first, end, lines, totals); break;
    case 3: multiply_tile(kind, rounding, 3, p, panel, row, first, end, lines, totals); break;
    default: multiply_tile(kind, rounding, 4, p, panel, row, first, end, lines, totals); break;
    }
}

/* One panel, any number of rows. */
INLINE void multiply_panel(int kind, int rounding, const product *p, int64_t panel, int64_t row,
                           int64_t rows) {
    const int64_t num_groups = p->w->num_in / GROUP, num_lines = rounding == INT8 ? QUADS : PAIRS;
    float totals[ROWS_OF_ITEM * PANEL];
    line lines[DEPTH_GROUPS * PAIRS];
    memset(totals, 0, (size_t)rows * PANEL * sizeof(float));
    /* With 16 registers of eight lanes, a fourth row of int16 would push sums out of them. */
    const int64_t tile = rounding == INT8 ? TILE_ROWS : TILE_ROWS - 1;
    if (rows <= tile) {
        multiply_some(kind, rounding, rows, p, panel, row, 0, num_groups, NULL, totals);
    } else {
        for (int64_t first = 0, end; first < num_groups; first = end) {
            end = first + DEPTH_GROUPS < num_groups ? first + DEPTH_GROUPS : num_groups;
            for (int64_t g = first; g < end; g++)
                unpack(kind, rounding, panel_group(p->w, kind, panel, g), lines + (g - first) * num_lines);
            for (int64_t r = 0; r < rows; r += tile)
                multiply_some(kind, rounding, rows - r < tile ? rows - r : tile, p, panel, row + r, first, end,
                              (const line *)lines, totals + r * PANEL);
        }
    }
    put_panel(p, totals, PANEL, panel, row, rows);
}

void multiply_rounded(const product *p, int64_t panel, int64_t num_panels, int64_t row, int64_t rows) {
    const int is_int8 = p->q->rounding == INT8;
    for (const int64_t end = panel + num_panels; panel < end; panel++)
        if (p->w->kind == KIND_Q4 && is_int8)
            multiply_panel(KIND_Q4, INT8, p, panel, row, rows);
        else if (p->w->kind == KIND_Q4)
            multiply_panel(KIND_Q4, INT16, p, panel, row, rows);
        else if (p->w->kind == KIND_Q8)
            multiply_panel(KIND_Q8, INT16, p, panel, row, rows);
        else
            multiply_panel(KIND_Q8_HALVES, INT16, p, panel, row, rows);
}

#endif
