/* Products of rounded rows with quantised weights at 512 bits: whole numbers within a group, exactly, then
 * the two scales and the offset in float32, group after group.
 *
 * With 32 registers a tile is twelve rows times two panels. Weights are unpacked where they are used, or,
 * for many rows, once into a buffer that stays in the first cache. Few rows take four panels at once to
 * keep as many sums going. What a tile has too many of its panels computes the
 * last one again, of its rows whatever lies behind the last (SPARE_ROWS); neither is kept. */
#include <stddef.h>
#include <string.h>

#include "dot.h"
#include "linear.h"
#include "unpack.h"

#if WIDTH == 16

#define TILE_ROWS 12
#define TILE_PANELS 4
#define MAX_SUMS 24
#define MANY_ROWS 24       /* from so many on weights are unpacked before */
#define UNPACKED_GROUPS 12 /* at a time; 24 KiB of two panels */
#define AHEAD 8 /* groups that are asked for before they are read */
/* Totals stay in memory until they are needed: the registers are for the sums. */
#define IN_ORDER __asm__ volatile("" ::: "memory")

/* Keeps the compiler from computing addresses row by row, for which it has too few registers. */
#define OPAQUE(x) __asm__("" : "+r"(x))

/* Where a tile reads: the current group of each panel and of the rows. Rows lie `stride` bytes apart; two
 * bases and three multiples address all of them. */
typedef struct {
    const char *w[TILE_PANELS];
    const char *low, *high; /* rows 0 and 6 */
    int64_t stride, stride3, stride5;
} tile_place;

INLINE const char *row_at(const tile_place *at, int r) {
    const char *base = r < 6 ? at->low : at->high;
    return r % 6 == 3 ? base + at->stride3 : r % 6 == 5 ? base + at->stride5 : base + r % 6 * at->stride;
}

/* From the rows' current groups to what they have at `lane`. */
INLINE tile_place at_lane(const tile_place *at, int lane) {
    tile_place there = *at;
    there.low += offsetof(int16_group, values) + 4 * lane;
    there.high += offsetof(int16_group, values) + 4 * lane;
    return there;
}

/* sums += lines (one of each panel) times what the rows have `lane` lanes from `x` on. */
INLINE void add_line(int rounding, int rows, int panels, const tile_place *x, int lane, const ivec *line,
                     ivec *sums) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const ivec factor = splati(*(const lane_mem *)(row_at(x, r) + 4 * lane));
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            ivec *sum = sums + r * panels + p;
            *sum = rounding == INT8 ? add_quads(*sum, line[p], factor) : add_pairs(*sum, line[p], factor);
            PINNED(*sum);
        }
    }
}

INLINE void add_nibbles(int rounding, int rows, int panels, const tile_place *at, ivec *sums) {
    const int num_lines = lines_of_quad(rounding);
#pragma GCC unroll 1
    for (int quad = 0; quad < QUADS / 2; quad++) {
        const tile_place x = at_lane(at, lane_of_line(rounding, quad, 0));
        uvec packed[TILE_PANELS];
        ivec line[TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
            packed[p] = (uvec)loadi(((const q4_panel *)at->w[p])->quads[quad]);
#pragma GCC unroll 4
        for (int i = 0; i < num_lines; i++) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) line[p] = line_of_nibbles(rounding, packed[p], i);
            add_line(rounding, rows, panels, &x, lane_of_line(rounding, 0, i), line, sums);
        }
    }
}

INLINE void add_bytes(int kind, int rows, int panels, const tile_place *at, int from, int to, ivec *sums) {
#pragma GCC unroll 1
    for (int quad = from; quad < to; quad++) {
        const tile_place x = at_lane(at, 2 * quad);
        ivec both[TILE_PANELS][2], line[TILE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) pairs_of_bytes(bytes_of(kind, at->w[p]), quad, 0, both[p]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) line[p] = both[p][i];
            add_line(INT16, rows, panels, &x, i, line, sums);
        }
    }
}

/* The lines of a group, those of a tile's panels side by side. */
INLINE void unpack_group(int kind, int rounding, int panels, const void *group, ivec *to) {
    const int num_lines = lines_of_quad(rounding);
    if (kind == KIND_Q4) {
        for (int quad = 0; quad < QUADS / 2; quad++) {
            const uvec packed = (uvec)loadi(((const q4_panel *)group)->quads[quad]);
#pragma GCC unroll 4
            for (int i = 0; i < num_lines; i++)
                to[lane_of_line(rounding, quad, i) * panels] = line_of_nibbles(rounding, packed, i);
        }
        return;
    }
    for (int quad = 0; quad < QUADS; quad++) {
        ivec both[2];
        pairs_of_bytes(bytes_of(kind, group), quad, 0, both);
        for (int i = 0; i < 2; i++) to[(2 * quad + i) * panels] = both[i];
    }
}

