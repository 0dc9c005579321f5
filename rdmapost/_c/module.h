/* What all C files share: words, types, queue locks, completions, __slots__, each file's init. */
#ifndef RDMAPOST_MODULE_H
#define RDMAPOST_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <pythread.h>

#include "libibverbs/shim.h"

/* cffi's own init function (build_ffi.py renames it). */
PyObject *rp_cffi_init(void);

/*
 * Without a GIL, RP_BEGIN and RP_END delimit a critical section on an object, and operations on
 * words are atomic. With a GIL, every thread that touches any of these holds it.
 */
#ifdef Py_GIL_DISABLED
#define RP_READS_SLOTS 0 /* another thread may be writing to one */
#define RP_BEGIN(object) Py_BEGIN_CRITICAL_SECTION((PyObject *)(object))
#define RP_END() Py_END_CRITICAL_SECTION()
#define RP_LOAD(at) __atomic_load_n(at, __ATOMIC_SEQ_CST)
#define RP_STORE(at, value) __atomic_store_n(at, value, __ATOMIC_SEQ_CST)
#define RP_ADD(at, more) __atomic_add_fetch(at, more, __ATOMIC_SEQ_CST)
#else
#define RP_READS_SLOTS 1
#define RP_BEGIN(object) (void)(object); {
#define RP_END() }
#define RP_LOAD(at) (*(at))
#define RP_STORE(at, value) (void)(*(at) = (value))
#define RP_ADD(at, more) (*(at) += (more))
#endif

/* Compare and swap; on failure, *old receives the current value. */
static inline int rp_swap_word(uint64_t *at, uint64_t *old, uint64_t new)
{
#ifdef Py_GIL_DISABLED
	return __atomic_compare_exchange_n(at, old, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
#else
	if (*at != *old) {
		*old = *at;
		return 0;
	}
	*at = new;
	return 1;
#endif
}

/* Return a new reference to a dict's value for a key, or NULL without an exception. */
static inline PyObject *rp_dict_get(PyObject *dict, PyObject *key)
{
	PyObject *found;

#ifdef Py_GIL_DISABLED
	if (PyDict_GetItemRef(dict, key, &found) < 0)
		PyErr_Clear();
#else
	found = Py_XNewRef(PyDict_GetItemWithError(dict, key));
	if (!found)
		PyErr_Clear();
#endif
	return found;
}

/* ---- module.c ------------------------------------------------------------- */

/* A PyMethodDef entry for a METH_FASTCALL function of that name. */
#define RP_METHOD(name)                                                        \
	RP_METHOD_NAMED(#name, name)
#define RP_METHOD_NAMED(name, function)                                        \
	{ name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL }

/*
 * Create a type and add it to the module under the last part of its dotted name. Unless `type`
 * is NULL, store the type there and never release it.
 */
int rp_add_type(PyObject *module, const char *name, size_t size, unsigned int flags,
		PyType_Slot *slots, PyObject **type);

/* End a tp_dealloc: free the memory and drop the reference to the type. */
void rp_free(PyObject *self);

/*
 * ---- queue_lock.c: a queue's lock ----------------------------------------
 *
 * rdmapost runs no Python code while a thread holds one, so waits are short, and a thread tries
 * to acquire one twice only if a device's ibv_post_send calls Python. (The soft device's own lock
 * differs; see soft0/transaction.c.)
 */

struct rp_thread;

struct rp_lock {
	uint64_t owner; /* the owning thread's mark, or 0 */
	int waiting; /* threads */
	unsigned int woken; /* the process in which a woken waiter is about to retry, or 0 */
	PyThread_type_lock given; /* waiters block on it */
};

int rp_init_lock(struct rp_lock *lock); /* 0, or -1 with an exception */
void rp_free_lock(struct rp_lock *lock);

/* Acquire, releasing the GIL to wait; 0, or -1 with an exception if this thread owns the lock. */
int rp_acquire(struct rp_lock *lock);
int rp_owns(const struct rp_lock *lock);

/* ---- wc.c: completions in Python ---------------------------------------- */

/* A completion whose work request is retired; it owns its references. */
struct rp_completion {
	struct rp_completion *next;
	struct ibv_wc wc;
	struct rp_wc_ex more;
	unsigned int has; /* what of `more` is valid, by enum ibv_create_cq_wc_flags */
	PyObject *wr_id; /* the caller's, or NULL for the number in `wc` */
	PyObject *made; /* the WC, once created, else NULL */
};

/* Return a new WC, or NULL with an exception. */
PyObject *rp_make_wc(const struct rp_completion *completion);

/* Whether an object is a WC with all its fields, whatever these are. */
int rp_is_wc(PyObject *object);

/* Raise VerbsError; returns NULL. */
PyObject *rp_raise_verbs(const char *verb, int code);

/* Raise WaitCancelled, which names the CQ. */
void rp_raise_cancelled(PyObject *cq);

/* ---- posting/attribute_offsets.c: attributes stored in __slots__ ------------------- */

struct rp_slot {
	PyObject *name;
	Py_ssize_t offset; /* in the object; 0 if unknown */
};

/* Find a slot's offset in a class's instances; 0, or -1 with an exception. */
int rp_find_slot(PyObject *type, const char *name, struct rp_slot *slot);

/* The slot's address in an instance of exactly that class; NULL if it must be read by name. */
static inline PyObject **rp_slot_at(PyObject *object, const struct rp_slot *slot)
{
	return RP_READS_SLOTS && slot->offset ?
		       (PyObject **)(void *)((char *)object + slot->offset) : NULL;
}

static inline int rp_has_type(PyObject *object, PyObject *type)
{
	return (PyObject *)Py_TYPE(object) == type;
}

static inline int rp_is_instance(PyObject *object, PyObject *type)
{
	return rp_has_type(object, type) ||
	       PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)type);
}

