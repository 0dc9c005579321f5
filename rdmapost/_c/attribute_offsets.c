/*
 * The offsets of attributes stored in __slots__, which C reads directly from memory.
 *
 * Looking an attribute up by name takes ten times as long as reading memory, and a post reads ten
 * attributes. A slot's offset is found by experiment: assign a value the usual way, then search the
 * object for it. If it is not found there, the attribute is looked up by name. The items of a new
 * tuple are likewise written directly, or with PyTuple_SetItem.
 */
#include "attribute_offsets.h"

/* Whether an object has a pointer to `value` at an offset. */
static int holds(PyObject *object, Py_ssize_t offset, PyObject *value)
{
	return *(PyObject **)(void *)((char *)object + offset) == value;
}

static int search(PyObject *object, Py_ssize_t size, struct rp_slot *slot)
{
	PyObject *marker = PyObject_CallObject((PyObject *)&PyBaseObject_Type, NULL);
	int found = 0;

	if (!marker || PyObject_SetAttr(object, slot->name, marker)) {
		Py_XDECREF(marker);
		return -1;
	}
	for (Py_ssize_t at = sizeof(PyObject);
	     at + (Py_ssize_t)sizeof(marker) <= size; at += sizeof(marker)) {
		if (holds(object, at, marker)) {
			slot->offset = at;
			found++;
		}
	}
	Py_DECREF(marker);
	if (PyObject_DelAttr(object, slot->name))
		return -1;
	if (found != 1 || !holds(object, slot->offset, NULL))
		slot->offset = 0;
	return 0;
}

int rp_find_slot(PyObject *type, const char *name, struct rp_slot *slot)
{
	PyObject *object = PyObject_CallMethod(type, "__new__", "(O)", type);
	PyObject *size = PyObject_GetAttrString(type, "__basicsize__");
	int failed = -1;

	slot->name = PyUnicode_InternFromString(name); /* never released */
	if (object && size && slot->name)
		failed = search(object, PyLong_AsSsize_t(size), slot);
	Py_XDECREF(size);
	Py_XDECREF(object);
	return failed;
}

/* ---- tuples ---------------------------------------------------------------- */

Py_ssize_t rp_tuple_items;

int rp_find_tuple_items(void)
{
	PyObject *size = PyObject_GetAttrString((PyObject *)&PyTuple_Type, "__basicsize__");
	Py_ssize_t at = size ? PyLong_AsSsize_t(size) : 0;
	PyObject *tuple = size ? PyTuple_Pack(1, size) : NULL;

	/* From Python 3.14 on, a tuple's hash comes before its items. */
	if (tuple && at >= (Py_ssize_t)sizeof(PyVarObject) && holds(tuple, at, size))
		rp_tuple_items = at;
	Py_XDECREF(tuple);
	Py_XDECREF(size);
	return tuple ? 0 : -1;
}

PyObject *rp_make_tuple(PyObject *type, PyObject *const *items, Py_ssize_t count)
{
	PyObject *tuple = NULL;
	int whole = 1;

	/* Python's own empty tuple: from 3.14 on, deallocating any other empty tuple crashes. */
	if (!count)
		return PyTuple_New(0);
	for (Py_ssize_t i = 0; i < count; i++)
		whole = whole && items[i];
	/* Nothing else runs, not even the collector, from here until the tuple is complete. */
	if (whole && type == (PyObject *)&PyTuple_Type)
		tuple = PyTuple_New(count); /* from Python's free list */
	else if (whole)
		tuple = PyType_GenericAlloc((PyTypeObject *)type, count);
	if (!tuple) {
		for (Py_ssize_t i = 0; i < count; i++)
			Py_XDECREF(items[i]);
		return NULL;
	}
	if (!rp_tuple_items) {
		for (Py_ssize_t i = 0; i < count; i++)
			PyTuple_SetItem(tuple, i, items[i]);
		return tuple;
	}
	for (size_t at = sizeof(PyVarObject); at < (size_t)rp_tuple_items; at += sizeof(Py_hash_t))
		*(Py_hash_t *)(void *)((char *)tuple + at) = -1; /* no hash yet */
	memcpy((char *)tuple + rp_tuple_items, items, (size_t)count * sizeof(*items));
	return tuple;
}
