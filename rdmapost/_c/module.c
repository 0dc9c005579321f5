/*
 * A second way into the shim, beside cffi, for calls that never block.
 *
 * cffi releases the GIL around every call. Posting and polling never block, and
 * while another thread is busy, reacquiring the GIL takes a thousand times as
 * long as the call, so these functions keep it. They also take a third of the
 * time, because they create no cdata. Addresses come only from rdmapost, never
 * from its callers.
 *
 * The functions are in the module that cffi generates: its own init function is
 * renamed (build_ffi.py), and the one below calls it.
 */
#include "handles/handle.h"

int rp_add_type(PyObject *module, const char *name, size_t size, unsigned int flags,
		PyType_Slot *slots, PyObject **type)
{
	PyType_Spec spec = { name, (int)size, 0, Py_TPFLAGS_DEFAULT | flags, slots };
	PyObject *made = PyType_FromSpec(&spec);
	int failed = !made || PyModule_AddObjectRef(module, strrchr(name, '.') + 1, made);

	if (type)
		*type = made; /* never released */
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
	    (rp_add_handle(module) || rp_add_in_flight(module) ||
	     rp_add_completions(module) || rp_add_poller(module) ||
	     rp_add_wr(module) || rp_add_region(module) ||
	     rp_add_buffer(module) || rp_add_tag_handle(module) ||
	     rp_add_read(module) || rp_add_queue(module) ||
	     rp_add_prepared(module) || rp_add_soft_journal(module) ||
	     rp_add_soft(module) || rp_add_soft_faults(module) ||
	     rp_add_soft_verb(module))) {
		Py_DECREF(module);
		return NULL;
	}
#ifdef Py_GIL_DISABLED
	/* Also tested without a GIL (CONTRIBUTING.md), but not enough to rely on. */
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_USED))
		Py_CLEAR(module);
#endif
	return module;
}
