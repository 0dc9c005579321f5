/* Raising exceptions, and saving those that signal handlers raise where they cannot propagate. */
#ifndef RDMAPOST_EXCEPTIONS_H
#define RDMAPOST_EXCEPTIONS_H

#include "base.h"

/*
 * The exceptions that the C code itself raises, from rdmapost/errors.py; describe_handles()
 * (handle_type.c) stores them.
 */
RP_SHARED struct rp_errors {
	PyObject *closed; /* ClosedError */
	PyObject *error; /* RdmaError */
	PyObject *in_use; /* InUseError */
	PyObject *verbs; /* VerbsError */
	PyObject *wait_cancelled; /* WaitCancelled */
} rp_errors;

/* A saved exception. */
struct rp_error {
	PyObject *type, *value, *trace;
};

static inline struct rp_error rp_save_error(void)
{
	struct rp_error error;

	PyErr_Fetch(&error.type, &error.value, &error.trace);
	return error;
}

static inline void rp_restore_error(struct rp_error error)
{
	PyErr_Restore(error.type, error.value, error.trace);
}

/* How many times to try a call that must complete even if a signal handler raises during it. */
enum { MAX_INTERRUPTS = 16 };

/* Raise ClosedError after a fork in the middle of a verb. */
void rp_raise_forked(void);

/* Raise VerbsError; returns NULL. */
PyObject *rp_raise_verbs(const char *verb, int code);

/* Clear the current exception and return it, with its traceback; NULL if none is set. */
PyObject *rp_take_exception(void);

/* Raise an exception, with the one already set as its context; steals the reference. */
void rp_raise(PyObject *exception);

/* Whether an exception was raised for lack of memory or stack. */
int rp_lacks_room(PyObject *exception);

/*
 * rp_raise_later() saves a signal handler's exception that cannot propagate, and steals the
 * reference; after rp_deliver_soon(), the exception is raised once this thread has left C code.
 */
void rp_raise_later(PyObject *exception);
/* Pass the current exception to rp_raise_later(), or clear it if memory or stack ran out. */
void rp_handler_raised(void);
void rp_deliver_soon(void);
/* While this equals rp_process, rp_deliver_soon() does nothing. Call it after clearing this. */
RP_SHARED unsigned int rp_delivery_waits;
/*
 * Like rp_deliver_soon(), but for a caller that can raise: in the main thread, also removes and
 * returns the first saved exception. Returns NULL if there is none, or in another thread.
 */
PyObject *rp_deliver(void);

#endif
