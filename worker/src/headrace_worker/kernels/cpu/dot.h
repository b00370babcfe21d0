/* Whole-number products of a vector's 32-bit lanes: two int16 or four bytes each. */
#ifndef HEADRACE_DOT_H
#define HEADRACE_DOT_H

#include "panels.h"

/* Keeps the compiler from adding up in another order, which takes registers that are not there. */
#ifdef __AVX2__
#define PINNED(sum) __asm__("" : "+v"(sum))
#else
#define PINNED(sum) ((void)0)
#endif

/* sum + w0 x0 + w1 x1 of int16 pairs. */
INLINE ivec add_pairs(ivec sum, ivec w, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (ivec)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return sum + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}

/* Quads: w unsigned below 16, x in -127..127. Up to eight of them are added, then finish_quads makes
 * int32 lanes of the sum: without a four-way product it stays in int16 pairs, which 8 * 15 * 254 fits. */
INLINE ivec add_quads(ivec sum, ivec w, ivec x) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
    return (ivec)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (ivec)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#else
    for (int i = 0; i < 4; i++)
        sum += (w >> 8 * i & 15) * (x << (24 - 8 * i) >> 24);
    return sum;
#endif
}

INLINE ivec finish_quads(ivec sum) {
#if defined(__AVX512VNNI__)
    return sum;
#elif defined(__AVX512BW__)
    return (ivec)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return sum;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (ivec)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return sum;
#endif
}

#endif
