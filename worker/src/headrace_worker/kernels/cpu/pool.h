/* A few threads that share the items of one job after another. */
#ifndef HEADRACE_POOL_H
#define HEADRACE_POOL_H

#include <stdint.h>

#include "cores.h"

typedef struct pool pool;
typedef void (*item_fn)(void *job, int64_t item, int64_t thread_idx);

/* num_threads counts the caller. among: NULL = all threads always work; else as many as the other workers
 * leave cores. NULL if there is no memory; fewer threads if the system has none. */
pool *hr_pool_start(int64_t num_threads, const cores *among);
void hr_pool_stop(pool *threads);
/* Run all items, in any order; returns once all are done. One caller at a time. */
void run_items(pool *threads, item_fn run, void *job, int64_t num_items);
/* No more jobs for now: the cores are free for others. */
void rest(pool *threads);
int64_t num_threads_of(const pool *threads);

#endif
