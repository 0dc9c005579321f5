/*
 * Posting a prepared list: a type whose post() is all C.
 *
 * Its work requests are packed and linked once.  What a post then does is
 * little: give them their tickets, record them as in flight, and call the
 * verb.  It shares with rdmapost/posting.py the lock of the queue, and with
 * rdmapost/inflight.py a list [posted, done, handle]; the handle is 0 while
 * nothing may be posted.  Whatever is not plain is left to a Python function.
 */
#include "door.h"

#include <pthread.h>
#include <structmember.h>

/* ---- the lock of a queue ------------------------------------------------ */

struct lock {
	PyObject_HEAD
	pthread_mutex_t mutex;
};

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct lock *lock;

	(void)args;
	(void)kwargs;
	lock = (struct lock *)PyType_GenericAlloc(type, 0);
	if (lock)
		pthread_mutex_init(&lock->mutex, NULL);
	return (PyObject *)lock;
}

static void lock_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	pthread_mutex_destroy(&((struct lock *)self)->mutex);
	PyObject_Free(self);
	Py_DECREF(type);
}

static void take(struct lock *lock)
{
	if (!pthread_mutex_trylock(&lock->mutex))
		return;
	Py_BEGIN_ALLOW_THREADS
	pthread_mutex_lock(&lock->mutex);
	Py_END_ALLOW_THREADS
}

static PyObject *lock_acquire(PyObject *self, PyObject *unused)
{
	(void)unused;
	take((struct lock *)self);
	Py_RETURN_NONE;
}

static PyObject *lock_release(PyObject *self, PyObject *unused)
{
	(void)unused;
	pthread_mutex_unlock(&((struct lock *)self)->mutex);
	Py_RETURN_NONE;
}

static PyObject *lock_exit(PyObject *self, PyObject *args)
{
	(void)args;
	return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
	{ "acquire", lock_acquire, METH_NOARGS, NULL },
	{ "release", lock_release, METH_NOARGS, NULL },
	{ "__enter__", lock_acquire, METH_NOARGS, NULL },
	{ "__exit__", lock_exit, METH_VARARGS, NULL },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot lock_slots[] = {
	{ Py_tp_new, lock_new },
	{ Py_tp_dealloc, lock_dealloc },
	{ Py_tp_methods, lock_methods },
	{ 0, NULL },
};

static PyType_Spec lock_spec = {
	.name = "rdmapost._verbs.Lock",
	.basicsize = sizeof(struct lock),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = lock_slots,
};

static PyObject *lock_type;

/* ---- a prepared list ---------------------------------------------------- */

enum { POSTED, DONE, HANDLE };

struct prepared {
	PyObject_HEAD
	struct lock *lock;
	PyObject *counts; /* [posted, done, handle] of the queue */
	PyObject *keep; /* keeps the entry of what is posted */
	PyObject *entry; /* (wr_ids, what they refer to) */
	void *records; /* NULL once it is closed */
	uint64_t base;
	uint64_t count;
	uint64_t room;
	int receives;
};

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

static PyMemberDef prepared_members[] = {
	{ "_entry", T_OBJECT, offsetof(struct prepared, entry), 0, NULL },
	{ NULL, 0, 0, 0, NULL },
};

static int prepared_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	struct prepared *p = (struct prepared *)self;
	unsigned long long records, base, count, room;

	(void)kwargs;
	if (p->lock) {
		PyErr_SetString(PyExc_TypeError, "it has been initialised");
		return -1;
	}
	if (!PyArg_ParseTuple(args, "O!O!OOKKKKp", lock_type, &p->lock,
			      &PyList_Type, &p->counts, &p->keep, &p->entry,
			      &records, &base, &count, &room,
			      &p->receives)) {
		p->lock = NULL;
		p->counts = p->keep = p->entry = NULL;
		return -1;
	}
	Py_INCREF((PyObject *)p->lock);
	Py_INCREF(p->counts);
	Py_INCREF(p->keep);
	Py_INCREF(p->entry);
	p->records = (void *)(uintptr_t)records;
	p->base = base;
	p->count = count;
	p->room = room;
	return 0;
}

static int prepared_traverse(PyObject *self, visitproc visit, void *arg)
{
	struct prepared *p = (struct prepared *)self;

	Py_VISIT(Py_TYPE(self));
	Py_VISIT(p->counts);
	Py_VISIT(p->keep);
	Py_VISIT(p->entry);
	return 0;
}

static int prepared_clear(PyObject *self)
{
	struct prepared *p = (struct prepared *)self;

	Py_CLEAR(p->counts);
	Py_CLEAR(p->keep);
	Py_CLEAR(p->entry);
	return 0;
}

static void prepared_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	PyObject *lock = (PyObject *)((struct prepared *)self)->lock;

	PyObject_GC_UnTrack(self);
	prepared_clear(self);
	Py_XDECREF(lock);
	PyObject_GC_Del(self);
	Py_DECREF(type);
}

/* An item of `counts`; (uint64_t)-1 with an exception. */
static uint64_t counted(struct prepared *p, Py_ssize_t which)
{
	PyObject *item = PyList_GetItem(p->counts, which);

	return item ? PyLong_AsUnsignedLongLong(item) : (uint64_t)-1;
}

/* Post with the lock held; 0, or the shim's result, or -1 where it is not plain. */
static int64_t post_locked(struct prepared *p)
{
	uint64_t posted = counted(p, POSTED), done = counted(p, DONE);
	void *handle = (void *)(uintptr_t)counted(p, HANDLE);
	uint64_t ticket = posted;
	PyObject *kept, *sum;

	if (PyErr_Occurred() || !handle || !p->records ||
	    posted - done + p->count > p->room)
		return -1;
	sum = PyLong_FromUnsignedLongLong(posted + p->count);
	kept = sum ? PyObject_CallFunctionObjArgs(p->keep, p->entry, NULL) : NULL;
	if (!kept) {
		Py_XDECREF(sum);
		return -1;
	}
	Py_DECREF(kept);
	/* It takes the reference, and cannot fail: the item is there. */
	PyList_SetItem(p->counts, POSTED, sum);
	for (struct head *wr = p->records; wr; wr = wr->next)
		wr->wr_id = p->base | (ticket++ & UINT32_MAX);
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
	if (!p->lock || !p->counts) {
		PyErr_SetString(PyExc_ValueError, "it is not prepared");
		return NULL;
	}
	take(p->lock);
	code = post_locked(p);
	/* What was not posted is taken back with the lock held still. */
	if (code > 0)
		answer = failed(self, code);
	pthread_mutex_unlock(&p->lock->mutex);
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
		take(p->lock);
		p->records = NULL;
		pthread_mutex_unlock(&p->lock->mutex);
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

int rp_add_types(PyObject *module)
{
	PyObject *prepared;
	int failed;

	lock_type = PyType_FromSpec(&lock_spec); /* held for ever */
	prepared = PyType_FromSpec(&prepared_spec);
	failed = !lock_type || !prepared ||
		 PyModule_AddObjectRef(module, "Lock", lock_type) ||
		 PyModule_AddObjectRef(module, "Prepared", prepared);
	Py_XDECREF(prepared);
	return failed ? -1 : 0;
}
