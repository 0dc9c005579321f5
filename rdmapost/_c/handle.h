/*
 * The life of a handle: making a verbs object, using it, destroying it.
 *
 * Resource (rdmapost/_resource.py) derives from the type here.  A handle has
 * users: verbs in progress, children made on it, work requests in flight that
 * name it, and windows bound to it.  Whoever wants to use it must get past
 * `word`, and whoever closes it shuts that first, so no struct is pulled away
 * from under a verb.
 *
 * A close in the middle of a verb of the same thread (by a signal handler, a
 * finalizer or an `__index__`) never waits: it is put off until the thread's
 * outermost verb has ended.
 */
#ifndef RDMAPOST_HANDLE_H
#define RDMAPOST_HANDLE_H

#include "door.h"

struct rp_handle {
	PyObject_HEAD
	/* SHUT, the number of children, and the number of verbs in progress. */
	uint64_t word;
	uint64_t posted; /* mentions in work requests in flight */
	void *address; /* the struct, while it is open */
	PyObject *cdata; /* the same as cffi has it */
	PyObject *destroy; /* called with cdata */
	PyObject *parents; /* a tuple of handles, or NULL */
	PyObject *keeps; /* what must not go before it: memory */
	PyObject *bound; /* the region that a window is bound to, or NULL */
	struct rp_handle *next; /* among those to close after a verb */
	uintptr_t closer; /* the thread that closes it, or 0 */
	unsigned int windows; /* bound to it */
	unsigned int process; /* generation of the process that made it */
	int pid; /* of that process */
	unsigned int access; /* of a memory region */
	char state;
	char releasing; /* its closer may still use it */
	char abandoned; /* finalized: its last user closes it */
	char refused; /* the device would not let it go */
	char kept; /* and so it is there until the process ends */
	char put_off; /* to be closed after a verb */
};

extern PyObject *rp_handle_type;

/* What the end of the interpreter has come to, or 0. */
enum { RP_CLOSING_ALL = 1, RP_CLOSED_ALL };
extern int rp_exiting;

/* A handle in use by a verb of this thread, the innermost first. */
struct rp_use {
	struct rp_handle *handle;
	struct rp_use *below;
};

static inline int rp_is_handle(PyObject *object)
{
	return PyObject_TypeCheck(object, (PyTypeObject *)rp_handle_type);
}

/* Whether a handle is open here. */
int rp_is_open(const struct rp_handle *handle);

/*
 * Begin to use a handle, of which the caller has a reference until the use has
 * ended; 0, or -1 with no exception where it is not open.  Runs no Python code.
 */
int rp_begin_use(struct rp_handle *handle, struct rp_use *use);

/*
 * End it; uses of a thread end in the reverse order.  After its outermost one,
 * what finalizers and signal handlers wanted to close meanwhile is closed.
 * That may run any Python code, so hold no lock; an exception that is set
 * stays set.
 */
void rp_end_use(struct rp_use *use);

/* Whether this thread is in the middle of a verb. */
int rp_in_verb(void);

/* Raise what tells why a handle cannot be used. */
void rp_raise_closed(struct rp_handle *handle);

/* A work request in flight names it; the caller is in the middle of a use of it. */
static inline void rp_name(struct rp_handle *handle)
{
	__atomic_add_fetch(&handle->posted, 1, __ATOMIC_SEQ_CST);
}

/*
 * It no longer does.  The caller still has a reference; as when dropping the
 * last one, any Python code may run.
 */
void rp_unname(struct rp_handle *handle);

/*
 * A window is bound to a region from now on, or to none (NULL): it holds that.
 * The caller is in the middle of a use of both.
 * Returns what it held before, or NULL, for the caller to release where
 * Python code may run.  Runs none itself.
 */
PyObject *rp_bind(struct rp_handle *mw, struct rp_handle *mr);

/*
 * What tells threads apart.  A thread may stand for another one that waits for it: it
 * holds the locks, and is in the middle of the verbs, of that one.  NULL ends that.
 */
struct rp_thread;
struct rp_thread *rp_thread(void);
void rp_stand_for(struct rp_thread *thread);

#endif
