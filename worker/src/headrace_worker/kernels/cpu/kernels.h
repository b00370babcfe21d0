/* Types and shapes that all operations share. Plain C with GCC vector extensions (GCC, Clang): eight
 * float lanes, which become AVX, half an AVX-512 register or two NEON registers.
 *
 * Every sum of a row runs in one fixed order, whatever the number of rows: a row's result depends
 * neither on its batch mates nor on how its tokens were cut into steps, bit for bit. */
#ifndef HEADRACE_KERNELS_H
#define HEADRACE_KERNELS_H

#include <stdint.h>
#if defined(__AVX2__) || defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LANES 8
#define GROUP 32 /* weights that share a scale; every matrix has a multiple of it as columns */
#define INLINE static inline __attribute__((always_inline))

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
/* The same in memory, at any address. */
typedef float f32x8_mem __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint8_t u8x8_mem __attribute__((vector_size(8), aligned(1), may_alias));
typedef int8_t i8x8_mem __attribute__((vector_size(8), aligned(1), may_alias));

/* Kinds of blocks; see headrace_worker.kernels.blocks. */
enum { KIND_F32 = 0, KIND_Q4 = 1, KIND_Q8 = 2, KIND_Q8_HALVES = 3 };

typedef struct {
    float scale, offset;
    uint8_t nibbles[GROUP / 2]; /* low halves: weights 0..15, high halves: 16..31 */
} q4_block;

typedef struct {
    float scale;
    int8_t values[GROUP];
} q8_block;

typedef struct {
    float scales[2]; /* of weights 0..15 and 16..31 */
    int8_t values[GROUP];
} q8_halves_block;

/* A matrix (num_out, num_in), row after row, or in panels (panels.h). */
typedef struct {
    const void *blocks;
    int64_t kind, num_out, num_in;
} matrix;

/* How the rows that a matrix is multiplied with are rounded before; see quantise.c. */
enum { EXACT = 0, INT16 = 1, INT8 = 2 };

/* One layer's KV pool and who sees what. All tables follow one another in `block_ids`. */
typedef struct {
    float *keys;                /* (N, S / 16, K, D, 16) */
    float *values;              /* (N, S, K, D) */
    const int64_t *slots;       /* (T,) where each token's key and value go */
    const int64_t *block_ids;
    const int64_t *table_start; /* (T,) first entry of a token's block table */
    const int64_t *context;     /* (T,) positions a token sees, from 0 */
    int64_t block_size;         /* S, a multiple of 16 */
} kv_view;

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim;
} head_shape;

/* How products of queries and keys become weights: times `scale`; with a cap c, s becomes
 * c tanh(s / c); a token sees the last `window` positions of its context (0 = all). */
typedef struct {
    float scale, soft_cap;
    int64_t window;
} scoring;

static inline f32x8 load8(const float *from) { return *(const f32x8_mem *)from; }
static inline void store8(float *to, f32x8 value) { *(f32x8_mem *)to = value; }
static inline f32x8 splat(float value) {
    return (f32x8){value, value, value, value, value, value, value, value};
}
static inline float sum8(f32x8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* a * b + c. Contraction is off in the compiler's flags: it would use FMA in one tile and not in
 * another, and the sums would differ in their last bit. */
static inline f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#ifdef __FMA__
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
/* Eight bytes as int32. GCC takes the portable form apart byte by byte, hence the other one. */
static inline i32x8 widen_unsigned(const uint8_t *from) {
#ifdef __AVX2__
    return (i32x8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i_u *)from));
#else
    return __builtin_convertvector(*(const u8x8_mem *)from, i32x8);
#endif
}
static inline i32x8 widen_signed(const int8_t *from) {
#ifdef __AVX2__
    return (i32x8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i_u *)from));
#else
    return __builtin_convertvector(*(const i8x8_mem *)from, i32x8);
#endif
}
/* Lanes of `yes` where the mask is set, else of `no`. */
static inline f32x8 choose8(i32x8 mask, f32x8 yes, f32x8 no) {
#ifdef __AVX2__
    return (f32x8)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (f32x8)((mask & (i32x8)yes) | (~mask & (i32x8)no));
#endif
}
/* The lesser and the greater of lanes; NaN if x is. */
static inline f32x8 at_most8(f32x8 x, f32x8 high) {
#ifdef __AVX2__
    return (f32x8)_mm256_min_ps((__m256)high, (__m256)x);
#else
    return choose8(x > high, high, x);
#endif
}
static inline f32x8 at_least8(f32x8 x, f32x8 low) {
#ifdef __AVX2__
    return (f32x8)_mm256_max_ps((__m256)low, (__m256)x);
#else
    return choose8(x < low, low, x);
#endif
}

/* exp of lanes in [-87, 88], clamped to that; within 2 ulp (Cephes' expf polynomial). */
static inline f32x8 exp8(f32x8 x) {
    x = at_most8(at_least8(x, splat(-87.0f)), splat(88.0f));
    f32x8 turns = x * splat(1.44269504088896341f);
    /* Adding and taking away 1.5 * 2^23 rounds to the nearest whole number. */
    f32x8 whole = (turns + splat(12582912.0f)) - splat(12582912.0f);
    f32x8 r = fma8(whole, splat(-0.693359375f), x);
    r = fma8(whole, splat(2.12194440e-4f), r);
    f32x8 p = splat(1.9875691500e-4f);
    p = fma8(p, r, splat(1.3981999507e-3f));
    p = fma8(p, r, splat(8.3334519073e-3f));
    p = fma8(p, r, splat(4.1665795894e-2f));
    p = fma8(p, r, splat(1.6666665459e-1f));
    p = fma8(p, r, splat(5.0000001201e-1f));
    p = fma8(p * r, r, r) + splat(1.0f);
    i32x8 bits = (__builtin_convertvector(whole, i32x8) + 127) << 23;
    return p * (f32x8)bits;
}

/* tanh by exp8; within 4 ulp of 1. */
static inline f32x8 tanh8(f32x8 x) {
    f32x8 e = exp8(x * splat(2.0f));
    return splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
}

void hr_rms_norm(const float *x, const float *weight, float *y, int64_t num_rows, int64_t size,
                 float eps);
void hr_silu_mul(const float *gate_up, float *y, int64_t num_rows, int64_t size);
void hr_gelu_mul(const float *gate_up, float *y, int64_t num_rows, int64_t size);
void hr_soft_cap(float *x, int64_t size, float cap);
void hr_rope(float *x, const float *cos, const float *sin, int64_t num_rows, int64_t row_stride,
             int64_t num_heads, int64_t head_dim);
void hr_write_keys(const float *k, int64_t row_stride, const kv_view *kv, int64_t num_rows,
                   const head_shape *heads, int64_t first_head, int64_t num_heads);
/* Ask for the lines that a row's keys go to. */
void hr_fetch_keys(const kv_view *kv, int64_t row, const head_shape *heads);
void hr_write_values(const float *v, int64_t row_stride, const kv_view *kv, int64_t num_rows,
                     const head_shape *heads);

#endif
