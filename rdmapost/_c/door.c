/*
 * A small door into the shim beside cffi, for calls that never block.
 *
 * cffi gives up the GIL around every call.  Posting and polling do not wait
 * for anything, and beside a busy thread getting the GIL back takes a thousand
 * times as long as they do: so these functions keep it.  They also take a
 * third of the time, because they take numbers and no cdata.  Addresses come
 * from rdmapost alone, never from its callers.
 *
 * The functions are in the module that cffi makes: its own init function is
 * renamed (build_ffi.py), and the one below calls it.
 */
#include "handle.h"

int rp_read_numbers(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t count,
		    const uint64_t *most, uint64_t *into)
{
	if (nargs != count) {
		PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
		return -1;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		into[i] = PyLong_AsUnsignedLongLong(args[i]);
		if (into[i] == (uint64_t)-1 && PyErr_Occurred())
			return -1;
		if (into[i] > most[i]) {
			PyErr_SetString(PyExc_OverflowError, "out of range");
			return -1;
		}
	}
	return 0;
}

#define U64 UINT64_MAX
#define COUNT(array) (sizeof(array) / sizeof(array[0]))
#define READ(types)                                                            \
	uint64_t n[COUNT(types)];                                              \
	(void)self;                                                            \
	if (rp_read_numbers(args, nargs, COUNT(types), types, n))              \
		return NULL

#define FUNCTION(name)                                                         \
	static PyObject *name(PyObject *self, PyObject *const *args,           \
			      Py_ssize_t nargs)


/* A completion channel that does not block: 0, or an errno. */
FUNCTION(drop_event)
{
	static const uint64_t most[] = { U64 };
	struct ibv_cq *cq;
	void *context;

	READ(most);
	if (ibv_get_cq_event((void *)(uintptr_t)n[0], &cq, &context))
		return PyLong_FromLong(errno);
	ibv_ack_cq_events(cq, 1);
	return PyLong_FromLong(0);
}

static PyMethodDef functions[] = {
	RP_METHOD(drop_event),
	{ NULL, NULL, 0, NULL },
};

int rp_add_type(PyObject *module, const char *name, size_t size, unsigned int flags,
		PyType_Slot *slots, PyObject **type)
{
	PyType_Spec spec = { name, (int)size, 0, Py_TPFLAGS_DEFAULT | flags, slots };
	PyObject *made = PyType_FromSpec(&spec);
	int failed = !made || PyModule_AddObjectRef(module, strrchr(name, '.') + 1, made);

	if (type)
		*type = made; /* held for ever */
	else
		Py_XDECREF(made);
	return failed ? -1 : 0;
}

void rp_free(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

PyMODINIT_FUNC PyInit__verbs(void)
{
	PyObject *module = rp_cffi_init();

	if (module &&
	    (PyModule_AddFunctions(module, functions) || rp_add_lock(module) ||
	     rp_add_handle(module) || rp_add_in_flight(module) ||
	     rp_add_completions(module) || rp_add_poller(module) ||
	     rp_add_wr(module) || rp_add_region(module) ||
	     rp_add_buffer(module) || rp_add_tag_handle(module) ||
	     rp_add_read(module) || rp_add_queue(module) ||
	     rp_add_prepared(module) || rp_add_soft_journal(module) ||
	     rp_add_soft_queue(module) || rp_add_soft_verb(module))) {
		Py_DECREF(module);
		return NULL;
	}
	return module;
}
