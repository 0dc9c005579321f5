/* The type of handles (handle.h). */
#include "handles/internal.h"

#include <structmember.h>

#include "attribute_offsets.h"

/* ---- using ---------------------------------------------------------------- */

/* _verb(function, *args): call function with this handle's struct and args. */
static PyObject *handle_verb(PyObject *self, PyObject *args)
{
	struct rp_use uses[MAX_ARGS];
	PyObject *function, *result;
	int used;

	function = PyTuple_GetItem(args, 0);
	if (!function)
		return NULL;
	result = rp_call_with_structs(function, self, args, uses, &used);
	rp_end_uses(uses, used);
	return result;
}

/* Return a new reference to a handle's struct, or NULL (no exception) if closed. */
static PyObject *struct_of(PyObject *self)
{
	struct rp_handle *h = (struct rp_handle *)self;
	PyObject *cdata;

	if (!rp_enter(h, 1))
		return NULL;
	cdata = Py_NewRef(h->cdata);
	rp_leave(h, 1);
	return cdata;
}

/* _open_struct(): return the struct, or raise ClosedError. */
static PyObject *open_struct(PyObject *self, PyObject *unused)
{
	PyObject *cdata = struct_of(self);

	(void)unused;
	if (!cdata)
		rp_raise_closed((struct rp_handle *)self);
	return cdata;
}

/* The struct, or None if closed. */
static PyObject *get_struct(PyObject *self, void *unused)
{
	PyObject *cdata = struct_of(self);

	(void)unused;
	return cdata ? cdata : Py_NewRef(Py_None);
}

/*
 * _peek(name): return an attribute of the struct, or None if closed; formats no message, so __str__
 * may use it.
 */
static PyObject *handle_peek(PyObject *self, PyObject *name)
{
	struct rp_handle *h = (struct rp_handle *)self;
	struct rp_use use;
	PyObject *value;

	if (rp_begin_use(h, &use))
		return Py_NewRef(Py_None);
	value = PyObject_GetAttr(h->cdata, name);
	rp_end_use(&use);
	return value;
}

static PyObject *get_closed(PyObject *self, void *unused)
{
	struct rp_handle *h = (struct rp_handle *)self;

	(void)unused;
	return PyBool_FromLong(h->process != rp_process || state_of(h) != OPEN);
}

static uintptr_t maker_of(PyObject *self)
{
	return __atomic_load_n(&((struct rp_handle *)self)->maker, __ATOMIC_SEQ_CST);
}

static PyObject *get_unfinished(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(maker_of(self) != 0);
}

/* Whether this thread is in the handle's constructor, or no constructor has begun. */
static PyObject *get_making(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(maker_of(self) == this_thread() ||
			       state_of((struct rp_handle *)self) == NEW);
}

static PyObject *get_parents(PyObject *self, void *unused)
{
	/* A region has parents even while it is re-registered: the device still has the region. */
	PyObject *parents = rp_get_now(self, &((struct rp_handle *)self)->parents);

	(void)unused;
	return parents ? parents : PyTuple_New(0);
}

/* A memory region's key, which stays readable after a close; `at` is the member's offset. */
static PyObject *get_key(PyObject *self, void *at)
{
	const uint32_t *key = (const void *)((const char *)self + (size_t)at);

	if (state_of((struct rp_handle *)self) >= OPEN)
		return PyLong_FromUnsignedLong(RP_LOAD(key));
	PyErr_SetString(PyExc_AttributeError, "it has no keys yet");
	return NULL;
}

/* A memory region's form, or the one that it replaced; `at` is the member's offset. */
static PyObject *get_form(PyObject *self, void *at)
{
	PyObject *form = rp_get_now(self, (const void *)((const char *)self + (size_t)at));

	return form ? form : Py_NewRef(Py_None);
}

/* ---- the type ------------------------------------------------------------- */

/* The default implementation of the hooks. */
static PyObject *do_nothing(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	Py_RETURN_NONE;
}

static PyObject *handle_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static uint64_t serials;
	struct rp_handle *h = (struct rp_handle *)PyType_GenericAlloc(type, 0);

	(void)args;
	(void)kwargs;
	if (h) {
		h->serial = RP_ADD(&serials, 1);
		h->word = RP_SHUT;
	}
	return (PyObject *)h;
}

static int handle_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct rp_handle *h = (struct rp_handle *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(h->cdata);
	Py_VISIT(h->destroy);
	Py_VISIT(h->parents);
	Py_VISIT(h->keeps);
	Py_VISIT(h->queues);
	Py_VISIT(h->form);
	Py_VISIT(h->replaced);
	for (struct rp_bound *b = h->bound; b; b = b->next)
		Py_VISIT((PyObject *)b->mr);
	return 0;
}

