/*
 * The lock of a queue: whoever posts to it holds it, and whoever closes it.
 *
 * A prepared post takes some twenty nanoseconds, and a mutex would add ten.
 * Where there is a GIL, whoever takes the lock or gives it holds that, so a
 * flag is enough, and for those who wait something to sleep on.
 */
#include "door.h"

#include <pthread.h>

PyObject *rp_lock_type;

static unsigned int forks;

static void after_fork(void)
{
	forks++;
}

static unsigned long this_thread(void)
{
	return (unsigned long)pthread_self();
}

int rp_owns(const struct rp_lock *lock)
{
	return __atomic_load_n(&lock->owner, __ATOMIC_RELAXED) == this_thread();
}

/* Waiting for oneself would last for ever; 0, or -1 with an exception. */
static int is_own(const struct rp_lock *lock)
{
	if (!rp_owns(lock))
		return 0;
	PyErr_SetString(PyExc_RuntimeError,
			"this thread is in the middle of a post to the same "
			"queue; a finalizer, say, cannot post to it or close it");
	return -1;
}

#ifdef Py_GIL_DISABLED

static int make(struct rp_lock *lock)
{
	lock->forks = forks;
	return pthread_mutex_init(&lock->mutex, NULL);
}

static void destroy(struct rp_lock *lock)
{
	pthread_mutex_destroy(&lock->mutex);
}

/* After a fork, other threads that held it or waited for it do not exist. */
static void renew(struct rp_lock *lock)
{
	if (__atomic_load_n(&lock->forks, __ATOMIC_RELAXED) == forks)
		return;
	make(lock);
	lock->owner = 0;
}

int rp_try(struct rp_lock *lock)
{
	if (rp_owns(lock))
		return 0;
	renew(lock);
	if (pthread_mutex_trylock(&lock->mutex))
		return 0;
	__atomic_store_n(&lock->owner, this_thread(), __ATOMIC_RELAXED);
	return 1;
}

int rp_take(struct rp_lock *lock)
{
	if (is_own(lock))
		return -1;
	if (rp_try(lock))
		return 0;
	Py_BEGIN_ALLOW_THREADS
	pthread_mutex_lock(&lock->mutex);
	Py_END_ALLOW_THREADS
	__atomic_store_n(&lock->owner, this_thread(), __ATOMIC_RELAXED);
	return 0;
}

void rp_give(struct rp_lock *lock)
{
	__atomic_store_n(&lock->owner, 0, __ATOMIC_RELAXED);
	pthread_mutex_unlock(&lock->mutex);
}

#else

static int make(struct rp_lock *lock)
{
	lock->forks = forks;
	lock->given = PyThread_allocate_lock();
	if (!lock->given)
		return -1;
	/* Nobody has given it yet. */
	PyThread_acquire_lock(lock->given, WAIT_LOCK);
	return 0;
}

static void destroy(struct rp_lock *lock)
{
	if (lock->given)
		PyThread_free_lock(lock->given);
}

/* After a fork, other threads that held it or waited for it do not exist. */
static void renew(struct rp_lock *lock)
{
	lock->forks = forks;
	lock->waiting = lock->woken = 0;
	if (!rp_owns(lock))
		lock->owner = 0;
}

int rp_try(struct rp_lock *lock)
{
	if (lock->forks != forks)
		renew(lock);
	if (lock->owner)
		return 0;
	lock->owner = this_thread();
	return 1;
}

int rp_take(struct rp_lock *lock)
{
	while (!rp_try(lock)) {
		if (is_own(lock))
			return -1;
		lock->waiting++;
		Py_BEGIN_ALLOW_THREADS
		PyThread_acquire_lock(lock->given, WAIT_LOCK);
		Py_END_ALLOW_THREADS
		lock->waiting--;
		lock->woken = 0;
	}
	return 0;
}

void rp_give(struct rp_lock *lock)
{
	lock->owner = 0;
	if (lock->waiting && !lock->woken) {
		lock->woken = 1;
		PyThread_release_lock(lock->given);
	}
}

#endif

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	PyObject *lock;

	(void)args;
	(void)kwargs;
	lock = PyType_GenericAlloc(type, 0);
	if (lock && make((struct rp_lock *)lock)) {
		Py_CLEAR(lock);
		PyErr_NoMemory();
	}
	return lock;
}

static void lock_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	destroy((struct rp_lock *)self);
	PyObject_Free(self);
	Py_DECREF(type);
}

static PyObject *lock_acquire(PyObject *self, PyObject *unused)
{
	(void)unused;
	if (rp_take((struct rp_lock *)self))
		return NULL;
	Py_RETURN_NONE;
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
	(void)unused;
	if (rp_take((struct rp_lock *)self))
		return NULL;
	rp_give((struct rp_lock *)self);
	Py_RETURN_NONE;
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

static PyType_Spec lock_spec = {
	.name = "rdmapost._verbs.Lock",
	.basicsize = sizeof(struct rp_lock),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = lock_slots,
};

int rp_add_lock(PyObject *module)
{
	if (pthread_atfork(NULL, NULL, after_fork)) {
		PyErr_NoMemory();
		return -1;
	}
	rp_lock_type = PyType_FromSpec(&lock_spec); /* held for ever */
	return rp_lock_type ? PyModule_AddObjectRef(module, "Lock",
						    rp_lock_type) : -1;
}
