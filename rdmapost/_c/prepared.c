/*
 * Posting a prepared list: a type whose post() is all C.
 *
 * Its work requests are packed and linked once.  What a post then does is
 * little: give them their tickets, record them as in flight, and call the
 * verb.  Whatever is not plain is left to a Python function.
 */
#include "door.h"

#include <structmember.h>

/* What send and receive work requests begin with. */
struct head {
	uint64_t wr_id;
	struct head *next;
};
_Static_assert(offsetof(struct ibv_send_wr, next) ==
			       offsetof(struct head, next) &&
		       offsetof(struct ibv_recv_wr, next) ==
			       offsetof(struct head, next),
	       "work requests begin with something else");

struct prepared {
	PyObject_HEAD
	struct rp_lock *lock;
	struct rp_in_flight *in_flight;
	PyObject *wr_ids; /* a list, and one of what each refers to */
	PyObject *refers_to;
	void *records; /* NULL once it is closed */
	struct head **heads; /* each of its work requests */
	uint64_t count;
	uint64_t room;
	int receives;
};

static PyMemberDef prepared_members[] = {
	{ "_wr_ids", T_OBJECT, offsetof(struct prepared, wr_ids), 0, NULL },
	{ "_refers_to", T_OBJECT, offsetof(struct prepared, refers_to), 0,
	  NULL },
	{ NULL, 0, 0, 0, NULL },
};

/* Note where each work request is; 0, or -1 with an exception. */
static int find_heads(struct prepared *p)
{
	struct head *wr = p->records;

	p->heads = PyMem_Calloc(p->count, sizeof(struct head *));
	for (uint64_t i = 0; p->heads && wr && i < p->count; i++) {
		p->heads[i] = wr;
		wr = wr->next;
	}
	if (p->heads && p->count && p->heads[p->count - 1] && !wr)
		return 0;
	p->records = NULL;
	PyErr_SetString(PyExc_ValueError, "the records are not as many");
	return -1;
}

static int prepared_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct prepared *p = (struct prepared *)self;
	PyObject *lock, *in_flight, *wr_ids, *refers_to;
	unsigned long long records, room;

	(void)kwargs;
	if (p->lock) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "O!O!O!O!KKp", rp_lock_type, &lock,
			      rp_in_flight_type, &in_flight, &PyList_Type,
			      &wr_ids, &PyList_Type, &refers_to, &records,
			      &room, &p->receives))
		return -1;
	p->lock = (struct rp_lock *)Py_NewRef(lock);
	p->in_flight = (struct rp_in_flight *)Py_NewRef(in_flight);
	p->wr_ids = Py_NewRef(wr_ids);
	p->refers_to = Py_NewRef(refers_to);
	p->count = (uint64_t)PyList_Size(wr_ids);
	p->records = (void *)(uintptr_t)records;
	p->room = room;
	return find_heads(p);
}

static int prepared_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct prepared *p = (struct prepared *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT((PyObject *)p->in_flight);
	Py_VISIT(p->wr_ids);
	Py_VISIT(p->refers_to);
	return 0;
}

static int prepared_clear(PyObject *self)
{
	struct prepared *p = (struct prepared *)self;

	p->records = NULL;
	Py_CLEAR(p->wr_ids);
	Py_CLEAR(p->refers_to);
	return 0;
}

static void prepared_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	struct prepared *p = (struct prepared *)self;

	PyObject_GC_UnTrack(self);
	prepared_clear(self);
	PyMem_Free(p->heads);
	Py_XDECREF((PyObject *)p->in_flight);
	Py_XDECREF((PyObject *)p->lock);
	PyObject_GC_Del(self);
	Py_DECREF(type);
}

/* Post with the lock held; 0, or the shim's result, or -1 where it is not plain. */
static int64_t post_locked(struct prepared *p)
{
	struct rp_in_flight *q = p->in_flight;
	void *handle = (void *)(uintptr_t)q->handle;
	uint64_t base = q->base, ticket = q->posted;

	if (!handle || !p->records || ticket - q->done + p->count > p->room)
		return -1;
	/* To follow the chain would be slower: each step waits for the one before. */
	for (uint64_t i = 0; i < p->count; i++)
		p->heads[i]->wr_id = base | (ticket++ & UINT32_MAX);
	if (rp_add(q, p->wr_ids, p->refers_to, p->count))
		return -1;
	return p->receives ? rp_post_recv(handle, p->records) :
			     rp_post_send(handle, p->records);
}

/* Let Python say what went wrong: _failed(result), or _failed(None). */
static PyObject *failed(PyObject *self, int64_t code)
{
	if (code < 0)
		return PyObject_CallMethod(self, "_failed", "O", Py_None);
	return PyObject_CallMethod(self, "_failed", "L", (long long)code);
}

static PyObject *prepared_post(PyObject *self, PyObject *unused)
{
	struct prepared *p = (struct prepared *)self;
	PyObject *answer = NULL;
	int64_t code;

	(void)unused;
	if (!p->lock) {
		PyErr_SetString(PyExc_ValueError, "it is not prepared");
		return NULL;
	}
	if (rp_take(p->lock))
		return NULL;
	code = post_locked(p);
	/* What was not posted is taken back with the lock held still. */
	if (code > 0)
		answer = failed(self, code);
	rp_give(p->lock);
	if (!code)
		Py_RETURN_NONE;
	if (code > 0 || PyErr_Occurred())
		return answer;
	return failed(self, code);
}

static PyObject *prepared_drop(PyObject *self, PyObject *unused)
{
	struct prepared *p = (struct prepared *)self;

	(void)unused;
	if (p->lock) {
		if (rp_take(p->lock))
			return NULL;
		p->records = NULL;
		rp_give(p->lock);
	}
	Py_RETURN_NONE;
}

static PyMethodDef prepared_methods[] = {
	{ "post", prepared_post, METH_NOARGS,
	  "Post the whole list.\n\nRaises:\n"
	  "    PostError: a work request was refused, here or by the device.\n"
	  "    ClosedError: the list or its queue pair is closed." },
	{ "_drop", prepared_drop, METH_NOARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot prepared_slots[] = {
	{ Py_tp_init, prepared_init },
	{ Py_tp_dealloc, prepared_dealloc },
	{ Py_tp_traverse, prepared_traverse },
	{ Py_tp_clear, prepared_clear },
	{ Py_tp_members, prepared_members },
	{ Py_tp_methods, prepared_methods },
	{ 0, NULL },
};

static PyType_Spec prepared_spec = {
	.name = "rdmapost._verbs.Prepared",
	.basicsize = sizeof(struct prepared),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
	.slots = prepared_slots,
};

int rp_add_prepared(PyObject *module)
{
	PyObject *prepared = PyType_FromSpec(&prepared_spec);
	int failed = !prepared ||
		     PyModule_AddObjectRef(module, "Prepared", prepared);

	Py_XDECREF(prepared);
	return failed ? -1 : 0;
}
