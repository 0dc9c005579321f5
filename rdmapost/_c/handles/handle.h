/*
 * A handle's lifetime: creating a verbs object, using it, destroying it.
 *
 * Resource (rdmapost/resources/resource.py) derives from the type here. A handle's
 * users are verbs in progress, its children, work requests in flight that name it,
 * and windows bound to it. Every use first checks RP_SHUT in `word`, and a close first
 * sets it, so no struct is destroyed while a verb uses it.
 *
 * A close in the middle of the same thread's verb (by a signal handler, a
 * finalizer or an `__index__`) never waits: it is deferred until the thread's
 * outermost verb has ended.
 */
#ifndef RDMAPOST_HANDLE_H
#define RDMAPOST_HANDLE_H

#include "base.h"
#include "handles/thread.h"

struct rp_handle {
	PyObject_HEAD
	uint64_t serial; /* unique, and never reused */
	/* RP_SHUT, the number of children, and the number of verbs in progress. */
	uint64_t word;
	uint64_t posted; /* references from work requests in flight */
	void *address; /* the struct, while it is open */
	PyObject *cdata; /* the same, as a cffi object */
	PyObject *destroy; /* called with cdata */
	PyObject *parents; /* a tuple of handles, or NULL */
	PyObject *keeps; /* memory that must outlive the struct; a window's counts (windows.c) */
	PyObject *queues; /* records of the work requests posted to it, or NULL */
	void (*forget)(PyObject *queues); /* drops those records; may run arbitrary Python code */
	struct rp_bound *bound; /* the regions that a window is, or may be, bound to */
	struct rp_handle *next; /* in its thread's list of deferred closes */
	struct rp_handle *behind; /* in the list of queue pairs held back */
	struct rp_handle *next_for_main; /* in the list of those that the main thread closes */
	int64_t held_since; /* when it was held back, or 0 */
	struct rp_binder *binder; /* its send queue's binder, once a window bind has been posted */
	struct rp_handle *outer; /* the handle its closer was already closing, or NULL */
	uintptr_t maker; /* the thread that is still running the constructor, or 0 */
	uintptr_t closer; /* the thread closing it, or 0 */
	int64_t first_try; /* when closing it first failed for lack of memory or stack, or 0 */
	/* How many children have had their structs destroyed, and how many have finished closing. */
	unsigned int destroyed, finished;
	unsigned int constructors; /* calls of its constructor that have begun */
	unsigned int claimants; /* threads waiting to close or re-register it */
	unsigned int windows; /* number of windows bound to it */
	unsigned int process; /* generation of the process that created it */
	int pid; /* of that process */
	unsigned int access; /* a memory region's access flags */
	uint64_t start; /* a memory region's first address, as SGEs give it */
	uint32_t lkey, rkey; /* a memory region's */
	PyObject *form; /* a memory region's memory, access and PD (a _Form); or NULL */
	PyObject *replaced; /* the form before that, until _settle() has released its memory */
	char unreadable; /* a memory region whose addresses this process may be unable to read */
	char remaking; /* its closer is in _remake() */
	char spoiled; /* _make() or _remake() failed: it can only be closed, and stays RP_SHUT */
	char state; /* see internal.h */
	char releasing; /* its closer may still use it */
	char stalled; /* its closer is waiting for another close */
	char abandoned; /* finalized: its last user closes it */
	char refused; /* the device refused to destroy it */
	char kept; /* the device refused, with no caller to raise to: kept until the process ends */
	char emptied; /* everything on it is being closed: it admits no children */
	char is_for_main; /* it is in the main thread's list */
	/* Who deferred its close until a verb ends (internal.h); any wait on it must end now. */
	char deferred_by;
};

RP_SHARED PyObject *rp_handle_type;

/* How far interpreter shutdown has got, or 0. */
enum { RP_CLOSING_ALL = 1, RP_CLOSED_ALL };
RP_SHARED int rp_exiting;

/* A use of a handle by one of a thread's verbs. They form a list; the innermost comes first. */
struct rp_use {
	struct rp_handle *handle;
	struct rp_use *below;
};

static inline int rp_is_handle(PyObject *object)
{
	return PyObject_TypeCheck(object, (PyTypeObject *)rp_handle_type);
}

/* Whether a handle was created in this process rather than inherited through a fork. */
static inline int rp_is_here(const struct rp_handle *handle)
{
	return handle->process == rp_thread()->mark >> 32;
}

/* Whether a handle is open in this process. */
int rp_is_open(const struct rp_handle *handle);

/*
 * Begin using a handle; the caller holds a reference until the use ends. Returns 0,
 * or -1 without an exception if the handle is not open. Runs no Python code.
 */
int rp_begin_use(struct rp_handle *handle, struct rp_use *use);

/* Whether this thread is in the middle of a verb or a constructor. */
int rp_in_verb(void);

/* Raise ClosedError, saying why a handle cannot be used. */
void rp_raise_closed(struct rp_handle *handle);

/* Set in `word` while a handle is closed or being closed. */
#define RP_SHUT (1ull << 63)

/* rp_begin_use_by() for a handle that is shut, or whose word has just changed. */
int rp_begin_use_shut(struct rp_handle *handle, struct rp_use *use);

static inline void rp_push_use(struct rp_thread *me, struct rp_handle *handle, struct rp_use *use)
{
	use->handle = handle;
	use->below = me->top;
	me->top = use;
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

/*
 * Runs the pending work of a device written in Python; NULL if there is no such device. May run any
 * Python code and wait for another thread's verb, so hold no lock. Returns a signal handler's
 * exception, which the caller must raise, or NULL.
 */
RP_SHARED PyObject *(*rp_progress)(void);

/* Whether such a device lacks memory to receive, so that its descriptor stays readable. */
RP_SHARED int rp_deaf;

static inline PyObject *rp_run_device(void)
{
	return rp_progress ? rp_progress() : NULL;
}

/* Count one more work request in flight that names the handle, which the caller is using. */
static inline void rp_pin(struct rp_handle *handle)
{
	RP_ADD(&handle->posted, 1);
}

/* Counts the windows bound through a send queue; may outlive it, and has no pointer to it. */
struct rp_binder {
	uint64_t users;
	int64_t windows; /* bound */
};

/* Returns NULL if out of memory. */
struct rp_binder *rp_new_binder(void);

/* Free a binder when its last user drops it. */
void rp_drop_binder(struct rp_binder *binder);

/* Record that a window bind has been posted to a handle's queue. */
void rp_note_binder(struct rp_handle *h, struct rp_binder *binder);

#endif
