/*
 * What has been posted to a queue and not completed yet: the type.
 *
 * rdmapost/inflight.py says what it is good for, and derives the queues that
 * complete in another order.
 */
#include "inflight.h"
#include "ring.h"

#include <structmember.h>

PyObject *rp_in_flight_type;

/* ---- for the other files of the door ------------------------------------ */

int rp_add(struct rp_in_flight *q, PyObject *wr_id, PyObject *refers_to,
	   uint64_t count)
{
	PyObject *done;
	int failed;

	if (q->overridden) {
		done = PyObject_CallMethod((PyObject *)q, "add", "OO", wr_id,
					   refers_to);
		Py_XDECREF(done);
		return done ? 0 : -1;
	}
	RP_BEGIN(q);
	failed = rp_ring_add(q, wr_id, refers_to, count);
	RP_END();
	return failed;
}

struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t ticket)
{
	PyObject *key = PyLong_FromUnsignedLong((unsigned long)(ticket >> 32));
	PyObject *found = key ? PyDict_GetItemWithError(queues, key) : NULL;

	Py_XDECREF(key);
	PyErr_Clear();
	return (struct rp_in_flight *)Py_XNewRef(found);
}

/* Call a method of a subclass; an interrupt comes again afterwards. */
static PyObject *call(struct rp_in_flight *q, const char *name, uint64_t ticket)
{
	PyObject *result = NULL;

	for (int i = 0; i < 9 && !result; i++) {
		result = PyObject_CallMethod((PyObject *)q, name, "K",
					     (unsigned long long)ticket);
		if (!result && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
			PyErr_SetInterrupt();
		PyErr_Clear();
	}
	if (result == Py_None)
		Py_CLEAR(result);
	return result;
}

void rp_match(struct rp_in_flight *q, uint64_t ticket)
{
	Py_XDECREF(call(q, "match", ticket));
}

/* As InFlightAny does it. */
static PyObject *complete_any(struct rp_in_flight *q, PyObject *entries,
			      uint64_t ticket)
{
	PyObject *key = PyLong_FromUnsignedLong((unsigned long)(ticket &
								UINT32_MAX));
	PyObject *entry = key ? PyDict_GetItem(entries, key) : NULL;
	PyObject *wr_id = NULL;

	if (entry) {
		wr_id = Py_NewRef(PyTuple_GetItem(entry, 0));
		PyDict_DelItem(entries, key);
		q->done++;
	}
	Py_XDECREF(key);
	return wr_id;
}

PyObject *rp_complete(struct rp_in_flight *q, uint64_t ticket)
{
	PyObject *wr_id, *entries;

	if (q->overridden && !PyObject_HasAttrString((PyObject *)q, "_matched") &&
	    (entries = PyObject_GetAttrString((PyObject *)q, "_entries"))) {
		wr_id = complete_any(q, entries, ticket);
		Py_DECREF(entries);
		return wr_id;
	}
	PyErr_Clear();
	if (q->overridden)
		return call(q, "complete", ticket);
	RP_BEGIN(q);
	wr_id = rp_ring_complete(q, ticket);
	RP_END();
	return wr_id;
}

void rp_drop_done(struct rp_in_flight *q)
{
	if (!q->overridden) {
		RP_BEGIN(q);
		rp_ring_drop_done(q);
		RP_END();
	}
}

int rp_forget_last(struct rp_in_flight *q, uint64_t count)
{
	PyObject *done;

	if (q->overridden) {
		done = PyObject_CallMethod((PyObject *)q, "forget_last", "K",
					   (unsigned long long)count);
		Py_XDECREF(done);
		return done ? 0 : -1;
	}
	RP_BEGIN(q);
	rp_ring_forget_last(q, count);
	RP_END();
	return 0;
}

/* ---- the type ----------------------------------------------------------- */

static PyObject *in_flight_new(PyTypeObject *type, PyObject *args,
			       PyObject *kwargs)
{
	static uint64_t number;
	struct rp_in_flight *q;

	(void)args;
	(void)kwargs;
	q = (struct rp_in_flight *)PyType_GenericAlloc(type, 0);
	if (!q)
		return NULL;
	q->ring = PyMem_Calloc(1, sizeof(*q->ring));
	if (!q->ring) {
		Py_DECREF(q);
		return PyErr_NoMemory();
	}
	/* No two queues of a process share one. */
	q->base = __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED) << 32;
	return (PyObject *)q;
}

static int in_flight_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	Py_VISIT(Py_TYPE(self));
	for (size_t i = q->ring ? q->ring->dropped : 0;
	     q->ring && i != q->ring->end; i++) {
		Py_VISIT(entry_at(q, i)->wr_id);
		Py_VISIT(entry_at(q, i)->refers_to);
	}
	return 0;
}

static int in_flight_clear(PyObject *self)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	if (q->ring) {
		RP_BEGIN(q);
		rp_ring_clear(q);
		RP_END();
	}
	return 0;
}

static void in_flight_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	in_flight_clear(self);
	if (q->ring)
		PyMem_Free(q->ring->entries);
	PyMem_Free(q->ring);
	release(self);
	Py_DECREF(type);
}

