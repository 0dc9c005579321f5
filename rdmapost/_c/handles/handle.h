/*
 * The life of a handle: making a verbs object, using it, destroying it.
 *
 * Resource (rdmapost/resources/resource.py) derives from the type here. A handle has
 * users: verbs in progress, children made on it, work requests in flight that
 * name it, and windows bound to it. Every use must get past `word`, and a close
 * shuts that first, so no struct is destroyed under a verb.
 *
 * A close in the middle of the same thread's verb (by a signal handler, a
 * finalizer or an `__index__`) never waits: it is put off until the thread's
 * outermost verb has ended.
 */
#ifndef RDMAPOST_HANDLE_H
#define RDMAPOST_HANDLE_H

#include "module.h"

struct rp_handle {
	PyObject_HEAD
	/* SHUT, the number of children, and the number of verbs in progress. */
	uint64_t word;
	uint64_t posted; /* times it is named by work requests in flight */
	void *address; /* the struct, while it is open */
	PyObject *cdata; /* the same, as a cffi object */
	PyObject *destroy; /* called with cdata */
	PyObject *parents; /* a tuple of handles, or NULL */
	PyObject *keeps; /* what must outlive it: memory */
	struct rp_bound *bound; /* the regions that a window is, or may be, bound to */
	struct rp_handle *next; /* in the list of those to close after a verb */
	struct rp_handle *outer; /* the one that its closer was already closing, or NULL */
	uintptr_t maker; /* the thread whose constructor has begun and not succeeded, or 0 */
	uintptr_t closer; /* the thread closing it, or 0 */
	int64_t first_try; /* when its finalizer's close first found no room, or 0 */
	unsigned int windows; /* bound to it */
	unsigned int process; /* generation of the process that made it */
	int pid; /* of that process */
	unsigned int access; /* of a memory region */
	char state;
	char releasing; /* its closer may still use it */
	char stalled; /* its closer is waiting for another close */
	char abandoned; /* finalized: its last user closes it */
	char refused; /* the device refused to destroy it */
	char kept; /* and so it stays until the process ends */
	char put_off; /* to be closed after a verb: waits end now */
	char binds; /* a bind of a window has been posted to it */
};

extern PyObject *rp_handle_type;

/* Attempts at what must be done although a signal handler raises in the middle of it. */
enum { MOST_INTERRUPTS = 16 };

/* How far interpreter shutdown has got, or 0. */
enum { RP_CLOSING_ALL = 1, RP_CLOSED_ALL };
extern int rp_exiting;

/* A handle in use by one of a thread's verbs, innermost first. */
struct rp_use {
	struct rp_handle *handle;
	struct rp_use *below;
};

/*
 * A thread's identity, the handles it uses, and those it must close once it uses none. A thread may
 * stand in for another that waits for it: it then holds that one's locks and is in the middle of
 * its verbs; NULL ends that.
 */
struct rp_thread {
	uint64_t mark; /* the generation of the process, and in the low 32 bits a number */
	struct rp_use *top;
	struct rp_handle *closing; /* the innermost that it is closing */
	struct rp_handle *first_put_off, *last_put_off;
	int draining;
};

extern _Thread_local struct rp_thread *rp_current; /* NULL until first asked for */
struct rp_thread *rp_first_thread(void);
void rp_stand_for(struct rp_thread *thread);

static inline struct rp_thread *rp_thread(void)
{
	struct rp_thread *me = rp_current;

	return me ? me : rp_first_thread();
}

static inline int rp_is_handle(PyObject *object)
{
	return PyObject_TypeCheck(object, (PyTypeObject *)rp_handle_type);
}

/* Whether it belongs to this process, not to one that forked it. */
static inline int rp_is_here(const struct rp_handle *handle)
{
	return handle->process == rp_thread()->mark >> 32;
}

/* Whether a handle is open here. */
int rp_is_open(const struct rp_handle *handle);

/*
 * Begin to use a handle, to which the caller has a reference until the use
 * ends; 0, or -1 without an exception if it is not open. Runs no Python code.
 */
int rp_begin_use(struct rp_handle *handle, struct rp_use *use);

/*
 * End a use; a thread ends its uses in reverse order. After the outermost one,
 * closes that finalizers and signal handlers put off are carried out. That may
 * run any Python code, so hold no lock; an exception that is set stays set.
 */
void rp_end_use(struct rp_use *use);

