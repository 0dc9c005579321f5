/*
 * The soft device's journal: a verb's changes, until they are committed.
 *
 * It consists of five lists of calls; a call is a tuple of a callable and its tuple of arguments.
 * `undo` reverts changes; `first` and then `once` write to memory that may be unmapped; `later`
 * does things that cannot be undone (copy bytes, write to a descriptor); `last` makes the new
 * completions visible to polls. All calls are to C functions, so that no signal handler runs in the
 * middle. While no journal is active, undo calls are not recorded, and the others are made at once.
 *
 * A call in `first` or `once` may fail. As these come before `later` and `last`, the changes can
 * still be undone, and the verb repeated: no completion has said that the bytes arrived. Writes
 * that must not be repeated, such as that of an atomic operation's result, are in `once`, after the
 * writes that may be.
 *
 * The complete call that undoes a change is recorded before the change is made, because a rollback
 * is often due to a lack of memory. Memory is reserved for the calls of a commit or a rollback,
 * because these cannot be abandoned halfway.
 */
#include "software/device_queues.h"

PyObject *rp_names[NAMES];
uint64_t rp_soft_changes;

/* LAST also contains completion queues, for rp_show_entries(). */
enum { UNDO, FIRST, ONCE, LATER, LAST, LISTS };
static PyObject *lists[LISTS];
static int active; /* for the thread that holds the device's lock */
static void *reserve; /* memory for calls that must succeed, or NULL */
enum { RESERVE = 1 << 15 };

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

/* Return whether to repeat a call that must succeed but ran out of memory; if so, free a reserve. */
static int try_again(int *tries)
{
	if (!PyErr_ExceptionMatches(PyExc_MemoryError) || ++*tries >= MAX_INTERRUPTS)
		return 0;
	PyErr_Clear();
	PyMem_Free(reserve);
	reserve = NULL;
	return 1;
}

int rp_append(PyObject *queue, PyObject *item)
{
	PyObject *done;
	int tries = 0;

	do
		done = PyObject_CallMethodObjArgs(queue, rp_names[APPEND], item, NULL);
	while (!done && try_again(&tries));
	if (!done)
		PyErr_Clear();
	Py_XDECREF(done);
	return done ? 0 : -1;
}

void rp_clear(PyObject *list)
{
	/* Deleting the whole list needs no memory; releasing its items may append to the list. */
	while (PyList_Size(list))
		PyList_SetSlice(list, 0, PY_SSIZE_T_MAX, NULL);
}

/* Record a call, stealing the reference to its arguments; 0, or -1 with an exception. */
static int note(PyObject *list, PyObject *callable, PyObject *args)
{
	PyObject *record = args ? PyTuple_Pack(2, callable, args) : NULL;
	int failed = !record || PyList_Append(list, record);

	Py_XDECREF(record);
	Py_XDECREF(args);
	return failed ? -1 : 0;
}

/* Record a call that is a tuple of a callable and its arguments; 0, or -1 with an exception. */
static int note_call(PyObject *list, PyObject *call)
{
	PyObject *callable = PyTuple_GetItem(call, 0);

	return callable ? note(list, callable, PyTuple_GetSlice(call, 1, PyTuple_Size(call))) : -1;
}

/*
 * Make a recorded call. Its `args` is a tuple or, if the argument was set after the call was
 * recorded, a list with that one item.
 */
static PyObject *make_recorded(PyObject *record)
{
	PyObject *callable = PyTuple_GetItem(record, 0), *args = PyTuple_GetItem(record, 1), *done;
	int tries = 0, one = PyList_CheckExact(args);
	PyObject *argument = one ? PyList_GetItem(args, 0) : NULL;

	/* Anyone can find the list through the garbage collector, and empty it. */
	if (one && !argument)
		return NULL;
	do
		done = one ? PyObject_CallFunctionObjArgs(callable, argument, NULL) :
			     PyObject_Call(callable, args, NULL);
	while (!done && try_again(&tries));
	return done;
}

int rp_note_undo(PyObject *callable, PyObject *argument)
{
	return rp_is_journaled() ? note(lists[UNDO], callable, PyTuple_Pack(1, argument)) : 0;
}

/*
 * Record a call whose argument set_argument() sets later, at *at in the list; 0, or -1 with an
 * exception.
 */
static int note_undo_of_result(PyObject *callable, Py_ssize_t *at)
{
	PyObject *args;

	if (!callable)
		return -1;
	*at = PyList_Size(lists[UNDO]);
	if (!rp_is_journaled())
		return 0;
	args = PyList_New(0);
	if (args && PyList_Append(args, Py_None))
		Py_CLEAR(args);
	return note(lists[UNDO], callable, args);
}

