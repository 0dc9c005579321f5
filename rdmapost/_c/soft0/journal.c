/*
 * The soft device's journal: a verb's changes, until they are committed.
 *
 * It is three lists of calls, each a tuple of a callable and its arguments: `undo` reverts changes,
 * `later` does things that cannot be undone (copy bytes, write to a descriptor), and `last` makes
 * the new completions visible to polls. All calls are to C functions, so that no signal handler
 * runs in the middle. With no journal active, undo calls are not recorded, and the others are made
 * at once.
 */
#include "soft0/soft_device.h"

PyObject *rp_names[NAMES];

static PyObject *undo, *later, *last; /* `last` also has completion queues, for rp_show() */
static int active; /* for the thread that holds the device's lock */

int rp_is_journaled(void)
{
	return rp_soft_busy() && active;
}

PyObject *rp_call(PyObject *call)
{
	PyObject *callable = PyTuple_GetItem(call, 0), *args, *result = NULL;

	args = callable ? PyTuple_GetSlice(call, 1, PyTuple_Size(call)) : NULL;
	if (args)
		result = PyObject_CallObject(callable, args);
	Py_XDECREF(args);
	return result;
}

int rp_append(PyObject *queue, PyObject *item)
{
	PyObject *done = PyObject_CallMethodObjArgs(queue, rp_names[APPEND], item, NULL);

	if (!done)
		PyErr_Clear();
	Py_XDECREF(done);
	return done ? 0 : -1;
}

PyObject *rp_shift(PyObject *list)
{
	PyObject *first = NULL;

	rp_data_lock();
	if (PyList_Size(list) > 0) {
		first = Py_NewRef(PyList_GetItem(list, 0));
		PyList_SetSlice(list, 0, 1, NULL);
	}
	rp_data_unlock();
	return first;
}

/* This may release the last reference to any object, so nothing may be in progress. */
static void clear(PyObject *list)
{
	Py_ssize_t size = PyList_Size(list);

	if (size)
		PyList_SetSlice(list, 0, size, NULL);
}

/* Record a call, stealing the reference; 0, or -1 with an exception. */
static int note(PyObject *list, PyObject *call)
{
	int failed = !call || PyList_Append(list, call);

	Py_XDECREF(call);
	return failed ? -1 : 0;
}

int rp_note_undo(PyObject *call)
{
	return note(undo, call);
}

int rp_note_added(PyObject *cq)
{
	return PyList_Append(last, cq);
}

void rp_journal_begin(void)
{
	active = 1;
}

void rp_journal_forget(void)
{
	clear(last);
	clear(later);
	clear(undo);
}

static void make(PyObject *calls)
{
	for (Py_ssize_t i = 0; i < PyList_Size(calls); i++) {
		PyObject *call = PyList_GetItem(calls, i), *done;

		if (!PyTuple_Check(call)) {
			rp_show(call);
			continue;
		}
		done = rp_call(call);
		if (!done)
			PyErr_WriteUnraisable(call);
		Py_XDECREF(done);
	}
}

void rp_journal_commit(void)
{
	active = 0;
	make(later);
	make(last);
	rp_journal_forget();
}

void rp_journal_rollback(void)
{
	PyObject *type, *value, *trace;

	PyErr_Fetch(&type, &value, &trace);
	active = 0;
	for (Py_ssize_t i = PyList_Size(undo); i; i--) {
		PyObject *done = rp_call(PyList_GetItem(undo, i - 1));

		/* A change that was recorded but not made cannot be undone. */
		if (!done)
			PyErr_Clear();
		Py_XDECREF(done);
	}
	rp_journal_forget();
	PyErr_Restore(type, value, trace);
}

int rp_journaled_setattr(PyObject *self, PyObject *name, PyObject *value)
{
	PyObject *old;
	int failed;

	if (rp_is_journaled()) {
		old = PyObject_GenericGetAttr(self, name);
		if (!old && !PyErr_ExceptionMatches(PyExc_AttributeError))
			return -1;
		PyErr_Clear();
		failed = note(undo, old ? PyTuple_Pack(4, rp_soft_given(SETATTR), self, name, old) :
					  PyTuple_Pack(3, rp_soft_given(DELATTR), self, name));
		Py_XDECREF(old);
		if (failed)
			return -1;
	}
	return PyObject_GenericSetAttr(self, name, value);
}

