/* Finalizers written in Python, which a signal handler may interrupt. */
#include "handles/internal.h"

/*
 * Call _finalize() until it completes: a signal handler may raise in the middle of it, and a
 * __del__ would lose that exception, so it is raised later, in the main thread. An exception that
 * recurs on every attempt is not a handler's. At exit, when modules may have been cleared,
 * exceptions mean nothing: the kernel closes what is left.
 */
static void finalizer_finalize(PyObject *self)
{
	struct rp_error error = rp_save_error(), first = { NULL, NULL, NULL };
	PyObject *done = NULL;

	for (int i = 0; !done && i < MAX_INTERRUPTS; i++) {
		done = PyObject_CallMethod(self, "_finalize", NULL);
		if (!done && PyErr_ExceptionMatches(PyExc_Warning)) {
			PyErr_WriteUnraisable(self);
			done = Py_NewRef(Py_None);
		}
		if (!done && !first.type)
			first = rp_save_error();
		PyErr_Clear();
	}
	rp_restore_error(first);
	if (done && PyErr_Occurred())
		rp_handler_raised();
	else if (!done && rp_exiting != RP_CLOSED_ALL)
		PyErr_WriteUnraisable(self);
	PyErr_Clear();
	Py_XDECREF(done);
	rp_deliver_soon();
	rp_restore_error(error);
}

static PyType_Slot finalizer_slots[] = {
	{ Py_tp_finalize, finalizer_finalize },
	{ 0, NULL },
};

/*
 * Finalizing(finalizer, bind): a subclass's __del__, which calls the subclass's finalizer and then
 * rp_finalize_handle(), even if a signal handler raises before the finalizer has begun. `bind` is
 * types.MethodType.
 */
struct finalizing {
	PyObject_HEAD
	PyObject *finalizer, *bind;
};

static PyObject *finalizing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *finalizer, *bind;
	struct finalizing *f;

	(void)kwargs;
	if (!PyArg_ParseTuple(args, "OO", &finalizer, &bind))
		return NULL;
	f = (struct finalizing *)PyType_GenericAlloc(type, 0);
	if (f) {
		f->finalizer = Py_NewRef(finalizer);
		f->bind = Py_NewRef(bind);
	}
	return (PyObject *)f;
}

static PyObject *finalizing_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
	/* The collector may clear the member during the call. */
	PyObject *finalizer = Py_XNewRef(((struct finalizing *)self)->finalizer);
	PyObject *result = finalizer ? PyObject_Call(finalizer, args, kwargs) : Py_NewRef(Py_None);
	PyObject *resource = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;

	if (resource && rp_is_handle(resource)) {
		struct rp_error error = rp_save_error();

		rp_finalize_handle(resource);
		rp_restore_error(error);
	}
	Py_XDECREF(finalizer);
	return result;
}

static PyObject *finalizing_get(PyObject *self, PyObject *resource, PyObject *type)
{
	(void)type;
	if (!resource || !((struct finalizing *)self)->bind)
		return Py_NewRef(self);
	return PyObject_CallFunctionObjArgs(((struct finalizing *)self)->bind, self, resource, NULL);
}

static int finalizing_traverse(PyObject *self, visitproc visit, void *arg)
{
	Py_VISIT(Py_TYPE(self));
	Py_VISIT(((struct finalizing *)self)->finalizer);
	Py_VISIT(((struct finalizing *)self)->bind);
	return 0;
}

static int finalizing_clear(PyObject *self)
{
	Py_CLEAR(((struct finalizing *)self)->finalizer);
	Py_CLEAR(((struct finalizing *)self)->bind);
	return 0;
}

static void finalizing_dealloc(PyObject *self)
{
	PyObject_GC_UnTrack(self);
	finalizing_clear(self);
	rp_free(self);
}

static PyType_Slot finalizing_slots[] = {
	{ Py_tp_new, finalizing_new },
	{ Py_tp_call, finalizing_call },
	{ Py_tp_descr_get, finalizing_get },
	{ Py_tp_traverse, finalizing_traverse },
	{ Py_tp_clear, finalizing_clear },
	{ Py_tp_dealloc, finalizing_dealloc },
	{ 0, NULL },
};

int rp_add_finalizer(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Finalizing", sizeof(struct finalizing),
			   Py_TPFLAGS_HAVE_GC, finalizing_slots, NULL) ||
	       rp_add_type(module, "rdmapost._verbs.Finalizer", sizeof(PyObject),
			   Py_TPFLAGS_BASETYPE, finalizer_slots, NULL) ? -1 : 0;
}