/* Whether this thread is in the middle of a verb. */
int rp_in_verb(void);

/* Raise ClosedError, saying why a handle cannot be used. */
void rp_raise_closed(struct rp_handle *handle);

/* The same, for a fork in the middle of a verb. */
void rp_raise_forked(void);

/* rp_begin_use() and rp_end_use() for callers that have their rp_thread(). */
#define RP_SHUT (1ull << 63)
int rp_begin_use_shut(struct rp_handle *handle, struct rp_use *use);
void rp_look_after(struct rp_handle *handle);
void rp_close_put_off(void);

static inline void rp_push_use(struct rp_thread *me, struct rp_handle *handle, struct rp_use *use)
{
	use->handle = handle;
	use->below = me->top;
	me->top = use;
}

static inline void rp_pop_use(struct rp_thread *me, const struct rp_use *use)
{
	me->top = use->below;
	if (!me->top && me->first_put_off && !me->draining)
		rp_close_put_off();
}

static inline int rp_begin_use_by(struct rp_thread *me, struct rp_handle *handle,
				  struct rp_use *use)
{
	uint64_t word = RP_LOAD(&handle->word);

	if (handle->process != me->mark >> 32 || word & RP_SHUT ||
	    !rp_swap_word(&handle->word, &word, word + 1))
		return rp_begin_use_shut(handle, use);
	rp_push_use(me, handle, use);
	return 0;
}

static inline void rp_end_use_by(struct rp_thread *me, struct rp_use *use)
{
	struct rp_handle *handle = use->handle;

	/* The use is still on the stack: nothing is closed before the word is right. */
	if (handle->process == me->mark >> 32) {
		RP_ADD(&handle->word, -1);
		if (RP_LOAD(&handle->abandoned))
			rp_look_after(handle);
	}
	rp_pop_use(me, use);
}

/*
 * Set if a device is written in Python: runs its pending work. May run any Python code and wait
 * for another thread's verb, so hold no lock. Returns the exception of a signal handler that ran
 * meanwhile, which the caller must raise, or NULL.
 */
extern PyObject *(*rp_progress)(void);

static inline PyObject *rp_run_device(void)
{
	return rp_progress ? rp_progress() : NULL;
}

/* Return the exception that is set, with its traceback, and clear it; NULL if there is none. */
PyObject *rp_take_exception(void);

/*
 * soft0/verb.c: raise later, in this thread, a signal handler's exception that could not propagate,
 * taking over the reference; and start doing so once the thread is out of C.
 */
void rp_raise_later(PyObject *exception);
/* The same for the one that is set, unless it is for lack of memory or stack. */
void rp_handler_raised(void);
/* Whether an exception is for lack of memory or stack. */
int rp_lacks_room(PyObject *exception);
void rp_deliver_soon(void);

/* Raise an exception, with the one that is set as its context; takes over the reference. */
void rp_raise(PyObject *exception);

/* A work request in flight names it; the caller is using it. */
static inline void rp_name(struct rp_handle *handle)
{
	RP_ADD(&handle->posted, 1);
}

/*
 * It no longer does.  The caller still has a reference; as when dropping the
 * last one, any Python code may run.
 */
void rp_unname(struct rp_handle *handle);

/* Number the events of binds: one is posted, or its completion is seen. */
uint64_t rp_count_bind(void);

/*
 * A window's bind, which `queue` posted as number `serial`, is done. If it succeeded (`sure`), the
 * window releases what was bound before it; queues are not in order with each other, so a bind of
 * another queue was before it only if it was done when this one was posted. The window now also
 * holds `mr`, unless NULL. Window and region are named. May run any Python code.
 */
void rp_bind(struct rp_handle *mw, struct rp_handle *mr, int sure, uint64_t queue, uint64_t serial);

/* ---- lock.c, the fast path ------------------------------------------------ */

/* Wake a waiter of a lock that has been released. */
void rp_wake(struct rp_lock *lock);

/* A holder from before a fork does not exist after it. */
static inline int rp_try_for(struct rp_lock *lock, const struct rp_thread *me)
{
	uint64_t owner = RP_LOAD(&lock->owner);

	return (!owner || (owner ^ me->mark) >> 32) && rp_swap_word(&lock->owner, &owner, me->mark);
}

static inline void rp_give(struct rp_lock *lock)
{
	RP_STORE(&lock->owner, 0);
	if (RP_LOAD(&lock->waiting))
		rp_wake(lock);
}

#endif
