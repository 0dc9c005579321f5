/* Raising exceptions, and saving those that signal handlers raise where they cannot propagate. */
#include "handles/exceptions.h"

#include <unistd.h>

#include "handles/data_lock.h"
#include "parts.h"

struct rp_errors rp_errors;

static PyObject *raised; /* a list of handlers' exceptions, for the main thread */
static PyObject *unlisted; /* one that could not be listed for lack of memory, or NULL */

static int forking_in_main;
static int inherited; /* another thread has forked: these are for the parent's main thread */

static void before_fork(void)
{
	forking_in_main = gettid() == getpid();
}

static void after_fork(void)
{
	inherited |= !forking_in_main;
}

static void drop_inherited(void)
{
	if (!inherited)
		return;
	/* What is dropped may have a finalizer, which may raise. */
	inherited = 0;
	if (PyList_SetSlice(raised, 0, PyList_Size(raised), NULL)) {
		PyErr_Clear();
		inherited = 1;
	}
	Py_CLEAR(unlisted);
}

static int has_raised(void)
{
	drop_inherited();
	return unlisted || PyList_Size(raised) > 0;
}

PyObject *rp_take_exception(void)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	PyErr_NormalizeException(&type, &value, &trace);
	if (value && trace)
		PyException_SetTraceback(value, trace);
	Py_XDECREF(type);
	Py_XDECREF(trace);
	return value;
}

void rp_raise(PyObject *exception)
{
	PyObject *before = rp_take_exception();

	/* This sets the context to the exception being handled; `before`, if set, replaces that. */
	PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
	if (before)
		PyException_SetContext(exception, before);
	Py_DECREF(exception);
}

int rp_lacks_room(PyObject *exception)
{
	/* CPython 3.11 raises SystemError when it cannot allocate a frame. */
	return PyErr_GivenExceptionMatches(exception, PyExc_RecursionError) ||
	       PyErr_GivenExceptionMatches(exception, PyExc_MemoryError) ||
	       PyErr_GivenExceptionMatches(exception, PyExc_SystemError);
}

void rp_raise_forked(void)
{
	PyErr_SetString(rp_errors.closed,
			"the process was forked in the middle of a verb; open the device again");
}

PyObject *rp_raise_verbs(const char *verb, int code)
{
	PyObject *error = PyObject_CallFunction(rp_errors.verbs, "si", verb, code);

	if (error)
		PyErr_SetObject(rp_errors.verbs, error);
	Py_XDECREF(error);
	return NULL;
}

/* ---- signal handlers' exceptions ----------------------------------------- */

/* Remove and return the first exception; NULL if none is left or the list cannot be shrunk. */
static PyObject *shift(void)
{
	PyObject *first = NULL;

	drop_inherited();
	rp_data_lock();
	if (PyList_Size(raised) > 0) {
		first = Py_NewRef(PyList_GetItem(raised, 0));
		/* Shrinking a list can take memory; on failure the list is unchanged. */
		if (PyList_SetSlice(raised, 0, 1, NULL)) {
			PyErr_Clear();
			Py_CLEAR(first);
		}
	} else {
		first = unlisted;
		unlisted = NULL;
	}
	rp_data_unlock();
	return first;
}

static int deliver(void *unused)
{
	PyObject *first = shift();

	(void)unused;
	if (!first)
		return 0;
	if (has_raised())
		Py_AddPendingCall(deliver, NULL);
	PyErr_SetObject((PyObject *)Py_TYPE(first), first);
	Py_DECREF(first);
	return -1;
}

void rp_raise_later(PyObject *exception)
{
	int waits = 0;

	if (!exception)
		return;
	drop_inherited();
	rp_data_lock();
	/* If a handler raises every time, keep only its first exception. */
	for (Py_ssize_t i = 0; i < PyList_Size(raised); i++)
		waits |= Py_TYPE(PyList_GetItem(raised, i)) == Py_TYPE(exception);
	if (gettid() != getpid())
		/* PyThreadState_SetAsyncExc raised it; raise it again the same way. */
		PyThreadState_SetAsyncExc(PyThread_get_thread_ident(),
					  (PyObject *)Py_TYPE(exception));
	else if (!waits && PyList_Append(raised, exception)) {
		PyErr_Clear();
		if (!unlisted)
			unlisted = Py_NewRef(exception);
	}
	rp_data_unlock();
	Py_DECREF(exception);
}

void rp_handler_raised(void)
{
	if (rp_lacks_room(PyErr_Occurred()))
		PyErr_Clear();
	else
		rp_raise_later(rp_take_exception());
}

unsigned int rp_delivery_waits;

void rp_deliver_soon(void)
{
	/* If the queue of pending calls is full, retry when the next verb ends. */
	if (has_raised() && RP_LOAD(&rp_delivery_waits) != rp_process)
		Py_AddPendingCall(deliver, NULL);
}

PyObject *rp_deliver(void)
{
	PyObject *first;

	if (!has_raised())
		return NULL;
	first = gettid() == getpid() ? shift() : NULL;
	rp_deliver_soon();
	return first;
}

int rp_add_exceptions(void)
{
	raised = PyList_New(0); /* never released */
	return raised && !pthread_atfork(before_fork, NULL, after_fork) ? 0 : -1;
}
