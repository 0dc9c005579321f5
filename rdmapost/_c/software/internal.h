/*
 * What the soft device's C files share: its parts, the journal and transactions.
 *
 * The device is written in Python (rdmapost/providers/software/), where a signal handler may
 * raise between any two bytecodes. So the call that undoes a change to the device's state is
 * journaled before the change is made, and actions that cannot be undone are deferred. Then C code,
 * in which no handler runs, makes either the undo calls or the deferred ones (software/journal.c).
 *
 * A verb holds the device's lock from start to finish; everything below is used under it.
 */
#ifndef RDMAPOST_SOFTWARE_INTERNAL_H
#define RDMAPOST_SOFTWARE_INTERNAL_H

#include "handles/data_lock.h"
#include "handles/close.h"
#include "handles/exceptions.h"
#include "handles/queue_lock.h"
#include "parts.h"

#include "software/soft_device.h"

/* ---- software/device.c ---------------------------------------------------- */

/* The parts of the device, from rdmapost/providers/software/state.py (rdmapost/_verbs.pyi). */
enum rp_part {
	OBJECTS, DEVICES, READY, WIRES, EXECUTE, GIVE_UP, LOG, RESET, REFUSE,
	SETATTR, DELATTR, POP, PARTS
};
PyObject *rp_soft_given(enum rp_part which);

/* It is also held while Python runs, so check rp_soft_busy() before acquiring it. */
RP_SHARED struct rp_lock rp_device_lock;
/* Whether this thread is in the middle of a soft device verb. */
int rp_soft_busy(void);

/* ---- software/journal.c --------------------------------------------------- */

/* The names of attributes and methods that C looks up. */
enum rp_name {
	SQ, RQ, SRQ_QUEUE, OPS, APPEND, APPENDLEFT, POPLEFT, POP_LAST, DEPTH, TIMER_FD,
	/* A region's: */
	ADDR, ACCESS, PD, VALID, UNSURE, MEMORY, LKEY, RKEY, NAMES
};
RP_SHARED PyObject *rp_names[NAMES];

/* Make a call, which is a tuple of a callable and its arguments; NULL if it raised. */
PyObject *rp_call(PyObject *call);
/* Append an item to a list or a deque; 0, or -1 without an exception. */
int rp_append(PyObject *queue, PyObject *item);
/*
 * Remove all of a list's items without allocating memory. This may release the last reference to
 * any object, so no transaction may be in progress.
 */
void rp_clear(PyObject *list);

/*
 * Begin to journal changes; commit them; roll them back, preserving the current exception. A commit
 * fails with an exception if memory cannot be written; then the caller rolls back. It returns 0 or,
 * on failure, -1, or -2 if it has written data that must not be written twice.
 */
void rp_journal_begin(void);
int rp_journal_commit(void);
void rp_journal_rollback(void);
/* Discard the journal, as after a fork. */
void rp_journal_forget(void);

/* Whether this thread's changes are journaled. */
int rp_is_journaled(void);
/*
 * rp_note_undo(), called before a change is made, journals that callable(argument) undoes it; it
 * returns 0, or -1 with an exception. rp_note_unchanged() records that the change was not made.
 */
int rp_note_undo(PyObject *callable, PyObject *argument);
void rp_note_unchanged(void);
/*
 * Journal a CQ, so that a commit makes its new entries visible to polls; 0, or -1 with an
 * exception.
 */
int rp_note_added(PyObject *cq);

/* The tp_setattro of types whose attributes are journaled. */
int rp_journaled_setattr(PyObject *self, PyObject *name, PyObject *value);

/*
 * Counts the changes of Records and JournaledDicts, so that C knows whether what it has read from
 * them is still valid.
 */
RP_SHARED uint64_t rp_soft_changes;

/* ---- software/mapped_memory.c --------------------------------------------- */

/*
 * Copy from memory that may be unmapped, or part of a truncated file; 0 or an errno: EFAULT or, in
 * a sandbox, that of pipe2().
 */
int rp_soft_read(char *to, uint64_t addr, uint64_t length);
/* How many ranges are refused individually; if more writes fail, all memory is refused. */
enum { RP_MAX_REFUSED = 8 };
/* Begin a transaction: no write has failed yet. */
void rp_soft_allow_writes(void);
/*
 * Until the end of the transaction, refuse writes to all memory of this kind, not only where a
 * write has failed.
 */
void rp_soft_refuse_writes(void);

/* ---- software/faults.c ---------------------------------------------------- */

/*
 * Count a send. Returns the errno injected for it, or 0. `faults` may be NULL. The caller holds the
 * data lock.
 */
int rp_take_fault(PyObject *faults);

/* ---- software/fast_path.c ------------------------------------------------- */

/*
 * Execute an object's work requests as long as they are common ones that succeed; 0 if none are
 * left, 1 if Python must look.
 */
int rp_soft_run_fast(PyObject *object);

/* ---- software/transaction.c: what runs under the lock --------------------- */

/*
 * Execute posted work and due retries; inside a verb, leave both until it ends. Posts and polls call
 * it once a device has been opened (rp_progress in handles/handle.h).
 */
PyObject *rp_soft_progress(void);

/*
 * Return a new reference to an attribute of the object with this handle or, if `name` is NAMES, to
 * the object itself, or NULL without an exception.
 */
PyObject *rp_soft_part(uint32_t handle, enum rp_name name);

/*
 * Make a call as one transaction, which completes even if a signal handler raises. Returns the
 * call's result or, if the device failed, the result of completing the work request with an error.
 * If there was no memory for either, returns -1, with nothing changed.
 */
long rp_soft_transact(PyObject *call);

/* Schedule the pending work of the object with this handle; 0 or ENOMEM. */
int rp_soft_start(uint32_t handle);

#endif
