/* Divide each row by its root mean square and scale (arXiv 1910.07467). size % 8 == 0. */
#include <math.h>

#include "kernels.h"

void hr_rms_norm(const float *x, const float *weight, float *y, int64_t num_rows, int64_t size,
                 float eps) {
    for (int64_t t = 0; t < num_rows; t++, x += size, y += size) {
        f32x8 squares = splat(0.0f);
        for (int64_t i = 0; i < size; i += LANES) squares = fma8(load8(x + i), load8(x + i), squares);
        f32x8 factor = splat(1.0f / sqrtf(sum8(squares) / (float)size + eps));
        for (int64_t i = 0; i < size; i += LANES)
            store8(y + i, load8(x + i) * factor * load8(weight + i));
    }
}
