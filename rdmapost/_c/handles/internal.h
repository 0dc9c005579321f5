/*
 * What the files in handles/ share. handle.c counts a handle's users, lists the open handles, and
 * lends structs to calls; create.c, reregister.c and close.c are the steps of a handle's life;
 * close.c also has the end of a use, deferred closes and finalization; windows.c has the regions
 * that windows are bound to; finalizer.c runs the finalizers written in Python; handle_type.c has
 * the type.
 */
#ifndef RDMAPOST_HANDLES_INTERNAL_H
#define RDMAPOST_HANDLES_INTERNAL_H

#include "handles/close.h"
#include "handles/exceptions.h"
#include "handles/windows.h"
#include "parts.h"

/* What one child adds to a handle's `word` (handle.h), and the two counts in it. */
#define CHILD (1ull << 32)
#define VERBS(word) ((word) & UINT32_MAX)
#define CHILDREN(word) (((word) & ~RP_SHUT) >> 32)

/* The maximum number of arguments of a provider's function. */
enum { MAX_ARGS = 8 };

/* Who deferred a close. */
enum { NOBODY, BY_CALLER, BY_FINALIZER };

/*
 * A handle's state. BEGUN: its constructor is preparing the arguments of _make(). MAKING: the
 * provider's function that creates the struct may be running. DESTROYED: the struct is gone, but
 * _forget() has not succeeded yet; the next close() calls it again. GONE: nothing is left to close.
 */
enum { NEW, BEGUN, MAKING, OPEN, DESTROYED, GONE };

/* Provided by rdmapost/resources/resource.py; never released. */
struct rp_python {
	PyObject *failed; /* called with a function and an errno: raises */
	PyObject *ffi;
	PyObject *to_number; /* converts a cffi pointer to a number */
	PyObject *open; /* a dict of weak references to open handles */
	PyObject *type_of; /* returns a cdata's type */
	PyObject *structs; /* a dict of each class's struct type */
};
RP_SHARED struct rp_python rp_python;

static inline uintptr_t this_thread(void)
{
	return (uintptr_t)rp_thread();
}

static inline int state_of(const struct rp_handle *h)
{
	return __atomic_load_n(&h->state, __ATOMIC_SEQ_CST);
}

static inline void set_state(struct rp_handle *h, char state)
{
	__atomic_store_n(&h->state, state, __ATOMIC_SEQ_CST);
}

/* Whether there is nothing to close in this process. */
static inline int is_done(const struct rp_handle *h)
{
	int state = state_of(h);

	return h->process != rp_process || !(state == OPEN || state == DESTROYED);
}

/* Off the hot path, words are always loaded atomically, since the cost does not matter there. */
static inline uint64_t load(const uint64_t *word)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* Whether this thread is in the middle of closing the handle. */
static inline int is_closer(const struct rp_handle *h)
{
	return __atomic_load_n(&h->closer, __ATOMIC_SEQ_CST) == this_thread();
}

/* ---- handle.c ------------------------------------------------------------- */

/* Set a handle's value in the dict of open handles, or remove it if `value` is NULL; 0, or -1. */
int rp_list_as(struct rp_handle *h, PyObject *value);
/* Remove a handle from the dict of open handles; runs no Python code. */
void rp_unlist(struct rp_handle *h);
/*
 * List an unreachable handle, whose weak reference the collector has cleared, for close_dropped().
 * Returns whether it is listed.
 */
int rp_list_again(struct rp_handle *h);

/* Add a user to an open handle's `word`. Returns whether the handle was open. */
int rp_enter(struct rp_handle *h, uint64_t user);
int rp_is_busy(struct rp_handle *h);
/* Return a new reference to a handle member's current value, or NULL (no exception). */
PyObject *rp_get_now(PyObject *self, PyObject *const *member);
/* The interpreter is exiting: leave the handle open, but admit no users. */
void rp_give_up(struct rp_handle *h);

/*
 * Call a function with each handle argument replaced by its struct. The handles
 * stay in use until the caller ends `uses`, which has room for MAX_ARGS. `self`,
 * unless NULL, replaces the first argument.
 */
PyObject *rp_call_with_structs(PyObject *function, PyObject *self, PyObject *args,
			       struct rp_use *uses, int *used);
