/* Matrices in panels of 16 outputs, the layout that products read.
 *
 * A panel is a run of groups of 32 columns, a group the scales of its 16 outputs and then the weights,
 * in quads: four columns of one output side by side, so that a 32-bit lane holds what one output needs.
 * Lanes are outputs: every output's sum runs over the columns in order, in every tile and at every
 * vector width. */
#ifndef HEADRACE_PANELS_H
#define HEADRACE_PANELS_H

#include "kernels.h"

#define PANEL 16
#define QUADS (GROUP / 4)

typedef struct {
    float scale[PANEL], offset[PANEL];
    uint8_t quads[QUADS / 2][PANEL][4]; /* low halves: quads 0..3, high halves: quads 4..7 */
} q4_panel;

typedef struct {
    float scale[PANEL];
    int8_t quads[QUADS][PANEL][4];
} q8_panel;

typedef struct {
    float scales[2][PANEL]; /* of quads 0..3 and 4..7 */
    int8_t quads[QUADS][PANEL][4];
} q8_halves_panel;

typedef struct {
    float values[GROUP][PANEL];
} f32_panel;

INLINE int64_t panel_group_bytes(int64_t kind) {
    if (kind == KIND_Q4) return sizeof(q4_panel);
    if (kind == KIND_Q8) return sizeof(q8_panel);
    return kind == KIND_Q8_HALVES ? sizeof(q8_halves_panel) : sizeof(f32_panel);
}

INLINE int64_t num_panels(const matrix *m) { return (m->num_out + PANEL - 1) / PANEL; }

/* Vectors as wide as the machine's. */
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define VECS (PANEL / WIDTH)

/* So many panels lie side by side, group by group: those that one tile reads are one stream. */
#define SIDE_BY_SIDE (WIDTH == 16 ? 4 : 1)

INLINE int64_t matrix_bytes(const matrix *m) {
    const int64_t sets = (num_panels(m) + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
    return sets * SIDE_BY_SIDE * (m->num_in / GROUP) * panel_group_bytes(m->kind);
}

/* Group `g` of panel `p`; the panel's next one lies SIDE_BY_SIDE groups on. */
INLINE const void *panel_group(const matrix *m, int64_t kind, int64_t p, int64_t g) {
    const int64_t place = (p / SIDE_BY_SIDE * (m->num_in / GROUP) + g) * SIDE_BY_SIDE + p % SIDE_BY_SIDE;
    return (const char *)m->blocks + place * panel_group_bytes(kind);
}

typedef float fvec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef float fvec_mem __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec_mem __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));
typedef int32_t lane_mem __attribute__((aligned(1), may_alias));

INLINE fvec loadv(const float *from) { return *(const fvec_mem *)from; }
INLINE void storev(float *to, fvec value) { *(fvec_mem *)to = value; }
INLINE ivec loadi(const void *from) { return *(const ivec_mem *)from; }
INLINE fvec splatv(float value) { return value - (fvec){0}; }
INLINE ivec splati(int32_t value) { return value - (ivec){0}; }
INLINE fvec fmav(fvec a, fvec b, fvec c) {
#if defined(__AVX512F__)
    return (fvec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (fvec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE fvec to_float(ivec x) { return __builtin_convertvector(x, fvec); }

/* exp8 of as many lanes; the same bits. */
INLINE fvec expv(fvec x) {
#if WIDTH == 16
    x = (fvec)_mm512_min_ps((__m512)splatv(88.0f), _mm512_max_ps((__m512)splatv(-87.0f), (__m512)x));
    const fvec turns = x * splatv(1.44269504088896341f);
    const fvec whole = (turns + splatv(12582912.0f)) - splatv(12582912.0f);
    fvec r = fmav(whole, splatv(-0.693359375f), x);
    r = fmav(whole, splatv(2.12194440e-4f), r);
    fvec p = splatv(1.9875691500e-4f);
    p = fmav(p, r, splatv(1.3981999507e-3f));
    p = fmav(p, r, splatv(8.3334519073e-3f));
    p = fmav(p, r, splatv(4.1665795894e-2f));
    p = fmav(p, r, splatv(1.6666665459e-1f));
    p = fmav(p, r, splatv(5.0000001201e-1f));
    p = fmav(p * r, r, r) + splatv(1.0f);
    return p * (fvec)((__builtin_convertvector(whole, ivec) + 127) << 23);
#else
    return exp8(x);
#endif
}

#endif
