/* Products in float32: weights become float32 in a small buffer, which all rows then share. */
#include "linear.h"

#include <string.h>

#include "tile.h"

#define DEPTH 256 /* lines of 16 weights in the buffer; 16 KiB */

INLINE void dequantise_q4(const q4_panel *from, float *to) {
    fvec scale[VECS], offset[VECS];
    for (int v = 0; v < VECS; v++) {
        scale[v] = loadv(from->scale + v * WIDTH);
        offset[v] = loadv(from->offset + v * WIDTH);
    }
#pragma GCC unroll 1
    for (int quad = 0; quad < QUADS / 2; quad++, to += 4 * PANEL)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            uvec packed = (uvec)loadi(from->quads[quad][v * WIDTH]);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++, packed >>= 4) {
                const int k = i % 2 * (GROUP / 2) + i / 2;
                storev(to + k * PANEL + v * WIDTH,
                       fmav(to_float((ivec)(packed & 15)), scale[v], offset[v]));
            }
        }
}

INLINE void dequantise_q8(const int8_t quads[QUADS][PANEL][4], const float *low, const float *high,
                          float *to) {
    for (int v = 0; v < VECS; v++)
        for (int quad = 0; quad < QUADS; quad++) {
            const fvec scale = loadv((quad < QUADS / 2 ? low : high) + v * WIDTH);
            const ivec packed = loadi(quads[quad][v * WIDTH]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                storev(to + (4 * quad + i) * PANEL + v * WIDTH,
                       to_float(packed << (24 - 8 * i) >> 24) * scale);
        }
}

static void dequantise(const matrix *m, int64_t panel, int64_t group, int64_t num_groups, float *to) {
    for (int64_t g = group; g < group + num_groups; g++, to += GROUP * PANEL) {
        const void *from = panel_group(m, m->kind, panel, g);
        if (m->kind == KIND_Q4) {
            dequantise_q4(from, to);
        } else if (m->kind == KIND_Q8) {
            const q8_panel *q8 = from;
            dequantise_q8(q8->quads, q8->scale, q8->scale, to);
        } else if (m->kind == KIND_Q8_HALVES) {
            const q8_halves_panel *q8 = from;
            dequantise_q8(q8->quads, q8->scales[0], q8->scales[1], to);
        } else {
            memcpy(to, from, sizeof(f32_panel));
        }
    }
}

/* `panels` panels at once, side by side in the buffer. */
INLINE void multiply_panels(const product *p, int panels, int64_t panel, int64_t row, int64_t rows) {
    float weights[DEPTH * PANEL], sums[ROWS_OF_ITEM * TILE_PANELS * PANEL];
    const int64_t num_in = p->w->num_in, depth = DEPTH / panels, stride = panels * PANEL;
    memset(sums, 0, (size_t)(rows * stride) * sizeof(float));
    for (int64_t k = 0, size; k < num_in; k += size) {
        size = num_in - k < depth ? num_in - k : depth;
        tile_lines lines = {.at = NULL};
        for (int i = 0; i < panels; i++) {
            dequantise(p->w, panel + i, k / GROUP, size / GROUP, weights + i * depth * PANEL);
            lines.panels[i] = weights + i * depth * PANEL;
        }
        const float *x = p->x + row * num_in + k;
        for (int64_t r = 0; r < rows; r += MAX_TILE_ROWS)
            multiply_rows(rows - r, panels, x + r * num_in, num_in, &lines, size, sums + r * stride, stride);
    }
    for (int i = 0; i < panels; i++) put_panel(p, sums + i * PANEL, stride, panel + i, row, rows);
}

void multiply_exact(const product *p, int64_t panel, int64_t num, int64_t row, int64_t rows) {
    if (num == 4) {
        multiply_panels(p, 4, panel, row, rows);
    } else if (num == 2) {
        multiply_panels(p, 2, panel, row, rows);
    } else {
        for (int64_t i = 0; i < num; i++) multiply_panels(p, 1, panel + i, row, rows);
    }
}

/* Panels of one item: enough to be worth handing out, and what the tiles like. */
static int64_t panels_of_item(const product *p) {
    if (p->q && WIDTH == 16) return p->num_rows > FEW_ROWS ? 2 : 4;
    if (p->q) return p->num_rows < 8 ? 4 : 1;
    if (WIDTH == 16) return TILE_PANELS;
    return p->num_rows == 1 ? 4 : p->num_rows == 2 ? 2 : 1;
}

static void run_item(void *job, int64_t item, int64_t thread_idx) {
    (void)thread_idx;
    const product *p = job;
    const int64_t num_row_items = (p->num_rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM;
    const int64_t step = panels_of_item(p), panel = item / num_row_items * step;
    const int64_t row = item % num_row_items * ROWS_OF_ITEM, left = num_panels(p->w) - panel;
    const int64_t rows = p->num_rows - row < ROWS_OF_ITEM ? p->num_rows - row : ROWS_OF_ITEM;
    const int64_t num = left < step ? left : step;
    if (p->q)
        multiply_rounded(p, panel, num, row, rows);
    else
        multiply_exact(p, panel, num, row, rows);
}

void run_product(pool *threads, const product *p) {
    const int64_t step = panels_of_item(p), num_panel_items = (num_panels(p->w) + step - 1) / step;
    run_items(threads, run_item, (void *)p,
              num_panel_items * ((p->num_rows + ROWS_OF_ITEM - 1) / ROWS_OF_ITEM));
}
