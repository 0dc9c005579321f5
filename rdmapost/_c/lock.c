/*
 * The lock of a queue: whoever posts to it holds it, and whoever closes it.
 *
 * A prepared post takes some twenty nanoseconds, and a mutex would add ten.  So it is one word,
 * and for those who wait something to sleep on.
 */
#include "handle.h"

PyObject *rp_lock_type;

int rp_owns(const struct rp_lock *lock)
{
	return RP_LOAD(&lock->owner) == rp_thread()->mark;
}

int rp_try(struct rp_lock *lock)
{
	return rp_try_for(lock, rp_thread());
}

int rp_take(struct rp_lock *lock)
{
	int taken = rp_try(lock);

	if (!taken && rp_owns(lock)) {
		/* Waiting for oneself would last for ever. */
		PyErr_SetString(PyExc_RuntimeError,
				"this thread is in the middle of a post to the same queue; a finalizer, "
				"say, cannot post to it or close it");
		return -1;
	}
	if (taken)
		return 0;
	/* Whoever gives it after this sees that somebody waits. */
	RP_ADD(&lock->waiting, 1);
	while (!rp_try(lock)) {
		Py_BEGIN_ALLOW_THREADS
		PyThread_acquire_lock(lock->given, WAIT_LOCK);
		Py_END_ALLOW_THREADS
		RP_STORE(&lock->woken, 0);
	}
	RP_ADD(&lock->waiting, -1);
	return 0;
}

void rp_wake(struct rp_lock *lock)
{
	unsigned int process = (unsigned int)(rp_thread()->mark >> 32), woken;

#ifdef Py_GIL_DISABLED
	woken = __atomic_exchange_n(&lock->woken, process, __ATOMIC_SEQ_CST);
#else
	woken = lock->woken;
	lock->woken = process;
#endif
	if (woken != process)
		PyThread_release_lock(lock->given);
}

void rp_give(struct rp_lock *lock)
{
	rp_give_quickly(lock);
}

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	struct rp_lock *lock = (struct rp_lock *)PyType_GenericAlloc(type, 0);

	(void)args;
	(void)kwargs;
	if (!lock)
		return NULL;
	lock->given = PyThread_allocate_lock();
	if (!lock->given) {
		Py_DECREF((PyObject *)lock);
		return PyErr_NoMemory();
	}
	/* Nobody has given it yet. */
	PyThread_acquire_lock(lock->given, WAIT_LOCK);
	return (PyObject *)lock;
}

static void lock_dealloc(PyObject *self)
{
	struct rp_lock *lock = (struct rp_lock *)self;

	if (lock->given)
		PyThread_free_lock(lock->given);
	rp_free(self);
}

static PyObject *lock_acquire(PyObject *self, PyObject *unused)
{
	(void)unused;
	return rp_take((struct rp_lock *)self) ? NULL : Py_NewRef(Py_None);
}

static PyObject *lock_exit(PyObject *self, PyObject *args)
{
	(void)args;
	rp_give((struct rp_lock *)self);
	Py_RETURN_NONE;
}

/* wait(): until whoever has it gives it back. */
static PyObject *lock_wait(PyObject *self, PyObject *unused)
{
	PyObject *taken = lock_acquire(self, unused);

	if (taken)
		rp_give((struct rp_lock *)self);
	return taken;
}

static PyMethodDef lock_methods[] = {
	{ "wait", lock_wait, METH_NOARGS, NULL },
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

int rp_add_lock(PyObject *module)
{
	return rp_add_type(module, "rdmapost._verbs.Lock", sizeof(struct rp_lock), 0,
			   lock_slots, &rp_lock_type);
}