static PyObject *in_flight_add(PyObject *self, PyObject *args)
{
	PyObject *wr_id, *refers_to;
	int failed;

	if (!PyArg_ParseTuple(args, "OO", &wr_id, &refers_to))
		return NULL;
	RP_BEGIN(self);
	failed = rp_ring_add((struct rp_in_flight *)self, wr_id, refers_to, 1);
	RP_END();
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *in_flight_add_list(PyObject *self, PyObject *args)
{
	PyObject *wr_ids, *refers_to;
	Py_ssize_t count;
	int failed = 0;

	if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &wr_ids,
			      &PyList_Type, &refers_to))
		return NULL;
	count = PyList_Size(wr_ids);
	RP_BEGIN(self);
	if (count)
		failed = rp_ring_add((struct rp_in_flight *)self, wr_ids, refers_to,
			     (uint64_t)count);
	RP_END();
	if (failed)
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *in_flight_complete(PyObject *self, PyObject *arg)
{
	uint64_t ticket = PyLong_AsUnsignedLongLong(arg);
	PyObject *wr_id;

	if (ticket == (uint64_t)-1 && PyErr_Occurred())
		return NULL;
	RP_BEGIN(self);
	wr_id = rp_ring_complete((struct rp_in_flight *)self, ticket);
	rp_ring_drop_done((struct rp_in_flight *)self);
	RP_END();
	if (!wr_id && !PyErr_Occurred())
		Py_RETURN_NONE;
	return wr_id;
}

static PyObject *in_flight_forget_last(PyObject *self, PyObject *arg)
{
	uint64_t count = PyLong_AsUnsignedLongLong(arg);

	if (count == (uint64_t)-1 && PyErr_Occurred())
		return NULL;
	RP_BEGIN(self);
	rp_ring_forget_last((struct rp_in_flight *)self, count);
	RP_END();
	Py_RETURN_NONE;
}

static PyObject *in_flight_clear_all(PyObject *self, PyObject *unused)
{
	(void)unused;
	in_flight_clear(self);
	Py_RETURN_NONE;
}

/* [begun, wr_id, refers_to, count, wr_id, ...]: making tuples could run finalizers. */
static PyObject *in_flight_entries(PyObject *self, PyObject *unused)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;
	PyObject *found = NULL;
	size_t count;
	int filled = 0;

	(void)unused;
	while (!filled) {
		count = q->ring->end - q->ring->first;
		Py_XDECREF(found);
		found = PyList_New(1 + 3 * (Py_ssize_t)count);
		if (!found)
			return NULL;
		RP_BEGIN(q);
		filled = count == q->ring->end - q->ring->first;
		for (size_t i = 0; filled && i < count; i++) {
			struct entry *entry = entry_at(q, q->ring->first + i);
			Py_ssize_t at = 1 + 3 * (Py_ssize_t)i;

			PyList_SetItem(found, at, Py_NewRef(entry->wr_id));
			PyList_SetItem(found, at + 1,
				       Py_NewRef(entry->refers_to));
			PyList_SetItem(found, at + 2,
				       PyLong_FromUnsignedLongLong(
					       entry->count));
		}
		PyList_SetItem(found, 0, PyLong_FromUnsignedLongLong(q->begun));
		RP_END();
	}
	if (PyErr_Occurred())
		Py_CLEAR(found);
	return found;
}

static PyObject *in_flight_outstanding(PyObject *self, void *unused)
{
	struct rp_in_flight *q = (struct rp_in_flight *)self;

	(void)unused;
	return PyLong_FromUnsignedLongLong(q->posted - q->done);
}

static PyMethodDef in_flight_methods[] = {
	{ "add", in_flight_add, METH_VARARGS,
	  "Record a work request about to be posted." },
	{ "add_list", in_flight_add_list, METH_VARARGS,
	  "Record a list about to be posted in one piece; it may be empty." },
	{ "complete", in_flight_complete, METH_O,
	  "Retire a work request and all before it; return the caller's "
	  "wr_id.\n\nReturns None for a ticket that is not outstanding." },
	{ "forget_last", in_flight_forget_last, METH_O,
	  "Take back the latest entries: they were not posted after all." },
	{ "clear", in_flight_clear_all, METH_NOARGS,
	  "Forget everything: the queue has been destroyed or reset." },
	{ "entries", in_flight_entries, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyGetSetDef in_flight_getset[] = {
	{ "outstanding", in_flight_outstanding, NULL, NULL, NULL },
	{ NULL, NULL, NULL, NULL, NULL },
};

#define MEMBER(name, type, flags)                                              \
	{ #name, type, offsetof(struct rp_in_flight, name), flags, NULL }
static PyMemberDef in_flight_members[] = {
	MEMBER(posted, T_ULONGLONG, 0),
	MEMBER(done, T_ULONGLONG, 0),
	MEMBER(base, T_ULONGLONG, READONLY),
	MEMBER(handle, T_ULONGLONG, 0),
	MEMBER(overridden, T_BOOL, 0),
	{ NULL, 0, 0, 0, NULL },
};

static PyType_Slot in_flight_slots[] = {
	{ Py_tp_new, in_flight_new },
	{ Py_tp_dealloc, in_flight_dealloc },
	{ Py_tp_traverse, in_flight_traverse },
	{ Py_tp_clear, in_flight_clear },
	{ Py_tp_methods, in_flight_methods },
	{ Py_tp_getset, in_flight_getset },
	{ Py_tp_members, in_flight_members },
	{ 0, NULL },
};

static PyType_Spec in_flight_spec = {
	.name = "rdmapost._verbs.InFlight",
	.basicsize = sizeof(struct rp_in_flight),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = in_flight_slots,
};

int rp_add_in_flight(PyObject *module)
{
	rp_in_flight_type = PyType_FromSpec(&in_flight_spec); /* held for ever */
	return rp_in_flight_type ?
		       PyModule_AddObjectRef(module, "InFlight",
					     rp_in_flight_type) : -1;
}
