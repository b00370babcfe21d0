/* A worker that ends without leaving is forgotten as soon as its stamp is old. */
#include "cores.h"

#include <time.h>

#define FRESH_NS INT64_C(250000000)
/* The pause between two steps is shorter: a neighbour that used the core meanwhile would still be in
 * an item when the next step begins, and then both wait for one another. */
#define LINGER_NS INT64_C(20000000)

int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

int64_t claim_cores(const cores *c, int64_t now_ns) {
    atomic_store_explicit(&c->stamps[c->seat], now_ns, memory_order_relaxed);
    int64_t num_busy = 1, num_before = 0;
    for (int64_t seat = 0; seat < NUM_SEATS; seat++) {
        const int64_t stamp = atomic_load_explicit(&c->stamps[seat], memory_order_relaxed);
        if (seat == c->seat || now_ns - stamp > FRESH_NS) continue;
        num_busy++;
        num_before += seat < c->seat;
    }
    const int64_t share = c->num_cores / num_busy + (num_before < c->num_cores % num_busy);
    return share > 1 ? share : 1;
}

void leave_cores(const cores *c, int64_t now_ns) {
    atomic_store_explicit(&c->stamps[c->seat], now_ns - FRESH_NS + LINGER_NS, memory_order_relaxed);
}