/* Raise a failed call's error: `code` is an errno, its negative, or -1 with cffi's saved errno. */
void rp_raise_failed(PyObject *function, long code);

/* ---- create.c ------------------------------------------------------------- */

/* Become a child of each parent; 0, or -1 with an exception. */
int rp_join_parents(PyObject *parents);
/* Keep a memory region's keys as C numbers, because creating Python ints takes memory. */
void rp_read_keys(struct rp_handle *h);

/* Methods: _begin_making, _undo_making, _construct, _make. */
PyObject *rp_begin_making(PyObject *self, PyObject *unused);
PyObject *rp_undo_making(PyObject *self, PyObject *number);
PyObject *rp_construct(PyObject *self, PyObject *args);
PyObject *rp_make_handle(PyObject *self, PyObject *args, PyObject *kwargs);

/* ---- close.c -------------------------------------------------------------- */

/* A wait for other threads, with a time limit at exit. */
struct rp_pause {
	long us; /* of the next sleep */
	long all_us;
};

/*
 * Sleep briefly, to let other threads go on, and check for signals; 0, -1 with an exception, or 1 to
 * stop: time is up, or this is a forked child, which lacks the threads it waits for.
 */
int rp_await_others(const struct rp_handle *h, struct rp_pause *pause);
/*
 * Become the handle's closer and admit no new users. Returns 0; 1 if the handle is closed, already
 * being closed by this thread, or left to another closer, or if time is up; -1 with an exception.
 * `remaking`: whether it will be registered again; would-be users then say so.
 */
int rp_shut(struct rp_handle *h, struct rp_pause *pause, char remaking);
/* Leave the handle open after all. */
void rp_reopen(struct rp_handle *h);
/* Stop being the handle's closer. */
void rp_end_claim(struct rp_handle *h);
/*
 * Let waiting threads claim a handle: a thread that closes it in a loop would otherwise claim it
 * again before they wake.
 */
void rp_yield_claim(const struct rp_handle *h);
/* Count a child in each parent's `destroyed` or `finished`; `counter` is the member's offset. */
void rp_count_ended(PyObject *parents, size_t counter);
/*
 * Call a method until it completes: the device has already done its part. Returns whether it
 * completed, and sets `*raised` to the first exception; leaves none set.
 */
int rp_insist(struct rp_handle *h, const char *method, struct rp_error *raised);
/* Release the regions that a window was bound to; may run arbitrary Python code. */
void rp_unbind(struct rp_bound *bound);
/*
 * Release every reference that a handle holds; while the handle is DESTROYED, keep those that
 * _forget() needs. The handle stays a child of its parents.
 */
void rp_drop_held(struct rp_handle *h, char state);
/* Close a handle now; 0, or -1 with an exception. */
int rp_close_now(struct rp_handle *h);
PyObject *rp_close_handle(PyObject *self, PyObject *unused);

/* Defer a close to the end of this thread's verb, on behalf of `who`. */
void rp_defer_close(struct rp_handle *h, char who);
/*
 * Close a handle for which there is no caller to raise to: retry what a signal handler interrupted;
 * leave it to the main thread if memory or stack is short; keep it if the device refuses.
 */
void rp_close_quietly(struct rp_handle *h);
/*
 * Have the main thread close the handles that are left to it. If that thread cannot be asked now,
 * the next call to this function asks it, from any constructor or close.
 */
void rp_ask_main(void);
void rp_finalize_handle(PyObject *self);

/* Undo rp_enter(). */
void rp_leave(struct rp_handle *h, uint64_t user);
/* Stop being a child of the first `count` parents. */
void rp_leave_parents(PyObject *parents, Py_ssize_t count);
/* End the uses that rp_call_with_structs() began. */
void rp_end_uses(struct rp_use *uses, int used);

/* ---- reregister.c --------------------------------------------------------- */

PyObject *rp_remake_handle(PyObject *self, PyObject *args);

/* ---- windows.c ------------------------------------------------------------ */

/*
 * A region that a window may be bound to. `bind.serial` (taken when the bind was posted) and `done`
 * (when its completion was seen) come from one counter.
 */
struct rp_bound {
	struct rp_handle *mr;
	struct rp_bound *next;
	struct rp_bind bind;
	uint64_t done;
	int sure;
};

PyObject *rp_unbind_invalidated(PyObject *self, PyObject *unused);

#endif
