/* Packed weights as the whole numbers that products take. */
#ifndef HEADRACE_UNPACK_H
#define HEADRACE_UNPACK_H

#include "panels.h"

#define PAIRS (GROUP / 2)

typedef int16_t hvec __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t uhvec __attribute__((vector_size(4 * WIDTH)));

/* Line `i` of what a quad of packed nibbles holds: four of int16 pairs in the order of `quantise.c`, or
 * two of bytes. The first half of the lines are of quad `quad`, the others of quad `quad` + 4. */
INLINE ivec line_of_nibbles(int rounding, uvec packed, int i) {
    if (rounding == INT8) return (ivec)(packed >> 4 * i & 0x0f0f0f0fu);
    const uhvec shifted = (uhvec)packed >> (i % 2 * 8 + i / 2 * 4);
    return (ivec)(i == 3 ? shifted : shifted & 15);
}

INLINE int lines_of_quad(int rounding) { return rounding == INT8 ? 2 : 4; }

/* Where a row's values that meet it begin, in lanes of 32 bits. */
INLINE int lane_of_line(int rounding, int quad, int i) {
    return rounding == INT8 ? i * (QUADS / 2) + quad : 2 * quad + i % 2 + i / 2 * QUADS;
}

INLINE void pairs_of_bytes(const int8_t quads[QUADS][PANEL][4], int quad, int v, ivec both[2]) {
    const hvec packed = (hvec)loadi(quads[quad][v * WIDTH]);
    both[0] = (ivec)(packed << 8 >> 8);
    both[1] = (ivec)(packed >> 8);
}

/* The quads of 8-bit weights, whatever their scales. */
INLINE const int8_t (*bytes_of(int kind, const void *group))[PANEL][4] {
    return kind == KIND_Q8 ? ((const q8_panel *)group)->quads : ((const q8_halves_panel *)group)->quads;
}

#endif