static void handle_dealloc(PyObject *self)
{
	struct rp_handle *h = (struct rp_handle *)self;

	PyObject_GC_UnTrack(self);
	if (state_of(h) == OPEN)
		rp_unlist(h);
	/*
	 * A handle that is still open here means that the interpreter is exiting while the
	 * device still uses the struct, so the objects that the struct depends on must stay.
	 */
	if (state_of(h) != OPEN || h->process != rp_process) {
		Py_XDECREF(h->cdata);
		Py_XDECREF(h->destroy);
		Py_XDECREF(h->parents);
		Py_XDECREF(h->keeps);
		Py_XDECREF(h->queues);
		Py_XDECREF(h->form);
		Py_XDECREF(h->replaced);
		rp_unbind(h->bound);
		rp_drop_binder(h->binder);
	}
	rp_free(self);
}

static PyMethodDef handle_methods[] = {
	{ "_make", (PyCFunction)(void (*)(void))rp_make_handle, METH_VARARGS | METH_KEYWORDS, NULL },
	{ "_begin_making", rp_begin_making, METH_NOARGS, NULL },
	{ "_construct", rp_construct, METH_VARARGS, NULL },
	{ "_undo_making", rp_undo_making, METH_O, NULL },
	{ "_verb", handle_verb, METH_VARARGS, NULL },
	{ "_peek", handle_peek, METH_O, NULL },
	{ "_remake", rp_remake_handle, METH_VARARGS, NULL },
	{ "_unbind_invalidated", rp_unbind_invalidated, METH_NOARGS, NULL },
	{ "_open_struct", open_struct, METH_NOARGS, "Return the struct, or raise ClosedError." },
	{ "close", rp_close_handle, METH_NOARGS,
	  "close($self, /)\n--\n\nRelease the resource.  Calling it again does nothing.\n\n"
	  "It waits for other threads' verbs and for a concurrent close() of the same resource;\n"
	  "if waiting could deadlock with that close(), it returns at once and the other thread\n"
	  "finishes the job.  In the middle of one of this thread's verbs (in a signal handler\n"
	  "or a finalizer) it returns at once, and the resource is closed when the verb ends.\n"
	  "In the child of a fork it does nothing.  If it was interrupted, call it again.\n\n"
	  "Raises:\n"
	  "    InUseError: other open resources depend on it; it stays open.\n"
	  "    VerbsError: the device refused; it stays open.\n" },
	{ "_wake", do_nothing, METH_NOARGS, NULL },
	{ "_release", do_nothing, METH_NOARGS, NULL },
	{ "_forget", do_nothing, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef handle_getset[] = {
	{ "_handle", get_struct, NULL, NULL, NULL },
	{ "_parents", get_parents, NULL, NULL, NULL },
	{ "_lkey", get_key, NULL, NULL, (void *)offsetof(struct rp_handle, lkey) },
	{ "_rkey", get_key, NULL, NULL, (void *)offsetof(struct rp_handle, rkey) },
	{ "_form", get_form, NULL, NULL, (void *)offsetof(struct rp_handle, form) },
	{ "_replaced", get_form, NULL, NULL, (void *)offsetof(struct rp_handle, replaced) },
	{ "_unfinished", get_unfinished, NULL, NULL, NULL },
	{ "_making", get_making, NULL, NULL, NULL },
	{ "closed", get_closed, NULL, "Whether it has been closed.", NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

static PyMemberDef handle_members[] = {
	/* Whether the handle's last user closes it. */
	{ "_abandoned", T_BOOL, offsetof(struct rp_handle, abandoned), 0, NULL },
	{ "_pid", T_INT, offsetof(struct rp_handle, pid), READONLY, NULL },
	/* Whether the handle can only be closed. */
	{ "_spoiled", T_BOOL, offsetof(struct rp_handle, spoiled), READONLY, NULL },
	/* Missing until own_queues() has been called. */
	{ "_in_flight", T_OBJECT_EX, offsetof(struct rp_handle, queues), READONLY, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot handle_slots[] = {
	{ Py_tp_new, handle_new },
	{ Py_tp_traverse, handle_traverse },
	{ Py_tp_finalize, rp_finalize_handle },
	{ Py_tp_dealloc, handle_dealloc },
	{ Py_tp_methods, handle_methods },
	{ Py_tp_getset, handle_getset },
	{ Py_tp_members, handle_members },
	{ 0, NULL },
};

/* ---- functions for Python ------------------------------------------------- */

/* importing(): raise ImportError in a second interpreter, or for a second copy of the package. */
static PyObject *importing(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	/*
	 * Handles belong to the process, so only one interpreter may use them. The module's own
	 * init cannot check which interpreter imports it: newer Pythons run init in the main one.
	 */
	if (PyInterpreterState_GetID(PyInterpreterState_Get())) {
		PyErr_SetString(PyExc_ImportError,
				"rdmapost works only in the main interpreter of a process");
		return NULL;
	}
	if (rp_python.open) {
		PyErr_SetString(PyExc_ImportError,
				"rdmapost can be imported only once in a process; it has been, but "
				"its modules were forgotten or belong to another interpreter");
		return NULL;
	}
	Py_RETURN_NONE;
}

/*
 * describe_handles(ClosedError, RdmaError, InUseError, VerbsError, WaitCancelled, failed, ffi,
 * to_number, open, type_of, structs): store these; never released
 */
static PyObject *describe_handles(PyObject *self, PyObject *args)
{
	(void)self;
	if (!PyArg_ParseTuple(args, "OOOOOOOOO!OO!", &rp_errors.closed, &rp_errors.error,
			      &rp_errors.in_use, &rp_errors.verbs, &rp_errors.wait_cancelled,
			      &rp_python.failed, &rp_python.ffi, &rp_python.to_number, &PyDict_Type,
			      &rp_python.open, &rp_python.type_of, &PyDict_Type,
			      &rp_python.structs))
		return NULL;
	/* One reference is returned; the other is kept forever. */
	return Py_NewRef(Py_NewRef(args));
}

/*
 * exiting(closed_all): the interpreter is about to close all handles, or has tried to. Those still
 * open after that are left open: threads that no longer run may hold the locks that a close needs.
 */
static PyObject *exiting(PyObject *self, PyObject *closed_all)
{
	PyObject *listed;

	(void)self;
	rp_exiting = closed_all == Py_True ? RP_CLOSED_ALL : RP_CLOSING_ALL;
	if (rp_exiting != RP_CLOSED_ALL)
		Py_RETURN_NONE;
	listed = PyDict_Values(rp_python.open);
	for (Py_ssize_t i = 0; listed && i < PyList_Size(listed); i++) {
		PyObject *one = PyList_GetItem(listed, i);
		PyObject *handle = rp_is_handle(one) ? Py_NewRef(one) : PyObject_CallNoArgs(one);

		if (handle && rp_is_handle(handle))
			rp_give_up((struct rp_handle *)handle);
		Py_XDECREF(handle);
	}
	Py_XDECREF(listed);
	return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/*
 * admit_children(handles, whether): set whether the handles of a list admit new children. They must
 * not while all of them are being closed, or a thread that keeps creating children would keep them
 * open; nor may a handle whose close is deferred. Runs no Python code.
 */
static PyObject *admit_children(PyObject *self, PyObject *args)
{
	PyObject *handles;
	int admitted;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &handles, &admitted))
		return NULL;
	for (Py_ssize_t i = 0; i < PyList_Size(handles); i++) {
		struct rp_handle *one = (struct rp_handle *)PyList_GetItem(handles, i);

		if (rp_is_handle((PyObject *)one))
			RP_STORE(&one->emptied, !admitted || RP_LOAD(&one->deferred_by));
	}
	Py_RETURN_NONE;
}

/*
 * defer_closes(handles): if this thread is in the middle of a close, close the handles of a list
 * after that close; return whether it is in one.
 */
static PyObject *defer_closes(PyObject *self, PyObject *handles)
{
	(void)self;
	if (!PyList_Check(handles))
		return PyErr_Format(PyExc_TypeError, "not a list of handles");
	if (!rp_thread()->closing)
		Py_RETURN_FALSE;
	for (Py_ssize_t i = 0; i < PyList_Size(handles); i++) {
		PyObject *one = PyList_GetItem(handles, i);

		if (rp_is_handle(one))
			rp_defer_close((struct rp_handle *)one, BY_CALLER);
	}
	Py_RETURN_TRUE;
}

/* in_verb(): whether this thread is in the middle of a verb or a constructor. */
static PyObject *in_verb(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return PyBool_FromLong(rp_in_verb());
}

static PyMethodDef functions[] = {
	{ "importing", importing, METH_NOARGS, NULL },
	{ "describe_handles", describe_handles, METH_VARARGS, NULL },
	{ "exiting", exiting, METH_O, NULL },
	{ "admit_children", admit_children, METH_VARARGS, NULL },
	{ "defer_closes", defer_closes, METH_O, NULL },
	{ "in_verb", in_verb, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

int rp_add_handle(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Handle", sizeof(struct rp_handle),
			   Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, handle_slots, &rp_handle_type) ||
	       PyModule_AddFunctions(module, functions) ? -1 : 0;
}