/* Drop the undo call at `at`: the change was not made. */
static void note_unchanged(Py_ssize_t at)
{
	if (rp_is_journaled())
		PyList_SetItem(lists[UNDO], at, Py_NewRef(Py_None));
}

void rp_note_unchanged(void)
{
	note_unchanged(PyList_Size(lists[UNDO]) - 1);
}

/*
 * Set the argument of the undo call at `at`, now that it is known; NULL: the change was not made.
 * It need not be the last call: the change itself may have recorded others.
 */
static void set_argument(Py_ssize_t at, PyObject *argument)
{
	PyObject *record;

	if (!argument)
		note_unchanged(at);
	if (!argument || !rp_is_journaled())
		return;
	record = PyList_GetItem(lists[UNDO], at);
	PyList_SetItem(PyTuple_GetItem(record, 1), 0, Py_NewRef(argument));
}

int rp_note_added(PyObject *cq)
{
	return PyList_Append(lists[LAST], cq);
}

void rp_journal_begin(void)
{
	if (!reserve)
		reserve = PyMem_Malloc(RESERVE);
	active = 1;
}

void rp_journal_forget(void)
{
	for (int i = LISTS; i; i--)
		rp_clear(lists[i - 1]);
}

static void make(PyObject *calls)
{
	for (Py_ssize_t i = 0; i < PyList_Size(calls); i++) {
		PyObject *call = PyList_GetItem(calls, i), *done;

		if (!PyTuple_Check(call)) {
			rp_show_entries(QUEUE(call));
			continue;
		}
		done = make_recorded(call);
		if (!done)
			PyErr_WriteUnraisable(PyTuple_GetItem(call, 0));
		Py_XDECREF(done);
	}
}

/* Make calls that may fail, until one does; returns how many succeeded. */
static Py_ssize_t try_calls(PyObject *calls)
{
	Py_ssize_t made;

	for (made = 0; made < PyList_Size(calls); made++) {
		PyObject *done = make_recorded(PyList_GetItem(calls, made));

		if (!done)
			break;
		Py_DECREF(done);
	}
	return made;
}

int rp_journal_commit(void)
{
	Py_ssize_t made = 0;

	active = 0;
	if (try_calls(lists[FIRST]) < PyList_Size(lists[FIRST]) ||
	    (made = try_calls(lists[ONCE])) < PyList_Size(lists[ONCE]))
		return made ? -2 : -1;
	make(lists[LATER]);
	make(lists[LAST]);
	rp_journal_forget();
	return 0;
}

void rp_journal_rollback(void)
{
	struct rp_error error = rp_save_error();

	active = 0;
	RP_ADD(&rp_soft_changes, 1);
	for (Py_ssize_t i = PyList_Size(lists[UNDO]); i; i--) {
		PyObject *record = PyList_GetItem(lists[UNDO], i - 1), *done;

		if (record == Py_None)
			continue;
		done = make_recorded(record);
		/* If a change was recorded but not made, undoing it fails. */
		if (!done)
			PyErr_Clear();
		Py_XDECREF(done);
	}
	rp_journal_forget();
	rp_restore_error(error);
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
		failed = old ? note(lists[UNDO], rp_soft_given(SETATTR),
				    PyTuple_Pack(3, self, name, old)) :
			       note(lists[UNDO], rp_soft_given(DELATTR),
				    PyTuple_Pack(2, self, name));
		Py_XDECREF(old);
		if (failed)
			return -1;
	}
	return PyObject_GenericSetAttr(self, name, value);
}

static int record_setattr(PyObject *self, PyObject *name, PyObject *value)
{
	RP_ADD(&rp_soft_changes, 1);
	return rp_journaled_setattr(self, name, value);
}

/* An object whose attributes are journaled. */
static PyType_Slot record_slots[] = {
	{ Py_tp_setattro, record_setattr },
	{ 0, NULL },
};

/* ---- functions for Python ------------------------------------------------ */

/*
 * undo(callable, *args): record a call that undoes the next change. The call must be harmless if
 * that change is not made.
 */
static PyObject *note_undo_call(PyObject *self, PyObject *call)
{
	(void)self;
	RP_ADD(&rp_soft_changes, 1);
	if (rp_is_journaled() && note_call(lists[UNDO], call))
		return NULL;
	Py_RETURN_NONE;
}

/* Each of the other functions makes the call when its list's turn comes (rp_journal_commit()). */
static PyObject *note_or_make(PyObject *number, PyObject *call)
{
	PyObject *calls = lists[PyLong_AsLong(number)];

	if (!rp_is_journaled())
		return rp_call(call);
	if (note_call(calls, call))
		return NULL;
	Py_RETURN_NONE;
}

