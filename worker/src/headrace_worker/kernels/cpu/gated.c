/* y = act(gate) * up of rows that hold both side by side, (T, 2F) -> (T, F). F % 8 == 0. */
#include "panels.h"

void hr_silu_mul(const float *gate_up, float *y, int64_t num_rows, int64_t size) {
    for (int64_t t = 0; t < num_rows; t++, gate_up += 2 * size, y += size) {
        int64_t i = 0;
        for (; i + WIDTH <= size; i += WIDTH) {
            const fvec gate = loadv(gate_up + i);
            storev(y + i, gate / (splatv(1.0f) + expv(-gate)) * loadv(gate_up + size + i));
        }
        for (; i < size; i += LANES) {
            const f32x8 gate = load8(gate_up + i);
            store8(y + i, gate / (splat(1.0f) + exp8(-gate)) * load8(gate_up + size + i));
        }
    }
}

/* GELU by tanh (arXiv 1606.08415). */
void hr_gelu_mul(const float *gate_up, float *y, int64_t num_rows, int64_t size) {
    const f32x8 root = splat(0.7978845608028654f), cube = splat(0.044715f), half = splat(0.5f);
    for (int64_t t = 0; t < num_rows; t++, gate_up += 2 * size, y += size)
        for (int64_t i = 0; i < size; i += LANES) {
            f32x8 x = load8(gate_up + i);
            f32x8 inner = root * fma8(cube * x * x, x, x);
            store8(y + i, half * x * (splat(1.0f) + tanh8(inner)) * load8(gate_up + size + i));
        }
}
