/* Rows to whole numbers: each group of 32 is scaled so that its largest is 32767 or 127.
 *
 * int8 stays in order. int16 goes in pairs, columns (0, 2), (1, 3), (4, 6), (5, 7), ...: so the pairs
 * meet the weights' quads without shuffling those, whose even and odd bytes are a shift apart. */
#include <float.h>
#include <math.h>
#include <stddef.h>

#include "linear.h"

/* Groups whose largest is below are taken as zeros: the factor would overflow. */
#define SMALLEST 1e-30f

typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef i8x8 i8x8_out __attribute__((aligned(1), may_alias));
typedef i32x8 i32x8_out __attribute__((aligned(4), may_alias));

/* The nearest whole number of |x| < 2^22; adding and taking away 1.5 * 2^23 rounds. */
INLINE i32x8 nearest(f32x8 x) {
    return __builtin_convertvector((x + splat(12582912.0f)) - splat(12582912.0f), i32x8);
}

INLINE float largest(const float *x) {
    f32x8 top = splat(0.0f);
    for (int i = 0; i < GROUP; i += LANES) {
        f32x8 value = (f32x8)((i32x8)load8(x + i) & 0x7fffffff);
        top = choose8(value > top, value, top);
    }
    float found = 0.0f;
    for (int i = 0; i < LANES; i++) found = top[i] > found ? top[i] : found;
    return found;
}

INLINE i32x8 pairs(i32x8 a, i32x8 b) {
    const i32x8 low = __builtin_shuffle(a, b, (i32x8){0, 1, 4, 5, 8, 9, 12, 13});
    const i32x8 high = __builtin_shuffle(a, b, (i32x8){2, 3, 6, 7, 10, 11, 14, 15});
    return (low & 0xffff) | high << 16;
}

#if WIDTH == 16
/* One group of finite values whose largest is `top`; the sum of the whole numbers. */
INLINE int32_t put_group(int64_t rounding, const float *x, float factor, void *values) {
    ivec whole[2];
    for (int i = 0; i < 2; i++) {
        const fvec scaled = loadv(x + WIDTH * i) * splatv(factor);
        whole[i] = __builtin_convertvector((scaled + splatv(12582912.0f)) - splatv(12582912.0f), ivec);
    }
    if (rounding == INT16) {
        const ivec first = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
        const ivec low = __builtin_shuffle(whole[0], whole[1], first);
        const ivec high = __builtin_shuffle(whole[0], whole[1], first + 2);
        *(ivec_mem *)values = (low & 0xffff) | high << 16;
    } else {
        for (int i = 0; i < 2; i++)
            _mm_storeu_si128((__m128i_u *)values + i, _mm512_cvtepi32_epi8((__m512i)whole[i]));
    }
    return _mm512_reduce_add_epi32((__m512i)(whole[0] + whole[1]));
}

/* The largest magnitude; NaN or infinity if there is one. */
INLINE float largest_of_group(const float *x) {
    const __m512 a = _mm512_abs_ps((__m512)loadv(x)), b = _mm512_abs_ps((__m512)loadv(x + WIDTH));
    const int has_nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    return has_nan ? NAN : _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}
#endif

/* Row `row` of `to`; x is that row. A group that is not finite gets a scale of NaN, which spoils what it
 * is multiplied into, as it would in floats. */
void hr_quantise(const float *x, int64_t num_in, const rounded *to, int64_t row) {
    const float most = to->rounding == INT16 ? 32767.0f : 127.0f;
    const int64_t num_groups = num_in / GROUP;
    for (int64_t g = 0; g < num_groups; g++, x += GROUP) {
#if WIDTH == 16
        const float magnitude = largest_of_group(x);
        if (magnitude <= FLT_MAX) {
            char *into = (char *)to->groups + (row * num_groups + g) * rounded_group_bytes(to->rounding);
            const int is_usable = magnitude >= SMALLEST;
            const float scale = is_usable ? magnitude / most : 0.0f;
            const int32_t total = put_group(to->rounding, x, is_usable ? most / magnitude : 0.0f,
                                            into + offsetof(int16_group, values));
            ((int16_group *)into)->scale = scale; /* an int8 one begins alike */
            ((int16_group *)into)->sum = scale * (float)total;
            continue;
        }
#endif
        const float top = largest(x);
        const int is_usable = top >= SMALLEST;
        const f32x8 factor = splat(is_usable ? most / top : 0.0f);
        f32x8 spoilt = splat(0.0f);
        i32x8 whole[4], sum = {0};
        for (int i = 0; i < 4; i++) {
            const f32x8 value = load8(x + LANES * i), zero = value * splat(0.0f);
            spoilt += zero;
            whole[i] = nearest(choose8(zero == splat(0.0f), value, splat(0.0f)) * factor);
            sum += whole[i];
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; i++) total += sum[i];
        const float scale = (is_usable ? top / most : 0.0f) + sum8(spoilt);
        if (to->rounding == INT16) {
            int16_group *into = (int16_group *)to->groups + row * num_groups + g;
            i32x8_out *out = (i32x8_out *)into->values;
            into->scale = scale;
            into->sum = scale * (float)total;
            out[0] = pairs(whole[0], whole[1]);
            out[1] = pairs(whole[2], whole[3]);
        } else {
            int8_group *into = (int8_group *)to->groups + row * num_groups + g;
            into->scale = scale;
            into->sum = scale * (float)total;
            for (int i = 0; i < 4; i++)
                *(i8x8_out *)(into->values + LANES * i) = __builtin_convertvector(whole[i], i8x8);
        }
    }
}
