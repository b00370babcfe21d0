/* Rotate the pairs (i, i + D/2) of the first heads of each row in place (arXiv 2104.09864).
 * cos, sin: (T, D/2). D % 16 == 0. */
#include "kernels.h"

void hr_rope(float *x, const float *cos, const float *sin, int64_t num_rows, int64_t row_stride,
             int64_t num_heads, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t t = 0; t < num_rows; t++, x += row_stride, cos += half, sin += half)
        for (int64_t head = 0; head < num_heads; head++)
            for (int64_t i = 0; i < half; i += LANES) {
                float *low = x + head * head_dim + i, *high = low + half;
                f32x8 a = load8(low), b = load8(high), c = load8(cos + i), s = load8(sin + i);
                store8(low, a * c - b * s);
                store8(high, b * c + a * s);
            }
}
