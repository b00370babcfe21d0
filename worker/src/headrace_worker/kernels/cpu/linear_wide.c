/* Products of rounded rows with quantised weights at 512 bits: whole numbers within a group, exactly, then
 * the two scales and the offset in float32, group after group.
 *
 * With 32 registers a tile is twelve rows times two panels, so that weights are unpacked where they are
 * used: that is little beside what twelve rows do with them, and no buffer is filled. Few rows take
 * four panels at once to keep as many sums going. What a tile has too many of its panels computes the
 * last one again, of its rows whatever lies behind the last (SPARE_ROWS); neither is kept. */
#include <stddef.h>

#include "dot.h"
#include "linear.h"
#include "unpack.h"

#if WIDTH == 16

#define TILE_ROWS 12
#define TILE_PANELS 4
#define MAX_SUMS 24
#define AHEAD 8 /* groups that are asked for before they are read */
/* Totals stay in memory until they are needed: the registers are for the sums. */
#define IN_ORDER __asm__ volatile("" ::: "memory")

/* Where a tile reads: the current group of each panel and of the first row. Rows lie `stride` bytes apart;
 * two bases and two multiples address all of them. */
typedef struct {
    const char *w[TILE_PANELS];
    const char *low, *high; /* rows 0 and 6 */
    int64_t stride;
} tile_place;

INLINE const char *row_at(const tile_place *at, int r) {
    const char *base = r < 6 ? at->low : at->high;
    return base + (r % 6) * at->stride;
}

INLINE ivec lane_of_row(const tile_place *at, int r, int lane) {
    return splati(*(const lane_mem *)(row_at(at, r) + offsetof(int16_group, values) + 4 * lane));
}

/* sums += lines (one of each panel) times what the rows have at `lane`. */
INLINE void add_line(int rounding, int rows, int panels, const tile_place *at, int lane, const ivec *line,
                     ivec *sums) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const ivec x = lane_of_row(at, r, lane);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            ivec *sum = sums + r * panels + p;
            *sum = rounding == INT8 ? add_quads(*sum, line[p], x) : add_pairs(*sum, line[p], x);
            PINNED(*sum);
        }
    }
}

INLINE void add_nibbles(int rounding, int rows, int panels, const tile_place *at, ivec *sums) {
    const int num_lines = lines_of_quad(rounding);
#pragma GCC unroll 1
    for (int quad = 0; quad < QUADS / 2; quad++) {
        uvec packed[TILE_PANELS];
        ivec line[TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            packed[p] = (uvec)loadi(((const q4_panel *)at->w[p])->quads[quad]);
#pragma GCC unroll 4
        for (int i = 0; i < num_lines; i++) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) line[p] = line_of_nibbles(rounding, packed[p], i);
            add_line(rounding, rows, panels, at, lane_of_line(rounding, quad, i), line, sums);
        }
    }
}

INLINE void add_bytes(int kind, int rows, int panels, const tile_place *at, int from, int to, ivec *sums) {
#pragma GCC unroll 1
    for (int quad = from; quad < to; quad++) {
        ivec both[TILE_PANELS][2], line[TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) pairs_of_bytes(bytes_of(kind, at->w[p]), quad, 0, both[p]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) line[p] = both[p][i];
            add_line(INT16, rows, panels, at, 2 * quad + i, line, sums);
        }
    }
}

/* totals (rows, panels, 16) += sums, scaled, and the offsets if there are any. `scales` floats from a
 * group's beginning lie its panel's scales. */
INLINE void add_scaled(int has_offset, int rounding, int rows, int panels, const tile_place *at, int scales,
                       ivec *sums, float *totals) {
    fvec scale[TILE_PANELS], offset[TILE_PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        scale[p] = loadv((const float *)at->w[p] + scales);
        if (has_offset) offset[p] = loadv(((const q4_panel *)at->w[p])->offset);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const int16_group *from = (const int16_group *)row_at(at, r); /* an int8 one begins alike */
        const fvec x_scale = splatv(from->scale), x_sum = splatv(from->sum);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            float *to = totals + (r * panels + p) * PANEL;
            const ivec sum = sums[r * panels + p];
            fvec total = loadv(to);
            if (has_offset) total = fmav(offset[p], x_sum, total);
            total = fmav(to_float(rounding == INT8 ? finish_quads(sum) : sum), scale[p] * x_scale, total);
            storev(to, total);
            IN_ORDER;
        }
    }
}

