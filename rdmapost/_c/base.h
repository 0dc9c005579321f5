/* Included by every C file: integers that threads share, and helpers for objects and types. */
#ifndef RDMAPOST_BASE_H
#define RDMAPOST_BASE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <pythread.h>

#include "libibverbs/shim.h"

/* With some headers of CPython 3.12 and 3.13, these would take no reference, which 3.11 needs. */
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)

/*
 * Declares a variable defined in another file; hidden visibility lets code read it without the GOT.
 */
#define RP_SHARED extern __attribute__((visibility("hidden")))

/*
 * Without a GIL, RP_BEGIN and RP_END delimit a critical section on an object, and operations on
 * words are atomic. With a GIL, every thread that touches these objects or words holds the GIL.
 */
#ifdef Py_GIL_DISABLED
#define RP_READS_SLOTS 0 /* another thread may be writing to a slot */
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

static inline int rp_has_type(PyObject *object, PyObject *type)
{
	return (PyObject *)Py_TYPE(object) == type;
}

static inline int rp_is_instance(PyObject *object, PyObject *type)
{
	return rp_has_type(object, type) ||
	       PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)type);
}

/* Append an item to a list and steal the reference, which may be NULL; 0, or -1 with an exception. */
static inline int rp_append_new(PyObject *list, PyObject *item)
{
	int failed = !item || PyList_Append(list, item);

	Py_XDECREF(item);
	return failed ? -1 : 0;
}

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

#endif
