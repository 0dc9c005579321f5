/* What the files of the door (door.c) share. */
#ifndef RDMAPOST_DOOR_H
#define RDMAPOST_DOOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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
	{ #name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL }

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
#ifdef Py_GIL_DISABLED
	PyMutex mutex;
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

/* ---- inflight.c: what is posted and not known to be done ---------------- */

struct ring;

struct rp_in_flight {
	PyObject_HEAD
	uint64_t posted; /* work requests so far */
	uint64_t done; /* of these */
	uint64_t base; /* the queue's part of a ticket; the other is the count */
	uint64_t handle; /* the queue's struct, or 0 while it takes none */
	uint64_t begun; /* work requests of the first entry that are done */
	struct ring *ring;
	char overridden; /* a subclass has its own methods */
};

extern PyObject *rp_in_flight_type;

static inline uint64_t rp_ticket(const struct rp_in_flight *q, uint64_t ahead)
{
	return q->base | ((q->posted + ahead) & UINT32_MAX);
}

/* Record what is about to be posted; 0, or -1 with an exception. */
int rp_add(struct rp_in_flight *q, PyObject *wr_id, PyObject *refers_to,
	   uint64_t count);

/* Take the latest back; 0, or -1 with an exception. */
int rp_forget_last(struct rp_in_flight *q, uint64_t count);

/*
 * Retire a work request and, in order, all before it.  Returns the caller's
 * wr_id, or NULL where the ticket is not outstanding; without an exception,
 * unless a subclass raised it.
 */
PyObject *rp_complete(struct rp_in_flight *q, uint64_t ticket);

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
int rp_add_wr(PyObject *module);
int rp_add_region(PyObject *module);
int rp_add_kinds(PyObject *module);
int rp_add_poster(PyObject *module);
int rp_add_prepared(PyObject *module);
int rp_add_field(PyObject *module);
int rp_add_soft_journal(PyObject *module);
int rp_add_soft_queue(PyObject *module);
int rp_add_soft_verb(PyObject *module);

#endif
