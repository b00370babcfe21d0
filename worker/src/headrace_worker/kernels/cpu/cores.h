/* Which workers of this machine compute at this moment, in memory that they share. */
#ifndef HEADRACE_CORES_H
#define HEADRACE_CORES_H

#include <stdatomic.h>
#include <stdint.h>

#define NUM_SEATS 64

/* One worker's place among them. stamps: NUM_SEATS of them, when each worker was last seen computing, by
 * the machine's monotonic clock. */
typedef struct {
    _Atomic int64_t *stamps;
    int64_t seat, num_cores;
} cores;

int64_t monotonic_ns(void);
/* Say that this worker computes, and return how many threads are its share of the cores now. */
int64_t claim_cores(const cores *c, int64_t now_ns);
/* Say that it has computed: its cores are the others' unless it comes back within milliseconds. */
void leave_cores(const cores *c, int64_t now_ns);

#endif
