/* The caller takes items too and never waits for a thread that has not begun: on a busy machine a
 * late thread costs nothing but its help. Idle threads look for work for some microseconds, as the
 * jobs of a step follow one another closely, and then sleep. How many may work is looked up often,
 * between items: a neighbour that begins gets its cores within one item's time.
 *
 * `state` holds the job's number, its items and the next item, so that one compare-and-swap both takes
 * an item and proves that job and items were read of the same job: a job's fields change only after
 * all its items were taken and done. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#define ITEM_BITS 22
#define MAX_ITEMS ((UINT64_C(1) << ITEM_BITS) - 1)
#define SPINS 2000
#define LOOK_AGAIN 200000 /* after so much of `passing` the neighbours are looked up again */

struct helper {
    pool *owner;
    pthread_t thread;
    int64_t thread_idx;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic int is_sleeping;
};

struct pool {
    _Atomic uint64_t state;
    _Atomic(item_fn) run;
    _Atomic(void *) job;
    _Atomic int64_t num_done, num_allowed;
    _Atomic int is_stopping;
    cores among;
    uint64_t looked_at; /* 0 = not since the last rest */
    int64_t num_threads;
    struct helper helpers[];
};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Time that is asked for after every item: ticks of some billions a second, or nanoseconds. */
static uint64_t passing(void) {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return (uint64_t)monotonic_ns();
#endif
}

static int has_items(uint64_t state) {
    return (state & MAX_ITEMS) < (state >> ITEM_BITS & MAX_ITEMS);
}

static int may_work(pool *threads, int64_t thread_idx) {
    return thread_idx < atomic_load_explicit(&threads->num_allowed, memory_order_relaxed);
}

static void wake_helpers(pool *threads, int64_t num_allowed) {
    for (int64_t i = 1; i < num_allowed; i++) {
        struct helper *each = &threads->helpers[i];
        if (!atomic_load(&each->is_sleeping)) continue;
        pthread_mutex_lock(&each->lock);
        pthread_cond_signal(&each->wake);
        pthread_mutex_unlock(&each->lock);
    }
}

/* The caller's: how many threads may work from now on. */
static void look_around(pool *threads) {
    if (!threads->among.stamps) return;
    const uint64_t now = passing();
    if (threads->looked_at && now - threads->looked_at < LOOK_AGAIN) return;
    threads->looked_at = now;
    const int64_t share = claim_cores(&threads->among, monotonic_ns());
    const int64_t allowed = share < threads->num_threads ? share : threads->num_threads;
    const int64_t before = atomic_exchange(&threads->num_allowed, allowed);
    if (allowed > before && has_items(atomic_load(&threads->state))) wake_helpers(threads, allowed);
}

/* Take items and run them until there are none; 0 if there was none at all. */
static int take_items(pool *threads, int64_t thread_idx) {
    int has_worked = 0;
    uint64_t state = atomic_load(&threads->state);
    while (has_items(state) && may_work(threads, thread_idx)) {
        item_fn run = atomic_load(&threads->run);
        void *job = atomic_load(&threads->job);
        if (!atomic_compare_exchange_weak(&threads->state, &state, state + 1)) continue;
        run(job, (int64_t)(state & MAX_ITEMS), thread_idx);
        atomic_fetch_add(&threads->num_done, 1);
        has_worked = 1;
        if (thread_idx == 0) look_around(threads);
        state = atomic_load(&threads->state);
    }
    return has_worked;
}

static void sleep_until_work(struct helper *self) {
    pool *threads = self->owner;
    pthread_mutex_lock(&self->lock);
    atomic_store(&self->is_sleeping, 1);
    while (!(has_items(atomic_load(&threads->state)) && may_work(threads, self->thread_idx)) &&
           !atomic_load(&threads->is_stopping))
        pthread_cond_wait(&self->wake, &self->lock);
    atomic_store(&self->is_sleeping, 0);
    pthread_mutex_unlock(&self->lock);
}

static void *help(void *argument) {
    struct helper *self = argument;
    pool *threads = self->owner;
    int spins = 0;
    while (!atomic_load(&threads->is_stopping)) {
        if (take_items(threads, self->thread_idx)) {
            spins = 0;
        } else if (may_work(threads, self->thread_idx) && ++spins < SPINS) {
            pause_briefly();
        } else {
            sleep_until_work(self);
            spins = 0;
        }
    }
    return NULL;
}

pool *hr_pool_start(int64_t num_threads, const cores *among) {
    if (num_threads < 1) num_threads = 1;
    pool *threads = calloc(1, sizeof(pool) + (size_t)num_threads * sizeof(struct helper));
    if (!threads) return NULL;
    if (among) threads->among = *among;
    threads->num_threads = 1;
    atomic_store(&threads->num_allowed, num_threads);
    while (threads->num_threads < num_threads) {
        struct helper *next = &threads->helpers[threads->num_threads];
        next->owner = threads;
        next->thread_idx = threads->num_threads;
        pthread_mutex_init(&next->lock, NULL);
        pthread_cond_init(&next->wake, NULL);
        if (pthread_create(&next->thread, NULL, help, next)) break;
        threads->num_threads++;
    }
    return threads;
}

void hr_pool_stop(pool *threads) {
    atomic_store(&threads->is_stopping, 1);
    wake_helpers(threads, threads->num_threads);
    for (int64_t i = 1; i < threads->num_threads; i++) {
        pthread_join(threads->helpers[i].thread, NULL);
        pthread_cond_destroy(&threads->helpers[i].wake);
        pthread_mutex_destroy(&threads->helpers[i].lock);
    }
    rest(threads);
    free(threads);
}

int64_t num_threads_of(const pool *threads) { return threads->num_threads; }

void rest(pool *threads) {
    if (threads->among.stamps) leave_cores(&threads->among, monotonic_ns());
    threads->looked_at = 0;
}

/* At most MAX_ITEMS. */
static void run_shared(pool *threads, item_fn run, void *job, int64_t num_items) {
    const uint64_t number = (atomic_load(&threads->state) >> 2 * ITEM_BITS) + 1;
    atomic_store(&threads->run, run);
    atomic_store(&threads->job, job);
    atomic_store(&threads->num_done, 0);
    atomic_store(&threads->state, number << 2 * ITEM_BITS | (uint64_t)num_items << ITEM_BITS);
    wake_helpers(threads, atomic_load(&threads->num_allowed));
    take_items(threads, 0);
    for (int spins = 0; atomic_load(&threads->num_done) < num_items; spins++) {
        if (spins < SPINS)
            pause_briefly();
        else
            sched_yield();
    }
}

void run_items(pool *threads, item_fn run, void *job, int64_t num_items) {
    look_around(threads);
    const int is_shared = threads->num_threads > 1 && num_items > 1 && num_items <= (int64_t)MAX_ITEMS;
    if (is_shared) {
        run_shared(threads, run, job, num_items);
        return;
    }
    for (int64_t i = 0; i < num_items; i++) {
        run(job, i, 0);
        look_around(threads);
    }
}