/* An object whose attributes are journaled. */
static PyType_Slot record_slots[] = {
	{ Py_tp_setattro, rp_journaled_setattr },
	{ 0, NULL },
};

/* ---- functions for Python ------------------------------------------------ */

/* undo(callable, *args): record what undoes the next change; harmless if it is not made. */
static PyObject *journal_undo(PyObject *self, PyObject *call)
{
	(void)self;
	if (rp_is_journaled() && note(undo, Py_NewRef(call)))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *on_commit(PyObject *self, PyObject *call)
{
	(void)self;
	if (!rp_is_journaled())
		return rp_call(call);
	if (note(later, Py_NewRef(call)))
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *at_the_end(PyObject *self, PyObject *call)
{
	(void)self;
	if (!rp_is_journaled())
		return rp_call(call);
	if (note(last, Py_NewRef(call)))
		return NULL;
	Py_RETURN_NONE;
}

/* Record that back(argument) undoes the call that returned `result`; if that fails, undo now. */
static PyObject *noted(PyObject *result, PyObject *back, PyObject *argument)
{
	if (result && rp_is_journaled() && note(undo, PyTuple_Pack(2, back, argument))) {
		PyErr_Clear();
		Py_XDECREF(PyObject_CallFunctionObjArgs(back, argument, NULL));
		Py_CLEAR(result);
		PyErr_NoMemory();
	}
	return result;
}

/* made(undo, callable, *args): call callable; undo(result) reverts that. */
static PyObject *made(PyObject *self, PyObject *args)
{
	PyObject *call = PyTuple_GetSlice(args, 1, PyTuple_Size(args)), *result;

	(void)self;
	result = call ? rp_call(call) : NULL;
	Py_XDECREF(call);
	return noted(result, PyTuple_GetItem(args, 0), result);
}

/* put(deque, item): append it; no other code removes from this deque. */
static PyObject *put(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	(void)self;
	if (nargs != 2)
		return PyErr_Format(PyExc_TypeError, "put(deque, item)");
	return noted(PyObject_CallMethodObjArgs(args[0], rp_names[APPEND], args[1], NULL),
		     rp_soft_given(POP), args[0]);
}

/* take(deque): remove and return its first item. */
static PyObject *take(PyObject *self, PyObject *deque)
{
	PyObject *item, *back = PyObject_GetAttr(deque, rp_names[APPENDLEFT]);

	(void)self;
	rp_data_lock();
	item = back ? PyObject_CallMethodObjArgs(deque, rp_names[POPLEFT], NULL) : NULL;
	item = noted(item, back, item);
	rp_data_unlock();
	Py_XDECREF(back);
	return item;
}

/* forget(entries, queue): drop a work queue's completions; for on_commit. */
static PyObject *forget(PyObject *self, PyObject *args)
{
	PyObject *entries, *queue, *entry = Py_None;

	(void)self;
	if (!PyArg_ParseTuple(args, "OO", &entries, &queue))
		return NULL;
	rp_data_lock();
	for (Py_ssize_t left = PyObject_Size(entries); entry && left > 0; left--) {
		entry = PyObject_CallMethodObjArgs(entries, rp_names[POPLEFT], NULL);
		if (entry && PyTuple_GetItem(entry, 1) != queue)
			rp_append(entries, entry);
		Py_XDECREF(entry);
	}
	rp_data_unlock();
	return entry ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef functions[] = {
	{ "undo", journal_undo, METH_VARARGS, NULL },
	{ "on_commit", on_commit, METH_VARARGS, NULL },
	{ "at_the_end", at_the_end, METH_VARARGS, NULL },
	{ "made", made, METH_VARARGS, NULL },
	RP_METHOD(put),
	{ "take", take, METH_O, NULL },
	{ "forget", forget, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_journal(PyObject *module)
{
	static const char *const names[NAMES] = { "sq", "rq", "queue", "ops",
						  "append", "appendleft", "popleft",
						  "pop", "depth" };

	for (int i = 0; i < NAMES; i++) {
		rp_names[i] = PyUnicode_InternFromString(names[i]);
		if (!rp_names[i])
			return -1;
	}
	undo = PyList_New(0);
	later = PyList_New(0);
	last = PyList_New(0);
	return !undo || !later || !last ||
	       rp_add_type(module, "rdmapost._verbs.Record", sizeof(PyObject), Py_TPFLAGS_BASETYPE,
			   record_slots, NULL) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
