/* The lock for data that verbs share with the soft device; with a GIL it does nothing. */
#ifndef RDMAPOST_DATA_LOCK_H
#define RDMAPOST_DATA_LOCK_H

#include "handles/thread.h"

/*
 * Data verbs do not acquire the soft device's lock. A C function that touches data that they share
 * with the device (a queue, the lists in soft0/transaction.c and exceptions.c) holds the GIL
 * throughout; without a GIL it holds this lock, which is recursive. Only C runs under it, and never
 * waits for a queue's lock or the device's. While a thread waits for this lock, Python suspends its critical sections, so the
 * owner may enter them.
 */
#ifdef Py_GIL_DISABLED
void rp_data_lock(void);
void rp_data_unlock(void);
/* For the child of a fork, in which a thread that held the lock no longer exists. */
void rp_free_data_lock(void);
#else
static inline void rp_data_lock(void)
{
}

static inline void rp_data_unlock(void)
{
}

static inline void rp_free_data_lock(void)
{
}
#endif

#endif
