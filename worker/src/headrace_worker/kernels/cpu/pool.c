/* The caller takes items too and never waits for a thread that has not begun: on a busy machine a
 * late thread costs nothing but its help. Idle threads look for work for some microseconds, as the
 * jobs of a step follow one another closely, and then sleep.
 *
 * `state` holds the job's number, its items and the next item, so that one compare-and-swap both takes
 * an item and proves that job and items were read of the same job: a job's fields change only after
 * all its items were taken and done. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define ITEM_BITS 22
#define MAX_ITEMS ((UINT64_C(1) << ITEM_BITS) - 1)
#define SPINS 4000
#define SPINS_OF_CALLER 20000

struct pool {
    _Atomic uint64_t state;
    _Atomic(item_fn) run;
    _Atomic(void *) job;
    _Atomic int64_t num_done;
    _Atomic int num_sleeping, is_stopping;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int64_t num_threads;
    struct helper {
        pool *owner;
        pthread_t thread;
        int64_t thread_idx;
    } helpers[];
};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int has_items(uint64_t state) {
    return (state & MAX_ITEMS) < (state >> ITEM_BITS & MAX_ITEMS);
}

/* Take items and run them until there are none; 0 if there was none at all. */
static int take_items(pool *threads, int64_t thread_idx) {
    int has_worked = 0;
    uint64_t state = atomic_load(&threads->state);
    while (has_items(state)) {
        item_fn run = atomic_load(&threads->run);
        void *job = atomic_load(&threads->job);
        if (!atomic_compare_exchange_weak(&threads->state, &state, state + 1)) continue;
        run(job, (int64_t)(state & MAX_ITEMS), thread_idx);
        atomic_fetch_add(&threads->num_done, 1);
        has_worked = 1;
        state = atomic_load(&threads->state);
    }
    return has_worked;
}

static void sleep_until_work(pool *threads) {
    pthread_mutex_lock(&threads->lock);
    atomic_fetch_add(&threads->num_sleeping, 1);
    while (!has_items(atomic_load(&threads->state)) && !atomic_load(&threads->is_stopping))
        pthread_cond_wait(&threads->wake, &threads->lock);
    atomic_fetch_sub(&threads->num_sleeping, 1);
    pthread_mutex_unlock(&threads->lock);
}

static void *help(void *argument) {
    struct helper *self = argument;
    pool *threads = self->owner;
    int spins = 0;
    while (!atomic_load(&threads->is_stopping)) {
        if (take_items(threads, self->thread_idx)) {
            spins = 0;
        } else if (++spins < SPINS) {
            pause_briefly();
        } else {
            sleep_until_work(threads);
            spins = 0;
        }
    }
    return NULL;
}

static void wake_sleepers(pool *threads) {
    if (!atomic_load(&threads->num_sleeping)) return;
    pthread_mutex_lock(&threads->lock);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
}

pool *hr_pool_start(int64_t num_threads) {
    if (num_threads < 1) num_threads = 1;
    pool *threads = calloc(1, sizeof(pool) + (size_t)num_threads * sizeof(struct helper));
    if (!threads) return NULL;
    pthread_mutex_init(&threads->lock, NULL);
    pthread_cond_init(&threads->wake, NULL);
    threads->num_threads = 1;
    while (threads->num_threads < num_threads) {
        struct helper *next = &threads->helpers[threads->num_threads];
        next->owner = threads;
        next->thread_idx = threads->num_threads;
        if (pthread_create(&next->thread, NULL, help, next)) break;
        threads->num_threads++;
    }
    return threads;
}

void hr_pool_stop(pool *threads) {
    atomic_store(&threads->is_stopping, 1);
    pthread_mutex_lock(&threads->lock);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->lock);
    for (int64_t i = 1; i < threads->num_threads; i++)
        pthread_join(threads->helpers[i].thread, NULL);
    pthread_cond_destroy(&threads->wake);
    pthread_mutex_destroy(&threads->lock);
    free(threads);
}

int64_t num_threads_of(const pool *threads) { return threads->num_threads; }

/* At most MAX_ITEMS. */
static void run_shared(pool *threads, item_fn run, void *job, int64_t num_items) {
    const uint64_t number = (atomic_load(&threads->state) >> 2 * ITEM_BITS) + 1;
    atomic_store(&threads->run, run);
    atomic_store(&threads->job, job);
    atomic_store(&threads->num_done, 0);
    atomic_store(&threads->state, number << 2 * ITEM_BITS | (uint64_t)num_items << ITEM_BITS);
    wake_sleepers(threads);
    take_items(threads, 0);
    for (int spins = 0; atomic_load(&threads->num_done) < num_items; spins++) {
        if (spins < SPINS_OF_CALLER)
            pause_briefly();
        else
            sched_yield();
    }
}

void run_items(pool *threads, item_fn run, void *job, int64_t num_items) {
    if (threads->num_threads == 1 || num_items == 1 || num_items > (int64_t)MAX_ITEMS) {
        for (int64_t i = 0; i < num_items; i++) run(job, i, 0);
        return;
    }
    if (num_items > 0) run_shared(threads, run, job, num_items);
}
