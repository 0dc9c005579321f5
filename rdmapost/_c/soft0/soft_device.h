/*
 * Shared by the soft device's files.
 *
 * Its rules are written in Python (rdmapost/providers/soft0/engine/), and a signal handler may raise between any two
 * bytecodes. So each change to the device's state is noted before it is made, with the call that
 * undoes it, and what cannot be undone waits for the end. Then C, in which no handler runs, makes
 * either the undo calls or the waiting ones (soft0/journal.c).
 *
 * A verb holds the device's lock from its first step to its last, and everything below is used
 * under it.
 */
#ifndef RDMAPOST_SOFT_DEVICE_H
#define RDMAPOST_SOFT_DEVICE_H

#include "handles/handle.h"

#include "soft0/soft.h"

/*
 * Data verbs do not take that lock. A function in C that touches what they share with the device (a
 * queue, the lists of soft0/verb.c) keeps the GIL from its first step to its last; without a GIL it
 * holds this lock, which is recursive. Only C runs under it, and never waits for a queue's lock or
 * the device's. A thread that waits for it leaves its critical sections, so they may be entered
 * under it.
 */
#ifdef Py_GIL_DISABLED
void rp_data_lock(void);
void rp_data_unlock(void);
#else
static inline void rp_data_lock(void)
{
}

static inline void rp_data_unlock(void)
{
}
#endif

/* ---- soft0/journal.c ------------------------------------------------------ */

/* The names of attributes and methods that C looks up. */
enum rp_name { SQ, RQ, QUEUE, OPS, APPEND, APPENDLEFT, POPLEFT, POP_LAST, DEPTH, NAMES };
extern PyObject *rp_names[NAMES];

/* Make a call, which is a tuple of a callable and its arguments; NULL if it raised. */
PyObject *rp_call(PyObject *call);
/* Put an item at the end of a list or a deque; 0, or -1 without an exception. */
int rp_append(PyObject *queue, PyObject *item);
/* Take the first of a list; NULL if it is empty. */
PyObject *rp_shift(PyObject *list);

/* Begin to note changes; commit them; roll them back, keeping an exception that is set. */
void rp_journal_begin(void);
void rp_journal_commit(void);
void rp_journal_rollback(void);
/* After a fork: forget what was noted. */
void rp_journal_forget(void);

/* Whether this thread's changes are noted. */
int rp_is_journaled(void);
/* Note a call that undoes a change; 0, or -1 with an exception. */
int rp_note_undo(PyObject *call);
/* Note a completion queue whose entries polls will see at the end of the commit; likewise. */
int rp_note_added(PyObject *cq);

/* The tp_setattro of types whose attributes are journaled. */
int rp_journaled_setattr(PyObject *self, PyObject *name, PyObject *value);

/* ---- soft0/context.c ---------------------------------------------------------------- */

/* Let polls take all entries of a completion queue. */
void rp_show(PyObject *cq);
/* ---- soft0/faults.c ------------------------------------------------------- */

/* Count a send; the errno with which it must fail on purpose, or 0. `faults` may be NULL. */
int rp_take_fault(PyObject *faults);

/* ---- soft0/verb.c: the lock, and what runs under it ----------------------- */

/* The parts of the device, given by rdmapost/providers/soft0/state.py (rdmapost/_verbs.pyi). */
enum rp_part {
	OBJECTS, READY, STEP, GIVE_UP, TELL, RESET, REFUSE,
	SETATTR, DELATTR, POP, PARTS
};
PyObject *rp_soft_given(enum rp_part which);

/* A device has been opened: from now on, posts and polls run its pending work. */
void rp_soft_opened(void);

/* A part of what a handle stands for, as a new reference; NULL where there is none. */
PyObject *rp_soft_part(uint32_t handle, enum rp_name name);

/*
 * Make a call as one step that no signal handler cuts short. Returns the call's result or, if
 * the device failed, that of giving up; -1 if it had no memory for either, and nothing has
 * changed.
 */
long rp_soft_step(PyObject *call);

/* Have the device do the pending work of a handle's object; 0 or ENOMEM. */
int rp_soft_start(uint32_t handle);

#endif