/* The functions that record a call; the number of the list to which each adds is its `self`. */
static PyMethodDef recorders[LISTS] = {
	[UNDO] = { "undo", note_undo_call, METH_VARARGS, NULL },
	[FIRST] = { "try_on_commit", note_or_make, METH_VARARGS, NULL },
	[ONCE] = { "try_once_on_commit", note_or_make, METH_VARARGS, NULL },
	[LATER] = { "on_commit", note_or_make, METH_VARARGS, NULL },
	[LAST] = { "at_the_end", note_or_make, METH_VARARGS, NULL },
};

/* made(undo, callable, *args): call callable; undo(result) reverts the call. */
static PyObject *made(PyObject *self, PyObject *args)
{
	PyObject *call = PyTuple_GetSlice(args, 1, PyTuple_Size(args)), *result = NULL;
	Py_ssize_t at;

	(void)self;
	if (call && !note_undo_of_result(PyTuple_GetItem(args, 0), &at)) {
		result = rp_call(call);
		set_argument(at, result);
	}
	Py_XDECREF(call);
	return result;
}

/* put(deque, item): append the item to a deque from which no other code removes items. */
static PyObject *put(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	PyObject *result;

	(void)self;
	if (nargs != 2)
		return PyErr_Format(PyExc_TypeError, "put(deque, item)");
	if (rp_note_undo(rp_soft_given(POP), args[0]))
		return NULL;
	result = PyObject_CallMethodObjArgs(args[0], rp_names[APPEND], args[1], NULL);
	if (!result)
		rp_note_unchanged();
	return result;
}

/* take(deque): remove and return its first item. */
static PyObject *take(PyObject *self, PyObject *deque)
{
	PyObject *item = NULL, *back = PyObject_GetAttr(deque, rp_names[APPENDLEFT]);
	Py_ssize_t at;

	(void)self;
	rp_data_lock();
	if (back && !note_undo_of_result(back, &at)) {
		item = PyObject_CallMethodObjArgs(deque, rp_names[POPLEFT], NULL);
		set_argument(at, item);
	}
	rp_data_unlock();
	Py_XDECREF(back);
	return item;
}

/* set_item(dict, key, value): dict.__setitem__(dict, key, value) without a tuple of arguments. */
static PyObject *set_item(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
	(void)self;
	if (nargs != 3)
		return PyErr_Format(PyExc_TypeError, "set_item(dict, key, value)");
	return PyDict_SetItem(args[0], args[1], args[2]) ? NULL : Py_NewRef(Py_None);
}

/* discard(dict, key): remove the key, if present; for on_commit. */
static PyObject *discard(PyObject *self, PyObject *args)
{
	PyObject *dict, *key;
	int found;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!O", &PyDict_Type, &dict, &key))
		return NULL;
	RP_ADD(&rp_soft_changes, 1);
	/* Ask first: a commit cannot be abandoned, and a KeyError needs memory. */
	found = PyDict_Contains(dict, key);
	if (found < 0 || (found && PyDict_DelItem(dict, key)))
		return NULL;
	Py_RETURN_NONE;
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
		if (entry && !(PyTuple_Check(entry) && PyTuple_Size(entry) > 1 &&
			       PyTuple_GetItem(entry, 1) == queue))
			rp_append(entries, entry);
		Py_XDECREF(entry);
	}
	rp_data_unlock();
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
	{ "made", made, METH_VARARGS, NULL },
	RP_METHOD(put),
	RP_METHOD(set_item),
	{ "take", take, METH_O, NULL },
	{ "discard", discard, METH_VARARGS, NULL },
	{ "forget", forget, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_soft_journal(PyObject *module)
{
	static const char *const names[NAMES] = { "sq", "rq", "queue", "ops", "append",
						  "appendleft", "popleft", "pop", "depth",
						  "timer_fd", "addr", "access", "pd",
						  "valid", "unsure", "memory", "lkey", "rkey" };

	for (int i = 0; i < NAMES; i++) {
		rp_names[i] = PyUnicode_InternFromString(names[i]);
		if (!rp_names[i])
			return -1;
	}
	for (int i = 0; i < LISTS; i++) {
		PyObject *number = PyLong_FromLong(i), *recorder = NULL;

		lists[i] = PyList_New(0);
		if (lists[i] && number)
			recorder = PyCFunction_New(&recorders[i], number);
		if (!recorder || PyModule_AddObjectRef(module, recorders[i].ml_name, recorder))
			return -1;
		/* No one can find the list through the garbage collector. */
		PyObject_GC_UnTrack(lists[i]);
		Py_DECREF(recorder);
		Py_DECREF(number);
	}
	return rp_add_type(module, "rdmapost._verbs.Record", sizeof(PyObject), Py_TPFLAGS_BASETYPE,
			   record_slots, NULL) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
