/*
 * A queue's lock, held while posting to it or polling it.
 *
 * A prepared post takes some thirty nanoseconds, and a mutex would add ten. So the lock is one
 * word, plus a PyThread lock for waiters to block on.
 */
#include "handles/queue_lock.h"

#include "handles/exceptions.h"

/*
 * In CPython 3.11, a traced function repeats its first instruction while there is a pending signal
 * that the main thread has not seen. The main thread sees signals when it acquires the GIL, so
 * while it waits for a traced owner, it must acquire the GIL now and then.
 */
enum { LONGEST_WAIT_US = 5000 };

int rp_owns(const struct rp_lock *lock)
{
	return RP_LOAD(&lock->owner) == rp_thread()->mark;
}

int rp_acquire(struct rp_lock *lock)
{
	if (rp_try_acquire(lock, rp_thread()))
		return 0;
	if (rp_owns(lock)) {
		PyErr_SetString(rp_errors.error,
				"this thread is in the middle of a post to the same queue");
		return -1;
	}
	/* Any release after this sees the waiter. */
	RP_ADD(&lock->waiting, 1);
	while (!rp_try_acquire(lock, rp_thread())) {
		int woken;

		Py_BEGIN_ALLOW_THREADS
		woken = PyThread_acquire_lock_timed(lock->given, LONGEST_WAIT_US, 0) ==
			PY_LOCK_ACQUIRED;
		Py_END_ALLOW_THREADS
		if (woken) {
			RP_STORE(&lock->woken, 0);
			RP_STORE(&lock->starved, RP_LOAD(&lock->owner) != 0);
		}
	}
	RP_STORE(&lock->starved, 0);
	RP_ADD(&lock->waiting, -1);
	return 0;
}

void rp_wake(struct rp_lock *lock)
{
	unsigned int process = (unsigned int)(rp_thread()->mark >> 32);

	if (__atomic_exchange_n(&lock->woken, process, __ATOMIC_SEQ_CST) != process)
		PyThread_release_lock(lock->given);
}

int rp_init_lock(struct rp_lock *lock)
{
	lock->given = PyThread_allocate_lock();
	if (!lock->given) {
		PyErr_NoMemory();
		return -1;
	}
	/* Held until the first wake-up. */
	PyThread_acquire_lock(lock->given, WAIT_LOCK);
	return 0;
}

void rp_free_lock(struct rp_lock *lock)
{
	if (lock->given)
		PyThread_free_lock(lock->given);
}