INLINE void add_unpacked(int rounding, int rows, int panels, const tile_place *at, const ivec *lines, int from,
                         int to, ivec *sums) {
#pragma GCC unroll 1
    for (int lane = from; lane < to; lane += 2) {
        tile_place x = at_lane(at, lane);
        OPAQUE(x.low);
        OPAQUE(x.high);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            ivec line[TILE_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) line[p] = lines[(lane + i) * panels + p];
            add_line(rounding, rows, panels, &x, i, line, sums);
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

INLINE int lines_of_group(int rounding) { return rounding == INT8 ? QUADS : PAIRS; }

/* One group; sums start at zero. lines: unpacked, or NULL. */
INLINE void multiply_group(int kind, int rounding, int rows, int panels, const tile_place *at,
                           const ivec *lines, float *totals) {
    const int halves = kind == KIND_Q8_HALVES ? 2 : 1, quads = QUADS / halves;
    const int num_lines = lines_of_group(rounding) / halves;
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        ivec sums[MAX_SUMS] = {{0}};
        if (lines)
            add_unpacked(rounding, rows, panels, at, lines, half * num_lines, (half + 1) * num_lines, sums);
        else if (kind == KIND_Q4)
            add_nibbles(rounding, rows, panels, at, sums);
        else
            add_bytes(kind, rows, panels, at, half * quads, (half + 1) * quads, sums);
        IN_ORDER;
        add_scaled(kind == KIND_Q4, rounding, rows, panels, at, half * PANEL, sums, totals);
    }
}

/* Where a tile is at group `group`. */
INLINE tile_place tile_at(int kind, int rounding, int panels, const product *p, int64_t panel, int64_t row,
                          int64_t group) {
    const int64_t num_groups = p->w->num_in / GROUP, group_bytes = rounded_group_bytes(rounding);
    tile_place at = {.stride = num_groups * group_bytes};
    at.low = (const char *)p->q->groups + (row * num_groups + group) * group_bytes;
    at.high = at.low + 6 * at.stride;
    at.stride3 = 3 * at.stride;
    at.stride5 = 5 * at.stride;
    OPAQUE(at.stride3);
    OPAQUE(at.stride5);
#pragma GCC unroll 4
    for (int i = 0; i < panels; i++) at.w[i] = panel_group(p->w, kind, panel + i, group);
    return at;
}

/* Ask for what comes next: weights that are not unpacked, or the rows. */
INLINE void fetch_ahead(int kind, int rounding, int rows, int panels, const tile_place *at, int has_lines) {
    if (has_lines) {
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) __builtin_prefetch(row_at(at, r) + 2 * rounded_group_bytes(rounding));
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < panels; i++)
#pragma GCC unroll 8
        for (int line = 0; line < panel_group_bytes(kind); line += 64)
            __builtin_prefetch(at->w[i] + AHEAD * SIDE_BY_SIDE * panel_group_bytes(kind) + line);
}

/* totals (rows, panels, 16) += the products of `num` groups from where the tile is. */
INLINE void add_groups(int kind, int rounding, int rows, int panels, tile_place at, int64_t num,
                       const ivec *lines, float *totals) {
    for (; num > 0; num--) {
        fetch_ahead(kind, rounding, rows, panels, &at, lines != NULL);
        multiply_group(kind, rounding, rows, panels, &at, lines, totals);
        if (lines) lines += lines_of_group(rounding) * panels;
        at.low += rounded_group_bytes(rounding);
        at.high += rounded_group_bytes(rounding);
#pragma GCC unroll 4
        for (int i = 0; i < panels; i++) at.w[i] += SIDE_BY_SIDE * panel_group_bytes(kind);
        IN_ORDER;
    }
}

/* `rows` rows from `row` on times `panels` panels from `panel` on, of which the first num_rows and num
 * are kept. */
INLINE void multiply_tile(int kind, int rounding, int rows, int panels, const product *p, int64_t panel,
                          int64_t num, int64_t row, int64_t num_rows) {
    float totals[MAX_SUMS * PANEL] __attribute__((aligned(64))) = {0};
    const tile_place at = tile_at(kind, rounding, panels, p, panel, row, 0);
    add_groups(kind, rounding, rows, panels, at, p->w->num_in / GROUP, NULL, totals);
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

INLINE void multiply_more(int kind, int rounding, const product *p, int64_t panel, int64_t num, int64_t row,
                          int64_t rows) {
    for (; rows > 8; row += TILE_ROWS, rows -= TILE_ROWS)
        multiply_tile(kind, rounding, TILE_ROWS, 2, p, panel, num, row, rows < TILE_ROWS ? rows : TILE_ROWS);
    if (rows > 4)
        multiply_tile(kind, rounding, 8, 2, p, panel, num, row, rows);
    else if (rows > 0)
        multiply_tile(kind, rounding, 4, 2, p, panel, num, row, rows);
}

/* Two panels, many rows: what is unpacked at a time meets all of them. */
INLINE void multiply_many(int kind, int rounding, const product *p, int64_t panel, int64_t num, int64_t row,
                          int64_t rows) {
    const int64_t num_groups = p->w->num_in / GROUP;
    float totals[ROWS_OF_ITEM * 2 * PANEL] __attribute__((aligned(64)));
    ivec lines[UNPACKED_GROUPS * PAIRS * 2];
    memset(totals, 0, (size_t)(rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * 2 * PANEL * sizeof(float));
    for (int64_t first = 0, size; first < num_groups; first += size) {
        size = num_groups - first < UNPACKED_GROUPS ? num_groups - first : UNPACKED_GROUPS;
        for (int64_t g = 0; g < size; g++)
            for (int i = 0; i < 2; i++)
                unpack_group(kind, rounding, 2, panel_group(p->w, kind, panel + i, first + g),
                             lines + g * lines_of_group(rounding) * 2 + i);
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            const tile_place at = tile_at(kind, rounding, 2, p, panel, row + r, first);
            float *to = totals + r * 2 * PANEL;
            if (rows - r > 4)
                add_groups(kind, rounding, TILE_ROWS, 2, at, size, lines, to);
            else
                add_groups(kind, rounding, 4, 2, at, size, lines, to);
        }
    }
    for (int64_t i = 0; i < num; i++) put_panel(p, totals + i * PANEL, 2 * PANEL, panel + i, row, rows);
}

INLINE void multiply_some(int kind, int rounding, const product *p, int64_t panel, int64_t num, int64_t row,
                          int64_t rows) {
    if (rows >= MANY_ROWS)
        multiply_many(kind, rounding, p, panel, num, row, rows);
    else if (p->num_rows > FEW_ROWS)
        multiply_more(kind, rounding, p, panel, num, row, rows);
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
