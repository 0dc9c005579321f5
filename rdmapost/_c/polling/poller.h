/*
 * A poller polls a CQ, and keeps track of the threads and tasks that wait for its completions or
 * for a channel's events. waiters.c keeps the list of waiters, puts them to sleep, and lets an
 * event loop lead; cq.c polls, waits for completions, and defines the type.
 */
#ifndef RDMAPOST_POLLER_H
#define RDMAPOST_POLLER_H

#include "handles/exceptions.h"
#include "handles/queue_lock.h"
#include "posting/inflight.h"

struct waiter {
	struct waiter *next;
	uint64_t count; /* completions that it waits for */
	int fd; /* its eventfd, or -1 before it sleeps */
	int woken;
};

/* Every CQ has a poller; so does every completion channel, to wait for its events. */
struct poller {
	PyObject_HEAD
	uint64_t cq; /* serial number of the CQ, the only handle that polls accept; 0 if no CQ */
	struct rp_lock lock; /* protects the members below */
	struct waiter *first; /* in the order in which they began */
	struct waiter *leader; /* sleeps on the channel, too */
	unsigned int waiting; /* number of waiting threads */
	unsigned int process; /* generation of those threads' process */
	unsigned int cancels; /* number of cancel() calls */
	unsigned int refuses; /* 1 after cancel(True): later waits are cancelled too */
	unsigned int claims;  /* claim() calls that succeeded: unclaim() ends no newer claim */
	PyObject *tasks; /* the leading event loop's wait list (aio.py), called to poll; or NULL */
	PyObject *queues; /* dict: queues by number */
	PyObject *invalidated; /* see rp_note_invalidated() */
	struct rp_in_flight *last; /* the queue of the latest completion, or NULL */
	PyObject *drop_event; /* takes an event off the CQ's own channel, if one is pending */
	int channel; /* that channel's descriptor, or -1 */
	unsigned int wc_flags; /* extra fields of an extended CQ; 0 if not extended */
	int64_t spin_ns;
	struct rp_completion *backlog, **end; /* matched completions, and where the next goes */
	size_t there; /* completions in the backlog */
	struct rp_completion *spare; /* for the next poll, and to put back delivered completions */
	size_t spares;
	size_t lent; /* length of the list to which completions were last delivered */
};

/*
 * Acquire the lock; 0, or -1 with an exception if this thread already holds it. Threads that waited
 * before a fork are gone, and so are their stacks.
 */
static inline int lock_poller(struct poller *p)
{
	unsigned int process;

	if (rp_acquire(&p->lock))
		return -1;
	process = (unsigned int)(p->lock.owner >> 32);
	if (p->process != process) {
		p->process = process;
		p->first = p->leader = NULL;
		p->waiting = 0;
	}
	return 0;
}

static inline void unlock_poller(struct poller *p)
{
	rp_release(&p->lock);
}

/*
 * Acquire the lock unless this thread holds it, for work that must not fail. Return whether it was
 * acquired, for unlock_if(). A pending exception stays set.
 */
static inline int lock_if_free(struct poller *p)
{
	return !rp_owns(&p->lock) && !lock_poller(p);
}

static inline void unlock_if(struct poller *p, int locked)
{
	if (locked)
		unlock_poller(p);
}

/*
 * Acquire the lock in the middle of a verb; 0, or -1 with an exception and without the lock, if
 * Python code has forked in the meantime and this is the child.
 */
static inline int lock_in_verb(struct poller *p, struct rp_handle *handle)
{
	if (lock_poller(p))
		return -1;
	if (handle->process == p->process)
		return 0;
	unlock_poller(p);
	rp_raise_closed(handle);
	return -1;
}

/* Begin a verb on the handle in the first argument; 0, or -1 with an exception. */
static inline int begin(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t wanted,
			struct rp_use *use)
{
	if (nargs != wanted || !rp_is_handle(args[0])) {
		PyErr_SetString(PyExc_TypeError, "wrong arguments");
		return -1;
	}
	if (!rp_begin_use((struct rp_handle *)args[0], use))
		return 0;
	rp_raise_closed((struct rp_handle *)args[0]);
	return -1;
}

/* Call a function, unless it is NULL, and ignore its result. Returns 0, or -1 with an exception. */
static inline int call_optional(PyObject *function)
{
	PyObject *done = function ? PyObject_CallNoArgs(function) : Py_NewRef(Py_None);

	Py_XDECREF(done);
	return done ? 0 : -1;
}

/* ---- waiters.c ------------------------------------------------------------ */

/* Convert a timeout, a float of seconds, to a deadline; None becomes INT64_MAX. */
int64_t rp_deadline_of(PyObject *timeout);
/*
 * Wake each thread whose count is available and, if no thread leads, wake one to take the lead.
 * The lock is held.
 */
void rp_wake_waiters(struct poller *p);
/* Put a thread at the end of the list. The lock is held. */
void rp_join_waiters(struct poller *p, struct waiter *me);
/*
 * Remove a thread from the list, close its eventfd, end its lead, and wake those that are next.
 * Acquires the lock.
 */
void rp_leave_waiters(struct poller *p, struct waiter *me);
/*
 * Sleep, without the lock, until woken, until the deadline, or until `fd` is readable (-1: no fd).
 * Returns 1 if `fd` is readable; else 0, or -1 with an exception.
 */
int rp_sleep_on_event(struct poller *p, struct waiter *me, int fd, int64_t deadline);
/* Have the leading event loop poll, or give up the lead if the loop is closed; 0, or -1. */
int rp_notify_tasks(struct poller *p);
/*
 * After completions have been put back, have the tasks poll again: they may have polled while the
 * completions were missing. A pending exception stays set.
 */
void rp_notify_tasks_surely(struct poller *p);
/*
 * Whether a wait on the handle may go on: not if the handle is closed or its close is deferred. If
 * not, an exception is set (at exit, SystemExit).
 */
int rp_may_wait(struct rp_handle *handle);

#define POLLER(self) ((struct poller *)(self))
#define RP_POLLER_METHOD(name) \
	PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t nargs)

RP_POLLER_METHOD(rp_until);
RP_POLLER_METHOD(rp_unclaim);
PyObject *rp_wake_all(PyObject *self, PyObject *unused);
PyObject *rp_cancel_waits(PyObject *self, PyObject *for_good);
PyObject *rp_claim(PyObject *self, PyObject *tasks);

#endif
