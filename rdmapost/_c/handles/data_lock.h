/* The lock for data that verbs share with the soft device; with a GIL it does nothing. */
#ifndef RDMAPOST_DATA_LOCK_H
#define RDMAPOST_DATA_LOCK_H

#include "handles/thread.h"

/*
 * Data verbs do not acquire the soft device's lock. A C function that touches data that they share
 * with the device (a queue, the lists in software/transaction.c and exceptions.c) holds the GIL
 * throughout; without a GIL it holds this lock, which is recursive. Only C code runs under the
 * lock, and it never waits for a queue's lock or the device's lock. While a thread waits for this
 * lock, Python suspends that thread's critical sections, so the owner may enter them.
 */
#ifdef Py_GIL_DISABLED
void rp_data_lock(void);
void rp_data_unlock(void);
/* Free the lock in a forked child, where the thread that held it does not exist. */
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
