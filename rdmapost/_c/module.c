/*
 * The module's init function, and the functions that it adds to cffi's; these never block.
 *
 * cffi releases the GIL around every call. Posting and polling never block, and
 * while another thread is busy, reacquiring the GIL takes a thousand times as
 * long as the call, so these functions keep it. They also take only a third of
 * the time, because they create no cdata. Addresses come only from rdmapost,
 * never from its callers.
 *
 * The functions are in the module that cffi generates: its own init function is
 * renamed (build_ffi.py), and the one below calls it.
 */
#include "parts.h"

/* ---- methods of Python classes; their docstrings and signatures are in those classes ---- */

#define WITH_KEYWORDS(name, function)                                                        \
	{ name, (PyCFunction)(void (*)(void))function, METH_FASTCALL | METH_KEYWORDS, NULL }
static struct {
	PyMethodDef method;
	const char *attribute; /* that the method reads */
	struct rp_slot *slot; /* where that attribute is */
} methods[] = {
	{ { "post_send", rp_post_send, METH_O, NULL }, "_send", &rp_queue_slots[0] },
	{ { "post_recv", rp_post_recv, METH_O, NULL }, "_recv", &rp_queue_slots[1] },
	{ { "post_srq_recv", rp_post_srq_recv, METH_O, NULL }, "_recv", &rp_queue_slots[2] },
	{ { "post_srq_ops", rp_post_srq_ops, METH_O, NULL }, "_ops", &rp_queue_slots[3] },
	{ WITH_KEYWORDS("post_columns", rp_post_columns), NULL, NULL },
	{ WITH_KEYWORDS("post_recv_columns", rp_post_recv_columns), NULL, NULL },
	{ WITH_KEYWORDS("post_srq_recv_columns", rp_post_srq_recv_columns), NULL, NULL },
	{ RP_METHOD_NAMED("blocks", rp_mr_blocks), NULL, NULL },
	{ RP_METHOD_NAMED("ranges", rp_mr_ranges), NULL, NULL },
	{ { "__getitem__", rp_mr_getitem, METH_O, NULL }, NULL, NULL },
	{ { "poll_into", rp_poll_into, METH_O, NULL }, "_poller", &rp_poller_slot },
};

/* add_method(type, name, doc): replace a class's method with the one in C; False if C has none. */
static PyObject *add_method(PyObject *self, PyObject *args)
{
	const char *name, *doc;
	size_t i = 0, count = sizeof(methods) / sizeof(methods[0]);
	PyObject *type, *method;
	int failed;

	(void)self;
	if (!PyArg_ParseTuple(args, "O!ss", &PyType_Type, &type, &name, &doc))
		return NULL;
	while (i < count && strcmp(methods[i].method.ml_name, name))
		i++;
	if (i == count)
		Py_RETURN_FALSE;
	if (methods[i].slot && rp_find_slot(type, methods[i].attribute, methods[i].slot))
		return NULL;
	methods[i].method.ml_doc = strdup(doc); /* never freed */
	method = PyDescr_NewMethod((PyTypeObject *)type, &methods[i].method);
	failed = !method || PyObject_SetAttrString(type, name, method);
	Py_XDECREF(method);
	return failed ? NULL : Py_NewRef(Py_True);
}

static PyMethodDef functions[] = {
	{ "add_method", add_method, METH_VARARGS, NULL },
	RP_METHOD_NAMED("get_cq_event", rp_get_cq_event),
	{ "read_dlpack", rp_read_dlpack, METH_O, NULL },
	{ NULL, NULL, 0, NULL },
};

PyMODINIT_FUNC PyInit__verbs(void)
{
	PyObject *module = rp_cffi_init();

	if (module &&
	    (rp_find_tuple_items() || rp_add_threads() || rp_add_exceptions() ||
	     rp_add_handle(module) || rp_add_finalizer(module) ||
	     rp_add_in_flight(module) || rp_add_wc(module) || rp_add_poller(module) ||
	     rp_add_wr_init(module) || rp_add_sge(module) ||
	     rp_add_buffer(module) || rp_add_tag_handle(module) ||
	     rp_add_wr_types(module) || rp_add_read_wr() || rp_add_queue(module) ||
	     rp_add_prepared(module) || rp_add_columns() ||
	     PyModule_AddFunctions(module, functions) ||
	     rp_add_soft_device(module) || rp_add_soft_journal(module) ||
	     rp_add_soft_queue_types(module) || rp_add_soft_fast_path(module) ||
	     rp_add_soft_faults(module) || rp_add_soft_transaction(module) ||
	     rp_add_soft_mapped_memory(module) || rp_add_roce_packets(module))) {
		Py_DECREF(module);
		return NULL;
	}
#ifdef Py_GIL_DISABLED
	/* The tests also pass without a GIL (CONTRIBUTING.md), but that proves too little. */
	if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_USED))
		Py_CLEAR(module);
#endif
	return module;
}