/* One group; sums start at zero. */
INLINE void multiply_group(int kind, int rounding, int rows, int panels, const tile_place *at,
                           float *totals) {
    const int halves = kind == KIND_Q8_HALVES ? 2 : 1, quads = QUADS / halves;
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        ivec sums[MAX_SUMS] = {{0}};
        if (kind == KIND_Q4)
            add_nibbles(rounding, rows, panels, at, sums);
        else
            add_bytes(kind, rows, panels, at, half * quads, (half + 1) * quads, sums);
        IN_ORDER;
        add_scaled(kind == KIND_Q4, rounding, rows, panels, at, half * PANEL, sums, totals);
    }
}

/* `rows` rows from `row` on times `panels` panels from `panel` on, of which the first num_rows and num
 * are kept. */
INLINE void multiply_tile(int kind, int rounding, int rows, int panels, const product *p, int64_t panel,
                          int64_t num, int64_t row, int64_t num_rows) {
    const int64_t num_groups = p->w->num_in / GROUP, group_bytes = rounded_group_bytes(rounding);
    float totals[MAX_SUMS * PANEL] __attribute__((aligned(64))) = {0};
    tile_place at = {.stride = num_groups * group_bytes};
    at.low = (const char *)p->q->groups + row * num_groups * group_bytes;
    at.high = at.low + 6 * at.stride;
#pragma GCC unroll 4
    for (int i = 0; i < panels; i++)
        at.w[i] = panel_group(p->w, kind, panel + i, 0);
    for (int64_t left = num_groups; left > 0; left--) {
#pragma GCC unroll 4
        for (int i = 0; i < panels; i++)
#pragma GCC unroll 8
            for (int line = 0; line < panel_group_bytes(kind); line += 64)
                __builtin_prefetch(at.w[i] + AHEAD * SIDE_BY_SIDE * panel_group_bytes(kind) + line);
        multiply_group(kind, rounding, rows, panels, &at, totals);
        at.low += group_bytes;
        at.high += group_bytes;
#pragma GCC unroll 4
        for (int i = 0; i < panels; i++) at.w[i] += SIDE_BY_SIDE * panel_group_bytes(kind);
        IN_ORDER;
    }
    for (int64_t i = 0; i < num; i++)
        put_panel(p, totals + i * PANEL, panels * PANEL, panel + i, row, num_rows);
}

INLINE void multiply_few(int kind, int rounding, const product *p, int64_t panel, int64_t num, int64_t row,
                         int64_t rows) {
    if (rows > 4)
        multiply_tile(kind, rounding, 6, 4, p, panel, num, row, rows);
    else if (rows > 2)
        multiply_tile(kind, rounding, 4, 4, p, panel, num, row, rows);
    else if (rows > 1)
        multiply_tile(kind, rounding, 2, 4, p, panel, num, row, rows);
    else
        multiply_tile(kind, rounding, 1, 4, p, panel, num, row, rows);
}

INLINE void multiply_many(int kind, int rounding, const product *p, int64_t panel, int64_t num, int64_t row,
                          int64_t rows) {
    for (; rows > 8; row += TILE_ROWS, rows -= TILE_ROWS)
        multiply_tile(kind, rounding, TILE_ROWS, 2, p, panel, num, row, rows < TILE_ROWS ? rows : TILE_ROWS);
    if (rows > 4)
        multiply_tile(kind, rounding, 8, 2, p, panel, num, row, rows);
    else if (rows > 0)
        multiply_tile(kind, rounding, 4, 2, p, panel, num, row, rows);
}

INLINE void multiply_some(int kind, int rounding, const product *p, int64_t panel, int64_t num, int64_t row,
                          int64_t rows) {
    if (p->num_rows > FEW_ROWS)
        multiply_many(kind, rounding, p, panel, num, row, rows);
    else
        multiply_few(kind, rounding, p, panel, num, row, rows);
}

void multiply_rounded(const product *p, int64_t panel, int64_t num_panels, int64_t row, int64_t rows) {
    if (p->w->kind == KIND_Q4 && p->q->rounding == INT8)
        multiply_some(KIND_Q4, INT8, p, panel, num_panels, row, rows);
    else if (p->w->kind == KIND_Q4)
        multiply_some(KIND_Q4, INT16, p, panel, num_panels, row, rows);
    else if (p->w->kind == KIND_Q8)
        multiply_some(KIND_Q8, INT16, p, panel, num_panels, row, rows);
    else
        multiply_some(KIND_Q8_HALVES, INT16, p, panel, num_panels, row, rows);
}

#endif
