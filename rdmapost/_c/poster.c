/*
 * The short way of a post: one call that looks, records and hands over.
 *
 * All of it happens with the queue's lock held.  Of a list with anything that
 * is not plainly right (plain.c) nothing is posted: the long way, in
 * rdmapost/posting.py, looks at all of it and can say what is wrong.
 */
#include "plain.h"

enum { MOST_PUT = 16 };

static const struct kind *kind_of(const struct poster *p, PyObject *type)
{
	for (int i = 0; i < rp_kinds_known; i++)
		if (type == rp_kinds[i].type)
			return p->takes[i] ? &rp_kinds[i] : NULL;
	return NULL;
}

/* Write and record one work request; 0 where it is not plain, -1 with an exception. */
static int take(struct poster *p, PyObject *wr)
{
	struct rp_in_flight *q = p->in_flight;
	const struct kind *kind = kind_of(p, (PyObject *)Py_TYPE(wr));
	PyObject *wr_id = NULL, *refers_to = NULL;
	int taken;

	if (!kind)
		return 0;
	taken = rp_put(p, kind, wr, &wr_id, &refers_to);
	if (taken && rp_add(q, wr_id, refers_to, 1))
		taken = -1;
	Py_XDECREF(wr_id);
	Py_XDECREF(refers_to);
	return PyErr_Occurred() ? -1 : taken;
}

static int64_t submit(struct poster *p, uint32_t count)
{
	void *handle = (void *)(uintptr_t)p->in_flight->handle;

	if (p->verb == SEND)
		return rp_submit_send(handle, p->records, p->used, count);
	if (p->verb == RECV)
		return rp_submit_recv(handle, p->records, p->used, count);
	return rp_submit_srq_recv(handle, p->records, p->used, count);
}

/* Take back what has been recorded; an exception may be on its way. */
static void forget(struct rp_in_flight *q, uint64_t count)
{
	PyObject *type, *value, *trace;

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
	/* Newer Pythons have another call, which the limited API of 3.11 has not. */
	PyErr_Fetch(&type, &value, &trace);
	rp_forget_last(q, count);
	PyErr_Restore(type, value, trace);
#pragma GCC diagnostic pop
}

/* Post with the lock held: 1, or 0 where something is not plain, or -1 with an exception. */
static int post_locked(struct poster *p, PyObject *wrs, PyObject *owner)
{
	struct rp_in_flight *q = p->in_flight;
	int many = PyList_CheckExact(wrs) || PyTuple_CheckExact(wrs);
	Py_ssize_t count = many ? PySequence_Size(wrs) : 1, i;
	PyObject *done;
	int64_t result;
	int taken = 1;

	if (!q->handle || count < 1 || count > INT32_MAX ||
	    q->posted - q->done + (uint64_t)count > p->room)
		return 0;
	p->used = 0;
	for (i = 0; i < count && taken > 0; i++) {
		PyObject *wr = many ? PySequence_GetItem(wrs, i) :
				      Py_NewRef(wrs);

		taken = wr ? take(p, wr) : -1;
		Py_XDECREF(wr);
	}
	if (taken < 1) {
		forget(q, (uint64_t)i - 1);
		return taken;
	}
	result = submit(p, (uint32_t)count);
	if (!result)
		return 1;
	done = PyObject_CallMethod((PyObject *)p, "_refused", "LOO",
				   (long long)result, wrs, owner);
	Py_XDECREF(done);
	return done ? 1 : -1;
}

/* post_plain(wrs, owner): whether they were posted; `owner` explains a refusal. */
static PyObject *post_plain(PyObject *self, PyObject *const *args,
			    Py_ssize_t nargs)
{
	struct poster *p = (struct poster *)self;
	int posted;

	if (nargs != 2 || !p->lock) {
		PyErr_SetString(PyExc_TypeError, "post_plain(wrs, owner)");
		return NULL;
	}
	if (rp_take(p->lock))
		return NULL;
	posted = post_locked(p, args[0], args[1]);
	rp_give(p->lock);
	return posted < 0 ? NULL : PyBool_FromLong(posted);
}

/* put_plain(type, sges, at): whether they were written at the address. */
static PyObject *put_plain(PyObject *self, PyObject *args)
{
	struct poster *p = (struct poster *)self;
	struct ibv_sge sge[MOST_PUT];
	const struct kind *kind;
	unsigned long long at;
	PyObject *type, *sges;
	Py_ssize_t count = 1;
	int right;

	if (!PyArg_ParseTuple(args, "OO!K", &type, &PyTuple_Type, &sges, &at))
		return NULL;
	kind = kind_of(p, type);
	if (PyTuple_CheckExact(sges))
		count = PyTuple_Size(sges);
	right = kind && count <= MOST_PUT &&
		rp_put_sges(p, kind, sges, sge, (int)count);
	if (right)
		memcpy((void *)(uintptr_t)at, sge, (size_t)count * sizeof(*sge));
	return PyBool_FromLong(right);
}

/* ---- the type ----------------------------------------------------------- */

static int take_ways(struct poster *p, PyObject *ways)
{
	for (Py_ssize_t i = 0; i < PyTuple_Size(ways); i++) {
		int index;
		unsigned int flags;

		if (!PyArg_ParseTuple(PyTuple_GetItem(ways, i), "iI", &index,
				      &flags))
			return -1;
		if (index < 0 || index >= rp_kinds_known ||
		    rp_kinds[index].has_flags != (p->verb == SEND)) {
			PyErr_SetString(PyExc_ValueError, "another queue's");
			return -1;
		}
		p->takes[index] = 1;
		p->flags[index] = flags;
	}
	return 0;
}

static int poster_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct poster *p = (struct poster *)self;
	PyObject *lock, *in_flight, *pd, *ways;
	unsigned long long room, most;

	(void)kwargs;
	if (p->lock) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "O!O!iKppOKiO!", rp_lock_type, &lock,
			      rp_in_flight_type, &in_flight, &p->verb, &room,
			      &p->checked, &p->datagram, &pd, &most,
			      &p->max_sge, &PyTuple_Type, &ways) ||
	    take_ways(p, ways))
		return -1;
	p->room = room;
	p->most = most;
	p->pd = Py_NewRef(pd);
	p->in_flight = (struct rp_in_flight *)Py_NewRef(in_flight);
	p->lock = (struct rp_lock *)Py_NewRef(lock);
	return 0;
}

static int poster_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct poster *p = (struct poster *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(p->in_flight);
	Py_VISIT(p->pd);
	return 0;
}

static void poster_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct poster *p = (struct poster *)self;
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	PyObject_GC_UnTrack(self);
	Py_XDECREF((PyObject *)p->in_flight);
	Py_XDECREF((PyObject *)p->lock);
	Py_XDECREF(p->pd);
	PyMem_Free(p->records);
	release(self);
	Py_DECREF(type);
}

static PyMethodDef poster_methods[] = {
	RP_METHOD(post_plain),
	{ "put_plain", put_plain, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot poster_slots[] = {
	{ Py_tp_init, poster_init },
	{ Py_tp_dealloc, poster_dealloc },
	{ Py_tp_traverse, poster_traverse },
	{ Py_tp_methods, poster_methods },
	{ 0, NULL },
};

static PyType_Spec poster_spec = {
	.name = "rdmapost._verbs.Poster",
	.basicsize = sizeof(struct poster),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = poster_slots,
};

int rp_add_poster(PyObject *module)
{
	PyObject *poster = PyType_FromSpec(&poster_spec);
	int failed = !poster ||
		     PyModule_AddObjectRef(module, "Poster", poster);

	Py_XDECREF(poster);
	return failed ? -1 : 0;
}
