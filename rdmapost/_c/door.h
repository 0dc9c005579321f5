/* What the files of the door (door.c) share. */
#ifndef RDMAPOST_DOOR_H
#define RDMAPOST_DOOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <pythread.h>

#include "shim.h"

/* cffi's own init function (build_ffi.py renames it). */
PyObject *rp_cffi_init(void);

/* Where there is no GIL: one thread at a time in what stands between, for an object. */
#ifdef Py_GIL_DISABLED
#define RP_READS_SLOTS 0 /* another thread may set one right now */
#define RP_BEGIN(object) Py_BEGIN_CRITICAL_SECTION((PyObject *)(object))
#define RP_END() Py_END_CRITICAL_SECTION()
#else
#define RP_READS_SLOTS 1
#define RP_BEGIN(object) (void)(object); {
#define RP_END() }
#endif

/* ---- door.c ------------------------------------------------------------- */

/* What an array of PyMethodDef has for a function of that name, METH_FASTCALL. */
#define RP_METHOD(name)                                                        \
	RP_METHOD_NAMED(#name, name)
#define RP_METHOD_NAMED(name, function)                                        \
	{ name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL }

/*
 * Read `count` integers, each in 0..most[i], which all `nargs` arguments must
 * be; 0, or -1 with an exception.
 */
int rp_read_numbers(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t count,
		    const uint64_t *most, uint64_t *into);

/* ---- lock.c: who posts to a queue, or closes it, holds its lock --------- */

struct rp_lock {
	PyObject_HEAD
	unsigned long owner; /* the thread that holds it, or 0 */
	unsigned int forks; /* that there had been when it was last looked at */
#ifdef Py_GIL_DISABLED
	pthread_mutex_t mutex;
#else
	int waiting; /* threads */
	int woken; /* one of these is about to look again */
	PyThread_type_lock given; /* what they sleep on */
#endif
};

extern PyObject *rp_lock_type;

/* Waits without the GIL if it must; 0, or -1 with an exception where this thread has it. */
int rp_take(struct rp_lock *lock);
void rp_give(struct rp_lock *lock);

/* Take it if nobody has it; whether that was so. */
int rp_try(struct rp_lock *lock);
int rp_owns(const struct rp_lock *lock);

/* ---- completions.c: what a completion is in Python ---------------------- */

/* A completion whose work request is retired; it owns its references. */
struct rp_settled {
	struct ibv_wc wc;
	struct ibv_wc_tm_info tm;
	int has_tm;
	PyObject *wr_id; /* the caller's */
	PyObject *made; /* the WC, where it has been made; else NULL */
};

/* Return a new WC, or NULL with an exception. */
PyObject *rp_make_completion(const struct rp_settled *settled);

/* Raise VerbsError; returns NULL. */
PyObject *rp_raise_verbs(const char *verb, int code);

/* ---- slots.c: attributes that a class keeps in __slots__ ---------------- */

struct rp_slot {
	PyObject *name;
	Py_ssize_t offset; /* in the object; 0 where that is not known */
};

/* Find where the objects of a class have it; 0, or -1 with an exception. */
int rp_find_slot(PyObject *type, const char *name, struct rp_slot *slot);

/* Return a new reference to what an object of exactly that class has there, or NULL. */
static inline PyObject *rp_get_slot(PyObject *object,
				    const struct rp_slot *slot)
{
	PyObject *value;

	if (RP_READS_SLOTS && slot->offset)
		return Py_XNewRef(*(PyObject **)(void *)((char *)object +
							 slot->offset));
	value = PyObject_GetAttr(object, slot->name);
	if (!value)
		PyErr_Clear();
	return value;
}

/* Set it, as an assignment does; 0, or -1 with an exception. */
static inline int rp_set_slot(PyObject *object, const struct rp_slot *slot,
			      PyObject *value)
{
	PyObject **at = (PyObject **)(void *)((char *)object + slot->offset);
	PyObject *old;

	if (!RP_READS_SLOTS || !slot->offset)
		return PyObject_SetAttr(object, slot->name, value);
	old = *at;
	*at = Py_NewRef(value);
	Py_XDECREF(old);
	return 0;
}

/* Whether it is a number in 0..most, which is written; NULL is none. */
int rp_to_number(PyObject *value, uint64_t most, uint64_t *number);
int rp_get_number(PyObject *object, const struct rp_slot *slot, uint64_t most,
		  uint64_t *number);

static inline int rp_has_type(PyObject *object, PyObject *type)
{
	return (PyObject *)Py_TYPE(object) == type;
}

/* ---- the types and functions of each file: 0, or -1 with an exception --- */

int rp_add_lock(PyObject *module);
int rp_add_in_flight(PyObject *module);
int rp_add_completions(PyObject *module);
int rp_add_poller(PyObject *module);
int rp_add_wr(PyObject *module);
int rp_add_region(PyObject *module);
int rp_add_handle(PyObject *module);
int rp_add_buffer(PyObject *module);
int rp_add_tag_handle(PyObject *module);
int rp_add_read(PyObject *module);
int rp_add_queue(PyObject *module);
int rp_add_prepared(PyObject *module);
int rp_add_soft_journal(PyObject *module);
int rp_add_soft(PyObject *module);
int rp_add_soft_verb(PyObject *module);

#endif