/* Where a tuple has its items; 0 if unknown. */
extern Py_ssize_t rp_tuple_items;
int rp_find_tuple_items(void); /* 0, or -1 with an exception */

/* PyTuple_GetItem() of an item that is there. */
static inline PyObject *rp_item(PyObject *tuple, Py_ssize_t i)
{
	return rp_tuple_items ? ((PyObject **)(void *)((char *)tuple + rp_tuple_items))[i] :
				PyTuple_GetItem(tuple, i);
}

/* Append an item to a list and steal the reference, which may be NULL; 0, or -1 with an exception. */
static inline int rp_append_new(PyObject *list, PyObject *item)
{
	int failed = !item || PyList_Append(list, item);

	Py_XDECREF(item);
	return failed ? -1 : 0;
}

/* Make an instance of a tuple subclass without attributes; steals the items; NULL if one is. */
PyObject *rp_make_tuple(PyObject *type, PyObject *const *items, Py_ssize_t count);

/* ---- methods of the resources (post.c, columns.c, sge.c, cq.c) ------------- */

/* Where a queue pair or SRQ has its queues, by verb (posting/post.h), and a CQ its poller. */
extern struct rp_slot rp_queue_slots[], rp_poller_slot;

PyObject *rp_post_send(PyObject *qp, PyObject *wrs);
PyObject *rp_post_recv(PyObject *qp, PyObject *wrs);
PyObject *rp_post_srq_recv(PyObject *srq, PyObject *wrs);
PyObject *rp_post_srq_ops(PyObject *srq, PyObject *wrs);
#define RP_COLUMNS(name) \
	PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
RP_COLUMNS(rp_post_columns);
RP_COLUMNS(rp_post_recv_columns);
RP_COLUMNS(rp_post_srq_recv_columns);
PyObject *rp_mr_blocks(PyObject *mr, PyObject *const *args, Py_ssize_t nargs);
PyObject *rp_mr_ranges(PyObject *mr, PyObject *const *args, Py_ssize_t nargs);
PyObject *rp_mr_getitem(PyObject *mr, PyObject *bounds);
PyObject *rp_poll_into(PyObject *cq, PyObject *buffer);

/* ---- each file's types and functions: 0, or -1 with an exception ------- */

int rp_add_in_flight(PyObject *module);
int rp_add_wc(PyObject *module);
int rp_add_poller(PyObject *module);
int rp_add_comp_channel(PyObject *module);
int rp_add_wr_init(PyObject *module);
int rp_add_sge(PyObject *module);
int rp_add_handle(PyObject *module);
int rp_add_buffer(PyObject *module);
int rp_add_tag_handle(PyObject *module);
int rp_add_read_wr(PyObject *module);
int rp_add_queue(PyObject *module);
int rp_add_prepared(PyObject *module);
int rp_add_columns(void);
int rp_add_soft_journal(PyObject *module);
int rp_add_soft_data_verbs(PyObject *module);
int rp_add_soft_faults(PyObject *module);
int rp_add_soft_transaction(PyObject *module);
int rp_add_soft_mapped_memory(PyObject *module);
int rp_add_dlpack(PyObject *module);
int rp_add_roce_packets(PyObject *module);

#endif
