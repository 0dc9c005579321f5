/*
 * A queue's lock.
 *
 * rdmapost runs no Python code while a thread holds such a lock, so waits are short, and a thread
 * tries to acquire one that it already holds only if a device's ibv_post_send calls Python. (The
 * soft device's own lock differs; see software/transaction.c.)
 */
#ifndef RDMAPOST_QUEUE_LOCK_H
#define RDMAPOST_QUEUE_LOCK_H

#include "handles/thread.h"

struct rp_lock {
	uint64_t owner; /* the owning thread's mark, or 0 */
	int waiting; /* number of waiting threads */
	unsigned int woken; /* the process in which a woken waiter is about to retry, or 0 */
	int starved; /* a woken waiter found that another thread had acquired the lock */
	PyThread_type_lock given; /* waiters block on it */
};

int rp_init_lock(struct rp_lock *lock); /* 0, or -1 with an exception */
void rp_free_lock(struct rp_lock *lock);

/* Acquire, releasing the GIL to wait; 0, or -1 with an exception if this thread owns the lock. */
int rp_acquire(struct rp_lock *lock);
int rp_owns(const struct rp_lock *lock);

/* Wake a thread that waits for a released lock. */
void rp_wake(struct rp_lock *lock);

/* Try to acquire a lock; an owner from before a fork no longer exists. */
static inline int rp_try_acquire(struct rp_lock *lock, const struct rp_thread *me)
{
	uint64_t owner = RP_LOAD(&lock->owner);

	return (!owner || (owner ^ me->mark) >> 32) && rp_swap_word(&lock->owner, &owner, me->mark);
}

static inline void rp_release(struct rp_lock *lock)
{
	RP_STORE(&lock->owner, 0);
	if (RP_LOAD(&lock->waiting))
		rp_wake(lock);
}

#endif
