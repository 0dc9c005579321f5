/*
 * A door into the shim beside cffi, for calls that never block.
 *
 * cffi gives up the GIL around every call.  Posting and polling do not wait
 * for anything, and beside a busy thread getting the GIL back takes a thousand
 * times as long as they do: so these functions keep it.  They also take a
 * third of the time, because they make no cdata.  Addresses come from rdmapost
 * alone, never from its callers.
 *
 * The functions are in the module that cffi makes: its own init function is
 * renamed (build_ffi.py), and the one below calls it.
 */
#include "handle.h"

PyObject *rp_add_type(PyObject *module, PyType_Spec *spec)
{
	PyObject *type = PyType_FromSpec(spec);

	if (type && PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type))
		Py_CLEAR(type);
	return type;
}

PyMODINIT_FUNC PyInit__verbs(void)
{
	PyObject *module = rp_cffi_init();

	if (module &&
	    (rp_add_lock(module) ||
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
