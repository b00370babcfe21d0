/* From rows of blocks to panels; outputs beyond the last are zeros. */
#include <string.h>

#include "panels.h"

/* The 4-bit weight `k` of a block. */
static int nibble(const q4_block *block, int k) {
    return k < GROUP / 2 ? block->nibbles[k] & 15 : block->nibbles[k - GROUP / 2] >> 4;
}

static void pack_q4(const q4_block *from, q4_panel *to, int o) {
    to->scale[o] = from->scale;
    to->offset[o] = from->offset;
    for (int k = 0; k < GROUP / 2; k++)
        to->quads[k / 4][o][k % 4] = (uint8_t)(nibble(from, k) | nibble(from, k + GROUP / 2) << 4);
}

/* One output `o` of one group. */
static void pack_group(int64_t kind, const char *row, int64_t g, void *to, int o) {
    if (kind == KIND_Q4) {
        pack_q4((const q4_block *)row + g, to, o);
    } else if (kind == KIND_Q8) {
        const q8_block *from = (const q8_block *)row + g;
        q8_panel *panel = to;
        panel->scale[o] = from->scale;
        for (int k = 0; k < GROUP; k++) panel->quads[k / 4][o][k % 4] = from->values[k];
    } else if (kind == KIND_Q8_HALVES) {
        const q8_halves_block *from = (const q8_halves_block *)row + g;
        q8_halves_panel *panel = to;
        for (int half = 0; half < 2; half++) panel->scales[half][o] = from->scales[half];
        for (int k = 0; k < GROUP; k++) panel->quads[k / 4][o][k % 4] = from->values[k];
    } else {
        for (int k = 0; k < GROUP; k++)
            ((f32_panel *)to)->values[k][o] = ((const float *)row)[g * GROUP + k];
    }
}

static int64_t block_bytes(int64_t kind) {
    if (kind == KIND_Q4) return sizeof(q4_block);
    if (kind == KIND_Q8) return sizeof(q8_block);
    return kind == KIND_Q8_HALVES ? sizeof(q8_halves_block) : GROUP * sizeof(float);
}

int64_t hr_panel_bytes(const matrix *rows) {
    return matrix_bytes(rows);
}

/* panels: room for hr_panel_bytes. */
void hr_pack(const matrix *rows, void *panels) {
    const int64_t num_groups = rows->num_in / GROUP, row_bytes = num_groups * block_bytes(rows->kind);
    const matrix to = {panels, rows->kind, rows->num_out, rows->num_in};
    memset(panels, 0, matrix_bytes(rows));
    for (int64_t n = 0; n < rows->num_out; n++)
        for (int64_t g = 0; g < num_groups; g++)
            pack_group(rows->kind, (const char *)rows->blocks + n * row_bytes, g,
                       (void *)panel_group(&to, rows->kind, n / PANEL, g), n % PANEL);
}
